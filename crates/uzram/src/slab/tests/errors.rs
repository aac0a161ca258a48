//! Misuse of caches: it is found, the error names the cache, the object and the fault, and no other object is
//! harmed.
//!
//! Debug builds find all of it. To print what release builds find, run
//! `cargo test --release -p uzram --lib slab::tests::errors -- --show-output`.

use super::objects::{Objects, bytes_of};
use super::*;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::random::Random;
use crate::slab::Sheaves;

for_every_policy!(
    what_is_freed_twice_is_found,
    numbers_of_no_object_in_use_are_found,
    objects_of_slabs_that_are_gone_are_found,
    a_write_to_a_free_object_is_found,
    a_damaged_link_is_found,
    objects_in_use_at_the_end_are_reported,
);

const SHAPES: [(usize, usize); 3] = [(8, 8), (24, 8), (704, 8)];

/// A cache with some objects in use and some freed in several ways.
struct Fixture<P: Policy> {
    what: &'static str,
    objects: Objects<P>,
    kind: bool,
    freed: Vec<u32>,
    found: usize,
    missed: usize,
    /// Whether corruption has lost objects, so that not all memory comes back.
    lossy: bool,
}

/// Runs a test for each shape, with and without restartable sequences.
fn for_each_fixture<P: Policy>(what: &'static str, test: impl Fn(&mut Fixture<P>)) {
    let cpus = allowed_cpus();
    for shape in SHAPES {
        for kind in kinds() {
            let _context = Context(format!("{shape:?}, {kind:?}"));
            sched_setaffinity(None, &cpus[0]).unwrap();
            let mut fixture = Fixture::<P>::new(what, shape, kind);
            test(&mut fixture);
            fixture.finish();
        }
    }
}

impl<P: Policy> Fixture<P> {
    fn new(what: &'static str, shape: (usize, usize), kind: bool) -> Self {
        let mut objects = Objects::new(shape, kind);
        (0..400).for_each(|_| objects.alloc(Gfp::MayWait).unwrap());
        // Free some in allocation order, whose slabs may be discarded; then some at random. This CPU
        // still has the last ones in its list or sheaf.
        let mut freed: Vec<u32> = (100..250).rev().map(|at| objects.take(at)).collect();
        freed.reverse();
        let mut random = Random::new(1);
        freed.extend((0..100).map(|_| objects.take(random.below(objects.live.len()))));
        free_all(&objects.cache, &freed);
        Fixture { what, objects, kind, freed, found: 0, missed: 0, lossy: false }
    }

    fn misuse(&mut self, objects: &[u32]) {
        for object in objects {
            let answer = self.objects.cache.free(*object);
            self.judge(*object, answer);
        }
    }

    /// Counts the result of a misuse of `object`: debug builds must find it.
    fn judge(&mut self, object: u32, answer: Result<()>) {
        match answer {
            Ok(()) => {
                if cfg!(debug_assertions) {
                    panic!("object {object:#x}: not found");
                }
                self.missed += 1;
            }
            Err(error) => {
                self.check_error(object, &error);
                self.found += 1;
            }
        }
    }

    fn check_error(&self, object: u32, error: &Error) {
        let text = error.to_string();
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Corrupt, None), "{text}");
        assert!(text.contains(&self.objects.cache.info().name), "{text}");
        assert!(text.contains(&object.to_string()), "{object}: {text}");
    }

    /// Allocates 600 objects, and returns the errors. Checks that the objects are of this cache and were not
    /// in use.
    fn alloc_600(&mut self) -> Vec<Error> {
        let errors = (0..600).filter_map(|_| self.objects.alloc(Gfp::MayWait).err()).collect();
        self.objects.check();
        errors
    }

    /// Checks that the cache still works, unless a misuse was missed or lost objects.
    fn finish(mut self) {
        if !cfg!(debug_assertions) {
            let all = self.found + self.missed;
            let Fixture { what, kind, found, objects: Objects { size, .. }, .. } = &self;
            println!("{}, {size} bytes, {kind:?}: {found} of {all} {what} found", P::NAME);
        }
        if self.missed > 0 || self.lossy {
            return;
        }
        self.objects.check_info();
        assert!(self.alloc_600().is_empty());
        self.objects.finish();
    }
}

fn what_is_freed_twice_is_found<P: Policy>() {
    for_each_fixture::<P>("freed twice were", |fixture| {
        let freed = fixture.freed.clone();
        fixture.misuse(&freed);
        // Again when no CPU caches them. A release build may find here what it missed before.
        let shrunk = fixture.objects.cache.shrink();
        assert!(shrunk.is_ok() || fixture.missed > 0, "{shrunk:?}");
        fixture.misuse(&freed);
    });
}

fn numbers_of_no_object_in_use_are_found<P: Policy>() {
    for_each_fixture::<P>("numbers of no object in use were", |fixture| {
        let mut live: Vec<u32> = fixture.objects.live.iter().map(|live| live.object).collect();
        live.sort_unstable();
        let mut random = Random::new(2);
        let near: Vec<u32> = live
            .iter()
            .flat_map(|object| (0..20).map(move |bit| object ^ 1 << bit).chain([object + 1]))
            .collect();
        let any: Vec<u32> = (0..2000).map(|_| random.next() as u32 >> random.below(32)).collect();
        let strange = near.into_iter().chain(any).chain([0, u32::MAX, u32::MAX - 1, 1 << 31]);
        for number in strange.filter(|number| live.binary_search(number).is_err()) {
            fixture.misuse(&[number]);
            if fixture.missed > 0 {
                break;
            }
        }
    });
}

fn objects_of_slabs_that_are_gone_are_found<P: Policy>() {
    for_each_fixture::<P>("objects of slabs that are gone were", |fixture| {
        let objects: Vec<u32> =
            (0..fixture.objects.live.len()).rev().map(|at| fixture.objects.take(at)).collect();
        free_all(&fixture.objects.cache, &objects);
        fixture.objects.cache.shrink().unwrap();
        assert_eq!(fixture.objects.cache.info().num_slabs, 0);
        fixture.misuse(&objects);
    });
}

fn link_of(size: usize) -> std::ops::Range<usize> {
    let stride = size.next_multiple_of(8);
    let start = (stride / 2) & !3;
    start..start + 4
}

/// A byte of an object is written after it was freed: the object is not allocated again.
fn a_write_to_a_free_object_is_found<P: Policy>() {
    for_each_fixture::<P>("written after they were freed were", |fixture| {
        let size = fixture.objects.size;
        let link = link_of(size);
        let mut random = Random::new(3);
        for at in [0, link.start - 1, link.end, size - 1, random.below(size), random.below(size)] {
            if link.contains(&at) || at >= size {
                continue;
            }
            let damaged = fixture.objects.take(fixture.objects.live.len() - 1);
            fixture.objects.cache.free(damaged).unwrap();
            bytes_of(&fixture.objects.cache, size, damaged)[at] ^= 0x10;
            let found = fixture.alloc_600();
            assert!(found.len() <= 1, "{found:?}");
            let missed = found.is_empty();
            fixture.judge(damaged, found.into_iter().next().map_or(Ok(()), Err));
            if missed {
                // The object is in use again.
                continue;
            }
            // The damaged object counts as in use, and has no owner.
            let Objects { arena, cache, live, .. } = &fixture.objects;
            assert!(live.iter().all(|live| live.object != damaged));
            check_info(arena, cache, live.len() + 1);
            fixture.objects.cache.free(damaged).unwrap();
        }
    });
}

/// The links between free objects are overwritten by several patterns: hardened caches find that, and return
/// neither foreign objects nor objects in use.
fn a_damaged_link_is_found<P: Policy>() {
    for_each_fixture::<P>("damaged links were", |fixture| {
        if !P::HARDENED {
            return;
        }
        let size = fixture.objects.size;
        fixture.objects.cache.shrink().unwrap();
        let mut random = Random::new(4);
        for pattern in [[0; 4], [0xff; 4], [0x6b; 4], random.next().to_le_bytes()[..4].try_into().unwrap()] {
            // An object whose slab has others in use, so that the slab stays.
            let damaged = fixture.objects.take(fixture.objects.live.len() / 2);
            fixture.objects.cache.free(damaged).unwrap();
            fixture.objects.cache.shrink().unwrap();
            bytes_of(&fixture.objects.cache, size, damaged)[link_of(size)].copy_from_slice(&pattern);
            let found = fixture.alloc_600();
            let missed = found.is_empty();
            fixture.judge(damaged, found.into_iter().next().map_or(Ok(()), Err));
            let Objects { cache, live, .. } = &fixture.objects;
            assert!(missed || live.iter().all(|live| live.object != damaged), "it is used again");
            assert_eq!(cache.info().active_objs, live.len() as u64, "what is lost is in no use");
        }
        fixture.lossy = true;
    });
}

fn objects_in_use_at_the_end_are_reported<P: Policy>() {
    for restartable in kinds() {
        for free_objects_on_drop in [false, true] {
            let arena = arena();
            let options =
                CacheConfig { free_objects_on_drop, restartable, ..CacheConfig::new("leaky", 64, 8, 1000) };
            let cache = Cache::<P>::new(arena.clone(), options).unwrap();
            let objects: Vec<u32> = (0..100).map(|_| cache.alloc(Gfp::MayWait).unwrap()).collect();
            free_all(&cache, &objects[3..]);
            let ended = cache.close();
            assert_eq!(arena.used_pages(Account::Slab), 0, "the memory goes back all the same");
            if free_objects_on_drop {
                ended.unwrap();
                continue;
            }
            let error = ended.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.to_string().contains("'leaky' ends with 3 objects in use"), "{error}");
        }
    }
}

/// Tests the message of a cache that is dropped, in a child process whose stderr can be read.
#[test]
fn a_drop_reports_objects_in_use() {
    const CHILD: &str = "SLAB_TEST_LEAKS";
    if std::env::var_os(CHILD).is_some() {
        for free_objects_on_drop in [false, true] {
            let name = if free_objects_on_drop { "whole" } else { "leaky" };
            let options = CacheConfig { free_objects_on_drop, ..CacheConfig::new(name, 64, 8, 1000) };
            let cache = Cache::<Sheaves>::new(arena(), options).unwrap();
            (0..7).for_each(|_| _ = cache.alloc(Gfp::MayWait).unwrap());
        }
        return;
    }
    let name = "slab::tests::errors::a_drop_reports_objects_in_use";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("slab cache 'leaky' ends with 7 objects in use"), "{said}");
    assert!(!said.contains("whole"), "{said}");
}
