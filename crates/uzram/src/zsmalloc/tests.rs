use super::*;
use crate::base::random::Random;
use std::collections::HashMap;

fn pool(chain_size: usize) -> Pool {
    let arena = Arc::new(Arena::new(256 << 20).expect("address space"));
    arena.set_run_cache_batch_pages(32).expect("batch");
    Pool::new("test", arena, chain_size, 1 << 20).expect("pool")
}

/// The cell of a handle that the test has not freed.
fn cell(pool: &Pool, handle: Handle) -> &HandleCell {
    // SAFETY: the handle is in use.
    unsafe { pool.handles.get(handle.to_bits()) }
}

/// Contents that only the object of this number has.
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

/// What the class statistics must say, counted from the list of live objects.
fn check_stats(pool: &Pool, live: &HashMap<u32, Vec<u8>>) {
    let stats = pool.class_stats();
    let mut used: HashMap<SizeClass, u64> = HashMap::new();
    for bytes in live.values() {
        *used.entry(*pool.classes.get(pool.classes.index_for(bytes.len()))).or_default() += 1;
    }
    let mut pages = 0;
    for stat in &stats {
        assert_eq!(stat.obj_used, used.remove(&stat.class).unwrap_or(0), "{:?}", stat.class);
        let zspages = zspages(stat);
        assert_eq!(stat.zspages[0], 0, "empty zspages are given back");
        assert!(stat.pages_used <= zspages * u64::from(stat.class.pages_per_zspage));
        assert!(stat.pages_used * PAGE_SIZE as u64 >= stat.obj_used * u64::from(stat.class.size_bytes));
        pages += stat.pages_used;
    }
    assert_eq!(pool.pages_used(), pages);
    assert!(pool.arena.charged_pages() >= pages);
}

/// Stores in one of the ways there are, and now and then reserves an object in vain.
fn store(pool: &Pool, bytes: &[u8], owner: u32, random: &mut Random) -> Option<Handle> {
    let other_len = 1 + random.below(PAGE_SIZE);
    match random.below(4) {
        0 => pool.store(bytes, owner, Gfp::MayWait).ok(),
        1 => pool.store(bytes, owner, Gfp::NoWait).or_else(|_| pool.store(bytes, owner, Gfp::MayWait)).ok(),
        2 => {
            drop(pool.reserve(other_len, Gfp::NoWait));
            pool.reserve(bytes.len(), Gfp::MayWait).and_then(|reserved| reserved.write(bytes, owner)).ok()
        }
        _ => pool.reserve(other_len, Gfp::MayWait).and_then(|reserved| reserved.write(bytes, owner)).ok(),
    }
}

/// Seeded stores, reservations, reads and frees, with failures injected now and then, against a map.
#[test]
fn agrees_with_a_naive_model() {
    for seed in 0..8 {
        let mut random = Random::new(seed);
        let pool = pool(4 + seed as usize % 13);
        let mut live: HashMap<u32, Vec<u8>> = HashMap::new();
        let (mut keys, mut refused) = (Vec::new(), 0);
        for step in 0..6000u32 {
            if step % 1000 == 500 {
                pool.arena.inject_faults(seed, 3);
            } else if step % 1000 == 999 {
                pool.arena.inject_faults(0, 0);
                check_stats(&pool, &live);
            }
            // Grow for a while, then shrink.
            if random.below(100) < if step / 2000 % 2 == 0 { 70 } else { 40 } {
                let bytes = contents(&mut random, u64::from(step));
                let Some(handle) = store(&pool, &bytes, step, &mut random) else {
                    refused += 1;
                    continue;
                };
                assert!(live.insert(handle.to_bits(), bytes).is_none(), "seed {seed}: a handle in use");
                keys.push((handle, step));
            } else if !keys.is_empty() {
                let (handle, owner) = keys.swap_remove(random.below(keys.len()));
                let bytes = live.remove(&handle.to_bits()).expect("live");
                assert_eq!(*pool.pin(handle, owner, bytes.len()).expect("sound"), *bytes, "seed {seed}");
                pool.free(handle);
            }
        }
        for (handle, owner) in keys {
            let bytes = live.remove(&handle.to_bits()).expect("live");
            assert_eq!(*pool.pin(handle, owner, bytes.len()).expect("sound"), *bytes, "seed {seed}");
            pool.free(handle);
        }
        check_stats(&pool, &live);
        assert_eq!(
            (pool.pages_used(), pool.handles.info().active_objs, pool.zspages.in_use()),
            (0, 0, 0),
            "seed {seed}"
        );
        assert_eq!(pool.corrupted(), 0);
        assert!((10..2000).contains(&refused), "seed {seed}: {refused} refused");
    }
}

#[test]
fn lengths_and_chain_sizes_out_of_range_are_refused() {
    let arena = Arc::new(Arena::new(1 << 20).expect("address space"));
    let refused = Pool::new("test", arena, 17, 100).err().expect("too long");
    assert_eq!(refused.setting(), Some("chain_size"));
    let pool = pool(8);
    for bytes in [&[][..], &[1; PAGE_SIZE + 1]] {
        assert_eq!(pool.store(bytes, 0, Gfp::MayWait).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Without waiting the pool neither grows nor gives memory back, and takes all that is there.
#[test]
fn without_waiting_only_what_is_there_is_taken() {
    let pool = pool(8);
    let refused = pool.store(&[1; 3000], 0, Gfp::NoWait).expect_err("there is no memory yet");
    assert_eq!(refused.kind(), ErrorKind::NoMemory);
    assert_eq!((pool.arena.charged_pages(), pool.handles.info().active_objs), (0, 0));
    let first = pool.store(&[1; 3000], 0, Gfp::MayWait).expect("memory");
    let mut handles = vec![first];
    while let Ok(handle) = pool.store(&[1; 3000], 0, Gfp::NoWait) {
        handles.push(handle);
    }
    // Of a chunk of 512 pages, two slabs of 16 are metadata; runs of other lengths leave gaps.
    assert!(pool.pages_used() > 460, "{} pages", pool.pages_used());
    assert_eq!(pool.zspages.in_use(), pool.class_stats().iter().map(zspages).sum(), "none is left over");
    assert_eq!(pool.handles.info().active_objs, handles.len() as u64);

    // At the limit, with free memory in runs of another length.
    let kept = handles.len() - 40;
    handles.drain(kept..).for_each(|handle| pool.free(handle));
    pool.arena.set_limit_pages(pool.arena.charged_pages());
    let charged = pool.arena.charged_pages();
    pool.store(&[2; PAGE_SIZE], 0, Gfp::NoWait).expect_err("free pages must go back first");
    assert_eq!(pool.arena.charged_pages(), charged, "they have not");
    pool.store(&[2; PAGE_SIZE], 0, Gfp::MayWait).expect("now they have");
    assert!(pool.arena.charged_pages() < charged);
}

fn zspages(stat: &ClassStat) -> u64 {
    stat.zspages.iter().map(|count| u64::from(*count)).sum()
}

/// Bytes of another length than was reserved are stored all the same, and the object that they do
/// not need goes back.
#[test]
fn bytes_need_not_be_as_long_as_what_was_reserved() {
    let pool = pool(8);
    for (reserved_len, len) in [(100, 3000), (3000, 100), (PAGE_SIZE, 1), (1, PAGE_SIZE), (500, 501)] {
        let bytes = vec![len as u8; len];
        let reserved = pool.reserve(reserved_len, Gfp::MayWait).expect("memory");
        let handle = reserved.write(&bytes, 7).expect("memory");
        assert_eq!(*pool.pin(handle, 7, len).expect("sound"), *bytes);
        assert_eq!((pool.handles.info().active_objs, pool.zspages.in_use()), (1, 1), "{reserved_len} {len}");
        pool.free(handle);
    }
    let reserved = pool.reserve(100, Gfp::MayWait).expect("memory");
    assert_eq!(reserved.write(&[0; PAGE_SIZE + 1], 7).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!((pool.handles.info().active_objs, pool.zspages.in_use(), pool.pages_used()), (0, 0, 0));
}

#[test]
fn zspages_are_charged_as_far_as_they_are_reached() {
    let pool = pool(16);
    let len = 3000;
    let class = *pool.classes.get(pool.classes.index_for(len));
    assert!(class.pages_per_zspage > 8, "{class:?}");
    let handles: Vec<Handle> = (0..class.objs_per_zspage)
        .map(|number| {
            let handle = pool.store(&vec![7; len], u32::from(number), Gfp::MayWait).expect("memory");
            assert_eq!(pool.pages_used(), class.pages_for(usize::from(number) + 1) as u64);
            handle
        })
        .collect();
    assert_eq!(pool.zspages.in_use(), 1);
    handles.into_iter().for_each(|handle| pool.free(handle));
    assert_eq!((pool.pages_used(), pool.zspages.in_use()), (0, 0));
}

#[test]
fn new_objects_go_into_the_fullest_zspage() {
    let pool = pool(8);
    let (len, per_zspage) =
        (1000, usize::from(pool.classes.get(pool.classes.index_for(1000)).objs_per_zspage));
    let handles: Vec<Handle> = (0..3 * per_zspage)
        .map(|owner| pool.store(&vec![1; len], owner as u32, Gfp::MayWait).expect("memory"))
        .collect();
    let page = |handle: &Handle| cell(&pool, *handle).pin().page;
    // Pins taken by `page` stay: these objects are only looked at.
    let pages: Vec<u32> = handles.iter().map(page).collect();
    let (first, second) = (&handles[..per_zspage], &handles[per_zspage..2 * per_zspage]);
    for handle in first.iter().chain(&second[..3]) {
        assert_eq!(cell(&pool, *handle).unpin(), None);
    }
    first[..per_zspage - 1].iter().for_each(|handle| pool.free(*handle));
    second[..3].iter().for_each(|handle| pool.free(*handle));
    for _ in 0..3 {
        let handle = pool.store(&vec![2; len], 0, Gfp::MayWait).expect("memory");
        assert_eq!(page(&handle), pages[per_zspage], "the second zspage is the fullest with room");
    }
    assert_eq!(page(&pool.store(&vec![2; len], 0, Gfp::MayWait).expect("memory")), pages[0]);
}

#[test]
fn a_read_outlives_the_free() {
    let pool = pool(8);
    for len in [100, 2000, PAGE_SIZE] {
        let bytes = vec![len as u8; len];
        let handle = pool.store(&bytes, 1, Gfp::MayWait).expect("memory");
        let (one, two) = (pool.pin(handle, 1, len).expect("sound"), pool.pin(handle, 1, len).expect("sound"));
        pool.free(handle);
        let other = pool.store(&vec![0xff; len], 2, Gfp::MayWait).expect("memory");
        drop(one);
        assert_eq!(*two, *bytes);
        assert_eq!(pool.handles.info().active_objs, 2);
        drop(two);
        assert_eq!(pool.handles.info().active_objs, 1);
        pool.free(other);
    }
}

#[test]
fn another_owners_bytes_are_never_answered() {
    let pool = pool(8);
    for len in [100, PAGE_SIZE] {
        let handle = pool.store(&vec![1; len], 5, Gfp::MayWait).expect("memory");
        assert_eq!(pool.pin(handle, 6, len).err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
        assert!(pool.pin(handle, 5, len).is_ok());
        pool.free(handle);
    }
    let handle = pool.store(&[1; 100], 5, Gfp::MayWait).expect("memory");
    assert!(pool.pin(handle, 5, 200).is_err(), "longer than its class");
    // Damage the header: it cannot be read, and its memory is not reused.
    let object = cell(&pool, handle).pin();
    assert_eq!(cell(&pool, handle).unpin(), None);
    // SAFETY: the object is live and this test is its only user.
    unsafe { pool.place(object).0.write(!0) };
    assert!(pool.pin(handle, 5, 100).is_err());
    pool.free(handle);
    assert_eq!((pool.corrupted(), pool.handles.info().active_objs), (1, 1));
}

#[test]
fn at_the_limit_freed_room_is_used_and_growth_is_refused() {
    let pool = pool(8);
    let mut handles = Vec::new();
    pool.arena.set_limit_pages(64);
    let refused = loop {
        match pool.store(&[3; 1000], 0, Gfp::MayWait) {
            Ok(handle) => handles.push(handle),
            Err(error) => break error,
        }
    };
    assert_eq!((refused.kind(), refused.setting()), (ErrorKind::NoSpace, Some("mem_limit")));
    assert!(handles.len() > 200 && pool.arena.charged_pages() <= 64, "{}", handles.len());
    for round in 0..100 {
        pool.free(handles.swap_remove(round * 7 % handles.len()));
        handles.push(pool.store(&[4; 1000], 0, Gfp::MayWait).expect("as much as was freed"));
    }
    handles.into_iter().for_each(|handle| pool.free(handle));
    pool.store(&[5; 3000], 0, Gfp::MayWait).expect("memory freed by one class serves another");
}

/// Threads store, read and free, some of each other's objects.
#[test]
fn threads_keep_each_others_objects_apart() {
    let pool = pool(8);
    type Place = std::sync::Mutex<Option<(Handle, Vec<u8>)>>;
    let shared: Vec<Place> = (0..64).map(|_| Place::default()).collect();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (pool, shared) = (&pool, &shared);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for step in 0..6000 {
                    let place = random.below(shared.len());
                    let bytes = contents(&mut random, thread << 32 | step);
                    let handle = pool.store(&bytes, place as u32, Gfp::MayWait).expect("memory");
                    let mut slot = shared[place].lock().expect("no panic");
                    let old = slot.replace((handle, bytes));
                    let pinned =
                        old.as_ref().map(|(handle, bytes)| pool.pin(*handle, place as u32, bytes.len()));
                    drop(slot);
                    if let (Some((handle, bytes)), Some(pinned)) = (old, pinned) {
                        pool.free(handle);
                        assert_eq!(*pinned.expect("sound"), *bytes, "thread {thread} step {step}");
                    }
                }
            });
        }
    });
    let live = shared.into_iter().filter_map(|slot| slot.into_inner().expect("no panic"));
    let live: HashMap<u32, Vec<u8>> = live.map(|(handle, bytes)| (handle.to_bits(), bytes)).collect();
    check_stats(&pool, &live);
}
