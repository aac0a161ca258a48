//! One stream for each CPU.
//!
//! A thread takes the stream of the CPU it runs on. That one is lent only if its holder was
//! preempted or moved; then any other free stream will do, and only a thread that finds none waits
//! for its own CPU's. (The kernel's holder cannot be preempted, or, since 6.15, is waited for.)
//!
//! Locks: each stream has one, held while it is lent.

use super::Streams;
use crate::base::cpu::{self, PerCpu as Array};
use crate::base::sync::{Counter, Mutex, MutexGuard, classes};

/// One stream for each CPU. A thread takes that of its own, or any other that is free.
pub struct PerCpu<S> {
    streams: Array<Mutex<S>>,
    /// Counted where no stream is free only: the fast path does not touch it.
    sleeps: Counter,
}

impl<S> PerCpu<S> {
    /// Makes each CPU's stream.
    ///
    /// # Errors
    /// What `stream` answers for the first that cannot be made.
    pub fn new<E>(mut stream: impl FnMut() -> Result<S, E>) -> Result<Self, E> {
        let streams = Array::try_new(|_| stream().map(|stream| Mutex::new(&classes::STREAM, stream)))?;
        Ok(PerCpu { streams, sleeps: Counter::new(0) })
    }

    #[inline]
    fn take(&self) -> MutexGuard<'_, S> {
        let cpu = cpu::current();
        match self.streams.of(cpu).try_lock() {
            Some(stream) => stream,
            None => self.take_other(cpu),
        }
    }

    #[cold]
    fn take_other(&self, cpu: usize) -> MutexGuard<'_, S> {
        let mut others = (1..self.streams.len()).map(|step| (cpu + step) % self.streams.len());
        let free = others.find_map(|other| self.streams.of(other).try_lock());
        free.unwrap_or_else(|| {
            self.sleeps.add(1);
            self.streams.of(cpu).lock()
        })
    }
}

impl<S> Streams<S> for PerCpu<S> {
    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut S) -> R) -> R {
        f(&mut self.take())
    }

    fn sleeps(&self) -> u64 {
        self.sleeps.get()
    }
}
