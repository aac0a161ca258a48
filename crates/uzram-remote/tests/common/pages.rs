//! Pages of tests: what is in them, and stores of them.

#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use uzram::backing::Backing;
use uzram::random::Random;
use uzram::store::{BackingOptions, PageNo, Store, StoreBuilder, Writeback, WritebackLayout};
use uzram::units::PAGE_SIZE;

pub type Page = [u8; PAGE_SIZE];

/// Returns a store of so many pages.
pub fn store_on<B: Backing + 'static>(backing: &Arc<B>, pages: u32) -> Store {
    let backing: Arc<dyn Backing> = Arc::<B>::clone(backing);
    let backing = BackingOptions { backing, layout: WritebackLayout::Packed, compressed: true };
    StoreBuilder::new("remote", pages.into()).backing(backing).build().unwrap()
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

/// Checks that all pages have what was written to them.
pub fn check(store: &Store, version: u32) {
    let mut out = [0; PAGE_SIZE];
    for page in 0..store.pages() as u32 {
        store.read(PageNo(page), &mut out).unwrap();
        assert!(out == contents(page, version), "page {page}");
    }
}
