//! Touches trapped by userfaultfd(2).
//!
//! The program's memory is private and anonymous. A touch of a page that is not there sends a message, which
//! one of the pager's threads reads; it copies the page in (`UFFDIO_COPY`), which wakes the thread that
//! touched it.
//!
//! Pages are taken by `UFFDIO_MOVE` (Linux 6.8) into memory that the program does not know: from then on
//! nobody can change them. The kernel refuses pages that it transfers data to, and those that a child has too
//! (`EBUSY`).
//!
//! Some kernels move pages and do not count them ([`Uffd::move_pages`]). So that those can be told, pages are
//! only moved to where none is.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_FEATURE_MOVE, UFFD_FEATURE_POISON, UFFD_FEATURE_THREAD_ID,
    UFFD_PAGEFAULT_FLAG_WRITE, UFFDIO_COPY_MODE_DONTWAKE, UFFDIO_REGISTER_MODE_MISSING, uffd_msg, uffdio_api,
    uffdio_copy, uffdio_move, uffdio_poison, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_WAKE};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, UserfaultfdFlags, userfaultfd};
use uzram::sync::Arc;
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, Page};
use uzram::{Error, ErrorKind, Result};

use super::{Children, MOST_PAGES, RETRY, Run, Space, Trap, advise};
use crate::areas::Protection;
use crate::gate::Gate;

/// The ioctls of <linux/userfaultfd.h>. linux-raw-sys does not know the last two.
const API: Opcode = UFFDIO_API as Opcode;
const REGISTER: Opcode = UFFDIO_REGISTER as Opcode;
const WAKE: Opcode = UFFDIO_WAKE as Opcode;
const COPY: Opcode = UFFDIO_COPY as Opcode;
const GROUP: u8 = 0xaa;
const MOVE: Opcode = opcode::read_write::<uffdio_move>(GROUP, 0x05);
/// `UFFDIO_MOVE_MODE_DONTWAKE`
const MOVE_DONTWAKE: u64 = 1;
const POISON: Opcode = opcode::read_write::<uffdio_poison>(GROUP, 0x08);
/// `MADV_POPULATE_WRITE` of <asm-generic/mman-common.h>, Linux 5.14. rustix has it for aligned ranges only.
const POPULATE_WRITE: i32 = 23;

/// How often a call is repeated that fails with EAGAIN without having done a part: the process's memory map
/// is changing.
const MOST_RETRIES: usize = 10_000;
/// Messages that a thread reads at once.
const MESSAGES: usize = 16;

/// See the [module's documentation](self).
pub(crate) struct Uffd {
    fd: OwnedFd,
    space: Arc<Space>,
    children: Children,
    /// A page that is never there, for [`Uffd::send_message`].
    signal: Staging,
    /// Closed while the process forks: no thread is woken then, except by [`Uffd::wake_forker`].
    pub(crate) gate: Gate,
}

/// A trapped touch.
pub(crate) struct Touch {
    pub(crate) address: usize,
    pub(crate) writes: bool,
    /// The thread that touched.
    pub(crate) thread: u32,
}

impl Uffd {
    /// Returns the trap for a range of address space. Errors: `Permission` or `Unsupported`: the system has
    /// no userfaultfd for this process, or an old one. `NoMemory`.
    pub(crate) fn new(space: Arc<Space>, children: Children) -> Result<Uffd> {
        let fd = match children {
            Children::Exclude => open()?,
            Children::Inherit => crate::high::keep(open()?),
        };
        let signal = Staging::new(&fd, children)?;
        Ok(Uffd { fd, space, children, signal, gate: Gate::new() })
    }

    /// Has the thread that forks touch a page again.
    pub(crate) fn wake_forker(&self, page: u64) {
        self.wake_always(self.space.address(page).addr(), PAGE_SIZE);
    }

    /// Has all threads touch again what they found trapped.
    pub(crate) fn retry_all(&self) {
        self.wake_always(self.space.start(), self.space.len_bytes());
    }

    /// Goes on in a child, by a descriptor of its own. All that was registered must be registered again.
    /// Errors: `Permission` or `Unsupported`: the child may not use userfaultfd.
    pub(crate) fn renew(&self) -> Result<()> {
        let new = open()?;
        // The number stays, so that nothing has to be told.
        // SAFETY: both are open; the old one is that of the parent, which this process does not use.
        let renewed =
            unsafe { libc::syscall(libc::SYS_dup3, new.as_raw_fd(), self.fd.as_raw_fd(), libc::O_CLOEXEC) };
        if renewed < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::new(ErrorKind::NoMemory, format!("userfaultfd: {error}")));
        }
        self.signal.register(&self.fd)
    }

    /// Has nothing trapped any more, in a child that cannot go on. What is not in memory reads as zeros from
    /// now on.
    pub(crate) fn give_up(&self) {
        // SAFETY: the number is not used any more: the pager has stopped for good.
        crate::high::close(unsafe { OwnedFd::from_raw_fd(self.fd.as_raw_fd()) });
    }

    /// Registers a shelf in a child. Errors: `NoMemory`.
    pub(crate) fn renew_shelf(&self, shelf: &Staging) -> Result<()> {
        shelf.register(&self.fd)
    }

    /// Maps pages that a program may access so, all trapped. Whatever was mapped there is gone. Errors:
    /// `NoMemory`.
    pub(crate) fn map_as(&self, run: Run, protection: Protection) -> Result<()> {
        self.space.map(run, protection, self.children)?;
        self.register(run)
    }

    /// Traps the touches of mapped pages that are not in memory. Errors: `NoMemory`.
    pub(crate) fn register(&self, run: Run) -> Result<()> {
        register(&self.fd, self.space.address(run.first).addr(), run.bytes())
    }

    /// Waits for touches, and hands them to `touched`. Errors: `Io`: the descriptor cannot be read.
    pub(crate) fn wait(&self, mut touched: impl FnMut(Touch)) -> Result<()> {
        let mut messages = [[0u8; size_of::<uffd_msg>()]; MESSAGES];
        let read = loop {
            match rustix::io::read(&self.fd, messages.as_flattened_mut()) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                read => break read,
            }
        };
        let read = read.map_err(|error| Error::new(ErrorKind::Io, format!("userfaultfd: {error}")))?;
        for message in &messages[..read / size_of::<uffd_msg>()] {
            // SAFETY: the kernel wrote a message, whose fields are integers.
            let message: uffd_msg = unsafe { std::ptr::read_unaligned(message.as_ptr().cast()) };
            if u32::from(message.event) == UFFD_EVENT_PAGEFAULT {
                // SAFETY: the event says that this is the message's kind.
                let fault = unsafe { message.arg.pagefault };
                let writes = fault.flags & u64::from(UFFD_PAGEFAULT_FLAG_WRITE) != 0;
                // SAFETY: the kernel fills it in, as it was asked to; otherwise it is 0.
                let thread = unsafe { fault.feat.ptid };
                touched(Touch { address: fault.address as usize, writes, thread });
            }
        }
        Ok(())
    }

    /// Sends a message to one thread in [`Uffd::wait`], and waits until it calls [`Uffd::take_message`].
    pub(crate) fn send_message(&self) {
        let page = self.signal.start.as_ptr();
        // SAFETY: the page is mapped, and readable as soon as it is placed.
        unsafe { page.read_volatile() };
        self.signal.release();
    }

    /// Returns whether a touch was that of [`Uffd::send_message`], and lets it return.
    pub(crate) fn take_message(&self, touch: &Touch) -> bool {
        let start = self.signal.start.as_ptr().addr();
        let is_message = (start..start + PAGE_SIZE).contains(&touch.address);
        if is_message {
            let _ = self.copy(start, &[[0; PAGE_SIZE]]);
        }
        is_message
    }

    fn ioctl<const CODE: Opcode, T>(&self, argument: &mut T) -> rustix::io::Result<()> {
        #[cfg(test)]
        if let Some(error) = crate::faults::of_ioctl(CODE == MOVE) {
            return Err(error);
        }
        ioctl::<CODE, T>(&self.fd, argument)
    }

    /// Copies pages to an address. Pages that are there already stay as they are.
    fn copy(&self, to: usize, pages: &[Page]) -> Result<()> {
        let (mut done, mut retries, mut most) = (0, 0, pages.len());
        while done < pages.len() {
            let rest = &pages[done..pages.len().min(done + most)];
            let mut copy = uffdio_copy {
                dst: (to + (done << PAGE_SHIFT)) as u64,
                src: rest.as_ptr().addr() as u64,
                len: (rest.len() << PAGE_SHIFT) as u64,
                mode: if self.gate.is_open() { 0 } else { UFFDIO_COPY_MODE_DONTWAKE.into() },
                copy: 0,
            };
            match self.ioctl::<COPY, _>(&mut copy) {
                Ok(()) => done += rest.len(),
                Err(Errno::AGAIN) if copy.copy > 0 => done += copy.copy as usize >> PAGE_SHIFT,
                Err(Errno::AGAIN) if retries < MOST_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                Err(Errno::EXIST) => {
                    self.wake(copy.dst as usize, 1);
                    done += 1;
                }
                // Two mappings: the kernel refuses both together.
                Err(Errno::NOENT) if rest.len() > 1 => most = rest.len().div_ceil(2),
                // Unmapped meanwhile: nobody waits any more.
                Err(Errno::NOENT) => done += 1,
                Err(Errno::SRCH) => return Ok(()),
                Err(error) => {
                    return Err(Error::new(ErrorKind::NoMemory, format!("UFFDIO_COPY: {error}")));
                }
            }
        }
        Ok(())
    }

    /// Moves pages to where none is; returns how many were moved, from the first.
    ///
    /// Linux 6.18 (6.18.44, measured), which moves neighbours together, does not count those that it moves
    /// after it had to wait for one, for example because compaction was moving it, too. The next call then
    /// fails with EEXIST, as the page is there already. Whoever took it for a page that stayed would lose it.
    fn move_pages(&self, from: usize, to: usize, pages: usize) -> usize {
        let (mut done, mut retries, mut most) = (0, 0, pages);
        // The page that was made this process's own last.
        let mut own = None;
        while done < pages {
            let count = most.min(pages - done);
            let mut move_ = uffdio_move {
                dst: (to + (done << PAGE_SHIFT)) as u64,
                src: (from + (done << PAGE_SHIFT)) as u64,
                len: (count << PAGE_SHIFT) as u64,
                // A thread that forks must not go on before the page's state has ended: the child would have
                // it half done for ever.
                mode: if self.gate.is_open() { 0 } else { MOVE_DONTWAKE },
                move_: 0,
            };
            let moved = self.ioctl::<MOVE, _>(&mut move_);
            #[cfg(test)]
            let moved = crate::faults::miscount(moved, count, &mut move_.move_);
            match moved {
                Ok(()) => done += count,
                Err(Errno::AGAIN) if move_.move_ > 0 => done += move_.move_ as usize >> PAGE_SHIFT,
                Err(Errno::AGAIN) if retries < MOST_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                // Moved before, and not counted.
                Err(_) if !is_there(from + (done << PAGE_SHIFT)) && is_there(to + (done << PAGE_SHIFT)) => {
                    done += 1;
                }
                // Two mappings: the kernel refuses both together.
                Err(Errno::INVAL) if count > 1 => most = count.div_ceil(2),
                // A child has it, too, or had it.
                Err(Errno::BUSY) if self.children == Children::Inherit && own != Some(done) => {
                    own = Some(done);
                    make_own(from + (done << PAGE_SHIFT), pages - done);
                }
                // Busy, or not there.
                Err(_) => return done,
            }
        }
        done
    }

    /// Has threads go on that wait for pages, unless the process forks: then they are woken when it has.
    fn wake(&self, address: usize, pages: usize) {
        if self.gate.is_open() {
            self.wake_always(address, pages << PAGE_SHIFT);
        }
    }

    fn wake_always(&self, address: usize, len_bytes: usize) {
        let mut range = uffdio_range { start: address as u64, len: len_bytes as u64 };
        let _ = ioctl::<WAKE, _>(&self.fd, &mut range);
    }
}

impl Trap for Uffd {
    type Shelf = Staging;

    fn shelf(&self) -> Result<Staging> {
        Staging::new(&self.fd, self.children)
    }

    fn map(&self, run: Run) -> Result<()> {
        self.map_as(run, Protection::READ_WRITE)
    }

    fn unmap(&self, run: Run) {
        self.space.reserve_again(run);
        // Those that wait touch it again, and fail. UFFDIO_UNREGISTER would wake them before it takes the
        // mapping's lock: a touch between the two waits for ever.
        self.wake(self.space.address(run.first).addr(), run.pages);
    }

    fn place(&self, contents: &[Page], run: Run) -> Result<()> {
        self.copy(self.space.address(run.first).addr(), contents)
    }

    fn take(&self, shelf: &Staging, nth: usize, run: Run) -> usize {
        let to = shelf.pages(nth, run.pages).as_ptr().addr();
        self.move_pages(self.space.address(run.first).addr(), to, run.pages)
    }

    fn read<'a>(&self, shelf: &'a Staging, nth: usize, run: Run, _: &'a mut [Page]) -> Option<&'a [Page]> {
        Some(shelf.pages(nth, run.pages))
    }

    fn give_back(&self, shelf: &Staging, nth: usize, run: Run) {
        let pages = shelf.pages(nth, run.pages);
        let (from, to) = (pages.as_ptr().addr(), self.space.address(run.first).addr());
        let mut done = 0;
        while done < run.pages {
            let offset = done << PAGE_SHIFT;
            done += match self.move_pages(from + offset, to + offset, run.pages - done) {
                0 => {
                    // It can be copied even if it cannot be moved. The copy stays until the shelf is
                    // released.
                    while self.copy(to + offset, &pages[done..=done]).is_err() {
                        std::thread::sleep(RETRY);
                    }
                    1
                }
                moved => moved,
            };
        }
        self.wake(to, run.pages);
    }

    fn release(&self, shelf: &Staging, _: impl Iterator<Item = Run>) {
        shelf.release();
    }

    fn lose(&self, page: u64) {
        let range = uffdio_range { start: self.space.address(page).addr() as u64, len: PAGE_SIZE as u64 };
        let mut poison = uffdio_poison { range, mode: 0, updated: 0 };
        let _ = ioctl::<POISON, _>(&self.fd, &mut poison);
    }

    fn forget(&self, _: u64) {
        // It stays on the shelf until that is released.
    }

    fn discard(&self, run: Run) -> bool {
        // SAFETY: the range is mapped, and the program does not need what it holds.
        unsafe {
            rustix::mm::madvise(self.space.address(run.first).cast(), run.bytes(), Advice::LinuxDontNeed)
        }
        .is_ok()
    }

    fn find(&self, page: u64) {
        // It holds nothing but the mark of the poison.
        self.discard(Run::new(page, 1));
    }

    fn space(&self) -> &Space {
        &self.space
    }

    fn retry(&self, page: u64) {
        self.wake(self.space.address(page).addr(), 1);
    }
}

/// Memory for [`MOST_PAGES`] pages, registered, which pages are moved to.
pub(crate) struct Staging {
    start: NonNull<u8>,
}

// SAFETY: an address range belongs to no thread.
unsafe impl Send for Staging {}
// SAFETY: as for `Send`.
unsafe impl Sync for Staging {}

impl Staging {
    const BYTES: usize = MOST_PAGES << PAGE_SHIFT;

    fn new(fd: &OwnedFd, children: Children) -> Result<Staging> {
        let refused =
            |error: Errno| Error::new(ErrorKind::NoMemory, format!("no memory to move pages to: {error}"));
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), Staging::BYTES, protection, flags) };
        let start = NonNull::new(start.map_err(refused)?.cast()).ok_or_else(|| refused(Errno::NOMEM))?;
        let staging = Staging { start };
        advise(start.as_ptr(), Staging::BYTES, children)?;
        staging.register(fd)?;
        Ok(staging)
    }

    fn register(&self, fd: &OwnedFd) -> Result<()> {
        register(fd, self.start.as_ptr().addr(), Staging::BYTES)
    }

    /// Returns pages. Callers read those that were moved here alone: others are not there.
    fn pages(&self, nth: usize, pages: usize) -> &[Page] {
        assert!(nth + pages <= MOST_PAGES);
        // SAFETY: inside the mapping.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<Page>().add(nth), pages) }
    }

    /// Gives the memory of all pages back. Waits for as long as the system refuses: none may be here when
    /// others are moved here.
    fn release(&self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: this is the mapping, whose pages were moved here and are not needed any more.
        while unsafe { rustix::mm::madvise(start, Staging::BYTES, Advice::LinuxDontNeed) }.is_err() {
            std::thread::sleep(RETRY);
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), Staging::BYTES) };
    }
}

/// Has pages that a child has, too, copied, up to the first that is not in memory. A page that a child had
/// stays marked as shared until it is written.
fn make_own(address: usize, pages: usize) {
    let there = (0..pages).take_while(|nth| is_there(address + (nth << PAGE_SHIFT))).count();
    // SAFETY: the call changes no contents. Pages that are there are not trapped, so that it does not wait
    // for this thread itself.
    let _ = unsafe {
        libc::madvise(std::ptr::without_provenance_mut(address), there << PAGE_SHIFT, POPULATE_WRITE)
    };
}

/// Returns whether a page is in memory at an address.
fn is_there(address: usize) -> bool {
    let mut is_there = 0u8;
    // SAFETY: the call asks about a page, whose answer is a byte.
    let asked =
        unsafe { libc::mincore(std::ptr::without_provenance_mut(address), PAGE_SIZE, &raw mut is_there) };
    asked == 0 && is_there & 1 != 0
}

/// Opens a descriptor that traps the touches of system calls too.
fn open() -> Result<OwnedFd> {
    // SAFETY: the descriptor affects only memory that is registered with it.
    let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) };
    let fd = match fd {
        Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => open_device().ok_or_else(|| {
            let what = "this process may not use userfaultfd for system calls: it needs root, CAP_SYS_PTRACE, \
                        access to /dev/userfaultfd, or the sysctl vm.unprivileged_userfaultfd=1";
            Error::new(ErrorKind::Permission, what).with_setting("trap")
        })?,
        fd => fd.map_err(|error| Error::new(ErrorKind::Unsupported, format!("userfaultfd: {error}")))?,
    };
    let features = u64::from(UFFD_FEATURE_MOVE | UFFD_FEATURE_POISON | UFFD_FEATURE_THREAD_ID);
    let mut api = uffdio_api { api: UFFD_API.into(), features, ioctls: 0 };
    ioctl::<API, _>(&fd, &mut api).map_err(|error| {
        let what = format!("this kernel's userfaultfd cannot move pages, which takes Linux 6.8: {error}");
        Error::new(ErrorKind::Unsupported, what).with_setting("trap")
    })?;
    Ok(fd)
}

/// Opens a descriptor through /dev/userfaultfd (Linux 6.1), whose permissions say who may.
fn open_device() -> Option<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").ok()?;
    // USERFAULTFD_IOC_NEW
    // SAFETY: the call takes flags, and returns a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), opcode::none(GROUP, 0x00).into(), libc::O_CLOEXEC) };
    // SAFETY: a new descriptor, which nobody else has.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn register(fd: &OwnedFd, address: usize, len_bytes: usize) -> Result<()> {
    let range = uffdio_range { start: address as u64, len: len_bytes as u64 };
    let mut register = uffdio_register { range, mode: UFFDIO_REGISTER_MODE_MISSING.into(), ioctls: 0 };
    ioctl::<REGISTER, _>(fd, &mut register)
        .map_err(|error| Error::new(ErrorKind::NoMemory, format!("UFFDIO_REGISTER: {error}")))
}

fn ioctl<const CODE: Opcode, T>(fd: &OwnedFd, argument: &mut T) -> rustix::io::Result<()> {
    // SAFETY: each code goes with the struct that its size is of; the kernel reads and writes that, and
    // memory that was registered, or mapped by this module for it.
    unsafe { rustix::ioctl::ioctl(fd.as_fd(), Updater::<CODE, T>::new(argument)) }
}
