//! A backing with injected faults: for tests, and to try out how a device behaves when its disk fails.
//!
//! [`Faults`] decides about each transfer when it is started. A transfer without a fault goes straight to the
//! backing below; one that fails or waits goes through a thread, so that its caller never calls a completion.
//!
//! Locks: two of class `backing queue`, for the faults and their random numbers, and for the transfers that
//! wait for the thread. Neither is taken under the other.

use std::ops::Range;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::{Blocks, Buffer, Completion, Direction, Filling, Health, Objects, SETTING, Seal, Transfer};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::random::Random;
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::thread::{join, spawn};

/// What happens to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It fails with an I/O error; nothing is read or written.
    Error,
    /// It fails for lack of space; nothing is read or written.
    NoSpace,
    /// It fails with an I/O error after about half of it was read or written.
    Short,
    /// It begins after this delay; other faults apply then. Dropping the backing ends the delay.
    Stall(Duration),
    /// It begins when the faults are cleared; other faults apply then. Dropping the backing ends the wait.
    Hold,
    /// One bit that is read is flipped, without an error. Writes are not affected.
    FlipBit,
}

/// A fault, and the transfers that it applies to.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What happens.
    pub kind: FaultKind,
    /// Applies only to transfers in this direction; `None` for both.
    pub direction: Option<Direction>,
    /// Applies only to transfers that touch these bytes of the backing.
    pub range: Range<u64>,
    /// Applies to one in this many of these transfers, at random.
    pub one_in: u64,
    /// Applies at most this many times.
    pub times: u64,
}

impl Fault {
    /// Creates a fault of every transfer from now on. `Fault::always(FaultKind::Error)` is a device that is
    /// gone.
    pub const fn always(kind: FaultKind) -> Self {
        Fault { kind, direction: None, range: 0..u64::MAX, one_in: 1, times: u64::MAX }
    }

    fn concerns(&self, place: u64, transfer: &Transfer) -> bool {
        let end = place.saturating_add(transfer.len_bytes as u64);
        self.direction.is_none_or(|direction| direction == transfer.direction)
            && (self.kind != FaultKind::FlipBit || transfer.direction == Direction::Read)
            && self.range.start < end
            && place < self.range.end
    }
}

/// The faults of a [`FaultyBacking`]: a handle to change them while it is in use. The same seed, faults and
/// order of transfers give the same failures.
#[derive(Clone)]
pub struct Faults {
    plan: Arc<Mutex<Plan>>,
    injected: Arc<Counter>,
}

struct Plan {
    random: Random,
    faults: Vec<Fault>,
    /// How often the faults were cleared.
    clears: u64,
    /// Starts the transfers that were held.
    thread: Option<Thread>,
}

/// The faults of one transfer.
struct Injected {
    stall: Option<Duration>,
    /// It waits until the faults have been cleared more often than this.
    held: Option<u64>,
    then: Option<FaultKind>,
    random: u64,
}

impl Faults {
    fn new(seed: u64) -> Self {
        let plan = Plan { random: Random::new(seed), faults: Vec::new(), clears: 0, thread: None };
        Faults {
            plan: Arc::new(Mutex::new(&classes::BACKING_QUEUE, plan)),
            injected: Arc::new(Counter::new(0)),
        }
    }

    /// Adds a fault. If several apply to a transfer, stalls add up, and only the first of the other faults
    /// happens.
    pub fn add(&self, fault: Fault) {
        self.plan.lock().faults.push(fault);
    }

    /// Removes all faults. Transfers that stall continue to stall; held transfers begin.
    pub fn clear(&self) {
        let mut plan = self.plan.lock();
        plan.faults.clear();
        plan.clears += 1;
        if let Some(thread) = &plan.thread {
            thread.unpark();
        }
    }

    /// Returns the number of transfers that had a fault.
    pub fn injected(&self) -> u64 {
        self.injected.get()
    }

    fn decide(&self, place: u64, transfer: &Transfer) -> Injected {
        let mut plan = self.plan.lock();
        let Plan { random, faults, clears, .. } = &mut *plan;
        let mut injected = Injected { stall: None, held: None, then: None, random: 0 };
        for fault in faults.iter_mut().filter(|fault| fault.concerns(place, transfer)) {
            if fault.times > 0 && random.next().is_multiple_of(fault.one_in.max(1)) {
                match fault.kind {
                    FaultKind::Stall(by) => {
                        injected.stall = Some(injected.stall.unwrap_or_default().saturating_add(by))
                    }
                    FaultKind::Hold => injected.held = Some(*clears),
                    _ if injected.then.is_some() => continue,
                    kind => injected.then = Some(kind),
                }
                fault.times -= 1;
            }
        }
        injected.random = random.next();
        drop(plan);
        if !injected.is_good() {
            self.injected.add(1);
        }
        injected
    }
}

impl Injected {
    fn is_good(&self) -> bool {
        self.stall.is_none() && self.held.is_none() && self.then.is_none()
    }
}

/// A backing that injects [`Faults`] into another one. Dropping it carries out stalled and held transfers at
/// once.
pub struct FaultyBacking<B: Send + Sync + 'static> {
    shared: Arc<Shared<B>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<B> {
    inner: B,
    faults: Faults,
    queue: Mutex<Queue<B>>,
}

struct Queue<B> {
    waiting: Vec<Waiting<B>>,
    closed: bool,
}

struct Waiting<B> {
    due: Instant,
    transfer: Transfer,
    injected: Injected,
    way: Way<B>,
}

/// How the inner backing carries out a transfer.
struct Way<B> {
    /// The extent, of objects.
    extent: u32,
    block_bytes: usize,
    start: fn(&B, u32, Transfer),
}

impl<B: Send + Sync + 'static> FaultyBacking<B> {
    /// Wraps `inner`, at first without faults. Faults at random use the random numbers of `seed`.
    /// Fails with `NoMemory` when the system gives no thread.
    pub fn new(inner: B, seed: u64) -> Result<Self> {
        let queue = Mutex::new(&classes::BACKING_QUEUE, Queue { waiting: Vec::new(), closed: false });
        let shared = Arc::new(Shared { inner, faults: Faults::new(seed), queue });
        let of_thread = Arc::clone(&shared);
        let thread = spawn("uzram-faults", move || of_thread.run())?;
        shared.faults.plan.lock().thread = Some(thread.thread().clone());
        Ok(FaultyBacking { shared, thread: Some(thread) })
    }

    /// Returns a handle to the faults.
    pub fn faults(&self) -> Faults {
        self.shared.faults.clone()
    }

    fn wake_up(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Starts a transfer, whose first byte is at `place` among all of the backing, with its faults.
    fn start_at(&self, place: u64, transfer: Transfer, way: Way<B>) {
        let injected = self.shared.faults.decide(place, &transfer);
        if injected.is_good() {
            return (way.start)(&self.shared.inner, way.extent, transfer);
        }
        // Cap the stall so that the time does not overflow.
        const LONGEST: Duration = Duration::from_secs(100 * 365 * 86400);
        let due = Instant::now() + injected.stall.unwrap_or_default().min(LONGEST);
        self.shared.queue.lock().waiting.push(Waiting { due, transfer, injected, way });
        self.wake_up();
    }
}

impl<B: Blocks + 'static> Blocks for FaultyBacking<B> {
    fn len_bytes(&self) -> u64 {
        self.shared.inner.len_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.shared.inner.block_bytes()
    }

    fn start(&self, transfer: Transfer) {
        let start = |inner: &B, _, transfer| inner.start(transfer);
        let way = Way { extent: 0, block_bytes: self.block_bytes(), start };
        self.start_at(transfer.offset, transfer, way);
    }

    fn discard(&self, offset: u64, len_bytes: u64) {
        self.shared.inner.discard(offset, len_bytes);
    }
}

impl<O: Objects + 'static> FaultyBacking<O> {
    fn start_of(&self, extent: u32, transfer: Transfer, start: fn(&O, u32, Transfer)) {
        let place = u64::from(extent) * self.object_bytes() as u64 + transfer.offset;
        self.start_at(place, transfer, Way { extent, block_bytes: 1, start });
    }
}

impl<O: Objects + 'static> Objects for FaultyBacking<O> {
    fn len_bytes(&self) -> Option<u64> {
        self.shared.inner.len_bytes()
    }

    fn object_bytes(&self) -> usize {
        self.shared.inner.object_bytes()
    }

    fn join(&self, first_extent: u32, seal: Option<&Arc<dyn Seal>>) {
        self.shared.inner.join(first_extent, seal);
    }

    fn home(&self, extent: u32) -> u32 {
        self.shared.inner.home(extent)
    }

    fn put(&self, extent: u32, transfer: Transfer) {
        self.start_of(extent, transfer, O::put);
    }

    fn get(&self, extent: u32, transfer: Transfer) {
        self.start_of(extent, transfer, O::get);
    }

    fn delete(&self, extent: u32, filling: Filling) {
        self.shared.inner.delete(extent, filling);
    }

    fn health(&self) -> Health {
        self.shared.inner.health()
    }

    fn is_at_risk(&self, filling: Filling) -> bool {
        self.shared.inner.is_at_risk(filling)
    }

    fn end(&self) {
        self.shared.inner.end();
    }
}

impl<B: Send + Sync + 'static> Drop for FaultyBacking<B> {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.wake_up();
        self.thread.take().into_iter().for_each(join);
    }
}

impl<B> Shared<B> {
    fn run(&self) {
        loop {
            let now = Instant::now();
            // Later clears and new transfers unpark the thread.
            let clears = self.faults.plan.lock().clears;
            let mut queue = self.queue.lock();
            let closed = queue.closed;
            let is_held = |waiting: &Waiting<B>| waiting.injected.held.is_some_and(|since| clears <= since);
            let is_due = |waiting: &mut Waiting<B>| closed || waiting.due <= now && !is_held(waiting);
            let due: Vec<Waiting<B>> = queue.waiting.extract_if(.., is_due).collect();
            let free = queue.waiting.iter().filter(|waiting| !is_held(waiting));
            let next = free.map(|waiting| waiting.due).min();
            drop(queue);
            if closed && due.is_empty() {
                return;
            }
            if due.is_empty() {
                match next {
                    Some(next) => std::thread::park_timeout(next.saturating_duration_since(now)),
                    None => std::thread::park(),
                }
            }
            due.into_iter().for_each(|waiting| self.let_go(waiting));
        }
    }

    /// Carries out a transfer, with its other fault if any, after it has stalled or was held.
    fn let_go(&self, Waiting { mut transfer, injected: what, way, .. }: Waiting<B>) {
        let half_bytes = transfer.len_bytes / 2 / way.block_bytes * way.block_bytes;
        match what.then {
            None => return (way.start)(&self.inner, way.extent, transfer),
            Some(FaultKind::NoSpace) => {
                let full = Error::new(ErrorKind::NoSpace, "an injected lack of space");
                return transfer.finish(Err(full.with_setting(SETTING)));
            }
            Some(FaultKind::FlipBit) => {}
            Some(FaultKind::Short) if half_bytes > 0 => {}
            Some(_) => return transfer.finish(Err(injected())),
        }
        let len_bytes = transfer.len_bytes;
        let flip = (what.then == Some(FaultKind::FlipBit)).then_some((len_bytes, what.random));
        if flip.is_none() {
            transfer.len_bytes = half_bytes;
        }
        transfer.completion = Arc::new(Spoil { flip, completion: transfer.completion });
        (way.start)(&self.inner, way.extent, transfer);
    }
}

fn injected() -> Error {
    Error::new(ErrorKind::Io, "an injected I/O error").with_setting(SETTING)
}

/// A completion that falsifies the result of a transfer.
struct Spoil {
    /// The number of bytes read, and the random number of the bit to flip; `None` to fail the transfer.
    flip: Option<(usize, u64)>,
    completion: Arc<dyn Completion>,
}

impl Completion for Spoil {
    fn done(&self, token: u64, mut buffer: Buffer, result: Result<()>) {
        let result = match (result, self.flip) {
            (Ok(()), Some((len_bytes, random))) => {
                let bit = (random % (len_bytes as u64 * 8)) as usize;
                buffer[bit / 8] ^= 1 << (bit % 8);
                Ok(())
            }
            (Ok(()), None) => Err(injected()),
            (Err(error), _) => Err(error),
        };
        self.completion.done(token, buffer, result);
    }
}
