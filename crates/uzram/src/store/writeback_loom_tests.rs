//! Loom tests of slots whose pages are being written back or read back. The device is in memory and completes
//! each transfer at once.

use super::loom_tests::{config, contents, model, read, spawn};
use super::*;
use crate::backing::Memory;
use crate::base::error::ErrorKind;
use crate::base::units::{PAGE_SIZE, PageNo};

/// The minimum number of blocks.
const BLOCKS: u64 = 2;

fn store(pages: u64) -> Arc<Store> {
    let backing = Memory::backing(BLOCKS * PAGE_SIZE as u64).into();
    let backing = BackingOptions { backing, layout: WritebackLayout::Blocks, compressed: true };
    Arc::new(Store::new(&StoreBuilder { backing: Some(backing), ..config(pages) }).expect("store"))
}

fn write_back(store: &Store, page: u64) -> u64 {
    let what = Writeback::of(page..page + 1);
    store.write_back(&what).expect("room")
}

/// Returns the numbers of objects in the pool and on the device.
fn held(store: &Store) -> (u64, u64) {
    let in_memory = store.class_stats().iter().map(|stat| stat.obj_used).sum();
    (in_memory, store.backing_stats().pages)
}

/// `check` is called with the number of pages that were written, and what the other thread returned.
fn while_written_back<T: 'static>(other: fn(&Store) -> T, check: fn(&Store, u64, T)) {
    model(move || {
        let store = store(1);
        store.write(PageNo(0), &contents(1)).expect("memory");
        let other = spawn(&store, other);
        let written = write_back(&store, 0);
        check(&store, written, other.join().expect("no panic"));
    });
}

fn overwrite(store: &Store) {
    store.write(PageNo(0), &contents(2)).expect("memory");
}

#[test]
fn loom_store_writeback_against_writing() {
    while_written_back(overwrite, |store, _, ()| {
        assert!(matches!(held(store), (1, 0) | (0, 1)));
        assert_eq!(read(store, 0), 2);
    });
}

#[test]
fn loom_store_writeback_against_discarding() {
    let discard = |store: &Store| store.discard(PageNo(0));
    while_written_back(discard, |store, _, ()| assert_eq!((held(store), read(store, 0)), ((0, 0), 0)));
}

/// The page stays in memory, or is read from the device.
#[test]
fn loom_store_writeback_against_reading() {
    while_written_back(
        |store| read(store, 0),
        |store, _, found| {
            let (in_memory, on_device) = held(store);
            assert_eq!((found, in_memory + on_device, read(store, 0)), (1, 1, 1));
        },
    );
}

#[test]
fn loom_store_writeback_against_writeback() {
    while_written_back(
        |store| write_back(store, 0),
        |store, written, by_other| {
            assert_eq!((written + by_other, held(store), read(store, 0)), (1, (0, 1), 1));
        },
    );
}

#[test]
fn loom_store_coming_back_against_writing() {
    model(|| {
        let store = store(1);
        store.write(PageNo(0), &contents(1)).expect("memory");
        write_back(&store, 0);
        let writer = spawn(&store, overwrite);
        assert!(matches!(read(&store, 0), 1 | 2));
        writer.join().expect("no panic");
        assert_eq!((held(&store), read(&store, 0)), ((1, 0), 2));
    });
}

/// A page is read from a block that is meanwhile reused, for other contents of the same page.
#[test]
fn loom_store_coming_back_against_the_block_written_anew() {
    model(|| {
        let store = store(BLOCKS);
        for page in 0..BLOCKS {
            store.write(PageNo::from_number(page), &contents(1)).expect("memory");
            write_back(&store, page);
        }
        let writer = spawn(&store, |store: &Store| {
            overwrite(store);
            // Its old block is the only one that is free then, or about to be.
            let what = Writeback::of(0..1);
            let written = store.write_back(&what).map_err(|error| error.kind());
            assert!(matches!(written, Ok(_) | Err(ErrorKind::NoSpace)), "{written:?}");
        });
        assert!(matches!(read(&store, 0), 1 | 2));
        writer.join().expect("no panic");
        assert_eq!(read(&store, 0), 2);
        let (in_memory, on_device) = held(&store);
        assert_eq!(in_memory + on_device, BLOCKS);
    });
}
