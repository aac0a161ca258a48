//! A bounded queue of objects from one thread to one other. Neither side sleeps: one that has to wait spins for a
//! moment and then yields, so that the scheduler is not what is measured.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use uzram::Result;
use uzram::cpu::Padded;

/// Turns of a wait before it yields.
const SPINS: u32 = 32;

/// See the [module's documentation](self).
pub(super) struct Pipe {
    slots: Box<[AtomicU32]>,
    /// Objects put in so far: only the sender writes it, publishing the slots.
    sent: Padded<AtomicU64>,
    /// Objects taken out so far: only the receiver writes it, giving the slots back.
    received: Padded<AtomicU64>,
}

/// How a side moves objects.
#[derive(Clone, Copy)]
pub(super) struct Flow<'a> {
    /// The objects to move in all.
    pub(super) total: u64,
    /// The objects that move together: a side waits for as many, or for all that are left.
    pub(super) batch: u64,
    /// Set when the run is stopped.
    pub(super) stop: &'a AtomicBool,
    /// Set when a thread has failed: no other may wait for it.
    pub(super) broken: &'a AtomicBool,
}

impl Pipe {
    /// Makes a pipe that holds `capacity` objects, at least a batch.
    pub(super) fn new(capacity: u64) -> Self {
        let slots = (0..capacity).map(|_| AtomicU32::new(0)).collect();
        Pipe { slots, sent: Padded::default(), received: Padded::default() }
    }

    /// Sends what `take` returns for each number of an object; returns how many objects were sent.
    pub(super) fn send(&self, flow: Flow<'_>, mut take: impl FnMut(u64) -> Result<u32>) -> Result<u64> {
        let capacity = self.slots.len() as u64;
        flow.run(
            |sent| capacity - (sent - self.received.load(Ordering::Acquire)),
            |number| {
                self.slot(number).store(take(number)?, Ordering::Relaxed);
                Ok(())
            },
            &self.sent,
        )
    }

    /// Calls `give_back` with the number of each object and the object; returns how many were received.
    pub(super) fn receive(
        &self,
        flow: Flow<'_>,
        mut give_back: impl FnMut(u64, u32) -> Result<()>,
    ) -> Result<u64> {
        flow.run(
            |received| self.sent.load(Ordering::Acquire) - received,
            |number| give_back(number, self.slot(number).load(Ordering::Relaxed)),
            &self.received,
        )
    }

    fn slot(&self, number: u64) -> &AtomicU32 {
        &self.slots[(number % self.slots.len() as u64) as usize]
    }
}

impl Flow<'_> {
    /// Moves every object, each batch as soon as there is `room` for it, and publishes its end. Ends early if the
    /// run has ended.
    fn run(
        self,
        room: impl Fn(u64) -> u64,
        mut each: impl FnMut(u64) -> Result<()>,
        published: &AtomicU64,
    ) -> Result<u64> {
        let (mut done, mut turns) = (0, 0);
        while done < self.total {
            let batch = self.batch.min(self.total - done);
            if room(done) < batch {
                if self.has_ended() {
                    break;
                }
                turns += 1;
                if turns % SPINS == 0 {
                    thread::yield_now()
                } else {
                    std::hint::spin_loop()
                }
                continue;
            }
            turns = 0;
            (done..done + batch).try_for_each(&mut each)?;
            done += batch;
            published.store(done, Ordering::Release);
            if self.has_ended() {
                break;
            }
        }
        Ok(done)
    }

    /// Returns whether the run is stopped, or a thread of it has failed.
    pub(super) fn has_ended(self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.broken.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::Error;

    use super::*;

    #[test]
    fn what_is_sent_is_received_in_order() {
        let (stop, broken) = (AtomicBool::new(false), AtomicBool::new(false));
        for (batch, total) in [(1, 100), (8, 1000), (64, 1001), (64, 3)] {
            let pipe = Pipe::new(64);
            let flow = Flow { total, batch, stop: &stop, broken: &broken };
            thread::scope(|scope| {
                scope.spawn(|| pipe.send(flow, |number| Ok(number as u32 * 3)).unwrap());
                let mut next = 0;
                let received = pipe.receive(flow, |number, object| {
                    assert_eq!((number, u64::from(object)), (next, 3 * next));
                    next += 1;
                    Ok(())
                });
                assert_eq!((received.unwrap(), next), (total, total));
            });
        }
    }

    #[test]
    fn a_side_ends_when_the_other_has_failed() {
        let (stop, broken) = (AtomicBool::new(false), AtomicBool::new(false));
        let pipe = Pipe::new(64);
        let flow = Flow { total: 1000, batch: 8, stop: &stop, broken: &broken };
        thread::scope(|scope| {
            let sender = scope.spawn(|| pipe.send(flow, |number| Ok(number as u32)));
            let refuse = |number, _| if number < 12 { Ok(()) } else { Err(Error::invalid("no more")) };
            assert!(pipe.receive(flow, refuse).is_err());
            broken.store(true, Ordering::Relaxed);
            // It fills the pipe and waits then: the receiver has given one batch back.
            assert_eq!(sender.join().unwrap().unwrap(), 64 + 8);
        });
    }
}
