//! A bounded queue from many senders to one receiver. The receiver sleeps until the queue is half full (as
//! one that sets `SO_RCVLOWAT` on its socket) and then takes all messages: so threads seldom sleep, and the
//! scheduler is not what is measured.
//!
//! Senders sleep while it is full. Dropping the last sender or the receiver ends the queue and wakes the
//! other side. One lock protects all of it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

struct Queue<T> {
    inner: Mutex<Inner<T>>,
    /// Senders wait here for room.
    emptied: Condvar,
    /// The receiver waits here for half of the capacity.
    filled: Condvar,
    capacity: usize,
}

/// Protected by the queue's lock.
struct Inner<T> {
    waiting: Vec<T>,
    senders: usize,
    receiver: bool,
}

pub(super) struct Sender<T>(Arc<Queue<T>>);

pub(super) struct Receiver<T>(Arc<Queue<T>>);

pub(super) fn queue<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let inner = Inner { waiting: Vec::with_capacity(capacity), senders: 1, receiver: true };
    let (emptied, filled) = (Condvar::new(), Condvar::new());
    let queue = Arc::new(Queue { inner: Mutex::new(inner), emptied, filled, capacity });
    (Sender(Arc::clone(&queue)), Receiver(queue))
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        // No code panics under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sleeps until notified; may wake spuriously.
fn sleep<'a, T>(place: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    place.wait(held).unwrap_or_else(PoisonError::into_inner)
}

impl<T> Sender<T> {
    /// Sends; returns false if the receiver is gone.
    pub(super) fn send(&self, message: T) -> bool {
        let queue = &*self.0;
        let mut inner = queue.lock();
        while inner.receiver && inner.waiting.len() >= queue.capacity {
            inner = sleep(&queue.emptied, inner);
        }
        if !inner.receiver {
            return false;
        }
        inner.waiting.push(message);
        let half = inner.waiting.len() == queue.capacity.div_ceil(2);
        drop(inner);
        if half {
            queue.filled.notify_one();
        }
        true
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.lock().senders += 1;
        Sender(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.senders -= 1;
        if inner.senders == 0 {
            self.0.filled.notify_one();
        }
    }
}

impl<T> Receiver<T> {
    /// Replaces the contents of `received` by the messages sent; returns false at the end of the queue.
    pub(super) fn receive(&self, received: &mut Vec<T>) -> bool {
        let queue = &*self.0;
        received.clear();
        received.reserve(queue.capacity);
        let mut inner = queue.lock();
        while inner.senders > 0 && inner.waiting.len() < queue.capacity.div_ceil(2) {
            inner = sleep(&queue.filled, inner);
        }
        std::mem::swap(&mut inner.waiting, received);
        drop(inner);
        if received.len() >= queue.capacity {
            queue.emptied.notify_all();
        }
        !received.is_empty()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.lock().receiver = false;
        self.0.emptied.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_is_sent_is_received_in_order_to_the_end() {
        let (sender, receiver) = queue(8);
        thread::scope(|scope| {
            for from in 0..3 {
                let sender = sender.clone();
                scope.spawn(move || (0..1000).all(|number| sender.send((from, number))));
            }
            drop(sender);
            let (mut received, mut next) = (Vec::new(), [0; 3]);
            while receiver.receive(&mut received) {
                assert!(received.len() <= 8);
                for (from, number) in &received {
                    assert_eq!(*number, next[*from]);
                    next[*from] += 1;
                }
            }
            assert_eq!(next, [1000; 3]);
        });
    }

    #[test]
    fn a_sender_whose_receiver_goes_does_not_wait_for_it() {
        let (sender, receiver) = queue(4);
        thread::scope(|scope| {
            // The sender sleeps at the fifth.
            let sent = scope.spawn(move || (0..10).take_while(|number| sender.send(*number)).count());
            while receiver.0.lock().waiting.len() < 4 {
                thread::yield_now();
            }
            drop(receiver);
            assert!(sent.join().is_ok_and(|sent| sent == 4));
        });
    }
}
