//! The same tests for every way to trap touches.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzram::ErrorKind;
use uzram::random::Random;
use uzram::units::PAGE_SIZE;

#[path = "../../uzram/tests/it/calls.rs"]
mod calls;
#[path = "../tests/it/common/mod.rs"]
#[allow(dead_code)]
mod common;

use crate::core::{By, Fault};
use crate::uffd::{Tells, Uffd};
use crate::{Access, LEAST_LIMIT_BYTES, MOST_PAGES, Pager, Trap, faults};
use common::{MIB, builder, expect_pages, fill, fill_pages, filled, pager};

/// Runs a test with each way that works here, and no other test meanwhile: injected faults are the process's.
fn each(test: impl Fn(Trap)) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    common::each(&Trap::ALL, |trap| {
        faults::ONE_OF.store(0, Ordering::Relaxed);
        test(trap);
    });
}

#[test]
fn memory_keeps_what_is_written_and_pinned_pages_stay() {
    each(|trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(3 * MIB + 100).unwrap();
        expect_pages(&region, 0, 0);
        fill_pages(&mut region, 0, 1);
        let expect_left = |pages: usize| {
            region.pageout(..).unwrap();
            assert_eq!(pager.stats().resident_pages, pages as u64, "{trap:?} {:?}", pager.stats());
        };
        for _ in 0..2 {
            expect_left(0);
            expect_pages(&region, 0, 1);
        }
        expect_left(0);
        // Downwards neighbours come along, too.
        region.chunks(PAGE_SIZE).enumerate().rev().for_each(|(number, page)| expect_pages(page, number, 1));
        // The last touch may return before the pager has counted.
        expect_left(0);
        let stats = pager.stats();
        assert!(stats.pages_in >= 3 * 768 && stats.faults < stats.pages_in / 8, "{stats:?}");

        let (pin, again) = (region.pin(10..MIB).unwrap(), region.pin(0..20).unwrap());
        expect_left(MIB / PAGE_SIZE);
        drop(pin);
        expect_left(1);
        drop(again);
        expect_left(0);
        expect_pages(&region, 0, 1);
    });
}

/// Returns the memory of this process.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let kib = |line: &str| line.strip_prefix("RssAnon:")?.strip_suffix(" kB")?.trim().parse::<usize>().ok();
    status.lines().find_map(kib).unwrap() << 10
}

/// What is compressed takes memory before its pages are gone: there is room for that, whenever one looks, and
/// if a spill file is full, too. Pages for which there is no room stay in memory.
#[test]
fn the_limit_is_kept_at_every_moment_if_it_can_be() {
    /// What the pager may take for itself.
    const REST: usize = 16 * MIB;
    each(|trap| {
        let dir = tempfile::tempdir().unwrap();
        // MiB of the limit, of the region and of the spill file; the bytes of a page that do not compress.
        for case in [(4, 8, 0, 512), (16, 64, 0, 512), (16, 20, 0, 2048), (16, 20, 2, 2048), (4, 8, 0, 4096)]
        {
            let (limit, len, spill, noise) = case;
            let before = resident_bytes();
            let builder = builder(trap, limit * MIB);
            let builder = if spill > 0 { builder.spill(dir.path(), spill << 20) } else { builder };
            let pager = builder.build().unwrap();
            let mut region = pager.map(len * MIB).unwrap();
            let contents = |number: usize, version: u64| {
                let mut page = [0; PAGE_SIZE];
                Random::new(number as u64 ^ version << 32).fill(&mut page[..noise]);
                page
            };
            let mut most = before;
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    for version in 0..3 {
                        for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
                            page.copy_from_slice(&contents(number, version));
                        }
                        for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
                            assert!(page == contents(number, version), "{trap:?}, {case:?}: page {number}");
                        }
                    }
                });
                while !writer.is_finished() {
                    pager.stats();
                    most = most.max(resident_bytes());
                }
            });
            let (stats, fits) = (pager.stats(), noise < PAGE_SIZE);
            let what = format!("{trap:?}, {case:?}, {} KiB: {stats:?}", (most - before) >> 10);
            // Of a batch whose first page finds the spill file full, the rest may be late.
            let limit_pages = stats.limit_pages + if spill > 0 { MOST_PAGES as u64 } else { 0 };
            assert_eq!(stats.used_pages_max <= limit_pages, fits, "{what}");
            assert!(if fits { stats.pages_out > 256 * len as u64 } else { stats.no_room > 0 }, "{what}");
            assert!((limit * MIB / 2..=limit * MIB + REST).contains(&(most - before)), "{what}");
        }
    });
}

#[test]
fn pages_that_were_only_read_are_not_compressed_again() {
    each(|trap| {
        let (pager, mut region) = filled(trap, 64 * MIB, 1024);
        region.pageout(..).unwrap();
        // No others come along.
        region.advise(.., Access::Random).unwrap();
        expect_pages(&region[..MIB], 0, 1);
        // One of them is changed after it was read.
        let changed = 5 * PAGE_SIZE..6 * PAGE_SIZE;
        fill(&mut region[changed.clone()], 5, 2);
        region.pageout(..).unwrap();
        let unchanged = pager.stats().pages_unchanged;
        assert!((16..256).contains(&unchanged), "{trap:?} {unchanged}");
        expect_pages(&region[..changed.start], 0, 1);
        expect_pages(&region[changed.clone()], 5, 2);
        expect_pages(&region[changed.end..], 6, 1);
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
            assert!(region[..range.start].last().is_none_or(|byte| *byte == 7), "{trap:?} {range:?}");
            assert!(region.get(range.end).is_none_or(|byte| *byte == 7), "{trap:?} {range:?}");
        }
        region.pin(PAGE_SIZE * 100..PAGE_SIZE * 140).map(std::mem::forget).unwrap();
        region.discard(..).unwrap();
        assert!(region.iter().all(|byte| *byte == 0));
    });
}

/// Also if calls fail, and while the kernel compacts memory: that moves pages, too, and Linux 6.18 then moves
/// some with `UFFDIO_MOVE` that it does not count. For long: `make pager`.
#[test]
fn threads_find_what_they_wrote() {
    let seconds = std::env::var("UZRAM_PAGER_STRESS_SECONDS").map_or(3, |text| text.parse().unwrap());
    let seed = std::process::id().into();
    println!("seed {seed}");
    each(|trap| {
        for (threads, failing_one_of, compacts) in [(4, 0, false), (24, 20, false), (4, 0, true)] {
            let dir = tempfile::tempdir().unwrap();
            let pager = builder(trap, 6 << 20).spill(dir.path(), 64 << 20).build().unwrap();
            faults::ONE_OF.store(failing_one_of, Ordering::Relaxed);
            let duration = Duration::from_secs(seconds);
            std::thread::scope(|scope| {
                let stressed = scope.spawn(|| common::stress(&pager, threads, seed, duration));
                while compacts && !stressed.is_finished() {
                    // Needs root.
                    if let Err(error) = fs::write("/proc/sys/vm/compact_memory", "1") {
                        return println!("skipped: compact_memory: {error}");
                    }
                }
            });
        }
    });
}

#[test]
fn hints_change_how_many_pages_come_along() {
    each(|trap| {
        let (pager, region) = filled(trap, 64 * MIB, 512);
        for (access, pages) in [(Access::Random, 1), (Access::Sequential, 64), (Access::Normal, 1)] {
            region.pageout(..).unwrap();
            region.advise(MIB.., access).unwrap();
            let before = pager.stats().pages_in;
            expect_pages(&region[MIB + 100 * PAGE_SIZE..][..PAGE_SIZE], 356, 1);
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
        let end = Instant::now() + Duration::from_secs(20);
        while pager.stats().resident_pages > 7500 && Instant::now() < end {
            expect_pages(&region[..4 * MIB], 0, 1);
        }
        let stats = pager.stats();
        assert!(stats.resident_pages <= 7500 && stats.limit_pages < 16384, "{trap:?} {stats:?}");
        expect_pages(&region, 0, 1);
    });
}

#[test]
fn what_is_refused_names_the_setting() {
    each(|trap| {
        let dir = tempfile::tempdir().unwrap();
        let (file, missing) = (dir.path().join("file"), dir.path().join("missing"));
        fs::write(&file, "not a folder").unwrap();
        let of = || builder(trap, 8 * MIB);
        for (builder, setting, said) in [
            (of().limit(0), "limit", "at least 4 MiB"),
            (of().limit(LEAST_LIMIT_BYTES - 1), "limit", "at least 4 MiB"),
            (of().pressure(0.0), "pressure", "above 0"),
            (of().capacity(0), "capacity", ""),
            (of().capacity(1 << 60), "capacity", ""),
            (of().capacity(u64::MAX), "capacity", ""),
            (of().spill("/proc", 1 << 20), "spill", "/proc"),
            (of().spill(&file, 1 << 20), "spill", file.to_str().unwrap()),
            (of().spill(&missing, 1 << 20), "spill", missing.to_str().unwrap()),
        ] {
            let error = builder.build().unwrap_err();
            let kind = if setting == "spill" { ErrorKind::Io } else { ErrorKind::Invalid };
            let is_kind =
                error.kind() == kind || (setting, error.kind()) == ("capacity", ErrorKind::NoMemory);
            assert!(is_kind && error.setting() == Some(setting), "{trap:?}: {error:?}");
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(of().limit(LEAST_LIMIT_BYTES).build().is_ok());

        let pager = of().capacity(16 << 20).build().unwrap();
        let refused = |len| pager.map(len).map_err(|error| (error.kind(), error.setting())).unwrap_err();
        assert_eq!(refused(0), (ErrorKind::Invalid, None));
        let mut first = pager.map(8 * MIB).unwrap();
        fill_pages(&mut first, 0, 1);
        for len in [8 * MIB + 1, 17 * MIB, usize::MAX, usize::MAX - PAGE_SIZE] {
            assert_eq!(refused(len), (ErrorKind::NoSpace, Some("capacity")));
        }
        let second = pager.map(8 * MIB).unwrap();
        expect_pages(&first, 0, 1);
        drop((first, second));
        assert!(pager.map(16 * MIB).is_ok());
    });
}

#[test]
fn ranges_beyond_a_region_are_refused() {
    each(|trap| {
        let pager = pager(trap, 8 * MIB);
        let mut region = pager.map(MIB + 1).unwrap();
        region.fill(7);
        for (is_right, bytes) in [
            (false, (Included(0), Excluded(MIB + 2))),
            (false, (Included(MIB + 2), Unbounded)),
            (false, (Included(5), Excluded(4))),
            (false, (Unbounded, Included(MIB + 1))),
            (false, (Unbounded, Included(usize::MAX))),
            (false, (Included(0), Excluded(usize::MAX))),
            (false, (Included(usize::MAX), Unbounded)),
            (false, (Excluded(usize::MAX), Unbounded)),
            (true, (Included(MIB + 1), Unbounded)),
            (true, (Unbounded, Included(MIB))),
            (true, (Included(5), Excluded(5))),
        ] {
            let results = [region.pageout(bytes), region.prefetch(bytes), region.pin(bytes).map(drop)];
            let wanted = if is_right { Ok(()) } else { Err(ErrorKind::OutOfRange) };
            let kinds = results.map(|result| result.map_err(|error| error.kind()));
            assert_eq!(kinds, [wanted; 3], "{bytes:?}");
        }
        assert!(region.discard(MIB + 2..).is_err_and(|error| error.kind() == ErrorKind::OutOfRange));
        region.discard(MIB + 1..).unwrap();
        region.discard(5..5).unwrap();
        assert!(region.iter().all(|byte| *byte == 7));
    });
}

/// From the moment that the pager knows of a touch of a page that is compressed in memory. valgrind knows no
/// userfaultfd.
#[test]
fn a_fault_passes_through_few_functions_in_few_files() {
    const PAGES: usize = 500;
    const NAME: &str = "tests::a_fault_passes_through_few_functions_in_few_files";
    if calls::is_counted() {
        let capacity = 16 * MIB as u64;
        let builder = Pager::builder().limit(capacity).capacity(capacity);
        faults::IS_EMULATED.store(true, Ordering::Relaxed);
        let core = builder.core(Arc::new(Uffd::new(Tells::Nothing).unwrap())).unwrap();
        let part = core.map_new(PAGES * PAGE_SIZE).unwrap();
        core.advise(part, Access::Random);
        for (number, page) in part.chunks(1).enumerate() {
            assert!(core.fault(page.address, true, By::Toucher) == Fault::Done);
            // SAFETY: the page is the test's, mapped, and in memory.
            let contents = unsafe { std::slice::from_raw_parts_mut(page.address as *mut u8, PAGE_SIZE) };
            fill(contents, number, 1);
        }
        core.page_out(part);
        part.chunks(1).for_each(|page| assert!(core.fault(page.address, false, By::Toucher) == Fault::Done));
        return core.unmap(part);
    }
    let Some(functions) = calls::functions(NAME, PAGES as u64, "uzram_pager::core::Core::fault") else {
        return;
    };
    let functions: Vec<_> = functions.into_iter().filter(|(_, (file, _))| file.contains("/src/")).collect();
    let files: BTreeSet<_> = functions.iter().map(|(_, (file, _))| file).collect();
    println!("{} functions in {} files: {functions:#?}", functions.len(), files.len());
    assert!(functions.len() > 10, "valgrind has seen the faults");
    assert!(functions.len() <= 30 && files.len() <= 16);
}
