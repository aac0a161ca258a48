//! Deferred frees: against the naive models, with a thread that frees and without; the limit, memory that waits, drops.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::check::{Live, check};
use super::model::{agree, threads_agree};
use super::{free, read};
use crate::base::cpu;
use crate::base::error::ErrorKind;
use crate::base::mem::{Account, Arena, Gfp};
use crate::base::sync::Arc;
use crate::zsmalloc::builder::PoolBuilder;
use crate::zsmalloc::compact::{Budget, Effort};
use crate::zsmalloc::design::{Pinned, PoolLocks, Split};
use crate::zsmalloc::raw::RawPool;

for_every_design!(
    agrees_with_a_naive_model,
    threads_agree_with_naive_models,
    what_waits_is_in_use_until_it_is_freed,
    a_store_that_finds_no_room_frees_what_waits,
    dropping_a_pool_gives_the_memory_back,
);

fn builder(limit: u64) -> PoolBuilder {
    PoolBuilder::new("deferring").max_objects(1 << 20).chain_size(8).reclaim(true).defer_frees(limit)
}

fn pool_in<D: PoolLocks>(arena: &Arc<Arena>, limit: u64) -> RawPool<D> {
    RawPool::new(Arc::clone(arena), &builder(limit)).expect("pool")
}

fn arena() -> Arc<Arena> {
    let arena = Arc::new(Arena::new(256 << 20).expect("address space"));
    arena.set_run_cache_batch_pages(32).expect("batch");
    arena
}

/// Returns a pool in which at most `batches` times as many frees wait as there are CPUs, and one more.
fn pool<D: PoolLocks>(batches: usize) -> RawPool<D> {
    pool_in(&arena(), limit(batches))
}

fn limit(batches: usize) -> u64 {
    (batches * (cpu::possible() + 1)) as u64
}

/// Runs `f` beside a thread that frees.
fn beside_a_freer<D: PoolLocks, R>(pool: &RawPool<D>, f: impl FnOnce() -> R) -> R {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let freer = scope.spawn(|| pool.run_freer(|| !ends.load(Ordering::Relaxed)));
        // Also when `f` panics.
        let _end = End { ends: &ends, freer: freer.thread() };
        f()
    })
}

struct End<'a> {
    ends: &'a AtomicBool,
    freer: &'a thread::Thread,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.freer.unpark();
    }
}

/// With lists of one handle, of some, and of so many that they never fill up.
fn agrees_with_a_naive_model<D: PoolLocks>() {
    for (seed, batches) in [(10, 1), (11, 30), (12, 5000)] {
        let pool = pool::<D>(batches);
        agree(&pool, seed);
        beside_a_freer(&pool, || agree(&pool, seed));
    }
}

fn threads_agree_with_naive_models<D: PoolLocks>() {
    threads_agree(&pool::<D>(40), 20);
    let pool = pool::<D>(7);
    beside_a_freer(&pool, || threads_agree(&pool, 21));
}

/// Neither handles nor memory of objects that wait are used again; compaction, which moves none of them, frees them.
fn what_waits_is_in_use_until_it_is_freed<D: PoolLocks>() {
    let pool = pool::<D>(1000);
    let store = |owner: u32| pool.store(&[owner as u8; 700], owner, Gfp::MayWait).expect("memory");
    let old: Vec<u32> = (0..300).map(store).collect();
    let pages = pool.pages_used();
    old.iter().for_each(|handle| free(&pool, *handle));
    let used = || pool.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>();
    assert_eq!((pool.waiting_frees(), pool.pages_used(), used()), (300, pages, 300));
    assert_eq!(pool.handles.info().active_objs, 300);
    let new: HashMap<u32, Live> =
        (300..400).map(|owner| (store(owner), Live { owner, bytes: vec![owner as u8; 700] })).collect();
    assert!(old.iter().all(|handle| !new.contains_key(handle)), "a handle is used for two objects");
    pool.compact(Effort::Zspages, &mut Budget::unlimited());
    assert_eq!((pool.waiting_frees(), used()), (0, 100));
    check(&pool, &new);
}

/// At the limit of memory, and at that of objects, of which CPUs may keep some free ones.
fn a_store_that_finds_no_room_frees_what_waits<D: PoolLocks>() {
    let few_objects = RawPool::<D>::new(arena(), &builder(limit(1000)).max_objects(512)).expect("pool");
    let little_memory = pool::<D>(1000);
    little_memory.arena.set_limit_pages(256);
    for (pool, len, least_percent) in [(&few_objects, 100, 20), (&little_memory, 3000, 90)] {
        let mut first = None;
        for round in 0..4 {
            let stored: Vec<u32> =
                (0..).map_while(|owner| pool.store(&vec![1; len], owner, Gfp::MayWait).ok()).collect();
            let first = *first.get_or_insert(stored.len());
            assert!(first > 200 && stored.len() * 100 >= first * least_percent, "{round}: {}", stored.len());
            stored.iter().for_each(|handle| free(pool, *handle));
            assert!(pool.waiting_frees() > 0, "{round}");
        }
        check(pool, &HashMap::new());
    }
}

fn dropping_a_pool_gives_the_memory_back<D: PoolLocks>() {
    let arena = arena();
    let pool = pool_in::<D>(&arena, limit(1000));
    let handles: Vec<u32> =
        (0..500).map(|owner| pool.store(&[2; 900], owner, Gfp::MayWait).expect("memory")).collect();
    handles.iter().for_each(|handle| free(&pool, *handle));
    assert!(pool.waiting_frees() == 500 && arena.used_pages(Account::Pool) > 0);
    drop(pool);
    assert_eq!((arena.used_pages(Account::Pool), arena.used_pages(Account::Slab)), (0, 0));
}

/// Without a thread that frees, those that free do it themselves, and no more waits than may.
#[test]
fn no_more_waits_than_the_limit() {
    for batches in [1, 2, 7, 100] {
        let pool = pool::<Pinned>(batches);
        let handles: Vec<u32> =
            (0..3000).map(|owner| pool.store(&[3; 200], owner, Gfp::MayWait).expect("memory")).collect();
        let mut most = 0;
        for (freed, handle) in (1..).zip(&handles) {
            free(&pool, *handle);
            let waiting = pool.waiting_frees();
            assert!(waiting <= limit(batches).min(freed), "{waiting} of {batches} a CPU");
            assert_eq!(pool.handles.info().active_objs, 3000 - freed + waiting);
            most = most.max(waiting);
        }
        assert!(most >= batches as u64);
        check(&pool, &HashMap::new());
    }
}

#[test]
fn a_limit_that_leaves_a_cpu_without_a_list_is_refused() {
    let error = RawPool::<Pinned>::new(arena(), &builder(cpu::possible() as u64)).err().expect("too small");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("defer_frees")));
}

/// The freer wakes for a single free, and for a full batch, and all memory comes back without a flush.
#[test]
fn a_freer_frees_what_waits_soon() {
    let pool = pool::<Pinned>(50);
    beside_a_freer(&pool, || {
        for count in [1, 1, 400, 3] {
            let handles: Vec<u32> = (0..count)
                .map(|owner| pool.store(&[4; 1000], owner, Gfp::MayWait).expect("memory"))
                .collect();
            handles.iter().for_each(|handle| free(&pool, *handle));
            let start = Instant::now();
            while pool.pages_used() > 0 {
                assert!(start.elapsed() < Duration::from_secs(20), "{} wait", pool.waiting_frees());
                thread::sleep(Duration::from_millis(1));
            }
            // So that it sleeps.
            thread::sleep(Duration::from_millis(10));
        }
    });
    check(&pool, &HashMap::new());
}

/// The last frees of a CPU come soon, though the batches of another never end.
#[test]
fn a_list_that_does_not_fill_up_is_freed_beside_others_that_do() {
    let pool = pool::<Pinned>(50);
    let store = |len: usize| pool.store(&vec![8; len], 1, Gfp::MayWait).expect("memory");
    let large = || {
        pool.class_stats()
            .iter()
            .filter(|stat| stat.class.size_bytes > 500)
            .map(|stat| stat.obj_used)
            .sum::<u64>()
    };
    let ends = AtomicBool::new(false);
    beside_a_freer(&pool, || {
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let small: Vec<u32> = (0..100).map(|_| store(100)).collect();
                    small.iter().for_each(|handle| free(&pool, *handle));
                }
            });
            let start = Instant::now();
            for _ in 0..20 {
                free(&pool, store(1000));
                while large() > 0 && start.elapsed() < Duration::from_secs(20) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            ends.store(true, Ordering::Relaxed);
            assert_eq!(large(), 0, "after {:?}", start.elapsed());
        });
    });
}

/// A batch locks a class once for many objects, and leaves an object that is read to its reader.
#[test]
fn a_batch_locks_a_class_once_for_many_objects() {
    let pool: RawPool<Pinned> = RawPool::new(arena(), &builder(limit(1000)).count_locks(true)).expect("pool");
    let handles: Vec<u32> =
        (0..256).map(|owner| pool.store(&[5; 1000], owner, Gfp::MayWait).expect("memory")).collect();
    let reading = read(&pool, handles[100], 100, 1000).expect("sound");
    let before = pool.lock_counts();
    handles.iter().for_each(|handle| free(&pool, *handle));
    pool.flush_frees();
    let counts = pool.lock_counts().since(&before);
    assert_eq!(counts.frees, 255);
    // One for 64 objects of each of the lists.
    let most = 256 / 64 + cpu::possible() as u64;
    assert!((4..=most).contains(&counts.class_locks), "{}", counts.class_locks);
    assert_eq!(*reading, [5; 1000]);
    drop(reading);
    check(&pool, &HashMap::new());
}

/// A damaged object is leaked, as by a free that is not deferred; its neighbours are freed.
#[test]
fn a_damaged_object_is_not_freed() {
    let pool = pool::<Split>(1000);
    let handles: Vec<u32> =
        (0..40).map(|owner| pool.store(&[6; 300], owner, Gfp::MayWait).expect("memory")).collect();
    let damaged = super::object(&pool, handles[7]);
    // SAFETY: the object is live, and this test is its only user.
    unsafe { pool.place(damaged).0.write(!0) };
    handles.iter().for_each(|handle| free(&pool, *handle));
    pool.flush_frees();
    assert_eq!((pool.corrupted(), pool.handles.info().active_objs), (1, 1));
}

/// Threads push on all CPUs at the same time, and no handle is freed twice or lost.
#[test]
fn handles_of_many_threads_are_freed_once() {
    let pool = pool::<Split>(20);
    let store = |owner| pool.store(&[7; 500], owner, Gfp::MayWait).expect("memory");
    beside_a_freer(&pool, || {
        for _ in 0..5 {
            let handles: Vec<u32> = (0..4000).map(store).collect();
            assert_eq!(handles.iter().collect::<HashSet<_>>().len(), handles.len(), "a handle is used twice");
            thread::scope(|scope| {
                for some in handles.chunks(1000) {
                    let pool = &pool;
                    scope.spawn(move || some.iter().for_each(|handle| free(pool, *handle)));
                }
            });
        }
    });
    assert_eq!((pool.pages_used(), pool.waiting_frees(), pool.corrupted()), (0, 0, 0));
    check(&pool, &HashMap::new());
}
