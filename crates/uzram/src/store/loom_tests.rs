//! Loom tests of the whole path of a page: slot lock, pin, free, zsmalloc, slab, arena.

use super::*;
use crate::base::units::{PAGE_SIZE, Page, PageNo};
use loom::thread;

fn store(pages: u64) -> Arc<Store> {
    Arc::new(Store::new(&config(pages)).expect("store"))
}

pub(super) fn config(pages: u64) -> StoreBuilder {
    StoreBuilder {
        // The fewest classes: loom creates all their locks again for each interleaving.
        chain_size: 1,
        // The LRU has models of its own.
        lru: false,
        lru_pagevec_pages: 1,
        run_cache_batch_pages: 0,
        ..StoreBuilder::new("test", pages)
    }
}

pub(super) fn contents(seed: u8) -> Page {
    let mut page = [seed; PAGE_SIZE];
    page[0] = !seed;
    page
}

pub(super) fn read(store: &Store, page: u64) -> u8 {
    let mut read = [0; PAGE_SIZE];
    store.read(PageNo::from_number(page), &mut read).expect("sound");
    let seed = read[PAGE_SIZE - 1];
    assert!(seed == 0 || read == contents(seed), "a page of two writes");
    seed
}

pub(super) fn spawn<S: 'static, T: 'static>(
    shared: &Arc<S>,
    run: impl FnOnce(&S) -> T + 'static,
) -> thread::JoinHandle<T> {
    let shared = Arc::clone(shared);
    thread::spawn(move || run(&shared))
}

pub(super) fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Two preemptions find what three do, in a thousandth of the time; set LOOM_MAX_PREEMPTIONS for more.
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.max_branches = 5000;
    let f = std::sync::Arc::new(f);
    builder.check(move || {
        // Making a store takes more than loom's stacks have, 4096 words.
        let (f, large) = (f.clone(), thread::Builder::new().stack_size(4 * 4096));
        large.spawn(move || f()).expect("a thread").join().expect("no panic");
    });
}

#[test]
fn loom_store_reads_against_overwriting() {
    model(|| {
        let store = store(2);
        store.write(PageNo(0), &contents(1)).expect("memory");
        let writer = spawn(&store, |store: &Store| {
            store.write(PageNo(0), &contents(2)).expect("memory");
            // Takes the memory of the first object, if it is free.
            store.write(PageNo(1), &contents(3)).expect("memory");
        });
        assert!(matches!(read(&store, 0), 1 | 2));
        writer.join().expect("no panic");
        assert_eq!((read(&store, 0), read(&store, 1)), (2, 3));
        assert_eq!(store.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>(), 2);
    });
}

#[test]
fn loom_store_writes_against_writing() {
    model(|| {
        let store = store(1);
        let writer = spawn(&store, |store: &Store| store.write(PageNo(0), &contents(2)).expect("memory"));
        store.write(PageNo(0), &contents(1)).expect("memory");
        writer.join().expect("no panic");
        assert!(matches!(read(&store, 0), 1 | 2));
        assert_eq!(store.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>(), 1);
    });
}

#[test]
fn loom_store_reads_against_discarding() {
    model(|| {
        let store = store(1);
        store.write(PageNo(0), &contents(1)).expect("memory");
        let reader = spawn(&store, |store: &Store| assert!(matches!(read(store, 0), 0 | 1)));
        store.discard(PageNo(0));
        reader.join().expect("no panic");
        assert_eq!((read(&store, 0), store.stats().pages_stored), (0, 0));
        assert_eq!(store.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>(), 0);
    });
}

/// The state of a page, read without its lock while it is written, is one that it had.
#[test]
fn loom_store_states_against_writing() {
    model(|| {
        let store = store(1);
        let writer = spawn(&store, |store: &Store| {
            store.write(PageNo(0), &contents(1)).expect("memory");
            store.zero(PageNo(0));
        });
        let states = [(); 2].map(|()| store.extent(PageNo(0), 1).0);
        use PageState::*;
        let order = |state| [Hole, Compressed, Zero].iter().position(|other| *other == state);
        assert!(order(states[0]).is_some() && order(states[0]) <= order(states[1]), "{states:?}");
        writer.join().expect("no panic");
        assert_eq!(store.extent(PageNo(0), 1), (Zero, 1));
    });
}
