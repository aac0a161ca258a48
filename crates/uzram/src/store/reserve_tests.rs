//! Stores with a reserve of memory.

use super::designs::each_pool_design;
use super::policy::Reclaimed;
use super::tests::{discard, noise, page, put, store, until};
use super::writeback_tests::{PACKED, check, incompressible as raw, place};
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

fn write_until_it_fails(store: &Store) -> (u64, Error) {
    (0..)
        .find_map(|at| Some((at, store.write(PageNo::from_number(at), &raw(at)).err()?)))
        .expect("it fails some time")
}

fn write_at_last(store: &Store, at: u64, contents: &Page) {
    until("a write", || store.write(PageNo::from_number(at), contents).is_ok());
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

#[test]
fn a_write_fails_at_once_when_the_reserve_is_drained() {
    let store = store(&config(16 << 10, 2));
    let stats = store.stats();
    assert_eq!((stats.reserve_pages, stats.reserve_free_pages), (2 * CHUNK, 2 * CHUNK));
    assert_eq!((stats.charged_pages, stats.reserve_drained), (2 * CHUNK, 0));
    store.arena.hold_refills(true);
    let start = Instant::now();
    let (pages, error) = write_until_it_fails(&store);
    assert!(start.elapsed() < Duration::from_secs(20), "it waited");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoMemory, Some("reserve")));
    // One chunk for pages, one for metadata.
    assert!((CHUNK - 16..=CHUNK).contains(&pages), "{pages}");
    // Old contents stay, and can be read and discarded; the freed memory can be written again.
    assert!(store.write(PageNo(0), &raw(pages)).is_err());
    assert!(store.write_part(PageNo(1), 7, &[0; 100], Wait::Yes).is_err());
    assert_eq!((store.stats().reserve_drained, store.stats().failed_writes), (3, 3));
    check(&store, 0..pages, raw);
    store.discard_pages(0..20);
    (0..16).for_each(|at| put(&store, at, &raw(at)));
    store.zero(PageNo(19));
    // The refiller was woken, and keeps retrying.
    store.arena.hold_refills(false);
    write_at_last(&store, pages, &raw(pages));
    until("a full reserve", || store.stats().reserve_free_pages >= 2 * CHUNK);
    (16..20).for_each(|at| put(&store, at, &raw(at)));
    check(&store, 0..=pages, raw);
}

#[test]
fn a_write_fails_at_the_limit_until_that_is_raised() {
    let store = store(&StoreBuilder { limit_pages: 4 * CHUNK, ..config(16 << 10, 4) });
    let (pages, error) = write_until_it_fails(&store);
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("mem_limit")));
    assert!(pages > 2 * CHUNK, "{pages}");
    let stats = store.stats();
    assert_eq!((stats.charged_pages, stats.reserve_free_pages, stats.reserve_drained), (4 * CHUNK, 0, 0));
    check(&store, 0..pages, raw);
    store.set_limit_pages(16 * CHUNK);
    write_at_last(&store, pages, &raw(pages));
    check(&store, 0..=pages, raw);
    // A lower limit releases all free memory.
    store.discard_pages(0..pages + 1);
    store.set_limit_pages(1);
    let stats = store.stats();
    assert!(stats.charged_pages <= 2 * CHUNK && stats.reserve_free_pages == 0, "{stats:?}");
}

fn mixed(seed: u64) -> Page {
    noise(seed as usize % 7 * 512, seed)
}

#[test]
fn pages_leave_so_that_the_reserve_stays_free_at_the_limit() {
    for order in ReclaimOrder::ALL {
        let policy = ReclaimPolicy { order, ..ReclaimPolicy::default() };
        let config = StoreBuilder { limit_pages: 16 * CHUNK, policy, ..config(24 << 10, 4) };
        let store = place(128 << 20, PACKED, config);
        store.watermarks.is_awake.set(0);
        let (mut random, mut turns) = (Random::new(3), 0);
        // The pages that stay are scattered between those that leave.
        for at in (0..24 << 10).chain((0..8 << 10).map(|_| random.below(24 << 10) as u64)) {
            // Wait for the refiller; no write fails because of the limit.
            let deadline = Instant::now() + Duration::from_secs(20);
            while let Err(error) = store.write(PageNo::from_number(at), &mixed(at)) {
                let is_in_time = Instant::now() < deadline;
                assert!(is_in_time && error.setting() == Some("reserve"), "{error}: {:?}", store.stats());
                std::thread::sleep(Duration::from_millis(1));
            }
            if store.watermarks.is_awake.get() != 0 {
                for turn in 0.. {
                    if !store.watermarks.is_urgent(&store.arena) {
                        break;
                    }
                    assert_eq!(store.reclaim(), Reclaimed::Some, "{:?}", store.policy_stats());
                    assert!(turn < 1000, "it has no end: {:?}", store.policy_stats());
                }
                store.watermarks.is_awake.set(0);
                let stats = store.stats();
                // The refiller may still be filling a chunk.
                let is_at_limit = stats.charged_pages == 16 * CHUNK;
                assert!(!is_at_limit || stats.reserve_free_pages >= 3 * CHUNK, "{order}: {stats:?}");
                turns += 1;
            }
        }
        assert!(turns > 2, "{order}: {:?}", store.policy_stats());
        assert_eq!(store.stats().limit_refused, 0, "{order}");
        check(&store, 0..24 << 10, mixed);
        // Pages that are read do not return to memory at the expense of the reserve.
        assert!(store.stats().reserve_free_pages >= 3 * CHUNK, "{order}: {:?}", store.stats());
    }
}

#[test]
fn marks_are_of_what_the_reserve_leaves() {
    let of = |pages: u64| [pages * 95 / 100, pages * 90 / 100];
    // Without a limit there are none.
    for (limit_chunks, marks) in [(20, of(16 * CHUNK)), (4, of(2 * CHUNK)), (0, [0, 0])] {
        let config = StoreBuilder { limit_pages: limit_chunks * CHUNK, ..config(8 << 10, 4) };
        let stats = place(8 << 20, PACKED, config).store.policy_stats();
        assert_eq!(stats[..2], [("high_pages", marks[0]), ("low_pages", marks[1])]);
    }
}

#[test]
fn a_write_that_the_limit_refuses_is_counted() {
    // The reserve is the whole limit and full from the beginning, so that no write finds it being filled.
    let config = StoreBuilder { limit_pages: 4 * CHUNK, ..config(16 << 10, 4) };
    let place = place(64 << 20, PACKED, config);
    // Without the policy's thread no page is reclaimed.
    let (pages, error) = write_until_it_fails(&place.store);
    assert_eq!(error.setting(), Some("mem_limit"));
    let stats = place.store.stats();
    assert_eq!((stats.limit_refused, stats.failed_writes, stats.reserve_drained), (1, 1, 0));
    let decided = place.store.policy_stats();
    assert!(decided.contains(&("writers_refused", 1)), "{decided:?}");
    check(&place.store, 0..pages, raw);
}

#[test]
fn a_reserve_that_cannot_be_is_refused() {
    let limited = StoreBuilder { limit_pages: 2 * CHUNK - 1, ..config(1024, 2) };
    for (config, kind, setting, hint) in [
        (limited, ErrorKind::Invalid, "mem_limit", "at least 4 MiB"),
        // A reserve is whole chunks, and at least two.
        (
            StoreBuilder { limit_pages: 2 * CHUNK - 1, reserve_pages: 1, ..config(1024, 0) },
            ErrorKind::Invalid,
            "mem_limit",
            "",
        ),
        (config(1024, 1 << 20), ErrorKind::NoMemory, "reserve", ""),
        (config(1024, 100), ErrorKind::Invalid, "reserve", ""),
        // The tables alone are too large.
        (config(MAX_PAGES, 2), ErrorKind::NoMemory, "reserve", ""),
        (config(1024, u64::MAX >> 22), ErrorKind::NoMemory, "reserve", ""),
    ] {
        let error = Store::new(&config).err().expect("refused");
        assert_eq!((error.kind(), error.setting()), (kind, Some(setting)), "{config:?}");
        assert!(error.to_string().contains(hint), "{error}");
    }
    // The reserve may be the whole limit: the first page fits into it.
    put(&store(&StoreBuilder { limit_pages: 2 * CHUNK, ..config(1024, 2) }), 0, &raw(0));
}

#[test]
fn fixed_tables_are_there_from_the_beginning() {
    let without = store(&config(64 << 10, 0));
    let (fixed, resident) = (without.fixed_bytes(), without.table_resident_bytes());
    assert!(resident < fixed / 2, "{resident} of {fixed}");
    let store = store(&config(64 << 10, 2));
    let (fixed, resident) = (store.fixed_bytes(), store.table_resident_bytes());
    assert_eq!(store.slots.table_memory_bytes(), (64 << 10) * slot::SLOT_BYTES);
    assert!((fixed..fixed + (1 << 20)).contains(&resident), "{resident} of {fixed}");
    let mut random = Random::new(1);
    (0..20_000).for_each(|at| write_at_last(&store, at, &page(&mut random)));
    assert_eq!(store.fixed_bytes(), fixed, "no spare stream is made");
    // The tables may grow by a page for each chunk.
    let most = resident + store.arena.chunks_held() as usize * PAGE_SIZE;
    assert!(store.table_resident_bytes() <= most, "{} instead of {resident}", store.table_resident_bytes());
    store.discard_pages(0..64 << 10);
    assert_eq!(store.slots.table_memory_bytes(), (64 << 10) * slot::SLOT_BYTES);
}

#[test]
fn a_scattered_store_is_packed_by_whole_chunks() {
    let pages = 24 << 10;
    for config in each_pool_design(&StoreBuilder { compact_threshold_percent: 0, ..config(pages, 3) }) {
        let (design, store) = (config.designs, store(&config));
        let contents = |at: u64| page(&mut Random::new(at));
        (0..pages).for_each(|at| write_at_last(&store, at, &contents(at)));
        discard(&store, (0..pages).filter(|at| at % 5 > 0));
        let before = store.arena.chunks_in_use();
        store.compact();
        let after = store.arena.chunks_in_use();
        assert!(2 * after <= before, "{design:?}: {after} of {before} chunks");
        // Chunks being filled or emptied are charged. One more chunk may be kept.
        until("its reserve alone is free", || {
            let stats = store.stats();
            let is_resident = pages_to_bytes(stats.charged_pages) as usize == store.arena.resident_bytes();
            is_resident && (3 * CHUNK..=4 * CHUNK).contains(&stats.reserve_free_pages)
        });
        let stats = store.stats();
        assert_eq!(stats.charged_pages, stats.chunk_pages, "{design:?}: {stats:?}");
        check(&store, 0..pages, |at| if at % 5 > 0 { [0; PAGE_SIZE] } else { contents(at) });
    }
}
