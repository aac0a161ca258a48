//! A backing with injected faults: for tests, and to try out how a device behaves when its disk fails.
//!
//! [`Faults`] decides about each transfer when it is started. A transfer without a fault goes straight to the
//! backing below; one that fails or waits has a thread of its own, so that its caller never calls a completion.
//!
//! Locks: two of class `backing queue`, for the faults and their random numbers, and for the threads. Neither
//! is taken under the other.

use std::ops::Range;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{
    Blocks, Buffer, Completion, Direction, Filling, Health, Objects, SETTING, Seal, Started, Transfer,
};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::random::Random;
use crate::base::sync::{Arc, Condvar, Counter, Mutex, classes};
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
pub struct Faults(Arc<State>);

struct State {
    plan: Mutex<Plan>,
    /// Held transfers may begin, or all that wait.
    changed: Condvar,
    injected: Counter,
}

struct Plan {
    random: Random,
    faults: Vec<Fault>,
    /// How often the faults were cleared.
    clears: u64,
    closed: bool,
}

/// The faults of one transfer.
struct Injected {
    stall: Duration,
    /// It waits until the faults have been cleared more often than this.
    held: Option<u64>,
    then: Option<FaultKind>,
    random: u64,
}

impl Faults {
    fn new(seed: u64) -> Self {
        let plan = Plan { random: Random::new(seed), faults: Vec::new(), clears: 0, closed: false };
        let plan = Mutex::new(&classes::BACKING_QUEUE, plan);
        Faults(Arc::new(State { plan, changed: Condvar::new(), injected: Counter::new(0) }))
    }

    /// Adds a fault. If several apply to a transfer, stalls add up, and only the first of the other faults
    /// happens.
    pub fn add(&self, fault: Fault) {
        self.0.plan.lock().faults.push(fault);
    }

    /// Removes all faults. Transfers that stall continue to stall; held transfers begin.
    pub fn clear(&self) {
        let mut plan = self.0.plan.lock();
        plan.faults.clear();
        plan.clears += 1;
        self.0.changed.notify_all();
    }

    /// Returns the number of transfers that had a fault.
    pub fn injected(&self) -> u64 {
        self.0.injected.get()
    }

    /// Returns the faults of a transfer, if it has any.
    fn decide(&self, place: u64, transfer: &Transfer) -> Option<Injected> {
        let mut plan = self.0.plan.lock();
        let Plan { random, faults, clears, .. } = &mut *plan;
        let mut injected = Injected { stall: Duration::ZERO, held: None, then: None, random: 0 };
        let mut is_good = true;
        for fault in faults.iter_mut().filter(|fault| fault.concerns(place, transfer)) {
            if fault.times > 0 && random.next().is_multiple_of(fault.one_in.max(1)) {
                match fault.kind {
                    FaultKind::Stall(by) => injected.stall = injected.stall.saturating_add(by),
                    FaultKind::Hold => injected.held = Some(*clears),
                    _ if injected.then.is_some() => continue,
                    kind => injected.then = Some(kind),
                }
                fault.times -= 1;
                is_good = false;
            }
        }
        injected.random = random.next();
        self.0.injected.add(u64::from(!is_good));
        (!is_good).then_some(injected)
    }

    /// Waits until a transfer's stall and hold are over.
    fn wait(&self, injected: &Injected) {
        let began = Instant::now();
        let mut plan = self.0.plan.lock();
        while !plan.closed {
            let left = injected.stall.saturating_sub(began.elapsed());
            plan = match injected.held {
                _ if !left.is_zero() => plan.wait_for(&self.0.changed, left),
                Some(clears) if plan.clears <= clears => plan.wait(&self.0.changed),
                _ => return,
            };
        }
    }
}

/// A backing that injects [`Faults`] into another one. Dropping it carries out stalled and held transfers at
/// once.
pub struct FaultyBacking<B: Send + Sync + 'static> {
    shared: Arc<Shared<B>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared<B> {
    inner: B,
    faults: Faults,
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
    pub fn new(inner: B, seed: u64) -> Self {
        let shared = Arc::new(Shared { inner, faults: Faults::new(seed) });
        FaultyBacking { shared, threads: Mutex::new(&classes::BACKING_QUEUE, Vec::new()) }
    }

    /// Returns a handle to the faults.
    pub fn faults(&self) -> Faults {
        self.shared.faults.clone()
    }

    /// Starts a transfer, whose first byte is at `place` among all of the backing, with its faults. If the
    /// system gives no thread for them, it fails.
    fn start_at(&self, place: u64, transfer: Transfer, way: Way<B>) {
        let Some(injected) = self.shared.faults.decide(place, &transfer) else {
            return (way.start)(&self.shared.inner, way.extent, transfer);
        };
        let (shared, started) = (Arc::clone(&self.shared), Started::new(transfer));
        let thread = spawn("uzram-faults", move || {
            shared.faults.wait(&injected);
            shared.let_go(started.into_transfer(), &injected, &way);
        });
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        threads.extend(thread);
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

    fn start(&self, extent: u32, transfer: Transfer) {
        let place = u64::from(extent) * self.object_bytes() as u64 + transfer.offset;
        self.start_at(place, transfer, Way { extent, block_bytes: 1, start: O::start });
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
        let Faults(state) = &self.shared.faults;
        state.plan.lock().closed = true;
        state.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(join);
    }
}

impl<B> Shared<B> {
    /// Carries out a transfer, with its other fault if any, after it has stalled or was held.
    fn let_go(&self, mut transfer: Transfer, what: &Injected, way: &Way<B>) {
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
