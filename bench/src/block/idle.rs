//! The CPU time and resident memory of daemons whose swap areas are not in use.
//!
//! Their slot tables are counted separately: 16 bytes for each page of the disk, resident as far as they were
//! touched.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::units::bytes_to_pages;
use uzram::{Error, ErrorKind, Result};

use super::swap_area::SwapDaemon;
use super::{BlockOptions, io_error};
use crate::harness::go_on;

/// The slot table's bytes for a page.
const SLOT_BYTES: u64 = 16;

/// One idle daemon.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    /// The size of its swap area.
    pub size_bytes: u64,
    /// CPU time, in percent of one CPU.
    pub cpu_percent: f64,
    /// Its resident memory, without the slot table's.
    pub resident_bytes: u64,
    /// The slot table's resident memory.
    pub slot_table_bytes: u64,
}

/// Measures a daemon of each size, all at the same time.
pub(super) fn measure(options: &BlockOptions) -> Result<Vec<Idle>> {
    let sizes = &options.amounts.idle_sizes_bytes;
    let mut daemons = Vec::new();
    for size_bytes in sizes {
        go_on(&options.stop)?;
        daemons.push(SwapDaemon::on(&options.programs.uzram, *size_bytes)?);
    }
    thread::sleep(options.amounts.rest);
    go_on(&options.stop)?;
    let pids = daemons.iter().map(SwapDaemon::pid).collect::<Result<Vec<_>>>()?;
    let before = pids.iter().map(|pid| Clock::read(*pid)).collect::<Result<Vec<_>>>()?;
    thread::sleep(options.amounts.idle);
    let mut found = Vec::new();
    for ((pid, size_bytes), before) in pids.iter().zip(sizes).zip(before) {
        let cpu_percent = Clock::read(*pid)?.percent_since(&before);
        let (resident_bytes, slot_table_bytes) = resident(*pid, bytes_to_pages(*size_bytes) * SLOT_BYTES)?;
        found.push(Idle { size_bytes: *size_bytes, cpu_percent, resident_bytes, slot_table_bytes });
    }
    daemons.into_iter().try_for_each(SwapDaemon::off)?;
    Ok(found)
}

/// A process's CPU time at some moment. The kernel's clock of the process counts nanoseconds; `utime` and
/// `stime` of `/proc/PID/stat` count ticks of 10 ms, too coarse to tell idle from nearly idle in a few
/// seconds.
struct Clock {
    at: Instant,
    cpu: Duration,
}

impl Clock {
    fn read(pid: i32) -> Result<Clock> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Io, format!("cannot read the CPU clock of process {pid}: {error}"))
        };
        let mut clock = 0;
        // SAFETY: `clock` is where its result goes.
        match unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } {
            0 => {}
            error => return Err(failed(std::io::Error::from_raw_os_error(error))),
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is where its result goes.
        if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        Ok(Clock { at: Instant::now(), cpu: Duration::new(time.tv_sec as u64, time.tv_nsec as u32) })
    }

    fn percent_since(&self, before: &Clock) -> f64 {
        let cpu = self.cpu.saturating_sub(before.cpu);
        100.0 * cpu.as_secs_f64() / self.at.duration_since(before.at).as_secs_f64()
    }
}

/// Returns a process's resident memory without its slot table, and the slot table's.
fn resident(pid: i32, slot_table_bytes: u64) -> Result<(u64, u64)> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let text = fs::read_to_string(&path).map_err(|error| io_error(&path, error))?;
    let mappings = mappings(&text);
    let all_bytes = mappings.iter().map(|mapping| mapping.resident_bytes).sum::<u64>();
    // The slot table is a separate mapping, unless the kernel has merged it with a neighbour.
    let table =
        mappings.iter().filter(|mapping| mapping.is_anonymous && mapping.size_bytes >= slot_table_bytes);
    let table = table.min_by_key(|mapping| mapping.size_bytes);
    let table_bytes = table.map_or(0, |mapping| mapping.resident_bytes.min(slot_table_bytes));
    Ok((all_bytes - table_bytes, table_bytes))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping {
    /// Whether it has neither a file nor a name.
    is_anonymous: bool,
    size_bytes: u64,
    resident_bytes: u64,
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
                mappings.push(Mapping { is_anonymous: words.len() == 5, ..Mapping::default() });
            }
            (Some(&"Size:"), Some(kib), Some(mapping)) => mapping.size_bytes = kib << 10,
            (Some(&"Rss:"), Some(kib), Some(mapping)) => mapping.resident_bytes = kib << 10,
            _ => {}
        }
    }
    mappings
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_slot_table_is_found_among_mappings() {
        let own = std::process::id() as i32;
        // Larger than the heap of 64 MiB that glibc reserves for each of the other tests' threads.
        const TABLE_BYTES: usize = 80 << 20;
        let slots = vec![1u8; TABLE_BYTES];
        let (rest_bytes, table_bytes) = resident(own, TABLE_BYTES as u64).unwrap();
        assert_eq!(table_bytes, TABLE_BYTES as u64);
        assert!(rest_bytes > 0);
        assert_eq!(resident(own, 1 << 50).unwrap().1, 0);
        drop(slots);
    }

    #[test]
    fn mappings_are_read() {
        let smaps = "7f00-7f10 rw-p 00000000 00:00 0 \nSize:   64 kB\nKernelPageSize: 4 kB\nRss:   12 kB\nPss: 3 kB\n\
                     7f20-7f30 r--p 00000000 00:00 0  [vdso]\nSize:    8 kB\nRss:    4 kB\n";
        let mapping = |is_anonymous, size: u64, resident: u64| Mapping {
            is_anonymous,
            size_bytes: size << 10,
            resident_bytes: resident << 10,
        };
        assert_eq!(mappings(smaps), [mapping(true, 64, 12), mapping(false, 8, 4)]);
    }

    #[test]
    fn a_busy_process_is_not_idle() {
        let own = std::process::id() as i32;
        let before = Clock::read(own).unwrap();
        let end = Instant::now() + Duration::from_millis(50);
        while Instant::now() < end {}
        assert!(Clock::read(own).unwrap().percent_since(&before) > 1.0);
        // No process has this ID, which is above PID_MAX_LIMIT.
        assert!(Clock::read((1 << 22) + 1).is_err());
    }
}
