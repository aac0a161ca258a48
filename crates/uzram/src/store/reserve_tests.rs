use super::designs::each_pool_design;
use super::policy::Reclaimed;
use super::tests::page;
use super::writeback_tests::place;
use super::*;
use crate::base::error::{Error, ErrorKind};
use crate::base::machine_memory::Memory;
use crate::base::mem::CHUNK_PAGES;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo};
use std::time::{Duration, Instant};

const CHUNK: u64 = CHUNK_PAGES as u64;

fn config(pages: u64, reserve_chunks: u64) -> StoreBuilder {
    StoreBuilder { reserve_pages: reserve_chunks * CHUNK, ..StoreBuilder::new("test", pages) }
}

/// Returns a page that does not compress.
fn noise(seed: u64) -> Page {
    let mut random = Random::new(seed);
    std::array::from_fn(|_| random.next() as u8)
}

fn write_until_it_fails(store: &Store, from: u64) -> (u64, Error) {
    (from..)
        .find_map(|at| Some((at, store.write(PageNo::from_number(at), &noise(at)).err()?)))
        .expect("it fails some time")
}

/// Checks that the first `pages` pages are as [`write_until_it_fails`] left them.
fn verify(store: &Store, pages: u64) {
    let mut read = [0; PAGE_SIZE];
    for at in 0..pages {
        store.read(PageNo::from_number(at), &mut read).expect("sound");
        assert!(read == noise(at), "page {at}");
    }
}

/// Retries a write until it succeeds.
fn write_at_last(store: &Store, at: u64) {
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = store.write(PageNo::from_number(at), &noise(at)) {
        assert!(Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_reserve_must_fit_into_the_machine_and_into_the_cgroup() {
    let fits = |ram_bytes: u64, limit_bytes: u64| {
        reserve::check_fits_into(&Memory { ram_bytes, limit_bytes }, 1 << 18, 64 << 8)
    };
    // 64 MiB, and 7 MiB of tables.
    fits(1 << 30, 1 << 30).expect("room");
    fits(1 << 30, 72 << 20).expect("room");
    let error = fits(1 << 30, 70 << 20).expect_err("more than the cgroup has");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoMemory, Some("reserve")));
    assert!(error.to_string().contains("cgroup allows it 70"), "{error}");
    let error = fits(70 << 20, 70 << 20).expect_err("more than the machine has");
    assert!(error.to_string().contains("this machine does not have"), "{error}");
}

/// A reserve is whole chunks, and at least two; the limit must leave room for all of them.
#[test]
fn a_limit_below_the_whole_reserve_is_refused() {
    let check = |limit_pages| {
        StoreBuilder { limit_pages, reserve_pages: 1, ..StoreBuilder::new("test", 1000) }.check()
    };
    let error = check(2 * CHUNK - 1).expect_err("the reserve takes more");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("mem_limit")));
    check(2 * CHUNK).expect("the reserve fits");
}

#[test]
fn a_write_fails_at_once_when_the_reserve_is_drained() {
    let store = Store::new(&config(16 << 10, 2)).expect("store");
    let stats = store.stats();
    assert_eq!((stats.reserve_pages, stats.reserve_free_pages), (2 * CHUNK, 2 * CHUNK));
    assert_eq!((stats.charged_pages, stats.reserve_drained), (2 * CHUNK, 0));
    store.arena.hold_refills(true);
    let start = Instant::now();
    let (pages, error) = write_until_it_fails(&store, 0);
    assert!(start.elapsed() < Duration::from_secs(20), "it waited");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoMemory, Some("reserve")));
    // One chunk for pages, one for metadata.
    assert!((CHUNK - 16..=CHUNK).contains(&pages), "{pages}");
    // Old contents stay, and can be read and discarded; the freed memory can be written again.
    assert!(store.write(PageNo(0), &noise(pages)).is_err());
    assert!(store.write_part(PageNo(1), 7, &[0; 100], Wait::Yes).is_err());
    assert_eq!((store.stats().reserve_drained, store.stats().failed_writes), (3, 3));
    verify(&store, pages);
    store.discard_pages(0..20);
    (0..16).for_each(|at| store.write(PageNo::from_number(at), &noise(at)).expect("there is room again"));
    store.zero(PageNo(19));
    // The refiller was woken, and keeps retrying.
    store.arena.hold_refills(false);
    write_at_last(&store, pages);
    let until = Instant::now() + Duration::from_secs(60);
    while store.stats().reserve_free_pages < 2 * CHUNK {
        assert!(Instant::now() < until, "{:?}", store.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    (16..20).for_each(|at| store.write(PageNo::from_number(at), &noise(at)).expect("it is full"));
    verify(&store, pages + 1);
}

#[test]
fn a_write_fails_at_the_limit_until_that_is_raised() {
    let config = StoreBuilder { limit_pages: 4 * CHUNK, ..config(16 << 10, 4) };
    let store = Store::new(&config).expect("store");
    let (pages, error) = write_until_it_fails(&store, 0);
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("mem_limit")));
    assert!(pages > 2 * CHUNK, "{pages}");
    let stats = store.stats();
    assert_eq!((stats.charged_pages, stats.reserve_free_pages, stats.reserve_drained), (4 * CHUNK, 0, 0));
    verify(&store, pages);
    store.set_limit_pages(16 * CHUNK);
    write_at_last(&store, pages);
    verify(&store, pages + 1);
    // A lower limit releases all free memory.
    store.discard_pages(0..pages + 1);
    store.set_limit_pages(1);
    let stats = store.stats();
    assert!(stats.charged_pages <= 2 * CHUNK && stats.reserve_free_pages == 0, "{stats:?}");
}

/// Returns a page whose object takes from nothing up to about 3 KiB.
fn mixed(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    Random::new(seed).fill(&mut page[..seed as usize % 7 * 512]);
    page
}

/// Reclaims pages as long as the store's policy is urgent.
fn relieve_while_awake(store: &Store) {
    let mut turns = 0;
    while store.watermarks.is_urgent(&store.arena) {
        assert_eq!(store.reclaim(), Reclaimed::Some, "{:?}", store.policy_stats());
        turns += 1;
        assert!(turns < 1000, "it has no end: {:?}", store.policy_stats());
    }
    store.watermarks.is_awake.set(0);
}

/// At the limit, where the refiller can do nothing, pages are reclaimed before the reserve is used up, and
/// whole chunks become free.
#[test]
fn pages_leave_so_that_the_reserve_stays_free_at_the_limit() {
    for order in ReclaimOrder::ALL {
        let policy = ReclaimPolicy { order, ..ReclaimPolicy::default() };
        let config = StoreBuilder { limit_pages: 16 * CHUNK, policy, ..config(24 << 10, 4) };
        let place = place(128 << 20, WritebackLayout::Packed, true, config);
        let store = &place.store;
        store.watermarks.is_awake.set(0);
        let (mut random, mut turns) = (Random::new(3), 0);
        // The pages that stay are scattered between those that leave.
        for at in (0..24 << 10).chain((0..8 << 10).map(|_| random.below(24 << 10) as u64)) {
            // Wait for the refiller; no write fails because of the limit.
            let until = Instant::now() + Duration::from_secs(20);
            while let Err(error) = store.write(PageNo::from_number(at), &mixed(at)) {
                let is_in_time = Instant::now() < until;
                assert!(is_in_time && error.setting() == Some("reserve"), "{error}: {:?}", store.stats());
                std::thread::sleep(Duration::from_millis(1));
            }
            if store.watermarks.is_awake.get() != 0 {
                relieve_while_awake(store);
                let stats = store.stats();
                // The refiller may still be filling a chunk.
                let is_at_limit = stats.charged_pages == 16 * CHUNK;
                assert!(!is_at_limit || stats.reserve_free_pages >= 3 * CHUNK, "{order}: {stats:?}");
                turns += 1;
            }
        }
        assert!(turns > 2, "{order}: {:?}", store.policy_stats());
        assert_eq!(store.stats().limit_refused, 0, "{order}");
        let mut read = [0; PAGE_SIZE];
        for at in 0..24 << 10 {
            store.read(PageNo::from_number(at), &mut read).expect("sound");
            assert!(read == mixed(at), "{order}: page {at}");
        }
        // Pages that are read do not return to memory at the expense of the reserve.
        assert!(store.stats().reserve_free_pages >= 3 * CHUNK, "{order}: {:?}", store.stats());
    }
}

/// The watermarks are percentages of the limit less the reserve, but of at least half of the limit.
#[test]
fn marks_are_of_what_the_reserve_leaves() {
    let marks = |limit_chunks: u64, reserve_chunks: u64| {
        let config = StoreBuilder { limit_pages: limit_chunks * CHUNK, ..config(8 << 10, reserve_chunks) };
        let place = place(8 << 20, WritebackLayout::Packed, true, config);
        let stats = place.store.policy_stats();
        let mark = |name| stats.iter().find(|(of, _)| *of == name).map(|(_, pages)| *pages).expect("a mark");
        (mark("high_pages"), mark("low_pages"))
    };
    let of = |pages: u64| (pages * 95 / 100, pages * 90 / 100);
    assert_eq!(marks(20, 4), of(16 * CHUNK));
    assert_eq!(marks(4, 4), of(2 * CHUNK));
    assert_eq!(marks(0, 4), (0, 0), "without a limit there are none");
}

#[test]
fn a_write_that_the_limit_refuses_is_counted() {
    // The reserve is the whole limit and full from the beginning, so that no write finds it being filled.
    let config = StoreBuilder { limit_pages: 4 * CHUNK, ..config(16 << 10, 4) };
    let place = place(64 << 20, WritebackLayout::Packed, true, config);
    // Without the policy's thread no page is reclaimed.
    let (pages, error) = write_until_it_fails(&place.store, 0);
    assert_eq!(error.setting(), Some("mem_limit"));
    let stats = place.store.stats();
    assert_eq!((stats.limit_refused, stats.failed_writes, stats.reserve_drained), (1, 1, 0));
    let decided = place.store.policy_stats();
    assert!(decided.contains(&("writers_refused", 1)), "{decided:?}");
    verify(&place.store, pages);
}

#[test]
fn a_reserve_that_cannot_be_is_refused() {
    let refused = |config: StoreBuilder| {
        let error = Store::new(&config).err().expect("refused");
        (error.kind(), error.setting())
    };
    let limited = StoreBuilder { limit_pages: 2 * CHUNK - 1, ..config(1024, 2) };
    let error = Store::new(&limited).err().expect("refused");
    assert!(error.to_string().contains("at least 4 MiB"), "{error}");
    assert_eq!(refused(limited), (ErrorKind::Invalid, Some("mem_limit")));
    // The reserve may be the whole limit: the first page fits into it.
    let store = Store::new(&StoreBuilder { limit_pages: 2 * CHUNK, ..config(1024, 2) }).expect("store");
    store.write(PageNo(0), &noise(0)).expect("there is room");
    assert_eq!(refused(config(1024, 1 << 20)), (ErrorKind::NoMemory, Some("reserve")));
    assert_eq!(refused(config(1024, 100)), (ErrorKind::Invalid, Some("reserve")));
    // The tables alone are too large.
    assert_eq!(refused(config(MAX_PAGES, 2)), (ErrorKind::NoMemory, Some("reserve")));
    assert_eq!(refused(config(1024, u64::MAX >> 22)), (ErrorKind::NoMemory, Some("reserve")));
}

/// With a reserve, the fixed memory is resident from the beginning, and does not grow.
#[test]
fn fixed_tables_are_there_from_the_beginning() {
    for reserve_chunks in [0, 2] {
        let store = Store::new(&config(64 << 10, reserve_chunks)).expect("store");
        let (fixed, resident) = (store.fixed_bytes(), store.table_resident_bytes());
        if reserve_chunks == 0 {
            assert!(resident < fixed / 2, "{resident} of {fixed}");
            continue;
        }
        assert!(resident >= fixed, "{resident} of {fixed}");
        assert!(resident < fixed + (1 << 20), "{resident} of {fixed}");
        let mut random = Random::new(1);
        for at in 0..20_000 {
            write_at_last_of(&store, at, &page(&mut random));
        }
        assert_eq!(store.fixed_bytes(), fixed, "no spare stream is made");
        // The tables may grow by a page for each chunk.
        let chunks = store.arena.chunks_held() as usize;
        let bytes = store.table_resident_bytes();
        assert!(bytes <= resident + chunks * PAGE_SIZE, "{bytes} instead of {resident}");
    }
}

fn write_at_last_of(store: &Store, at: u64, contents: &Page) {
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = store.write(PageNo::from_number(at), contents) {
        assert!(Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Compaction empties whole chunks, which go back to the system; the remaining pages keep their contents.
#[test]
fn a_scattered_store_is_packed_by_whole_chunks() {
    let pages = 24 << 10;
    for config in each_pool_design(&StoreBuilder { compact_threshold_percent: 0, ..config(pages, 3) }) {
        let design = config.designs;
        let store = Store::new(&config).expect("store");
        let contents = |at: u64| page(&mut Random::new(at));
        (0..pages).for_each(|at| write_at_last_of(&store, at, &contents(at)));
        (0..pages).filter(|at| at % 5 > 0).for_each(|at| store.discard(PageNo::from_number(at)));
        let before = store.arena.chunks_in_use();
        store.compact();
        let after = store.arena.chunks_in_use();
        assert!(2 * after <= before, "{design:?}: {after} of {before} chunks");
        let until = Instant::now() + Duration::from_secs(60);
        // Chunks being filled or emptied are charged.
        let is_resident =
            |stats: StoreStats| pages_to_bytes(stats.charged_pages) as usize == store.arena.resident_bytes();
        // Memory that CPUs kept may be freed later; one more chunk is kept then.
        let is_due = |stats: StoreStats| {
            (3 * CHUNK..=4 * CHUNK).contains(&stats.reserve_free_pages) && is_resident(stats)
        };
        while !is_due(store.stats()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let stats = store.stats();
        let is_whole = stats.charged_pages == stats.chunk_pages;
        assert!(Instant::now() < until && is_whole, "{design:?}: {stats:?}");
        let mut read = [0; PAGE_SIZE];
        for at in 0..pages {
            store.read(PageNo::from_number(at), &mut read).expect("sound");
            let wanted = if at % 5 > 0 { [0; PAGE_SIZE] } else { contents(at) };
            assert!(read == wanted, "{design:?}: page {at}");
        }
    }
}

/// After all pages are discarded, the memory is freed in the background, including what CPUs keep, but for
/// the reserve.
#[test]
fn an_emptied_store_keeps_its_reserve_only() {
    let store = Store::new(&config(24 << 10, 2)).expect("store");
    (0..24 << 10).for_each(|at| write_at_last_of(&store, at, &page(&mut Random::new(at))));
    assert!(store.stats().charged_pages > 10 * CHUNK);
    store.discard_pages(0..24 << 10);
    let until = Instant::now() + Duration::from_secs(60);
    // Chunks of slab caches stay for a while, and one more free chunk is kept.
    let resident_pages = || (store.arena.resident_bytes() / PAGE_SIZE) as u64;
    let is_due = |charged: u64| charged <= 5 * CHUNK && charged == resident_pages();
    while !is_due(store.stats().charged_pages) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let stats = store.stats();
    assert!(Instant::now() < until && stats.reserve_free_pages >= 2 * CHUNK, "{stats:?}");
    assert_eq!(stats.pages_stored, 0);
}
