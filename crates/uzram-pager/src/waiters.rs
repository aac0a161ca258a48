//! The threads that wait for messages of userfaultfd.
//!
//! The kernel wakes all of them for each touch, wherever they are. A thread on the CPU of the one that
//! touched is there at once, when that one sleeps, and wakes it without an interrupt; one on another CPU
//! takes twice as long, and interrupts that CPU for nothing if it comes second. So there are as many threads
//! as CPUs from which touches come, and each stays on one of these.
//!
//! A message tells which thread touched, and `/proc` where that ran last. This is looked up now and then.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};
use uzram::Result;
use uzram::sync::Counter;

use crate::core::{Core, lock, spawn};
use crate::trap::Trap;
use crate::trap::uffd::{Touch, Uffd};

/// The most threads that are of use.
pub(crate) const MOST_THREADS: usize = 4;
/// Microseconds from one lookup to the next.
const LOOKUP_US: u64 = 1000;
/// The lookups of which the CPUs count.
const LOOKUPS: usize = 8;

/// See the [module's documentation](self).
pub(crate) struct Waiters {
    core: Arc<Core<Uffd>>,
    start: Instant,
    /// When the next lookup is due, in microseconds since `start`.
    next_us: Counter,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: Vec<JoinHandle<()>>,
    ids: Vec<Pid>,
    /// The CPUs of the last lookups.
    seen: [Option<u16>; LOOKUPS],
    lookups: usize,
    /// The CPUs that the threads are on, the first thread on the first.
    hot: Vec<u16>,
    /// How many may be started.
    most: usize,
}

impl Waiters {
    /// Starts the first `count` threads, of at most `most`. If these are all, no thread is looked up: they
    /// stay where they are, one on each CPU if there are as many, and open no files. A program may rely on
    /// the numbers of the files that it opens. Errors: `NoMemory`.
    pub(crate) fn start(core: &Arc<Core<Uffd>>, count: usize, most: usize) -> Result<Arc<Self>> {
        let waiters = Arc::new(Waiters {
            core: Arc::clone(core),
            start: Instant::now(),
            next_us: Counter::new(0),
            state: Mutex::new(State { most, ..State::default() }),
        });
        let mut state = lock(&waiters.state);
        for nth in 0..count {
            match waiters.start_one(&mut state) {
                Err(error) if nth == 0 => return Err(error),
                // The others do more.
                Err(_) => break,
                Ok(()) => {}
            }
        }
        if count == most {
            waiters.next_us.set(u64::MAX);
            state.hot = all_cpus().filter(|cpus| cpus.len() == count).unwrap_or_default();
        }
        drop(state);
        Ok(waiters)
    }

    fn start_one(self: &Arc<Self>, state: &mut State) -> Result<()> {
        let waiters = Arc::clone(self);
        let run = move || {
            {
                let mut state = lock(&waiters.state);
                state.ids.push(gettid());
                state.place();
            }
            waiters.serve();
        };
        state.threads.push(spawn(&format!("uzram-pager-{}", state.threads.len()), run)?);
        Ok(())
    }

    /// Brings pages that were touched, until a message tells to end.
    fn serve(self: &Arc<Self>) {
        let trap = &self.core.trap;
        let mut ends = false;
        while !ends {
            let served = trap.wait(|touch| {
                if trap.take_message(&touch) {
                    ends = true;
                } else if let Some(page) = trap.space().page_at(touch.address) {
                    self.bring(page, &touch);
                }
            });
            // The descriptor is open for as long as this thread is.
            debug_assert!(served.is_ok(), "{served:?}");
        }
    }

    fn bring(self: &Arc<Self>, page: u64, touch: &Touch) {
        let gate = &self.core.trap.gate;
        // All touches are repeated when the process has forked.
        let Some(_admitted) = gate.admit(touch.thread) else { return };
        self.core.fault(page, touch.writes, false);
        if gate.is_forker(touch.thread) {
            // Now it may go on: nothing is left to do here.
            self.core.trap.wake_forker(page);
        } else {
            self.look_up(touch.thread);
        }
    }

    /// Looks up where a thread ran last, if that is due, and has threads wait there.
    fn look_up(self: &Arc<Self>, thread: u32) {
        let now_us = self.start.elapsed().as_micros() as u64;
        if now_us < self.next_us.get() {
            return;
        }
        self.next_us.set(now_us + LOOKUP_US);
        let Some(cpu) = cpu_of(thread) else { return };
        let mut state = lock(&self.state);
        let at = state.lookups % LOOKUPS;
        (state.seen[at], state.lookups) = (Some(cpu), state.lookups + 1);
        let mut hot: Vec<u16> = state.seen.iter().flatten().copied().collect();
        hot.sort_unstable();
        hot.dedup();
        hot.truncate(MOST_THREADS);
        if hot == state.hot {
            return;
        }
        state.hot = hot;
        if state.threads.len() < state.hot.len().min(state.most) {
            // Without it, the others do more.
            let _ = self.start_one(&mut state);
        }
        state.place();
    }

    /// Ends all threads.
    pub(crate) fn end(&self) {
        let threads = {
            let mut state = lock(&self.state);
            state.most = 0;
            std::mem::take(&mut state.threads)
        };
        threads.iter().for_each(|_| self.core.trap.send_message());
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl State {
    /// Has each thread stay on its CPU. Where that is refused, it stays where it is.
    fn place(&self) {
        for (id, cpu) in self.ids.iter().zip(self.hot.iter().cycle()) {
            let mut only = CpuSet::new();
            only.set(usize::from(*cpu));
            let _ = sched_setaffinity(Some(*id), &only);
        }
    }
}

/// Returns the CPUs that this thread may run on.
fn all_cpus() -> Option<Vec<u16>> {
    let allowed = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| cpu as u16).collect())
}

/// Returns the CPU that a thread of this process ran on last.
fn cpu_of(thread: u32) -> Option<u16> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // Field 39; the second, the name, is in parentheses and may have spaces (proc_pid_stat(5)).
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_thread_is_found_on_its_cpu() {
        let mut only = CpuSet::new();
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)) {
            only.clear();
            only.set(cpu);
            sched_setaffinity(None, &only).unwrap();
            assert_eq!(cpu_of(gettid().as_raw_nonzero().get().cast_unsigned()), Some(cpu as u16));
        }
        assert_eq!(cpu_of(0), None);
    }
}
