//! Small checks of the mechanism.
use super::*;
use crate::base::mem::{Account, Arena, Gfp};
use crate::base::sync::Arc;

fn cache<P: Policy>(options: Options) -> (Cache<P>, Arc<Arena>) {
    let arena = Arc::new(Arena::new(256 << 20).expect("arena"));
    (Cache::new(Arc::clone(&arena), options).expect("cache"), arena)
}

fn total(info: &CacheInfo, stat: Stat) -> u64 {
    info.stats.iter().map(|counters| counters[stat as usize]).sum()
}

fn smoke<P: Policy>() {
    for restartable in [true, false] {
        let (cache, arena) = cache::<P>(Options { restartable, ..Options::new("smoke", 64, 8, 1 << 20) });
        let mut all = vec![0; 1000];
        for _ in 0..3 {
            cache.alloc_bulk(&mut all, Gfp::MayWait).expect("memory");
            assert_eq!(cache.info().active_objs, 1000, "{}", P::NAME);
            for object in &all {
                // SAFETY: in use.
                unsafe { cache.address(*object).write_bytes(1, 64) };
            }
            for object in &all {
                cache.free(*object).expect("in use");
            }
            assert_eq!(cache.info().active_objs, 0, "{} {:?}", P::NAME, cache.info());
        }
        cache.shrink().expect("no damage");
        assert_eq!(arena.used_pages(Account::Slab), 0, "{} {:?}", P::NAME, cache.info());
        cache.close().expect("no leak");
    }
}

#[test]
fn smoke_all() {
    set_counting(true);
    smoke::<EagerFreeze>();
    smoke::<OnPartial>();
    smoke::<UnfreezeFirst>();
    smoke::<DelayedFreeze>();
    smoke::<Sheaves>();
}

/// Word exchanges that it takes to bring slabs from the node partial list to a CPU's partial list
/// and on to being active, and to bring a CPU's partial list back to the node's.
fn exchanges<P: Policy>() -> [u64; 2] {
    const SLABS: u64 = 12;
    let options = Options { min_partial: 100, ..Options::new("count", 64, 8, 1 << 20) };
    let (cache, _arena) = cache::<P>(options);
    let mut all = vec![0; 64 * SLABS as usize];
    cache.alloc_bulk(&mut all, Gfp::MayWait).expect("memory");
    all.chunks(64).for_each(|slab| cache.free(slab[7]).expect("in use"));
    cache.shrink().expect("no damage");
    let count = || total(&cache.info(), Stat::CmpxchgDouble);
    let mut before = count();
    let mut taken: Vec<u32> = Vec::new();
    let mut next = || taken.push(cache.alloc(Gfp::MayWait).expect("memory"));
    // One to use at once, and three for the CPU partial list.
    (0..4).for_each(|_| next());
    let to_active = count() - before;
    // Full slabs whose first object is freed go to the CPU partial list, which is flushed then.
    let info = cache.info();
    println!("{} {to_active} {info:?}", P::NAME);
    before = count();
    cache.shrink().expect("no damage");
    let flushed = count() - before;
    cache.free_bulk(&taken).expect("in use");
    [to_active, flushed]
}

#[test]
fn print_exchanges() {
    set_counting(true);
    println!("{:?} {:?}", exchanges::<EagerFreeze>(), exchanges::<DelayedFreeze>());
}
