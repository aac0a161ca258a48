use super::*;
use crate::base::random::Random;

fn config(pages: u64) -> Config {
    Config {
        pages,
        algorithm: Algorithm::Lz4,
        chain_size: 16,
        checksum: false,
        limit_pages: 0,
        run_cache_batch_pages: 32,
    }
}

fn configs(pages: u64) -> [Config; 4] {
    let base = config(pages);
    [
        base,
        Config { checksum: true, chain_size: 4, ..base },
        Config { algorithm: Algorithm::Zstd { level: 1 }, run_cache_batch_pages: 0, ..base },
        Config { limit_pages: 40, chain_size: 8, ..base },
    ]
}

/// A page of one of the kinds that the store treats differently.
fn page(random: &mut Random) -> Page {
    let mut page = [0; PAGE_SIZE];
    match random.below(6) {
        0 => {}
        1 => fill(&mut page, random.next()),
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

/// What the counters must be, from the contents of every page. `None` was never written.
fn check_stats(store: &Store, model: &[Option<Page>]) {
    let stats = store.stats();
    let held = || model.iter().flatten();
    assert_eq!(stats.pages_stored, held().count() as u64);
    assert_eq!(stats.same_pages, held().filter(|page| same_word(page).is_some()).count() as u64);
    let mut encoder = Encoder::new(&Algorithm::Lz4).expect("memory");
    let threshold = store.pool.huge_threshold();
    let lens = held().filter(|page| same_word(page).is_none()).map(|page| {
        let len = encoder.encode(page, &mut [0; 2 * PAGE_SIZE]).expect("room");
        if len < threshold { len as u64 } else { PAGE_SIZE as u64 }
    });
    let lens: Vec<u64> = lens.collect();
    if store.stateless_decode.is_some() {
        assert_eq!(stats.compr_data_bytes, lens.iter().sum::<u64>());
        assert_eq!(stats.huge_pages, lens.iter().filter(|len| **len == PAGE_SIZE as u64).count() as u64);
    }
    let objects: u64 = store.class_stats().iter().map(|stat| stat.obj_used).sum();
    assert_eq!(objects, lens.len() as u64, "every stored page has one object");
    assert_eq!(stats.corrupted, 0);
}

/// Seeded writes, part writes, zeroed parts, discards and reads against an array of pages. A
/// request that fails, by the limit or by injection, changes nothing.
#[test]
fn agrees_with_a_naive_model() {
    const PAGES: u64 = 60;
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let store = Store::new(&configs(PAGES)[seed as usize % 4]).expect("store");
        let mut model: Vec<Option<Page>> = vec![None; PAGES as usize];
        for step in 0..3000 {
            if step % 500 == 250 {
                store.arena.inject_faults(seed, 20);
            } else if step % 500 == 0 {
                store.arena.inject_faults(0, 0);
                check_stats(&store, &model);
            }
            let number = random.below(PAGES as usize);
            let (at, len) = (random.below(PAGE_SIZE), 1 + random.below(PAGE_SIZE));
            let len = len.min(PAGE_SIZE - at);
            let mut expected = model[number].unwrap_or([0; PAGE_SIZE]);
            let done = match random.below(8) {
                0..=2 => {
                    expected = page(&mut random);
                    store.write(number as u64, &expected)
                }
                3 => {
                    random.fill(&mut expected[at..at + len]);
                    store.write_part(number as u64, at, &expected[at..at + len])
                }
                4 => {
                    expected[at..at + len].fill(0);
                    let done = store.zero_part(number as u64, at, len);
                    if model[number].is_none() {
                        assert_eq!(done, Ok(()), "there is nothing to zero");
                        continue;
                    }
                    done
                }
                5 => {
                    store.discard(number as u64);
                    model[number] = None;
                    continue;
                }
                _ => {
                    let mut part = vec![1; len];
                    store.read_part(number as u64, at, &mut part).expect("sound");
                    assert_eq!(part, expected[at..at + len], "seed {seed} step {step}");
                    continue;
                }
            };
            match done {
                Ok(()) => model[number] = Some(expected),
                Err(ref error) => {
                    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
                }
            }
            // A failed request has changed nothing.
            let mut read = [1; PAGE_SIZE];
            store.read(number as u64, &mut read).expect("sound");
            assert!(read == model[number].unwrap_or([0; PAGE_SIZE]), "seed {seed} step {step}: {done:?}");
        }
    }
}

/// Eight threads on 64 pages: every read is one of the values written there, whole.
#[test]
fn reads_under_writes_are_whole_pages_of_theirs() {
    const PAGES: u64 = 64;
    for config in
        [config(PAGES), Config { algorithm: Algorithm::Zstd { level: 1 }, checksum: true, ..config(PAGES) }]
    {
        let store = Store::new(&config).expect("store");
        // Page `number`, version `version`: its first word says so, the rest follows from it.
        let make = |number: u64, version: u64| {
            let mut page = [0; PAGE_SIZE];
            let mut random = Random::new(number << 32 | version);
            let random_len = random.below(PAGE_SIZE);
            random.fill(&mut page[8..][..random_len.min(PAGE_SIZE - 8)]);
            page[..8].copy_from_slice(&(number << 32 | version).to_le_bytes());
            page
        };
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let store = &store;
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    let mut read = [0; PAGE_SIZE];
                    for _ in 0..4000 {
                        let number = random.below(PAGES as usize) as u64;
                        match random.below(10) {
                            0 => store.discard(number),
                            1..=4 => {
                                let version = 1 + random.below(1000) as u64;
                                store.write(number, &make(number, version)).expect("memory");
                            }
                            _ => {
                                store.read(number, &mut read).expect("sound");
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
                });
            }
        });
    }
}

/// Threads write disjoint parts of the same pages: none is lost.
#[test]
fn part_writes_of_one_page_do_not_undo_each_other() {
    let store = Store::new(&config(4)).expect("store");
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let store = &store;
            scope.spawn(move || {
                for round in 1..=200u8 {
                    for page in 0..4 {
                        let bytes = [round ^ thread as u8; 512];
                        store.write_part(page, thread * 512, &bytes).expect("memory");
                        let mut read = [0; 512];
                        store.read_part(page, thread * 512, &mut read).expect("sound");
                        assert_eq!(read, bytes);
                    }
                }
            });
        }
    });
}

#[test]
fn damage_is_an_error() {
    let store = Store::new(&Config { checksum: true, ..config(8) }).expect("store");
    let mut contents = [7; PAGE_SIZE];
    Random::new(1).fill(&mut contents);
    store.write(3, &contents).expect("memory");
    let Contents::Stored { handle, len, .. } = store.slots.lock(3).contents() else { panic!("stored") };
    let pinned = store.pool.pin(handle, 3, usize::from(len)).expect("sound");
    // SAFETY: nobody else uses the store; the page is huge, so its bytes are the page's.
    unsafe { pinned.as_ptr().cast_mut().add(100).write(!contents[100]) };
    drop(pinned);
    assert_eq!(store.read(3, &mut contents).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(store.stats().failed_reads, 1);
    // A slot that names another page's object.
    let other = store.slots.lock(3).contents();
    store.slots.lock(4).replace(other);
    assert_eq!(store.read(4, &mut contents).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_full_store_takes_discards_and_then_writes() {
    let store = Store::new(&Config { limit_pages: 100, ..config(1000) }).expect("store");
    let mut random = Random::new(1);
    let mut contents = [0; PAGE_SIZE];
    let mut written = 0;
    let error = loop {
        random.fill(&mut contents);
        match store.write(written, &contents) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.setting(), Some("mem_limit"));
    assert!((90..100).contains(&written), "{written}");
    assert!(store.stats().charged_pages <= 100);
    (0..10).for_each(|page| store.discard(page));
    store.write(500, &contents).expect("there is room again");
    store.arena().set_limit_pages(0);
    store.write(501, &contents).expect("no limit any more");
}

#[test]
fn sizes_out_of_range_are_refused() {
    for pages in [0, MAX_PAGES + 1] {
        assert_eq!(Store::new(&config(pages)).err().and_then(|error| error.setting()), Some("disksize"));
    }
}

#[test]
fn pages_age() {
    let store = Store::new(&config(100)).expect("store");
    store.write(5, &[1; PAGE_SIZE]).expect("memory");
    assert_eq!((store.pages_older_than(0), store.pages_older_than(3600)), (1, 0));
    // As if it had last been used when the machine started.
    store.slots.touch(5, 0);
    let (age_s, uptime_s) = (now_s() - 1, now_s());
    assert_eq!((store.pages_older_than(age_s), store.pages_older_than(uptime_s + 60)), (1, 0));
}
