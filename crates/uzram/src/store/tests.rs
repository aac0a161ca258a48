use super::designs::each_pool_design;
use super::policy::one_batch;
use super::slot::Contents;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo, fill_with_word, same_word};
use crate::codec::Encoder;
use crate::zsmalloc::ClassStat;

pub(super) fn config(pages: u64) -> StoreBuilder {
    // No background compaction.
    StoreBuilder { compact_threshold_percent: 0, ..StoreBuilder::new("test", pages) }
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

fn configs(pages: u64) -> [StoreBuilder; 5] {
    let base = config(pages);
    [
        base.clone(),
        StoreBuilder { checksum: true, chain_size: 4, ..base.clone() },
        StoreBuilder { algorithm: "zstd".parse().expect("known"), run_cache_batch_pages: 0, ..base.clone() },
        StoreBuilder { limit_pages: 40, chain_size: 8, ..base.clone() },
        StoreBuilder { recompression: recompression(["zstd:3", "", "deflate"]), checksum: true, ..base },
    ]
}

pub(super) fn recompression(names: [&str; MAX_RECOMPRESSION]) -> [Option<Algorithm>; MAX_RECOMPRESSION] {
    names.map(|name| (!name.is_empty()).then(|| name.parse().expect("known")))
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
            let period = 1 + random.below(300);
            let mut unit = vec![0; period];
            random.fill(&mut unit);
            page.iter_mut().zip(unit.iter().cycle()).for_each(|(byte, unit)| *byte = *unit);
        }
    }
    page
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
    if store.codec.decodes_without_state() && !store.can_recompress() {
        assert_eq!(stats.compr_data_bytes, lens.iter().sum::<u64>());
        assert_eq!(stats.huge_pages, lens.iter().filter(|len| **len == PAGE_SIZE as u64).count() as u64);
    }
    let objects: u64 = store.class_stats().iter().map(|stat| stat.obj_used).sum();
    assert_eq!(objects, lens.len() as u64, "every stored page has one object");
    assert_eq!(stats.corrupted, 0);
}

fn a_recompression(random: &mut Random) -> Recompression {
    let first = 1 + random.below(MAX_RECOMPRESSION) as u8;
    Recompression {
        candidates: Candidates {
            idle: random.below(2) == 0,
            huge: random.below(3) == 0,
            incompressible: false,
        },
        threshold_bytes: [0, 0, 100, 1500][random.below(4)],
        max_pages: [u64::MAX, 7][random.below(2)],
        priorities: first..=first + random.below(MAX_RECOMPRESSION + 1 - usize::from(first)) as u8,
    }
}

/// Compares seeded writes, part writes, zeroed parts, discards, reads and compactions with an array of pages.
/// A request that fails, by the limit or by an injected fault, changes nothing.
#[test]
fn agrees_with_a_naive_model() {
    const PAGES: u64 = 60;
    let configs: Vec<StoreBuilder> = configs(PAGES).iter().flat_map(with_designs).collect();
    for (seed, config) in (0..).zip(&configs) {
        let mut random = Random::new(seed);
        let store = Store::new(config).expect("store");
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
            match done {
                Ok(()) => {
                    model[number] = Some(expected);
                    written += 1;
                }
                Err(ref error) => {
                    refused += 1;
                    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
                }
            }
            // A failed request has changed nothing.
            let mut read = [1; PAGE_SIZE];
            store.read(PageNo(number as u32), &mut read).expect("sound");
            assert!(read == model[number].unwrap_or([0; PAGE_SIZE]), "seed {seed} step {step}: {done:?}");
        }
        assert!(written > 500 && refused > 10, "seed {seed}: {written} written, {refused} refused");
    }
}

/// Joins threads: ThreadSanitizer sees joins, but not the end of a scope.
pub(super) fn join_all<'scope>(threads: impl IntoIterator<Item = std::thread::ScopedJoinHandle<'scope, ()>>) {
    let started: Vec<_> = threads.into_iter().collect();
    started.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

/// Eight threads on 64 pages, which also compact: every read returns one of the values written to that page,
/// as a whole. (The kernel's bf62f69574b1 and others: an object was used after it had been freed.)
#[test]
fn reads_under_writes_are_whole_pages_of_theirs() {
    const PAGES: u64 = 64;
    let zstd = StoreBuilder { algorithm: "zstd".parse().expect("known"), checksum: true, ..config(PAGES) };
    for config in with_designs(&config(PAGES)).into_iter().chain(with_designs(&zstd)) {
        let store = Store::new(&config).expect("store");
        // Page `number` in version `version`: its first word holds both, and determines the rest.
        let make = |number: u64, version: u64| {
            let mut page = [0; PAGE_SIZE];
            let mut random = Random::new(number << 32 | version);
            let random_len = random.below(PAGE_SIZE);
            random.fill(&mut page[8..][..random_len.min(PAGE_SIZE - 8)]);
            page[..8].copy_from_slice(&(number << 32 | version).to_le_bytes());
            page
        };
        std::thread::scope(|scope| {
            join_all((0..8u64).map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    let mut read = [0; PAGE_SIZE];
                    for step in 0..if cfg!(tsan) { 100 } else { 1500 } {
                        let number = random.below(PAGES as usize) as u64;
                        if step % 50 == 7 * thread {
                            store.compact();
                        }
                        match random.below(10) {
                            0 => store.discard(PageNo::from_number(number)),
                            1..=4 => {
                                let version = 1 + random.below(1000) as u64;
                                store
                                    .write(PageNo::from_number(number), &make(number, version))
                                    .expect("memory");
                            }
                            _ => {
                                store.read(PageNo::from_number(number), &mut read).expect("sound");
                                let word = u64::from_le_bytes(read[..8].try_into().expect("8 bytes"));
                                let expected = if word == 0 {
                                    [0; PAGE_SIZE]
                                } else {
                                    make(word >> 32, word & 0xffff_ffff)
                                };
                                assert!(word == 0 || word >> 32 == number, "thread {thread}: page {number}");
                                assert!(read == expected, "thread {thread}: page {number} is torn");
                            }
                        }
                    }
                })
            }));
        });
        let stats = store.stats();
        let objects: u64 = store.class_stats().iter().map(|stat| stat.obj_used).sum();
        assert_eq!((stats.pages_stored - stats.same_pages, stats.corrupted), (objects, 0), "{config:?}");
        (0..PAGES).for_each(|number| store.discard(PageNo::from_number(number)));
        assert_eq!(store.stats().pool_pages, 0, "{config:?}");
    }
}

/// A page whose object is shorter than its old one, in the same class, reads as it was written, without bytes
/// of the old one. (The kernel's 3bf1c285dc40: it exposed bytes after an object's end.)
#[test]
fn shorter_contents_leave_nothing_of_longer_ones() {
    for config in each_pool_design(&config(4)) {
        let store = Store::new(&config).expect("store");
        let mut contents = [0; PAGE_SIZE];
        for len in (8..PAGE_SIZE).rev().step_by(3) {
            contents[len..].fill(0);
            Random::new(len as u64).fill(&mut contents[..len]);
            store.write(PageNo(1), &contents).expect("memory");
            let mut read = [1; PAGE_SIZE];
            store.read(PageNo(1), &mut read).expect("sound");
            assert!(read == contents, "{config:?} {len}");
        }
    }
}

/// Threads write disjoint parts of the same pages: no write is lost.
#[test]
fn part_writes_of_one_page_do_not_undo_each_other() {
    let store = Store::new(&config(4)).expect("store");
    std::thread::scope(|scope| {
        join_all((0..8usize).map(|thread| {
            let store = &store;
            scope.spawn(move || {
                for round in 1..=200u8 {
                    for page in 0..4 {
                        let bytes = [round ^ thread as u8; 512];
                        store
                            .write_part(PageNo::from_number(page), thread * 512, &bytes, Wait::Yes)
                            .expect("memory");
                        let mut read = [0; 512];
                        store
                            .read_part(PageNo::from_number(page), thread * 512, &mut read, Wait::Yes)
                            .expect("sound");
                        assert_eq!(read, bytes);
                    }
                }
            })
        }));
    });
}

#[test]
fn damage_is_an_error() {
    let store = Store::new(&StoreBuilder { checksum: true, ..config(8) }).expect("store");
    let mut contents = [7; PAGE_SIZE];
    Random::new(1).fill(&mut contents);
    store.write(PageNo(3), &contents).expect("memory");
    let Contents::Stored { handle, len, .. } = store.slots.lock(PageNo(3)).contents() else {
        panic!("stored")
    };
    // SAFETY: the slot holds the handle, and no other thread frees it.
    let pinned = unsafe { store.pool.read(handle, 3, usize::from(len)) }.expect("sound");
    // SAFETY: no other thread uses the store; the page is huge, so its bytes are the page's.
    unsafe { pinned.as_ptr().cast_mut().add(100).write(!contents[100]) };
    drop(pinned);
    assert_eq!(store.read(PageNo(3), &mut contents).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(store.stats().failed_reads, 1);
    // A slot that refers to another page's object.
    let other = store.slots.lock(PageNo(3)).contents();
    store.slots.lock(PageNo(4)).replace(other);
    assert_eq!(store.read(PageNo(4), &mut contents).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_full_store_takes_discards_and_then_writes() {
    let store = Store::new(&StoreBuilder { limit_pages: 100, ..config(1000) }).expect("store");
    let mut random = Random::new(1);
    let mut contents = [0; PAGE_SIZE];
    let mut written = 0;
    let error = loop {
        random.fill(&mut contents);
        match store.write(PageNo::from_number(written), &contents) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.setting(), Some("mem_limit"));
    assert!((90..100).contains(&written), "{written}");
    assert!(store.stats().charged_pages <= 100);
    (0..10).for_each(|page| store.discard(PageNo::from_number(page)));
    store.write(PageNo(500), &contents).expect("there is room again");
    store.set_limit_pages(0);
    store.write(PageNo(501), &contents).expect("no limit any more");
}

#[test]
fn a_limit_below_what_the_first_pages_take_is_refused() {
    let mut raw = [0; PAGE_SIZE];
    Random::new(1).fill(&mut raw);
    let mut compressible = raw;
    compressible[2000..].fill(0);
    for config in each_pool_design(&config(16)) {
        let with = |limit_pages| StoreBuilder { limit_pages, ..config.clone() };
        for limit_pages in 1..6 {
            let error = Store::new(&with(limit_pages)).err().unwrap_or_else(|| panic!("{limit_pages}"));
            assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("mem_limit")));
            assert!(error.to_string().contains("at least 24 KiB"), "{error}");
        }
        // This holds only if the thread stays on one CPU: each CPU has slabs of its own.
        let is_least = |_| {
            let store = Store::new(&with(6)).expect("store");
            let is_stored = |(page, contents)| store.write(PageNo::from_number(page), contents).is_ok();
            [(0, &raw), (1, &compressible)].into_iter().all(is_stored) && store.stats().charged_pages == 6
        };
        assert!((0..20).any(is_least), "{config:?}");
        // An existing store accepts any limit, and keeps its pages.
        let store = Store::new(&with(0)).expect("store");
        store.write(PageNo(0), &raw).expect("no limit");
        store.set_limit_pages(1);
        let mut read = [0; PAGE_SIZE];
        store.read(PageNo(0), &mut read).expect("sound");
        assert_eq!((store.stats().limit_pages, read == raw), (1, true));
    }
}

#[test]
fn sizes_out_of_range_are_refused() {
    for pages in [0, MAX_PAGES + 1] {
        assert_eq!(Store::new(&config(pages)).err().and_then(|error| error.setting()), Some("disksize"));
    }
}

/// Threads write one page with compressed, huge and same-filled contents and discard it, with compaction and
/// release of memory at the same time: nothing panics, statistics never wrap, and the counts are exact at the
/// end. (The kernel's b0377ee80429: `huge_pages` went below zero.)
#[test]
fn one_busy_page_keeps_its_counts() {
    let base = StoreBuilder { limit_pages: 400, ..config(1 << 20) };
    each_pool_design(&base).iter().for_each(one_busy_page);
}

fn one_busy_page(config: &StoreBuilder) {
    let store = Store::new(config).expect("store");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (mut stored, mut huge) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    Random::new(3).fill(&mut stored[..2000]);
    Random::new(4).fill(&mut huge);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|thread| {
                let (store, stored, huge) = (&store, &stored, &huge);
                scope.spawn(move || {
                    for round in 0..8000u64 {
                        match (round + thread) % 4 {
                            0 => store.write(PageNo(7), stored).expect("memory"),
                            1 => store.write(PageNo(7), huge).expect("memory"),
                            2 => store.write(PageNo(7), &[0xde; PAGE_SIZE]).expect("memory"),
                            _ => store.discard(PageNo(7)),
                        }
                    }
                })
            })
            .collect();
        let watcher = scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let stats = store.stats();
                // The CPUs' shares are read one after the other: a change in between may be counted only in
                // part, but never makes a sum wrap.
                let pages = stats.pages_stored.max(stats.same_pages).max(stats.huge_pages);
                assert!(pages <= 4 * 8000, "{stats:?}");
                store.compact();
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
        join_all([watcher]);
    });
    store.discard(PageNo(7));
    let stats = store.stats();
    let counts = [stats.pages_stored, stats.same_pages, stats.huge_pages, stats.compr_data_bytes];
    assert_eq!((counts, stats.pool_pages, stats.corrupted), ([0; 4], 0, 0), "{config:?}");
}

/// Eight writers at the limit: charged memory never exceeds it, and a write that fails leaves the old page.
#[test]
fn the_limit_holds_under_many_writers() {
    let base = StoreBuilder { limit_pages: 300, ..config(4096) };
    with_designs(&base).iter().for_each(writers_at_the_limit);
}

fn writers_at_the_limit(config: &StoreBuilder) {
    let store = Store::new(config).expect("store");
    let (mut done, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8u64)
            .map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    let (mut page, mut read) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
                    let (mut held, mut counts) = (Vec::new(), (0, 0));
                    for round in 0..if cfg!(tsan) { 500 } else { 1500u64 } {
                        let number = thread * 512 + random.below(512) as u64;
                        let len = 8 + random.below(PAGE_SIZE - 8);
                        random.fill(&mut page[..len]);
                        page[..8].copy_from_slice(&(number << 32 | round).to_le_bytes());
                        store.read(PageNo::from_number(number), &mut read).expect("sound");
                        let old = read;
                        match store.write(PageNo::from_number(number), &page) {
                            Ok(()) => {
                                held.push(number);
                                counts.0 += 1;
                            }
                            Err(error) => {
                                assert_eq!(error.setting(), Some("mem_limit"));
                                store.read(PageNo::from_number(number), &mut read).expect("sound");
                                assert!(read == old, "a failed write changed the page");
                                held.drain(..held.len().div_ceil(2))
                                    .for_each(|page| store.discard(PageNo::from_number(page)));
                                counts.1 += 1;
                            }
                        }
                        if round % 300 == 20 * thread {
                            store.compact();
                        }
                        assert!(store.stats().charged_pages <= config.limit_pages);
                    }
                    counts
                })
            })
            .collect();
        for writer in writers {
            let counts = writer.join().expect("no panic");
            (done, refused) = (done + counts.0, refused + counts.1);
        }
    });
    assert!(done > 1500 && refused > 30, "{done} written, {refused} refused");
}

#[test]
fn a_write_without_memory_leaves_the_old_contents() {
    for config in with_designs(&config(1000)) {
        let (store, mut random) = (Store::new(&config).expect("store"), Random::new(1));
        let (mut huge, mut half, mut quarter) = ([0; PAGE_SIZE], [0; PAGE_SIZE], [0; PAGE_SIZE]);
        random.fill(&mut huge);
        random.fill(&mut half[..PAGE_SIZE / 2]);
        random.fill(&mut quarter[..PAGE_SIZE / 4]);
        (0..300).for_each(|page| store.write(PageNo::from_number(page), &half).expect("memory"));
        let mut read = [0; PAGE_SIZE];
        // Both need a new zspage.
        for (page, contents) in [(10, &huge), (11, &quarter)] {
            store.arena.inject_faults(0, 1);
            let error = store.write(PageNo::from_number(page), contents).expect_err("no run at all");
            store.arena.inject_faults(0, 0);
            assert_eq!(error.kind(), ErrorKind::NoMemory);
            store.read(PageNo::from_number(page), &mut read).expect("sound");
            assert!(read == half, "a failed write changed page {page}");
            store.write(PageNo::from_number(page), contents).expect("memory");
            store.read(PageNo::from_number(page), &mut read).expect("sound");
            assert!(read == *contents, "page {page}");
        }
        assert_eq!(store.class_stats().iter().map(|stat| stat.obj_used).sum::<u64>(), 300);
    }
}

/// At a limit that is used up by free memory, a write waits until some of it goes back, and then succeeds.
#[test]
fn memory_that_must_go_back_first_is_waited_for() {
    for config in with_designs(&config(1000)) {
        let store = Store::new(&config).expect("store");
        let (mut small, mut large) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        Random::new(1).fill(&mut small[..1000]);
        Random::new(2).fill(&mut large[..3000]);
        (0..100).for_each(|page| store.write(PageNo::from_number(page), &small).expect("memory"));
        (0..100).for_each(|page| store.discard(PageNo::from_number(page)));
        let (stats, before) = (store.stats(), store.stats().charged_pages);
        assert!(stats.pool_pages == 0 && before > 20, "{stats:?}");
        store.set_limit_pages(before);
        // The free pages are kept in runs of a length that these writes cannot use.
        (0..20)
            .for_each(|page| store.write(PageNo::from_number(page), &large).expect("as much as was freed"));
        assert!(store.stats().charged_pages <= before);
        let mut read = [0; PAGE_SIZE];
        for page in 0..20 {
            store.read(PageNo::from_number(page), &mut read).expect("sound");
            assert!(read == large, "page {page}");
        }
    }
}

#[test]
fn looking_at_an_empty_disk_takes_no_memory() {
    let grown_kib = || {
        let store = Store::new(&config(1 << 24)).expect("store");
        let mut page = [1; PAGE_SIZE];
        let before = resident_dirty_kib();
        for number in (0..1 << 24).step_by(199) {
            store.read(PageNo::from_number(number), &mut page).expect("empty");
            store.discard(PageNo::from_number(number));
            store.zero_part(PageNo::from_number(number), 5, 100, false, Wait::Yes).expect("empty");
        }
        assert_eq!(page, [0; PAGE_SIZE]);
        resident_dirty_kib().saturating_sub(before)
    };
    // Memory that other tests take meanwhile is counted, too, but not every time.
    let least = (0..10).map(|_| grown_kib()).find(|grown| *grown < 8 << 10);
    assert!(least.is_some(), "memory for a table of 256 MiB of which nothing is used");
}

/// Returns the anonymous memory of this process (other tests run at the same time, hence the generous bound).
fn resident_dirty_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = text.lines().find(|line| line.starts_with("RssAnon:")).expect("a kernel of 4.5 or later");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

/// A store whose pages were overwritten by smaller and larger ones compacts them in the background, once that
/// is enabled. Dropping it ends its thread in the middle of that.
#[test]
fn a_scattered_store_is_compacted_by_itself() {
    let scattered = |compact_threshold_percent| {
        let config = StoreBuilder { compact_threshold_percent, compact_rate_bytes: 64 << 20, ..config(4096) };
        let store = Store::new(&config).expect("store");
        let mut random = Random::new(1);
        let mut contents = [0; PAGE_SIZE];
        for _ in 0..3 {
            for page in 0..4096 {
                contents.fill(0);
                let len = 256 + random.below(3000);
                random.fill(&mut contents[..len]);
                store.write(PageNo::from_number(page), &contents).expect("memory");
            }
        }
        (0..4096).filter(|page| page % 4 != 0).for_each(|page| store.discard(PageNo::from_number(page)));
        store
    };
    let freeable = |store: &Store| store.class_stats().iter().map(ClassStat::freeable_pages).sum::<u64>();
    let wait_until = |what: &str, done: &dyn Fn() -> bool| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !done() {
            assert!(std::time::Instant::now() < deadline, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    let store = scattered(0);
    let before = store.stats().pool_pages;
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!((store.stats().pages_compacted, store.stats().pool_pages), (0, before), "nobody asked for it");
    assert!(freeable(&store) * 100 > before * 20, "{} of {before}", freeable(&store));
    store.set_compact_threshold_percent(20);
    // A step is counted when it has ended.
    wait_until("compacted", &|| {
        let stats = store.stats();
        freeable(&store) * 100 <= stats.pool_pages * 20
            && stats.pages_compacted > 0
            && stats.pool_pages < before
    });
    let store = scattered(10);
    wait_until("begun", &|| store.stats().pages_compacted > 0);
}
