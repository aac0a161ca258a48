//! Backing devices and objects that fail while pages are written back.

use std::time::{Duration, Instant};

use super::slot::{Backed, Contents};
use super::tests::{config, expect, noise, put};
use super::writeback_tests::{
    ALL, LAYOUTS, PACKED, Place, Versions, check, decided, half_random, incompressible, place, policy,
    refusal, state, write,
};
use super::*;
use crate::backing::{Direction, Fault, FaultKind, MARK_BYTES};
use crate::base::error::ErrorKind;
use crate::base::units::{PAGE_SIZE, PageNo};

#[test]
fn a_device_that_fails_loses_nothing_that_is_in_memory() {
    let kinds = [FaultKind::Error, FaultKind::NoSpace, FaultKind::Short];
    for (layout, kind) in LAYOUTS.into_iter().flat_map(|layout| kinds.map(|kind| (layout, kind))) {
        let store = place(8 << 20, layout, config(400));
        write(&store, 0..400, half_random);
        assert_eq!(store.write_back(&Writeback::of(0..200)), Ok(200));
        // Writes fail: pages in memory stay there, and so do pages on the device.
        store.fail(Direction::Write, kind);
        let wanted = if kind == FaultKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Io };
        assert_eq!(refusal(&store).map(|(kind, _)| kind), Some(wanted));
        let stats = store.backing_stats();
        assert!(stats.failed_writes > 0 && stats.pages == 200, "{stats:?}");
        (200..400).for_each(|page| assert_eq!(state(&store, page), PageState::Compressed));
        check(&store, 0..400, half_random);
        store.faults.clear();
        // Reads of pages on the device fail as long as the device does.
        let on_device: Vec<u64> = (0..400).filter(|page| state(&store, *page) == PageState::Backed).collect();
        if !on_device.is_empty() {
            store.fail(Direction::Read, kind);
        }
        for page in 0..400 {
            let read = store.read(PageNo::from_number(page), &mut [0; PAGE_SIZE]);
            assert_eq!(read.is_ok(), !on_device.contains(&page), "page {page}: {read:?}");
        }
        assert_eq!(store.backing_stats().failed_reads, on_device.len() as u64);
        store.faults.clear();
        check(&store, 0..400, half_random);
        assert_eq!(store.write_back(&ALL).map(|pages| pages > 0), Ok(true), "it works again");
        check(&store, 0..400, half_random);
        assert_eq!(store.backing_stats().corrupted, 0);
    }
}

#[test]
fn a_wrong_bit_is_an_error_and_never_wrong_data() {
    for layout in LAYOUTS {
        // The limit keeps pages from returning to memory, after which they would not be read again.
        let store = place(8 << 20, layout, StoreBuilder { limit_pages: 300, ..config(300) });
        write(&store, 0..100, half_random);
        store.write_back(&ALL).expect("room");
        store.faults.add(Fault { one_in: 2, ..Fault::always(FaultKind::FlipBit) });
        let (mut out, mut wrong) = ([0; PAGE_SIZE], 0);
        // Backwards, so that nothing is read ahead.
        for page in (0..100).rev() {
            match store.read(PageNo::from_number(page), &mut out) {
                Ok(()) => assert!(out == half_random(page), "page {page}"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                    wrong += 1;
                }
            }
        }
        assert!(wrong > 10, "{wrong}");
        assert_eq!((store.backing_stats().corrupted, store.stats().failed_reads), (wrong, wrong));
        // The bit was flipped by the read, not on the device.
        store.faults.clear();
        check(&store, 0..100, half_random);
    }
}

fn write_back_at(Place { store, .. }: &Place, page: PageNo) -> u64 {
    store.write_back(&ALL).expect("room");
    match store.slots.lock(page).contents() {
        Contents::Backed(Backed { place, .. }) => place,
        other => panic!("{other:?}"),
    }
}

/// A device lost a write that it reported as done: older contents there are not taken for the last ones.
#[test]
fn a_write_that_was_lost_is_found_out() {
    for layout in [LAYOUTS[0], LAYOUTS[1]] {
        let place = place(if layout == PACKED { 512 << 10 } else { 32 << 10 }, layout, config(4));
        let place_of = |version: u64| {
            put(&place.store, 0, &incompressible(version));
            write_back_at(&place, PageNo(0))
        };
        let first = place_of(0);
        let old = std::fs::read(&place.path).expect("the file");
        let version = (1..1000).find(|version| place_of(*version) == first).expect("used anew");
        std::fs::write(&place.path, &old).expect("the file");
        let error = place.store.read(PageNo(0), &mut [0; PAGE_SIZE]).expect_err("it is version 0");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{layout:?}, version {version}");
    }
}

/// Failed writes take no space of the device. (The kernel's 3e8d8eb8d7f5 leaked blocks.)
#[test]
fn failed_writes_leave_the_space_free() {
    for layout in LAYOUTS {
        let store = place(2 << 20, layout, config(512));
        write(&store, 0..512, incompressible);
        store.fail(Direction::Write, FaultKind::Error);
        for _ in 0..20 {
            let failed = store.write_back(&Writeback::of(0..100));
            assert_eq!(failed.map_err(|error| error.kind()), Err(ErrorKind::Io));
        }
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.held_bytes), (0, 0), "{stats:?}");
        assert!(stats.extent_bytes < 512 << 10, "{stats:?}");
        store.faults.clear();
        // The whole device can be filled, but for an extent or two that are reserved for cleaning.
        let _ = store.write_back(&ALL);
        let least = if layout == PACKED { 420 } else { 512 };
        assert!(store.backing_stats().pages >= least, "{:?}", store.backing_stats());
        check(&store, 0..512, incompressible);
    }
}

/// The bytes after an object in a block, and after the last object of a partly filled extent, are zeros, not
/// old contents of the buffer. (The kernel's 3bf1c285dc40.)
#[test]
fn nothing_of_others_is_written_behind_an_object() {
    for layout in [LAYOUTS[0], LAYOUTS[1]] {
        let store = place(2 << 20, layout, config(64));
        // Long objects first, in the same buffers.
        write(&store, 0..64, incompressible);
        store.write_back(&ALL).expect("room");
        store.discard_pages(0..64);
        put(&store, 0, &noise(64, 5));
        let compressed = store.stats().compr_data_bytes as usize;
        let start = MARK_BYTES + write_back_at(&store, PageNo(0)) as usize;
        let bytes = std::fs::read(&store.path).expect("the file");
        let end = start + compressed + if layout == PACKED { 16 } else { 0 };
        assert!(bytes[start..end].iter().any(|byte| *byte != 0));
        assert!(bytes[end..end.next_multiple_of(PAGE_SIZE)].iter().all(|byte| *byte == 0), "{layout:?}");
    }
}

#[test]
fn a_device_that_is_well_again_is_used_soon() {
    const STALL: Duration = Duration::from_secs(3);
    let place = place(32 << 20, PACKED, StoreBuilder { limit_pages: 256, ..config(4096) });
    let _policy = policy(&place.store);
    let write = |page: u64| place.store.write(PageNo::from_number(page), &incompressible(page));
    (0..600).for_each(|page| write(page).expect("others leave"));
    place.faults.add(Fault::always(FaultKind::Stall(STALL)));
    place.faults.add(Fault::always(FaultKind::Error));
    let refused = (600..4096).find(|page| write(*page).is_err()).expect("nothing can leave");
    assert!(write(refused).is_err(), "the thread rests");
    place.faults.clear();
    let healed = Instant::now();
    while write(refused).is_err() {
        // Writes in flight may stall once more. (It once took more than four times the stall.)
        assert!(healed.elapsed() < STALL * 3, "{:?}", place.store.policy_stats());
        std::thread::sleep(Duration::from_millis(20));
    }
    check(&place.store, 0..=refused, incompressible);
}

/// Moved objects are not charged to the limit: when their writes fail, nothing is given back to it.
#[test]
fn cleaning_that_fails_gives_back_nothing() {
    const PAGES: u64 = 3000;
    let store = place(8 << 20, PACKED, config(PAGES));
    let mut versions = Versions::new(PAGES, 3, half_random);
    write(&store, 0..PAGES, half_random);
    // Until writeback needs cleaning.
    while store.backing_stats().cleaned_bytes == 0 {
        store.write_back(&ALL).expect("room");
        versions.overwrite(&store, 200);
    }
    store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: true, left: 50 });
    store.fail(Direction::Write, FaultKind::Error);
    for _ in 0..20 {
        versions.overwrite(&store, 200);
        let _ = store.write_back(&ALL);
        assert!(store.writeback_limit().left <= 50, "{:?}", store.writeback_limit());
    }
    store.faults.clear();
    versions.check(&store, 0..PAGES);
}

/// An object whose header names a page that does not exist stays, and blocks no thread.
#[test]
fn a_damaged_owner_stops_nobody() {
    let zspages = ReclaimPolicy { order: ReclaimOrder::Zspages, ..ReclaimPolicy::default() };
    let store = place(32 << 20, PACKED, StoreBuilder { limit_pages: 512, policy: zspages, ..config(4096) });
    let _policy = policy(&store);
    write(&store, 0..64, half_random);
    for page in [3, 20, 41] {
        let contents = store.slots.lock(PageNo(page)).contents();
        let Contents::Stored { handle, len, .. } = contents else { panic!("{contents:?}") };
        // SAFETY: the slot holds the handle, and no other thread frees it.
        let pinned = unsafe { store.pool.read(handle, page, usize::from(len)) }.expect("sound");
        // SAFETY: no other thread uses these objects now. The owner lies just before the bytes.
        unsafe { pinned.as_ptr().cast_mut().cast::<u32>().sub(1).write(u32::MAX - page) };
    }
    write(&store, 64..2048, half_random);
    assert_eq!(decided(&store, "thread_died"), 0);
    for page in 0..2048 {
        match page {
            3 | 20 | 41 => {
                let error = store.read(PageNo(page), &mut [0; PAGE_SIZE]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
            _ => expect(&store, page.into(), &half_random(page.into())),
        }
    }
}
