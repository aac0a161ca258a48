//! The bounded queue between the producer and the consumer: one thread each, words in a ring.
//!
//! Every allocator's objects go through this same queue. Each side keeps its own position, and a copy of the
//! other's that it renews only when the ring seems full or empty, so that the two sides rarely share a cache
//! line.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use uzram::cpu::Padded;

/// How often a side polls before it yields: the thread at the other end may need this CPU.
const SPINS: u32 = 100;

pub struct Ring {
    slots: Box<[AtomicU64]>,
    /// Words taken so far: written by the consumer.
    head: Padded<AtomicU64>,
    /// Words put so far: written by the producer.
    tail: Padded<AtomicU64>,
    /// Whether one side has ended.
    closed: AtomicBool,
}

pub struct Producer<'a> {
    ring: &'a Ring,
    tail: u64,
    head_seen: u64,
}

pub struct Consumer<'a> {
    ring: &'a Ring,
    head: u64,
    tail_seen: u64,
}

impl Ring {
    pub fn new(words: usize) -> Ring {
        Ring {
            slots: (0..words.next_power_of_two()).map(|_| AtomicU64::new(0)).collect(),
            head: Padded(AtomicU64::new(0)),
            tail: Padded(AtomicU64::new(0)),
            closed: AtomicBool::new(false),
        }
    }

    /// Returns the two ends: because they borrow the ring, it has only one of each.
    pub fn ends(&mut self) -> (Producer<'_>, Consumer<'_>) {
        (Producer { ring: self, tail: 0, head_seen: 0 }, Consumer { ring: self, head: 0, tail_seen: 0 })
    }

    fn slot(&self, position: u64) -> &AtomicU64 {
        &self.slots[position as usize & (self.slots.len() - 1)]
    }

    /// Waits until `ready` returns true; returns false if the other side has ended first.
    #[cold]
    fn wait(&self, mut ready: impl FnMut() -> bool) -> bool {
        for spin in 1u32.. {
            // Read before `ready`: words put before the end count.
            let closed = self.closed.load(Ordering::Acquire);
            if ready() {
                return true;
            }
            if closed {
                return false;
            }
            if spin % SPINS == 0 { thread::yield_now() } else { std::hint::spin_loop() }
        }
        false
    }
}

impl Producer<'_> {
    /// Puts a word, waiting while the ring is full; returns false if the consumer has ended.
    #[inline]
    pub fn put(&mut self, word: u64) -> bool {
        let Producer { ring, tail, head_seen } = self;
        let capacity = ring.slots.len() as u64;
        if *tail - *head_seen == capacity {
            let has_room = ring.wait(|| {
                *head_seen = ring.head.0.load(Ordering::Acquire);
                *tail - *head_seen < capacity
            });
            if !has_room {
                return false;
            }
        }
        ring.slot(*tail).store(word, Ordering::Relaxed);
        *tail += 1;
        ring.tail.0.store(*tail, Ordering::Release);
        true
    }
}

impl Consumer<'_> {
    /// Takes a word, waiting while there is none; returns `None` if the producer has ended.
    #[inline]
    pub fn take(&mut self) -> Option<u64> {
        let Consumer { ring, head, tail_seen } = self;
        if *head == *tail_seen {
            let has_word = ring.wait(|| {
                *tail_seen = ring.tail.0.load(Ordering::Acquire);
                *head < *tail_seen
            });
            if !has_word {
                return None;
            }
        }
        let word = ring.slot(*head).load(Ordering::Relaxed);
        *head += 1;
        ring.head.0.store(*head, Ordering::Release);
        Some(word)
    }
}

impl Drop for Producer<'_> {
    fn drop(&mut self) {
        self.ring.closed.store(true, Ordering::Release);
    }
}

impl Drop for Consumer<'_> {
    fn drop(&mut self) {
        self.ring.closed.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_arrive_in_order_and_the_end_is_seen() {
        for words in [1, 2, 64] {
            let mut ring = Ring::new(words);
            let (mut producer, mut consumer) = ring.ends();
            thread::scope(|scope| {
                scope.spawn(move || (0..50_000).for_each(|word| assert!(producer.put(word))));
                (0..50_000).for_each(|word| assert_eq!(consumer.take(), Some(word)));
                assert_eq!(consumer.take(), None);
            });
        }
    }

    #[test]
    fn a_producer_does_not_wait_for_a_consumer_that_ended() {
        let mut ring = Ring::new(4);
        let (mut producer, consumer) = ring.ends();
        thread::scope(|scope| {
            scope.spawn(move || drop(consumer));
            assert!((0..100).any(|word| !producer.put(word)));
        });
    }
}
