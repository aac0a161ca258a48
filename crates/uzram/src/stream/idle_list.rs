//! A locked list of idle streams, as the kernel had it until "zram: user per-cpu compression
//! streams" (S. Senozhatsky, 2016).
//!
//! A thread takes the stream that was returned last, which is the warmest; if none is idle, it sleeps. Each
//! return while threads sleep wakes one of them, but, as in the kernel, does not reserve the stream for it:
//! else, with more threads than streams, each thread would sleep for each page, because a thread is back for
//! its next page before the one it woke has run.
//!
//! Locks: the list's is held for a push or a pop, and released before the stream's own is taken, which
//! is free then, and held while the stream is lent.
//! No wake-up is lost: while a thread sleeps that was not woken, there are at least as many woken threads
//! that have not run yet as idle streams. A thread sleeps only when no stream is idle; each return adds
//! one to both numbers; and taking a stream reduces the idle ones.

use super::{Lent, Place, Streams};
use crate::base::cpu::Padded;
use crate::base::sync::{Condvar, Mutex, classes};

/// The most streams of a list: all are created in advance, and one of zstd takes a sixth of a MiB. More
/// streams than threads that compress at once are of no use.
pub(super) const MAX_STREAMS: u16 = 1024;

/// A fixed number of streams, and a locked list of the idle ones.
pub struct IdleList<S> {
    streams: Box<[Padded<Mutex<S>>]>,
    list: Box<Padded<Mutex<List>>>,
    returned: Condvar,
}

/// Protected by the list's lock.
struct List {
    /// The numbers of the idle streams, the one returned last at the end, with capacity for all.
    idle: Vec<u16>,
    /// Threads that sleep, woken ones included.
    waiting: usize,
    sleeps: u64,
}

/// The number of a stream taken off the list; dropping this returns it, even if its holder panics.
pub(super) struct Taken<'a, S> {
    streams: &'a IdleList<S>,
    number: u16,
}

impl<S> IdleList<S> {
    /// Creates a list of `count` streams, at least one. Fails with the first error of `stream`.
    pub fn new<E>(count: u16, mut stream: impl FnMut() -> Result<S, E>) -> Result<Self, E> {
        let make = |_| stream().map(|stream| Padded(Mutex::new(&classes::STREAM, stream)));
        let list = List { idle: (0..count).collect(), waiting: 0, sleeps: 0 };
        Ok(IdleList {
            streams: (0..count).map(make).collect::<Result<_, E>>()?,
            list: Box::new(Padded(Mutex::new(&classes::STREAM_LIST, list))),
            returned: Condvar::new(),
        })
    }

    fn take(&self) -> Taken<'_, S> {
        let mut list = self.list.lock();
        let number = loop {
            if let Some(number) = list.idle.pop() {
                break number;
            }
            list.sleeps += 1;
            list.waiting += 1;
            list = list.wait(&self.returned);
            list.waiting -= 1;
        };
        Taken { streams: self, number }
    }
}

impl<S> Drop for Taken<'_, S> {
    fn drop(&mut self) {
        let mut list = self.streams.list.lock();
        list.idle.push(self.number);
        debug_assert!(list.idle.len() <= self.streams.streams.len(), "each stream is on the list once");
        let wake = list.waiting > 0;
        drop(list);
        if wake {
            self.streams.returned.notify_one();
        }
    }
}

impl<S> Streams<S> for IdleList<S> {
    #[inline]
    fn lend(&self) -> Lent<'_, S> {
        let taken = self.take();
        let stream = self.streams[usize::from(taken.number)].lock();
        Lent { place: Place::Listed { stream, _taken: taken } }
    }

    fn sleeps(&self) -> u64 {
        self.list.lock().sleeps
    }
}
