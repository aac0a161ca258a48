//! Tests of the pool's public interface.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::zsmalloc::{Object, Pool};

for_every_design!(
    a_dropped_object_is_freed,
    handles_are_of_one_pool_and_free_their_bytes,
    the_coldest_are_evicted_first,
    eviction_goes_on_beside_everything_else,
);

fn new<D: PoolLocks>() -> Pool<D> {
    let arena = Arc::new(Arena::new(64 << 20).expect("address space"));
    let builder = Pool::builder("library").max_objects(10_000).count_locks(true).reclaim(true);
    builder.build_in(arena).expect("pool")
}

fn a_dropped_object_is_freed<D: PoolLocks>() {
    let pool = new::<D>();
    let objects: Vec<_> = (1..=100).map(|len| pool.store(&vec![len as u8; len]).unwrap()).collect();
    for object in &objects {
        assert_eq!(*object.read().unwrap(), vec![object.len() as u8; object.len()]);
    }
    let in_use = || pool.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>();
    assert_eq!((in_use(), objects[6].owner()), (100, 0));
    let handles: Vec<_> = objects.into_iter().skip(90).map(Object::into_handle).collect();
    assert_eq!(in_use(), 10, "those that were skipped were dropped");
    let objects: Vec<_> = handles.into_iter().map(|handle| pool.object(handle).unwrap()).collect();
    assert_eq!(*objects[9].read().unwrap(), [100; 100]);
    drop(objects);
    assert_eq!((in_use(), pool.pages_used()), (0, 0));
    pool.store(&[]).unwrap_err();
}

#[test]
fn a_built_pool_keeps_its_limit() {
    let pool = Pool::builder("built").limit_bytes(2 << 20).build().unwrap();
    assert_eq!((pool.limit_bytes(), pool.charged_bytes()), (2 << 20, 0));
    let objects: Vec<_> = std::iter::from_fn(|| pool.store(&[7; 1000]).ok()).collect();
    assert_eq!(pool.store(&[7; 1000]).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(objects.len() > 1500 && pool.charged_bytes() <= pool.limit_bytes(), "{}", objects.len());
    drop(objects);
    assert_eq!(pool.pages_used(), 0);
    for (builder, setting) in [
        (Pool::builder("none").limit_bytes(4095), "limit_bytes"),
        (Pool::builder("long").chain_size(17), "chain_size"),
    ] {
        let refused = builder.build().unwrap_err();
        assert_eq!((refused.kind(), refused.setting()), (ErrorKind::Invalid, Some(setting)));
    }
    let pool = Pool::builder("few").max_objects(3).build().unwrap();
    assert!(std::iter::from_fn(|| pool.store(&[1]).ok()).collect::<Vec<_>>().len() >= 3);
}

fn handles_are_of_one_pool_and_free_their_bytes<D: PoolLocks>() {
    let (pool, other) = (new::<D>(), new::<D>());
    let store = |len: u32| pool.store_for(&vec![len as u8; len as usize], len).unwrap().into_handle();
    let handles: Vec<_> = (1..=4096).map(store).collect();
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

fn the_coldest_are_evicted_first<D: PoolLocks>() {
    let pool = new::<D>();
    let mut handles = HashMap::new();
    for owner in 0..4000 {
        handles.insert(owner, pool.store_for(&[owner as u8; 1000], owner).unwrap().into_handle());
    }
    let (pages, mut evicted) = (pool.pages_used(), Vec::new());
    let freed = pool.reclaim(pages / 2, |owner| {
        evicted.push(owner);
        pool.free(handles.remove(&owner).unwrap()).unwrap();
    });
    let freed = freed.unwrap();
    assert_eq!(pool.pages_used(), pages - freed);
    assert!(freed >= pages / 2 && freed < pages / 2 + 16, "{freed} of {pages}");
    // Whole zspages were evicted, in the order in which they were stored.
    assert!(evicted.iter().enumerate().all(|(at, owner)| at as u32 == *owner), "{evicted:?}");
    // Zspages that are not emptied become the hottest: reclaim tries each once.
    let (pages, mut asked) = (pool.pages_used(), Vec::new());
    assert_eq!(pool.reclaim(1, |owner| asked.push(owner)).unwrap(), 0);
    assert_eq!(asked.len(), handles.len());
    assert_eq!(pool.pages_used(), pages);
    for (owner, handle) in &handles {
        assert_eq!(*pool.read(handle).unwrap(), [*owner as u8; 1000]);
    }
    // Objects that compaction moves stay cold.
    let (hot, cold): (Vec<_>, Vec<_>) = handles.into_iter().partition(|(owner, _)| owner % 7 != 0);
    hot.into_iter().for_each(|(_, handle)| pool.free(handle).unwrap());
    pool.compact();
    let new = pool.store_for(&[1; 3000], 9999).unwrap();
    let mut cold: HashMap<_, _> = cold.into_iter().collect();
    let all = cold.len();
    let evict = |owner: u32| pool.free(cold.remove(&owner).unwrap()).unwrap();
    assert!(pool.reclaim(pool.pages_used() - 3, evict).unwrap() > 0);
    assert!(cold.len() < all / 10, "{} of {all} are left", cold.len());
    drop(new);
    let without = Pool::builder("library").max_objects(10);
    let refused = without.build_in::<D>(Arc::new(Arena::new(1 << 20).unwrap())).unwrap().reclaim(1, |_| ());
    assert_eq!(refused.unwrap_err().setting(), Some("reclaim"));
}

/// A cache such as a user would write.
fn eviction_goes_on_beside_everything_else<D: PoolLocks>() {
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
                        shelf.insert(key, pool.store_for(&value(key), key).unwrap().into_handle());
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
