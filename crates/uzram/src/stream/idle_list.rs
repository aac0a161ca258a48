//! A locked list of idle streams, as the kernel had it until "zram: user per-cpu compression
//! streams" (S. Senozhatsky, 2016).
//!
//! A thread takes the stream that was returned last, which is the warmest. One that finds none
//! sleeps. Each stream that is returned while threads sleep wakes one of them. As in the kernel,
//! the stream is not kept for it: a thread that comes by earlier takes it, and the woken one sleeps
//! again. Handing it over would be fair, and would make each thread sleep for each page as soon as
//! there are more threads than streams, since a thread is back for its next page before the one it
//! woke has run.
//!
//! Locks: the list's is held for a push or a pop, and let go before the stream's own is taken, which
//! is free then and held while the stream is lent.
//! No wake-up is lost: as long as threads sleep that nobody has woken, at least as many woken ones
//! are on their way as there are idle streams. For a thread goes to sleep only when no stream is
//! idle; each return adds one to both; and whoever takes a stream takes one from the idle ones.

use std::ops::{Deref, DerefMut};

use super::{StreamCount, Streams};
use crate::base::cpu::Padded;
use crate::base::sync::{Condvar, Mutex, MutexGuard, classes};

/// A number of streams, and a locked list of those that are idle. A thread that finds none sleeps
/// until one is returned.
pub struct IdleList<S> {
    streams: Box<[Padded<Mutex<S>>]>,
    list: Box<Padded<Mutex<List>>>,
    returned: Condvar,
}

/// Protected by the list's lock.
struct List {
    /// The numbers of the streams that are not lent, the one returned last at the end. It has room
    /// for all of them.
    idle: Vec<u16>,
    /// Threads that sleep, woken ones included.
    waiting: usize,
    sleeps: u64,
}

/// A stream that a thread has, until it is dropped.
pub struct Lent<'a, S> {
    // Unlocked before `_taken` is returned.
    stream: MutexGuard<'a, S>,
    _taken: Taken<'a, S>,
}

/// The number of a stream that is off the list; it goes back even if its holder panics.
struct Taken<'a, S> {
    streams: &'a IdleList<S>,
    number: u16,
}

impl<S> IdleList<S> {
    /// Makes a list of `count` streams.
    ///
    /// # Errors
    /// What `stream` returns for the first that cannot be made.
    pub fn new<E>(count: StreamCount, mut stream: impl FnMut() -> Result<S, E>) -> Result<Self, E> {
        let make = |_| stream().map(|stream| Padded(Mutex::new(&classes::STREAM, stream)));
        let list = List { idle: (0..count.get()).collect(), waiting: 0, sleeps: 0 };
        Ok(IdleList {
            streams: (0..count.get()).map(make).collect::<Result<_, E>>()?,
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
    type Lent<'a>
        = Lent<'a, S>
    where
        S: 'a;

    #[inline]
    fn lend(&self) -> Lent<'_, S> {
        let taken = self.take();
        Lent { stream: self.streams[usize::from(taken.number)].lock(), _taken: taken }
    }

    fn sleeps(&self) -> u64 {
        self.list.lock().sleeps
    }
}

impl<S> Deref for Lent<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        &self.stream
    }
}

impl<S> DerefMut for Lent<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        &mut self.stream
    }
}
