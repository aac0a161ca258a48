//! Tests of the caches' interface: one body for every policy, hardened and plain. `SLAB_STRESS=N` in the
//! environment makes `model` and `threads` N times as long.

#![allow(clippy::unwrap_used)]

mod errors;
mod failures;
mod model;
mod objects;
mod threads;

use super::{Cache, CacheConfig, Policy};
use crate::base::cpu::Restartable;
use crate::base::mem::{Account, Arena, Gfp, MAX_RUN_PAGES};
use crate::base::sync::Arc;
use crate::base::thread::allowed_cpus;
use crate::base::units::PAGE_SIZE;
use rustix::thread::{CpuSet, sched_setaffinity};

const ARENA_BYTES: u64 = 64 << 20;

fn stress_factor() -> u64 {
    std::env::var("SLAB_STRESS").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

/// Returns whether fast paths may be restartable sequences, as this machine supports it.
fn kinds() -> Vec<bool> {
    [true, false].into_iter().filter(|wanted| !wanted || Restartable::get().is_some()).collect()
}

fn arena() -> Arc<Arena> {
    Arc::new(Arena::new(ARENA_BYTES).unwrap())
}

fn cache_of<P: Policy>(arena: &Arc<Arena>, (size, align): (usize, usize), restartable: bool) -> Cache<P> {
    let config =
        CacheConfig::new(format!("{}-{size}-{align}", P::NAME), size, align, ARENA_BYTES / size as u64);
    Cache::new(arena.clone(), CacheConfig { restartable, ..config }).unwrap()
}

fn free_all<P: Policy>(cache: &Cache<P>, objects: &[u32]) {
    objects.iter().for_each(|object| cache.free(*object).unwrap());
}

/// Checks the state of a cache with `live` objects in use, which is idle and has the arena for itself.
fn check_info<P: Policy>(arena: &Arena, cache: &Cache<P>, live: usize) {
    let info = cache.info();
    assert_eq!(info.policy, P::NAME);
    assert_eq!(info.active_objs, live as u64, "{info:?}");
    assert_eq!(info.num_objs, info.num_slabs * u64::from(info.objperslab), "{info:?}");
    assert!(info.active_slabs <= info.num_slabs, "{info:?}");
    assert!(info.active_objs <= info.active_slabs * u64::from(info.objperslab), "{info:?}");
    assert_eq!(arena.used_pages(Account::Slab), info.num_slabs * u64::from(info.pagesperslab), "{info:?}");
}

fn check_all_is_back<P: Policy>(arena: &Arena, caches: Vec<Cache<P>>) {
    for cache in &caches {
        assert_eq!(cache.info().active_objs, 0, "{:?}", cache.info());
        cache.shrink().unwrap();
        let info = cache.info();
        assert_eq!((info.active_objs, info.num_objs, info.num_slabs), (0, 0, 0), "{info:?}");
    }
    assert_eq!(arena.used_pages(Account::Slab), 0, "pages are charged that no slab has");
    drop(caches);
    assert_eq!(arena.used_pages(Account::Slab), 0);
    arena.release_free();
    assert_eq!(arena.charged_pages(), 0);
    let runs = ARENA_BYTES as usize / PAGE_SIZE / MAX_RUN_PAGES;
    let free = (0..runs + 1)
        .take_while(|_| arena.alloc_run(MAX_RUN_PAGES, Account::Slab, Gfp::MayWait).is_ok())
        .count();
    assert_eq!(free, runs, "runs were not given back");
}
