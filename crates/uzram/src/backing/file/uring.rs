//! The engine `uring`: one thread and its io_uring.
//!
//! The thread alone submits and reaps. The kernel ties a request to the thread that submitted it: it interrupts
//! that thread to complete it, and cancels it when the thread ends. Neither is to happen to a caller's thread, so
//! callers only put transfers into a queue and wake the thread up if it sleeps: the ring always has a read of an
//! eventfd in flight.
//!
//! Invariant: the kernel may touch a buffer from the push of its entry until its completion was reaped. All that
//! time, and no longer, the buffer belongs to [`InFlight`]. The file stays open as long, through [`Target`].
//!
//! After a panic no further transfer is pushed; those already in the ring are carried out, and end with an error. All
//! others end with it at once. A buffer whose completion will never be reaped is leaked rather than freed.
//!
//! Lock: `backing queue`, held only to put transfers into the queue and to take them out.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::engine::{Progress, Target};
use crate::backing::{Direction, SETTING, Started, Transfer, dead};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, AtomicU64, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on};

/// What the completion of the eventfd's read says instead of a transfer's place.
const WAKE: u64 = u64::MAX;
/// Where the kernel puts the eventfds' counts, which nobody looks at: memory that is never freed.
static WAKE_COUNT: AtomicU64 = AtomicU64::new(0);
/// How long the thread rests when the ring itself fails, for want of memory for example.
const RING_RETRY_AFTER: Duration = Duration::from_millis(1);

/// The ring of a backing. Dropped, it carries out what is queued and waits for all that is in flight.
pub(super) struct Uring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: OwnedFd,
}

struct Queue {
    transfers: VecDeque<Started>,
    /// The thread waits for completions, and would not see a new transfer by itself.
    asleep: bool,
    closed: bool,
}

impl Uring {
    /// Makes a ring for `queue_depth` transfers at a time.
    ///
    /// # Errors
    /// `Unsupported` when the system has no io_uring, does not permit it, or gives it no memory.
    pub(super) fn new(target: Arc<Target>, queue_depth: usize) -> Result<Self> {
        // One entry more, for the eventfd: there always is room for what is pushed.
        let ring = make_ring(queue_depth as u32 + 1).map_err(|error| refused(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| refused(&error))?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(refused(&Errno::NOSYS.into()));
        }
        let wake =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| refused(&errno.into()))?;
        let queue = Queue { transfers: VecDeque::with_capacity(queue_depth), asleep: false, closed: false };
        let shared = Arc::new(Shared { queue: Mutex::new(&classes::BACKING_QUEUE, queue), wake });
        let driver = Driver {
            ring,
            target,
            shared: Arc::clone(&shared),
            in_flight: InFlight::new(queue_depth),
            fresh: Vec::with_capacity(queue_depth),
            reaped: VecDeque::with_capacity(queue_depth + 1),
            wake_armed: false,
            is_overfull: false,
            closing: false,
            usable: Ok(()),
        };
        let thread = spawn_relied_on("uzram-back", driver, Driver::run, Driver::refuse)?;
        Ok(Uring { shared, thread: Some(thread) })
    }

    pub(super) fn start(&self, transfer: Transfer) {
        let mut queue = self.shared.queue.lock();
        queue.transfers.push_back(Started::new(transfer));
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        if asleep {
            self.shared.wake_up();
        }
    }
}

/// A ring that runs the kernel's part of completions when its thread waits for them, and not by interrupting it
/// (Linux 6.1), or an ordinary one. It is to be enabled by the thread that will use it.
fn make_ring(entries: u32) -> std::io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled();
    builder.clone().setup_single_issuer().setup_defer_taskrun().build(entries).or_else(|error| {
        let is_unknown = error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
        if is_unknown { builder.build(entries) } else { Err(error) }
    })
}

fn refused(error: &std::io::Error) -> Error {
    let what = format!("io_uring can not be used here: {error}; the engine 'threads' does without");
    Error::new(ErrorKind::Unsupported, what).with_setting(SETTING)
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.wake_up();
        self.thread.take().into_iter().for_each(join);
    }
}

impl Shared {
    fn wake_up(&self) {
        // It fails only when 2^64 - 2 calls were not read yet.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The transfers that the kernel has, by their place, which is what their completions name.
struct InFlight {
    places: Vec<Option<(Started, Progress)>>,
    free: Vec<usize>,
}

impl InFlight {
    fn new(queue_depth: usize) -> Self {
        InFlight { places: (0..queue_depth).map(|_| None).collect(), free: (0..queue_depth).collect() }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Keeps a transfer, before the kernel gets any of it; returns its place.
    fn put(&mut self, transfer: Started, progress: Progress) -> usize {
        let place =
            self.free.pop().expect("no more transfers are taken from the queue than there are places");
        self.places[place] = Some((transfer, progress));
        place
    }

    /// The transfer at `place`, of which the kernel has nothing any more.
    fn remove(&mut self, place: usize) -> Option<(Started, Progress)> {
        let removed = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(removed)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // The kernel may still write to their buffers.
        self.places.drain(..).for_each(std::mem::forget);
    }
}

/// What the thread has.
struct Driver {
    ring: IoUring,
    target: Arc<Target>,
    shared: Arc<Shared>,
    in_flight: InFlight,
    /// Taken from the queue and not pushed yet; empty between steps.
    fresh: Vec<Started>,
    /// Places and answers of completions; empty between steps.
    reaped: VecDeque<(u64, i32)>,
    /// The eventfd's read is in flight.
    wake_armed: bool,
    /// The queue holds more than was taken. Nobody wakes this thread for it.
    is_overfull: bool,
    /// The backing is being dropped.
    closing: bool,
    /// Why no transfer is carried out any more, if so.
    usable: Result<()>,
}

impl Driver {
    fn run(&mut self) {
        // It fails only for a ring that is enabled already.
        let _ = self.ring.submitter().register_enable_rings();
        while self.take_fresh() {
            self.push_fresh();
            if self.is_overfull && self.in_flight.is_empty() {
                // All that were taken failed to begin: no completion will make room, and there is room already.
                continue;
            }
            self.submit_and_wait();
            // Until it sleeps again, it sees what is started by itself: what completions start above all.
            self.shared.queue.lock().asleep = false;
            self.reap();
        }
    }

    /// After a panic: goes on until the kernel has nothing any more, and to say no.
    fn refuse(&mut self, why: &str) {
        self.usable = Err(dead(why));
        // What had been reaped before.
        self.reap();
        self.run();
    }

    /// Takes as many transfers out of the queue as there are free places. False when all is done.
    fn take_fresh(&mut self) -> bool {
        let mut queue = self.shared.queue.lock();
        let room = self.in_flight.free.len().min(queue.transfers.len());
        self.fresh.extend(queue.transfers.drain(..room));
        // Transfers that found no place are taken when a completion has made one.
        self.is_overfull = !queue.transfers.is_empty();
        queue.asleep = !self.is_overfull;
        self.closing = queue.closed;
        !(self.closing && self.fresh.is_empty() && self.in_flight.is_empty())
    }

    fn push_fresh(&mut self) {
        if !self.wake_armed {
            let count = WAKE_COUNT.as_ptr().cast();
            let read =
                opcode::Read::new(types::Fd(self.shared.wake.as_raw_fd()), count, size_of::<u64>() as u32);
            // SAFETY: the count is a static, and the eventfd is closed by `Shared` after the ring.
            unsafe { push(&mut self.ring, &read.build().user_data(WAKE)) };
            self.wake_armed = true;
        }
        let mut fresh = std::mem::take(&mut self.fresh);
        for transfer in fresh.drain(..) {
            let Transfer { direction, offset, len_bytes, buffer, .. } = &*transfer;
            let begin = || self.target.begin(*direction, *offset, *len_bytes, buffer);
            match self.usable.clone().and_then(|()| begin()) {
                Ok(progress) => self.push_rest(transfer, progress),
                Err(error) => transfer.finish(Err(error)),
            }
        }
        self.fresh = fresh;
    }

    /// Hands the kernel what is left of a transfer.
    fn push_rest(&mut self, transfer: Started, progress: Progress) {
        let (rest, fd) = (progress.rest(), types::Fd(self.target.fd.as_raw_fd()));
        let len_bytes = rest.len() as u32; // At most MAX_BUFFER_BYTES.
        // SAFETY: the rest lies in the buffer, as `begin` saw.
        let start = unsafe { transfer.buffer.start().add(rest.start) };
        let entry = match transfer.direction {
            Direction::Read => opcode::Read::new(fd, start, len_bytes).offset(progress.offset()).build(),
            Direction::Write => opcode::Write::new(fd, start, len_bytes).offset(progress.offset()).build(),
        };
        let place = self.in_flight.put(transfer, progress) as u64;
        // SAFETY: `in_flight` has the buffer, and keeps it until the entry's completion was reaped, or for ever; `target`
        // keeps the file open.
        unsafe { push(&mut self.ring, &entry.user_data(place)) };
    }

    fn submit_and_wait(&self) {
        // When nobody will wake this thread up any more, it only waits for what is in flight.
        let want = usize::from(!self.closing || !self.in_flight.is_empty());
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // What was not submitted stays in the ring, and is tried again.
            Err(_) => std::thread::sleep(RING_RETRY_AFTER),
        }
    }

    fn reap(&mut self) {
        self.reaped.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        // One by one: a panic loses none of the others.
        while let Some((place, answer)) = self.reaped.pop_front() {
            if place == WAKE {
                self.wake_armed = false;
            } else {
                let answer = usize::try_from(answer).map_err(|_| Errno::from_raw_os_error(-answer));
                self.settle(place as usize, answer);
            }
        }
    }

    /// Goes on with a transfer whose last entry the kernel has completed.
    fn settle(&mut self, place: usize, answer: Result<usize, Errno>) {
        let Some((transfer, mut progress)) = self.in_flight.remove(place) else { return };
        let result = match &self.usable {
            Ok(()) => progress.advance(answer),
            Err(dead) => Some(Err(dead.clone())),
        };
        match result {
            None => self.push_rest(transfer, progress),
            Some(result) => transfer.finish(result),
        }
    }
}

/// Puts an entry into the submission queue.
///
/// # Safety
/// What the entry names stays valid until its completion was reaped.
unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the caller's.
    let pushed = unsafe { ring.submission().push(entry) };
    // Each place has at most one entry, and the eventfd one.
    pushed.expect("the queue has an entry for each place and one more");
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Mutex;

    use super::super::engine::PanicPoint;
    use super::*;
    use crate::backing::Buffers;
    use crate::backing::tests::Ends;
    use crate::base::units::PAGE_SIZE;

    /// A buffer that the kernel has when the thread panics comes back when the kernel is done with it.
    #[test]
    fn the_kernel_keeps_its_buffers_when_the_thread_panics() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let (fd, len_bytes) = (OwnedFd::from(reader), 1 << 20);
        let panic_point = Mutex::default();
        let target = Arc::new(Target { fd, start_bytes: 0, len_bytes, block_bytes: PAGE_SIZE, panic_point });
        let uring = match Uring::new(Arc::clone(&target), 4) {
            Ok(uring) => uring,
            Err(error) => return println!("skipped: {error}"),
        };
        let (ends, buffers) = (Ends::new(), Buffers::new(4, PAGE_SIZE).expect("memory"));
        let start = |token, offset| {
            let (direction, buffer) = (Direction::Read, buffers.take().expect("free"));
            let completion: Arc<dyn crate::backing::Completion> = Arc::<Ends>::clone(&ends);
            uring.start(Transfer { direction, offset, len_bytes: PAGE_SIZE, buffer, token, completion });
        };
        // It waits for the pipe. The one behind it ends at once, so that the first is on its way then.
        start(1, 0);
        start(2, 1);
        assert_eq!(ends.wait(2).1.expect_err("no block").kind(), ErrorKind::Invalid);
        *target.panic_point.lock().expect("no panic") = Some(PanicPoint::Begin);
        start(3, 0);
        assert_eq!(ends.wait(3).1.expect_err("a panic").kind(), ErrorKind::Io);
        start(4, 0);
        let error = ends.wait(4).1.expect_err("it has died").to_string();
        assert!(error.contains("a test asked for it"), "{error}");
        assert_eq!((ends.count(), buffers.free()), (0, 3), "the kernel has the first one's");
        writer.write_all(&[5; PAGE_SIZE]).expect("room");
        let (buffer, result) = ends.wait(1);
        assert_eq!(result.expect_err("it has died").to_string(), error);
        assert!(buffer.iter().all(|byte| *byte == 5));
        drop(uring);
    }
}
