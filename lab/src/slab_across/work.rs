//! The threads of a pair: one on each of two CPUs.
//!
//! In the cases across CPUs the first allocates every object and writes to it, the second checks and frees it. So
//! does a block driver whose requests are allocated where they are submitted and freed where they complete: an
//! object has the size of a bio, and a pair has as many in flight as 16 queues of 128 requests. In the case of one
//! CPU each thread frees what it allocates, a queue's depth of objects later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use uzram::mem::{Arena, Gfp};
use uzram::slab::Policy;
use uzram::{Error, ErrorKind, Result};

use super::Case;
use super::pipe::{Flow, Pipe};
use crate::experiment::Plan;
use crate::experiment::clock::{Done, RunWork};
use crate::slab_freeze::objects::{Content, Objects};
use uzram_bench::harness::{Gate, run_together};

/// Threads of a pair.
pub(super) const SIDES: usize = 2;
/// Bytes of an object: those of the slab `bio-184` in Linux 6.18, aligned to cache lines.
const OBJECT_BYTES: usize = 192;
/// A CPU's cache line. Objects are aligned to it, and one of each is written and checked.
const LINE_BYTES: usize = 64;
/// Requests of a queue.
const DEPTH: u64 = 128;
/// The most objects in flight of a pair: those of 16 queues.
pub(super) const WINDOW: u64 = 16 * DEPTH;
/// Objects that are handed over together, but in bursts.
const BATCH: u64 = 32;

/// A cache, and the threads that use it.
pub(super) struct Work<'a, P: Policy> {
    objects: [Objects<P>; 1],
    case: Case,
    cpus: &'a [usize],
    /// Allocations that were refused because they might not wait, and were repeated.
    refused: AtomicU64,
}

/// Returns the CPUs that this process may use.
///
/// # Errors
/// `Io` if the system does not tell.
pub(super) fn cpus() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot read this process's CPUs: {error}")))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

impl<'a, P: Policy> Work<'a, P> {
    /// Makes the cache of the objects of so many pairs.
    pub(super) fn new(arena: &Arc<Arena>, case: Case, pairs: usize, cpus: &'a [usize]) -> Result<Self> {
        let in_flight = pairs as u64 * (WINDOW + SIDES as u64 * DEPTH);
        let objects = [Objects::new(arena, "bio-184", OBJECT_BYTES, LINE_BYTES, in_flight)?];
        Ok(Work { objects, case, cpus, refused: AtomicU64::new(0) })
    }

    /// Returns the cache.
    pub(super) fn objects(&self) -> &[Objects<P>] {
        &self.objects
    }

    /// Returns the number of refused allocations so far.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Allocates and frees `plan.work` objects or a few more, the same number by each pair. The units of a thread
    /// are the objects that it freed.
    pub(super) fn run(&self, plan: &Plan<'_>, run_work: RunWork) -> Result<Vec<Done>> {
        let total = plan.work.div_ceil(plan.jobs as u64);
        let pipes: Vec<Pipe> = (0..plan.jobs).map(|_| Pipe::new(WINDOW)).collect();
        let broken = AtomicBool::new(false);
        let flow = Flow { total, batch: self.case.batch(), stop: plan.stop, broken: &broken };
        let threads = (0..SIDES * plan.jobs).map(|thread| {
            let (pair, side) = (thread / SIDES, thread % SIDES);
            let pipe = &pipes[pair];
            move |gate: &Gate| {
                let bound = self.bind(thread);
                gate.pass();
                let mut work = || match (self.case, side) {
                    (Case::SameCpu, _) => self.alone(thread, flow),
                    (_, 0) => self.produce(pair, flow, pipe).map(|_| 0),
                    _ => self.consume(pair, flow, pipe),
                };
                let done = bound.and_then(|()| run_work(&mut work));
                if done.is_err() {
                    flow.broken.store(true, Ordering::Relaxed);
                }
                done
            }
        });
        run_together(threads)
    }

    /// Binds this thread to its CPU: the threads of a pair to different ones, if there are two.
    fn bind(&self, thread: usize) -> Result<()> {
        let Some(cpu) = thread.checked_rem(self.cpus.len()).map(|at| self.cpus[at]) else { return Ok(()) };
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only)
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot run on CPU {cpu}: {error}")))
    }

    /// Allocates an object as the case says.
    #[inline]
    fn take(&self, content: &[u8]) -> Result<u32> {
        let [objects] = &self.objects;
        match objects.take_by(self.case.gfp(), content) {
            Err(error) if error.kind() == ErrorKind::NoMemory && self.case.gfp() == Gfp::NoWait => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                objects.take(content)
            }
            taken => taken,
        }
    }

    fn produce(&self, pair: usize, flow: Flow<'_>, pipe: &Pipe) -> Result<u64> {
        let mut content = Content::<LINE_BYTES>::of(pair);
        pipe.send(flow, |number| self.take(content.numbered(number)))
    }

    fn consume(&self, pair: usize, flow: Flow<'_>, pipe: &Pipe) -> Result<u64> {
        let mut content = Content::<LINE_BYTES>::of(pair);
        let [objects] = &self.objects;
        // SAFETY: the producer took the object, and sent its number through this pipe alone.
        pipe.receive(flow, |number, object| unsafe { objects.give_back(object, content.numbered(number)) })
    }

    /// Allocates half of a pair's objects, and frees each when as many as a queue has requests came after it.
    fn alone(&self, thread: usize, flow: Flow<'_>) -> Result<u64> {
        let mut content = Content::<LINE_BYTES>::of(thread);
        let [objects] = &self.objects;
        let mut held = [0; DEPTH as usize];
        let at = |number: u64| (number % DEPTH) as usize;
        let total = flow.total.div_ceil(SIDES as u64);
        let mut taken = 0;
        while taken < total && !flow.has_ended() {
            for _ in 0..BATCH.min(total - taken) {
                if let Some(number) = taken.checked_sub(DEPTH) {
                    // SAFETY: this thread took the object, and forgets its number.
                    unsafe { objects.give_back(held[at(taken)], content.numbered(number))? };
                }
                held[at(taken)] = self.take(content.numbered(taken))?;
                taken += 1;
            }
        }
        for number in taken.saturating_sub(DEPTH)..taken {
            // SAFETY: as above.
            unsafe { objects.give_back(held[at(number)], content.numbered(number))? };
        }
        Ok(taken)
    }
}

impl Case {
    /// Returns the objects that are handed over together.
    const fn batch(self) -> u64 {
        if self.is_in_bursts() { WINDOW } else { BATCH }
    }
}
