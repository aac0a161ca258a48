//! Misuse of caches: debug builds find all of it, and all builds a damaged link. The error names the cache,
//! the object and the fault, and no other object is harmed.

#![cfg_attr(not(debug_assertions), allow(dead_code))]

use super::objects::{Objects, bytes_of};
use super::*;
use crate::base::error::{Error, ErrorKind};
use crate::base::random::Random;

for_every_policy!(a_damaged_link_is_found);

#[cfg(debug_assertions)]
for_every_policy!(
    what_is_freed_twice_is_found,
    numbers_of_no_object_in_use_are_found,
    objects_of_slabs_that_are_gone_are_found,
    a_write_to_a_free_object_is_found,
);

const SHAPES: [(usize, usize); 3] = [(8, 8), (24, 8), (704, 8)];

/// A cache with some objects in use and some freed in several ways.
struct Fixture<P: Policy> {
    objects: Objects<P>,
    freed: Vec<u32>,
    /// Whether corruption has lost objects, so that not all memory comes back.
    lossy: bool,
}

/// Runs a test for each shape, with and without restartable sequences. The cache must still work afterwards.
fn for_each_fixture<P: Policy>(test: impl Fn(&mut Fixture<P>)) {
    let cpus = allowed_cpus();
    for shape in SHAPES {
        for kind in kinds() {
            println!("{shape:?}, {kind:?}");
            sched_setaffinity(None, &cpus[0]).unwrap();
            let mut fixture = Fixture::<P>::new(shape, kind);
            test(&mut fixture);
            if !fixture.lossy {
                fixture.objects.check_info();
                assert!(fixture.alloc_600().is_empty());
                fixture.objects.finish();
            }
        }
    }
}

impl<P: Policy> Fixture<P> {
    fn new(shape: (usize, usize), kind: bool) -> Self {
        let mut objects = Objects::new(shape, kind);
        (0..400).for_each(|_| objects.alloc(Gfp::MayWait).unwrap());
        // Free some in allocation order, whose slabs may be discarded; then some at random. This CPU
        // still has the last ones in its list or sheaf.
        let mut freed: Vec<u32> = (100..250).rev().map(|at| objects.take(at)).collect();
        freed.reverse();
        let mut random = Random::new(1);
        freed.extend((0..100).map(|_| objects.take(random.below(objects.live.len()))));
        free_all(&objects.cache, &freed);
        Fixture { objects, freed, lossy: false }
    }

    fn misuse(&self, objects: &[u32]) {
        for object in objects {
            let Err(error) = self.objects.cache.free(*object) else {
                panic!("object {object:#x}: not found")
            };
            self.check_error(*object, &error);
        }
    }

    fn check_error(&self, object: u32, error: &Error) {
        let text = error.to_string();
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Corrupt, None), "{text}");
        assert!(text.contains(&self.objects.cache.info().name), "{text}");
        assert!(text.contains(&object.to_string()), "{object}: {text}");
    }

    /// Allocates 600 objects, checks that they are of this cache and were not in use, and returns the errors.
    fn alloc_600(&mut self) -> Vec<Error> {
        let errors = (0..600).filter_map(|_| self.objects.alloc(Gfp::MayWait).err()).collect();
        self.objects.check();
        errors
    }
}

fn what_is_freed_twice_is_found<P: Policy>() {
    for_each_fixture::<P>(|fixture| {
        fixture.misuse(&fixture.freed);
        // Again when no CPU caches them.
        fixture.objects.cache.shrink().unwrap();
        fixture.misuse(&fixture.freed);
    });
}

fn numbers_of_no_object_in_use_are_found<P: Policy>() {
    for_each_fixture::<P>(|fixture| {
        let mut live: Vec<u32> = fixture.objects.live.iter().map(|live| live.object).collect();
        live.sort_unstable();
        let mut random = Random::new(2);
        let near: Vec<u32> = live
            .iter()
            .flat_map(|object| (0..20).map(move |bit| object ^ 1 << bit).chain([object + 1]))
            .collect();
        let any: Vec<u32> = (0..2000).map(|_| random.next() as u32 >> random.below(32)).collect();
        let mut strange: Vec<u32> =
            near.into_iter().chain(any).chain([0, u32::MAX, u32::MAX - 1, 1 << 31]).collect();
        strange.retain(|number| live.binary_search(number).is_err());
        fixture.misuse(&strange);
    });
}

fn objects_of_slabs_that_are_gone_are_found<P: Policy>() {
    for_each_fixture::<P>(|fixture| {
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
    for_each_fixture::<P>(|fixture| {
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
            let [error] = &found[..] else { panic!("byte {at}: {found:?}") };
            fixture.check_error(damaged, error);
            // The damaged object counts as in use, and has no owner.
            let Objects { arena, cache, live, .. } = &fixture.objects;
            assert!(live.iter().all(|live| live.object != damaged));
            check_info(arena, cache, live.len() + 1);
            fixture.objects.cache.free(damaged).unwrap();
        }
    });
}

/// Hardened caches find it, and return neither foreign objects nor objects in use.
fn a_damaged_link_is_found<P: Policy>() {
    for_each_fixture::<P>(|fixture| {
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
            fixture.check_error(damaged, found.first().expect("it is found"));
            let Objects { cache, live, .. } = &fixture.objects;
            assert!(live.iter().all(|live| live.object != damaged), "it is used again");
            assert_eq!(cache.info().active_objs, live.len() as u64, "what is lost is in no use");
        }
        fixture.lossy = true;
    });
}
