//! Tests of the raw pool: storing, refusals, freeing, corruption.

use std::collections::HashMap;

use super::class::{CHAIN_SIZES, HEADER_BYTES};
use super::compact::{Budget, Effort};
use super::design::{Pinned, PoolLocks};
use super::raw::{PoolConfig, RawPool};
use super::read::ObjectRead;
use super::word::Location;
use crate::base::error::{ErrorKind, Result};
use crate::base::mem::{Account, Arena, Gfp};
use crate::base::random::Random;
use crate::base::sync::{Arc, Mutex, Ordering, classes};
use crate::base::units::PAGE_SIZE;
use check::{Live, check, zspages};

mod check;
mod compaction;
#[cfg(feature = "designs")]
mod deferred;
mod library;
mod model;

fn config(chain_size: usize) -> PoolConfig {
    PoolConfig { max_objects: Some(1 << 20), chain_size, reclaim: true, ..PoolConfig::new("test") }
}

fn pool<D: PoolLocks>(chain_size: usize) -> RawPool<D> {
    let arena = Arc::new(Arena::new(256 << 20).expect("address space"));
    arena.set_run_cache_batch_pages(32).expect("batch");
    RawPool::new(arena, &config(chain_size)).expect("pool")
}

fn read<D: PoolLocks>(pool: &RawPool<D>, handle: u32, owner: u32, len: usize) -> Result<ObjectRead<'_, D>> {
    // SAFETY: the handle is in use and the test's; tests free it meanwhile only with designs that allow it.
    unsafe { pool.read(handle, owner, len) }
}

#[track_caller]
fn store<D: PoolLocks>(pool: &RawPool<D>, bytes: &[u8], owner: u32) -> u32 {
    pool.store(bytes, owner, Gfp::MayWait).expect("memory")
}

#[track_caller]
fn refused<D: PoolLocks>(pool: &RawPool<D>, bytes: &[u8], gfp: Gfp) -> (ErrorKind, Option<&'static str>) {
    let error = pool.store(bytes, 0, gfp).expect_err("it is refused");
    (error.kind(), error.setting())
}

fn in_use<D: PoolLocks>(pool: &RawPool<D>) -> (u64, u64) {
    (pool.handles.cache().info().active_objs, pool.zspages.cache().info().active_objs)
}

fn free<D: PoolLocks>(pool: &RawPool<D>, handle: u32) {
    // SAFETY: the handle is in use and the test's.
    unsafe { pool.free(handle) };
}

fn object<D: PoolLocks>(pool: &RawPool<D>, handle: u32) -> Location {
    // SAFETY: the handle is in use.
    unsafe {
        let object = D::pin(pool, handle);
        assert!(D::unpin(pool, handle, object).is_none());
        object
    }
}

/// Returns contents that only the object of this number has.
fn contents(random: &mut Random, number: u64) -> Vec<u8> {
    let len = match random.below(8) {
        0 => PAGE_SIZE,
        1 => 1 + random.below(64),
        2 => 3600 + random.below(496),
        _ => 1 + random.below(PAGE_SIZE),
    };
    let mut bytes = vec![0; len];
    Random::new(number).fill(&mut bytes);
    bytes
}

for_every_design!(
    lengths_and_chain_sizes_out_of_range_are_refused,
    without_waiting_only_what_is_there_is_taken,
    zspages_are_charged_as_far_as_they_are_reached,
    new_objects_go_into_the_fullest_zspage,
    another_owners_bytes_are_never_answered,
    lengths_beside_every_class_border_fit,
    a_shorter_object_shows_nothing_of_a_longer_one,
    at_the_limit_freed_room_is_used_and_growth_is_refused,
);

fn lengths_and_chain_sizes_out_of_range_are_refused<D: PoolLocks>() {
    let arena = Arc::new(Arena::new(1 << 20).expect("address space"));
    let refused = RawPool::<D>::new(arena, &config(17)).err().expect("too long");
    assert_eq!(refused.setting(), Some("chain_size"));
    let pool = pool::<D>(8);
    for bytes in [&[][..], &[1; PAGE_SIZE + 1]] {
        assert_eq!(self::refused(&pool, bytes, Gfp::MayWait).0, ErrorKind::Invalid);
    }
}

/// Without waiting the pool neither grows nor gives memory back, and uses all memory that it has.
fn without_waiting_only_what_is_there_is_taken<D: PoolLocks>() {
    let pool = pool::<D>(8);
    assert_eq!(refused(&pool, &[1; 3000], Gfp::NoWait).0, ErrorKind::NoMemory, "there is none yet");
    assert_eq!((pool.arena.charged_pages(), in_use(&pool)), (0, (0, 0)));
    let mut handles = vec![store(&pool, &[1; 3000], 0)];
    handles.extend(std::iter::from_fn(|| pool.store(&[1; 3000], 0, Gfp::NoWait).ok()));
    // A chunk has 512 pages; gaps remain that are too short for a run.
    assert!(pool.pages_used() > 460, "{} pages", pool.pages_used());
    let on_lists = pool.class_stats().iter().map(zspages).sum();
    assert_eq!(in_use(&pool), (handles.len() as u64, on_lists), "none is left over");

    // Now at the limit, with free memory in runs of another length.
    let kept = handles.len() - 40;
    handles.drain(kept..).for_each(|handle| free(&pool, handle));
    pool.arena.set_limit_pages(pool.arena.charged_pages());
    let charged = pool.arena.charged_pages();
    pool.store(&[2; PAGE_SIZE], 0, Gfp::NoWait).expect_err("free pages must go back first");
    assert_eq!(pool.arena.charged_pages(), charged, "they have not");
    pool.store(&[2; PAGE_SIZE], 0, Gfp::MayWait).expect("now they have");
    assert!(pool.arena.charged_pages() < charged);
}

fn zspages_are_charged_as_far_as_they_are_reached<D: PoolLocks>() {
    let pool = pool::<D>(16);
    let len = 3000;
    let class = *pool.classes.get(pool.classes.index_for(len));
    assert!(class.pages_per_zspage > 8, "{class:?}");
    let mut handles = Vec::new();
    for number in 0..class.objs_per_zspage {
        handles.push(store(&pool, &vec![7; len], number.into()));
        assert_eq!(pool.pages_used(), class.pages_for(handles.len()) as u64);
    }
    assert_eq!(in_use(&pool).1, 1);
    handles.into_iter().for_each(|handle| free(&pool, handle));
    assert_eq!((pool.pages_used(), in_use(&pool)), (0, (0, 0)));
}

fn new_objects_go_into_the_fullest_zspage<D: PoolLocks>() {
    let pool = pool::<D>(8);
    let (len, per_zspage) =
        (1000, usize::from(pool.classes.get(pool.classes.index_for(1000)).objs_per_zspage));
    let handles: Vec<u32> =
        (0..3 * per_zspage).map(|owner| store(&pool, &vec![1; len], owner as u32)).collect();
    let page = |handle: &u32| object(&pool, *handle).page;
    let pages: Vec<u32> = handles.iter().map(page).collect();
    let (first, second) = (&handles[..per_zspage], &handles[per_zspage..2 * per_zspage]);
    first[..per_zspage - 1].iter().for_each(|handle| free(&pool, *handle));
    second[..3].iter().for_each(|handle| free(&pool, *handle));
    for _ in 0..3 {
        let handle = store(&pool, &vec![2; len], 0);
        assert_eq!(page(&handle), pages[per_zspage], "the second zspage is the fullest with room");
    }
    assert_eq!(page(&store(&pool, &vec![2; len], 0)), pages[0]);
}

#[test]
fn a_read_outlives_the_free() {
    let pool = pool::<Pinned>(8);
    for len in [100, 2000, PAGE_SIZE] {
        let bytes = vec![len as u8; len];
        let handle = store(&pool, &bytes, 1);
        let [one, two] = [(); 2].map(|()| read(&pool, handle, 1, len).expect("sound"));
        free(&pool, handle);
        let other = store(&pool, &vec![0xff; len], 2);
        drop(one);
        assert_eq!(*two, *bytes);
        assert_eq!(in_use(&pool).0, 2);
        drop(two);
        assert_eq!(in_use(&pool).0, 1);
        free(&pool, other);
    }
}

fn another_owners_bytes_are_never_answered<D: PoolLocks>() {
    let pool = pool::<D>(8);
    for len in [100, PAGE_SIZE] {
        let handle = store(&pool, &vec![1; len], 5);
        assert_eq!(read(&pool, handle, 6, len).err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
        assert!(read(&pool, handle, 5, len).is_ok());
        free(&pool, handle);
    }
    let handle = store(&pool, &[1; 100], 5);
    assert!(read(&pool, handle, 5, 200).is_err(), "longer than its class");
    // Damage the header: the object cannot be read, and its memory is not reused.
    let object = object(&pool, handle);
    // SAFETY: the object is live, and this test is its only user.
    unsafe { pool.place(object).0.write(!0) };
    assert!(read(&pool, handle, 5, 100).is_err());
    free(&pool, handle);
    assert_eq!((pool.corrupted(), in_use(&pool).0), (1, 1));
}

/// Objects that just fit their class, and ones a byte longer: none is read beyond its class. (The kernel's
/// 894913e2d35c and 391f057f44a5 are off-by-one bugs of this kind.)
fn lengths_beside_every_class_border_fit<D: PoolLocks>() {
    for chain_size in CHAIN_SIZES {
        let pool = pool::<D>(chain_size);
        let sizes = pool.classes.iter().map(|class| (usize::from(class.size_bytes), class.is_huge()));
        let lens = sizes.flat_map(|(size_bytes, is_huge)| {
            let most = if is_huge { size_bytes } else { size_bytes - HEADER_BYTES };
            [(most, most), ((most + 1).min(PAGE_SIZE), usize::MAX)]
        });
        let store = |(owner, (len, room))| (store(&pool, &vec![owner as u8; len], owner), owner, len, room);
        let objects: Vec<_> = (0..).zip(lens).map(store).collect();
        for (handle, owner, len, room) in objects {
            assert_eq!(*read(&pool, handle, owner, len).expect("sound"), *vec![owner as u8; len]);
            if room < usize::MAX {
                let beyond = read(&pool, handle, owner, room + 1).err().map(|error| error.kind());
                assert_eq!(beyond, Some(ErrorKind::Corrupt), "{room} bytes is all there is");
            }
            free(&pool, handle);
        }
        assert_eq!((pool.pages_used(), pool.corrupted()), (0, 0));
    }
}

/// The kernel's 3bf1c285dc40 fixed such a leak.
fn a_shorter_object_shows_nothing_of_a_longer_one<D: PoolLocks>() {
    let pool = pool::<D>(8);
    for (long, short) in [(56, 41), (3000, 2985), (PAGE_SIZE, 4000), (24, 1)] {
        let handle = store(&pool, &vec![0xaa; long], 1);
        let place = object(&pool, handle);
        // Another object, so that the zspage stays.
        let other = store(&pool, &vec![0xbb; long], 2);
        free(&pool, handle);
        let handle = store(&pool, &vec![0xcc; short], 3);
        assert!(long == PAGE_SIZE || object(&pool, handle) == place, "{short} bytes take another place");
        assert_eq!(*read(&pool, handle, 3, short).expect("sound"), *vec![0xcc; short]);
        assert_eq!(*read(&pool, other, 2, long).expect("sound"), *vec![0xbb; long]);
        free(&pool, handle);
        free(&pool, other);
    }
}

fn at_the_limit_freed_room_is_used_and_growth_is_refused<D: PoolLocks>() {
    let pool = pool::<D>(8);
    pool.arena.set_limit_pages(64);
    let stored = std::iter::from_fn(|| pool.store(&[3; 1000], 0, Gfp::MayWait).ok());
    let mut handles: Vec<u32> = stored.collect();
    assert_eq!(refused(&pool, &[3; 1000], Gfp::MayWait), (ErrorKind::NoSpace, Some("mem_limit")));
    assert!(handles.len() > 200 && pool.arena.charged_pages() <= 64, "{}", handles.len());
    for round in 0..100 {
        free(&pool, handles.swap_remove(round * 7 % handles.len()));
        handles.push(store(&pool, &[4; 1000], 0));
    }
    handles.into_iter().for_each(|handle| free(&pool, handle));
    pool.store(&[5; 3000], 0, Gfp::MayWait).expect("memory freed by one class serves another");
}
