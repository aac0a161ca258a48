use super::tests::{config, recompression};
use super::*;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

/// Returns a page that lz4 makes smaller, and zstd smaller still.
pub(super) fn words(seed: u64) -> Page {
    const WORDS: [&str; 16] = [
        "slab ",
        "class ",
        "zspage ",
        "handle ",
        "fullness ",
        "group ",
        "huge ",
        "object ",
        "same ",
        "filled ",
        "slot ",
        "stream ",
        "backing ",
        "device ",
        "idle ",
        "frozen ",
    ];
    let mut random = Random::new(seed);
    let mut text = Vec::new();
    while text.len() < PAGE_SIZE {
        text.extend_from_slice(WORDS[random.below(WORDS.len())].as_bytes());
    }
    std::array::from_fn(|at| text[at])
}

fn store(names: [&str; MAX_RECOMPRESSION]) -> Store {
    Store::new(&StoreBuilder { recompression: recompression(names), ..config(1000) }).expect("store")
}

fn states(store: &Store) -> Vec<(u64, String)> {
    let mut states = Vec::new();
    store.block_states(0..store.pages(), |page, _, state| {
        let BlockState { same, backed, huge, idle, recompressed, incompressible } = state;
        let flags = [same, backed, huge, idle, recompressed, incompressible];
        let letters = flags.iter().zip("swhirn".chars()).filter(|(is_set, _)| **is_set);
        states.push((page, letters.map(|(_, letter)| letter).collect()));
        true
    });
    states
}

fn assert_contents(store: &Store, pages: std::ops::Range<u64>) {
    let mut out = [0; PAGE_SIZE];
    for page in pages {
        store.read(PageNo::from_number(page), &mut out).expect("sound");
        assert_eq!(out, words(page), "page {page}");
    }
}

#[test]
fn pages_become_smaller_and_read_the_same() {
    let store = store(["zstd:9", "", ""]);
    (0..100).for_each(|page| store.write(PageNo::from_number(page), &words(page)).expect("memory"));
    store.write(PageNo(500), &[3; PAGE_SIZE]).expect("memory");
    let before = store.stats();
    assert_eq!(store.recompress(&Recompression::default()), Ok(100));
    let after = store.stats();
    assert!(after.compr_data_bytes * 100 < before.compr_data_bytes * 95, "{before:?} {after:?}");
    assert_eq!((after.pages_recompressed, after.pages_stored), (100, 101));
    assert!(states(&store).iter().all(|(page, state)| *state == if *page == 500 { "s" } else { "r" }));
    // There is no further algorithm for them.
    assert_eq!(store.recompress(&Recompression::default()), Ok(0));
    assert_contents(&store, 0..100);
    // A page that is written again is compressed by the primary algorithm.
    store.write(PageNo(7), &words(7)).expect("memory");
    assert_eq!(store.recompress(&Recompression::default()), Ok(1));
    assert_contents(&store, 0..100);
}

#[test]
fn only_what_was_asked_for_is_tried() {
    let store = store(["zstd:9", "", "deflate:9"]);
    (0..20).for_each(|page| store.write(PageNo::from_number(page), &words(page)).expect("memory"));
    let mut random = Random::new(1);
    for page in 20..30 {
        let mut noise = [0; PAGE_SIZE];
        random.fill(&mut noise);
        store.write(PageNo::from_number(page), &noise).expect("memory");
    }
    let default = Recompression::default;
    let idle = Candidates { idle: true, ..Candidates::default() };
    assert_eq!(store.recompress(&Recompression { candidates: idle, ..default() }), Ok(0));
    store.mark_idle(Some(1000));
    assert!(states(&store).iter().all(|(_, state)| !state.contains('i')), "they were used just now");
    store.mark_idle(None);
    assert!(states(&store).iter().all(|(_, state)| state.contains('i')));
    let mut out = [0; PAGE_SIZE];
    (0..4).for_each(|page| store.read(PageNo::from_number(page), &mut out).expect("sound"));
    assert_eq!(store.recompress(&Recompression { candidates: idle, max_pages: 5, ..default() }), Ok(0));
    // The largest came first, and no algorithm made them smaller.
    let marked: Vec<u64> =
        states(&store).into_iter().filter(|(_, state)| *state == "hn").map(|(page, _)| page).collect();
    assert_eq!(marked, [20, 21, 22, 23, 24]);
    let huge = Candidates { huge: true, ..Candidates::default() };
    assert_eq!(store.recompress(&Recompression { candidates: huge, ..default() }), Ok(0));
    assert_eq!(states(&store).iter().filter(|(_, state)| state.contains('n')).count(), 10);
    let least = Recompression { threshold_bytes: 500, ..default() };
    assert_eq!(store.recompress(&least), Ok(0), "they are larger, and stay so");
    // Pages that were tried are no longer idle.
    store.mark_idle(None);
    (0..4).for_each(|page| store.read(PageNo::from_number(page), &mut out).expect("sound"));
    let one = Recompression { candidates: idle, priorities: 3..=3, ..default() };
    let by_deflate = store.recompress(&one).expect("memory");
    assert_eq!(by_deflate, 16, "but for the pages that were read");
    assert_eq!(store.recompress(&default()), Ok(4));
    assert_contents(&store, 0..20);
    assert_eq!(store.stats().huge_pages, 10);
}

/// Reads and writes go on during recompression, and reads return what was written last.
#[test]
fn pages_are_used_meanwhile() {
    let store = store(["zstd:1", "deflate:6", ""]);
    let busy = Counter::new(2);
    std::thread::scope(|scope| {
        let (store, busy) = (&store, &busy);
        let use_pages = move |thread: u64| {
            let mut random = Random::new(thread);
            let mut last = [None; 50];
            for _ in 0..4000 {
                let at = random.below(50);
                let page = at as u64 * 2 + thread;
                if random.below(3) == 0 {
                    let seed = random.next() % 100;
                    last[at] = Some(seed);
                    store.write(PageNo::from_number(page), &words(seed)).expect("memory");
                }
                let mut out = [0; PAGE_SIZE];
                store.read(PageNo::from_number(page), &mut out).expect("sound");
                assert_eq!(out, last[at].map_or([0; PAGE_SIZE], words), "page {page}");
            }
            busy.sub(1);
        };
        let recompress = move || {
            while busy.get() > 0 {
                store.recompress(&Recompression::default()).expect("memory");
            }
        };
        let threads =
            [scope.spawn(move || use_pages(0)), scope.spawn(move || use_pages(1)), scope.spawn(recompress)];
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
    assert!(store.stats().pages_recompressed > 0);
}
