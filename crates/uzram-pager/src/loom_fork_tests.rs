//! A process that forks: the gate, and threads that wait for room.
//!
//! What the models have of their own is the kernel's part ([`Kernel`]), and the order of calls in some
//! functions, which they name.

use std::sync::OnceLock;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use uzram::store::Store;
use uzram::store::StoreBuilder;

use crate::gate::Gate;
use crate::room::Room;

/// The thread that forks; other threads have other numbers, and each a page of its own.
const FORKER: u32 = 1;
const THREADS: usize = 3;
/// The pages of a limit: the least of a pager.
const LIMIT: u64 = 1024;

/// The kernel's part: touches of pages that are not there send messages, and wait.
struct Kernel {
    state: Mutex<Faults>,
    changed: Condvar,
}

#[derive(Default)]
struct Faults {
    /// The threads whose touches have not been read; 0 has the reader end.
    messages: Vec<u32>,
    is_there: [bool; THREADS],
    waits: [bool; THREADS],
}

impl Kernel {
    fn change<R>(&self, change: impl FnOnce(&mut Faults) -> R) -> R {
        let changed = change(&mut self.state.lock().expect("no panic"));
        self.changed.notify_all();
        changed
    }

    /// Touches the thread's page. A thread that finds it there before it sleeps is not woken.
    fn touch(&self, thread: u32) {
        let nth = thread as usize;
        let touches = |state: &mut Faults| {
            if !state.is_there[nth] {
                state.messages.push(thread);
                state.waits[nth] = true;
            }
            !state.is_there[nth]
        };
        while self.change(touches) {
            let mut state = self.state.lock().expect("no panic");
            if state.is_there[nth] {
                state.waits[nth] = false;
            }
            while state.waits[nth] {
                state = self.changed.wait(state).expect("no panic");
            }
        }
    }

    fn read(&self) -> u32 {
        let mut state = self.state.lock().expect("no panic");
        while state.messages.is_empty() {
            state = self.changed.wait(state).expect("no panic");
        }
        state.messages.remove(0)
    }

    /// As `Uffd::copy`.
    fn copy(&self, thread: u32, wakes: bool) {
        self.change(|state| {
            state.is_there[thread as usize] = true;
            state.waits[thread as usize] &= !wakes;
        });
    }

    fn wake(&self, thread: u32) {
        self.change(|state| state.waits[thread as usize] = false);
    }

    /// As `Uffd::retry_all`.
    fn retry_all(&self) {
        self.change(|state| state.waits = [false; THREADS]);
    }
}

/// What one thread that serves touches moves, and the process has when it forks.
struct Process {
    gate: Gate,
    kernel: Kernel,
    tables: UnsafeCell<u32>,
    /// Not a part of the model: it checks.
    is_closed: std::sync::atomic::AtomicBool,
}

impl Process {
    fn new() -> Arc<Process> {
        Arc::new(Process {
            gate: Gate::new(),
            kernel: Kernel { state: Mutex::default(), changed: Condvar::new() },
            tables: UnsafeCell::new(0),
            is_closed: std::sync::atomic::AtomicBool::new(false),
        })
    }

    fn spawn(process: &Arc<Self>, run: impl FnOnce(&Process) + 'static) -> thread::JoinHandle<()> {
        let process = Arc::clone(process);
        thread::spawn(move || run(&process))
    }

    /// As `Waiters::serve` and `Waiters::bring`.
    fn serve(&self) {
        loop {
            let thread = self.kernel.read();
            if thread == 0 {
                return;
            }
            let Some(_admitted) = self.gate.admit(thread) else { continue };
            self.fault(thread);
            if self.gate.is_forker(thread) {
                self.kernel.wake(thread);
            }
        }
    }

    /// As `Core::fault`: the page comes first, then tables are changed.
    fn fault(&self, thread: u32) {
        assert!(thread == FORKER || !self.is_closed.load(Ordering::Relaxed), "the gate is closed");
        self.kernel.copy(thread, self.gate.is_open());
        // SAFETY: loom checks that nobody else is at it.
        self.tables.with_mut(|tables| unsafe { *tables += 1 });
    }

    /// Forks: `touches` ends before the process is copied.
    fn fork(&self, touches: impl FnOnce()) {
        let closed = self.gate.close(FORKER);
        self.is_closed.store(true, Ordering::Relaxed);
        touches();
        closed.settle();
        // SAFETY: loom checks that nobody changes it.
        self.tables.with(|tables| unsafe { std::ptr::read(tables) });
        self.is_closed.store(false, Ordering::Relaxed);
        drop(closed);
        self.kernel.retry_all();
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(builder.preemption_bound.unwrap_or(2));
    builder.check(model);
}

/// While the gate is closed only touches of the thread that forks are served, and nothing moves when that
/// goes on. Touches of others are served afterwards.
#[test]
fn loom_a_touch_is_served_when_the_gate_opens() {
    check(|| {
        let process = Process::new();
        let server = Process::spawn(&process, Process::serve);
        let other = Process::spawn(&process, |process| process.kernel.touch(2));
        process.fork(|| process.kernel.touch(FORKER));
        other.join().expect("no panic");
        process.kernel.change(|state| state.messages.push(0));
        server.join().expect("no panic");
    });
}

/// The thread that forks touches its stack at any time, also while it closes the gate: a thread of the
/// model's own does it.
#[test]
fn loom_a_touch_while_the_gate_closes_is_served() {
    check(|| {
        let process = Process::new();
        let server = Process::spawn(&process, Process::serve);
        let other = Process::spawn(&process, |process| process.kernel.touch(2));
        let touch = Process::spawn(&process, |process| process.kernel.touch(FORKER));
        process.fork(|| touch.join().expect("no panic"));
        other.join().expect("no panic");
        process.kernel.change(|state| state.messages.push(0));
        server.join().expect("no panic");
    });
}

/// A thread that changes memory touches its stack meanwhile, while another one is about to fork.
#[test]
fn loom_a_change_ends_before_the_gate_closes() {
    check(|| {
        let process = Process::new();
        let server = Process::spawn(&process, Process::serve);
        let changer = Process::spawn(&process, |process| {
            let _changing = process.gate.change();
            process.kernel.touch(2);
            assert!(!process.is_closed.load(Ordering::Relaxed), "the gate is closed");
        });
        let stopped = process.gate.stop_changes();
        process.fork(|| {});
        drop(stopped);
        changer.join().expect("no panic");
        process.kernel.change(|state| state.messages.push(0));
        server.join().expect("no panic");
    });
}

/// An empty store, which counts no pages: all models share it.
fn store() -> &'static Store {
    static STORE: OnceLock<Store> = OnceLock::new();
    STORE.get_or_init(|| StoreBuilder::new("model", 1).lru(false).build().expect("there is memory"))
}

/// A thread that waits for room lets go when the process forks, and the evictor stops. Nothing can leave, and
/// memory may not grow, so that nothing else ends the wait.
#[test]
fn loom_a_wait_for_room_ends_when_the_process_forks() {
    store();
    check(|| {
        // All pages of the limit are in memory.
        let shared = Arc::new((Room::new(LIMIT, 1), Gate::new(), Mutex::new(()), AtomicBool::new(false)));
        shared.0.set_hard();
        (0..LIMIT).for_each(|_| shared.0.came(false));
        let spawn = |run: fn(&Room, &Gate, &Mutex<()>, &AtomicBool)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || run(&shared.0, &shared.1, &shared.2, &shared.3))
        };
        let server = spawn(|room, gate, _, _| {
            let admitted = gate.admit(2);
            if admitted.is_some() {
                room.wait_for_page(store(), || {});
            }
        });
        // As `Evictor::start`.
        let evictor = spawn(|room, _, evicting, ends| {
            while !ends.load(Ordering::Relaxed) {
                drop(evicting.lock().expect("no panic"));
                room.rest(None);
            }
        });
        let (room, gate, evicting, ends) = &*shared;
        // As `Running::stop` and `Running::pause`.
        room.hold(true);
        let working = evicting.lock().expect("no panic");
        let closed = gate.close(FORKER);
        // As `Memory::after_fork`.
        room.hold(false);
        drop((closed, working));
        // A wait that begins only now ends when the process forks again.
        room.hold(true);
        server.join().expect("no panic");
        // As `Evictor::drop`.
        ends.store(true, Ordering::Relaxed);
        room.wake_evictor();
        evictor.join().expect("no panic");
    });
}
