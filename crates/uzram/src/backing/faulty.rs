//! A backing with injected faults: for tests, and to try out how a device behaves when its disk fails.
//!
//! [`Faults`] decides about each transfer when it is started. A transfer without a fault goes straight to the
//! backing below; one that fails or waits has a thread of its own, so that its caller calls no completion. If
//! the system gives no thread, the transfer fails, and its caller does call the completion.
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
    clears: u64,
    closed: bool,
}

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
    inner: Arc<B>,
    faults: Faults,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<B: Send + Sync + 'static> FaultyBacking<B> {
    /// Wraps `inner`, at first without faults. Faults at random use the random numbers of `seed`.
    pub fn new(inner: B, seed: u64) -> Self {
        let threads = Mutex::new(&classes::BACKING_QUEUE, Vec::new());
        FaultyBacking { inner: Arc::new(inner), faults: Faults::new(seed), threads }
    }

    /// Returns a handle to the faults.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Starts a transfer by `start`, with its faults. Its first byte is at `place` among all of the backing.
    /// If the system gives no thread for the faults, it fails, and the completion is called here.
    fn start_at(
        &self,
        place: u64,
        block_bytes: usize,
        transfer: Transfer,
        start: impl FnOnce(&B, Transfer) + Send + 'static,
    ) {
        let Some(injected) = self.faults.decide(place, &transfer) else {
            return start(&self.inner, transfer);
        };
        let (inner, faults) = (Arc::clone(&self.inner), self.faults.clone());
        let mut started = Started::new(transfer);
        let thread = spawn("uzram-faults", move || {
            faults.wait(&injected);
            match spoil(&mut started, &injected, block_bytes) {
                Ok(()) => start(&inner, started.into_transfer()),
                Err(error) => started.finish(Err(error)),
            }
        });
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        threads.extend(thread);
    }
}

impl<B: Blocks + 'static> Blocks for FaultyBacking<B> {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn start(&self, transfer: Transfer) {
        self.start_at(transfer.offset, self.block_bytes(), transfer, B::start);
    }

    fn discard(&self, offset: u64, len_bytes: u64) {
        self.inner.discard(offset, len_bytes);
    }
}

impl<O: Objects + 'static> Objects for FaultyBacking<O> {
    fn len_bytes(&self) -> Option<u64> {
        self.inner.len_bytes()
    }

    fn object_bytes(&self) -> usize {
        self.inner.object_bytes()
    }

    fn join(&self, first_extent: u32, seal: Option<&Arc<dyn Seal>>) {
        self.inner.join(first_extent, seal);
    }

    fn home(&self, extent: u32) -> u32 {
        self.inner.home(extent)
    }

    fn start(&self, extent: u32, transfer: Transfer) {
        let place = u64::from(extent) * self.object_bytes() as u64 + transfer.offset;
        self.start_at(place, 1, transfer, move |inner, transfer| inner.start(extent, transfer));
    }

    fn delete(&self, extent: u32, filling: Filling) {
        self.inner.delete(extent, filling);
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn is_at_risk(&self, filling: Filling) -> bool {
        self.inner.is_at_risk(filling)
    }

    fn end(&self) {
        self.inner.end();
    }
}

impl<B: Send + Sync + 'static> Drop for FaultyBacking<B> {
    fn drop(&mut self) {
        let Faults(state) = &self.faults;
        state.plan.lock().closed = true;
        state.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(join);
    }
}

/// Has a transfer end with its other fault, if any, after it has stalled or was held. Returns the error if it
/// is not to begin.
fn spoil(transfer: &mut Transfer, what: &Injected, block_bytes: usize) -> Result<()> {
    let half_bytes = transfer.len_bytes / 2 / block_bytes * block_bytes;
    let flip = match what.then {
        None => return Ok(()),
        Some(FaultKind::NoSpace) => {
            return Err(Error::new(ErrorKind::NoSpace, "an injected lack of space").with_setting(SETTING));
        }
        Some(FaultKind::FlipBit) => Some((transfer.len_bytes, what.random)),
        Some(FaultKind::Short) if half_bytes > 0 => {
            transfer.len_bytes = half_bytes;
            None
        }
        Some(_) => return Err(injected()),
    };
    transfer.completion = Arc::new(Spoil { flip, completion: Arc::clone(&transfer.completion) });
    Ok(())
}

fn injected() -> Error {
    Error::new(ErrorKind::Io, "an injected I/O error").with_setting(SETTING)
}

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
