//! Pages in memory, and what all tests of stores share.

use super::designs::each_pool_design;
use super::policy::one_batch;
use super::slot::Contents;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo, fill_with_word, same_word};
use crate::codec::Encoder;
use crate::zsmalloc::ClassStat;
use std::time::Duration;

pub(super) fn config(pages: u64) -> StoreBuilder {
    // No background compaction.
    StoreBuilder { compact_threshold_percent: 0, ..StoreBuilder::new("test", pages) }
}

pub(super) fn store(config: &StoreBuilder) -> Store {
    Store::new(config).expect("a store")
}

/// Returns the recompression algorithms of these names; an empty name is none.
pub(super) fn recompression(names: [&str; MAX_RECOMPRESSION]) -> [Option<Algorithm>; MAX_RECOMPRESSION] {
    names.map(|name| (!name.is_empty()).then(|| name.parse().expect("known")))
}

pub(super) fn put(store: &Store, page: u64, contents: &Page) {
    store.write(PageNo::from_number(page), contents).expect("memory");
}

pub(super) fn get(store: &Store, page: u64) -> Page {
    let mut read = [1; PAGE_SIZE];
    store.read(PageNo::from_number(page), &mut read).unwrap_or_else(|error| panic!("page {page}: {error}"));
    read
}

pub(super) fn expect(store: &Store, page: u64, contents: &Page) {
    assert!(get(store, page) == *contents, "page {page}");
}

pub(super) fn discard(store: &Store, pages: impl IntoIterator<Item = u64>) {
    pages.into_iter().for_each(|page| store.discard(PageNo::from_number(page)));
}

pub(super) fn objects(store: &Store) -> u64 {
    store.class_stats().iter().map(|stat| stat.obj_used).sum()
}

/// Returns a page of `len` random bytes, and then zeros.
pub(crate) fn noise(len: usize, seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    Random::new(seed).fill(&mut page[..len]);
    page
}

/// Returns a page that depends on a seed, and that zstd makes smaller than lz4 does.
pub(super) fn letters(seed: u64) -> Page {
    let mut random = Random::new(seed);
    std::array::from_fn(|_| b"etaoin shrdlu"[random.below(13)])
}

/// A page of one of the kinds that the store treats differently.
pub(super) fn page(random: &mut Random) -> Page {
    let mut page = [0; PAGE_SIZE];
    match random.below(6) {
        0 => {}
        1 => fill_with_word(&mut page, random.next()),
        2 => random.fill(&mut page),
        3 => {
            let len = random.below(PAGE_SIZE);
            random.fill(&mut page[..len]);
        }
        _ => {
            let mut unit = vec![0; 1 + random.below(300)];
            random.fill(&mut unit);
            page.iter_mut().zip(unit.iter().cycle()).for_each(|(byte, unit)| *byte = *unit);
        }
    }
    page
}

pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..60_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what} did not come about");
}

/// Calls `run` in threads, with their numbers and a count of those that still run. Returns what it returned.
pub(super) fn on_threads<T: Send>(threads: u64, run: impl Fn(u64, &Counter) -> T + Sync) -> Vec<T> {
    struct Runs<'a>(&'a Counter);
    impl Drop for Runs<'_> {
        fn drop(&mut self) {
            self.0.sub(1);
        }
    }
    let running = Counter::new(threads);
    std::thread::scope(|scope| {
        let (run, running) = (&run, &running);
        let start = |thread| {
            scope.spawn(move || {
                let _runs = Runs(running);
                run(thread, running)
            })
        };
        let started: Vec<_> = (0..threads).map(start).collect();
        // ThreadSanitizer sees joins, but not the end of a scope.
        started.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn with_designs(base: &StoreBuilder) -> Vec<StoreBuilder> {
    let configs = each_pool_design(base);
    #[cfg(feature = "designs")]
    let configs = {
        use crate::stream::StreamDesign;
        let list = |count: usize| StreamDesign::IdleList(count.try_into().expect("in range"));
        let streams = [StreamDesign::PerCpu, list(1), list(3)];
        configs.iter().flat_map(|config| streams.map(|streams| config.clone().streams(streams))).collect()
    };
    configs
}

fn configs(pages: u64) -> Vec<StoreBuilder> {
    let base = config(pages);
    let all = [
        base.clone(),
        StoreBuilder { checksum: true, chain_size: 4, ..base.clone() },
        StoreBuilder { algorithm: "zstd".parse().expect("known"), run_cache_batch_pages: 0, ..base.clone() },
        StoreBuilder { limit_pages: 40, chain_size: 8, ..base.clone() },
        StoreBuilder { recompression: recompression(["zstd:3", "", "deflate"]), checksum: true, ..base },
    ];
    all.iter().flat_map(with_designs).collect()
}

/// Checks the counters against the contents of every page; `None` was never written.
fn check_stats(store: &Store, model: &[Option<Page>]) {
    let stats = store.stats();
    let held = || model.iter().flatten();
    assert_eq!(stats.pages_stored, held().count() as u64);
    assert_eq!(stats.same_pages, held().filter(|page| same_word(page).is_some()).count() as u64);
    let mut encoder = Encoder::new(&Algorithm::default()).expect("memory");
    let threshold = store.pool.huge_threshold();
    let lens = held().filter(|page| same_word(page).is_none()).map(|page| {
        let len = encoder.encode(page, &mut [0; 2 * PAGE_SIZE]).expect("room");
        if len < threshold { len as u64 } else { PAGE_SIZE as u64 }
    });
    let lens: Vec<u64> = lens.collect();
    if store.codec.stateless_decoder.is_some() && !store.can_recompress() {
        assert_eq!(stats.compr_data_bytes, lens.iter().sum::<u64>());
        assert_eq!(stats.huge_pages, lens.iter().filter(|len| **len == PAGE_SIZE as u64).count() as u64);
    }
    assert_eq!((objects(store), stats.corrupted), (lens.len() as u64, 0), "each stored page has one object");
}

fn a_recompression(random: &mut Random) -> Recompression {
    let first = 1 + random.below(MAX_RECOMPRESSION) as u8;
    let (idle, huge) = (random.below(2) == 0, random.below(3) == 0);
    Recompression {
        candidates: Candidates { idle, huge, incompressible: false },
        threshold_bytes: [0, 0, 100, 1500][random.below(4)],
        max_pages: [u64::MAX, 7][random.below(2)],
        priorities: first..=first + random.below(MAX_RECOMPRESSION + 1 - usize::from(first)) as u8,
    }
}

/// A request that fails, by the limit or by an injected fault, changes nothing.
#[test]
fn agrees_with_a_naive_model() {
    const PAGES: u64 = 60;
    for (seed, config) in (0..).zip(&configs(PAGES)) {
        let (store, mut random) = (store(config), Random::new(seed));
        let mut model: Vec<Option<Page>> = vec![None; PAGES as usize];
        let (mut written, mut refused) = (0, 0);
        for step in 0..3000 {
            if step % 500 == 250 {
                store.arena.inject_faults(seed, 3);
            } else if step % 500 == 0 {
                store.arena.inject_faults(0, 0);
                check_stats(&store, &model);
            } else if random.below(100) == 0 {
                store.compact();
            } else if random.below(30) == 0 {
                // A failure leaves the page unchanged.
                let _ = store.recompress(&a_recompression(&mut random));
                store.mark_idle((random.below(2) == 0).then_some(random.below(2) as u32));
            } else if random.below(30) == 0 {
                let mut pages = (random.below_u64(PAGES)..PAGES).map(PageNo::from_number);
                one_batch(&store, &mut pages, || ());
            }
            let number = random.below(PAGES as usize);
            let (at, len) = (random.below(PAGE_SIZE), 1 + random.below(PAGE_SIZE));
            let len = len.min(PAGE_SIZE - at);
            let mut expected = model[number].unwrap_or([0; PAGE_SIZE]);
            let done = match random.below(8) {
                0..=2 => {
                    expected = page(&mut random);
                    store.write(PageNo(number as u32), &expected)
                }
                3 => {
                    random.fill(&mut expected[at..at + len]);
                    store.write_part(PageNo(number as u32), at, &expected[at..at + len], Wait::Yes)
                }
                4 => {
                    expected[at..at + len].fill(0);
                    let allocate = random.below(2) == 0;
                    let done = store.zero_part(PageNo(number as u32), at, len, allocate, Wait::Yes);
                    if model[number].is_none() && !allocate {
                        assert_eq!(done, Ok(()), "there is nothing to zero");
                        continue;
                    }
                    done
                }
                5 => {
                    store.discard(PageNo(number as u32));
                    model[number] = None;
                    continue;
                }
                _ => {
                    let mut part = vec![1; len];
                    store.read_part(PageNo(number as u32), at, &mut part, Wait::Yes).expect("sound");
                    assert_eq!(part, expected[at..at + len], "seed {seed} step {step}");
                    continue;
                }
            };
            match &done {
                Ok(()) => (model[number], written) = (Some(expected), written + 1),
                Err(error) => {
                    refused += 1;
                    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
                }
            }
            // A failed request has changed nothing.
            let wanted = model[number].unwrap_or([0; PAGE_SIZE]);
            assert!(get(&store, number as u64) == wanted, "seed {seed} step {step}: {done:?}");
        }
        assert!(written > 500 && refused > 10, "seed {seed}: {written} written, {refused} refused");
    }
}

/// Eight threads on 64 pages, which also compact: every read returns one of the values written to that page,
/// as a whole. (The kernel's bf62f69574b1 and others: an object was used after it had been freed.)
#[test]
fn reads_under_writes_are_whole_pages_of_theirs() {
    const PAGES: u64 = 64;
    // The first word of page `number` in version `version` holds both, and determines the rest.
    let make = |number: u64, version: u64| {
        let word = number << 32 | version;
        let mut page = noise(8 + Random::new(word).below(PAGE_SIZE - 8), word);
        page[..8].copy_from_slice(&word.to_le_bytes());
        page
    };
    let zstd = StoreBuilder { algorithm: "zstd".parse().expect("known"), checksum: true, ..config(PAGES) };
    for config in with_designs(&config(PAGES)).into_iter().chain(with_designs(&zstd)) {
        let store = store(&config);
        on_threads(8, |thread, _| {
            let mut random = Random::new(thread);
            for step in 0..if cfg!(tsan) { 100 } else { 1500 } {
                let number = random.below_u64(PAGES);
                if step % 50 == 7 * thread {
                    store.compact();
                }
                match random.below(10) {
                    0 => store.discard(PageNo::from_number(number)),
                    1..=4 => put(&store, number, &make(number, 1 + random.below_u64(1000))),
                    _ => {
                        let read = get(&store, number);
                        let word = u64::from_le_bytes(*read.first_chunk().expect("8 bytes"));
                        assert!(word == 0 || word >> 32 == number, "thread {thread}: page {number}");
                        let is_whole = || read == make(number, word & 0xffff_ffff);
                        assert!(if word == 0 { read == [0; PAGE_SIZE] } else { is_whole() }, "page {number}");
                    }
                }
            }
        });
        let stats = store.stats();
        let stored = stats.pages_stored - stats.same_pages;
        assert_eq!((stored, stats.corrupted), (objects(&store), 0), "{config:?}");
        discard(&store, 0..PAGES);
        assert_eq!(store.stats().pool_pages, 0, "{config:?}");
    }
}

/// A page whose object is shorter than its old one, in the same class, reads as it was written, without bytes
/// of the old one. (The kernel's 3bf1c285dc40: it exposed bytes after an object's end.)
#[test]
fn shorter_contents_leave_nothing_of_longer_ones() {
    for config in each_pool_design(&config(4)) {
        let store = store(&config);
        for len in (8..PAGE_SIZE).rev().step_by(3) {
            let contents = noise(len, len as u64);
            put(&store, 1, &contents);
            expect(&store, 1, &contents);
        }
    }
}

#[test]
fn part_writes_of_one_page_do_not_undo_each_other() {
    let store = store(&config(4));
    on_threads(8, |thread, _| {
        let at = thread as usize * 512;
        for (round, page) in (1..=200u8).flat_map(|round| [0, 1, 2, 3].map(|page| (round, PageNo(page)))) {
            let (bytes, mut read) = ([round ^ thread as u8; 512], [0; 512]);
            store.write_part(page, at, &bytes, Wait::Yes).expect("memory");
            store.read_part(page, at, &mut read, Wait::Yes).expect("sound");
            assert_eq!(read, bytes);
        }
    });
}

#[test]
fn damage_is_an_error() {
    let store = store(&StoreBuilder { checksum: true, ..config(8) });
    let mut contents = noise(PAGE_SIZE, 1);
    put(&store, 3, &contents);
    let other = store.slots.lock(PageNo(3)).contents();
    let Contents::Stored { handle, len, .. } = other else { panic!("{other:?}") };
    // SAFETY: the slot holds the handle, and no other thread frees it.
    let pinned = unsafe { store.pool.read(handle, 3, usize::from(len)) }.expect("sound");
    // SAFETY: no other thread uses the store; the page is huge, so its bytes are the page's.
    unsafe { pinned.as_ptr().cast_mut().add(100).write(!contents[100]) };
    drop(pinned);
    // A slot that refers to another page's object is damaged, too.
    store.slots.lock(PageNo(4)).replace(other);
    for page in [3, 4] {
        assert_eq!(store.read(PageNo(page), &mut contents).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    assert_eq!(store.stats().failed_reads, 2);
}

#[test]
fn a_limit_below_what_the_first_pages_take_is_refused() {
    let (raw, compressible) = (noise(PAGE_SIZE, 1), noise(2000, 1));
    for config in each_pool_design(&config(16)) {
        let with = |limit_pages| StoreBuilder { limit_pages, ..config.clone() };
        for limit_pages in 1..6 {
            let error = Store::new(&with(limit_pages)).err().unwrap_or_else(|| panic!("{limit_pages}"));
            assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("mem_limit")));
            assert!(error.to_string().contains("at least 24 KiB"), "{error}");
        }
        // This holds only if the thread stays on one CPU: each CPU has slabs of its own.
        let is_least = |_| {
            let store = store(&with(6));
            let is_stored = |(page, contents)| store.write(PageNo(page), contents).is_ok();
            [(0, &raw), (1, &compressible)].into_iter().all(is_stored) && store.stats().charged_pages == 6
        };
        assert!((0..20).any(is_least), "{config:?}");
        // An existing store accepts any limit, and keeps its pages.
        let store = store(&with(0));
        put(&store, 0, &raw);
        store.set_limit_pages(1);
        assert_eq!((store.stats().limit_pages, get(&store, 0) == raw), (1, true));
    }
    for pages in [0, MAX_PAGES + 1] {
        assert_eq!(
            Store::new(&self::config(pages)).err().and_then(|error| error.setting()),
            Some("disksize")
        );
    }
}

/// Threads write one page with contents of each kind and discard it, beside compaction: statistics never
/// wrap, and are exact at the end. (The kernel's b0377ee80429: `huge_pages` went below zero.)
#[test]
fn one_busy_page_keeps_its_counts() {
    const ROUNDS: u64 = 8000;
    let contents = [noise(2000, 3), noise(PAGE_SIZE, 4), [0xde; PAGE_SIZE]];
    for config in each_pool_design(&StoreBuilder { limit_pages: 400, ..config(1 << 20) }) {
        let store = store(&config);
        on_threads(5, |thread, running| {
            if thread < 4 {
                (thread..thread + ROUNDS).for_each(|round| match contents.get(round as usize % 4) {
                    Some(contents) => put(&store, 7, contents),
                    None => store.discard(PageNo(7)),
                });
            }
            while thread == 4 && running.get() > 1 {
                let stats = store.stats();
                // The CPUs' shares are read one after the other: a change in between may be counted in part.
                let pages = stats.pages_stored.max(stats.same_pages).max(stats.huge_pages);
                assert!(pages <= 4 * ROUNDS, "{stats:?}");
                store.compact();
            }
        });
        store.discard(PageNo(7));
        let stats = store.stats();
        let counts = [stats.pages_stored, stats.same_pages, stats.huge_pages, stats.compr_data_bytes];
        assert_eq!((counts, stats.pool_pages, stats.corrupted), ([0; 4], 0, 0), "{config:?}");
    }
}

#[test]
fn the_limit_holds_under_many_writers() {
    for config in with_designs(&StoreBuilder { limit_pages: 300, ..config(4096) }) {
        let store = store(&config);
        let counts = on_threads(8, |thread, _| {
            let (mut random, mut held, mut refused) = (Random::new(thread), Vec::new(), 0);
            let rounds = if cfg!(tsan) { 500 } else { 1500 };
            for round in 0..rounds {
                let number = thread * 512 + random.below(512) as u64;
                let mut page = noise(8 + random.below(PAGE_SIZE - 8), random.next());
                page[..8].copy_from_slice(&(number << 32 | round).to_le_bytes());
                let old = get(&store, number);
                match store.write(PageNo::from_number(number), &page) {
                    Ok(()) => held.push(number),
                    Err(error) => {
                        assert_eq!(error.setting(), Some("mem_limit"));
                        assert!(get(&store, number) == old, "a failed write changed the page");
                        discard(&store, held.drain(..held.len().div_ceil(2)));
                        refused += 1;
                    }
                }
                if round % 300 == 20 * thread {
                    store.compact();
                }
                assert!(store.stats().charged_pages <= config.limit_pages);
            }
            (rounds - refused, refused)
        });
        let (done, refused) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        assert!(done > 1500 && refused > 30, "{done} written, {refused} refused");
    }
}

#[test]
fn memory_that_must_go_back_first_is_waited_for() {
    for config in with_designs(&config(1000)) {
        let (store, small, large) = (store(&config), noise(1000, 1), noise(3000, 2));
        (0..100).for_each(|page| put(&store, page, &small));
        discard(&store, 0..100);
        let (stats, before) = (store.stats(), store.stats().charged_pages);
        assert!(stats.pool_pages == 0 && before > 20, "{stats:?}");
        store.set_limit_pages(before);
        // The free pages are kept in runs of a length that these writes cannot use.
        (0..20).for_each(|page| put(&store, page, &large));
        assert!(store.stats().charged_pages <= before);
        (0..20).for_each(|page| expect(&store, page, &large));
    }
}

/// Dropping the store ends its thread in the middle of a compaction.
#[test]
fn a_scattered_store_is_compacted_by_itself() {
    let scattered = |compact_threshold_percent| {
        let config = StoreBuilder { compact_threshold_percent, compact_rate_bytes: 64 << 20, ..config(4096) };
        let (store, mut random) = (store(&config), Random::new(1));
        for page in (0..3).flat_map(|_| 0..4096) {
            put(&store, page, &noise(256 + random.below(3000), random.next()));
        }
        discard(&store, (0..4096).filter(|page| page % 4 != 0));
        store
    };
    let freeable = |store: &Store| store.class_stats().iter().map(ClassStat::freeable_pages).sum::<u64>();
    let store = scattered(0);
    let before = store.stats().pool_pages;
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!((store.stats().pages_compacted, store.stats().pool_pages), (0, before), "nobody asked for it");
    assert!(freeable(&store) * 100 > before * 20, "{} of {before}", freeable(&store));
    store.set_compact_threshold_percent(20);
    // A step is counted when it has ended.
    until("compaction", || {
        let stats = store.stats();
        let is_packed = freeable(&store) * 100 <= stats.pool_pages * 20;
        is_packed && stats.pages_compacted > 0 && stats.pool_pages < before
    });
    let store = scattered(10);
    until("the next one", || store.stats().pages_compacted > 0);
}
