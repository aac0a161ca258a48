//! Checks a pool's counts and lists against its zspages and the objects in them.

use super::*;
use crate::zsmalloc::free::FREE_TAG;
use crate::zsmalloc::zspage::{FULLNESS_GROUPS, Lists, NONE_INDEX, fullness_group};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Live {
    pub(super) owner: u32,
    pub(super) bytes: Vec<u8>,
}

/// Panics unless the pool holds exactly `live` (by handle) and its statistics and metadata agree with that.
/// No other thread uses the pool meanwhile.
pub(super) fn check<D: PoolLocks>(pool: &RawPool<D>, live: &HashMap<u32, Live>) {
    for (handle, Live { owner, bytes }) in live {
        // SAFETY: the handle is in use, and no thread frees it.
        let read = unsafe { pool.read(*handle, *owner, bytes.len()) }.expect("sound");
        assert_eq!(*read, **bytes);
    }
    let mut found = Vec::new();
    let mut pages = 0;
    for (class, stat) in (0..pool.classes.iter().len()).rev().zip(pool.class_stats()) {
        let mut lists = pool.lists(class as u8);
        assert_eq!((stat.class, stat.zspages[0]), (*pool.classes.get(class as u8), 0));
        assert_eq!(stat.obj_allocated, zspages(&stat) * u64::from(stat.class.objs_per_zspage));
        let (mut inuse, mut committed) = (0, 0);
        for group in 0..FULLNESS_GROUPS {
            for _ in 0..stat.zspages[group] {
                let id = lists.rotate(&pool.zspages, group).expect("as many as it says");
                let (objects, pages) = check_zspage(pool, &mut lists, class as u8, id, group, &mut found);
                inuse += objects;
                committed += pages;
            }
        }
        assert_eq!((stat.obj_used, stat.pages_used), (inuse, committed), "{:?}", stat.class);
        pages += committed;
    }
    found.sort_unstable();
    let mut wanted: Vec<u32> = live.keys().copied().collect();
    wanted.sort_unstable();
    assert_eq!(found, wanted, "the objects of the zspages");
    assert_eq!((pool.pages_used(), pool.arena.used_pages(Account::Pool)), (pages, pages));
    assert!(pool.arena.charged_pages() >= pages);
    let on_lists = pool.class_stats().iter().map(zspages).sum();
    assert_eq!(super::in_use(pool), (live.len() as u64, on_lists));
}

pub(super) fn zspages(stat: &crate::zsmalloc::ClassStat) -> u64 {
    stat.zspages.iter().map(|count| u64::from(*count)).sum()
}

/// Checks one zspage; adds its handles to `found`; returns the numbers of its objects and committed pages.
fn check_zspage<D: PoolLocks>(
    pool: &RawPool<D>,
    lists: &mut Lists,
    class: u8,
    id: u32,
    group: usize,
    found: &mut Vec<u32>,
) -> (u64, u64) {
    // SAFETY: the zspage is on the lists, which are locked.
    let descriptor = unsafe { pool.zspages.get(id) };
    assert_eq!((descriptor.class, descriptor.is_held()), (class, false));
    let shape = pool.classes.get(class);
    let (page, mut free, fresh, inuse, committed) = lists.with(&pool.zspages, id, |zspage| {
        (zspage.page, zspage.free, zspage.fresh, zspage.inuse, zspage.committed)
    });
    assert_eq!(pool.page_table[page as usize].load(Ordering::Relaxed) as u32, id);
    assert_eq!(fullness_group(inuse, shape.objs_per_zspage), group);
    assert_eq!(usize::from(committed), shape.pages_for(usize::from(fresh)));
    if shape.is_huge() {
        assert_eq!((fresh, inuse, free), (1, 1, NONE_INDEX));
        found.push(descriptor.huge_handle());
        return (1, 1);
    }
    let header = |index| {
        let (start, _) = pool.place(Location { page, class, index });
        // SAFETY: the object is below `fresh`, so it has a header, and no other thread uses the pool.
        unsafe { start.cast::<[u32; 2]>().read() }
    };
    let mut is_free = vec![false; usize::from(fresh)];
    while free != NONE_INDEX {
        let [tag, next] = header(free);
        assert_eq!(tag, FREE_TAG);
        assert!(!std::mem::replace(&mut is_free[usize::from(free)], true), "twice in the free list");
        free = next as u16;
    }
    assert_eq!(is_free.iter().filter(|free| !**free).count(), usize::from(inuse));
    let used = (0..fresh).filter(|index| !is_free[usize::from(*index)]);
    found.extend(used.map(|index| header(index)[0]));
    (u64::from(inuse), u64::from(committed))
}
