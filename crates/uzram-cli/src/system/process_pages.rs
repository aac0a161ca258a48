//! The memory of running programs: their resident anonymous pages, which are those that a kernel would swap
//! out.
//!
//! Taken are pages of private mappings that belong to no file any more: heaps, stacks, and pages of programs
//! and libraries that were written to. The processes run on, change pages while they are read, and may end.
//!
//! If there are more pages than wanted, runs of up to 16 neighbours are taken, evenly spread over all: the
//! same runs each time for the same memory. Pages come out in the order of processes and addresses.

use std::fs::File;
use std::io::{ErrorKind as IoKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uzram::mem::{FoundPages, Wanted, scan_page_table};
use uzram::units::{PAGE_SIZE, Page, same_word};
use uzram::{Error, ErrorKind, Result};

use crate::system::process_status::status_field;

/// The most pages of a run: 64 KiB, the largest page of the architectures, so that larger pages can be made
/// of a corpus.
const RUN_PAGES: u64 = 16;
const RUN_BYTES: u64 = RUN_PAGES * PAGE_SIZE as u64;

/// The regions that one call of `PAGEMAP_SCAN` may return.
const SCANNED_REGIONS: usize = 1024;

/// Bits of an entry of `/proc/PID/pagemap`, documented in the kernel's admin-guide/mm/pagemap.rst.
const PAGEMAP_PRESENT: u64 = 1 << 63;
const PAGEMAP_FILE_OR_SHARED: u64 = 1 << 61;
/// The entries that are read at once.
const PAGEMAP_ENTRIES: u64 = 8192;

/// Mappings that belong to the kernel, though they are listed as private.
const KERNEL_MAPPINGS: [&str; 4] = ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"];

/// Pages taken from processes, and what was left out.
#[derive(Default)]
pub struct Taken {
    /// The pages, none of them same-filled.
    pub pages: Vec<Page>,
    /// The resident pages there were.
    pub resident: u64,
    /// Pages left out whose words are all equal: a store keeps the word alone.
    pub same_filled: u64,
    /// Pages that were gone, or that the kernel did not let this process read.
    pub unreadable: u64,
}

impl Taken {
    /// Returns the resident pages that were not looked at, because enough were found.
    pub fn unread(&self) -> u64 {
        self.resident.saturating_sub(self.pages.len() as u64 + self.same_filled + self.unreadable)
    }
}

/// Takes up to `max_pages` pages of the processes `pids`, and of those of `others` that have not ended. One
/// that ends meanwhile yields the pages read so far. Once `stop` is set, the pages found so far are returned.
///
/// # Errors
/// `NotFound`: one of `pids` does not exist, or has ended and was not waited for. `Invalid`: it is a kernel
/// thread. `Permission`: this process may not read its memory (ptrace(2), "Ptrace access mode checking").
/// `Io`: another failure of the system.
pub fn take(pids: &[u32], others: &[u32], max_pages: usize, stop: &AtomicBool) -> Result<Taken> {
    let mut taken = Taken::default();
    let (mut processes, mut runs) = (Vec::new(), Vec::new());
    for (at, pid) in pids.iter().chain(others).enumerate() {
        let mut process = match Process::open(*pid) {
            Err(error) if error.kind() == ErrorKind::NotFound && at >= pids.len() => continue,
            process => process?,
        };
        for region in process.resident(stop)? {
            taken.resident += (region.end - region.start) / PAGE_SIZE as u64;
            runs.extend(cut(region).map(|run| (processes.len(), run)));
        }
        processes.push(process);
    }
    let mut found: Vec<(usize, Vec<Page>)> = Vec::new();
    let mut room = max_pages;
    for at in spread(runs.len()) {
        if room == 0 || stop.load(Ordering::Relaxed) {
            break;
        }
        let (process, run) = &runs[at];
        let pages = processes[*process].read(run.clone(), room, &mut taken);
        room -= pages.len();
        if !pages.is_empty() {
            found.push((at, pages));
        }
    }
    found.sort_unstable_by_key(|(at, _)| *at);
    taken.pages = found.into_iter().flat_map(|(_, pages)| pages).collect();
    Ok(taken)
}

/// Cuts a range of addresses at multiples of [`RUN_BYTES`].
fn cut(region: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut start = region.start;
    std::iter::from_fn(move || {
        let end = region.end.min((start / RUN_BYTES + 1) * RUN_BYTES);
        let run = start..end;
        start = end;
        (!run.is_empty()).then_some(run)
    })
}

/// Returns the numbers below `count`, each once, in an order of which each beginning is evenly spread: with
/// their bits reversed (van der Corput's sequence).
pub fn spread(count: usize) -> impl Iterator<Item = usize> {
    let bits = usize::BITS - count.saturating_sub(1).leading_zeros();
    let reversed = move |n: usize| n.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
    (0..1 << bits).map(reversed).filter(move |at| *at < count)
}

/// Parts of `/proc/PID` of one process: as they are open, another process that gets its number is not taken
/// for it.
struct Process {
    pid: u32,
    maps: String,
    pagemap: File,
    /// `None` once the process has ended.
    mem: Option<File>,
    /// Whether the kernel has `PAGEMAP_SCAN` (Linux 6.7).
    can_scan: bool,
}

impl Process {
    fn open(pid: u32) -> Result<Process> {
        let failed = |error: Errno| failure(pid, error);
        let flags = OFlags::CLOEXEC | OFlags::RDONLY;
        let dir = rustix::fs::open(format!("/proc/{pid}"), flags | OFlags::DIRECTORY, Mode::empty())
            .map_err(failed)?;
        let open = |name: &str| rustix::fs::openat(&dir, name, flags, Mode::empty()).map(File::from);
        let text = |name: &str| {
            let mut bytes = Vec::new();
            let read = open(name)?.read_to_end(&mut bytes);
            read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            // Names of files may be of any bytes; the addresses before them are ASCII.
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let maps = text("maps").map_err(failed)?;
        if maps.is_empty() {
            return Err(without_memory(pid, &text("status").map_err(failed)?));
        }
        let (pagemap, mem) = (open("pagemap").map_err(failed)?, open("mem").map_err(failed)?);
        Ok(Process { pid, maps, pagemap, mem: Some(mem), can_scan: true })
    }

    /// Returns the resident anonymous pages, as ranges of addresses.
    fn resident(&mut self, stop: &AtomicBool) -> Result<Vec<Range<u64>>> {
        let mut regions = Vec::new();
        for range in private_ranges(&self.maps) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if self.can_scan {
                match scan(&self.pagemap, range.clone(), &mut regions) {
                    Err(Errno::NOTTY) => self.can_scan = false,
                    scanned => {
                        scanned.map_err(|error| failure(self.pid, error))?;
                        continue;
                    }
                }
            }
            look_up(&self.pagemap, range, stop, &mut regions).map_err(|error| failure(self.pid, error))?;
        }
        Ok(regions)
    }

    /// Returns up to `most` pages of a run that are not same-filled; counts the others in `taken`.
    fn read(&mut self, run: Range<u64>, most: usize, taken: &mut Taken) -> Vec<Page> {
        let (mut bytes, mut pages) = ([0; RUN_BYTES as usize], Vec::new());
        let mut at = run.start;
        while at < run.end && pages.len() < most {
            let wanted = (run.end - at) as usize;
            let read = self.mem.as_ref().map_or(Ok(0), |mem| mem.read_at(&mut bytes[..wanted], at));
            if read.as_ref().is_err_and(|error| error.kind() == IoKind::Interrupted) {
                continue;
            }
            if matches!(read, Ok(0)) {
                // The process has ended: the kernel gives an error for a page, and nothing only when there is
                // none left.
                self.mem = None;
                taken.unreadable += (run.end - at) / PAGE_SIZE as u64;
                return pages;
            }
            let (whole, _) = bytes[..read.unwrap_or(0)].as_chunks::<PAGE_SIZE>();
            for page in whole {
                if pages.len() == most {
                    return pages;
                }
                match same_word(page) {
                    Some(_) => taken.same_filled += 1,
                    None => pages.push(*page),
                }
            }
            at += (whole.len() * PAGE_SIZE) as u64;
            if whole.is_empty() {
                // Unmapped since, or the memory of a device.
                taken.unreadable += 1;
                at += PAGE_SIZE as u64;
            }
        }
        pages
    }
}

/// Returns the error of a process whose directory in `/proc` does not open, or not what is in it.
fn failure(pid: u32, error: Errno) -> Error {
    match error {
        Errno::NOENT | Errno::SRCH => Error::new(ErrorKind::NotFound, format!("there is no process {pid}")),
        Errno::ACCESS | Errno::PERM => Error::new(
            ErrorKind::Permission,
            format!(
                "no permission to read the memory of process {pid}: root has it (CAP_SYS_PTRACE), and the user of the \
                 process where kernel.yama.ptrace_scope is 0"
            ),
        ),
        error => Error::new(ErrorKind::Io, format!("cannot read the memory of process {pid}: {error}")),
    }
}

/// Returns the error of a process with this status, which maps nothing.
fn without_memory(pid: u32, status: &str) -> Error {
    match status_field(status, "State") {
        Some(state) if state.starts_with(['Z', 'X']) => {
            Error::new(ErrorKind::NotFound, format!("process {pid} has ended"))
        }
        _ => Error::invalid(format!("process {pid} is a kernel thread: it has no memory of its own")),
    }
}

/// Returns the readable private mappings in the text of `/proc/PID/maps`, proc_pid_maps(5), but for the
/// kernel's own.
fn private_ranges(maps: &str) -> Vec<Range<u64>> {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (range, mode) = (fields.next()?, fields.next()?.as_bytes());
            let name = fields.nth(3).unwrap_or_default();
            let (low, high) = range.split_once('-')?;
            let range = u64::from_str_radix(low, 16).ok()?..u64::from_str_radix(high, 16).ok()?;
            let is_wanted =
                mode.first() == Some(&b'r') && mode.get(3) == Some(&b'p') && !KERNEL_MAPPINGS.contains(&name);
            is_wanted.then_some(range)
        })
        .collect()
}

/// Appends the resident anonymous pages of a range of addresses, by `PAGEMAP_SCAN`. Fails with `ENOTTY` if
/// the kernel does not have that.
fn scan(pagemap: &File, range: Range<u64>, out: &mut Vec<Range<u64>>) -> Result<(), Errno> {
    let mut regions = [FoundPages { start: 0, end: 0, categories: 0 }; SCANNED_REGIONS];
    let mut start = range.start;
    while start < range.end {
        let count = scan_page_table(pagemap, start..range.end, Wanted::PresentOfNoFile, &mut regions)?;
        let found = &regions[..count];
        out.extend(found.iter().map(|region| region.start..region.end));
        match found.last() {
            Some(last) if count == SCANNED_REGIONS => start = last.end,
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// The same by the entries of `/proc/PID/pagemap`, one for each page of the machine, whether it is mapped or
/// not.
fn look_up(
    pagemap: &File,
    range: Range<u64>,
    stop: &AtomicBool,
    out: &mut Vec<Range<u64>>,
) -> Result<(), Errno> {
    let page_bytes = rustix::param::page_size() as u64;
    let mut entries = vec![0; (PAGEMAP_ENTRIES * 8) as usize];
    let mut at = range.start;
    while at < range.end && !stop.load(Ordering::Relaxed) {
        let wanted = ((range.end - at) / page_bytes).clamp(1, PAGEMAP_ENTRIES) as usize * 8;
        let read = match pagemap.read_at(&mut entries[..wanted], at / page_bytes * 8) {
            Err(error) if error.kind() == IoKind::Interrupted => continue,
            read => read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
        };
        let (whole, _) = entries[..read].as_chunks::<8>();
        if whole.is_empty() {
            // The process has ended.
            return Ok(());
        }
        for entry in whole {
            let entry = u64::from_ne_bytes(*entry);
            let end = at + page_bytes;
            if entry & PAGEMAP_PRESENT != 0 && entry & PAGEMAP_FILE_OR_SHARED == 0 {
                match out.last_mut() {
                    Some(last) if last.end == at => last.end = end,
                    _ => out.push(at..end),
                }
            }
            at = end;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
