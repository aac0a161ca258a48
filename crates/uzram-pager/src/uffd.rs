//! How a touch of memory that is not there reaches the pager, and how pages come and go beneath a running
//! program: userfaultfd(2). Pages are *trapped* or *open*.
//!
//! The program's memory is private and anonymous. A touch of a trapped page sends a message, which the pager
//! reads; it copies the page in (`UFFDIO_COPY`), which wakes the thread that touched it. Or the touch is a
//! signal for the thread, which does the same itself (`sigbus.rs`): everybody may have that, but a touch by a
//! system call fails with EFAULT. Pages are taken by `UFFDIO_MOVE` into memory that the program does not
//! know: from then on nobody can change them. The kernel refuses pages that it transfers data to, and those
//! that a child has too (`EBUSY`).
//!
//! A program may change its memory map by itself. Then the same descriptor tells of that, too, and the kernel
//! refuses to copy and to move pages (`EAGAIN`) from the moment of a change until it was told. The shelves
//! belong to the same descriptor for that reason: through another one, a page could be taken away that was
//! mapped anew a moment ago, and be lost. While a program changes its memory map, some calls here do less
//! than they are asked to, and say what they have done: the caller lets the change pass, and tries again.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP,
    UFFD_FEATURE_EVENT_FORK, UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP,
    UFFD_FEATURE_MOVE, UFFD_FEATURE_POISON, UFFD_FEATURE_SIGBUS, UFFD_FEATURE_THREAD_ID,
    UFFD_PAGEFAULT_FLAG_WRITE, UFFD_USER_MODE_ONLY, UFFDIO_COPY_MODE_DONTWAKE, UFFDIO_REGISTER_MODE_MISSING,
    uffd_msg, uffdio_api, uffdio_copy, uffdio_move, uffdio_poison, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, opcode};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, UserfaultfdFlags, madvise, mprotect, userfaultfd,
};
use uzram::sync::Arc;
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, Page};
use uzram::{Error, ErrorKind, Result};

use crate::MOST_PAGES;
use crate::map::Part;

/// The ioctls of <linux/userfaultfd.h>. linux-raw-sys does not know the last three.
const API: Opcode = UFFDIO_API as Opcode;
const REGISTER: Opcode = UFFDIO_REGISTER as Opcode;
const UNREGISTER: Opcode = UFFDIO_UNREGISTER as Opcode;
const WAKE: Opcode = UFFDIO_WAKE as Opcode;
pub(crate) const COPY: Opcode = UFFDIO_COPY as Opcode;
pub(crate) const MOVE: Opcode = opcode::read_write::<uffdio_move>(0xaa, 0x05);
const POISON: Opcode = opcode::read_write::<uffdio_poison>(0xaa, 0x08);
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
/// `UFFDIO_MOVE_MODE_DONTWAKE`
const MOVE_DONTWAKE: u64 = 1;
/// How long a thread waits before it asks the system again for what it must have.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// How often a call is repeated that fails with EAGAIN: the kernel moves a page, or the memory map changes.
const MOST_RETRIES: usize = 100;
/// Messages that are read at once.
pub(crate) const MESSAGES: usize = 16;

pub(crate) struct Uffd {
    fd: OwnedFd,
    pub(crate) page_table: File,
    pub(crate) tells: Tells,
    /// The address of a page that cannot be read.
    unreadable: usize,
    /// No thread is woken, but by [`Uffd::wake_always`].
    holds: AtomicBool,
}

/// What a descriptor tells of, as features of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Tells {
    /// Nothing: a touch is a SIGBUS. The pager makes all changes of the memory map, and a child has none of
    /// the memory.
    Nothing = UFFD_FEATURE_SIGBUS,
    /// Touches, with the memory map as above.
    Touches = 0,
    /// Changes of the memory map, too, which a program makes. A child has a copy of its memory; of forks it
    /// tells as well if this process has CAP_SYS_PTRACE.
    Changes = UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP,
}

/// A trapped touch: of which page, by its address; whether to write, and by which thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    pub(crate) address: usize,
    pub(crate) writes: bool,
    pub(crate) thread: u32,
}

/// What the kernel tells.
pub(crate) enum Message {
    Touch(Touch),
    /// The contents of a range of addresses are being given back: it reads as zeros from now on.
    Removed(Range<usize>),
    /// A range of addresses is not mapped any more.
    Unmapped(Range<usize>),
    /// What lay in a range of addresses begins at another one.
    Moved(Range<usize>, usize),
    /// A child has a copy of the memory, whose touches this descriptor tells of.
    Forked(OwnedFd),
}

impl Uffd {
    /// Errors: `Permission` or `Unsupported`: there is no userfaultfd for this process, or an old one; `Io`.
    pub(crate) fn new(tells: Tells) -> Result<Uffd> {
        let fd = open(tells)?;
        let page_table = File::open("/proc/self/pagemap")
            .map_err(|error| Error::new(ErrorKind::Unsupported, format!("/proc/self/pagemap: {error}")))
            .map_err(|error| error.with_setting("trap"))?;
        let unreadable = reserve(PAGE_SIZE)?;
        Ok(Uffd { fd, page_table, tells, unreadable, holds: AtomicBool::new(false) })
    }

    /// Opens a descriptor as its own, for a child, which may have fewer rights. Errors: as [`Uffd::new`].
    pub(crate) fn another(&self) -> Result<OwnedFd> {
        open(self.tells)
    }

    /// Has no thread woken from now on, or ends that.
    pub(crate) fn hold_wakes(&self, holds: bool) {
        self.holds.store(holds, Ordering::Relaxed);
    }

    fn holds(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }

    /// Traps touches of mapped memory. Errors: those of `UFFDIO_REGISTER`.
    pub(crate) fn register(&self, range: &Range<usize>) -> rustix::io::Result<()> {
        let range = raw(range);
        let mut register = uffdio_register { range, mode: UFFDIO_REGISTER_MODE_MISSING.into(), ioctls: 0 };
        ioctl::<REGISTER, _>(&self.fd, &mut register)
    }

    /// Returns whether touches of an address are trapped; `None` if that cannot be told now. What is there
    /// stays as it is: a page would be copied that cannot be read, and none is where a huge page lies.
    pub(crate) fn is_registered(&self, address: usize) -> Option<bool> {
        match self.copy_nothing(address) {
            Err(Errno::FAULT | Errno::EXIST) => Some(true),
            Err(Errno::AGAIN | Errno::NOMEM) => None,
            _ => Some(false),
        }
    }

    /// Returns whether the memory map is changing, in a way of which it is not told yet.
    pub(crate) fn is_changing(&self) -> bool {
        self.copy_nothing(0) == Err(Errno::AGAIN)
    }

    fn copy_nothing(&self, to: usize) -> rustix::io::Result<()> {
        ioctl::<COPY, _>(&self.fd, &mut copy_of(self.unreadable, to, PAGE_SIZE))
    }

    /// Hands the messages that there are, up to [`MESSAGES`], to `each`. Errors: `Io`.
    pub(crate) fn read(&self, each: impl FnMut(Message)) -> Result<()> {
        read_from(self.fd.as_fd(), each)
    }

    fn ioctl<const CODE: Opcode, T>(&self, argument: &mut T) -> rustix::io::Result<()> {
        #[cfg(test)]
        if let Some(error) = crate::faults::of_ioctl(CODE == MOVE) {
            return Err(error);
        }
        ioctl::<CODE, T>(&self.fd, argument)
    }

    /// Copies pages to an address, and returns how many, from the first. One that is there already stays as
    /// it is, and counts if it is the `touched`th: others may be about to be emptied.
    pub(crate) fn copy(&self, to: usize, pages: &[Page], touched: usize) -> usize {
        let (mut done, mut retries, mut most) = (0, 0, pages.len());
        let mut missing = None;
        while done < pages.len() {
            let rest = &pages[done..pages.len().min(done + most)];
            let mut copy = copy_of(rest.as_ptr().addr(), to + (done << PAGE_SHIFT), size_of_val(rest));
            copy.mode = if self.holds() { UFFDIO_COPY_MODE_DONTWAKE.into() } else { 0 };
            match self.ioctl::<COPY, _>(&mut copy) {
                Ok(()) => done += rest.len(),
                Err(Errno::AGAIN) if copy.copy > 0 => done += copy.copy as usize >> PAGE_SHIFT,
                Err(Errno::AGAIN) if retries < MOST_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                Err(Errno::AGAIN) => return done,
                Err(Errno::EXIST) if done != touched => return done,
                Err(Errno::EXIST) => {
                    self.wake_at(copy.dst as usize, 1);
                    done += 1;
                }
                // Two mappings: the kernel refuses both together.
                Err(Errno::NOENT) if rest.len() > 1 => most = rest.len().div_ceil(2),
                // If it is just being moved, the next call says so.
                Err(Errno::NOENT) if missing != Some(done) => missing = Some(done),
                // Unmapped meanwhile: nobody waits any more.
                Err(Errno::NOENT) => done += 1,
                Err(Errno::SRCH) => return pages.len(),
                Err(_) => std::thread::sleep(RETRY),
            }
        }
        done
    }

    /// Has a page be there that reads as zeros, if none is. Returns how many, as [`Uffd::copy`].
    pub(crate) fn zero(&self, address: usize) -> usize {
        self.copy(address, &[[0; PAGE_SIZE]], 0)
    }

    /// Moves pages to where none is, and wakes nobody. Returns how many, from the first, and whether the next
    /// one is busy, or a child's, too. What the kernel moves and does not count: docs/internals/pager.md.
    fn move_pages(&self, from: usize, to: usize, pages: usize) -> (usize, bool) {
        let (mut done, mut retries, mut most) = (0, 0, pages);
        while done < pages {
            let count = most.min(pages - done);
            let mut move_ = uffdio_move {
                dst: (to + (done << PAGE_SHIFT)) as u64,
                src: (from + (done << PAGE_SHIFT)) as u64,
                len: (count << PAGE_SHIFT) as u64,
                mode: MOVE_DONTWAKE,
                move_: 0,
            };
            let moved = self.ioctl::<MOVE, _>(&mut move_);
            #[cfg(test)]
            let moved = crate::faults::miscount(moved, count, &mut move_.move_);
            let is_there = |start| self.is_there(start + (done << PAGE_SHIFT));
            match moved {
                Ok(()) => done += count,
                Err(Errno::AGAIN) if move_.move_ > 0 => done += move_.move_ as usize >> PAGE_SHIFT,
                Err(Errno::AGAIN) if retries < MOST_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                // Moved before, and not counted.
                Err(_) if !is_there(from) && is_there(to) => done += 1,
                // Two mappings: the kernel refuses both together.
                Err(Errno::INVAL) if count > 1 => most = count.div_ceil(2),
                // A child has it, too, or had it; or the kernel is at it.
                Err(Errno::BUSY) => return (done, true),
                // Busy, or not there.
                Err(_) => break,
            }
        }
        (done, false)
    }

    /// Returns whether a page is there at an address, in memory or in the system's swap.
    fn is_there(&self, address: usize) -> bool {
        let mut entry = [0; 8];
        let at = (address >> PAGE_SHIFT) * entry.len();
        // Bits 62 and 63 of Documentation/admin-guide/mm/pagemap.rst.
        self.page_table.read_exact_at(&mut entry, at as u64).is_ok() && u64::from_ne_bytes(entry) >> 62 != 0
    }

    /// Has threads touch pages again that found them trapped.
    pub(crate) fn wake_at(&self, address: usize, pages: usize) {
        if !self.holds() && self.tells != Tells::Nothing {
            self.wake_always(address, pages);
        }
    }

    pub(crate) fn wake_always(&self, address: usize, pages: usize) {
        let _ = ioctl::<WAKE, _>(&self.fd, &mut raw(&(address..address + (pages << PAGE_SHIFT))));
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        unmap(Part { address: self.unreadable, first: 0, pages: 1 });
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn raw(range: &Range<usize>) -> uffdio_range {
    uffdio_range { start: range.start as u64, len: range.len() as u64 }
}

fn copy_of(from: usize, to: usize, bytes: usize) -> uffdio_copy {
    uffdio_copy { dst: to as u64, src: from as u64, len: bytes as u64, mode: 0, copy: 0 }
}

pub(crate) fn no_memory(error: Errno) -> Error {
    Error::new(ErrorKind::NoMemory, format!("memory cannot be trapped: {error}"))
}

/// What the core has done to pages.
impl Uffd {
    /// Maps reserved pages, all trapped. A child has a copy of them if a program makes changes, or no memory
    /// there. Errors: `NoMemory`.
    pub(crate) fn map(&self, part: Part) -> Result<()> {
        let (start, bytes) = (with_exposed_provenance_mut(part.address), part.bytes());
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the pages are reserved, and nobody uses them yet.
        let mapped = unsafe {
            // Huge pages would not be trapped page by page. A kernel without them says INVAL.
            let advised = match madvise(start, bytes, Advice::LinuxNoHugepage) {
                Ok(()) | Err(Errno::INVAL) if self.tells == Tells::Changes => Ok(()),
                Ok(()) | Err(Errno::INVAL) => madvise(start, bytes, Advice::LinuxDontFork),
                refused => refused,
            };
            advised.and_then(|()| mprotect(start, bytes, access))
        };
        mapped.and_then(|()| self.register(&part.addresses())).map_err(no_memory)
    }

    /// Takes mapped pages away from the program, whatever is in them. Threads that wait for one fail.
    pub(crate) fn unmap(&self, part: Part) {
        unmap(part);
        // Those that wait touch it again, and fail. UFFDIO_UNREGISTER would wake them before it takes the
        // mapping's lock: a touch between the two waits for ever.
        self.wake_at(part.address, part.pages);
    }

    /// Traps open pages, whose contents stay in memory: on the shelf, from its `nth` place on. Returns how
    /// many, from the first, and whether a child has the next one, too.
    pub(crate) fn take(&self, shelf: &Staging, nth: usize, part: Part) -> (usize, bool) {
        // Nothing is on it yet.
        if nth == 0 && shelf.was_touched.swap(false, Ordering::Acquire) {
            shelf.release();
        }
        let (pages, is_shared) = self.move_pages(part.address, shelf.address(nth, part.pages), part.pages);
        (pages, is_shared && self.tells == Tells::Changes)
    }

    /// Copies a page that a child has, too, so that it can be taken. One that is not there any more may be a
    /// trapped touch of this thread.
    pub(crate) fn make_own(&self, page: Part) {
        // It stays marked as shared until it is written.
        if self.is_there(page.address) {
            let start = std::ptr::without_provenance_mut(page.address);
            // SAFETY: the call changes no contents.
            let _ = unsafe { madvise(start, page.bytes(), Advice::LinuxPopulateWrite) };
        }
    }

    /// Opens a page again that was taken, at the shelf's `nth` place: a copy, as to move it would interrupt
    /// other CPUs; `moves`, if there may be no memory for one: the caller wakes who waits. Waits as
    /// [`Uffd::copy`] does. Returns false if the memory map is changing.
    pub(crate) fn give_back(&self, shelf: &Staging, nth: usize, page: Part, moves: bool) -> bool {
        let from = shelf.address(nth, 1);
        // It may have been moved at the last attempt, and the program has given it back since.
        if moves && (self.move_pages(from, page.address, 1).0 > 0 || !self.is_there(from)) {
            return true;
        }
        // It can be copied even if it cannot be moved.
        self.copy(page.address, std::slice::from_ref(shelf.page(nth)), 0) > 0
    }

    /// Has touches of a trapped page fail: its contents are lost. Returns false if the memory map is
    /// changing.
    pub(crate) fn lose(&self, page: Part) -> bool {
        let mut poison = uffdio_poison { range: raw(&page.addresses()), mode: 0, updated: 0 };
        ioctl::<POISON, _>(&self.fd, &mut poison) != Err(Errno::AGAIN)
    }

    /// Traps pages of a region, whose contents are not needed any more, and gives their memory back, or the
    /// mark that they are lost. Returns false if it cannot: they are as before.
    pub(crate) fn discard(&self, part: Part) -> bool {
        let start = with_exposed_provenance_mut(part.address);
        // SAFETY: the range is mapped, and the program does not need what it holds.
        unsafe { madvise(start, part.bytes(), Advice::LinuxDontNeed) }.is_ok()
    }
}

/// A shelf: memory for `MOST_PAGES` pages, registered, which pages are moved to. A page without access lies
/// on each side, so that the kernel does not join it with other memory.
pub(crate) struct Staging {
    uffd: Arc<Uffd>,
    part: Part,
    /// Something else has touched pages that were not there.
    was_touched: AtomicBool,
    /// How many of its pages the program has again, too.
    pub(crate) reopened: AtomicU64,
}

impl Staging {
    /// Errors: `NoMemory`.
    pub(crate) fn new(uffd: &Arc<Uffd>) -> Result<Staging> {
        let address = reserve((MOST_PAGES + 2) << PAGE_SHIFT)? + PAGE_SIZE;
        let part = Part { address, first: 0, pages: MOST_PAGES };
        let staging = Staging {
            uffd: Arc::clone(uffd),
            part,
            was_touched: AtomicBool::new(false),
            reopened: AtomicU64::new(0),
        };
        uffd.map(part)?;
        Ok(staging)
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.part.addresses()
    }

    /// Notes that a page was touched, if the address is here.
    pub(crate) fn touched(&self, address: usize) {
        if self.range().contains(&address) {
            self.was_touched.store(true, Ordering::Release);
        }
    }

    fn address(&self, nth: usize, pages: usize) -> usize {
        assert!(nth + pages <= MOST_PAGES);
        self.part.address + (nth << PAGE_SHIFT)
    }

    /// Returns a page that was taken. Callers read those that were moved here alone: others are not there.
    pub(crate) fn page(&self, nth: usize) -> &Page {
        // SAFETY: inside the mapping.
        unsafe { &*std::ptr::with_exposed_provenance(self.address(nth, 1)) }
    }

    /// Has nothing be told of changes here: that would wait until the message is read.
    fn unregister(&self) {
        let is_told = self.uffd.tells == Tells::Changes;
        while is_told && ioctl::<UNREGISTER, _>(&self.uffd.fd, &mut raw(&self.range())).is_err() {
            std::thread::sleep(RETRY);
        }
    }

    /// Gives the memory of all pages back: none may be here when others are moved here.
    pub(crate) fn release(&self) {
        let (start, bytes) = (with_exposed_provenance_mut(self.part.address), self.part.bytes());
        self.unregister();
        // SAFETY: the pages were moved here and are not needed any more.
        while unsafe { madvise(start, bytes, Advice::LinuxDontNeed) }.is_err() {
            // SAFETY: as above. The program may have locked all memory (mlockall(2)).
            let _ = unsafe { libc::munlock(start.cast_const(), bytes) };
            std::thread::sleep(RETRY);
        }
        while self.uffd.tells == Tells::Changes && self.uffd.register(&self.range()).is_err() {
            std::thread::sleep(RETRY);
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.unregister();
        unmap(Part { address: self.part.address - PAGE_SIZE, first: 0, pages: MOST_PAGES + 2 });
    }
}

/// As [`Uffd::read`], also from another process's descriptor.
pub(crate) fn read_from(fd: BorrowedFd<'_>, mut each: impl FnMut(Message)) -> Result<()> {
    let mut messages = [[0u8; size_of::<uffd_msg>()]; MESSAGES];
    let read = match rustix::io::read(fd, messages.as_flattened_mut()) {
        Err(Errno::INTR | Errno::AGAIN) => return Ok(()),
        read => read.map_err(|error| Error::new(ErrorKind::Io, format!("userfaultfd: {error}")))?,
    };
    let range = |start: u64, end: u64| start as usize..end as usize;
    for message in &messages[..read / size_of::<uffd_msg>()] {
        // SAFETY: the kernel wrote a message, whose fields are integers.
        let uffd_msg { event, arg, .. } = unsafe { std::ptr::read_unaligned(message.as_ptr().cast()) };
        // SAFETY: the event says which of the kinds the message is of.
        each(unsafe {
            match u32::from(event) {
                UFFD_EVENT_PAGEFAULT => Message::Touch(Touch {
                    address: arg.pagefault.address as usize & !(PAGE_SIZE - 1),
                    writes: arg.pagefault.flags & u64::from(UFFD_PAGEFAULT_FLAG_WRITE) != 0,
                    thread: arg.pagefault.feat.ptid,
                }),
                UFFD_EVENT_REMOVE => Message::Removed(range(arg.remove.start, arg.remove.end)),
                UFFD_EVENT_UNMAP => Message::Unmapped(range(arg.remove.start, arg.remove.end)),
                UFFD_EVENT_REMAP => {
                    let from = range(arg.remap.from, arg.remap.from + arg.remap.len);
                    Message::Moved(from, arg.remap.to as usize)
                }
                UFFD_EVENT_FORK => Message::Forked(OwnedFd::from_raw_fd(arg.fork.ufd.cast_signed())),
                _ => continue,
            }
        });
    }
    Ok(())
}

/// Copies a page to memory of another process, whose descriptor this is; what is there already stays. Returns
/// false if that is changing its memory map: the descriptor tells how.
pub(crate) fn copy_to(fd: &OwnedFd, address: usize, page: &Page) -> bool {
    let mut copy = copy_of(page.as_ptr().addr(), address, PAGE_SIZE);
    loop {
        match ioctl::<COPY, _>(fd, &mut copy) {
            Err(Errno::NOMEM) => std::thread::sleep(RETRY),
            copied => return copied != Err(Errno::AGAIN),
        }
    }
}

/// Opens a descriptor that traps the touches of system calls, too, if it tells of any.
fn open(tells: Tells) -> Result<OwnedFd> {
    let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    let mut what = "this process may not use userfaultfd for system calls: it needs root, CAP_SYS_PTRACE, access \
                    to /dev/userfaultfd, or the sysctl vm.unprivileged_userfaultfd=1";
    if tells == Tells::Nothing {
        flags |= UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        what = "userfaultfd is refused to this process: by its seccomp profile, or a kernel without it; where a \
                profile does, access to /dev/userfaultfd is enough (docker run --device /dev/userfaultfd)";
    }
    #[cfg(test)]
    if crate::faults::IS_EMULATED.load(Ordering::Relaxed) {
        return crate::system::new_eventfd();
    }
    // SAFETY: the descriptor affects only memory that is registered with it.
    let fd = match unsafe { userfaultfd(flags) } {
        Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => {
            open_device().ok_or_else(|| Error::new(ErrorKind::Permission, what).with_setting("trap"))
        }
        fd => fd.map_err(|error| Error::new(ErrorKind::Unsupported, format!("userfaultfd: {error}"))),
    }?;
    let api = |more: u32| {
        let features = UFFD_FEATURE_MOVE | UFFD_FEATURE_POISON | UFFD_FEATURE_THREAD_ID | tells as u32 | more;
        ioctl::<API, _>(&fd, &mut uffdio_api { api: UFFD_API.into(), features: features.into(), ioctls: 0 })
    };
    let forks = if tells == Tells::Changes { UFFD_FEATURE_EVENT_FORK } else { 0 };
    // One that fails changes nothing.
    api(forks).or_else(|_| api(0)).map_err(|error| {
        let what = format!("this kernel's userfaultfd cannot move pages, which takes Linux 6.8: {error}");
        Error::new(ErrorKind::Unsupported, what).with_setting("trap")
    })?;
    Ok(fd)
}

/// Opens a descriptor through /dev/userfaultfd (Linux 6.1), whose permissions say who may.
fn open_device() -> Option<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").ok()?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes flags, and returns a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    // SAFETY: a new descriptor, which nobody else has.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn ioctl<const CODE: Opcode, T>(fd: &OwnedFd, argument: &mut T) -> rustix::io::Result<()> {
    #[cfg(test)]
    if crate::faults::IS_EMULATED.load(Ordering::Relaxed) {
        crate::faults::emulate(CODE, argument);
        return Ok(());
    }
    // SAFETY: each code goes with its struct. The kernel changes that, and memory that is registered.
    unsafe { rustix::ioctl::ioctl(fd.as_fd(), Updater::<CODE, T>::new(argument)) }
}

/// Reserves addresses for so many bytes, without access. Errors: `NoMemory`.
pub(crate) fn reserve(bytes: usize) -> Result<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
    let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
    let refused = |error| {
        Error::new(ErrorKind::NoMemory, format!("the system refused {bytes} bytes of memory: {error}"))
    };
    start.map(|start| start.expose_provenance()).map_err(refused)
}

/// Unmaps memory that this module has mapped, and that nobody uses any more.
pub(crate) fn unmap(part: Part) {
    // SAFETY: as said.
    let unmapped = unsafe { rustix::mm::munmap(with_exposed_provenance_mut(part.address), part.bytes()) };
    debug_assert!(unmapped.is_ok(), "{unmapped:?}");
}
