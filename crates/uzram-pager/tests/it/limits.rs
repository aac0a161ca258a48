//! What a pager takes, and what it refuses.

use std::ops::RangeBounds;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind};
use uzram_pager::{LEAST_LIMIT_BYTES, Pager, TrapKind};

use crate::common::{
    Ended, MIB, OF_SIGNALS, builder, drop_privileges, each, each_succeeds, expect_pages, fill, fill_pages,
    in_child, pager,
};

const LIMIT: usize = 64 * MIB;
/// What the process takes beside its pager, and what the pager may take for itself.
const REST: usize = 16 * MIB;

fn status_bytes(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

fn file_bytes() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fd.ok().map(|fd| fd.path()));
    let is_pagers = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|name| name.starts_with("/memfd:uzram-pager (deleted)"))
    };
    files
        .filter(is_pagers)
        .map(|path| std::fs::metadata(path).map_or(0, |file| file.blocks() as usize * 512))
        .sum()
}

fn resident_bytes() -> usize {
    status_bytes("RssAnon") + status_bytes("RssShmem").max(file_bytes())
}

/// Writes or checks pages: a third of zeros, a third that compresses, and a third that does not.
fn mixed(page: &mut [u8], number: usize, version: u64, writes: bool) {
    let mut wanted = [0; PAGE_SIZE];
    match number % 3 {
        0 => wanted.fill(0),
        1 => fill(&mut wanted, number, version),
        _ => Random::new(number as u64 + version).fill(&mut wanted),
    }
    if writes {
        page.copy_from_slice(&wanted);
    } else {
        assert!(page == wanted, "page {number}");
    }
}

#[test]
fn resident_memory_stays_within_the_limit() {
    let body = |trap| {
        let dir = tempfile::tempdir().unwrap();
        let pager = builder(trap, LIMIT).spill(dir.path(), 512 << 20).build().unwrap();
        let mut region = pager.map(4 * LIMIT).unwrap();
        let ends = AtomicBool::new(false);
        let (peak, samples) = std::thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                let (mut peak, mut samples) = (0, 0);
                while !ends.load(Ordering::Relaxed) {
                    peak = peak.max(resident_bytes());
                    samples += 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
                (peak, samples)
            });
            for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
                mixed(page, number, 1, true);
            }
            let mut random = Random::new(5);
            for _ in 0..4000 {
                let number = random.below(4 * LIMIT / PAGE_SIZE);
                mixed(&mut region[number * PAGE_SIZE..][..PAGE_SIZE], number, 1, false);
            }
            for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
                mixed(page, number, 1, false);
            }
            ends.store(true, Ordering::Relaxed);
            sampler.join().unwrap()
        });
        let stats = pager.stats();
        println!("at most {} MiB in {samples} samples, {stats:?}", peak >> 20);
        assert!(peak <= LIMIT + REST && peak > LIMIT / 2 && samples > 5, "{peak} bytes");
        assert_eq!(stats.pages_lost, 0);
    };
    each_succeeds("resident", &TrapKind::ALL, body);
}

/// Memory that is kept below the limit without a spill file is kept below it with one that is full, and what
/// is written to that is bounded.
#[test]
fn a_full_spill_file_is_no_worse_than_none() {
    // Half of a page compresses: 20 MiB are some 11 MiB compressed.
    let contents = |number: usize| {
        let mut page = [0; PAGE_SIZE];
        Random::new(number as u64).fill(&mut page[..PAGE_SIZE / 2]);
        page
    };
    let dir = tempfile::tempdir().unwrap();
    each(&TrapKind::ALL, |trap| {
        for spills in [false, true] {
            let builder = builder(trap, 16 * MIB);
            let builder = if spills { builder.spill(dir.path(), 2 << 20) } else { builder };
            let pager = builder.build().unwrap();
            let mut region = pager.map(20 * MIB).unwrap();
            for round in 0..3 {
                for (number, page) in region.chunks_mut(PAGE_SIZE).enumerate() {
                    page.copy_from_slice(&contents(number + round));
                }
            }
            let stats = pager.stats();
            assert!(stats.used_pages_max <= stats.limit_pages, "{trap:?}, spills: {spills}: {stats:?}");
            for (number, page) in region.chunks(PAGE_SIZE).enumerate() {
                assert!(page == contents(number + 2), "{trap:?}, page {number}");
            }
        }
    });
}

fn kind_and_setting<T>(result: Result<T, Error>) -> (ErrorKind, Option<&'static str>) {
    let Err(error) = result else { panic!("it worked") };
    if let Some(setting) = error.setting() {
        assert!(error.to_string().contains(&format!("(setting: {setting})")), "{error}");
    }
    (error.kind(), error.setting())
}

#[test]
fn limits_and_capacities_out_of_range_name_the_setting() {
    each(&TrapKind::ALL, |trap| {
        let limit = |bytes| Pager::builder().trap(trap).capacity(1 << 30).limit(bytes).build();
        for bytes in [0, 1, LEAST_LIMIT_BYTES - 1] {
            assert_eq!(kind_and_setting(limit(bytes)), (ErrorKind::Invalid, Some("limit")));
        }
        assert!(limit(LEAST_LIMIT_BYTES).is_ok());
        for bytes in [0, u64::MAX, 1 << 60] {
            let capacity = Pager::builder().trap(trap).limit(8 << 20).capacity(bytes).build();
            let (kind, setting) = kind_and_setting(capacity);
            assert!(matches!(kind, ErrorKind::Invalid | ErrorKind::NoMemory), "{trap:?}, {bytes}: {kind:?}");
            assert_eq!(setting, Some("capacity"), "{trap:?}, {bytes}");
        }
    });
}

#[test]
fn a_capacity_that_is_used_up_is_named() {
    each(&TrapKind::ALL, |trap| {
        let pager = Pager::builder().trap(trap).limit(8 << 20).capacity(16 << 20).build().unwrap();
        assert_eq!(kind_and_setting(pager.map(0)), (ErrorKind::Invalid, None));
        for len in [17 * MIB, usize::MAX, usize::MAX - PAGE_SIZE] {
            assert_eq!(kind_and_setting(pager.map(len)), (ErrorKind::NoSpace, Some("capacity")));
        }
        let mut first = pager.map(8 * MIB).unwrap();
        fill_pages(&mut first, 0, 1);
        assert_eq!(kind_and_setting(pager.map(8 * MIB)), (ErrorKind::NoSpace, Some("capacity")));
        let second = pager.map(7 * MIB).unwrap();
        expect_pages(&first, 0, 1);
        drop((first, second));
        assert!(pager.map(15 * MIB).is_ok());
    });
}

#[test]
fn a_spill_folder_that_cannot_be_used_is_named() {
    let spill = |trap, path: &std::path::Path| builder(trap, 8 * MIB).spill(path, 1 << 20).build();
    // In a process of its own, without root's rights. It ends here.
    let ended = in_child("not writable", || {
        drop_privileges();
        // userfaultfd needs rights.
        each(&OF_SIGNALS, |trap| {
            assert_eq!(kind_and_setting(spill(trap, "/proc".as_ref())), (ErrorKind::Io, Some("spill")));
            // Root's, and readable for all.
            assert_eq!(kind_and_setting(spill(trap, "/usr".as_ref())), (ErrorKind::Io, Some("spill")));
        });
    });
    ended.iter().for_each(Ended::assert_success);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    each(&TrapKind::ALL, |trap| {
        for path in [dir.path().join("missing"), file.clone()] {
            let result = spill(trap, &path);
            assert!(result.as_ref().is_err_and(|error| error.to_string().contains(path.to_str().unwrap())));
            assert_eq!(kind_and_setting(result), (ErrorKind::Io, Some("spill")));
        }
    });
}

#[test]
fn ranges_beyond_a_region_are_refused() {
    each(&TrapKind::ALL, |trap| {
        let pager = pager(trap, 8 * MIB);
        let mut region = pager.map(MIB + 1).unwrap();
        region.fill(7);
        #[allow(clippy::reversed_empty_ranges)]
        let wrong = [
            bounds(0..MIB + 2),
            bounds(MIB + 2..),
            bounds(5..4),
            bounds(..=MIB + 1),
            bounds(..=usize::MAX),
            bounds(0..usize::MAX),
            bounds(usize::MAX..),
        ];
        for bytes in wrong {
            let results = [
                region.pageout(bytes),
                region.prefetch(bytes),
                region.pin(bytes).map(drop),
                region.discard(bytes),
            ];
            for result in results {
                assert_eq!(kind_and_setting(result), (ErrorKind::OutOfRange, None), "{bytes:?}");
            }
        }
        assert!(region.iter().all(|byte| *byte == 7), "nothing was discarded");
        for bytes in [bounds(MIB + 1..), bounds(0..0), bounds(..), bounds(..=MIB), bounds(MIB + 1..MIB + 1)] {
            region.pageout(bytes).unwrap();
            region.prefetch(bytes).unwrap();
            drop(region.pin(bytes).unwrap());
        }
        region.discard(MIB + 1..).unwrap();
        region.discard(5..5).unwrap();
        assert!(region.iter().all(|byte| *byte == 7));
    });
}

fn bounds(range: impl RangeBounds<usize>) -> (std::ops::Bound<usize>, std::ops::Bound<usize>) {
    (range.start_bound().cloned(), range.end_bound().cloned())
}
