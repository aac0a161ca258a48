//! Pages that are written back to a backing device and return from it.

use std::path::Path;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use super::designs::each_pool_design;
use super::policy::Reclaimed;
use super::slot::{Backed, Contents};
use super::tests::{config, page, recompression};
use super::*;
use crate::backing::{
    Backing, Direction, Fault, FaultKind, Faults, FaultyBacking, FileBacking, FileOptions, MARK_BYTES,
};
use crate::base::error::{Error, ErrorKind};
use crate::base::mem::{HOST_PAGE_BYTES, with_host_pages_of};
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

pub(super) fn file(dir: &Path, size_bytes: u64) -> FileBacking {
    let options = FileOptions { size_bytes: Some(size_bytes), ..FileOptions::new(dir.join("backing")) };
    FileBacking::open(&options).expect("a file")
}

/// A store on a backing device with injected faults.
pub(super) struct Place {
    pub(super) store: Arc<Store>,
    pub(super) faults: Faults,
    _dir: tempfile::TempDir,
}

pub(super) fn place(
    size_bytes: u64,
    layout: WritebackLayout,
    compressed: bool,
    config: StoreBuilder,
) -> Place {
    let dir = tempfile::tempdir().expect("a directory");
    let faulty = FaultyBacking::new(file(dir.path(), size_bytes), 1).expect("a thread");
    let faults = faulty.faults();
    let backing = Backing::Blocks(Arc::new(faulty)).into();
    let backing = Some(BackingOptions { backing, layout, compressed });
    let store = Arc::new(Store::new(&StoreBuilder { backing, ..config }).expect("store"));
    Place { store, faults, _dir: dir }
}

pub(super) const ALL: Writeback = Writeback {
    candidates: Candidates { idle: false, huge: false, incompressible: false },
    pages: Vec::new(),
};

fn layouts() -> [(WritebackLayout, bool); 3] {
    [(WritebackLayout::Packed, true), (WritebackLayout::Blocks, true), (WritebackLayout::Blocks, false)]
}

pub(super) fn write(store: &Store, pages: impl IntoIterator<Item = u64>, make: impl Fn(u64) -> Page) {
    pages.into_iter().for_each(|page| store.write(PageNo::from_number(page), &make(page)).expect("memory"));
}

pub(super) fn check(store: &Store, pages: impl IntoIterator<Item = u64>, make: impl Fn(u64) -> Page) {
    pages.into_iter().for_each(|page| expect(store, page, &make(page)));
}

pub(super) fn expect(store: &Store, page: u64, contents: &Page) {
    let mut read = [1; PAGE_SIZE];
    store.read(PageNo::from_number(page), &mut read).expect("sound");
    assert!(read == *contents, "page {page}");
}

/// A page of the layout `blocks` takes 4096 bytes, on hosts with larger pages too.
#[test]
fn pages_leave_whatever_the_hosts_pages() {
    for host_page_bytes in HOST_PAGE_BYTES {
        for (layout, compressed) in layouts() {
            let place =
                with_host_pages_of(host_page_bytes, || place(8 << 20, layout, compressed, config(100)));
            let (store, mut random) = (&place.store, Random::new(5));
            let model: Vec<Page> = (0..100).map(|_| page(&mut random)).collect();
            model
                .iter()
                .zip(0..)
                .for_each(|(contents, page)| store.write(PageNo::from_number(page), contents).expect("room"));
            store.write_back(&ALL).expect("room");
            assert!((0..100).any(|page| state(store, page) == PageState::Backed));
            model.iter().zip(0..).for_each(|(contents, page)| expect(store, page, contents));
        }
    }
}

#[test]
fn pages_leave_and_are_read_from_there() {
    for (layout, compressed) in layouts() {
        for config in [config(500), StoreBuilder { checksum: true, limit_pages: 2000, ..config(500) }] {
            let place = place(8 << 20, layout, compressed, config);
            let (store, mut random) = (&place.store, Random::new(5));
            let model: Vec<Page> = (0..500).map(|_| page(&mut random)).collect();
            model
                .iter()
                .zip(0..)
                .for_each(|(contents, page)| store.write(PageNo::from_number(page), contents).expect("room"));
            let before = store.stats();
            let written = store.write_back(&ALL).expect("room");
            let stored = before.pages_stored - before.same_pages;
            assert_eq!(written, stored, "all that take memory");
            let after = store.stats();
            assert_eq!((after.pages_stored, after.same_pages), (before.pages_stored, before.same_pages));
            assert_eq!((after.compr_data_bytes, after.huge_pages), (0, 0));
            assert_eq!(store.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>(), 0);
            let stats = store.backing_stats();
            assert_eq!((stats.pages, stats.pages_written_back), (stored, stored));
            assert_eq!(stats.object_bytes, before.compr_data_bytes);
            if layout == WritebackLayout::Packed {
                let most = before.compr_data_bytes + stored * 24 + (1 << 16);
                assert!(stats.written_bytes <= most, "{stats:?}");
            } else {
                assert_eq!(stats.written_bytes, stored * PAGE_SIZE as u64);
            }
            for round in 0..2 {
                model.iter().zip(0..).for_each(|(contents, page)| expect(store, page, contents));
                let stats = store.backing_stats();
                assert!(stats.reads <= stored, "round {round}: {stats:?}");
            }
            (0..500).for_each(|page| store.discard(PageNo::from_number(page)));
            let stats = store.backing_stats();
            assert_eq!((stats.pages, stats.held_bytes, stats.corrupted), (0, 0, 0));
            assert_eq!(store.stats().pages_stored, 0);
        }
    }
}

/// Returns a count of the policy.
pub(super) fn decided(store: &Store, name: &str) -> u64 {
    let stats = store.policy_stats();
    stats.iter().find(|(of, _)| *of == name).map(|(_, count)| *count).expect("a decision")
}

/// Returns a page whose object takes about 2 KiB, and whose contents depend on `seed`.
pub(super) fn half_random(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    Random::new(seed).fill(&mut page[..PAGE_SIZE / 2]);
    page
}

#[test]
fn writes_beyond_the_limit_have_others_leave() {
    let reclaims =
        ReclaimOrder::ALL.into_iter().flat_map(|order| WritebackLayout::ALL.map(|layout| (order, layout)));
    for (order, layout) in reclaims {
        let policy = ReclaimPolicy { order, ..ReclaimPolicy::default() };
        let limited = StoreBuilder { limit_pages: 512, policy, ..config(4096) };
        let place = place(32 << 20, layout, true, limited);
        let store = &place.store;
        let policy = PolicyThread::start("test", store).expect("a thread");
        for page in 0..4096 {
            store.write(PageNo::from_number(page), &half_random(page)).expect("others leave");
            assert!(store.stats().charged_pages <= 512);
        }
        for page in 0..4096 {
            expect(store, page, &half_random(page));
            assert!(store.stats().charged_pages <= 512);
        }
        // A pass is counted at its end, and the last one may still be running.
        until("what has left is counted", || decided(store, "written_back") > 3000);
        assert_eq!(store.stats().failed_writes, 0);
        drop(policy);
    }
}

pub(super) fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what} did not come about");
}

fn state(store: &Store, page: u64) -> PageState {
    store.extent(PageNo::from_number(page), 1).0
}

#[test]
fn what_is_done_to_a_page_that_is_being_written_counts() {
    for (layout, compressed) in layouts() {
        let config = StoreBuilder { recompression: recompression(["zstd:9", "", ""]), ..config(100) };
        let place = place(8 << 20, layout, compressed, config);
        let store = &place.store;
        write(store, 0..20, half_random);
        place.faults.add(Fault { direction: Some(Direction::Write), ..Fault::always(FaultKind::Hold) });
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| store.write_back(&ALL));
            until("the write", || {
                (0..20).all(|page| store.slots.lock(PageNo::from_number(page)).writing() != 0)
            });
            let mut out = [0; PAGE_SIZE];
            store.read(PageNo(0), &mut out).expect("in memory");
            store.read_wait(PageNo(1), &mut out, Wait::No).expect("in memory");
            store.write(PageNo(2), &half_random(102)).expect("memory");
            store.write_part(PageNo(3), 100, &[3; 50], Wait::Yes).expect("memory");
            store.discard(PageNo(4));
            store.zero(PageNo(5));
            store.discard(PageNo(6));
            store.write(PageNo(6), &half_random(6)).expect("memory");
            store.compact();
            store.mark_idle(None);
            store.write(PageNo(7), &half_random(107)).expect("memory");
            store.write(PageNo(7), &half_random(7)).expect("memory");
            assert_eq!(store.backing_stats().pages, 0, "nothing was written yet");
            place.faults.clear();
            assert_eq!(writing.join().expect("no panic").expect("written"), 12);
        });
        for page in [0, 1, 2, 3, 6, 7] {
            assert_eq!(state(store, page), PageState::Compressed, "page {page}");
        }
        assert_eq!((state(store, 4), state(store, 5)), (PageState::Hole, PageState::Zero));
        (8..20).for_each(|page| assert_eq!(state(store, page), PageState::Backed));
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.pages_written_back, stats.pages_kept), (12, 12, 8));
        let mut changed = half_random(3);
        changed[100..150].fill(3);
        expect(store, 2, &half_random(102));
        expect(store, 3, &changed);
        expect(store, 4, &[0; PAGE_SIZE]);
        for page in [0, 1, 6, 7].into_iter().chain(8..20) {
            expect(store, page, &half_random(page));
        }
    }
}

/// Operations on pages on the device fail with `WouldBlock` if they must not wait, and else succeed.
#[test]
fn who_does_not_want_to_wait_is_told() {
    let place = place(8 << 20, WritebackLayout::Packed, true, config(100));
    let store = &place.store;
    write(store, 0..20, half_random);
    store.write_back(&ALL).expect("room");
    let before = store.stats();
    let mut out = [0; PAGE_SIZE];
    assert_eq!(
        store.read_wait(PageNo(0), &mut out, Wait::No).map_err(|error| error.kind()),
        Err(ErrorKind::WouldBlock)
    );
    let after = store.stats();
    assert_eq!((after.pages_read, after.failed_reads), (before.pages_read, before.failed_reads));
    store.write_wait(PageNo(1), &half_random(101), Wait::No).expect("memory");
    store.write_part(PageNo(2), 0, &[9; 8], Wait::Yes).expect("read, changed and written");
    let mut changed = half_random(2);
    changed[..8].fill(9);
    expect(store, 1, &half_random(101));
    expect(store, 2, &changed);
    store.read_wait(PageNo(1), &mut out, Wait::No).expect("in memory");
    store.read_wait(PageNo(2), &mut out, Wait::No).expect("in memory");
}

/// Errors affect only the pages that they concern, and nothing in memory is lost.
#[test]
fn a_device_that_fails_loses_nothing_that_is_in_memory() {
    let kinds = [FaultKind::Error, FaultKind::NoSpace, FaultKind::Short];
    for ((layout, compressed), kind) in
        layouts().into_iter().flat_map(|layout| kinds.map(|kind| (layout, kind)))
    {
        let place = place(8 << 20, layout, compressed, config(400));
        let store = &place.store;
        write(store, 0..400, half_random);
        let half = Writeback::of(0..200);
        assert_eq!(store.write_back(&half), Ok(200));
        // Writes fail: pages in memory stay there, and so do pages on the device.
        place.faults.add(Fault { direction: Some(Direction::Write), ..Fault::always(kind) });
        let error = store.write_back(&ALL).expect_err("it failed");
        let wanted = if kind == FaultKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Io };
        assert_eq!(error.kind(), wanted, "{error}");
        let stats = store.backing_stats();
        assert!(stats.failed_writes > 0 && stats.pages == 200, "{stats:?}");
        (200..400).for_each(|page| assert_eq!(state(store, page), PageState::Compressed));
        check(store, 0..400, half_random);
        place.faults.clear();
        // Reads of pages on the device fail as long as the device does.
        let on_device: Vec<u64> = (0..400).filter(|page| state(store, *page) == PageState::Backed).collect();
        if !on_device.is_empty() {
            place.faults.add(Fault { direction: Some(Direction::Read), ..Fault::always(kind) });
        }
        let mut out = [0; PAGE_SIZE];
        for page in 0..400 {
            let read = store.read(PageNo::from_number(page), &mut out).map_err(|error| error.kind());
            assert_eq!(read.is_ok(), !on_device.contains(&page), "page {page}: {read:?}");
        }
        assert_eq!(store.backing_stats().failed_reads, on_device.len() as u64);
        place.faults.clear();
        check(store, 0..400, half_random);
        assert_eq!(store.write_back(&ALL).map(|pages| pages > 0), Ok(true), "it works again");
        check(store, 0..400, half_random);
        assert_eq!(store.backing_stats().corrupted, 0);
    }
}

#[test]
fn a_wrong_bit_is_an_error_and_never_wrong_data() {
    for (layout, compressed) in layouts() {
        // The limit keeps pages from returning to memory, after which they would not be read again.
        let place = place(8 << 20, layout, compressed, StoreBuilder { limit_pages: 300, ..config(300) });
        let store = &place.store;
        write(store, 0..100, half_random);
        store.write_back(&ALL).expect("room");
        place.faults.add(Fault { one_in: 2, ..Fault::always(FaultKind::FlipBit) });
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
        let stats = store.backing_stats();
        assert_eq!((stats.corrupted, store.stats().failed_reads), (wrong, wrong));
        // The bit was flipped by the read, not on the device.
        place.faults.clear();
        check(store, 0..100, half_random);
    }
}

/// A device reports a write as done that it lost: older contents of the same page in the same place are not
/// taken for the last ones.
#[test]
fn a_write_that_was_lost_is_found_out() {
    for layout in WritebackLayout::ALL {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("backing");
        let backing = Backing::Blocks(Arc::new(file(
            dir.path(),
            if layout == WritebackLayout::Packed { 512 << 10 } else { 32 << 10 },
        )))
        .into();
        let options = BackingOptions { backing, layout, compressed: true };
        let store = Store::new(&StoreBuilder { backing: Some(options), ..config(4) }).expect("store");
        let place = |version: u64| {
            store.write(PageNo(0), &incompressible(version)).expect("memory");
            store.write_back(&ALL).expect("room");
            match store.slots.lock(PageNo(0)).contents() {
                Contents::Backed(Backed { place, .. }) => place,
                other => panic!("{other:?}"),
            }
        };
        let first = place(0);
        let old = std::fs::read(&path).expect("the file");
        let version = (1..1000).find(|version| place(*version) == first).expect("used anew");
        std::fs::write(&path, &old).expect("the file");
        let mut out = [0; PAGE_SIZE];
        let error = store.read(PageNo(0), &mut out).expect_err("it is version 0");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{layout}, version {version}");
    }
}

/// Failed writes take no space of the device. (The kernel's 3e8d8eb8d7f5 leaked blocks.)
#[test]
fn failed_writes_leave_the_space_free() {
    for (layout, compressed) in layouts() {
        let place = place(2 << 20, layout, compressed, config(512));
        let store = &place.store;
        write(store, 0..512, incompressible);
        place.faults.add(Fault { direction: Some(Direction::Write), ..Fault::always(FaultKind::Error) });
        for _ in 0..20 {
            let some = Writeback::of(0..100);
            assert_eq!(store.write_back(&some).map_err(|error| error.kind()), Err(ErrorKind::Io));
        }
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.held_bytes), (0, 0), "{stats:?}");
        assert!(stats.extent_bytes < 512 << 10, "{stats:?}");
        place.faults.clear();
        // The whole device can be filled, but for an extent or two that are reserved for cleaning.
        let _ = store.write_back(&ALL);
        let least = if layout == WritebackLayout::Blocks { 512 } else { 420 };
        assert!(store.backing_stats().pages >= least, "{:?}", store.backing_stats());
        check(store, 0..512, incompressible);
    }
}

/// The bytes after an object in a block, and after the last object of a partly filled extent, are zeros, not
/// old contents of the buffer. (The kernel's 3bf1c285dc40.)
#[test]
fn nothing_of_others_is_written_behind_an_object() {
    for layout in WritebackLayout::ALL {
        let dir = tempfile::tempdir().expect("a directory");
        let backing = Backing::Blocks(Arc::new(file(dir.path(), 2 << 20))).into();
        let options = BackingOptions { backing, layout, compressed: true };
        let store = Store::new(&StoreBuilder { backing: Some(options), ..config(64) }).expect("store");
        // Long objects first, in the same buffers.
        write(&store, 0..64, incompressible);
        store.write_back(&ALL).expect("room");
        store.discard_pages(0..64);
        let mut letters = [0; PAGE_SIZE];
        Random::new(5).fill(&mut letters[..64]);
        store.write(PageNo(0), &letters).expect("memory");
        let compressed = store.stats().compr_data_bytes as usize;
        let place = match store.write_back(&ALL).map(|_| store.slots.lock(PageNo(0)).contents()) {
            Ok(Contents::Backed(Backed { place, .. })) => MARK_BYTES + place as usize,
            other => panic!("{other:?}"),
        };
        let bytes = std::fs::read(dir.path().join("backing")).expect("the file");
        let end = place + compressed + if layout == WritebackLayout::Packed { 16 } else { 0 };
        assert!(bytes[place..end].iter().any(|byte| *byte != 0));
        assert!(bytes[end..end.next_multiple_of(PAGE_SIZE)].iter().all(|byte| *byte == 0), "{layout}");
    }
}

#[test]
fn a_device_that_is_mostly_full_is_cleaned() {
    const PAGES: u64 = 3000;
    let place = place(8 << 20, WritebackLayout::Packed, true, config(PAGES));
    let (store, mut random) = (&place.store, Random::new(3));
    let mut versions = vec![0; PAGES as usize];
    write(store, 0..PAGES, half_random);
    store.write_back(&ALL).expect("room");
    overwrite(store, &mut versions, &mut random);
    let stats = store.backing_stats();
    assert!(stats.cleaned_bytes > 0 && stats.pages == PAGES, "{stats:?}");
    assert!(stats.held_bytes * 10 > stats.len_bytes * 7, "{stats:?}");
    for (page, version) in (0..).zip(&versions) {
        expect(store, page, &half_random(page + version));
    }
    // A device full of live pages refuses more, and accepts more after others are discarded.
    let more = (0..PAGES).find(|page| {
        store.write(PageNo::from_number(*page), &incompressible(*page)).expect("memory");
        store.write_back(&Writeback::of(*page..*page + 1)).is_err()
    });
    let full = more.expect("8 MiB are less than 12");
    assert_eq!(state(store, full), PageState::Huge);
    assert_eq!(store.write_back(&ALL).map_err(|error| error.setting()), Err(Some("backing_dev")));
    (0..PAGES / 2).for_each(|page| {
        if page != full {
            store.discard(PageNo::from_number(page))
        }
    });
    store.write_back(&ALL).expect("room");
    assert_eq!(state(store, full), PageState::Backed);
    expect(store, full, &incompressible(full));
    (full + 1..PAGES).filter(|page| *page >= PAGES / 2).for_each(|page| {
        expect(store, page, &half_random(page + versions[page as usize]));
    });
}

/// Overwrites pages at random, many times, and has them leave again. A page's contents are [`half_random`] of
/// its number and its version.
pub(super) fn overwrite(store: &Store, versions: &mut [u64], random: &mut Random) {
    for _ in 0..60 {
        for _ in 0..200 {
            let page = random.below(versions.len());
            versions[page] += versions.len() as u64;
            store.write(PageNo(page as u32), &half_random(page as u64 + versions[page])).expect("memory");
        }
        store.write_back(&ALL).expect("room");
    }
}

pub(super) fn incompressible(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    Random::new(!seed).fill(&mut page);
    page
}

/// The kernel's writeback limit counts units of 4 KiB with each layout, and failed writes are given back.
#[test]
fn a_limit_of_writes_is_kept() {
    for (layout, compressed) in layouts() {
        let place = place(8 << 20, layout, compressed, config(400));
        let store = &place.store;
        write(store, 0..400, half_random);
        store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: true, left: 50 });
        place.faults.add(Fault {
            times: 1,
            direction: Some(Direction::Write),
            ..Fault::always(FaultKind::Error)
        });
        let _ = store.write_back(&Writeback::of(0..10)).expect_err("it failed");
        let given_back = store.writeback_limit().left;
        assert!(given_back > 40 && store.backing_stats().pages < 10, "{given_back}");
        let error = store.write_back(&ALL).expect_err("spent");
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Io, Some("writeback_limit")));
        let stats = store.backing_stats();
        let of_failure = 50 - given_back;
        assert!(stats.written_bytes <= (50 + 10 + of_failure) * PAGE_SIZE as u64, "{stats:?}");
        assert_eq!(store.writeback_limit().left, 0);
        let least = if layout == WritebackLayout::Packed { 70 } else { 40 };
        assert!((least..=100).contains(&stats.pages), "{stats:?}");
        store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: false, left: 0 });
        store.write_back(&ALL).expect("no limit");
        check(store, 0..400, half_random);
    }
}

/// Sequential reads read the device once for many pages; random reads read it once for each page.
#[test]
fn pages_that_were_written_together_are_read_together() {
    // The limit leaves no room for pages to return to memory.
    let place =
        place(16 << 20, WritebackLayout::Packed, true, StoreBuilder { limit_pages: 700, ..config(4096) });
    let store = &place.store;
    let policy = PolicyThread::start("test", store).expect("a thread");
    write(store, 0..4096, half_random);
    drop(policy);
    let before = store.backing_stats();
    check(store, 0..2000, half_random);
    let reads = store.backing_stats().reads - before.reads;
    assert!((1..400).contains(&reads), "{reads}");
    let mut random = Random::new(1);
    let before = store.backing_stats();
    let pages: Vec<u64> = (0..300).map(|_| random.below(2000) as u64).collect();
    pages.iter().for_each(|page| expect(store, *page, &half_random(*page)));
    let after = store.backing_stats();
    assert!(after.reads - before.reads <= 300);
    assert!(after.read_bytes - before.read_bytes <= 300 * 2 * PAGE_SIZE as u64);
}

#[test]
fn a_policy_writes_back_and_compresses_again_what_is_old() {
    let config = StoreBuilder { recompression: recompression(["zstd:3", "", ""]), ..config(200) };
    let place = place(8 << 20, WritebackLayout::Packed, true, config);
    let store = &place.store;
    let words = |seed: u64| {
        let mut page = [0; PAGE_SIZE];
        let mut random = Random::new(seed);
        page.chunks_mut(8).for_each(|word| {
            word[..3].copy_from_slice(&(random.next() as u32 & 0x3f3f3f).to_le_bytes()[..3])
        });
        page
    };
    write(store, 0..200, words);
    store.set_policy(ReclaimPolicy { recompress_after_s: 1, ..ReclaimPolicy::default() });
    let policy = PolicyThread::start("test", store).expect("a thread");
    until("recompression", || decided(store, "old_recompressed") == 200);
    assert_eq!(store.backing_stats().pages, 0);
    store.set_policy(ReclaimPolicy { writeback_after_s: 2, ..ReclaimPolicy::default() });
    until("writeback", || store.backing_stats().pages == 200);
    drop(policy);
    check(store, 0..200, words);
}

/// Busy pages stay, and recently used ones leave last. A page that is used soon after it left counts as a
/// refault.
#[test]
fn cold_pages_leave_and_busy_ones_stay() {
    // With a pagevec of one page, the order is that of the writes, whatever their CPUs.
    let config = || StoreBuilder { lru_pagevec_pages: 1, limit_pages: 1000, ..config(400) };
    let each_lru = [
        config(),
        #[cfg(feature = "designs")]
        config().lru_design(crate::lru::LruDesign::SingleLock),
    ];
    for config in each_lru {
        let place = place(8 << 20, WritebackLayout::Packed, true, config);
        let store = &place.store;
        write(store, 0..400, half_random);
        let mut out = [0; PAGE_SIZE];
        (0..2).for_each(|_| {
            (0..40).for_each(|page| store.read(PageNo::from_number(page), &mut out).expect("sound"))
        });
        store.zero(PageNo(50));
        let steps = Counter::new(0);
        std::thread::scope(|scope| {
            let busy = scope.spawn(|| {
                let slot = store.slots.lock(PageNo(53));
                steps.set(1);
                until("relief", || steps.get() == 2);
                drop(slot);
            });
            until("somebody who is busy", || steps.get() == 1);
            assert_eq!(store.reclaim(), Reclaimed::Some);
            steps.set(2);
            busy.join().expect("no panic");
        });
        let left = |page: &u64| state(store, *page) == PageState::Backed;
        assert_eq!((state(store, 50), state(store, 53)), (PageState::Zero, PageState::Compressed));
        assert_eq!((0..40).filter(left).count(), 0);
        let gone = (40..400).filter(left).count() as u64;
        assert!((30..200).contains(&gone), "{gone}");
        assert!((41..50).all(|page| left(&page)), "the first came first");
        let stats = store.lru_stats();
        assert_eq!((stats.evicted, stats.put_back), (gone, 1), "{stats:?}");
        store.write(PageNo(41), &half_random(1)).expect("memory");
        assert_eq!(store.lru_stats().refaulted, 1);
    }
    let none = place(8 << 20, WritebackLayout::Packed, true, config().lru(false));
    none.store.write(PageNo(1), &half_random(1)).expect("memory");
    assert_eq!(none.store.reclaim(), Reclaimed::None, "there are no lists");
}

/// A page that is read for the last time stays on the device, though there is room for it in memory.
#[test]
fn a_page_that_is_about_to_be_discarded_does_not_return() {
    let place =
        place(8 << 20, WritebackLayout::Packed, true, StoreBuilder { limit_pages: 256, ..config(300) });
    let store = &place.store;
    write(store, 0..300, half_random);
    assert_eq!(store.reclaim(), Reclaimed::Some);
    let backed = || (0..300).filter(|page| state(store, *page) == PageState::Backed).collect::<Vec<_>>();
    let left = backed();
    assert!(!left.is_empty());
    (100..300).filter(|page| !left.contains(page)).for_each(|page| store.discard(PageNo::from_number(page)));
    let mut out = [0; PAGE_SIZE];
    for page in &left {
        store.read_once(PageNo::from_number(*page), &mut out).expect("sound");
        assert_eq!(out, half_random(*page));
    }
    assert_eq!((backed(), store.backing_stats().pages_returned), (left.clone(), 0));
    left.iter().for_each(|page| expect(store, *page, &half_random(*page)));
    assert_ne!(backed(), left, "a page that is read otherwise returns");
}

#[test]
fn a_write_is_refused_when_nothing_can_leave() {
    let limited = || StoreBuilder { limit_pages: 256, ..config(4096) };
    let fill = |store: &Store| {
        (0..4096).find_map(|page| {
            store.write(PageNo::from_number(page), &incompressible(page)).err().map(|error| (page, error))
        })
    };
    // The device is full.
    let first = place(1 << 20, WritebackLayout::Packed, true, limited());
    let policy = PolicyThread::start("test", &first.store).expect("a thread");
    let (pages, error) = fill(&first.store).expect("2 MiB");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("mem_limit")));
    assert!((350..=520).contains(&pages), "{pages}");
    check(&first.store, 0..pages, incompressible);
    assert!(decided(&first.store, "writers_refused") == 1, "{:?}", first.store.policy_stats());
    drop(policy);
    // The day's budget is spent.
    let policy = ReclaimPolicy { writeback_budget_bytes: 1 << 20, ..ReclaimPolicy::default() };
    let second = place(32 << 20, WritebackLayout::Packed, true, StoreBuilder { policy, ..limited() });
    let policy = PolicyThread::start("test", &second.store).expect("a thread");
    let (pages, _) = fill(&second.store).expect("1 MiB and the budget");
    assert!((350..=520).contains(&pages), "{pages}");
    assert!(second.store.backing_stats().written_bytes <= 1 << 20);
    check(&second.store, 0..pages, incompressible);
    drop(policy);
    // The device is gone.
    let third = place(32 << 20, WritebackLayout::Packed, true, limited());
    let policy = PolicyThread::start("test", &third.store).expect("a thread");
    (0..600).for_each(|page| {
        third.store.write(PageNo::from_number(page), &incompressible(page)).expect("others leave")
    });
    third.faults.add(Fault::always(FaultKind::Error));
    let refused = (600..4096)
        .find(|page| third.store.write(PageNo::from_number(*page), &incompressible(*page)).is_err());
    assert!(refused.is_some());
    third.faults.clear();
    check(&third.store, 0..refused.unwrap_or(0), incompressible);
    drop(policy);
}

/// Threads do all operations at once, and each checks its own pages against a model.
#[test]
fn everything_at_once_agrees_with_a_model() {
    const PAGES: u64 = 600;
    const EVENTS: u64 = 1_000_000;
    let shapes = layouts();
    let each = EVENTS / (shapes.len() as u64 * THREADS);
    for (seed, (layout, compressed)) in (0..).zip(shapes) {
        let config = StoreBuilder {
            recompression: recompression(["zstd:1", "", ""]),
            checksum: seed == 1,
            limit_pages: 128,
            ..config(PAGES)
        };
        let designs = each_pool_design(&config);
        let config = designs[seed as usize % designs.len()].clone();
        let place = place(
            if layout == WritebackLayout::Packed { 2 << 20 } else { 4 << 20 },
            layout,
            compressed,
            config,
        );
        let store = &place.store;
        let policy = PolicyThread::start("test", store).expect("a thread");
        // Pages that could not be read are not lost.
        agree_with_a_model(store, &place.faults, seed, each, |are_finished| {
            while !are_finished() {
                assert!(store.stats().charged_pages <= 128, "the limit is kept at every instant");
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        drop(policy);
        let stats = store.backing_stats();
        assert!(stats.pages_written_back > 1000 && stats.pages_kept > 0, "{stats:?}");
        assert!(stats.pages_returned > 0 && stats.failed_writes > 0, "{stats:?}");
        if layout == WritebackLayout::Packed {
            assert!(stats.cleaned_bytes > 0, "{stats:?}");
        }
        store.discard_pages(0..PAGES);
        let (stats, held) = (store.backing_stats(), store.stats());
        assert_eq!((stats.pages, stats.held_bytes), (0, 0), "seed {seed}");
        assert_eq!((held.pages_stored, held.compr_data_bytes, held.corrupted), (0, 0, 0), "seed {seed}");
    }
}

/// Threads that do all operations at once.
const THREADS: u64 = 6;

/// Has threads [`work`] on a store at once, each on its own pages. Meanwhile calls `beside` with what tells
/// whether they are finished. In the end, without faults, all pages have what the threads' models say.
pub(super) fn agree_with_a_model(
    store: &Store,
    faults: &Faults,
    seed: u64,
    events: u64,
    beside: impl FnOnce(&dyn Fn() -> bool),
) {
    let models: Vec<_> = std::thread::scope(|scope| {
        let start = |thread| scope.spawn(move || work(store, faults, seed, thread, THREADS, events));
        let workers: Vec<_> = (0..THREADS).map(start).collect();
        beside(&|| workers.iter().all(ScopedJoinHandle::is_finished));
        workers.into_iter().map(|worker| worker.join().expect("no thread failed")).collect()
    });
    faults.clear();
    for (thread, model) in (0..).zip(&models) {
        (0..).zip(model).for_each(|(at, contents)| expect(store, at * THREADS + thread, contents));
    }
}

/// Runs a thread's share of the events, on the pages whose number modulo `threads` is `thread`. Returns their
/// contents.
fn work(store: &Store, faults: &Faults, seed: u64, thread: u64, threads: u64, events: u64) -> Vec<Page> {
    let mut random = Random::new(seed << 8 | thread);
    let own = (store.pages() - thread).div_ceil(threads);
    let mut model: Vec<Page> = vec![[0; PAGE_SIZE]; own as usize];
    let mut out = [0; PAGE_SIZE];
    for event in 0..events {
        // Mostly on a few hot pages.
        let most = if random.below(3) == 0 { own as usize } else { own as usize / 8 };
        let at = random.below(most);
        let page = at as u64 * threads + thread;
        let contents = &mut model[at];
        let told = || format!("seed {seed} thread {thread} event {event} page {page}");
        let is_allowed =
            |error: &Error| matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::NoSpace);
        match random.below(1000) {
            0..=399 => match store.read(PageNo::from_number(page), &mut out) {
                Ok(()) => assert!(out == *contents, "{}", told()),
                Err(error) => assert!(is_allowed(&error), "{}: {error}", told()),
            },
            400..=449 => match store.read_wait(PageNo::from_number(page), &mut out, Wait::No) {
                Ok(()) => assert!(out == *contents, "{}", told()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{}: {error}", told()),
            },
            450..=799 => {
                let new = super::tests::page(&mut random);
                match store.write(PageNo::from_number(page), &new) {
                    Ok(()) => *contents = new,
                    Err(error) => assert!(is_allowed(&error), "{}: {error}", told()),
                }
            }
            800..=899 => {
                let start = random.below(PAGE_SIZE);
                let mut new = *contents;
                random.fill(&mut new[start..]);
                match store.write_part(PageNo::from_number(page), start, &new[start..], Wait::Yes) {
                    Ok(()) => *contents = new,
                    Err(error) => assert!(is_allowed(&error), "{}: {error}", told()),
                }
            }
            900..=979 => {
                store.discard(PageNo::from_number(page));
                *contents = [0; PAGE_SIZE];
            }
            980..=992 => {
                let first = random.below(store.pages() as usize) as u64;
                let _ = store.write_back(&Writeback::of(first..first + 20));
            }
            993 => {
                let _ = store.recompress(&Recompression { max_pages: 20, ..Recompression::default() });
            }
            994 => store.mark_idle(None),
            995 if thread == 0 => {
                store.compact();
            }
            // Writers at the limit wait while the device fails.
            996 if thread == 1 && random.below(4) == 0 => {
                let kinds = [FaultKind::Error, FaultKind::Short, FaultKind::FlipBit, FaultKind::NoSpace];
                let stall = FaultKind::Stall(Duration::from_millis(1));
                let kind = *kinds.get(random.below(5)).unwrap_or(&stall);
                faults.add(Fault { one_in: 1 + random.below(20) as u64, ..Fault::always(kind) });
            }
            997.. if thread == 1 => faults.clear(),
            _ => {}
        }
    }
    model
}
