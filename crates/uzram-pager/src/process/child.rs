//! fork(2): a child has a copy of all memory, and so of the pager's, and manages it by a pager of its own.
//!
//! docs/internals/run.md has it step by step. **From the answer of [`Call::ForkBegins`] until the process has
//! forked the main thread takes no lock and allocates nothing**, but for touches of the thread that forks:
//! the child has its memory as it is at any moment of that time.
//!
//! A child that is cloned otherwise has no pager. Where the kernel tells of it (CAP_SYS_PTRACE), all pages
//! that are away are copied to it ([`Process::fill_children`]).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uzram::Result;
use uzram::units::Page;

use uzram_run::control::{Call, Control, state};
use uzram_run::sys;

use super::{
    Active, ERRORS, GROWING_LOOK, PROCESS, Process, WATCH_ENDS, answer, confine, discard_calls, ends,
    locked_image, open, paths, register_calls, say, separate, stay, system,
};
use crate::core::{By, Fault};
use crate::pager::Threads;
use crate::system::{new_eventfd, renew};
use crate::uffd::{MESSAGES, Message, Uffd, copy_to, read_from};

/// How long a child tries to register memory that its parent's pager has not let go yet.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a fork waits for changes of the memory map by other threads, which may begin new ones for ever.
const MOST_CHANGE: Duration = Duration::from_millis(20);

/// Where the C library has the main thread's id, and `rseq`: in a child they are told anew.
static mut MAIN_THREAD: (usize, Option<usize>) = (0, None);

unsafe extern "C" {
    /// Where the C library has registered `rseq`, from the thread pointer, and whether: glibc 2.35.
    static __rseq_offset: isize;
    static __rseq_size: u32;
}

/// Notes what a child's main thread needs, and where it begins.
pub(super) fn prepare(control: &Control) {
    // SAFETY: the constants are the C library's. No other thread is here.
    unsafe {
        let rseq = (__rseq_size > 0).then(|| sys::thread_pointer().wrapping_add_signed(__rseq_offset));
        MAIN_THREAD = (sys::tid_address(), rseq);
    }
    control.thread_pointer.store(sys::thread_pointer(), Ordering::Relaxed);
    control.child_entry.store(begin as *const () as usize, Ordering::Relaxed);
}

/// Where a child's pager begins.
extern "C" fn begin(control: &'static Control) -> ! {
    const RSEQ_BYTES: usize = 32;
    const RSEQ_SIGNATURE: u32 = 0x5305_3053;
    // SAFETY: the main thread of the parent's pager has set it, and this is a copy of that, with its
    // thread-local storage.
    unsafe {
        let (tid, rseq) = MAIN_THREAD;
        let tid: *mut i32 = std::ptr::with_exposed_provenance_mut(tid);
        if !tid.is_null() {
            tid.write(sys::raw(sys::nr::GETTID, []) as i32);
        }
        if let Some(rseq) = rseq {
            libc::syscall(libc::SYS_rseq, rseq, RSEQ_BYTES, 0, RSEQ_SIGNATURE);
        }
    }
    // SAFETY: set before the parent's pager served; nobody else uses the copy.
    let process = unsafe { &mut *PROCESS.load(Ordering::Relaxed) };
    (process.begin)();
    if let Err(error) = process.begin_in_child() {
        let id = control.program.load(Ordering::Relaxed);
        if process.put_in_place() {
            say(&format!("uzram: process {id} goes on without a limit: {error}\n"));
            answer(control, state::IN_PLACE);
            stay(control);
        }
        say(&format!("uzram: process {id} cannot go on without its pager: {error}\n"));
        answer(control, state::REFUSED);
        // The program ends now.
        std::thread::sleep(Duration::from_secs(10));
        sys::exit_group(1);
    }
    Process::serve(process)
}

impl Process {
    /// Ends all threads but this one, so that none is in the middle of something. Each may wait for a message
    /// to be read until then, or for room.
    fn end_threads(&mut self) {
        let core = self.core();
        if let Some(core) = &core {
            core.ends.store(true, Ordering::Relaxed);
            core.room.evictor.ring();
        }
        self.touches.extend(self.active.as_mut().into_iter().flat_map(|active| active.waiter.stop_waiting()));
        // It reads a word of the program's before, which may be a touch that waits for a message.
        WATCH_ENDS.store(1, Ordering::Relaxed);
        sys::futex_wake(&WATCH_ENDS);
        let evicts = |active: &Active| active.threads.as_ref().is_some_and(Threads::evicts);
        let watches = |watch: &JoinHandle<()>| !watch.is_finished();
        while self.active.as_ref().is_some_and(evicts) || self.watch.as_ref().is_some_and(watches) {
            ends::wait([self.uffd.as_fd()], Some(Duration::from_millis(1)));
            self.read_messages();
        }
        self.watch.take().into_iter().for_each(|watch| drop(watch.join()));
        self.active.as_mut().into_iter().for_each(|active| drop(active.threads.take()));
        core.into_iter().for_each(|core| core.store.end_threads());
    }

    /// Starts those that do not run. If they cannot be started now, that is tried again later.
    pub(super) fn start_threads(&mut self) {
        if self.watch.is_none() {
            let _ = self.start_watch();
        }
        let Some(active) = self.active.as_mut().filter(|active| active.threads.is_none()) else { return };
        let core = &active.waiter.core;
        core.ends.store(false, Ordering::Relaxed);
        match Threads::start(core, self.asked.pager.goal.clone()) {
            Ok(threads) => active.threads = Some(threads),
            // Nothing leaves: nobody waits for that.
            Err(_) => core.room.made(false),
        }
        let _ = core.store.begin_threads();
    }

    /// Rests until a thread has forked.
    pub(super) fn rest(&mut self, thread: u32) {
        self.end_threads();
        let spill = self.active.as_ref().and_then(|active| active.waiter.core.spill.clone());
        self.sharing = spill.as_ref().and_then(|spill| spill.before_fork());
        // What was changed before the thread forks is told of: the child's memory is as this knows it.
        let end = Instant::now() + MOST_CHANGE;
        while self.active.is_some() && self.uffd.is_changing() && Instant::now() < end {
            self.read_messages();
        }
        self.uffd.hold_wakes(true);
        self.answer(Call::ForkBegins);
        loop {
            ends::wait([self.uffd.as_fd(), self.calls.as_fd(), self.program.as_fd()], None);
            if self.has_forked() || ends::has_ended(&self.program, Duration::ZERO) {
                break;
            }
            self.put_aside(thread);
        }
        self.uffd.hold_wakes(false);
        let has_child = self.control.child.load(Ordering::Relaxed) > 0;
        // The child has a pager of its own, and its memory must not belong to this descriptor. If others have
        // been forked meanwhile, which is which is not told: all get what is away.
        let is_forked = |message: &Message| matches!(message, Message::Forked(_));
        if has_child && self.messages.iter().filter(|message| is_forked(message)).count() == 1 {
            self.messages.retain(|message| !is_forked(message));
        }
        spill.filter(|_| has_child).into_iter().for_each(|spill| spill.after_fork(self.sharing.take()));
        self.sharing = None;
        self.take_up();
        self.start_threads();
        self.answer(Call::ForkEnds);
    }

    /// Reads calls while the program forks; returns whether it has.
    fn has_forked(&self) -> bool {
        let mut has_forked = false;
        let _ = self.calls.read(|message| {
            if let Message::Touch(touch) = message {
                if touch.address == self.control.call(Call::ForkEnds) && self.is_asked() {
                    has_forked = true;
                } else {
                    // Interrupted by a signal, or by mlockall(2).
                    self.calls.zero(touch.address);
                }
            }
        });
        has_forked
    }

    /// Reads a message while the program forks: serves the thread that forks, and puts others aside.
    fn put_aside(&mut self, thread: u32) {
        let Process { messages, uffd, active, .. } = self;
        if messages.len() + MESSAGES > messages.capacity() {
            return;
        }
        let _ = uffd.read(|message| match message {
            Message::Touch(touch) if touch.thread == thread => {
                let core = active.as_ref().map(|active| &active.waiter.core);
                let _ = core.map(|core| core.fault(touch.address, touch.writes, By::ReaderAnyway));
                // Now it may go on: nothing is left to do here.
                uffd.wake_always(touch.address, 1);
            }
            message => messages.push(message),
        });
    }

    /// Brings all memory until the program has forked.
    pub(super) fn bring_all(&mut self) {
        self.end_threads();
        let Some(core) = self.core() else { return };
        let parts: Vec<_> = core.map().all().collect();
        for page in parts.iter().flat_map(|part| part.chunks(1)) {
            while core.is_away(page.address)
                && core.fault(page.address, false, By::ReaderAnyway) == Fault::Changing
            {
                self.read_messages();
            }
        }
    }

    /// Goes on in a child.
    fn begin_in_child(&mut self) -> Result<()> {
        let (id, parent) = (self.id(), self.control.pager.load(Ordering::Relaxed));
        self.renew_descriptors(id)?;
        discard_calls(self.control);
        register_calls(self.control, &self.calls)?;
        (self.has_strays, self.has_told, self.has_exceeded, self.published) = (false, false, false, None);
        self.uffd.hold_wakes(false);
        // Touches of the parent's threads, and its descriptors, are none of this process's.
        let is_parents = |message: &mut Message| matches!(message, Message::Touch(_) | Message::Forked(_));
        self.messages.extract_if(.., is_parents).for_each(std::mem::forget);
        std::mem::forget(std::mem::take(&mut self.children));
        self.late.clear();
        let sharing = self.sharing.take();
        if let Some(active) = &mut self.active {
            let core = &active.waiter.core;
            if let Some(spill) = &core.spill {
                spill.after_fork_in_child(sharing, parent)?;
            }
            active.waiter.begin_in_child(id)?;
            active.waiter.core.each_shelf(|shelf| register_soon(&self.uffd, &shelf.range()))?;
        }
        self.take_up();
        self.register_all()?;
        self.given_back.clear();
        self.returned = 0;
        self.begin_figures();
        confine::confine(&self.program)?;
        self.start_threads();
        if !self.asked.stats {
            // It prints no line: whoever waits for the end of standard error does not wait for this process.
            // SAFETY: the number is this process's own.
            unsafe { libc::dup3(0, ERRORS, libc::O_CLOEXEC) };
        }
        Ok(())
    }

    /// Registers all memory, in mappings as they are: they may have grown, and of what is not mapped here
    /// (MADV_DONTFORK) nothing is managed.
    fn register_all(&mut self) -> Result<()> {
        let Some(core) = self.core() else { return Ok(()) };
        let parts: Vec<_> = core.map().all().collect();
        for mut rest in parts {
            while rest.pages > 0 {
                let (piece, mapping) = self.first_piece(rest);
                if let Some(mapping) = mapping {
                    register_soon(&self.uffd, &mapping)?;
                    // No other thread is about to empty it: they are the parent's.
                    core.note_present(&self.uffd.page_table, piece, true)
                        .map_err(|error| system("pagemap", error))?;
                } else {
                    let gone = core.change_map().remove(piece.addresses());
                    core.removed(&gone, true);
                }
                rest = rest.from(piece.pages, rest.pages);
            }
        }
        Ok(())
    }

    /// Writes all that is away to where it belongs, in a child that has no pager: touches are not trapped,
    /// and the program does not run. Returns false if something cannot be read.
    fn put_in_place(&self) -> bool {
        // What was registered is so no more.
        let ends = |uffd: &Uffd| new_eventfd().is_ok_and(|bell| renew(uffd.as_fd(), bell).is_ok());
        if !ends(&self.uffd) || !ends(&self.calls) {
            return false;
        }
        // Also to what the program may only read by now.
        let Ok(memory) = File::options().write(true).open("/proc/self/mem") else { return false };
        let mut is_whole = true;
        let is_read = self.core().is_none_or(|core| {
            core.each_away(|address, page| is_whole &= memory.write_all_at(page, address as u64).is_ok())
        });
        is_read && is_whole
    }

    /// Has all descriptors be those of this process: the numbers stay.
    fn renew_descriptors(&mut self, id: i32) -> Result<()> {
        // What the numbers mean in this process is the program's.
        separate();
        let files = [&*self.stat, &self.status, &self.statm, &self.maps, &self.smaps];
        for (file, path) in files.into_iter().zip(paths(id)) {
            renew(file.as_fd(), open(&path)?.into())?;
        }
        for (pidfd, process) in [(&self.program, id), (&self.own, std::process::id().cast_signed())] {
            renew(pidfd.as_fd(), ends::pidfd(process)?)?;
        }
        renew(self.left.as_fd(), new_eventfd()?)?;
        renew(self.look_timer.as_fd(), ends::new_timer(GROWING_LOOK)?)?;
        if let Some(source) = self.asked.pager.goal.as_ref().and_then(|goal| goal.source.as_ref()) {
            let file = File::open(&source.path).map_err(|error| system("memory.pressure", error))?;
            renew(source.file.as_fd(), file.into())?;
        }
        if let Some((old, new)) = self.image.as_ref().zip(locked_image()) {
            renew(old.as_fd(), new.into())?;
        }
        for uffd in [&*self.uffd, &self.calls] {
            renew(uffd.as_fd(), uffd.another()?)?;
            renew(uffd.page_table.as_fd(), open("/proc/self/pagemap")?.into())?;
        }
        // The parent's goes on to tell of the parent's.
        let all = [self.calls.as_fd(), self.program.as_fd(), self.left.as_fd(), self.look_timer.as_fd()];
        renew(self.others.as_fd(), ends::any_of(all)?)?;
        Ok(())
    }

    /// Copies all that is away to children that have no pager. Their touches wait: for ever, if something
    /// cannot be read. What they change meanwhile is told by the userfaultfd of each.
    pub(super) fn fill_children(&mut self) {
        self.end_threads();
        for child in std::mem::take(&mut self.children) {
            let mut gone: Vec<Range<usize>> = Vec::new();
            let mut is_whole = true;
            let copy = |address: usize, contents: &Page| {
                while !gone.iter().any(|range| range.contains(&address))
                    && !copy_to(&child, address, contents)
                {
                    let read = read_from(child.as_fd(), |message| match message {
                        Message::Removed(range) | Message::Unmapped(range) => gone.push(range),
                        Message::Moved(..) => is_whole = false,
                        Message::Touch(_) | Message::Forked(_) => {}
                    });
                    if read.is_err() {
                        return;
                    }
                }
            };
            let is_read = self.core().is_none_or(|core| core.each_away(copy));
            if !is_read || !is_whole {
                std::mem::forget(child);
            }
        }
        self.start_threads();
    }
}

/// Registers memory that the parent's pager may hold for a moment longer.
fn register_soon(uffd: &Uffd, range: &Range<usize>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match uffd.register(range) {
            Err(Errno::BUSY) if Instant::now() < end => std::thread::yield_now(),
            registered => return registered.map_err(|error| system("userfaultfd", error)),
        }
    }
}
