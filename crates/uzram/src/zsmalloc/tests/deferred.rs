//! Deferred frees, over pools of every design.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::base::cpu;
use crate::zsmalloc::deferred::DeferredFrees;

for_every_design!(each_object_is_freed_once_and_in_use_until_then);

/// Calls `f` beside a thread that frees, also when that panics.
fn beside_a_freer<T: Send, R>(frees: &DeferredFrees<T>, free: impl Fn(T) + Send, f: impl FnOnce() -> R) -> R {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let freer = scope.spawn(|| frees.run(|| !ends.load(Ordering::Relaxed), free));
        let result = catch_unwind(AssertUnwindSafe(f));
        ends.store(true, Ordering::Relaxed);
        freer.thread().unpark();
        result.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn each_object_is_freed_once_and_in_use_until_then<D: PoolLocks>() {
    for spare in [0, 3, 100] {
        let (pool, frees) = (pool::<D>(8), DeferredFrees::new(spare));
        beside_a_freer(
            &frees,
            |handle| free(&pool, handle),
            || {
                thread::scope(|scope| {
                    for thread in 0..3 {
                        let (pool, frees) = (&pool, &frees);
                        scope.spawn(move || {
                            for round in 0..3 {
                                let owner = |at: u32| thread << 24 | round << 16 | at;
                                let handles: Vec<u32> =
                                    (0..1500).map(|at| store(pool, &[at as u8; 700], owner(at))).collect();
                                for (at, handle) in (0..).zip(handles) {
                                    let bytes = read(pool, handle, owner(at), 700).expect("in use").to_vec();
                                    assert_eq!(bytes, [at as u8; 700]);
                                    frees.defer(handle, |handle| free(pool, handle));
                                }
                                pool.compact(Effort::Zspages, &mut Budget::unlimited());
                            }
                        });
                    }
                });
            },
        );
        assert_eq!((frees.waiting(), pool.pages_used(), pool.corrupted()), (0, 0, 0));
        check(&pool, &HashMap::new());
    }
}

#[test]
fn what_finds_no_room_is_freed_at_once() {
    let frees = DeferredFrees::new(2);
    let freed = AtomicBool::new(false);
    let mut waiting = 0;
    while !freed.load(Ordering::Relaxed) {
        frees.defer(waiting, |_| freed.store(true, Ordering::Relaxed));
        waiting += u32::from(!freed.load(Ordering::Relaxed));
    }
    assert_eq!(frees.waiting(), waiting as usize);
    let page = DeferredFrees::<u32>::PAGE_VALUES;
    assert!((3 * page..=(cpu::possible() + 2) * page).contains(&frees.waiting()), "{waiting}");
    frees.flush(|_| ());
    assert_eq!(frees.waiting(), 0);
}

#[test]
fn what_waits_is_freed_soon() {
    let (pool, frees) = (pool::<Pinned>(8), DeferredFrees::new(4));
    beside_a_freer(
        &frees,
        |handle| free(&pool, handle),
        || {
            for count in [1, 1, 5000, 3] {
                let handles: Vec<u32> = (0..count).map(|owner| store(&pool, &[4; 100], owner)).collect();
                handles.into_iter().for_each(|handle| frees.defer(handle, |handle| free(&pool, handle)));
                let start = Instant::now();
                while pool.pages_used() > 0 {
                    assert!(start.elapsed() < Duration::from_secs(20), "{} wait", frees.waiting());
                    thread::sleep(Duration::from_millis(1));
                }
            }
        },
    );
}
