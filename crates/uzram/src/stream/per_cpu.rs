//! One stream for each CPU, and spare ones.
//!
//! A thread whose CPU's stream is lent takes any other free one. In the kernel a holder cannot be preempted
//! (or, since 6.15, is waited for); here the scheduler may preempt the holders of all streams at once. A
//! thread that finds all lent creates a spare one, which is kept; it waits only when there are as many as
//! allowed, or memory is short.
//!
//! Locks: each stream has one, held while the stream is lent; a spare one's also while it is created.

use super::{Lent, Place, SPARES_PER_CPU, Streams};
use crate::base::cpu::{self, PerCpu as Array};
use crate::base::sync::{Counter, Mutex, classes};

/// One stream for each CPU, and spare ones for when the holders of all of them are preempted.
pub struct PerCpu<S> {
    streams: Array<Mutex<S>>,
    /// Created in order, but for those being created at the same time.
    spares: Box<[Mutex<Option<S>>]>,
    make: Box<dyn Fn() -> Option<S> + Send + Sync>,
    /// Counted only when no stream is free: the fast path does not touch it.
    sleeps: Counter,
}

impl<S> PerCpu<S> {
    /// Creates each CPU's stream; up to [`SPARES_PER_CPU`] spare ones per CPU are created when needed. Fails
    /// with the first error of `make`.
    pub fn new<E>(make: impl Fn() -> Result<S, E> + Send + Sync + 'static) -> Result<Self, E> {
        PerCpu::with_spares(SPARES_PER_CPU * cpu::possible(), make)
    }

    pub(super) fn with_spares<E>(
        spares: usize,
        make: impl Fn() -> Result<S, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        Ok(PerCpu {
            streams: Array::try_new(|_| make().map(|stream| Mutex::new(&classes::STREAM, stream)))?,
            spares: (0..spares).map(|_| Mutex::new(&classes::STREAM, None)).collect(),
            make: Box::new(move || make().ok()),
            sleeps: Counter::new(0),
        })
    }

    /// Creates all missing spare streams now. Returns whether all could be created.
    pub fn make_spares(&self) -> bool {
        self.spares.iter().all(|spare| {
            let mut spare = spare.lock();
            if spare.is_none() {
                *spare = (self.make)();
            }
            spare.is_some()
        })
    }

    #[cold]
    fn lend_other(&self, cpu: usize) -> Place<'_, S> {
        let mut others = (1..self.streams.len()).map(|step| (cpu + step) % self.streams.len());
        if let Some(stream) = others.find_map(|other| self.streams.of(other).try_lock()) {
            return Place::Cpu(stream);
        }
        self.lend_spare().unwrap_or_else(|| {
            self.sleeps.add(1);
            Place::Cpu(self.streams.of(cpu).lock())
        })
    }

    /// Returns a free spare stream, or creates one if there is room.
    fn lend_spare(&self) -> Option<Place<'_, S>> {
        let mut spare = self.spares.iter().find_map(Mutex::try_lock)?;
        if spare.is_none() {
            *spare = (self.make)();
        }
        spare.is_some().then_some(Place::Spare(spare))
    }
}

impl<S> Streams<S> for PerCpu<S> {
    #[inline]
    fn lend(&self) -> Lent<'_, S> {
        let cpu = cpu::current();
        let place = match self.streams.of(cpu).try_lock() {
            Some(stream) => Place::Cpu(stream),
            None => self.lend_other(cpu),
        };
        Lent { place }
    }

    fn sleeps(&self) -> u64 {
        self.sleeps.get()
    }
}
