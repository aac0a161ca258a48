//! Counts the exchanges of slab words that freezing costs, and that the series saves.

use super::*;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::Arc;
use crate::base::thread::pin_to_current_cpu;

const OBJECTS: usize = 128;
const CPU_PARTIAL_SLABS: usize = 4;

fn total(info: &CacheInfo, stat: Stat) -> u64 {
    info.stats.iter().map(|counters| counters[stat as usize]).sum()
}

/// Makes a cache with `slabs` slabs of which each has one free object, all on the node partial list.
/// Binds the thread to one CPU.
fn with_node_partial<P: Policy>(slabs: usize) -> Cache<P> {
    pin_to_current_cpu();
    set_counting(true);
    let arena = Arc::new(Arena::new(64 << 20).expect("arena"));
    let options = CacheConfig {
        min_partial: 100,
        cpu_partial_objects: CPU_PARTIAL_SLABS * OBJECTS / 2,
        ..CacheConfig::new("count", 64, 8, 1 << 20)
    };
    let cache = Cache::new(arena, options).expect("cache");
    let all: Vec<u32> = (0..OBJECTS * slabs).map(|_| cache.alloc(Gfp::MayWait).expect("memory")).collect();
    all.chunks(OBJECTS).for_each(|slab| cache.free(slab[7]).expect("in use"));
    cache.shrink().expect("no damage");
    let info = cache.info();
    assert_eq!((info.num_slabs, info.active_objs), (slabs as u64, (slabs * (OBJECTS - 1)) as u64));
    cache
}

fn counted<P: Policy, R>(cache: &Cache<P>, stat: Stat, f: impl FnOnce() -> R) -> (u64, R) {
    let before = total(&cache.info(), stat);
    let result = f();
    (total(&cache.info(), stat) - before, result)
}

/// Returns the exchanges for each slab that moves from the node partial list to a CPU's and becomes active,
/// and for each that moves from the CPU's back to the node's instead.
fn exchanges_per_slab<P: Policy>() -> [f64; 2] {
    let alloc = |cache: &Cache<P>| {
        cache.alloc(Gfp::MayWait).expect("memory");
    };
    let moved = CPU_PARTIAL_SLABS / 2 + 1;

    let cache = with_node_partial::<P>(12);
    // One slab, with one object, becomes active; `moved` slabs go to the CPU partial list.
    let (first, ()) = counted(&cache, Stat::CmpxchgDouble, || alloc(&cache));
    assert_eq!(total(&cache.info(), Stat::CpuPartialNode), moved as u64);
    // Each of those becomes active in turn; an exchange finds that the slab before it is used up.
    let (activated, ()) = counted(&cache, Stat::CmpxchgDouble, || (0..moved).for_each(|_| alloc(&cache)));
    assert_eq!(total(&cache.info(), Stat::CpuPartialAlloc), moved as u64);
    let to_active = (first - 1 + activated - moved as u64) as f64 / moved as f64;

    let cache = with_node_partial::<P>(12);
    alloc(&cache);
    let (flushed, _) = counted(&cache, Stat::CmpxchgDouble, || cache.shrink().expect("no damage"));
    // One exchange unfreezes the active slab.
    [to_active, (flushed - 1) as f64 / moved as f64]
}

#[test]
fn delayed_freezing_saves_an_exchange_on_the_way_in_and_all_on_the_way_out() {
    assert_eq!(exchanges_per_slab::<EagerFreeze>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<OnPartial>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<UnfreezeFirst>(), [2.0, 1.0]);
    assert_eq!(exchanges_per_slab::<DelayedFreeze>(), [1.0, 0.0]);
}

#[test]
fn the_counters_follow_a_slab() {
    let cache = with_node_partial::<DelayedFreeze>(8);
    let info = cache.info();
    let count = |stat| total(&info, stat);
    assert_eq!(count(Stat::AllocSlab), 8);
    // A slow path takes each slab's first object; one free goes to the active slab's fast path.
    assert_eq!(count(Stat::AllocFastpath) + count(Stat::AllocSlowpath), 8 * OBJECTS as u64);
    assert_eq!((count(Stat::AllocSlowpath), count(Stat::FreeFastpath)), (8, 1));
    assert_eq!((count(Stat::FreeSlowpath), count(Stat::CpuPartialFree)), (7, 7));
    // The list of four slabs was drained once, at the fifth; shrink took the active slab.
    assert_eq!((count(Stat::CpuPartialDrain), count(Stat::CpuslabFlush)), (1, 1));
    assert_eq!((count(Stat::FreeAddPartial), count(Stat::DeactivateToHead)), (7, 1));
    assert_eq!((count(Stat::FreeFrozen), count(Stat::CmpxchgDoubleFail), count(Stat::FreeSlab)), (0, 0, 0));
}
