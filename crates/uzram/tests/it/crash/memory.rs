//! What outlives a process: a store's memory and its backing device, a journal of what its pages hold; and
//! the processes themselves.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{MapFlags, ProtFlags};
use uzram::Error;
use uzram::backing::{Backing, Blocks, Buffer, Direction, Done, Tiers, Transfer};
use uzram::store::{BackingOptions, Store, StoreBuilder};

use super::Model;

const BACKING_BYTES: u64 = 2 << 20;
/// The words of the superblock with the lengths of the regions before the arena, which are aligned.
const LENGTHS_BEFORE_ARENA: std::ops::Range<u64> = 5..9;
const REGION_ALIGN_BYTES: u64 = 2 << 20;
/// The exit status after [`exit_after`].
pub const LATE: i32 = 43;

/// The memory of a store whose process may be dead.
pub struct Survivor {
    memory: OwnedFd,
    backing: Option<OwnedFd>,
}

impl Survivor {
    /// A store, and what is left of it once it is dropped.
    pub fn create(builder: StoreBuilder, has_backing: bool) -> (Survivor, Store) {
        let backing = has_backing.then(|| {
            let fd = rustix::fs::memfd_create("backing", MemfdFlags::empty()).unwrap();
            rustix::fs::ftruncate(&fd, BACKING_BYTES).unwrap();
            fd
        });
        let builder = match &backing {
            None => builder,
            Some(fd) => builder.backing(BackingOptions::packed(tiers(fd))),
        };
        let store = Store::create_in(&builder).unwrap();
        let memory = store.memory().unwrap().as_fd().try_clone_to_owned().unwrap();
        (Survivor { memory, backing }, store)
    }

    pub fn memory(&self) -> OwnedFd {
        self.memory.try_clone().unwrap()
    }

    pub fn backing(&self) -> Option<Arc<Tiers>> {
        self.backing.as_ref().map(tiers)
    }

    pub fn data(&self) -> Vec<std::ops::Range<u64>> {
        let (mut ranges, mut at) = (Vec::new(), 0);
        while let Ok(start) = rustix::fs::seek(&self.memory, SeekFrom::Data(at)) {
            at = rustix::fs::seek(&self.memory, SeekFrom::Hole(start)).unwrap();
            ranges.push(start..at);
        }
        ranges
    }

    /// The number of pages of the arena that have memory. It is the last region (`store/survive/layout.rs`).
    pub fn arena_pages(&self) -> u64 {
        let word = |at: u64| {
            let mut word = [0; 8];
            assert_eq!(rustix::io::pread(&self.memory, &mut word, at * 8).unwrap(), 8);
            u64::from_le_bytes(word)
        };
        let before: u64 = LENGTHS_BEFORE_ARENA.map(|at| word(at).next_multiple_of(REGION_ALIGN_BYTES)).sum();
        let (start, page_bytes) = (super::SLOTS_AT + before, super::PAGE_SIZE as u64);
        let pages =
            |range: std::ops::Range<u64>| range.end.saturating_sub(range.start.max(start)) / page_bytes;
        self.data().into_iter().map(pages).sum()
    }

    pub fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        assert_eq!(rustix::io::pread(&self.memory, &mut byte, at).unwrap(), 1);
        byte[0]
    }

    pub fn flip(&self, at: u64, bits: u8) {
        assert_eq!(rustix::io::pwrite(&self.memory, &[self.byte(at) ^ bits], at).unwrap(), 1);
    }

    pub fn copy(&self) -> Survivor {
        Survivor { memory: copy(&self.memory), backing: self.backing.as_ref().map(copy) }
    }
}

fn copy(of: &OwnedFd) -> OwnedFd {
    let len = rustix::fs::fstat(of).unwrap().st_size as u64;
    let to = rustix::fs::memfd_create("uzram-copy", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&to, len).unwrap();
    let mut at = 0;
    while let Ok(mut from) = rustix::fs::seek(of, SeekFrom::Data(at)) {
        at = rustix::fs::seek(of, SeekFrom::Hole(from)).unwrap();
        rustix::fs::seek(&to, SeekFrom::Start(from)).unwrap();
        while from < at {
            let left = (at - from) as usize;
            rustix::fs::sendfile(&to, of, Some(&mut from), left).unwrap();
        }
    }
    rustix::fs::fcntl_add_seals(&to, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    to
}

/// A backing device in memory, which outlives the process as a device does.
struct MemoryBacking(OwnedFd);

fn tiers(fd: &OwnedFd) -> Arc<Tiers> {
    Backing::Blocks(Arc::new(MemoryBacking(fd.try_clone().unwrap()))).into()
}

impl Blocks for MemoryBacking {
    fn len_bytes(&self) -> u64 {
        BACKING_BYTES
    }

    fn block_bytes(&self) -> usize {
        4096
    }

    fn start(&self, transfer: Transfer) {
        let fd = self.0.try_clone().unwrap();
        std::thread::spawn(move || {
            let Transfer { direction, offset, len_bytes, mut buffer, token, completion, .. } = transfer;
            let result = copy_part(&fd, direction, offset, &mut buffer[..len_bytes]);
            completion.done(token, buffer, result);
        });
    }

    fn carry_out(&self, direction: Direction, offset: u64, len_bytes: usize, mut buffer: Buffer) -> Done {
        let result = copy_part(&self.0, direction, offset, &mut buffer[..len_bytes]);
        (buffer, result)
    }

    fn discard(&self, _: u64, _: u64) {}
}

fn copy_part(fd: &OwnedFd, direction: Direction, offset: u64, part: &mut [u8]) -> uzram::Result<()> {
    let len_bytes = part.len();
    let done = match direction {
        Direction::Read => rustix::io::pread(fd, part, offset),
        Direction::Write => rustix::io::pwrite(fd, part, offset),
    };
    match done {
        Ok(len) if len == len_bytes => Ok(()),
        other => Err(Error::new(uzram::ErrorKind::Io, format!("{other:?}"))),
    }
}

/// What each page holds, and what it is to hold while that is being changed, by numbers; in memory that
/// children share.
pub struct Journal(&'static [(AtomicU64, AtomicU64)]);

impl Journal {
    pub fn new(pages: u32) -> Self {
        let bytes = pages as usize * size_of::<(AtomicU64, AtomicU64)>();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping; zeros are atomic integers; it is never unmapped.
        Journal(unsafe {
            let start = rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags).unwrap();
            std::slice::from_raw_parts(start.cast(), pages as usize)
        })
    }

    fn of(&self, page: u32) -> &(AtomicU64, AtomicU64) {
        &self.0[page as usize]
    }

    /// A page holds the contents of that number; 0 for none.
    pub fn set(&self, page: u32, number: u64) {
        self.of(page).0.store(number, SeqCst);
        self.of(page).1.store(0, SeqCst);
    }

    pub fn held(&self, page: u32) -> u64 {
        self.of(page).0.load(SeqCst)
    }

    /// It is about to hold others, and then does.
    pub fn change(&self, page: u32, number: u64, change: impl FnOnce()) {
        self.of(page).1.store(number + 1, SeqCst);
        change();
        self.set(page, number);
    }

    /// What pages hold if none of the changes under way was made, and if all were.
    pub fn models(&self) -> (Model, Model) {
        let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
        for (page, (held, pending)) in (0..).zip(self.0) {
            let (held, pending) = (held.load(SeqCst), pending.load(SeqCst));
            before.insert(page, held);
            after.insert(page, if pending == 0 { held } else { pending - 1 });
        }
        (before, after)
    }

    /// Ends the changes that were under way when their process died, by looking at what a page holds.
    pub fn settle(&self, holds: impl Fn(u32, u64) -> bool) {
        for (page, (held, pending)) in (0..).zip(self.0) {
            let pending = pending.load(SeqCst);
            if pending > 0 && holds(page, pending - 1) {
                held.store(pending - 1, SeqCst);
            }
            self.set(page, held.load(SeqCst));
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `new`, and nobody has a reference any more: it is borrowed from this
        // value.
        unsafe { rustix::mm::munmap(self.0.as_ptr().cast_mut().cast(), size_of_val(self.0)) }.unwrap();
    }
}

fn told() -> &'static AtomicU64 {
    static TOLD: std::sync::OnceLock<Journal> = std::sync::OnceLock::new();
    &TOLD.get_or_init(|| Journal::new(1)).0[0].0
}

pub fn report(number: u64) {
    told().store(number, SeqCst);
}

/// Has this process exit with [`LATE`] after some time.
pub fn exit_after(time: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(time);
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(LATE) };
    });
}

pub fn start_child(child: impl FnOnce()) -> i32 {
    told().store(0, SeqCst);
    // SAFETY: no other thread of this program is doing anything (`alone`).
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid > 0 {
        return pid;
    }
    // It ends with the test program.
    // SAFETY: numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
    // SAFETY: it ends the process at once.
    unsafe { libc::_exit(if done.is_ok() { 0 } else { 1 }) }
}

/// Waits until a child has stopped itself, and returns `None`, or has ended, and returns its status as
/// [`in_child`] does; with what it reported last.
pub fn wait_for_stop(pid: i32) -> (Option<i32>, u64) {
    (wait(pid, libc::WUNTRACED), told().load(SeqCst))
}

pub fn resume(pid: i32) {
    // SAFETY: numbers only; the child was not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
}

/// Runs `child` in a process of its own; returns its exit status, or less than 0 for a signal, and what it
/// reported.
pub fn in_child(child: impl FnOnce()) -> (i32, u64) {
    let pid = start_child(child);
    (wait(pid, 0).unwrap(), told().load(SeqCst))
}

/// Kills a child after some time, and returns its status as [`in_child`] does.
pub fn kill_after(pid: i32, time: Duration) -> i32 {
    std::thread::sleep(time);
    // SAFETY: numbers only; the child was not waited for yet.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait(pid, 0).unwrap()
}

fn wait(pid: i32, options: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: the process is this one's child, and `status` is valid.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, options) }, pid);
    match status {
        _ if libc::WIFSTOPPED(status) => None,
        _ if libc::WIFEXITED(status) => Some(libc::WEXITSTATUS(status)),
        _ => Some(-libc::WTERMSIG(status)),
    }
}
