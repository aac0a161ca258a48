//! Pages of tests: what is in them, and stores of them.

use std::sync::Arc;

use uzram::backing::{Buffers, Direction, Filling, Objects, Transfer, wait_for};
use uzram::random::Random;
use uzram::store::{BackingOptions, PageNo, Store, StoreBuilder, Writeback};
use uzram::units::PAGE_SIZE;
use uzram_remote::{ObjectStore, RemoteBacking};

pub type Page = [u8; PAGE_SIZE];

pub fn store_on<O: ObjectStore>(backing: &Arc<RemoteBacking<O>>, pages: u32) -> Store {
    let backing = BackingOptions::packed(backing.tiers().unwrap());
    StoreBuilder::new("remote", pages.into()).backing(backing).build().unwrap()
}

/// Writes an object of an extent that is a page of such bytes, or reads it. Returns one of its bytes.
pub fn transfer<O: ObjectStore>(
    backing: &RemoteBacking<O>,
    direction: Direction,
    extent: u32,
) -> uzram::Result<u8> {
    let (filling, token, offset, len_bytes) = (Filling { generation: 1, home: 0 }, 0, 0, PAGE_SIZE);
    let mut buffer = Buffers::new(1, PAGE_SIZE).unwrap().take().unwrap();
    buffer.fill(if direction == Direction::Write { extent as u8 } else { 0 });
    let (buffer, result) = wait_for(|completion| {
        let transfer = Transfer { direction, offset, len_bytes, filling, buffer, token, completion };
        backing.start(extent, transfer);
    });
    result.map(|()| buffer[7])
}

/// Half of it does not compress.
pub fn contents(page: u32, version: u32) -> Page {
    let mut contents = [0; PAGE_SIZE];
    Random::new(u64::from(version) << 32 | u64::from(page)).fill(&mut contents[..PAGE_SIZE / 2]);
    contents
}

/// Writes all pages, and tries to have them leave.
pub fn try_fill(store: &Store, version: u32) -> uzram::Result<u64> {
    (0..store.pages() as u32).for_each(|page| store.write(PageNo(page), &contents(page, version)).unwrap());
    store.write_back(&Writeback::default())
}

/// The same; they leave.
pub fn fill(store: &Store, version: u32) {
    try_fill(store, version).unwrap();
}

pub fn check(store: &Store, version: u32) {
    let mut out = [0; PAGE_SIZE];
    for page in 0..store.pages() as u32 {
        store.read(PageNo(page), &mut out).unwrap();
        assert!(out == contents(page, version), "page {page}");
    }
}

pub fn check_reads(store: &Store) {
    let stats = store.backing_stats();
    assert_eq!((stats.failed_reads, stats.corrupted, stats.lost_reads), (0, 0, 0), "{stats:?}");
}

/// Has pages go out and come back, and leaves one in the backing: what was discarded is removed, which
/// `is_left` finds with what else stays.
pub fn go_and_come_back(store: &Store, check_names: impl FnOnce(), is_left: impl FnOnce()) {
    for version in 0..3 {
        fill(store, version);
        check(store, version);
    }
    let stats = store.backing_stats();
    assert!(stats.pages_written_back >= store.pages() && stats.failed_writes == 0, "{stats:?}");
    store.discard_pages(0..store.pages());
    fill(store, 7);
    check_names();
    store.discard_pages(0..store.pages());
    let mut page = contents(0, 9);
    store.write(PageNo(0), &page).unwrap();
    store.write_back(&Writeback::of(0..1)).unwrap();
    is_left();
    store.read(PageNo(0), &mut page).unwrap();
    assert!(page == contents(0, 9));
}
