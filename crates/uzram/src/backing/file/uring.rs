//! The engine `uring`: one thread and its io_uring. docs/internals/backing.md says why only this thread
//! submits and reaps, and what a panic does. The ring always has a read of an eventfd in flight, which wakes
//! the thread.
//!
//! Invariant: the kernel may access a buffer from the push of its entry until its completion was reaped.
//! During that time, and no longer, the buffer belongs to [`InFlight`]; one whose completion will never be
//! reaped is leaked rather than freed. The file stays open as long, through [`Target`].
//!
//! Lock: `backing queue`, held only to add transfers to the queue and to take them out.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::engine::{Progress, QUEUE_DEPTH, Target};
use crate::backing::{Direction, SETTING, Started, Transfer, dead};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, AtomicU64, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on};

/// The user data of the eventfd's read; that of other entries is a transfer's place.
const WAKE: u64 = u64::MAX;
/// Where the kernel writes the eventfds' counts, which are not used: memory that is never freed.
static WAKE_COUNT: AtomicU64 = AtomicU64::new(0);
/// How long the thread rests when the ring itself fails, for lack of memory for example.
const RING_RETRY_AFTER: Duration = Duration::from_millis(1);

/// The ring of a backing. Dropping it carries out all queued transfers and waits for those in flight.
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
    /// The thread waits for completions, and must be woken for a new transfer.
    asleep: bool,
    closed: bool,
}

impl Uring {
    pub(super) fn new(target: Arc<Target>) -> Result<Self> {
        // One more entry for the eventfd, so that a push always finds room.
        let ring = make_ring(QUEUE_DEPTH as u32 + 1).map_err(|error| refused(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| refused(&error))?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(refused(&Errno::NOSYS.into()));
        }
        let wake =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| refused(&errno.into()))?;
        let queue = Queue { transfers: VecDeque::with_capacity(QUEUE_DEPTH), asleep: false, closed: false };
        let shared = Arc::new(Shared { queue: Mutex::new(&classes::BACKING_QUEUE, queue), wake });
        let driver = Driver {
            ring,
            target,
            shared: Arc::clone(&shared),
            in_flight: InFlight {
                places: (0..QUEUE_DEPTH).map(|_| None).collect(),
                free: (0..QUEUE_DEPTH).collect(),
            },
            fresh: Vec::with_capacity(QUEUE_DEPTH),
            reaped: VecDeque::with_capacity(QUEUE_DEPTH + 1),
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

/// Creates a ring whose completion work runs when its thread waits, instead of interrupting it
/// (DEFER_TASKRUN, Linux 6.1), or else an ordinary one. The thread that will use the ring must enable it.
fn make_ring(entries: u32) -> std::io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled();
    builder.clone().setup_single_issuer().setup_defer_taskrun().build(entries).or_else(|error| {
        let is_unknown = error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
        if is_unknown { builder.build(entries) } else { Err(error) }
    })
}

fn refused(error: &std::io::Error) -> Error {
    let what = format!("io_uring cannot be used here: {error}; the engine 'threads' does not need it");
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
        // It fails only if 2^64 - 2 wake-ups were not read yet.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The transfers that the kernel works on, by place, which is their entries' user data.
struct InFlight {
    places: Vec<Option<(Started, Progress)>>,
    free: Vec<usize>,
}

impl InFlight {
    fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Adds a transfer, before it is pushed to the kernel. Returns its place.
    fn put(&mut self, transfer: Started, progress: Progress) -> usize {
        let place =
            self.free.pop().expect("no more transfers are taken from the queue than there are places");
        self.places[place] = Some((transfer, progress));
        place
    }

    fn remove(&mut self, place: usize) -> Option<(Started, Progress)> {
        let removed = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(removed)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // Leak the buffers: the kernel may still write to them.
        self.places.drain(..).for_each(std::mem::forget);
    }
}

struct Driver {
    ring: IoUring,
    target: Arc<Target>,
    shared: Arc<Shared>,
    in_flight: InFlight,
    /// Transfers taken from the queue and not pushed yet; empty between steps.
    fresh: Vec<Started>,
    /// User data and results of completions; empty between steps.
    reaped: VecDeque<(u64, i32)>,
    wake_armed: bool,
    /// The queue has transfers left, for which this thread is not woken.
    is_overfull: bool,
    closing: bool,
    /// The error of all transfers after a panic.
    usable: Result<()>,
}

impl Driver {
    fn run(&mut self) {
        // It fails only if the ring is enabled already.
        let _ = self.ring.submitter().register_enable_rings();
        while self.take_fresh() {
            self.push_fresh();
            if self.is_overfull && self.in_flight.is_empty() {
                // No transfer that was taken could begin, so there is room, and no completion to wait for.
                continue;
            }
            self.submit_and_wait();
            // While awake, the thread sees new transfers without being woken, above all those of completions.
            self.shared.queue.lock().asleep = false;
            self.reap();
        }
    }

    /// After a panic: keeps running, waits for the transfers in flight, and fails all transfers.
    fn refuse(&mut self, why: &str) {
        self.usable = Err(dead(why));
        // Settle completions that were reaped before the panic.
        self.reap();
        self.run();
    }

    /// Takes as many transfers out of the queue as there are free places. Returns false when the backing is
    /// being dropped and all transfers have ended.
    fn take_fresh(&mut self) -> bool {
        let mut queue = self.shared.queue.lock();
        let room = self.in_flight.free.len().min(queue.transfers.len());
        self.fresh.extend(queue.transfers.drain(..room));
        // Transfers left in the queue are taken after a completion has freed a place.
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

    fn push_rest(&mut self, transfer: Started, progress: Progress) {
        let (rest, fd) = (progress.rest(), types::Fd(self.target.fd.as_raw_fd()));
        let len_bytes = rest.len() as u32; // At most MAX_BUFFER_BYTES.
        // SAFETY: the rest lies in the buffer, as `begin` checked.
        let start = unsafe { transfer.buffer.start().add(rest.start) };
        let entry = match transfer.direction {
            Direction::Read => opcode::Read::new(fd, start, len_bytes).offset(progress.offset()).build(),
            Direction::Write => opcode::Write::new(fd, start, len_bytes).offset(progress.offset()).build(),
        };
        let place = self.in_flight.put(transfer, progress) as u64;
        // SAFETY: `in_flight` owns the buffer, and keeps it until the entry's completion was reaped, or
        // forever; `target` keeps the file open.
        unsafe { push(&mut self.ring, &entry.user_data(place)) };
    }

    fn submit_and_wait(&self) {
        // When closing, nothing wakes this thread any more: it only waits for the transfers in flight.
        let want = usize::from(!self.closing || !self.in_flight.is_empty());
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // Entries that were not submitted stay in the ring, and are retried.
            Err(_) => std::thread::sleep(RING_RETRY_AFTER),
        }
    }

    fn reap(&mut self) {
        self.reaped.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        // One by one, so that a panic loses none of the others.
        while let Some((place, answer)) = self.reaped.pop_front() {
            if place == WAKE {
                self.wake_armed = false;
            } else {
                let answer = usize::try_from(answer).map_err(|_| Errno::from_raw_os_error(-answer));
                self.settle(place as usize, answer);
            }
        }
    }

    /// Ends or continues a transfer whose last entry the kernel has completed.
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

/// Pushes an entry to the submission queue.
///
/// # Safety
/// The buffer and the file of the entry must stay valid until its completion was reaped.
unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the caller keeps the entry's buffer and file valid.
    let pushed = unsafe { ring.submission().push(entry) };
    // Each place has at most one entry, and the eventfd one.
    pushed.expect("the queue has an entry for each place and one more");
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::engine::PanicPoint;
    use super::*;
    use crate::backing::Buffers;
    use crate::backing::tests::{Ends, transfer};
    use crate::base::units::PAGE_SIZE;

    #[test]
    fn the_kernel_keeps_its_buffers_when_the_thread_panics() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let (fd, len_bytes) = (OwnedFd::from(reader), 1 << 20);
        let target = Arc::new(Target::new(fd, [0, len_bytes], PAGE_SIZE));
        let uring = match Uring::new(Arc::clone(&target)) {
            Ok(uring) => uring,
            Err(error) => return println!("skipped: {error}"),
        };
        let (ends, buffers) = (Ends::new(), Buffers::new(4, PAGE_SIZE).expect("memory"));
        let start = |token, offset| {
            let (buffer, ends) = (buffers.take().expect("free"), Arc::<Ends>::clone(&ends));
            uring.start(transfer((Direction::Read, offset), PAGE_SIZE, buffer, token, ends));
        };
        // The first transfer waits for the pipe. The second ends at once, when the first is in flight.
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
