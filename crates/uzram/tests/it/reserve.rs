//! A device with a reserve of memory: reads, writes and discards take no page fault.
//!
//! The program's text and data are brought into memory first, as a program that serves a swap disk for its
//! own machine does by mlockall(2). Threads touch their own memory, stacks and buffers, before they begin.

use std::sync::Arc;
use std::time::Duration;

use crate::alone::alone;
use crate::wait_until;
use uzram::ErrorKind;
use uzram::device::{Device, DeviceStats, OpenDevice};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

const DISK_PAGES: u64 = (256 << 20) / PAGE_SIZE as u64;
const RESERVE_BYTES: u64 = 16 << 20;
const THREADS: u64 = 3;
/// Kinds of pages, by how well they compress.
const KINDS: u64 = 61;

fn kinds() -> Vec<Page> {
    let words: Vec<u64> = (0..200).map(|seed| Random::new(seed + 1).next()).collect();
    (0..KINDS)
        .map(|kind| {
            let (mut random, mut page) = (Random::new(kind + 1000), [0; PAGE_SIZE]);
            for word in page.chunks_exact_mut(8).take(if kind == 0 { 0 } else { PAGE_SIZE }) {
                let is_random = random.below_u64(KINDS) < kind.saturating_sub(10);
                let value = if is_random { random.next() } else { words[(random.below_u64(200)) as usize] };
                word.copy_from_slice(&value.to_ne_bytes());
            }
            page
        })
        .collect()
}

fn fill(page: &mut Page, kinds: &[Page], number: u64, version: u64) {
    let kind = (number * 7 + version * 13) % KINDS;
    *page = kinds[kind as usize];
    if kind > 0 {
        page[1000..1008].copy_from_slice(&number.to_ne_bytes());
        page[2000..2008].copy_from_slice(&version.to_ne_bytes());
    }
}

fn minor_faults() -> i64 {
    // SAFETY: a structure of numbers, which the call fills.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &mut usage), 0);
        usage.ru_minflt
    }
}

/// Brings the program's text and data into memory: all mappings of files.
fn populate_program() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains('/')) {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| usize::from_str_radix(at, 16).unwrap());
        let access = fields.next().unwrap();
        if access.starts_with('r') {
            let advice =
                if access.contains('w') { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
            // SAFETY: the advice changes no contents, and is refused if it is not known.
            unsafe { libc::madvise(start as *mut _, end - start, advice) };
        }
    }
}

#[inline(never)]
fn touch_stack() {
    std::hint::black_box(&mut [0u8; 512 << 10]);
}

/// Writes a page, and retries while there is no memory. Returns how often that failed.
fn write(disk: &OpenDevice, number: u64, page: &Page) -> u64 {
    let mut failures = 0;
    while let Err(error) = disk.write(number * PAGE_SIZE as u64, page) {
        assert_eq!((error.kind(), error.setting()), (ErrorKind::NoMemory, Some("reserve")), "{error}");
        failures += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    failures
}

fn verify(disk: &OpenDevice, kinds: &[Page], number: u64, version: u64, read: &mut Page, wanted: &mut Page) {
    disk.read(number * PAGE_SIZE as u64, read).unwrap();
    if version == 0 {
        wanted.fill(0)
    } else {
        fill(wanted, kinds, number, version)
    }
    assert!(read == wanted, "page {number}, version {version}");
}

/// Runs a thread's operations on its pages. Returns its page faults, and its writes that failed.
fn work(disk: &OpenDevice, kinds: &[Page], thread: u64) -> (i64, u64) {
    let mine = || (0..DISK_PAGES).filter(|number| number % THREADS == thread);
    let (mut read, mut page) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    let mut versions = vec![1u8; DISK_PAGES as usize];
    let (mut random, mut failures) = (Random::new(thread + 1), 0);
    touch_stack();
    versions.fill(0);
    // Touch the thread's own memory in the engine.
    for number in mine().take(20) {
        fill(&mut page, kinds, number, 0);
        write(disk, number, &page);
        disk.read(number * PAGE_SIZE as u64, &mut read).unwrap();
        disk.discard(number * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
    }
    let before = minor_faults();
    for number in mine() {
        fill(&mut page, kinds, number, 1);
        failures += write(disk, number, &page);
        versions[number as usize] = 1;
    }
    for _ in 0..3 * DISK_PAGES / THREADS {
        let number = random.below_u64(DISK_PAGES / THREADS) * THREADS + thread;
        let version = &mut versions[number as usize];
        let next = if *version > 200 { 1 } else { *version + 1 };
        match random.below_u64(8) {
            0..3 => {
                fill(&mut page, kinds, number, next.into());
                failures += write(disk, number, &page);
                *version = next;
            }
            3 => {
                disk.discard(number * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
                *version = 0;
            }
            4 if *version > 0 => {
                fill(&mut page, kinds, number, (*version).into());
                // A part of the page, with the same contents.
                disk.write(number * PAGE_SIZE as u64 + 3000, &page[3000..]).unwrap_or_else(|error| {
                    assert_eq!(error.setting(), Some("reserve"), "{error}");
                    failures += 1;
                });
            }
            _ => verify(disk, kinds, number, (*version).into(), &mut read, &mut page),
        }
    }
    for number in mine() {
        verify(disk, kinds, number, versions[number as usize].into(), &mut read, &mut page);
    }
    (minor_faults() - before, failures)
}

fn faults_with(settings: &[(&str, &str)]) -> i64 {
    populate_program();
    let kinds = kinds();
    let device: Arc<Device> = Device::new("zram0").unwrap();
    device.set("reserve", &RESERVE_BYTES.to_string()).unwrap();
    settings.iter().for_each(|(name, value)| device.set(name, value).unwrap());
    device.set("disksize", &(DISK_PAGES * PAGE_SIZE as u64).to_string()).unwrap();
    let disk = device.open().unwrap();
    let empty = device.stats();
    assert_eq!((empty.reserve_bytes, empty.reserve_free_bytes), (RESERVE_BYTES, RESERVE_BYTES));
    assert_eq!(empty.mem_charged_bytes, RESERVE_BYTES);

    let done: Vec<(i64, u64)> = std::thread::scope(|scope| {
        let (disk, kinds) = (&disk, &kinds);
        let start = |thread| scope.spawn(move || work(disk, kinds, thread));
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("{settings:?}: page faults and failed writes of each thread: {done:?}");
    let full = device.stats();
    let failures: u64 = done.iter().map(|(_, failures)| failures).sum();
    assert_eq!((full.reserve_drained >= failures, full.failed_reads), (true, 0));

    // Once all pages are discarded, all memory is freed but the reserve, the free memory that is always kept,
    // and the slab caches'.
    disk.discard(0, DISK_PAGES * PAGE_SIZE as u64).unwrap();
    let most = RESERVE_BYTES + (8 << 20);
    let is_settled =
        |stats: DeviceStats| stats.mem_charged_bytes <= most && stats.reserve_free_bytes >= RESERVE_BYTES;
    wait_until(|| is_settled(device.stats()));
    let left = device.stats();
    assert!(left.mem_charged_bytes <= most, "{left:?}");
    assert_eq!(left.orig_data_bytes, 0);
    assert!(left.reserve_free_bytes >= RESERVE_BYTES, "{left:?}");
    drop(disk);
    device.set("reset", "1").unwrap();
    done.iter().map(|(faults, _)| faults).sum()
}

/// A single test: other tests' threads could change what this program has in memory.
#[test]
fn threads_that_use_a_device_with_a_reserve_take_no_page_fault() {
    if !alone("reserve::threads_that_use_a_device_with_a_reserve_take_no_page_fault") {
        return;
    }
    for settings in [
        &[][..],
        &[("comp_algorithm", "zstd:1"), ("checksum", "1")],
        &[("comp_algorithm", "deflate:1"), ("lru_enable", "0"), ("reclaim", "zspages")],
        #[cfg(feature = "designs")]
        &[("comp_algorithm", "lz4hc:2"), ("run_cache_batch", "0"), ("lru_design", "single-lock")],
        #[cfg(feature = "designs")]
        &[("comp_algorithm", "zstd"), ("pool_design", "class-indexed"), ("streams", "2")],
    ] {
        assert_eq!(faults_with(settings), 0, "{settings:?}");
    }
}
