//! One stream for each CPU, and spare ones.
//!
//! A thread takes the stream of the CPU it runs on. That one is lent only if its holder was
//! preempted or moved; then any other free stream will do. Where the kernel's holder cannot be
//! preempted (or, since 6.15, is waited for), here the scheduler may stop the holders of all streams
//! at once as soon as there are more threads than CPUs. Whoever finds them all lent makes a spare
//! one, which stays; only when no more may be made, or memory is short, does it wait for its own
//! CPU's.
//!
//! Locks: each stream has one, held while it is lent; a spare one's also while it is made.

use std::ops::{Deref, DerefMut};

use super::Streams;
use crate::base::cpu::{self, PerCpu as Array};
use crate::base::sync::{Counter, Mutex, MutexGuard, classes};

/// One stream for each CPU, and spare ones for when the holders of all of them are stopped.
pub struct PerCpu<S> {
    streams: Array<Mutex<S>>,
    /// Those that were made come first, but for some that are being made.
    spares: Box<[Mutex<Option<S>>]>,
    make: Box<dyn Fn() -> Option<S> + Send + Sync>,
    /// Counted where no stream is free only: the fast path does not touch it.
    sleeps: Counter,
}

/// A stream that a thread has, until it is dropped.
pub struct Lent<'a, S>(Place<'a, S>);

/// Whose stream that is.
enum Place<'a, S> {
    Cpu(MutexGuard<'a, S>),
    /// It holds a stream.
    Spare(MutexGuard<'a, Option<S>>),
}

impl<S> PerCpu<S> {
    /// Makes each CPU's stream; up to `spares` more are made when they are needed.
    ///
    /// # Errors
    /// What `make` returns for the first that cannot be made.
    pub fn new<E>(spares: usize, make: impl Fn() -> Result<S, E> + Send + Sync + 'static) -> Result<Self, E> {
        Ok(PerCpu {
            streams: Array::try_new(|_| make().map(|stream| Mutex::new(&classes::STREAM, stream)))?,
            spares: (0..spares).map(|_| Mutex::new(&classes::STREAM, None)).collect(),
            make: Box::new(move || make().ok()),
            sleeps: Counter::new(0),
        })
    }

    /// Makes the spare streams now that there are not yet, and returns whether that could be done.
    pub fn make_spares(&self) -> bool {
        self.spares.iter().all(|spare| {
            let mut spare = spare.lock();
            if spare.is_none() {
                *spare = (self.make)();
            }
            spare.is_some()
        })
    }

    /// A stream for a thread that found the one of `cpu` lent.
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

    /// A spare stream that is free, or that there is room for.
    fn lend_spare(&self) -> Option<Place<'_, S>> {
        let mut spare = self.spares.iter().find_map(Mutex::try_lock)?;
        if spare.is_none() {
            *spare = (self.make)();
        }
        spare.is_some().then_some(Place::Spare(spare))
    }
}

impl<S> Streams<S> for PerCpu<S> {
    type Lent<'a>
        = Lent<'a, S>
    where
        S: 'a;

    #[inline]
    fn lend(&self) -> Lent<'_, S> {
        let cpu = cpu::current();
        Lent(match self.streams.of(cpu).try_lock() {
            Some(stream) => Place::Cpu(stream),
            None => self.lend_other(cpu),
        })
    }

    fn sleeps(&self) -> u64 {
        self.sleeps.get()
    }
}

/// A spare place without a stream is never lent.
const NOT_MADE: &str = "a spare stream was lent that was not made";

impl<S> Deref for Lent<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        match &self.0 {
            Place::Cpu(stream) => stream,
            Place::Spare(stream) => stream.as_ref().expect(NOT_MADE),
        }
    }
}

impl<S> DerefMut for Lent<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        match &mut self.0 {
            Place::Cpu(stream) => stream,
            Place::Spare(stream) => stream.as_mut().expect(NOT_MADE),
        }
    }
}
