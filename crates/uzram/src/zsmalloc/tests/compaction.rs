//! Tests of compaction: what it moves, and what it leaves.

use std::cell::Cell;

use super::*;
use crate::base::work::{Progress, Unit, Work};
use crate::zsmalloc::zspage::GROUP_FULL;

for_every_design!(
    compaction_packs_every_class,
    compaction_moves_no_object_of_sparse_zspages_twice,
    compaction_stays_within_its_budget,
    what_is_read_stays_where_it_is,
    damaged_objects_are_not_moved,
    at_the_limit_compaction_makes_room,
    zspages_leave_sparse_chunks,
    a_group_that_ran_empty_is_left,
    whether_it_is_wanted_is_asked_between_zspages,
    who_waits_for_another_compaction_can_give_up,
);

/// Makes a pool with random objects, of which three in four are freed again.
fn scattered<D: PoolLocks>(seed: u64) -> (RawPool<D>, HashMap<u32, Live>) {
    let pool = pool::<D>(16);
    let mut random = Random::new(seed);
    let mut live = HashMap::new();
    for owner in 0..6000 {
        let mut bytes = vec![0; 1 + random.below(PAGE_SIZE)];
        random.fill(&mut bytes);
        live.insert(store(&pool, &bytes, owner), Live { owner, bytes });
    }
    live.extract_if(|_, _| random.below(4) > 0).for_each(|(handle, _)| free(&pool, handle));
    (pool, live)
}

fn ideal_pages<D: PoolLocks>(pool: &RawPool<D>) -> u64 {
    (0..pool.classes.iter().len() as u8)
        .map(|class| pool.lists(class).ideal_pages(pool.classes.get(class)))
        .sum()
}

fn compaction_packs_every_class<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(1);
    let (used, freeable) = (pool.pages_used(), pool.freeable_pages());
    assert!(freeable > 0 && used > 2 * ideal_pages(&pool));
    let freed = pool.compact(Effort::Zspages, &mut Budget::unlimited());
    assert_eq!((pool.pages_used(), pool.pages_compacted()), (used - freed, freed));
    assert_eq!(pool.freeable_pages(), 0, "nothing is in the way");
    check(&pool, &live);
    let tight = pool.compact(Effort::Tight, &mut Budget::unlimited());
    assert_eq!((pool.pages_used(), pool.pages_compacted()), (ideal_pages(&pool), freed + tight));
    check(&pool, &live);
    assert_eq!(pool.compact(Effort::Tight, &mut Budget::unlimited()), 0, "there is nothing left to do");
}

/// Zspages that are all equally sparse: an object that was moved into one of them is not moved again.
fn compaction_moves_no_object_of_sparse_zspages_twice<D: PoolLocks>() {
    let pool = pool::<D>(16);
    let bytes = [7; 1500];
    let class = pool.classes.index_for(bytes.len());
    let objs_per_zspage = u32::from(pool.classes.get(class).objs_per_zspage);
    let handles: Vec<_> =
        (0..40 * objs_per_zspage).map(|owner| (owner, store(&pool, &bytes, owner))).collect();
    let mut live = HashMap::new();
    for (owner, handle) in handles {
        if owner.is_multiple_of(objs_per_zspage) {
            live.insert(handle, Live { owner, bytes: bytes.to_vec() });
        } else {
            free(&pool, handle);
        }
    }
    let live_bytes = live.len() as u64 * u64::from(pool.classes.get(class).size_bytes);
    let mut budget = Budget::bytes(live_bytes);
    pool.compact(Effort::Zspages, &mut budget);
    assert_eq!(pool.freeable_pages(), 0, "moving each object once is enough");
    check(&pool, &live);
}

fn compaction_stays_within_its_budget<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(2);
    let used = pool.pages_used();
    let (mut rounds, mut freed) = (0, 0);
    while pool.freeable_pages() > 0 {
        let mut budget = Budget::bytes(100_000);
        freed += pool.compact(Effort::Zspages, &mut budget);
        rounds += 1;
        assert!(rounds < 1000);
    }
    // Some hundreds of objects, of 2 KB on average, have to move.
    assert!(rounds > 3, "{rounds}");
    assert_eq!(pool.pages_used(), used - freed);
    check(&pool, &live);
}

fn what_is_read_stays_where_it_is<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(3);
    let (handle, Live { owner, bytes }) =
        live.iter().find(|(_, live)| live.bytes.len() < 3000).expect("some");
    let before = object(&pool, *handle);
    let reading = read(&pool, *handle, *owner, bytes.len()).expect("sound");
    pool.compact(Effort::Tight, &mut Budget::unlimited());
    assert_eq!(*reading, **bytes);
    drop(reading);
    assert_eq!(object(&pool, *handle), before, "it was read meanwhile");
    pool.compact(Effort::Tight, &mut Budget::unlimited());
    assert_eq!(pool.pages_used(), ideal_pages(&pool));
    check(&pool, &live);
}

fn damaged_objects_are_not_moved<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(4);
    let is_small = |(handle, live): &(&u32, &Live)| live.bytes.len() < 3000 && **handle != 5;
    let damaged: Vec<u32> = live.iter().filter(is_small).map(|(handle, _)| *handle).take(3).collect();
    let others = damaged.iter().map(|handle| object(&pool, *handle)).collect::<Vec<_>>();
    for (object, name) in others.iter().zip([5, 0x7fff_ffff, damaged[0] ^ 1]) {
        // SAFETY: the object is live, and this test is its only user.
        unsafe { pool.place(*object).0.cast::<u32>().write(name) };
    }
    pool.compact(Effort::Tight, &mut Budget::unlimited());
    let still_there = damaged.iter().map(|handle| object(&pool, *handle)).collect::<Vec<_>>();
    assert_eq!(still_there, others);
    for (handle, Live { owner, bytes }) in &live {
        let found = read(&pool, *handle, *owner, bytes.len());
        assert_eq!(found.map(|found| *found == **bytes).unwrap_or(false), !damaged.contains(handle));
    }
}

fn at_the_limit_compaction_makes_room<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(5);
    pool.arena.release_free();
    pool.arena.set_limit_pages(pool.arena.charged_pages());
    let freed = pool.compact(Effort::Zspages, &mut Budget::unlimited());
    assert!(freed > 100 && pool.freeable_pages() < 100, "{freed} freed");
    assert!(pool.arena.charged_pages() <= pool.arena.limit_pages());
    check(&pool, &live);
}

fn zspages_leave_sparse_chunks<D: PoolLocks>() {
    let (pool, live) = sparse_chunks::<D>();
    let (before, used) = (pool.arena.chunks_held(), pool.pages_used());
    pool.compact(Effort::Zspages, &mut Budget::unlimited());
    pool.arena.release_free();
    // One more for the metadata, and one for fragmentation.
    let after = pool.arena.chunks_held();
    assert!(before > 6 && after <= used.div_ceil(512) + 2, "{before} -> {after} chunks for {used} pages");
    check(&pool, &live);
}

fn sparse_chunks<D: PoolLocks>() -> (RawPool<D>, HashMap<u32, Live>) {
    let pool = pool::<D>(16);
    let mut random = Random::new(6);
    let (mut live, mut zspages) = (HashMap::new(), Vec::new());
    // Include huge objects: their zspages have one page, and only evacuation moves them.
    for owner in 0..8000 {
        let bytes = vec![owner as u8; if owner % 3 == 0 { PAGE_SIZE } else { 1000 + random.below(200) }];
        let handle = store(&pool, &bytes, owner);
        zspages.push(object(&pool, handle).page);
        live.insert(handle, Live { owner, bytes });
    }
    zspages.sort_unstable();
    zspages.dedup();
    let stays = |page: u32| zspages.binary_search(&page).expect("a zspage") % 8 == 0;
    let leaves = |handle: &u32, _: &mut Live| !stays(object(&pool, *handle).page);
    live.extract_if(leaves).for_each(|(handle, _)| free(&pool, handle));
    pool.arena.release_free();
    (pool, live)
}

fn whether_it_is_wanted_is_asked_between_zspages<D: PoolLocks>() {
    let (pool, live) = sparse_chunks::<D>();
    let (progress, most, last) = (Cell::<Option<Arc<Progress>>>::new(None), Cell::new(0), Cell::new(0));
    let is_wanted = || {
        let seen = progress.take().expect("it is set");
        most.set(most.get().max(seen.done() - last.replace(seen.done())));
        let goes_on = seen.done() < 100;
        progress.set(Some(seen));
        goes_on
    };
    let work = Work::new(Unit::Objects, &is_wanted);
    progress.set(Some(Arc::clone(work.progress())));
    pool.empty_chunks(&mut Budget::of(&work));
    // The objects have at least 1000 bytes.
    let of_zspages =
        pool.classes.iter().filter(|class| class.size_bytes >= 1000).map(|class| class.objs_per_zspage);
    let of_zspage = u64::from(of_zspages.max().expect("some"));
    let done = work.progress().done();
    assert!((1..=of_zspage).contains(&most.get()), "{} of {of_zspage} objects at once", most.get());
    assert!((100..100 + of_zspage).contains(&done), "{done}");
    check(&pool, &live);
}

fn who_waits_for_another_compaction_can_give_up<D: PoolLocks>() {
    let (pool, live) = scattered::<D>(7);
    let asked = Cell::new(0);
    let is_wanted = || asked.replace(asked.get() + 1) < 3;
    let work = Work::new(Unit::Objects, &is_wanted);
    let other = pool.compaction.lock();
    assert_eq!(pool.compact(Effort::Tight, &mut Budget::of(&work)), 0);
    drop(other);
    assert_eq!((asked.get(), work.progress().done()), (4, 0));
    assert!(pool.compact(Effort::Tight, &mut Budget::of(&Work::uninterruptible(Unit::Objects))) > 0);
    check(&pool, &live);
}

/// Other threads may take the last zspage out of a group after its zspages were counted.
fn a_group_that_ran_empty_is_left<D: PoolLocks>() {
    let pool = pool::<D>(16);
    let hidden = pool.arena.hide_sparse_chunks(Account::Pool, usize::MAX, &[]);
    let mut left = 3;
    assert_eq!(pool.find_in(&mut pool.lock_for_migration(0), GROUP_FULL, &mut left, &hidden), None);
    assert_eq!(left, 0);
}
