//! The slot table takes memory only for used slots, with any page size of the host.

use super::tests::{config, discard, expect, on_threads, put, store};
use super::*;
use crate::base::mem::{HOST_PAGE_BYTES, with_host_pages_of};
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, PageNo};
use std::time::{Duration, Instant};

fn store_on_pages_of(host_page_bytes: usize, config: &StoreBuilder) -> Store {
    with_host_pages_of(host_page_bytes, || Store::new(config)).expect("a store")
}

#[test]
fn unwritten_space_takes_no_memory_of_the_table() {
    const TIB_PAGES: u64 = 1 << 28;
    let store = store(&config(TIB_PAGES));
    let before = store.table_resident_bytes();
    let start = Instant::now();
    store.discard_pages(0..TIB_PAGES);
    assert_eq!(store.extent(PageNo(5), TIB_PAGES - 5), (PageState::Hole, TIB_PAGES - 5));
    assert_eq!(store.zero_pages(PageNo(0), TIB_PAGES), TIB_PAGES);
    store.prefetch_object(|ahead| Some(PageNo(ahead as u32)));
    for page in (0..TIB_PAGES).step_by(3001) {
        expect(&store, page, &[0; PAGE_SIZE]);
        store.discard(PageNo::from_number(page));
        store.zero_part(PageNo::from_number(page), 1, 1, false, Wait::No).expect("a hole");
    }
    assert_eq!(store.table_resident_bytes(), before);
    assert_eq!(store.slots.table_memory_bytes(), 0);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    // One used page does not make its neighbours take memory.
    store.zero(PageNo::from_number(TIB_PAGES / 2));
    let with_one = store.table_resident_bytes();
    assert!(with_one > before && with_one < before + (256 << 10), "{before} {with_one}");
    store.discard_pages(0..TIB_PAGES);
    assert_eq!(store.extent(PageNo(0), TIB_PAGES), (PageState::Hole, TIB_PAGES));
    assert_eq!(store.slots.table_memory_bytes(), 0);
}

#[test]
fn the_table_shrinks_when_pages_are_discarded() {
    const PAGES: u64 = 3 << 16;
    for host_page_bytes in HOST_PAGE_BYTES {
        let store = store_on_pages_of(host_page_bytes, &config(PAGES + 7));
        let before = store.table_resident_bytes();
        let table_bytes = (PAGES as usize) * slot::SLOT_BYTES;
        for discard_pages in [PAGES + 7, 1, 37] {
            (0..PAGES + 7).for_each(|page| store.zero(PageNo::from_number(page)));
            assert!(store.table_resident_bytes() >= before + table_bytes);
            assert_eq!(store.extent(PageNo(0), PAGES + 7), (PageState::Zero, PAGES + 7));
            let mut page = 0;
            while page < PAGES + 7 {
                let end = (page + discard_pages).min(PAGES + 7);
                store.discard_pages(page..end);
                page = end;
            }
            // The states of the table's pages stay: four bytes for each.
            let left = store.table_resident_bytes() - before;
            assert!(left <= table_bytes / 256, "{host_page_bytes}, by {discard_pages}: {left} bytes");
            assert_eq!((store.slots.table_pages(), store.slots.table_memory_bytes()), (0, 0));
        }
        // A page that is not discarded keeps the slots of its neighbours in memory.
        (0..PAGES).for_each(|page| store.zero(PageNo::from_number(page)));
        store.discard_pages(0..1000);
        store.discard_pages(1001..PAGES);
        assert_eq!(store.extent(PageNo(1000), 1), (PageState::Zero, 1));
        assert_eq!((store.zero_pages(PageNo(0), PAGES), store.slots.table_pages()), (PAGES, 1));
    }
}

#[test]
fn pages_come_and_go_beside_each_other() {
    const THREADS: u64 = 3;
    for (seed, host_page_bytes) in (0..6).zip(HOST_PAGE_BYTES.into_iter().cycle()) {
        // The last page of the table is not full.
        let pages = (host_page_bytes / slot::SLOT_BYTES) as u64 + 12;
        let store = store_on_pages_of(host_page_bytes, &config(pages));
        let left = on_threads(THREADS, |thread, _| {
            let mut random = Random::new(seed * THREADS + thread);
            // The byte that each of the thread's pages is filled with; 0 for a hole.
            let mine = if host_page_bytes == HOST_PAGE_BYTES[0] { pages / THREADS } else { 8 };
            let (mut model, mut left) = (vec![0; mine as usize], false);
            let number = |at: usize| at as u64 * THREADS + thread;
            let check = |at: usize, byte: u8| {
                expect(&store, number(at), &[byte; PAGE_SIZE]);
                let state = if byte == 0 { PageState::Hole } else { PageState::Same };
                assert_eq!(store.extent(PageNo::from_number(number(at)), 1).0, state, "page {}", number(at));
            };
            for _ in 0..20_000 {
                let at = random.below(model.len());
                match random.below(8) {
                    0 => {
                        model[at] = 1 + random.below(255) as u8;
                        put(&store, number(at), &[model[at]; PAGE_SIZE]);
                    }
                    1..6 => {
                        // All of this thread's pages in some page of the table, so that it is often empty.
                        let some = at / 8 * 8..(at / 8 * 8 + 8).min(model.len());
                        let held = some.clone().filter(|at| model[*at] != 0);
                        discard(&store, held.map(number));
                        model[some].fill(0);
                        left |= store.slots.table_pages() == 0;
                    }
                    _ => {}
                }
                check(at, model[at]);
            }
            model.iter().enumerate().for_each(|(at, byte)| check(at, *byte));
            discard(&store, (0..model.len()).map(number));
            left
        });
        assert!(left.contains(&true), "seed {seed}: no page of the table ever left");
        assert_eq!(store.extent(PageNo(0), pages), (PageState::Hole, pages), "seed {seed}");
        // Not by the system's count: a read of a slot just after its page left faults in zeros.
        assert_eq!(store.slots.table_pages(), 0, "seed {seed}");
    }
}
