//! Memory that a daemon's processes share: which of them serves, and what the others have to know when it
//! dies.
//!
//! The process that serves holds the *seat*, a robust mutex in this memory; `docs/internals/take-over.md`
//! says how the stand-by gets it.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use rustix::thread::CapabilitySet;
use uzram::thread::{run_when_idle, scheduling, set_scheduling};

use crate::daemon::episodes::KeptEpisode;

/// The first word of the memory, with its version.
const MAGIC: u64 = u64::from_le_bytes(*b"uzlives\x01");

/// The size of the memory: one page.
const BYTES: usize = 4096;

/// The flag of a thread that has begun to exit, and never returns to its program: `PF_EXITING`, in field 9 of
/// proc_pid_stat(5).
const EXITING: u64 = 0x4;

/// How often threads that exit are looked at.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// What is shared. All but the seat are plain numbers, each written by one process.
#[repr(C)]
struct Shared {
    magic: AtomicU64,
    seat: UnsafeCell<libc::pthread_mutex_t>,
    numbers: [AtomicU64; Number::Count as usize],
}

/// Where the open episodes are, to the end of the memory. Programs before them left zeros there: none is
/// open.
const EPISODES_AT: usize = BYTES / 2;

const _: () = assert!(size_of::<Shared>() <= EPISODES_AT);

#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Number {
    /// The process that holds everything; 0 without one.
    Holder,
    Worker,
    /// The stand-by; 0 without one.
    StandBy,
    /// The process that has mapped the memory of all devices, as a stand-by.
    StandByReady,
    /// Whether all devices of the plan were made once.
    Started,
    /// Whether the files were given up.
    GaveUp,
    /// Whether there are new files in their place.
    Recovered,
    TakeOvers,
    /// The last outage: from the death of a process until the next one served.
    OutageNs,
    /// Whether the holder ended the process that served so that another one does.
    Replaced,
    Count,
}

pub struct Lives {
    memory: OwnedFd,
    shared: *mut Shared,
}

// SAFETY: the memory stays mapped as long as this exists; it has atomics, and a mutex that only system calls
// of any thread change.
unsafe impl Send for Lives {}
// SAFETY: as above.
unsafe impl Sync for Lives {}

impl Lives {
    pub fn new() -> io::Result<Lives> {
        let memory = rustix::fs::memfd_create("uzram-lives", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, BYTES as u64)?;
        let lives = Lives::map(memory)?;
        // SAFETY: the memory is new: nobody uses the mutex yet. The attributes are initialised before they
        // are used.
        let made = unsafe {
            let mut attributes = std::mem::zeroed();
            let seat = (*lives.shared).seat.get();
            let steps = [
                libc::pthread_mutexattr_init(&raw mut attributes),
                libc::pthread_mutexattr_setpshared(&raw mut attributes, libc::PTHREAD_PROCESS_SHARED),
                libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST),
                libc::pthread_mutex_init(seat, &raw const attributes),
            ];
            libc::pthread_mutexattr_destroy(&raw mut attributes);
            steps
        };
        if let Some(error) = made.into_iter().find(|code| *code != 0) {
            return Err(io::Error::from_raw_os_error(error));
        }
        lives.shared().magic.store(MAGIC, Ordering::Relaxed);
        Ok(lives)
    }

    /// Takes the memory that another program made.
    pub fn from_fd(memory: OwnedFd) -> io::Result<Lives> {
        if rustix::fs::fstat(&memory)?.st_size != BYTES as i64 {
            return Err(io::Error::other("the memory shared by a daemon's processes has another size"));
        }
        let lives = Lives::map(memory)?;
        if lives.shared().magic.load(Ordering::Relaxed) != MAGIC {
            return Err(io::Error::other("the memory shared by a daemon's processes is of another version"));
        }
        Ok(lives)
    }

    fn map(memory: OwnedFd) -> io::Result<Lives> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let shared = unsafe { mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, &memory, 0) }?;
        Ok(Lives { memory, shared: shared.cast() })
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is of this size, aligned to a page, and exists as long as this does; any bytes
        // are valid for its types.
        unsafe { &*self.shared }
    }

    pub fn get(&self, number: Number) -> u64 {
        self.shared().numbers[number as usize].load(Ordering::Acquire)
    }

    pub fn set(&self, number: Number, value: u64) {
        self.shared().numbers[number as usize].store(value, Ordering::Release);
    }

    /// Returns the open episodes, which the process that serves writes.
    pub fn episodes(&self) -> &[KeptEpisode] {
        let count = (BYTES - EPISODES_AT) / size_of::<KeptEpisode>();
        // SAFETY: they lie in the mapping, aligned and behind all else, as long as this exists; any bytes are
        // valid for their atomic integers.
        unsafe { std::slice::from_raw_parts(self.shared.byte_add(EPISODES_AT).cast(), count) }
    }

    /// Returns a number, and sets it to 0.
    pub fn take(&self, number: Number) -> u64 {
        self.shared().numbers[number as usize].swap(0, Ordering::AcqRel)
    }

    /// Waits for the seat, and takes it for this thread until it ends.
    pub fn take_seat(&self) -> io::Result<()> {
        let seat = self.shared().seat.get();
        // SAFETY: the mutex was initialised by `new`, in memory that is mapped as long as this exists.
        let taken = match unsafe { libc::pthread_mutex_lock(seat) } {
            // SAFETY: as above, and this thread has the mutex.
            libc::EOWNERDEAD => unsafe { libc::pthread_mutex_consistent(seat) },
            taken => taken,
        };
        if taken == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(taken)) }
    }
}

impl AsFd for Lives {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Drop for Lives {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.shared.cast(), BYTES) };
    }
}

/// A process whose end another one waits for.
///
/// A pidfd is readable when all threads are gone, and memory that only they had is freed. `/proc` tells
/// earlier that none of them runs any more, but an error of it tells nothing (`hidepid=`, no descriptors).
pub struct Watched {
    pid: u32,
    pidfd: OwnedFd,
}

impl Watched {
    /// Watches a process, which may be dead but is not reaped before the watch ends; `None` if there is none
    /// of this number.
    pub fn open(pid: u32) -> io::Result<Option<Watched>> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match pidfd_open(number, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Some(Watched { pid, pidfd })),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Checks that processes can be watched.
    pub fn check() -> Result<(), String> {
        let opened = pidfd_open(getpid(), PidfdFlags::empty());
        opened.map(drop).map_err(|error| format!("pidfd_open(2), which Linux 5.3 has, fails: {error}"))
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until no thread of the process, which is dying, can run any of its program again: all have begun
    /// to exit, or are gone. Calls `slow` once if that takes long: a thread may wait for a device.
    pub fn wait_until_all_exit(&self, slow: impl FnOnce()) {
        let tasks = shows_own_numbers().then(|| tasks(self.pid));
        let began = Instant::now();
        let mut slow = Some(slow);
        while !self.is_gone() && !tasks.as_deref().is_some_and(all_exit) {
            if began.elapsed() > Duration::from_secs(1)
                && let Some(slow) = slow.take()
            {
                slow();
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns whether all threads are gone.
    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }
}

/// Returns whether `/proc` shows processes by the numbers that they have here: that of another PID namespace
/// may be mounted there (`unshare -pf`).
fn shows_own_numbers() -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|own| own.as_os_str() == &*std::process::id().to_string())
}

/// Returns whether this process may take [`leave_cpus`] back, which needs a privilege.
pub fn can_take_cpus() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE))
}

/// Has a dying process leave the CPUs to others. The last of its threads frees its memory, which takes as
/// long as another process needs to find everything again.
pub fn leave_cpus(pid: u32) {
    threads(pid).for_each(run_when_idle);
}

/// Has a dying process run like this one: to its end it may have sockets, whose clients wait.
pub fn take_cpus(pid: u32) {
    if let Ok(own) = scheduling(0) {
        // Those that are gone need no CPU.
        threads(pid).for_each(|thread| drop(set_scheduling(thread, &own)));
    }
}

/// Returns the threads of a process, as far as `/proc` shows them.
fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let tasks = shows_own_numbers().then(|| std::fs::read_dir(tasks(pid)));
    let threads = tasks.into_iter().flatten().flatten().flatten();
    threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok())
}

fn tasks(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/task"))
}

/// Returns whether threads are listed, and all of them have begun to exit; not if one cannot be looked at.
fn all_exit(tasks: &Path) -> bool {
    let has_begun = |thread: io::Result<std::fs::DirEntry>| {
        let stat = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
        match stat {
            Ok(stat) => flags(&stat).is_some_and(|flags| flags & EXITING != 0),
            // It is gone since it was listed.
            Err(error) => matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)),
        }
    };
    let Ok(threads) = std::fs::read_dir(tasks) else { return false };
    let mut threads = threads.peekable();
    threads.peek().is_some() && threads.all(has_begun)
}

/// Returns a thread's flags, field 9. The second field, a name in parentheses, may hold anything.
fn flags(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(6)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_leaves_the_cpus_and_takes_them_again() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let policy = || scheduling(child.id()).unwrap().sched_policy.cast_signed();
        let before = policy();
        leave_cpus(child.id());
        assert_eq!(policy(), libc::SCHED_IDLE);
        take_cpus(child.id());
        assert_eq!(policy(), if can_take_cpus() { before } else { libc::SCHED_IDLE });
        child.kill().unwrap();
        child.wait().unwrap();
        leave_cpus(child.id());
        take_cpus(child.id());
    }

    #[test]
    fn threads_that_run_are_not_gone() {
        assert!(!all_exit(Path::new("/proc/self/task")));
        // What cannot be read is not gone.
        assert!(!all_exit(Path::new("/proc/0/task")));
        let empty = tempfile::tempdir().unwrap();
        assert!(!all_exit(empty.path()));
        std::fs::create_dir(empty.path().join("1")).unwrap();
        std::fs::create_dir(empty.path().join("1/stat")).unwrap();
        assert!(!all_exit(empty.path()), "its state cannot be read");
        assert_eq!(flags("12 (a) b) S 1 2 3 4 5 4194308 0"), Some(4_194_308));
    }

    #[test]
    fn a_process_is_gone_when_its_pidfd_says_so_whatever_is_in_proc() {
        Watched::check().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let watched = Watched::open(child.id()).unwrap().unwrap();
        assert!(!watched.is_gone());
        child.kill().unwrap();
        watched.wait_until_all_exit(|| ());
        while !watched.is_gone() {
            thread::sleep(LOOK_EVERY);
        }
        assert!(all_exit(&tasks(child.id())));
        child.wait().unwrap();
        assert!(watched.is_gone() && !all_exit(&tasks(child.id())));
        assert!(Watched::open(0).unwrap().is_none() && Watched::open(u32::MAX).unwrap().is_none());
    }
}
