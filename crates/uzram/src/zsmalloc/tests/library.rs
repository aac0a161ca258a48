//! The pool as others use it.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use super::Arc;
use crate::base::error::ErrorKind;
use crate::base::mem::Arena;
use crate::base::random::Random;
use crate::base::sync::{Mutex, classes};
use crate::zsmalloc::{Design, Options, Pool};

for_every_design!(
    handles_are_of_one_pool_and_free_their_bytes,
    the_coldest_are_evicted_first,
    eviction_goes_on_beside_everything_else,
);

fn new<D: Design>() -> Pool<D> {
    let arena = Arc::new(Arena::new(64 << 20).expect("address space"));
    Pool::new(arena, &Options { count_locks: true, reclaim: true, ..Options::new("library", 10_000) })
        .expect("pool")
}

fn handles_are_of_one_pool_and_free_their_bytes<D: Design>() {
    let (pool, other) = (new::<D>(), new::<D>());
    let handles: Vec<_> =
        (1..=4096u32).map(|len| pool.store(&vec![len as u8; len as usize], len).unwrap()).collect();
    for handle in &handles {
        assert_eq!(handle.len(), handle.owner() as usize);
        assert_eq!(*pool.read(handle).unwrap(), vec![handle.owner() as u8; handle.len()]);
    }
    assert_eq!(other.read(&handles[0]).err().map(|error| error.kind()), Some(ErrorKind::Invalid));
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    handles
        .into_iter()
        .for_each(|handle| if handle.len() % 5 == 0 { &mut kept } else { &mut freed }.push(handle));
    assert_eq!(other.free(freed.pop().unwrap()).unwrap_err().kind(), ErrorKind::Invalid);
    freed.into_iter().for_each(|handle| pool.free(handle).unwrap());
    let before = pool.pages_used();
    let gained = pool.compact();
    assert!(gained > before / 2 && pool.pages_used() == before - gained, "{gained} of {before}");
    for handle in &kept {
        assert_eq!(*pool.read(handle).unwrap(), vec![handle.owner() as u8; handle.len()]);
    }
    let counts = pool.lock_counts();
    assert_eq!((counts.allocs, counts.frees), (4096, 4096 - 4096 / 5 - 1));
    assert_eq!(D::FREES_PAGES_LOCKED, counts.runs_freed_locked > 0);
}

fn the_coldest_are_evicted_first<D: Design>() {
    let pool = new::<D>();
    let mut handles = HashMap::new();
    for owner in 0..4000 {
        handles.insert(owner, pool.store(&[owner as u8; 1000], owner).unwrap());
    }
    let (pages, mut evicted) = (pool.pages_used(), Vec::new());
    let freed = pool.reclaim(pages / 2, |owner| {
        evicted.push(owner);
        pool.free(handles.remove(&owner).unwrap()).unwrap();
    });
    let freed = freed.unwrap();
    assert_eq!(pool.pages_used(), pages - freed);
    assert!(freed >= pages / 2 && freed < pages / 2 + 16, "{freed} of {pages}");
    // In the order in which they were stored, by whole zspages.
    assert!(evicted.iter().enumerate().all(|(at, owner)| at as u32 == *owner), "{evicted:?}");
    // Those that stay where they are count as the hottest: every other one is asked first.
    let (pages, mut asked) = (pool.pages_used(), Vec::new());
    assert_eq!(pool.reclaim(1, |owner| asked.push(owner)).unwrap(), 0);
    assert_eq!(asked.len(), handles.len());
    assert_eq!(pool.pages_used(), pages);
    for (owner, handle) in &handles {
        assert_eq!(*pool.read(handle).unwrap(), [*owner as u8; 1000]);
    }
    // What is moved stays cold.
    let (hot, cold): (Vec<_>, Vec<_>) = handles.into_iter().partition(|(owner, _)| owner % 7 != 0);
    hot.into_iter().for_each(|(_, handle)| pool.free(handle).unwrap());
    pool.compact();
    let new = pool.store(&[1; 3000], 9999).unwrap();
    let mut cold: HashMap<_, _> = cold.into_iter().collect();
    let all = cold.len();
    let evict = |owner: u32| pool.free(cold.remove(&owner).unwrap()).unwrap();
    assert!(pool.reclaim(pool.pages_used() - 3, evict).unwrap() > 0);
    assert!(cold.len() < all / 10, "{} of {all} are left", cold.len());
    pool.free(new).unwrap();
    let without = Options::new("library", 10);
    let refused =
        Pool::<D>::new(Arc::new(Arena::new(1 << 20).unwrap()), &without).unwrap().reclaim(1, |_| ());
    assert_eq!(refused.unwrap_err().setting(), Some("reclaim"));
}

/// A cache as a user would make one: threads look up and insert, evict and compact, and everything found
/// is what was stored.
fn eviction_goes_on_beside_everything_else<D: Design>() {
    type Shelf = Mutex<HashMap<u32, super::super::Handle>>;
    const KEYS: usize = 3000;
    let pool = new::<D>();
    let shelves: Vec<Shelf> = (0..16).map(|_| Mutex::new(&classes::SLOT, HashMap::new())).collect();
    let shelf = |key: u32| shelves[key as usize % shelves.len()].lock();
    let value = |key: u32| vec![key as u8; 1 + key as usize * 37 % 4096];
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (pool, shelf) = (&pool, &shelf);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for step in 0..if cfg!(tsan) { 200 } else { 1500 } {
                    let key = random.below(KEYS) as u32;
                    if thread == 0 && step % 50 == 0 {
                        pool.compact();
                    } else if step % 100 == 0 {
                        let evict = |owner: u32| {
                            let old = shelf(owner).remove(&owner);
                            old.into_iter().for_each(|handle| pool.free(handle).unwrap());
                        };
                        pool.reclaim(1 + random.below(40) as u64, evict).unwrap();
                    }
                    let mut shelf = shelf(key);
                    if let Some(handle) = shelf.get(&key) {
                        assert_eq!(*pool.read(handle).unwrap(), value(key));
                    } else {
                        shelf.insert(key, pool.store(&value(key), key).unwrap());
                    }
                }
            });
        }
    });
    let all: HashMap<u32, _> = shelves.iter().flat_map(|shelf| std::mem::take(&mut *shelf.lock())).collect();
    for (key, handle) in &all {
        assert_eq!(*pool.read(handle).unwrap(), value(*key));
    }
    let counts = pool.class_stats();
    assert_eq!(counts.iter().map(|stat| stat.obj_used).sum::<u64>(), all.len() as u64);
    assert_eq!(counts.iter().map(|stat| u64::from(stat.zspages[0])).sum::<u64>(), 0);
    all.into_values().for_each(|handle| pool.free(handle).unwrap());
    assert_eq!(pool.pages_used(), 0);
}
