//! What freezing costs, counted: the exchanges of slab words that the series saves.

use super::*;
use crate::base::cpu;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::Arc;

const OBJECTS: usize = 128;
/// The objects of a CPU partial list, in slabs that are half full.
const CPU_PARTIAL_SLABS: usize = 4;

fn total(info: &CacheInfo, stat: Stat) -> u64 {
    info.stats.iter().map(|counters| counters[stat as usize]).sum()
}

/// A cache, and the object of each of `slabs` slabs that is free; all of them are on the node
/// partial list. The thread stays on one CPU from now on.
fn with_node_partial<P: Policy>(slabs: usize) -> Cache<P> {
    let mut one = rustix::thread::CpuSet::new();
    one.set(cpu::current());
    rustix::thread::sched_setaffinity(None, &one).expect("it runs there");
    set_counting(true);
    let arena = Arc::new(Arena::new(64 << 20).expect("arena"));
    let options = CacheConfig {
        min_partial: 100,
        cpu_partial_objects: CPU_PARTIAL_SLABS * OBJECTS / 2,
        free_objects_on_drop: true,
        ..CacheConfig::new("count", 64, 8, 1 << 20)
    };
    let cache = Cache::new(arena, options).expect("cache");
    let mut all = vec![0; OBJECTS * slabs];
    cache.alloc_bulk(&mut all, Gfp::MayWait).expect("memory");
    all.chunks(OBJECTS).for_each(|slab| cache.free(slab[7]).expect("in use"));
    cache.shrink().expect("no damage");
    let info = cache.info();
    assert_eq!((info.num_slabs, info.active_objs), (slabs as u64, (slabs * (OBJECTS - 1)) as u64));
    cache
}

/// What a counter counts while `f` runs.
fn counted<P: Policy, R>(cache: &Cache<P>, stat: Stat, f: impl FnOnce() -> R) -> (u64, R) {
    let before = total(&cache.info(), stat);
    let result = f();
    (total(&cache.info(), stat) - before, result)
}

/// Exchanges for each slab that goes from the node partial list over a CPU's to being active, and
/// for each that goes from there back to the node's instead.
fn exchanges_per_slab<P: Policy>() -> [f64; 2] {
    let alloc = |cache: &Cache<P>| {
        cache.alloc(Gfp::MayWait).expect("memory");
    };
    let moved = CPU_PARTIAL_SLABS / 2 + 1;

    let cache = with_node_partial::<P>(12);
    // One slab to allocate from, with one object; `moved` to the CPU partial list.
    let (first, ()) = counted(&cache, Stat::CmpxchgDouble, || alloc(&cache));
    assert_eq!(total(&cache.info(), Stat::CpuPartialNode), moved as u64);
    // Each of those in turn; the slab before it is used up, and found so by an exchange.
    let (activated, ()) = counted(&cache, Stat::CmpxchgDouble, || (0..moved).for_each(|_| alloc(&cache)));
    assert_eq!(total(&cache.info(), Stat::CpuPartialAlloc), moved as u64);
    let to_active = (first - 1 + activated - moved as u64) as f64 / moved as f64;

    let cache = with_node_partial::<P>(12);
    alloc(&cache);
    let (flushed, _) = counted(&cache, Stat::CmpxchgDouble, || cache.shrink().expect("no damage"));
    // The active slab is unfrozen by one.
    [to_active, (flushed - 1) as f64 / moved as f64]
}

#[test]
fn delayed_freezing_saves_an_exchange_on_the_way_in_and_all_on_the_way_out() {
    assert_eq!(exchanges_per_slab::<EagerFreeze>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<OnPartial>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<UnfreezeFirst>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<DelayedFreeze>(), [1.0, 0.0]);
}

/// The counters of a slab's way, by the kernel's names.
#[test]
fn the_counters_follow_a_slab() {
    let cache = with_node_partial::<DelayedFreeze>(8);
    let info = cache.info();
    let count = |stat| total(&info, stat);
    assert_eq!(count(Stat::AllocSlab), 8);
    // All objects but each slab's first; the slab that was active took its free one at once.
    assert_eq!(count(Stat::AllocFastpath) + count(Stat::AllocSlowpath), 8 * OBJECTS as u64);
    assert_eq!((count(Stat::AllocSlowpath), count(Stat::FreeFastpath)), (8, 1));
    assert_eq!((count(Stat::FreeSlowpath), count(Stat::CpuPartialFree)), (7, 7));
    // The list of four was drained once, when the fifth came; shrink took the active slab.
    assert_eq!((count(Stat::CpuPartialDrain), count(Stat::CpuslabFlush)), (1, 1));
    assert_eq!((count(Stat::FreeAddPartial), count(Stat::DeactivateToHead)), (7, 1));
    assert_eq!((count(Stat::FreeFrozen), count(Stat::CmpxchgDoubleFail), count(Stat::FreeSlab)), (0, 0, 0));
}
