//! The pager's process: in a program's address space, and nothing else of it is the program's.
//!
//! `uzram run` has a library loaded into the program (crate uzram-run), which starts this as a process of its
//! own that shares the program's memory. It has its own C library, descriptors, and signals. Nothing of the
//! program is interposed but fork(2), at which that library calls ([`Control`]).
//!
//! - As long as the program is not near its limit, nothing is managed: the main thread looks at its size now
//!   and then. Near it, the memory map is searched (`scan.rs`), and a [`Core`] takes over what is found.
//! - The main thread reads what userfaultfd tells. It waits for nothing else, and changes the core's memory
//!   map, with the lock of that from before it reads until the change is made. Other threads evict, and write
//!   to the spill file.
//! - `child.rs`: forks. `ends.rs`: exit and exec. `keeper.rs`: the pager's own death. `confine.rs`: what the
//!   pager may not do.

mod child;
mod confine;
mod ends;
mod keeper;
mod scan;
mod settings;
mod tell;

use std::fmt::Display;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uzram::units::{PAGE_SHIFT, PAGE_SIZE, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use uzram_run::control::{BUILD, CALLS, Call, Control, PAGE_BYTES, fork_as, state};
use uzram_run::sys;

use self::scan::Maps;
use self::settings::Asked;
use crate::core::{By, Core, Fault};
use crate::figures::Figures;
use crate::map::Part;
use crate::pager::Threads;
use crate::spill::Sharing;
use crate::system::{new_eventfd, spawn, stat_field, text_of};
use crate::uffd::{Message, Tells, Touch, Uffd};
use crate::waiter::{Waiter, Whose};

/// A program comes so near its limit before its memory is managed: a share of the limit, and the most.
const NEAR_SHARE: u64 = 16;
const MOST_NEAR_BYTES: u64 = 64 << 20;
/// How fast a program is taken to grow: a thread writes about so many bytes a millisecond.
const GROWTH_BYTES_PER_MS: u64 = 7 << 20;
/// How often the program's size is looked at: while it grows, and while it does not, if it is near its limit;
/// and at least.
const GROWING_LOOK: Duration = Duration::from_millis(2);
const STILL_LOOK: Duration = Duration::from_millis(8);
const MOST_LOOK: Duration = Duration::from_millis(100);
/// New memory of this size is searched for.
const GROWN_PAGES: u64 = 256;
/// And of this share of what is managed: to search takes the longer, the more that is.
const GROWN_SHARE: u64 = 64;
/// How often what is mapped is asked for until it stays the same.
const MOST_ATTEMPTS: usize = 8;
/// How long memory is left alone that cannot be managed.
const REFUSED: Duration = Duration::from_secs(10);
/// How often figures are published at most.
const PUBLISH: Duration = Duration::from_secs(1);
/// Messages that are put aside while the process forks: a thread makes one at a time.
const MOST_MESSAGES: usize = 4096;
/// How often messages are read until others are looked for.
const MOST_READS: usize = 16;
/// The number of the copy of standard error. No other descriptor has it, also in children.
const ERRORS: i32 = 3;

/// The only one of this process. A child of the program finds it in its copy of the memory.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// 1: the thread ends that sees the program's main thread leave its memory.
static WATCH_ENDS: AtomicU32 = AtomicU32::new(0);

struct Process {
    control: &'static Control,
    begin: fn(),
    asked: Asked,
    /// Descriptors, which a child renews: the program, this process, and what the kernel tells of them.
    program: OwnedFd,
    own: OwnedFd,
    stat: Arc<File>,
    status: File,
    statm: File,
    maps: File,
    smaps: File,
    /// The image, with a lock: who installs another build keeps it.
    image: Option<File>,
    uffd: Arc<Uffd>,
    calls: Uffd,
    /// An epoll(7) of what seldom has something to tell: calls, the program, `left`, and `look_timer`. To
    /// poll each takes a fault some time.
    others: OwnedFd,
    /// Where others find the figures as text; what was written last, and when.
    figures_file: Option<File>,
    published: Option<(Figures, Instant)>,
    /// Who the program was at the start.
    rights: String,
    active: Option<Active>,
    /// The thread that rings `left`, an eventfd(2), when the program's main thread has left this memory.
    watch: Option<JoinHandle<()>>,
    left: Arc<OwnedFd>,
    /// Pages of the pager's own that are never there were touched.
    has_strays: bool,
    /// What was read, and not done yet: also while the program forks.
    messages: Vec<Message>,
    touches: Vec<Touch>,
    /// Children without a pager, which wait for what is away.
    children: Vec<OwnedFd>,
    /// Touches that wait until these have it.
    late: Vec<Touch>,
    /// What the program has given back while it had one thread: MADV_FREE leaves pages there, which may be
    /// used again without a touch that is trapped. Of how many that thread has returned from the call since.
    given_back: Vec<Range<usize>>,
    returned: usize,
    /// What the spill file's parent and child share from a fork on.
    sharing: Option<Sharing>,
    /// The program's size when its memory map was searched last, in pages that are not managed.
    searched_pages: u64,
    /// What may not be mapped any more, or was registered while the memory map was changing, by its numbers.
    unproven: Vec<Part>,
    /// Ranges that cannot be managed, and since when that is known.
    refused: Vec<(Range<usize>, Instant)>,
    /// When the program's size is looked at next: a timerfd(2), which need not be set at each fault as the
    /// timeout of a call; and what it was, in pages.
    look_timer: OwnedFd,
    looked_pages: u64,
    /// The size from which on memory is managed: none, if that has failed.
    near_pages: u64,
    has_told: bool,
    has_exceeded: bool,
    has_warned: bool,
}

/// What manages memory, once there is much.
struct Active {
    waiter: Waiter,
    /// Not while the program forks.
    threads: Option<Threads>,
}

/// Returns what says which rights the program has: users, seccomp mode, and whether others of the same user
/// may open its files of /proc, which is a flag of the memory.
fn rights(status: &File) -> Option<String> {
    let mut room = [0; 4096];
    let text = text_of(status, &mut room)?;
    let line = |name| text.lines().find(|line| line.starts_with(name));
    // SAFETY: the call reads a flag.
    let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
    Some(format!("{} {} {dumpable}", line("Uid:")?, line("Seccomp:")?))
}

/// Runs the pager: the image's main function. `begin` has a process give memory to the image's large mappings
/// when they are touched.
///
/// # Safety
/// The library has made the page, and this process, for this.
pub unsafe fn run(control: &'static Control, begin: fn()) -> ! {
    begin();
    separate();
    match Process::open(control, begin) {
        Ok(process) => Process::serve(Box::leak(Box::new(process))),
        Err(error) => refuse(control, &error),
    }
}

/// Closes all descriptors, which are the program's, but a copy of its standard error, and leaves its session.
/// Whoever writes to standard output or error by mistake writes nowhere.
fn separate() {
    // SAFETY: all of them are this process's copies, and nothing here uses them.
    unsafe {
        let kept = libc::dup3(2, ERRORS, libc::O_CLOEXEC) == ERRORS;
        libc::close_range(ERRORS.cast_unsigned() + u32::from(kept), u32::MAX, 0);
        libc::close_range(0, ERRORS.cast_unsigned() - 1, 0);
        for _ in 0..=ERRORS - i32::from(kept) {
            libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        }
    }
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    let _ = rustix::thread::set_name(c"uzram-pager");
}

/// Says something to the program's user.
fn say(text: &str) {
    // If it cannot be written, there is nobody to tell.
    // SAFETY: the text is readable.
    unsafe { libc::write(ERRORS, text.as_ptr().cast(), text.len()) };
}

fn answer(control: &Control, answer: u32) {
    control.state.store(answer, Ordering::Release);
    sys::futex_wake(&control.state);
}

/// Says why the program's memory is not managed, and stays: this process's end would be the program's.
fn refuse(control: &'static Control, error: &Error) -> ! {
    let is_hard = std::env::var_os("UZRAM_RUN_HARD").is_some();
    let how = if is_hard { "is not run" } else { "runs without a limit" };
    say(&format!("uzram: this program {how}: {error}\n"));
    answer(control, state::REFUSED);
    stay(control)
}

/// Does nothing until the program ends, or executes another one.
fn stay(control: &'static Control) -> ! {
    const LOOK: Duration = Duration::from_millis(200);
    let program = control.program.load(Ordering::Relaxed);
    let word = control.tid_address.load(Ordering::Relaxed);
    if let Ok(pidfd) = ends::pidfd(program) {
        let [stat, status, statm, ..] = paths(program).map(File::open);
        while !ends::has_ended(&pidfd, LOOK) {
            let has_executed = || match (&stat, &status, &statm) {
                (Ok(stat), Ok(status), Ok(statm)) => ends::wait_for_exec(stat, status, statm),
                // It has counted its exec by then.
                _ => {
                    std::thread::sleep(PUBLISH);
                    true
                }
            };
            if ends::has_left(word) && has_executed() {
                break;
            }
        }
    }
    sys::exit_group(0)
}

/// Opens the image, and locks it, so that it stays while a program uses it. Anybody can hold that lock: it is
/// not waited for.
fn locked_image() -> Option<File> {
    let image = File::open(std::env::var_os("UZRAM_RUN_IMAGE")?).ok()?;
    let _ = rustix::fs::flock(&image, rustix::fs::FlockOperation::NonBlockingLockShared);
    Some(image)
}

fn system(what: &str, error: impl Display) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {error}"))
}

fn open(path: &str) -> Result<File> {
    File::open(path).map_err(|error| system(path, error))
}

/// Returns the paths of `stat` and `status` of a program, and of `statm`, `maps` and `smaps` of its memory.
fn paths(program: i32) -> [String; 5] {
    let program = &*program.to_string();
    let files =
        [(program, "stat"), (program, "status"), ("self", "statm"), ("self", "maps"), ("self", "smaps")];
    files.map(|(process, name)| format!("/proc/{process}/{name}"))
}

impl Process {
    fn open(control: &'static Control, begin: fn()) -> Result<Process> {
        if control.build != BUILD {
            return Err(Error::invalid("library and pager are not of the same build: install uzram again"));
        }
        let asked = Asked::of_environment().ok_or_else(|| Error::invalid("its settings are not right"))?;
        let (id, limit) = (control.program.load(Ordering::Relaxed), asked.limit_bytes);
        let calls = Uffd::new(Tells::Touches)?;
        register_calls(control, &calls)?;
        let [stat, status, statm, maps, smaps] = paths(id).map(|path| open(&path));
        let (status, program, left) = (status?, ends::pidfd(id)?, Arc::new(new_eventfd()?));
        let look_timer = ends::new_timer(GROWING_LOOK)?;
        let mut process = Process {
            others: ends::any_of([calls.as_fd(), program.as_fd(), left.as_fd(), look_timer.as_fd()])?,
            program,
            own: ends::pidfd(std::process::id().cast_signed())?,
            stat: Arc::new(stat?),
            rights: rights(&status).unwrap_or_default(),
            status,
            statm: statm?,
            maps: maps?,
            smaps: smaps?,
            image: locked_image(),
            uffd: Arc::new(Uffd::new(Tells::Changes)?),
            calls,
            figures_file: None,
            published: None,
            active: None,
            watch: None,
            left,
            has_strays: false,
            messages: Vec::with_capacity(MOST_MESSAGES),
            touches: Vec::new(),
            children: Vec::new(),
            late: Vec::new(),
            given_back: Vec::new(),
            returned: 0,
            sharing: None,
            searched_pages: 0,
            unproven: Vec::new(),
            refused: Vec::new(),
            look_timer,
            looked_pages: 0,
            near_pages: (limit - (limit / NEAR_SHARE).min(MOST_NEAR_BYTES)) >> PAGE_SHIFT,
            has_told: false,
            has_exceeded: false,
            has_warned: false,
            control,
            begin,
            asked,
        };
        process.begin_figures();
        child::prepare(control);
        confine::confine(&process.program)?;
        process.start_watch()?;
        Ok(process)
    }

    /// Says that the pager runs, and serves the program until it ends.
    fn serve(process: &'static mut Process) -> ! {
        PROCESS.store(process, Ordering::Release);
        process.control.pager.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        keeper::start(process);
        answer(process.control, state::RUNS);
        loop {
            process.turn();
        }
    }

    fn id(&self) -> i32 {
        self.control.program.load(Ordering::Relaxed)
    }

    fn core(&self) -> Option<Arc<Core>> {
        self.active.as_ref().map(|active| Arc::clone(&active.waiter.core))
    }

    /// Waits for something, and does what it asks for.
    fn turn(&mut self) {
        let is_other = match &self.active {
            Some(active) => active.waiter.wait(Some(&self.others)),
            None => ends::wait([self.others.as_fd()], None),
        };
        // Most often a page was touched: each system call that is not made shortens that.
        if is_other {
            self.read_calls();
        }
        // A thread runs as soon as its page is there, and often touches the next one at once.
        for _ in 0..MOST_READS {
            if !self.read_messages() {
                break;
            }
        }
        if !self.children.is_empty() {
            self.fill_children();
            self.touches.append(&mut self.late);
            self.read_messages();
        }
        if let Some(active) = &mut self.active {
            active.waiter.again();
        }
        if is_other && ends::has_ended(&self.program, Duration::ZERO) {
            self.tell_end();
            self.leave();
        }
        let has_left = is_other && rustix::io::read(&self.left, &mut [0; 8]).is_ok();
        if has_left && ends::wait_for_exec(&self.stat, &self.status, &self.statm) {
            self.leave();
        }
        if is_other && ends::wait([self.look_timer.as_fd()], Some(Duration::ZERO)) {
            self.look();
            let later = self.look_again_after();
            ends::set_timer(&self.look_timer, later);
        }
    }

    fn leave(&self) -> ! {
        // A child may still be about to open what both share.
        let spill = self.active.as_ref().and_then(|active| active.waiter.core.spill.as_ref());
        while spill.is_some_and(|spill| spill.is_awaited()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        keeper::let_go();
        sys::exit_group(0)
    }

    /// Answers calls of the library.
    fn read_calls(&mut self) {
        const ALL: [Call; CALLS] = [Call::ForkAsks, Call::ForkBegins, Call::ForkEnds, Call::Ends];
        let mut touches = Vec::new();
        let read = self.calls.read(|message| {
            if let Message::Touch(touch) = message {
                touches.push(touch);
            }
        });
        debug_assert!(read.is_ok(), "{read:?}");
        for touch in touches {
            let nth = touch.address.wrapping_sub(self.control.call(ALL[0])) >> PAGE_SHIFT;
            if let Some(call) = ALL.get(nth) {
                self.called(*call, touch.thread);
            }
        }
    }

    /// Returns whether the library waits for an answer.
    fn is_asked(&self) -> bool {
        self.control.asked.load(Ordering::SeqCst) != self.control.answered.load(Ordering::SeqCst)
    }

    fn called(&mut self, call: Call, thread: u32) {
        if !self.is_asked() {
            // Touched by something else, as mlockall(2); or for the second time, as after a signal.
            self.has_strays = true;
            self.calls.zero(self.control.call(call));
            return;
        }
        match call {
            Call::ForkAsks => {
                // The library may have found that it cannot help; or the program has given up rights that a
                // child's pager needs.
                let is_refused = self.control.fork_as.load(Ordering::Acquire) == fork_as::UNMANAGED;
                let managed = !is_refused && rights(&self.status).as_ref() == Some(&self.rights);
                if !managed {
                    self.bring_all();
                }
                if !managed && !std::mem::replace(&mut self.has_warned, true) {
                    let why = "it has other rights than at its start (setuid, seccomp, PR_SET_DUMPABLE)";
                    let id = self.id();
                    say(&format!("uzram: what process {id} forks goes on without a limit: {why}\n"));
                }
                let answer = if managed { fork_as::MANAGED } else { fork_as::UNMANAGED };
                self.control.fork_as.store(answer, Ordering::Release);
            }
            Call::ForkBegins => return self.rest(thread),
            Call::ForkEnds => self.start_threads(),
            Call::Ends => self.tell_end(),
        }
        self.answer(call);
    }

    /// Has the thread that calls go on. The pages of other calls are taken away: these have returned.
    fn answer(&mut self, call: Call) {
        discard_calls(self.control);
        self.control.answered.store(self.control.asked.load(Ordering::SeqCst), Ordering::SeqCst);
        self.calls.zero(self.control.call(call));
    }

    /// Reads what userfaultfd tells, and does it. Returns whether pages were touched.
    fn read_messages(&mut self) -> bool {
        self.read_changes();
        let is_any = !self.touches.is_empty();
        while let Some(touch) = self.touches.pop() {
            self.touched(touch);
        }
        is_any
    }

    /// Reads what userfaultfd tells, and does what it tells of the memory map. Touches wait in `touches`.
    fn read_changes(&mut self) {
        self.take_up();
        if !self.unproven.is_empty() {
            self.prove();
        }
    }

    /// Does what was read, and what can be read now, but proves nothing.
    fn take_up(&mut self) {
        let Some(core) = self.core() else { return };
        let (mut map, id) = (core.change_map(), self.id().cast_unsigned());
        let read = self.uffd.read(|message| self.messages.push(message));
        debug_assert!(read.is_ok(), "{read:?}");
        // Who waits for a page that has another place now, or none, touches it again.
        let wake = |range: &Range<usize>| self.uffd.wake_at(range.start, range.len() >> PAGE_SHIFT);
        for message in self.messages.drain(..) {
            match message {
                Message::Touch(touch) => {
                    if touch.thread == id {
                        self.returned = self.given_back.len();
                    }
                    self.touches.push(touch);
                }
                Message::Forked(child) => self.children.push(child),
                Message::Removed(range) => {
                    core.removed(&map.within(range.clone()), false);
                    if self.given_back.len() < MOST_MESSAGES {
                        self.given_back.push(range);
                    }
                }
                Message::Unmapped(range) => {
                    core.removed(&map.unmapped(range.clone()), true);
                    wake(&range);
                    self.unproven.extend(map.within(range));
                }
                Message::Moved(range, to) => {
                    map.rename(range.clone(), to);
                    wake(&range);
                    wake(&(to..to + range.len()));
                    self.unproven.extend(map.within(range));
                }
            }
        }
        map.is_doubtful = !self.unproven.is_empty();
        // A change ends when its thread runs again, often after all was read.
        if !map.is_settled() && !self.uffd.is_changing() {
            core.removed(&map.settled(), true);
        }
    }

    fn touched(&mut self, touch: Touch) {
        let (own, page) = (self.control.reservation(), touch.address);
        let Some(active) = &mut self.active else { return };
        // What comes back now is not away any more when children get what is: it waits for that. The thread
        // that watches the program's end may wait for a page, and the children for that thread.
        let is_watched = page == self.control.tid_address.load(Ordering::Relaxed) & !(PAGE_SIZE - 1);
        if !self.children.is_empty() && !is_watched && active.waiter.core.is_away(page) {
            return self.late.push(touch);
        }
        let by = if self.children.is_empty() { By::Reader } else { By::ReaderAnyway };
        if active.waiter.touched(touch, by) != Fault::Unknown {
            return;
        }
        let core = Arc::clone(&active.waiter.core);
        if own.contains(&page) {
            // A shelf, by mlockall(2).
            core.touched_shelf(page);
            self.uffd.zero(page);
            self.has_strays = true;
            return;
        }
        // It is registered, and not known: memory has grown. If it cannot be managed, nothing of it is away.
        self.manage(page);
        if core.part_at(page).is_some() || self.uffd.zero(page) == 0 {
            self.uffd.wake_at(page, 1);
        }
    }

    /// Takes over the mapping at an address, and its neighbours, as far as they are not managed yet.
    ///
    /// The program may change its memory map meanwhile, and the kernel tells of what is registered alone. So
    /// what is mapped is asked for at the last moment, and once more after it was registered: what was not is
    /// registered, too, until all mappings next to each other are. The last one is registered as far as it
    /// could have grown: mremap(2) refuses what is registered in part.
    ///
    /// A page of another mapping would be taken away, and be zeros when it is touched. So what was registered
    /// is tried ([`Process::prove`]): as long as no change is to be read, it is as it was. What changes now
    /// is told of; its pages stay until it was tried again.
    fn manage(&mut self, address: usize) {
        let own = self.control.reservation();
        let Some(core) = self.core() else { return };
        for _ in 0..MOST_ATTEMPTS {
            if !core.map().is_settled() || self.uffd.is_changing() {
                std::thread::yield_now();
                self.read_changes();
                continue;
            }
            let run = Maps::of(&self.maps).run_at(&own, address);
            let last = run.last().map(|last| last.range.end);
            let mut is_done = true;
            for mut gap in run.into_iter().flat_map(|mapping| core.map().gaps(mapping.range)) {
                if last == Some(gap.end) {
                    let next = Maps::of(&self.maps).from(gap.end);
                    gap.end = next.map_or(gap.end, |next| next.range.start.max(gap.end));
                }
                // What is registered already may be so again.
                if self.uffd.register(&gap).is_err() {
                    self.refused.push((gap, Instant::now()));
                    continue;
                }
                // What is registered is a mapping of its own, from here to its end.
                let mapping = Maps::of(&self.maps).plain_at(&own, gap.start);
                let Some(end) = mapping.map(|mapping| mapping.range.end.min(gap.end)) else { continue };
                if let Some(part) = core.change_map().insert(gap.start, (end - gap.start) >> PAGE_SHIFT) {
                    is_done = false;
                    self.unproven.push(part);
                }
            }
            self.prove();
            if is_done {
                break;
            }
        }
        core.room.evictor.ring();
    }

    /// Returns the pages of a part up to the end of the mapping that they begin in, or to where the next one
    /// begins; and that mapping, if it is private memory.
    fn first_piece(&self, part: Part) -> (Part, Option<Range<usize>>) {
        let maps = Maps::of(&self.maps);
        let mapping = maps.private_at(&self.control.reservation(), part.address).map(|mapping| mapping.range);
        let next = || maps.from(part.address).map_or(part.end(), |next| next.range.start);
        let end = mapping.as_ref().map_or_else(next, |mapping| mapping.end).max(part.address + PAGE_SIZE);
        (part.from(0, (end - part.address) >> PAGE_SHIFT), mapping)
    }

    /// Tries what may not be mapped. What is not registered is not managed.
    fn prove(&mut self) {
        let Some(core) = self.core() else { return };
        for mut rest in std::mem::take(&mut self.unproven) {
            while rest.pages > 0 {
                let Some(part) = core.map().of(rest.first, rest.pages) else {
                    rest = rest.from(1, rest.pages);
                    continue;
                };
                let (piece, mapping) = self.first_piece(part);
                match self.uffd.is_registered(piece.address) {
                    None => {
                        self.unproven.push(rest);
                        break;
                    }
                    Some(true) if mapping.is_some() => {
                        drop(core.note_present(&self.uffd.page_table, piece, false))
                    }
                    Some(_) => {
                        let gone = core.change_map().remove(piece.addresses());
                        core.removed(&gone, true);
                    }
                }
                rest = rest.from(piece.pages, rest.pages);
            }
        }
        core.change_map().is_doubtful = !self.unproven.is_empty();
    }

    /// Looks for memory that can be managed. What cannot be is not looked at again for a while.
    fn search(&mut self) {
        self.refused.retain(|(_, since)| since.elapsed() < REFUSED);
        let Some(core) = self.core() else { return };
        let Ok(maps) = scan::read(&self.maps) else { return };
        let found = scan::candidates_of(&maps, &self.control.reservation());
        let gaps = found.into_iter().flat_map(|range| core.map().gaps(range));
        let mut new: Vec<_> =
            gaps.filter(|gap| !self.refused.iter().any(|(refused, _)| refused == gap)).collect();
        if new.is_empty() {
            return;
        }
        let Ok(smaps) = scan::read(&self.smaps) else { return };
        let allowed = scan::allowed_of(&smaps, new.clone());
        new.retain(|range| !allowed.contains(range));
        self.refused.extend(new.into_iter().map(|range| (range, Instant::now())));
        allowed.iter().for_each(|range| self.manage(range.start));
    }

    /// Returns the pages of the program's memory that are in memory, and private.
    fn resident_pages(&self) -> u64 {
        let mut room = [0; 128];
        let mut fields = text_of(&self.statm, &mut room).unwrap_or_default().split(' ').skip(1);
        let mut number = || fields.next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        number().saturating_sub(number())
    }

    /// Returns the pages of that which are not managed, and not the pager's own.
    fn besides_pages(&self) -> u64 {
        let own = self.core().map_or(0, |core| {
            core.room.most_used_pages();
            core.room.used_pages() - core.room.expected_pages.get()
        });
        self.resident_pages().saturating_sub(own)
    }

    /// Returns how long the program's size need not be looked at.
    fn look_again_after(&mut self) -> Duration {
        let pages = self.resident_pages();
        let grows = pages > std::mem::replace(&mut self.looked_pages, pages);
        let least = if grows { GROWING_LOOK } else { STILL_LOOK };
        if self.active.is_some() {
            return least;
        }
        let rest = pages_to_bytes(self.near_pages.saturating_sub(pages));
        Duration::from_millis(rest / GROWTH_BYTES_PER_MS).clamp(least, MOST_LOOK)
    }

    /// Looks at the program's size, and at what is to be told.
    fn look(&mut self) {
        if std::mem::take(&mut self.has_strays) {
            let own = self.control.reservation();
            // Locked memory of the pager's own is unlocked: none of it needs to be.
            // SAFETY: the range is the pager's. The call changes no contents.
            let _ = unsafe { libc::munlock(std::ptr::without_provenance(own.start), own.len()) };
            discard_calls(self.control);
        }
        if self.active.is_none()
            && self.resident_pages() >= self.near_pages
            && let Err(error) = self.activate()
        {
            let how = if self.asked.hard { "ends" } else { "runs without a limit" };
            say(&format!("uzram: process {} {how}: {error}\n", self.id()));
            if self.asked.hard {
                // Its end is the program's.
                self.leave();
            }
            // It is not tried again, and all is said.
            self.near_pages = u64::MAX >> PAGE_SHIFT;
            self.has_told = !self.asked.json;
        }
        let Some(core) = self.core() else { return };
        self.start_threads();
        self.look_at_given_back(&core);
        let mut besides = self.besides_pages();
        if besides >= self.searched_pages + GROWN_PAGES.max(core.room.resident_pages.get() / GROWN_SHARE) {
            core.room.expected_pages.set(0);
            self.search();
            besides = self.besides_pages();
            self.searched_pages = besides;
        }
        self.searched_pages = self.searched_pages.min(besides);
        core.room.expected_pages.set(besides - self.searched_pages);
        if !core.room.has(0) {
            core.room.evictor.ring();
        }
        self.publish();
        if core.is_exceeded.load(Ordering::Relaxed) {
            self.exceeded(&core);
        }
    }

    /// Manages again what the program has given back and is there still, if its only thread has returned from
    /// the call that did so: what was to be emptied is empty then. Of several threads, that is not known.
    fn look_at_given_back(&mut self, core: &Core) {
        if !self.given_back.is_empty() && !self.has_one_thread() {
            self.given_back.clear();
        }
        for range in self.given_back.drain(..self.returned.min(self.given_back.len())) {
            let parts = core.map().within(range);
            parts.into_iter().for_each(|part| drop(core.note_present(&self.uffd.page_table, part, true)));
        }
        self.returned = 0;
    }

    fn has_one_thread(&self) -> bool {
        let mut room = [0; 1024];
        text_of(&self.stat, &mut room)
            .and_then(|text| stat_field(text, 20))
            .is_some_and(|threads| threads == "1")
    }

    /// Begins to manage memory.
    fn activate(&mut self) -> Result<()> {
        let core = self.asked.pager.core(Arc::clone(&self.uffd))?;
        if self.asked.hard {
            core.room.set_hard();
        }
        let threads = Threads::start(&core, self.asked.pager.goal.clone())?;
        let whose = Whose::Process(self.id().cast_unsigned(), Arc::clone(&self.stat));
        let waiter = Waiter::new(core, Arc::clone(&self.uffd), whose);
        self.active = Some(Active { waiter, threads: Some(threads) });
        self.searched_pages = 0;
        Ok(())
    }

    /// Starts the thread that sees the program's main thread leave its memory. Errors: `NoMemory`.
    fn start_watch(&mut self) -> Result<()> {
        let (left, word) = (Arc::clone(&self.left), self.control.tid_address.load(Ordering::Relaxed));
        WATCH_ENDS.store(0, Ordering::Relaxed);
        let watch = move || {
            while word != 0 && WATCH_ENDS.load(Ordering::Relaxed) == 0 {
                if ends::wait_until_left(word, &WATCH_ENDS) {
                    let _ = rustix::io::write(&left, &1u64.to_ne_bytes());
                    return;
                }
            }
        };
        self.watch = Some(spawn("uzram-pager-end", watch)?);
        Ok(())
    }
}

/// Unmaps all that is managed: what was away is lost. For the keeper, when nobody else is left who could hold
/// a lock.
fn unmap_all(process: &Process) {
    let Some(active) = &process.active else { return };
    // The pager may have died with the lock.
    if let Ok(map) = active.waiter.core.map.try_read() {
        for part in map.all() {
            // SAFETY: the program cannot go on with it.
            unsafe { sys::raw(sys::nr::MUNMAP, [part.address, part.bytes()]) };
        }
    }
}

/// Has touches of the pages of calls be messages.
fn register_calls(control: &Control, calls: &Uffd) -> Result<()> {
    let start = control.call(Call::ForkAsks);
    calls.register(&(start..start + CALLS * PAGE_BYTES)).map_err(|error| system("userfaultfd", error))
}

/// Takes the pages of all calls away.
fn discard_calls(control: &Control) {
    let start = std::ptr::with_exposed_provenance_mut(control.call(Call::ForkAsks));
    // SAFETY: the pages hold nothing.
    let _ = unsafe { rustix::mm::madvise(start, CALLS * PAGE_BYTES, rustix::mm::Advice::LinuxDontNeed) };
}
