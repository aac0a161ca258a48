//! Protecting a daemon from waiting for memory that only it can free.
//!
//! The kernel reclaims memory by writing pages to swap areas and file systems. So no page of the daemon that
//! stores them is ever paged out, and all memory that it may touch while it serves is touched before: the
//! program, the heap, the pool's reserve, and the buffers and stacks of its threads (`uzram_serve::fuse`).
//!
//! This happens before other threads are started, so that they inherit it.

use std::fs;
use std::io;
use std::os::raw::c_void;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::mm::{Advice, MlockAllFlags};
use uzram::machine_memory;
use uzram_serve::control::MeasureJson;

/// Heap to touch beforehand, for all small allocations while serving.
#[cfg(target_env = "gnu")]
const HEAP_BYTES: usize = 512 << 10;
/// Larger file mappings are not populated; none of the program's own is.
const MAX_TEXT_BYTES: usize = 64 << 20;
/// A process's own OOM score.
const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// The score by which the OOM killer ends a process first.
const ENDED_FIRST: &str = "1000";

/// More memory than a holder has, which keeps what outlives the processes that serve.
const HOLDER_BYTES: u64 = 16 << 20;

/// The score that exempts a process from the OOM killer, proc_pid_oom_score_adj(5).
const NEVER_KILLED: &str = "-1000";
/// A score is compared in so many parts of the memory that there is.
const SCORE_PARTS: u64 = 1000;

/// `<linux/prctl.h>`, since Linux 5.6.
const PR_SET_IO_FLUSHER: i32 = 57;

/// Applies all measures, and returns the outcome of each.
pub fn protect() -> Vec<MeasureJson> {
    let io_flusher = become_io_flusher();
    let locked = lock_memory().err();
    touch_program();
    keep_heap();
    let spared = fs::write(OOM_SCORE, NEVER_KILLED).err();
    let spared = spared.map(|error| explain(&error, "CAP_SYS_RESOURCE"));
    vec![measure("memory locked", locked), io_flusher, measure("spared by the OOM killer", spared)]
}

/// Locks the memory of this process, now and later; says why the system refuses if it does.
pub fn lock_memory() -> Result<(), String> {
    // First all that is mapped, so that pages come back that are swapped out now: of a process that was just
    // forked, say. Then pages when they are touched; that does not populate mappings.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    let locked = rustix::mm::mlockall(MlockAllFlags::CURRENT).and_then(|()| rustix::mm::mlockall(flags));
    locked.map_err(|error| match error {
        // With less than that, `ulimit -l` allows less memory than is mapped.
        Errno::NOMEM => "it needs CAP_IPC_LOCK, or `ulimit -l unlimited`".to_owned(),
        error => explain(&error.into(), "CAP_IPC_LOCK"),
    })
}

/// Has the kernel not write pages out to get memory for this thread, nor wait until that is done; the same
/// for those that it starts, and their processes.
pub fn become_io_flusher() -> MeasureJson {
    let refused = set_io_flusher(true).err().map(|error| explain(&error, "CAP_SYS_RESOURCE"));
    measure("marked as I/O flusher", refused)
}

pub fn measure(what: &str, refused: Option<String>) -> MeasureJson {
    MeasureJson { what: what.to_owned(), refused }
}

pub fn can_be_io_flusher() -> bool {
    set_io_flusher(true).and_then(|()| set_io_flusher(false)).is_ok()
}

/// Clears `PR_SET_IO_FLUSHER` in the process that `command` starts.
pub fn unprotect_child(command: &mut Command) -> &mut Command {
    let unprotect = || {
        // Refused if it was none.
        let _ = set_io_flusher(false);
        Ok(())
    };
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe { command.pre_exec(unprotect) }
}

/// Makes a process started by a protected one an ordinary one again, which waits for memory and may be killed
/// by the OOM killer: for the process that runs swapoff.
pub fn unprotect() {
    // If this fails, the process only gets memory less easily.
    let _ = set_io_flusher(false);
    let _ = fs::write(OOM_SCORE, "0");
}

/// Has the OOM killer end this process, which another one replaces, rather than the holder, which none
/// replaces.
pub fn end_before_holder() {
    if let Ok(of_holder) = fs::read_to_string(OOM_SCORE) {
        put_before_holder(&of_holder);
    }
}

/// Does that for a process whose holder has this score.
fn put_before_holder(of_holder: &str) {
    let limit_bytes = machine_memory::read().map_or(u64::MAX, |memory| memory.limit_bytes);
    let score = score_before_holder(of_holder.trim(), limit_bytes);
    // Fails without CAP_SYS_RESOURCE if it was higher when this process began; then the kernel chooses by
    // size.
    let _ = fs::write(OOM_SCORE, score).or_else(|_| fs::write(OOM_SCORE, "0"));
}

/// Returns the score at which a process is ended before its holder, where they may have so much memory.
fn score_before_holder(of_holder: &str, limit_bytes: u64) -> String {
    let more = HOLDER_BYTES.saturating_mul(SCORE_PARTS).div_ceil(limit_bytes.max(1));
    match of_holder.parse::<i64>() {
        Ok(score) if of_holder != NEVER_KILLED => {
            score.saturating_add_unsigned(more).min(SCORE_PARTS as i64 - 1).to_string()
        }
        _ => of_holder.to_owned(),
    }
}

/// While this exists, the OOM killer ends this process before all others; after that, before the holder.
pub struct Expendable(Option<String>);

impl Expendable {
    /// Makes this process expendable, if the system allows that.
    #[must_use]
    pub fn new() -> Self {
        let before = fs::read_to_string(OOM_SCORE).ok();
        Expendable(before.filter(|_| fs::write(OOM_SCORE, ENDED_FIRST).is_ok()))
    }
}

impl Drop for Expendable {
    fn drop(&mut self) {
        self.0.iter().for_each(|of_holder| put_before_holder(of_holder));
    }
}

fn explain(error: &io::Error, capability: &str) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::PERM | Errno::ACCESS) => format!("it needs {capability}"),
        Some(Errno::INVAL) => "not supported by this kernel".to_owned(),
        _ => error.to_string(),
    }
}

/// `PR_SET_IO_FLUSHER`, prctl(2): see [`become_io_flusher`].
fn set_io_flusher(is_one: bool) -> io::Result<()> {
    // SAFETY: the option takes only numbers, and only changes how the kernel allocates memory for this thread
    // and those that it starts.
    match unsafe { libc::prctl(PR_SET_IO_FLUSHER, libc::c_ulong::from(is_one), 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Brings the program's code and constants into memory.
fn touch_program() {
    // Without the list, pages are faulted in on use, as in any other program.
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return };
    for (start, len) in maps.lines().filter_map(file_mapping) {
        let start = std::ptr::without_provenance_mut::<c_void>(start);
        // SAFETY: the range is a mapping of this process, and the advice changes no contents. If it fails (a
        // kernel before 5.14, a truncated file), pages are faulted in on use.
        let _ = unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateRead) };
    }
}

/// Returns start and length of a line of `/proc/PID/maps`, if it is a readable mapping of a file.
fn file_mapping(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let is_read = fields.next()?.starts_with('r');
    let is_file = fields.nth(3)?.starts_with('/');
    let len = end.checked_sub(start)?;
    (is_read && is_file && len <= MAX_TEXT_BYTES).then_some((start, len))
}

/// Makes the heap keep its memory.
fn keep_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only changes parameters of glibc's allocator, and takes numbers.
    unsafe {
        // One heap for all threads, which is never trimmed.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        // Larger allocations are separate mappings, which are unmapped when they are freed.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 20);
    }
}

/// Touches free heap memory, which stays resident, so that small allocations cause no page faults. Call it
/// after all long-lived allocations.
pub fn touch_heap() {
    #[cfg(target_env = "gnu")]
    {
        let mut heap: Vec<u8> = Vec::with_capacity(HEAP_BYTES);
        heap.resize(HEAP_BYTES, 1);
        std::hint::black_box(&heap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ended_before_its_holder_but_for_one_that_never_is() {
        let score = |of_holder, limit_mib: u64| score_before_holder(of_holder, limit_mib << 20);
        assert_eq!([score("0", 24 << 10), score("0", 64), score("100", 160)], ["1", "250", "200"]);
        assert_eq!([score("-1000", 64), score("-999", 64), score("900", 64)], ["-1000", "-749", "999"]);
        assert_eq!([score("0", 0), score("", 64)], ["999", ""]);
    }

    #[test]
    fn mappings_of_files_are_found() {
        let line = "55d0c0a00000-55d0c0a80000 r-xp 00001000 fe:00 1234    /usr/bin/uzram";
        assert_eq!(file_mapping(line), Some((0x55d0_c0a0_0000, 0x8_0000)));
        for other in [
            "7ffc1000-7ffc2000 rw-p 00000000 00:00 0                  [stack]",
            "7f0000000000-7f0000001000 ---p 00000000 fe:00 77         /lib/x.so",
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0",
            "7f0000000000-7f0010000000 r--p 00000000 fe:00 77         /usr/lib/locale/locale-archive",
            "",
        ] {
            assert_eq!(file_mapping(other), None, "{other}");
        }
    }
}
