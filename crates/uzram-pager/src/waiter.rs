//! Reads what userfaultfd tells, and has pages brought.
//!
//! One thread does it, and waits for nothing else: touches for which there is no room wait in a list. It
//! follows the thread that touches: a message tells which that is, and `/proc` on which CPU it ran last.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::core::{By, Core, Fault};
use crate::room::{MOST_WAIT, WAIT};
use crate::system::{stat_field, text_of};
use crate::uffd::{Message, Touch, Uffd};

/// How long a thread is taken to stay on its CPU, at least and at most: twice as long each time that it has.
/// The kernel may move it to an idle one each time that it is woken. To look takes a tenth of a fault's time.
const LOOKUP: Duration = Duration::from_micros(40);
const MOST_LOOKUP: Duration = Duration::from_millis(1);

pub(crate) struct Waiter {
    pub(crate) core: Arc<Core>,
    uffd: Arc<Uffd>,
    /// Touches that wait for room, and for how long at most.
    waiting: Vec<(Touch, Instant)>,
    cpu: Follower,
}

impl Waiter {
    /// `whose` are the threads that touch.
    pub(crate) fn new(core: Arc<Core>, uffd: Arc<Uffd>, whose: Whose) -> Waiter {
        Waiter { core, uffd, waiting: Vec::new(), cpu: Follower::new(whose) }
    }

    /// Goes on in a child, with descriptors of its own. Errors: `NoMemory`.
    #[cfg(feature = "image")]
    pub(crate) fn begin_in_child(&mut self, process: i32) -> uzram::Result<()> {
        crate::system::renew(self.core.room.reader.as_fd(), crate::system::new_eventfd()?)?;
        if let Whose::Process(main, _) = &mut self.cpu.whose {
            *main = process.cast_unsigned();
        }
        (self.cpu.look_at, self.cpu.cpu) = (None, None);
        Ok(())
    }

    /// Brings pages until the pager ends.
    pub(crate) fn serve(&mut self) {
        let uffd = Arc::clone(&self.uffd);
        while !self.core.ends.load(Ordering::Relaxed) {
            self.wait(None);
            let read = uffd.read(|message| {
                // Nothing else is told of.
                if let Message::Touch(touch) = message {
                    self.touched(touch, By::Reader);
                }
            });
            // The descriptor is open for as long as this thread is.
            debug_assert!(read.is_ok(), "{read:?}");
            self.again();
        }
    }

    /// Waits for a message, for room, or for another that can be read; not for ever if touches wait. Returns
    /// whether that can be.
    pub(crate) fn wait(&self, other: Option<&OwnedFd>) -> bool {
        let most = (!self.waiting.is_empty()).then_some(WAIT).and_then(|most| most.try_into().ok());
        let bell = &self.core.room.reader;
        let poll_for = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut all = [self.uffd.as_fd(), bell.as_fd(), other.unwrap_or(bell).as_fd()].map(poll_for);
        let _ = poll(&mut all[..2 + usize::from(other.is_some())], most.as_ref());
        if all[1].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
        other.is_some() && !all[2].revents().is_empty()
    }

    fn note_waiting(&self) {
        self.core.room.touches.store(self.waiting.len() as u32, Ordering::SeqCst);
    }

    /// Returns the touches that wait for room, which do not any more.
    pub(crate) fn stop_waiting(&mut self) -> Vec<Touch> {
        let waiting = std::mem::take(&mut self.waiting);
        self.note_waiting();
        waiting.into_iter().map(|(touch, _)| touch).collect()
    }

    /// Brings the page of a touch, if there is room for it; otherwise the touch waits.
    pub(crate) fn touched(&mut self, touch: Touch, by: By) -> Fault {
        let fault = self.core.fault(touch.address, touch.writes, by);
        match fault {
            Fault::Done => self.cpu.follow(touch.thread),
            Fault::NoRoom => {
                self.waiting.push((touch, Instant::now() + MOST_WAIT));
                self.note_waiting();
                self.core.note_wait();
                // It may have been made meanwhile.
                self.core.room.evictor.ring();
            }
            Fault::Changing => self.uffd.wake_at(touch.address, 1),
            // It fails.
            Fault::Lost | Fault::Unknown => {}
        }
        fault
    }

    /// Brings the pages of touches that have waited, if there is room now or they have waited for long.
    pub(crate) fn again(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let (now, core, uffd) = (Instant::now(), &self.core, &self.uffd);
        self.waiting.retain(|(touch, until)| {
            let by = if now < *until { By::Reader } else { By::ReaderAnyway };
            let fault = core.fault(touch.address, touch.writes, by);
            if matches!(fault, Fault::Changing | Fault::Unknown) {
                uffd.wake_at(touch.address, 1);
            }
            fault == Fault::NoRoom
        });
        self.note_waiting();
    }
}

/// Whose threads touch memory.
pub(crate) enum Whose {
    /// This process's.
    Own,
    /// Another's: its id, and its `stat`, which tells of its main thread alone. No other can be opened.
    Process(u32, Arc<File>),
}

/// Has this thread stay on the CPU of those that touch.
struct Follower {
    whose: Whose,
    /// When it is to look next, and how long after that again.
    look_at: Option<Instant>,
    every: Duration,
    cpu: Option<usize>,
}

impl Follower {
    fn new(whose: Whose) -> Follower {
        Follower { whose, look_at: None, every: LOOKUP, cpu: None }
    }

    fn follow(&mut self, thread: u32) {
        let now = Instant::now();
        if self.look_at.is_some_and(|at| now < at) {
            return;
        }
        let Some(cpu) = self.cpu_of(thread) else { return };
        let has_moved = self.cpu.replace(cpu) != Some(cpu);
        self.every = if has_moved { LOOKUP } else { (2 * self.every).min(MOST_LOOKUP) };
        self.look_at = Some(now + self.every);
        if has_moved {
            let mut only = CpuSet::new();
            only.set(cpu);
            // Where that is refused, it stays where it is.
            let _ = sched_setaffinity(None, &only);
        }
    }

    /// Returns the CPU that a thread ran on last.
    fn cpu_of(&self, thread: u32) -> Option<usize> {
        let mut room = [0; 1024];
        let text = match &self.whose {
            Whose::Own => text_of(&File::open(format!("/proc/self/task/{thread}/stat")).ok()?, &mut room),
            Whose::Process(main, _) if *main != thread => None,
            Whose::Process(_, stat) => text_of(stat, &mut room),
        };
        stat_field(text?, 39)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{gettid, sched_getaffinity};

    use super::*;

    #[test]
    fn a_thread_is_found_on_its_cpu() {
        let follower = Follower::new(Whose::Own);
        let allowed = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap();
        let mut only = CpuSet::new();
        only.set(last);
        sched_setaffinity(None, &only).unwrap();
        assert_eq!(follower.cpu_of(gettid().as_raw_nonzero().get().cast_unsigned()), Some(last));
        assert_eq!(follower.cpu_of(0), None);
    }
}
