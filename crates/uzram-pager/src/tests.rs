//! The same tests for every way to trap touches.

#![allow(clippy::unwrap_used)]

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzram::random::Random;
use uzram::units::PAGE_SIZE;

#[path = "../tests/it/common/mod.rs"]
#[allow(dead_code)]
mod common;

use crate::{Access, Pager, Region, TrapKind, faults};
use common::{MIB, builder, expect_pages, fill, fill_pages, pager};

/// Runs a test with each way that works here, and no other test meanwhile: injected faults are the process's.
fn each(test: impl Fn(TrapKind)) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    common::each(&TrapKind::ALL, test);
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
        fill_pages(&mut region, 0, 1);
        for _ in 0..2 {
            region.pageout(..).unwrap();
            let stats = pager.stats();
            assert_eq!(stats.resident_pages, 0, "{trap:?} {stats:?}");
            expect_pages(&region, 0, 1);
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
                        fill_pages(&mut region, 0, version);
                        expect_pages(&region, 0, version);
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
        fill_pages(&mut region, 0, 1);
        region.pageout(..).unwrap();
        // No others come along.
        region.advise(.., Access::Random).unwrap();
        expect_pages(&region[..MIB], 0, 1);
        // One of them is changed after it was read.
        fill(&mut region[5 * PAGE_SIZE..6 * PAGE_SIZE], 5, 2);
        region.pageout(..).unwrap();
        let unchanged = pager.stats().pages_unchanged;
        assert!((16..256).contains(&unchanged), "{trap:?} {unchanged}");
        let changed = 5 * PAGE_SIZE..6 * PAGE_SIZE;
        expect_pages(&region[..changed.start], 0, 1);
        expect_pages(&region[changed.clone()], 5, 2);
        expect_pages(&region[changed.end..], 6, 1);
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

/// [`common::stress`] with faults injected into one of so many calls.
fn stress(trap: TrapKind, threads: usize, seed: u64, duration: Duration, failing_one_of: u32) {
    let dir = tempfile::tempdir().unwrap();
    let pager = builder(trap, 6 << 20).spill(dir.path(), 64 << 20).build().unwrap();
    let _faults = faults::inject(failing_one_of);
    common::stress(&pager, threads, seed, duration);
}

#[test]
fn threads_find_what_they_wrote() {
    each(|trap| stress(trap, 4, 11, Duration::from_secs(3), 0));
}

#[test]
fn calls_that_fail_lose_nothing() {
    each(|trap| stress(trap, 4, 12, Duration::from_secs(3), 20));
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
        let pager = builder(trap, 64 << 20).pressure(20.0).build().unwrap();
        let mut region = pager.map(32 * MIB).unwrap();
        fill_pages(&mut region, 0, 1);
        let (end, mut sum) = (Instant::now() + Duration::from_secs(20), 0u64);
        while pager.stats().resident_pages > 7500 && Instant::now() < end {
            for at in (0..4 * MIB).step_by(PAGE_SIZE) {
                sum += u64::from(region[at]);
            }
        }
        let stats = pager.stats();
        assert!(stats.resident_pages <= 7500 && stats.limit_pages < 16384, "{trap:?} {stats:?} {sum}");
        expect_pages(&region, 0, 1);
        assert!(Pager::builder().limit(64 << 20).pressure(0.0).build().is_err());
    });
}
