//! Compression streams: codec state and buffers, lent to one thread at a time.
//!
//! The kernel once kept a locked list of idle streams; since "zram: user per-cpu compression
//! streams" (S. Senozhatsky, 2016) it has one for each CPU. Both are designs of one trait,
//! [`Streams`], over whatever a stream is.
//!
//! Locks: a stream is held while a page is compressed and stored, so it comes before everything
//! of zsmalloc.

use crate::base::cpu::{self, PerCpu as Array};
use crate::base::sync::{Mutex, MutexGuard, classes};

/// A way to share streams among threads.
pub trait Streams<S> {
    /// Lends a stream to `f`, waiting for one only while all are lent.
    fn with<R>(&self, f: impl FnOnce(&mut S) -> R) -> R;

    /// The sum of a quantity over all streams, such as the bytes they take.
    fn sum(&self, quantity: impl Fn(&S) -> usize) -> usize;
}

/// One stream for each CPU.
///
/// A thread takes the stream of the CPU it runs on. That one is lent only if its holder was
/// preempted or moved; then any other free stream will do, and only a thread that finds none waits
/// for its own CPU's.
pub struct PerCpu<S> {
    streams: Array<Mutex<S>>,
}

impl<S> PerCpu<S> {
    /// Makes each CPU's stream.
    ///
    /// # Errors
    /// What `stream` answers for the first that cannot be made.
    pub fn new<E>(mut stream: impl FnMut() -> Result<S, E>) -> Result<Self, E> {
        let streams = Array::try_new(|_| stream().map(|stream| Mutex::new(&classes::STREAM, stream)))?;
        Ok(PerCpu { streams })
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
        let others = (1..self.streams.len()).map(|step| (cpu + step) % self.streams.len());
        let free = others.into_iter().find_map(|other| self.streams.of(other).try_lock());
        free.unwrap_or_else(|| self.streams.of(cpu).lock())
    }
}

impl<S> Streams<S> for PerCpu<S> {
    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut S) -> R) -> R {
        f(&mut self.take())
    }

    fn sum(&self, quantity: impl Fn(&S) -> usize) -> usize {
        self.streams.iter().map(|stream| quantity(&stream.lock())).sum()
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn a_lent_stream_is_nobody_elses() {
        let mut made = 0;
        let streams = PerCpu::new(|| {
            made += 1;
            Ok::<_, ()>((made, false))
        });
        let streams = streams.expect("infallible");
        std::thread::scope(|scope| {
            for _ in 0..4 * cpu::possible() {
                scope.spawn(|| {
                    for i in 0..5000 {
                        streams.with(|stream| {
                            assert!(!std::mem::replace(&mut stream.1, true));
                            if i % 100 == 0 {
                                std::thread::yield_now();
                            }
                            stream.1 = false;
                        });
                    }
                });
            }
        });
        assert_eq!(streams.sum(|stream| stream.0), (1..=made).sum());
    }

    /// As many threads as streams hold one each at the same time, wherever they run: nobody sleeps
    /// while a stream is free.
    #[test]
    fn every_stream_can_be_lent_at_once() {
        let streams = PerCpu::new(|| Ok::<_, ()>(())).expect("infallible");
        let all_hold = Barrier::new(cpu::possible());
        std::thread::scope(|scope| {
            for _ in 0..cpu::possible() {
                scope.spawn(|| streams.with(|()| all_hold.wait()));
            }
        });
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use crate::base::sync::{Arc, Guarded};

    /// More threads than CPUs: each gets a stream to itself.
    fn selection(threads: usize) {
        loom::model(move || {
            let streams = PerCpu::new(|| Ok::<_, ()>((Guarded::new(0usize), 0usize))).expect("infallible");
            let streams = Arc::new(streams);
            let work = |streams: &PerCpu<(Guarded<usize>, usize)>| {
                streams.with(|stream| {
                    // SAFETY: the stream is lent to this thread alone; loom would see another's access.
                    unsafe { stream.0.with_mut(|used| *used += 1) };
                    stream.1 += 1;
                });
            };
            let others: Vec<_> = (1..threads)
                .map(|_| {
                    let streams = Arc::clone(&streams);
                    loom::thread::spawn(move || work(&streams))
                })
                .collect();
            work(&streams);
            for other in others {
                other.join().expect("no panic");
            }
            assert_eq!(streams.sum(|stream| stream.1), threads);
        });
    }

    #[test]
    fn loom_streams_are_lent_to_one_thread() {
        selection(2);
    }

    #[test]
    fn loom_streams_fewer_than_threads() {
        selection(3);
    }
}
