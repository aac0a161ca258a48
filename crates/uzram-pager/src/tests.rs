//! The same tests for every way to trap touches.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uzram::random::Random;
use uzram::units::PAGE_SIZE;

use crate::{Access, Pager, Region, TrapKind, faults};

const MIB: usize = 1 << 20;

/// Injected faults are the process's, so tests run one after the other.
static ONE: Mutex<()> = Mutex::new(());

fn one() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a test with each way that works here.
fn each(test: impl Fn(TrapKind)) {
    let _one = one();
    for trap in TrapKind::ALL {
        match trap.check() {
            Ok(()) => test(trap),
            Err(error) => println!("skipped: {}: {error}", trap.name()),
        }
    }
}

fn pager(trap: TrapKind, limit: usize) -> Pager {
    Pager::builder().limit(limit as u64).capacity(1 << 30).trap(trap).build().unwrap()
}

/// Fills a page with words that compress, and that tell which page and version it is.
fn fill(page: &mut [u8], number: usize, version: u64) {
    let mut random = Random::new(number as u64 ^ version << 32);
    for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let value = if at % 4 == 0 { random.next() } else { (number as u64) << 20 | version };
        *word = value.to_le_bytes();
    }
}

fn expect(page: &[u8], number: usize, version: u64) {
    let mut wanted = [0; PAGE_SIZE];
    fill(&mut wanted, number, version);
    let found = u64::from_le_bytes(page[8..16].try_into().unwrap());
    let differ = page.iter().zip(&wanted).filter(|(a, b)| a != b).count();
    assert!(
        *page == wanted[..page.len()],
        "page {number} has not version {version}, but that of page {}, version {}; {differ} bytes differ",
        found >> 20,
        found & 0xfffff
    );
}

fn resident_pages(region: &Region) -> usize {
    let mut pages = vec![0u8; region.len().div_ceil(PAGE_SIZE)];
    // SAFETY: the range is mapped, and the answer has room for it.
    let answer = unsafe { libc::mincore(region.as_mut_ptr().cast(), region.len(), pages.as_mut_ptr()) };
    assert_eq!(answer, 0);
    pages.iter().filter(|page| **page & 1 != 0).count()
}

#[test]
fn memory_is_zeros_and_keeps_what_is_written() {
    each(|trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(3 * MIB + 100).unwrap();
        assert_eq!(region.len(), 3 * MIB + 100);
        assert!(region.iter().all(|byte| *byte == 0));
        for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
            let len = page.len() / 8 * 8;
            fill(&mut page[..len], number, 1);
        }
        for _ in 0..2 {
            region.pageout(..).unwrap();
            let stats = pager.stats();
            assert_eq!(stats.resident_pages, 0, "{trap:?} {stats:?}");
            for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
                expect(&page[..page.len() / 8 * 8], number, 1);
            }
        }
        // The last touch may return before the pager has counted.
        region.pageout(..).unwrap();
        let stats = pager.stats();
        assert!(stats.pages_in >= 2 * 768 && stats.faults < stats.pages_in / 8, "{stats:?}");
        drop(region);
        let stats = pager.stats();
        assert_eq!((stats.resident_pages, stats.mapped_pages), (0, 0));
    });
}

/// What is compressed takes memory before its pages are gone: there is room for that, whenever one looks.
#[test]
fn more_than_the_limit_is_compressed_and_the_limit_is_kept_at_every_moment() {
    each(|trap| {
        for mib in [4, 16] {
            let pager = pager(trap, mib * MIB);
            let mut region = pager.map(2 * mib * MIB).unwrap();
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    for version in 0..3 {
                        for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
                            fill(page, number, version);
                        }
                        for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
                            expect(page, number, version);
                        }
                    }
                });
                while !writer.is_finished() {
                    pager.stats();
                }
            });
            let stats = pager.stats();
            assert!(stats.used_pages_max <= stats.limit_pages, "{trap:?}, {mib} MiB: {stats:?}");
            assert!(stats.pages_out > 1024 * mib as u64, "{trap:?}, {mib} MiB: {stats:?}");
        }
    });
}

#[test]
fn without_room_for_them_pages_stay_in_memory() {
    each(|trap| {
        let pager = pager(trap, 4 * MIB);
        let mut region = pager.map(8 * MIB).unwrap();
        let mut random = Random::new(2);
        for page in region.chunks_mut(PAGE_SIZE) {
            random.fill(page);
        }
        assert!(pager.stats().no_room > 0 && pager.stats().resident_pages > 1024, "{:?}", pager.stats());
        let mut random = Random::new(2);
        assert!(region.chunks(PAGE_SIZE).all(|page| page == random.bytes(PAGE_SIZE)));
    });
}

#[test]
fn pages_that_were_only_read_are_not_compressed_again() {
    each(|trap| {
        let pager = pager(trap, 64 * MIB);
        let mut region = pager.map(4 * MIB).unwrap();
        for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
            fill(page, number, 1);
        }
        region.pageout(..).unwrap();
        // No others come along.
        region.advise(.., Access::Random).unwrap();
        for (number, page) in region[..MIB].chunks(PAGE_SIZE).enumerate() {
            expect(page, number, 1);
        }
        // One of them is changed after it was read.
        fill(&mut region[5 * PAGE_SIZE..6 * PAGE_SIZE], 5, 2);
        region.pageout(..).unwrap();
        let unchanged = pager.stats().pages_unchanged;
        assert!((16..256).contains(&unchanged), "{trap:?} {unchanged}");
        for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
            expect(page, number, if number == 5 { 2 } else { 1 });
        }
    });
}

#[test]
fn pinned_pages_stay() {
    each(|trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(4 * MIB).unwrap();
        region.fill(7);
        region.pageout(..).unwrap();
        let (pin, again) = (region.pin(10..MIB).unwrap(), region.pin(0..20).unwrap());
        region.pageout(..).unwrap();
        assert_eq!(resident_pages(&region), MIB / PAGE_SIZE, "{trap:?}");
        drop(pin);
        region.pageout(..).unwrap();
        assert_eq!(pager.stats().resident_pages, 1);
        drop(again);
        region.pageout(..).unwrap();
        assert_eq!(pager.stats().resident_pages, 0, "{trap:?} {:?}", pager.stats());
        assert!(region.iter().all(|byte| *byte == 7));
        assert!(region.pin(..4 * MIB + 1).is_err() && region.pageout(4 * MIB + 1..).is_err());
    });
}

#[test]
fn discarded_ranges_are_zeros() {
    each(|trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(2 * MIB + 100).unwrap();
        region.fill(7);
        region.pageout(MIB..).unwrap();
        for range in [0..10, 100..PAGE_SIZE * 40 + 5, MIB - 5..MIB + 300_000, 2 * MIB - 70_000..2 * MIB + 100]
        {
            region.discard(range.clone()).unwrap();
            assert!(region[range.clone()].iter().all(|byte| *byte == 0), "{trap:?} {range:?}");
            if range.start > 0 {
                assert_eq!(region[range.start - 1], 7);
            }
            assert!(region.get(range.end).is_none_or(|byte| *byte == 7), "{range:?}");
        }
        let pin = region.pin(PAGE_SIZE * 100..PAGE_SIZE * 140).map(std::mem::forget);
        assert!(pin.is_ok());
        region.discard(..).unwrap();
        assert!(region.iter().all(|byte| *byte == 0));
    });
}

/// Threads, each with pages of its own in one region, write, read, evict, prefetch, pin and discard, and know
/// what each page holds.
fn stress(trap: TrapKind, threads: usize, seed: u64, duration: Duration, failing_one_of: u32) {
    const PAGES: usize = 1024;
    let dir = tempfile::tempdir().unwrap();
    let builder = Pager::builder().limit(6 << 20).capacity(1 << 30).trap(trap);
    let pager = builder.spill(dir.path(), 64 << 20).build().unwrap();
    let region = pager.map(threads * PAGES * PAGE_SIZE).unwrap();
    let _faults = faults::inject(failing_one_of);
    let start = region.as_mut_ptr().addr();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (region, stop) = (&region, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed + thread as u64);
                let mut versions = [0u64; PAGES];
                let mut version = 0;
                while !stop.load(Ordering::Relaxed) {
                    let page = random.below(PAGES);
                    let pages = 1 + random.below(40).min(PAGES - page - 1);
                    let number = thread * PAGES + page;
                    let range = number * PAGE_SIZE..(number + pages) * PAGE_SIZE;
                    // SAFETY: the pages are this thread's.
                    let mine = unsafe {
                        std::slice::from_raw_parts_mut((start + range.start) as *mut u8, range.len())
                    };
                    match random.below(16) {
                        0 => region.pageout(range).unwrap(),
                        1 => region.prefetch(range).unwrap(),
                        2 => drop(region.pin(range).unwrap()),
                        3..8 => {
                            version += 1;
                            for (nth, page) in mine.chunks_mut(PAGE_SIZE).enumerate() {
                                fill(page, number + nth, version);
                            }
                            versions[page..page + pages].fill(version);
                        }
                        _ => {
                            for (nth, contents) in mine.chunks(PAGE_SIZE).enumerate() {
                                match versions[page + nth] {
                                    0 => assert!(contents.iter().all(|byte| *byte == 0), "seed {seed}"),
                                    version => expect(contents, number + nth, version),
                                }
                            }
                        }
                    }
                }
            });
        }
        // As the others do, or time would be up only if none of them has failed.
        let end = Instant::now() + duration;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let stats = pager.stats();
    assert!(stats.pages_out > 100 && stats.pages_lost == 0, "{trap:?} {stats:?}");
}

#[test]
fn threads_find_what_they_wrote() {
    each(|trap| stress(trap, 4, 11, Duration::from_secs(3), 0));
}

#[test]
fn calls_that_fail_lose_nothing() {
    each(|trap| {
        stress(trap, 4, 12, Duration::from_secs(3), 20);
    });
}

/// Compaction moves pages, too, and Linux 6.18 then moves some with `UFFDIO_MOVE` that it does not count.
/// Needs root.
#[test]
fn pages_that_the_kernel_moves_meanwhile_are_not_lost() {
    const COMPACT: &str = "/proc/sys/vm/compact_memory";
    const DURATION: Duration = Duration::from_secs(3);
    each(|trap| {
        std::thread::scope(|scope| {
            let end = Instant::now() + DURATION;
            scope.spawn(move || {
                while Instant::now() < end {
                    if let Err(error) = std::fs::write(COMPACT, "1") {
                        println!("skipped: {COMPACT}: {error}");
                        return;
                    }
                }
            });
            stress(trap, 4, 14, DURATION, 0);
        });
    });
}

/// Ten minutes: `make pager`.
#[test]
#[ignore = "takes ten minutes: make pager"]
fn threads_find_what_they_wrote_for_long() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    println!("seed {seed}");
    each(|trap| {
        stress(trap, 4, seed, Duration::from_secs(70), 0);
        stress(trap, 4, seed + 100, Duration::from_secs(70), 50);
        stress(trap, 24, seed + 200, Duration::from_secs(60), 200);
    });
}

#[test]
fn hints_change_how_many_pages_come_along() {
    each(|trap| {
        let pager = pager(trap, 64 * MIB);
        let mut region = pager.map(2 * MIB).unwrap();
        region.fill(7);
        for (access, pages) in [(Access::Random, 1), (Access::Sequential, 64), (Access::Normal, 1)] {
            region.pageout(..).unwrap();
            region.advise(MIB.., access).unwrap();
            let before = pager.stats().pages_in;
            assert_eq!(region[MIB + 100 * PAGE_SIZE], 7);
            // The touch may return before the pager has counted.
            region.pageout(..MIB).unwrap();
            region.pageout(MIB..).unwrap();
            assert_eq!(pager.stats().pages_in - before, pages, "{trap:?} {access:?}");
        }
    });
}

/// A program that touches a part of its memory again and again keeps that part, and the rest leaves.
#[test]
fn a_goal_for_pressure_finds_what_is_in_use() {
    each(|trap| {
        let builder = Pager::builder().limit(64 << 20).capacity(1 << 30).trap(trap);
        let pager = builder.pressure(20.0).build().unwrap();
        let mut region = pager.map(32 * MIB).unwrap();
        for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
            fill(page, number, 1);
        }
        let (end, mut sum) = (Instant::now() + Duration::from_secs(20), 0u64);
        while pager.stats().resident_pages > 7500 && Instant::now() < end {
            for at in (0..4 * MIB).step_by(PAGE_SIZE) {
                sum += u64::from(region[at]);
            }
        }
        let stats = pager.stats();
        assert!(stats.resident_pages <= 7500 && stats.limit_pages < 16384, "{trap:?} {stats:?} {sum}");
        for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
            expect(page, number, 1);
        }
        assert!(Pager::builder().limit(64 << 20).pressure(0.0).build().is_err());
    });
}
