//! Pages that are recompressed on request.

use super::tests::{config, noise, put, recompression, store};
use super::writeback_tests::{check, write};
use super::*;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page};

/// Returns a page that lz4 makes smaller, and zstd smaller still.
fn words(seed: u64) -> Page {
    let words: Vec<_> =
        "slab class zspage handle fullness group huge object same filled slot stream backing \
                         device idle frozen "
            .split_inclusive(' ')
            .collect();
    let (mut random, mut text) = (Random::new(seed), Vec::new());
    while text.len() < PAGE_SIZE {
        text.extend_from_slice(words[random.below(words.len())].as_bytes());
    }
    std::array::from_fn(|at| text[at])
}

fn recompressing(names: [&str; MAX_RECOMPRESSION]) -> Store {
    store(&StoreBuilder { recompression: recompression(names), ..config(1000) })
}

fn states(store: &Store) -> Vec<(u64, String)> {
    let mut states = Vec::new();
    store.block_states(0..store.pages(), |page, _, flags| {
        states.push((page, String::from_utf8_lossy(&flags).replace('.', "")));
        true
    });
    states
}

#[test]
fn pages_become_smaller_and_read_the_same() {
    let store = recompressing(["zstd:9", "", ""]);
    write(&store, 0..100, words);
    put(&store, 500, &[3; PAGE_SIZE]);
    let before = store.stats();
    assert_eq!(store.recompress(&Recompression::default()), Ok(100));
    let after = store.stats();
    assert!(after.compr_data_bytes * 100 < before.compr_data_bytes * 95, "{before:?} {after:?}");
    assert_eq!((after.pages_recompressed, after.pages_stored), (100, 101));
    assert!(states(&store).iter().all(|(page, state)| *state == if *page == 500 { "s" } else { "r" }));
    // There is no further algorithm for them.
    assert_eq!(store.recompress(&Recompression::default()), Ok(0));
    check(&store, 0..100, words);
    // A page that is written again is compressed by the primary algorithm.
    put(&store, 7, &words(7));
    assert_eq!(store.recompress(&Recompression::default()), Ok(1));
    check(&store, 0..100, words);
}

#[test]
fn only_what_was_asked_for_is_tried() {
    let store = recompressing(["zstd:9", "", "deflate:9"]);
    write(&store, 0..20, words);
    write(&store, 20..30, |page| noise(PAGE_SIZE, page));
    let default = Recompression::default;
    let idle = Candidates { idle: true, ..Candidates::default() };
    assert_eq!(store.recompress(&Recompression { candidates: idle, ..default() }), Ok(0));
    store.mark_idle(Some(1000));
    assert!(states(&store).iter().all(|(_, state)| !state.contains('i')), "they were used just now");
    store.mark_idle(None);
    assert!(states(&store).iter().all(|(_, state)| state.contains('i')));
    check(&store, 0..4, words);
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
    check(&store, 0..4, words);
    let one = Recompression { candidates: idle, priorities: 3..=3, ..default() };
    assert_eq!(store.recompress(&one), Ok(16), "but for the pages that were read");
    assert_eq!(store.recompress(&default()), Ok(4));
    check(&store, 0..20, words);
    assert_eq!(store.stats().huge_pages, 10);
}
