//! The CPU time and resident memory of a daemon whose swap area is not in use: of all its processes. Memory
//! that several processes map counts once.
//!
//! The slot table is counted separately: 16 bytes for each page of the disk, resident as far as they were
//! touched.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use uzram::units::bytes_to_pages;
use uzram::{Error, ErrorKind, Result};

use super::ALGORITHM;
use super::swap_area::SwapDaemon;
use crate::harness::process::family;
use crate::harness::report::mib;
use crate::harness::{Options, Report, io_error};

/// The slot table's bytes for a page.
const SLOT_BYTES: u64 = 16;

/// Measures a daemon: the CPU time of its processes, in percent of one CPU, their resident memory without the
/// slot table's, and the slot table's.
pub(super) fn measure(options: &Options) -> Result<Report> {
    let ms = |normal, small| Duration::from_millis(options.amount(normal, small));
    let size_bytes = options.amount(4 << 30, 256 << 20);
    options.go_on()?;
    let daemon = SwapDaemon::on(options.uzram()?, size_bytes, &["--algorithm", ALGORITHM])?;
    thread::sleep(ms(2000, 200));
    options.go_on()?;
    let pids = family(daemon.pid()?);
    let cpu_percent = cpu_percent(&pids, ms(5000, 300))?;
    let (resident_bytes, table_bytes) = resident(&pids, bytes_to_pages(size_bytes) * SLOT_BYTES)?;
    let cells = [
        ("area MiB", mib(size_bytes)),
        ("% CPU", cpu_percent),
        ("resident MiB", mib(resident_bytes)),
        ("slot table MiB", mib(table_bytes)),
    ];
    let mut report = Report::default();
    report.row("idle swap daemon", "all processes", &cells);
    daemon.off().map(|()| report)
}

/// Returns the CPU time of processes during so long a time, in percent of one CPU.
fn cpu_percent(pids: &[u32], duration: Duration) -> Result<f64> {
    let cpu = || pids.iter().map(|pid| cpu_of(*pid)).sum::<Result<Duration>>();
    let (start, before) = (Instant::now(), cpu()?);
    thread::sleep(duration);
    let (elapsed, after) = (start.elapsed(), cpu()?);
    Ok(100.0 * after.saturating_sub(before).as_secs_f64() / elapsed.as_secs_f64())
}

/// Returns the CPU time of a process by the kernel's clock, which counts nanoseconds; `utime` and `stime` of
/// `/proc/PID/stat` count ticks of 10 ms, too coarse to tell idle from nearly idle in a few seconds.
fn cpu_of(pid: u32) -> Result<Duration> {
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::Io, format!("cannot read the CPU clock of process {pid}: {error}"))
    };
    let mut clock = 0;
    // SAFETY: `clock` is where its result goes.
    match unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) } {
        0 => {}
        error => return Err(failed(std::io::Error::from_raw_os_error(error))),
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is where its result goes.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Returns the resident memory of processes without the slot table that they share, and the slot table's.
fn resident(pids: &[u32], slot_table_bytes: u64) -> Result<(u64, u64)> {
    let (mut all_bytes, mut table_bytes) = (0, 0);
    for pid in pids {
        let path = PathBuf::from(format!("/proc/{pid}/smaps"));
        let text = fs::read_to_string(&path).map_err(|error| io_error(&path, error))?;
        let mappings = mappings(&text);
        all_bytes += mappings.iter().map(|mapping| mapping.share_bytes).sum::<u64>();
        // The slot table is a separate mapping, unless the kernel has merged it with a neighbour.
        let table =
            mappings.iter().filter(|mapping| mapping.is_memory && mapping.size_bytes >= slot_table_bytes);
        let table = table.min_by_key(|mapping| mapping.size_bytes);
        let resident_bytes = table.map_or(0, |mapping| mapping.resident_bytes.min(slot_table_bytes));
        table_bytes = resident_bytes.max(table_bytes);
    }
    Ok((all_bytes.saturating_sub(table_bytes), table_bytes))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping {
    /// Whether it is memory without a name, or a file without one.
    is_memory: bool,
    size_bytes: u64,
    resident_bytes: u64,
    /// `resident_bytes`, but that each page is divided by the number of processes that have mapped it.
    share_bytes: u64,
}

/// Parses proc_pid_smaps(5): for each mapping a line with its addresses, access, offset, device, inode, and
/// its file or name if it has one; then its figures, in KiB.
fn mappings(smaps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let kib = words.get(1).and_then(|word| word.parse::<u64>().ok());
        match (words.first(), kib, mappings.last_mut()) {
            (Some(first), _, _) if first.contains('-') => {
                let is_memory = words.len() == 5 || words.last() == Some(&"(deleted)");
                mappings.push(Mapping { is_memory, ..Mapping::default() });
            }
            (Some(&"Size:"), Some(kib), Some(mapping)) => mapping.size_bytes = kib << 10,
            (Some(&"Rss:"), Some(kib), Some(mapping)) => mapping.resident_bytes = kib << 10,
            (Some(&"Pss:"), Some(kib), Some(mapping)) => mapping.share_bytes = kib << 10,
            _ => {}
        }
    }
    mappings
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_slot_table_is_found_among_mappings() {
        let own = std::process::id();
        // Larger than the heap of 64 MiB that glibc reserves for each of the other tests' threads.
        const TABLE_BYTES: usize = 80 << 20;
        let slots = vec![1u8; TABLE_BYTES];
        let (rest_bytes, table_bytes) = resident(&[own], TABLE_BYTES as u64).unwrap();
        assert_eq!(table_bytes, TABLE_BYTES as u64);
        assert!(rest_bytes > 0);
        assert_eq!(resident(&[own], 1 << 50).unwrap().1, 0);
        drop(slots);
    }

    #[test]
    fn mappings_are_read() {
        let smaps = "7f00-7f10 rw-p 00000000 00:00 0 \nSize:   64 kB\nKernelPageSize: 4 kB\nRss:   12 kB\nPss: 3 kB\n\
                     7f20-7f30 r--p 00000000 00:00 0  [vdso]\nSize:    8 kB\nRss:    4 kB\n\
                     7f40-7f50 rw-s 01000000 00:29 3  /#3 (deleted)\nSize:    8 kB\nRss:    8 kB\nPss:   4 kB\n";
        let mapping = |is_memory, [size, resident, share]: [u64; 3]| Mapping {
            is_memory,
            size_bytes: size << 10,
            resident_bytes: resident << 10,
            share_bytes: share << 10,
        };
        let wanted = [mapping(true, [64, 12, 3]), mapping(false, [8, 4, 0]), mapping(true, [8, 8, 4])];
        assert_eq!(mappings(smaps), wanted);
    }

    #[test]
    fn a_busy_process_is_not_idle() {
        let own = std::process::id();
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
            let percent = cpu_percent(&[own], Duration::from_millis(50));
            ends.store(true, Ordering::Relaxed);
            assert!(percent.unwrap() > 1.0);
        });
        // No process has this ID, which is above PID_MAX_LIMIT.
        assert!(cpu_of((1 << 22) + 1).is_err());
    }
}
