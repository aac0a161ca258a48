//! Tests of stores that are restored from the memory of others.

use std::collections::BTreeMap;

use super::super::*;
use super::*;
use crate::base::random::Random;
use crate::base::sync::{Mutex, classes};
use crate::base::units::PAGE_SIZE;
use crate::codec::Kind;
use crate::store::designs::each_pool_design;
use crate::store::tests::{discard, expect, on_threads, page, until};

fn contents(seed: u64) -> [u8; PAGE_SIZE] {
    page(&mut Random::new(seed))
}

fn memory_of(store: &Store) -> OwnedFd {
    use std::os::fd::AsFd;
    store.memory().expect("it outlives the process").as_fd().try_clone_to_owned().expect("a descriptor")
}

fn end(store: Store) -> OwnedFd {
    memory_of(&store)
}

fn attach(memory: OwnedFd) -> (Store, Attached) {
    // SAFETY: the store that had the memory was dropped.
    unsafe { Store::attach(memory, None, |_| ()) }.expect("attached")
}

fn write(store: &Store, page: u64, seed: u64) {
    while let Err(error) = store.write(PageNo::from_number(page), &contents(seed)) {
        assert_eq!(error.setting(), Some("reserve"), "{error}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn check_against(store: &Store, model: &BTreeMap<u64, u64>) {
    let expected = |page: u64| model.get(&page).map_or([0; PAGE_SIZE], |seed| contents(*seed));
    (0..store.pages()).for_each(|page| expect(store, page, &expected(page)));
}

fn builders() -> Vec<StoreBuilder> {
    let new = || StoreBuilder::new("survives", 3000).checksum(true);
    let zstd = Algorithm::from(Kind::Zstd);
    let mut builders = vec![
        new().lru(false),
        StoreBuilder {
            chain_size: 4,
            ..new().algorithm(zstd.clone()).recompression([Some(zstd), None, None])
        },
        StoreBuilder { run_cache_batch_pages: 0, ..new().limit_pages(4096) },
        new().policy(ReclaimPolicy { order: ReclaimOrder::Zspages, ..ReclaimPolicy::default() }),
    ];
    builders.extend(each_pool_design(&new()));
    #[cfg(feature = "designs")]
    builders.push(new().reserve_pages(2048).lru_design(crate::lru::LruDesign::SingleLock));
    builders
}

#[test]
fn what_was_written_is_found_again() {
    for (case, builder) in builders().into_iter().enumerate() {
        let mut random = Random::new(case as u64);
        let mut model = BTreeMap::new();
        let mut store = Store::create_in(&builder).expect("a store");
        for round in 0..4u64 {
            for step in 0..3000u64 {
                let page = random.below(3000) as u64;
                if random.below(6) == 0 {
                    store.discard(PageNo::from_number(page));
                    model.remove(&page);
                } else {
                    let seed = round * 10_000 + step;
                    write(&store, page, seed);
                    model.insert(page, seed);
                }
            }
            if round == 2 {
                store.compact();
            }
            let before = store.stats();
            let memory = end(store);
            let attached;
            (store, attached) = attach(memory);
            assert_eq!((attached.pages, attached.pages_lost), (model.len() as u64, 0), "case {case}");
            check_against(&store, &model);
            let now = store.stats();
            let of = |stats: &StoreStats| (stats.pages_stored, stats.same_pages, stats.huge_pages);
            assert_eq!(of(&now), of(&before), "case {case}");
            let of = |stats: &StoreStats| (stats.compr_data_bytes, stats.limit_pages);
            assert_eq!(of(&now), of(&before), "case {case}");
            assert!(now.pool_pages <= before.pool_pages, "case {case}");
        }
        // A second attach finds the same, and all pages can be discarded.
        let before = store.stats();
        let (again, _) = attach(end(store));
        let now = again.stats();
        assert_eq!((now.pool_pages, now.compr_data_bytes), (before.pool_pages, before.compr_data_bytes));
        discard(&again, 0..3000);
        let empty = again.stats();
        assert_eq!((empty.pages_stored, empty.compr_data_bytes, empty.pool_pages), (0, 0, 0), "case {case}");
    }
}

#[test]
fn progress_is_told() {
    let store = Store::create_in(&StoreBuilder::new("survives", 1 << 20)).expect("a store");
    (0..200_000).for_each(|page| store.write(PageNo::from_number(page), &[1; PAGE_SIZE]).expect("written"));
    let (told, heard) = std::sync::mpsc::channel();
    let progress = move |progress| told.send(progress).expect("somebody hears");
    // SAFETY: the store that had the memory was dropped.
    let attached = unsafe { Store::attach(end(store), None, progress) }.expect("attached").1;
    let mut told: Vec<_> =
        heard.into_iter().map(|AttachProgress { slots, of_slots }| (slots, of_slots)).collect();
    told.sort_unstable();
    assert!(told.len() >= 3 && told.iter().all(|(slots, of_slots)| slots <= of_slots), "{told:?}");
    let end = told.last().expect("the end");
    assert!(end.0 == end.1 && end.0 >= attached.pages && end.0 < 210_000, "{told:?}");
}

/// Checks that a store charges exactly the memory that its file has for the arena.
fn check_charged(store: &Store) {
    until("a charge of what is in memory", || {
        store.stats().charged_pages == store.arena.resident_bytes() as u64 / PAGE_SIZE as u64
    });
}

#[test]
fn a_stand_by_changes_nothing() {
    const PAGES: u64 = 4000;
    let store = Store::create_in(&StoreBuilder::new("survives", PAGES).checksum(true)).expect("a store");
    let mut model: BTreeMap<_, _> = (0..PAGES).map(|page| (page, page)).collect();
    let stand_by = match StandBy::new(memory_of(&store)) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return println!("skipped: {error}"),
        stand_by => stand_by.expect("mapped"),
    };
    (0..PAGES).for_each(|page| write(&store, page, page));
    check_charged(&store);
    assert!(stand_by.catch_up().expect("mapped") > 4000 * 1000, "they are not mapped yet");
    let users = Mutex::new(&classes::DEVICE, (&mut model, Random::new(7)));
    let mapped_bytes = on_threads(2, |thread, running| {
        let mut bytes = 0;
        while thread == 1 && running.get() > 1 {
            bytes += stand_by.catch_up().expect("mapped");
        }
        for round in 1..if thread == 0 { 20 } else { 1 } {
            let (model, random) = &mut *users.lock();
            // Memory is given back while pages are missing.
            let first = random.below(PAGES as usize / 2) as u64;
            store.discard_pages(first..first + PAGES / 2);
            model.retain(|page, _| !(first..first + PAGES / 2).contains(page));
            store.compact();
            check_charged(&store);
            for _ in 0..PAGES / 2 {
                let page = random.below(PAGES as usize) as u64;
                write(&store, page, round * 10_000 + page);
                model.insert(page, round * 10_000 + page);
            }
        }
        bytes
    });
    assert!(mapped_bytes[1] > 0);
    check_against(&store, &model);
    check_charged(&store);
    (0..PAGES).for_each(|page| write(&store, page, page));
    stand_by.catch_up().expect("mapped");
    assert_eq!(stand_by.catch_up().expect("mapped"), 0, "all of it is mapped");
    drop(store);
    // SAFETY: the store that had the memory was dropped.
    let (store, attached) = unsafe { Store::attach(stand_by, None, |_| ()) }.expect("attached");
    assert_eq!((attached.pages, attached.pages_lost), (PAGES, 0));
    check_charged(&store);
    check_against(&store, &(0..PAGES).map(|page| (page, page)).collect());
    (0..PAGES).for_each(|page| write(&store, page, page + 1));
    check_against(&store, &(0..PAGES).map(|page| (page, page + 1)).collect());
}

#[test]
fn only_a_stores_memory_is_stood_by() {
    let null = std::fs::File::open("/dev/null").expect("a file");
    assert_eq!(StandBy::new(null.into()).err().expect("refused").kind(), ErrorKind::Invalid);
    let empty = MemoryFile::create("empty", 64 << 20).expect("a memfd");
    let empty = std::os::fd::AsFd::as_fd(&*empty).try_clone_to_owned().expect("a descriptor");
    let Ok(stand_by) = StandBy::new(empty) else { return println!("skipped: no userfaultfd") };
    // SAFETY: nobody uses the memory.
    let attached = unsafe { Store::attach(stand_by, None, |_| ()) };
    assert_eq!(attached.err().expect("no store").kind(), ErrorKind::Invalid);
}
