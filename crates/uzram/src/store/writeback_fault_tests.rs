//! Backing devices, objects and threads that fail while pages are written back.

use std::time::Duration;

use super::slot::Contents;
use super::tests::config;
use super::writeback_tests::{ALL, check, decided, expect, file, half_random, incompressible, place, write};
use super::*;
use crate::backing::{Backing, Blocks, Direction, Fault, FaultKind, FileBacking, PanicPoint};
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, PageNo};
use std::ops::Range;

/// A device that stalled and then failed is used again soon after it has recovered, however long it had
/// stalled.
#[test]
fn a_device_that_is_well_again_is_used_soon() {
    const STALL: Duration = Duration::from_secs(3);
    let place =
        place(32 << 20, WritebackLayout::Packed, true, StoreBuilder { limit_pages: 256, ..config(4096) });
    let policy = PolicyThread::start("test", &place.store).expect("a thread");
    let write = |page: u64| place.store.write(PageNo::from_number(page), &incompressible(page));
    (0..600).for_each(|page| write(page).expect("others leave"));
    place.faults.add(Fault::always(FaultKind::Stall(STALL)));
    place.faults.add(Fault::always(FaultKind::Error));
    let refused = (600..4096).find(|page| write(*page).is_err()).expect("nothing can leave");
    assert!(write(refused).is_err(), "the thread rests");
    place.faults.clear();
    let healed = std::time::Instant::now();
    while write(refused).is_err() {
        // Writes in flight may stall once more. (It once took more than four times the stall.)
        assert!(healed.elapsed() < STALL * 3, "{:?}", place.store.policy_stats());
        std::thread::sleep(Duration::from_millis(20));
    }
    check(&place.store, 0..=refused, incompressible);
    drop(policy);
}

/// Moved objects are not charged to the limit: when their writes fail, nothing is given back to it.
#[test]
fn cleaning_that_fails_gives_back_nothing() {
    const PAGES: u64 = 3000;
    let place = place(8 << 20, WritebackLayout::Packed, true, config(PAGES));
    let (store, mut random) = (&place.store, Random::new(3));
    let mut versions = vec![0; PAGES as usize];
    write(store, 0..PAGES, half_random);
    let mut overwrite = |store: &Store| {
        for _ in 0..200 {
            let page = random.below(PAGES as usize);
            versions[page] += PAGES;
            store.write(PageNo(page as u32), &half_random(page as u64 + versions[page])).expect("memory");
        }
        versions.clone()
    };
    // Until writeback needs cleaning.
    while store.backing_stats().cleaned_bytes == 0 {
        store.write_back(&ALL).expect("room");
        overwrite(store);
    }
    store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: true, left: 50 });
    place.faults.add(Fault { direction: Some(Direction::Write), ..Fault::always(FaultKind::Error) });
    let mut versions = overwrite(store);
    for _ in 0..20 {
        let _ = store.write_back(&ALL);
        assert!(store.writeback_limit().left <= 50, "{:?}", store.writeback_limit());
        versions = overwrite(store);
    }
    place.faults.clear();
    for (page, version) in (0..).zip(&versions) {
        expect(store, page, &half_random(page + version));
    }
}

/// An object whose header names a page that does not exist stays, and blocks no thread.
#[test]
fn a_damaged_owner_stops_nobody() {
    let policy = ReclaimPolicy { order: ReclaimOrder::Zspages, ..ReclaimPolicy::default() };
    let place = place(
        32 << 20,
        WritebackLayout::Packed,
        true,
        StoreBuilder { limit_pages: 512, policy, ..config(4096) },
    );
    let store = &place.store;
    let policy = PolicyThread::start("test", store).expect("a thread");
    write(store, 0..64, half_random);
    for page in [3, 20, 41] {
        let Contents::Stored { handle, len, .. } = store.slots.lock(PageNo::from_number(page)).contents()
        else {
            panic!("stored")
        };
        // SAFETY: the slot holds the handle, and no other thread frees it.
        let pinned = unsafe { store.pool.read(handle, page as u32, usize::from(len)) }.expect("sound");
        // SAFETY: no other thread uses these objects now. The owner lies just before the bytes.
        unsafe { pinned.as_ptr().cast_mut().cast::<u32>().sub(1).write(u32::MAX - page as u32) };
    }
    for page in 64..2048 {
        store.write(PageNo::from_number(page), &half_random(page)).expect("others leave");
    }
    assert_eq!(decided(store, "thread_died"), 0);
    let mut read = [0; PAGE_SIZE];
    for page in 0..2048 {
        match page {
            3 | 20 | 41 => assert_eq!(
                store.read(PageNo::from_number(page), &mut read).unwrap_err().kind(),
                ErrorKind::Corrupt
            ),
            _ => expect(store, page, &half_random(page)),
        }
    }
    drop(policy);
}

/// After the thread that writes to the backing device has died, pages stay in memory, and those that left can
/// be read.
#[test]
fn a_store_whose_backing_died_goes_on_in_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = Arc::new(file(dir.path(), 8 << 20));
    let blocks: Arc<dyn Blocks> = Arc::<FileBacking>::clone(&file);
    let backing = Some(BackingOptions::packed(Backing::Blocks(blocks)));
    let store = Store::new(&StoreBuilder { backing, ..config(200) }).expect("store");
    let write = |pages: Range<u64>| {
        pages.for_each(|page| store.write(PageNo::from_number(page), &half_random(page)).expect("memory"))
    };
    write(0..50);
    assert_eq!(store.write_back(&ALL), Ok(50));
    write(50..100);
    file.panic_in_next_transfer(PanicPoint::Begin);
    for _ in 0..2 {
        let error = store.write_back(&ALL).expect_err("its thread has died");
        assert!(error.kind() == ErrorKind::Io && error.to_string().contains("defect"), "{error}");
    }
    write(100..200);
    assert_eq!((store.stats().failed_writes, store.backing_stats().pages), (0, 50));
    check(&store, 0..200, half_random);
    assert_eq!(store.stats().failed_reads, 0);
}
