//! The memory of a whole program, named by addresses, as mmap(2) and its relatives name it: for a library
//! that stands between a program and these calls.
//!
//! All of it lies in one range of address space. The first part of that is for the program's allocator, the
//! others for what the program maps. As long as a program has little memory, all of it is as the kernel gave
//! it, and there is no thread: most programs never need more. Beyond that a pager takes over what is there
//! (`Memory::count_use`).
//!
//! Pages that a program may read and write, and not execute, can leave memory; others stay.
//!
//! - `fork.rs`: a child goes on by itself, from its copy of everything
//! - `committed.rs`: which parts of its memory the allocator uses
//!
//! Lock order: evicting, the gate's changing, areas, the gate's moving. Signals are blocked while a thread is
//! in here.

mod committed;
mod fork;
#[cfg(test)]
mod tests;

pub use fork::Forking;

use committed::Committed;

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::process::{Resource, getrlimit};
use uzram::mem::{FoundPages, Wanted, scan_page_table};
use uzram::sync::{Arc, Counter};
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, bytes_to_pages, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::areas::{Areas, Protection, Run, Use};
use crate::core::{Core, lock};
use crate::pager::{Evictor, PagerBuilder, Writers};
use crate::signals::Blocked;
use crate::spill::Spill;
use crate::stats::MemoryStats;
use crate::trap::uffd::Uffd;
use crate::trap::{Children, Space};
use crate::waiters::{MOST_THREADS, Waiters};

/// How much of the address space the allocator gets: one part in so many.
const HEAP_SHARE: u64 = 4;
/// The allocator's part is a multiple of this, and begins at a multiple of so many pages.
const HEAP_STEP_BYTES: u64 = 64 << 20;
const HEAP_ALIGN_PAGES: usize = 16;

/// `MADV_DONTNEED_LOCKED`, Linux 5.18.
const DONTNEED_LOCKED: i32 = 24;
/// Advice that would have to hold for pages outside memory, too, and for those of children: DONTFORK,
/// WIPEONFORK, GUARD_INSTALL and GUARD_REMOVE. An older kernel does not know some of it.
const REFUSED_ADVICE: [i32; 4] = [libc::MADV_DONTFORK, libc::MADV_WIPEONFORK, 102, 103];
/// Fewer pages than a pager pages out with several threads.
const PAGED_OUT_AT_ONCE: usize = 512;

/// An error of a system call: errno(3).
pub type Errno = i32;

/// The settings of a [`Memory`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// Those of its pager. Its capacity is the address space for all.
    pub pager: PagerBuilder,
    /// The bytes that a program may have in use before the pager starts.
    pub plain_bytes: u64,
    /// Whether threads wait if the limit would be exceeded, and nothing can be done about it: then
    /// `on_excess` ends the process.
    pub hard: bool,
    /// Called by a thread of the pager when the limit cannot be kept: what there is cannot be compressed, and
    /// the spill file is full, or there is none.
    pub on_excess: fn(),
    /// Called by a thread of the pager when figures have changed: at most once a second, and first when the
    /// pager starts.
    pub on_figures: fn(&MemoryStats),
}

/// Returns whether this process's address space or data is limited (RLIMIT_AS, RLIMIT_DATA). The system
/// counts all that is reserved there, so that a [`Memory`] has no room.
pub fn is_address_space_limited() -> bool {
    [Resource::As, Resource::Data].into_iter().any(|limit| getrlimit(limit).current.is_some())
}

/// The memory of a whole program, named by addresses, as mmap(2) and its relatives name it: for a library
/// that stands between a program and these calls. All of it lies in one range of address space.
pub struct Memory {
    space: Arc<Space>,
    areas: Arc<Mutex<Areas>>,
    /// The allocator's part.
    heap: Run,
    settings: Settings,
    /// Bytes in use: the allocator's, and mappings that may be accessed.
    used_bytes: Counter,
    committed: Committed,
    running: OnceLock<Running>,
    /// The pager has stopped for good, in a child that may not trap touches.
    is_off: AtomicBool,
    /// Held by a thread that forks.
    forks: Mutex<()>,
    /// Why the pager could not start. It is not tried again.
    failure: OnceLock<Error>,
}

/// A pager that has taken over.
struct Running {
    core: Arc<Core<Uffd>>,
    threads: Mutex<Option<Threads>>,
    /// How many threads wait for touches.
    waiters: usize,
    spill: Option<Arc<Spill>>,
}

struct Threads {
    waiters: Arc<Waiters>,
    _evictor: Evictor<Uffd>,
    /// Not while the process forks.
    writers: Option<Writers>,
}

/// Where a range of addresses lies.
enum Lies {
    /// In here, as whole pages.
    Inside(Run),
    /// Elsewhere.
    Outside,
    /// Partly here.
    Across,
}

impl Memory {
    /// Reserves address space.
    ///
    /// # Errors
    /// `Invalid` for settings out of range; `NoMemory`.
    pub fn new(settings: Settings) -> Result<Memory> {
        let pages = bytes_to_pages(settings.pager.capacity_bytes());
        let space = Space::new(pages)?;
        let heap_bytes = (pages_to_bytes(pages) / HEAP_SHARE).next_multiple_of(HEAP_STEP_BYTES);
        let first =
            (space.start() >> PAGE_SHIFT).next_multiple_of(HEAP_ALIGN_PAGES) - (space.start() >> PAGE_SHIFT);
        let heap = Run { first: first as u64, pages: bytes_to_pages(heap_bytes) as usize };
        space.map(heap, Protection::READ_WRITE, Children::Inherit)?;
        // The last page is never used: it bars windows.
        let mut areas = Areas::new(pages - 1);
        areas.set(heap, Use::Managed(Protection::READ_WRITE));
        Ok(Memory {
            space: Arc::new(space),
            areas: Arc::new(Mutex::new(areas)),
            heap,
            settings,
            used_bytes: Counter::new(0),
            committed: Committed::new(heap.bytes())?,
            running: OnceLock::new(),
            is_off: AtomicBool::new(false),
            forks: Mutex::default(),
            failure: OnceLock::new(),
        })
    }

    /// Returns the allocator's part: its address, and its bytes. It reads as zeros, and takes memory as it is
    /// touched.
    pub fn heap(&self) -> (*mut u8, usize) {
        (self.space.address(self.heap.first), self.heap.bytes())
    }

    /// Returns all addresses: the first, and how many bytes.
    pub fn addresses(&self) -> (usize, usize) {
        (self.space.start(), self.space.len_bytes())
    }

    /// Notes that the allocator uses memory of its part from now on. If much is in use, a pager takes over;
    /// if that cannot start, [`Memory::failure`] says why, and the memory is as the kernel gives it.
    pub fn commit(&self, address: usize, len: usize) {
        let offset = address.wrapping_sub(self.heap().0.addr());
        self.used_bytes.add(self.committed.add(offset, len));
        if self.running.get().is_none() && self.used_bytes.get() >= self.settings.plain_bytes {
            let _blocked = Blocked::new();
            // A thread that changes areas may start the pager just now, for which it needs locks that this
            // one may have.
            if let Ok(areas) = self.areas.try_lock() {
                self.start(&areas);
            }
        }
    }

    /// Returns why the pager could not start.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Returns what it holds.
    pub fn stats(&self) -> MemoryStats {
        self.core().map(Core::memory_stats).unwrap_or_default()
    }

    /// Has a pager take over. The caller has locked the areas.
    fn start(&self, areas: &Areas) -> bool {
        if self.running.get().is_some() {
            return true;
        }
        if self.failure.get().is_some() {
            return false;
        }
        match self.try_start(areas) {
            Ok(running) => self.running.set(running).is_ok(),
            Err(error) => {
                let _ = self.failure.set(error);
                false
            }
        }
    }

    fn try_start(&self, areas: &Areas) -> Result<Running> {
        let pages = bytes_to_pages(self.space.len_bytes() as u64);
        // Before anything is trapped.
        let table = File::open("/proc/self/pagemap").map_err(|error| no_page_table(&error))?;
        let trap = Uffd::new(Arc::clone(&self.space), Children::Inherit)?;
        let builder = &self.settings.pager;
        let (core, writers) = builder.core(trap, Arc::clone(&self.areas), pages)?;
        let _ = core.on_excess.set(self.settings.on_excess);
        core.publishing.start(self.settings.on_figures);
        if self.settings.hard {
            core.room.set_hard();
        }
        let evictor = Evictor::start(&core, builder.goal_percent())?;
        // All now: a thread that brings pages starts none. To do that takes locks of the C library, which a
        // thread may hold that waits for a page.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let waiters = Waiters::start(&core, threads, threads)?;
        for (run, used) in areas.all() {
            if let Use::Managed(protection) = used {
                self.adopt(&core, &table, run, protection).inspect_err(|_| waiters.end())?;
            }
        }
        self.bar_gaps(&core, areas);
        let spill = writers.spill();
        let started = Threads { waiters, _evictor: evictor, writers: Some(writers) };
        Ok(Running { core, threads: Mutex::new(Some(started)), waiters: threads, spill })
    }

    /// Has no window reach beyond what is mapped.
    fn bar_gaps(&self, core: &Core<Uffd>, areas: &Areas) {
        for (run, used) in areas.all() {
            if matches!(used, Use::Managed(_)) {
                Self::bar_behind(core, areas, run);
            }
        }
    }

    /// Has no window reach beyond a run, if what follows is not managed.
    fn bar_behind(core: &Core<Uffd>, areas: &Areas, run: Run) {
        let behind = Run { first: run.first + run.pages as u64, pages: 1 };
        if !matches!(areas.pieces(behind).first(), Some((_, Use::Managed(_)))) {
            core.bar(behind.first);
        }
    }

    /// Takes over memory that the kernel has managed until now.
    fn adopt(&self, core: &Core<Uffd>, table: &File, run: Run, protection: Protection) -> Result<()> {
        core.trap.register(run)?;
        core.adopted(run);
        if !protection.may_leave() {
            core.keep(run, true);
        }
        self.note_present(core, table, run)
    }

    /// Notes which pages of a run are in memory, of those that are not said to be.
    fn note_present(&self, core: &Core<Uffd>, table: &File, run: Run) -> Result<()> {
        let mut found = [FoundPages { start: 0, end: 0, categories: 0 }; 64];
        let mut from = self.space.address(run.first).addr() as u64;
        let end = from + run.bytes() as u64;
        while from < end {
            let count = scan_page_table(table, from..end, Wanted::Present, &mut found);
            let count = count.map_err(|error| no_page_table(&error))?;
            for pages in &found[..count] {
                if let Some(run) = self.space.run_at(pages.start as usize, (pages.end - pages.start) as usize)
                {
                    core.note_present(run);
                }
            }
            if count < found.len() {
                break;
            }
            from = found[count - 1].end;
        }
        Ok(())
    }

    /// Says where bytes at an address lie.
    fn place(&self, address: usize, len: usize) -> Lies {
        let (start, end) = (self.space.start(), self.space.start() + self.space.len_bytes());
        let behind = address.saturating_add(len);
        match self.space.run_at(address & !(PAGE_SIZE - 1), len + (address & (PAGE_SIZE - 1))) {
            Some(run) => Lies::Inside(run),
            None if behind <= start || address >= end => Lies::Outside,
            None => Lies::Across,
        }
    }

    /// Returns the pages in which bytes at an address lie; `None` if they are elsewhere, an error if some
    /// are.
    fn inside(&self, address: usize, len: usize) -> Option<std::result::Result<Run, Errno>> {
        match self.place(address, len) {
            Lies::Inside(run) => Some(Ok(run)),
            Lies::Outside => None,
            Lies::Across => Some(Err(libc::ENOMEM)),
        }
    }

    /// Returns the pager that works, if there is one.
    fn running(&self) -> Option<&Running> {
        self.running.get().filter(|_| !self.is_off.load(Ordering::Relaxed))
    }

    fn core(&self) -> Option<&Core<Uffd>> {
        self.running().map(|running| &*running.core)
    }

    /// Maps private anonymous memory of `len` bytes, of which the first is at a multiple of `align`, a power
    /// of two. `protection` are the bits of mmap(2). Returns `None` if there is no room for it.
    pub fn map(&self, len: usize, align: usize, protection: i32) -> Option<*mut u8> {
        let _blocked = Blocked::new();
        let pages = bytes_to_pages(len as u64);
        let mut areas = lock(&self.areas);
        let align_pages = (align >> PAGE_SHIFT).max(1) as u64;
        // Multiples count from address 0, and the space begins anywhere.
        let offset = (align_pages - (self.space.start() >> PAGE_SHIFT) as u64 % align_pages) % align_pages;
        let first = areas.find(pages, align_pages, offset)?;
        let run = Run { first, pages: pages as usize };
        let protection = Protection(protection);
        self.enter(&mut areas, run, protection).ok()?;
        if protection.0 != libc::PROT_NONE {
            self.count_use(&areas, run);
        }
        Some(self.space.address(first))
    }

    /// Maps free pages.
    fn enter(&self, areas: &mut MutexGuard<'_, Areas>, run: Run, protection: Protection) -> Result<()> {
        match self.core() {
            None => self.space.map(run, protection, Children::Inherit)?,
            Some(core) => {
                if let Err(error) = core.trap.map_as(run, protection) {
                    self.space.reserve_again(run);
                    return Err(error);
                }
                Self::bar_behind(core, areas, run);
                core.open(run);
                if !protection.may_leave() {
                    core.keep(run, true);
                }
            }
        }
        areas.set(run, Use::Managed(protection));
        Ok(())
    }

    /// Maps private anonymous memory at an address in here, in place of what is there: `MAP_FIXED`. Returns
    /// `None` if the address is elsewhere.
    pub fn map_at(
        &self,
        address: usize,
        len: usize,
        protection: i32,
    ) -> Option<std::result::Result<(), Errno>> {
        let run = match self.inside(address, len)? {
            Ok(run) => run,
            Err(error) => return Some(Err(error)),
        };
        let _blocked = Blocked::new();
        let mut areas = self.lock_cleaned(run);
        self.take_away(&mut areas, run);
        let entered = self.enter(&mut areas, run, Protection(protection));
        if entered.is_err() {
            areas.free(run);
        } else if protection != libc::PROT_NONE {
            self.count_use(&areas, run);
        }
        Some(entered.map_err(|_| libc::ENOMEM))
    }

    /// Has a program map something of its own at addresses in here, in place of what is there. Returns `None`
    /// if the addresses are elsewhere.
    pub fn replace<R>(&self, address: usize, len: usize, map: impl FnOnce() -> R) -> Option<R> {
        let Lies::Inside(run) = self.place(address, len) else { return None };
        let _blocked = Blocked::new();
        let mut areas = self.lock_cleaned(run);
        self.take_away(&mut areas, run);
        areas.set(run, Use::Foreign);
        Some(map())
    }

    /// Locks the areas when nothing of a run is still to be freed.
    fn lock_cleaned(&self, run: Run) -> MutexGuard<'_, Areas> {
        loop {
            let areas = lock(&self.areas);
            match self.core() {
                Some(core) if areas.pieces(run).iter().any(|(_, used)| *used == Use::Closed) => {
                    drop(areas);
                    let _changing = core.trap.gate.change();
                    core.clean();
                }
                _ => return areas,
            }
        }
    }

    /// Unmaps pages at once, so that others can be mapped there. None of them is still to be freed.
    fn take_away(&self, areas: &mut MutexGuard<'_, Areas>, run: Run) {
        for (piece, used) in areas.pieces(run) {
            match used {
                Use::Managed(protection) => {
                    self.forget_use(piece, protection);
                    match self.core() {
                        Some(core) => {
                            core.detach(piece);
                            core.free_contents(piece);
                        }
                        None => self.space.reserve_again(piece),
                    }
                }
                Use::Foreign | Use::Closed => self.space.reserve_again(piece),
            }
        }
    }

    /// Counts pages that the program may use from now on, and starts the pager if these are many by now.
    fn count_use(&self, areas: &Areas, run: Run) {
        self.used_bytes.add(run.bytes() as u64);
        self.start_if_much(areas);
    }

    /// Starts the pager if the program uses much by now. Returns false if it cannot start.
    fn start_if_much(&self, areas: &Areas) -> bool {
        self.used_bytes.get() < self.settings.plain_bytes || self.start(areas)
    }

    fn forget_use(&self, run: Run, protection: Protection) {
        if protection.0 != libc::PROT_NONE {
            self.used_bytes.sub(run.bytes() as u64);
        }
    }

    /// Unmaps memory, as far as it is in here; returns `None` if none of it is. `others` unmaps what is
    /// elsewhere.
    pub fn unmap(&self, address: usize, len: usize, others: impl Fn(usize, usize)) -> Option<()> {
        let run = match self.place(address, len) {
            Lies::Inside(run) => run,
            Lies::Outside => return None,
            Lies::Across => {
                let (start, end) = (self.space.start(), self.space.start() + self.space.len_bytes());
                let behind = address.saturating_add(len);
                if address < start {
                    others(address, start - address);
                }
                if behind > end {
                    others(end, behind - end);
                }
                self.space.run_at(address.max(start), behind.min(end) - address.max(start))?
            }
        };
        let _blocked = Blocked::new();
        let mut areas = lock(&self.areas);
        for (piece, used) in areas.pieces(run) {
            match (used, self.core()) {
                (Use::Managed(protection), Some(core)) => {
                    self.forget_use(piece, protection);
                    areas.set(piece, Use::Closed);
                    core.detach(piece);
                    core.clean_later(piece, piece);
                }
                (Use::Managed(_) | Use::Foreign, _) => {
                    if let Use::Managed(protection) = used {
                        self.forget_use(piece, protection);
                    }
                    self.space.reserve_again(piece);
                    areas.free(piece);
                }
                (Use::Closed, _) => {}
            }
        }
        Some(())
    }

    /// Changes what a program may do with memory: mprotect(2). Returns `None` if the memory is elsewhere.
    pub fn protect(
        &self,
        address: usize,
        len: usize,
        protection: i32,
    ) -> Option<std::result::Result<(), Errno>> {
        let run = match self.inside(address, len)? {
            Ok(run) => run,
            Err(error) => return Some(Err(error)),
        };
        let _blocked = Blocked::new();
        let mut areas = lock(&self.areas);
        Some(self.protect_run(&mut areas, run, Protection(protection)))
    }

    fn protect_run(
        &self,
        areas: &mut MutexGuard<'_, Areas>,
        run: Run,
        protection: Protection,
    ) -> std::result::Result<(), Errno> {
        let mut next = run.first;
        for (piece, used) in areas.pieces(run) {
            if piece.first != next || used == Use::Closed {
                break;
            }
            if let (Use::Managed(_), Some(core)) = (used, self.core())
                && !protection.may_leave()
            {
                core.keep(piece, true);
            }
            let address = self.space.address(piece.first);
            // SAFETY: the program asks for it, and the pages are mapped. Those that the pager moves it moves
            // as well if they may not be written: it copies them then.
            let changed = unsafe { libc::syscall(libc::SYS_mprotect, address, piece.bytes(), protection.0) };
            if changed != 0 {
                let error = last_errno();
                if let (Use::Managed(before), Some(core)) = (used, self.core())
                    && before.may_leave()
                {
                    core.keep(piece, false);
                }
                return Err(error);
            }
            if let Use::Managed(before) = used {
                self.forget_use(piece, before);
                if protection.0 != libc::PROT_NONE {
                    self.used_bytes.add(piece.bytes() as u64);
                }
                areas.set(piece, Use::Managed(protection));
                if let Some(core) = self.core().filter(|_| protection.may_leave()) {
                    core.keep(piece, false);
                }
            }
            next = piece.first + piece.pages as u64;
        }
        self.start_if_much(areas);
        if next == run.first + run.pages as u64 { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// Takes a program's advice about memory: madvise(2). Returns `None` if the memory is elsewhere, or the
    /// system is to hear it: there is no pager.
    pub fn advise(&self, address: usize, len: usize, advice: i32) -> Option<std::result::Result<(), Errno>> {
        let run = match self.inside(address, len)? {
            Ok(run) => run,
            Err(error) => return Some(Err(error)),
        };
        if REFUSED_ADVICE.contains(&advice) {
            return Some(Err(libc::EINVAL));
        }
        let core = self.core()?;
        let _blocked = Blocked::new();
        let pieces = lock(&self.areas).pieces(run);
        for (piece, used) in &pieces {
            let result = match used {
                Use::Managed(_) => self.advise_managed(core, *piece, advice),
                Use::Foreign => self.advise_system(*piece, advice),
                Use::Closed => Err(libc::ENOMEM),
            };
            if result.is_err() {
                return Some(result);
            }
        }
        let pages: usize = pieces.iter().map(|(piece, _)| piece.pages).sum();
        Some(if pages == run.pages { Ok(()) } else { Err(libc::ENOMEM) })
    }

    fn advise_managed(&self, core: &Core<Uffd>, run: Run, advice: i32) -> std::result::Result<(), Errno> {
        use crate::state::Access;
        // Dropped before the system is asked: that may touch pages.
        let changing = core.trap.gate.change();
        match advice {
            // What was freed may read as zeros at any time.
            libc::MADV_DONTNEED | libc::MADV_FREE | DONTNEED_LOCKED => core.discard(run),
            libc::MADV_NORMAL => core.advise(run, Access::Normal),
            libc::MADV_RANDOM => core.advise(run, Access::Random),
            libc::MADV_SEQUENTIAL => core.advise(run, Access::Sequential),
            libc::MADV_WILLNEED => core.prefetch(run),
            // In parts for which no other threads are started: that takes locks of the C library.
            libc::MADV_COLD | libc::MADV_PAGEOUT => {
                for first in (0..run.pages).step_by(PAGED_OUT_AT_ONCE) {
                    let pages = PAGED_OUT_AT_ONCE.min(run.pages - first);
                    core.page_out(Run { first: run.first + first as u64, pages });
                }
            }
            // Nothing to gain, or lost: pages come one by one.
            libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE | libc::MADV_COLLAPSE => {}
            advice => {
                drop(changing);
                return self.advise_system(run, advice);
            }
        }
        Ok(())
    }

    fn advise_system(&self, run: Run, advice: i32) -> std::result::Result<(), Errno> {
        // SAFETY: the program asks for it, and the pages are mapped.
        let advised =
            unsafe { libc::syscall(libc::SYS_madvise, self.space.address(run.first), run.bytes(), advice) };
        if advised == 0 { Ok(()) } else { Err(last_errno()) }
    }

    /// Empties memory of the allocator, which does not use it any more: whole pages in here.
    pub fn discard(&self, address: usize, len: usize) {
        let Lies::Inside(run) = self.place(address, len) else { return };
        let _blocked = Blocked::new();
        self.used_bytes.sub(self.committed.remove(address.wrapping_sub(self.heap().0.addr()), len));
        match self.core() {
            Some(core) => {
                let _changing = core.trap.gate.change();
                core.discard(run);
            }
            None => drop(self.advise_system(run, libc::MADV_DONTNEED)),
        }
    }

    /// Returns what the program may do with the memory at an address, up to where that changes: the bits of
    /// mmap(2), and how many bytes. `None` if it is not memory of this.
    pub fn protection(&self, address: usize) -> Option<(i32, usize)> {
        let Lies::Inside(run) = self.place(address, 1) else { return None };
        let _blocked = Blocked::new();
        let rest =
            Run { first: run.first, pages: (self.space.len_bytes() >> PAGE_SHIFT) - run.first as usize };
        match lock(&self.areas).pieces(rest).first() {
            Some((piece, Use::Managed(protection))) if piece.first == run.first => {
                Some((protection.0, piece.bytes()))
            }
            _ => None,
        }
    }

    /// Has memory that ends before free addresses grow there. Returns whether it could.
    pub fn grow(&self, address: usize, old_len: usize, new_len: usize) -> bool {
        let (Lies::Inside(old), Lies::Inside(new)) =
            (self.place(address, old_len), self.place(address, new_len))
        else {
            return false;
        };
        let _blocked = Blocked::new();
        let mut areas = lock(&self.areas);
        let more = Run { first: old.first + old.pages as u64, pages: new.pages - old.pages };
        let last = Run { first: more.first - 1, pages: 1 };
        match areas.pieces(last).first() {
            Some((_, Use::Managed(protection))) if areas.is_free(more) => {
                let protection = *protection;
                let bytes = more.bytes() as u64;
                if self.enter(&mut areas, more, protection).is_err() {
                    return false;
                }
                if protection.0 != libc::PROT_NONE {
                    self.used_bytes.add(bytes);
                }
                true
            }
            _ => false,
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.waiters.end();
    }
}

fn no_page_table(error: &dyn std::fmt::Display) -> Error {
    let what = format!("/proc/self/pagemap does not tell which pages are in memory: {error}");
    Error::new(ErrorKind::Unsupported, what)
}

fn last_errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}
