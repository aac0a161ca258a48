//! Packets as stress-ng's `--rawpkt` sends them through the loopback device: each takes an object for its
//! `struct sk_buff` and one for its data (the kernel's `skb_small_head`), and another thread than the
//! allocating one frees both. Threads form a ring, each sending to the next.
//!
//! A thread has several sockets, each a queue. Its sender picks one for each packet; the thread reads them
//! one after the other, each until it is empty. So packets of one slab have different lifetimes: a slab fills
//! up, its objects come back one by one, and it becomes partial long before it is empty. Between [`WINDOW`] /
//! 2 and `WINDOW` packets are always in flight to each thread, many more than fit the slabs that a CPU may
//! keep; a single thread sends to itself.
//!
//! A thread that can neither send nor receive yields. One that fails sets `broken`, and the others end as
//! well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use uzram::Result;
use uzram::cpu::Padded;
use uzram::mem::Arena;
use uzram::slab::Policy;

use super::objects::{Content, Objects};
use crate::experiment::Plan;
use crate::experiment::clock::{Done, RunWork};
use uzram_bench::harness::{Gate, run_together};

/// Objects of a packet, each from its own cache.
pub(super) const CACHES: usize = 2;
/// Bytes of a `struct sk_buff`, and of `skb_small_head`, on x86-64.
const SKB_BYTES: usize = 256;
const DATA_BYTES: usize = 704;
/// A CPU's cache line: both are aligned to it, and one of each is written and checked.
const LINE_BYTES: usize = 64;

/// The most packets in flight to a thread.
const WINDOW: u64 = 1024;
const SOCKETS: usize = 8;
/// Packets sent between two notifications of the receiver.
const BATCH: u64 = 32;

/// The connection from one thread to the next.
struct Wire {
    sockets: [Socket; SOCKETS],
    /// Packets that the sender has put into the sockets; only the sender writes it.
    sent: Padded<AtomicU64>,
    /// Packets that the receiver has taken from them; only the receiver writes it.
    received: Padded<AtomicU64>,
}

/// A queue that never overflows, because no more packets than it has slots are in flight.
struct Socket {
    /// Packets: the number of the skb, and that of its data in the upper half.
    slots: Box<[AtomicU64]>,
    /// Packets put in so far: only the sender writes it, publishing the slots.
    sent: Padded<AtomicU64>,
}

impl Wire {
    fn new() -> Self {
        let slots = || (0..WINDOW).map(|_| AtomicU64::new(0)).collect();
        Wire {
            sockets: std::array::from_fn(|_| Socket { slots: slots(), sent: Padded::default() }),
            sent: Padded::default(),
            received: Padded::default(),
        }
    }
}

impl Socket {
    fn slot(&self, number: u64) -> &AtomicU64 {
        &self.slots[(number % WINDOW) as usize]
    }
}

pub(super) fn caches<P: Policy>(arena: &Arc<Arena>, threads: usize) -> Result<Vec<Objects<P>>> {
    let in_flight = threads as u64 * (WINDOW + BATCH);
    let cache = |name, size_bytes| Objects::new(arena, name, size_bytes, LINE_BYTES, in_flight);
    Ok(vec![cache("skb", SKB_BYTES)?, cache("skb_small_head", DATA_BYTES)?])
}

/// Sends packets of `plan.work` objects or a few more, the same number by each thread.
pub(super) fn run<P: Policy>(caches: &[Objects<P>], plan: &Plan<'_>, run_work: RunWork) -> Result<Vec<Done>> {
    let [skbs, data] = caches else { return Ok(Vec::new()) };
    let packets = plan.work.div_ceil((plan.jobs * CACHES) as u64);
    let wires: Vec<Wire> = (0..plan.jobs).map(|_| Wire::new()).collect();
    let broken = AtomicBool::new(false);
    let jobs = (0..plan.jobs).map(|thread| {
        let mut end = End::new(skbs, data, &wires, thread, plan.seed, &broken);
        move |gate: &Gate| {
            gate.pass();
            run_work(&mut || end.run(plan, packets))
        }
    });
    run_together(jobs)
}

/// A thread, which sends by one wire and receives by another.
struct End<'a, P: Policy> {
    skbs: &'a Objects<P>,
    data: &'a Objects<P>,
    to: &'a Wire,
    from: &'a Wire,
    /// The number of packets sent to each socket, and of those read from each.
    sent: [u64; SOCKETS],
    read: [u64; SOCKETS],
    /// The socket to read next.
    next: usize,
    /// What this thread writes to its packets, and what the one before it does.
    own: Content<LINE_BYTES>,
    theirs: Content<LINE_BYTES>,
    random: fastrand::Rng,
    /// Set when a thread ended before its work was done: no other thread may wait for it.
    broken: &'a AtomicBool,
    complete: bool,
}

impl<'a, P: Policy> End<'a, P> {
    /// Makes the thread at that index in the ring.
    fn new(
        skbs: &'a Objects<P>,
        data: &'a Objects<P>,
        wires: &'a [Wire],
        thread: usize,
        seed: u64,
        broken: &'a AtomicBool,
    ) -> Self {
        let before = (thread + wires.len() - 1) % wires.len();
        End {
            skbs,
            data,
            to: &wires[thread],
            from: &wires[before],
            sent: [0; SOCKETS],
            read: [0; SOCKETS],
            next: 0,
            own: Content::of(thread),
            theirs: Content::of(before),
            random: fastrand::Rng::with_seed(seed << 32 | thread as u64),
            broken,
            complete: false,
        }
    }

    /// Sends and receives `packets` packets; returns the number of objects received.
    fn run(&mut self, plan: &Plan<'_>, packets: u64) -> Result<u64> {
        let (mut sent, mut received) = (0, 0);
        while sent < packets || received < packets {
            let now = self.send(sent, packets)?;
            sent += now;
            let taken = self.receive(received, packets)?;
            received += taken;
            if plan.stop.load(Ordering::Relaxed) || self.broken.load(Ordering::Relaxed) {
                return Ok(CACHES as u64 * received);
            }
            if now + taken == 0 {
                thread::yield_now();
            }
        }
        self.complete = true;
        Ok(CACHES as u64 * received)
    }

    /// Sends a batch, or fewer packets if there is less room or less left to send; returns the number sent.
    fn send(&mut self, sent: u64, packets: u64) -> Result<u64> {
        let in_flight = sent - self.to.received.load(Ordering::Acquire);
        let batch = BATCH.min(packets - sent).min(WINDOW - in_flight);
        for _ in 0..batch {
            let socket = self.random.usize(..SOCKETS);
            let number = self.sent[socket];
            let content = self.own.numbered(number);
            let (skb, data) = (self.skbs.take(content)?, self.data.take(content)?);
            let packet = u64::from(data) << 32 | u64::from(skb);
            self.to.sockets[socket].slot(number).store(packet, Ordering::Relaxed);
            self.sent[socket] += 1;
        }
        if batch > 0 {
            for (socket, number) in self.to.sockets.iter().zip(self.sent) {
                socket.sent.store(number, Ordering::Release);
            }
            self.to.sent.store(sent + batch, Ordering::Release);
        }
        Ok(batch)
    }

    /// Empties the next socket once half a window or the rest of the packets wait; returns the number
    /// received.
    fn receive(&mut self, received: u64, packets: u64) -> Result<u64> {
        let sent = self.from.sent.load(Ordering::Acquire);
        if sent - received < WINDOW / 2 && sent < packets {
            return Ok(0);
        }
        let socket = &self.from.sockets[self.next];
        let first = self.read[self.next];
        let end = socket.sent.load(Ordering::Acquire);
        for number in first..end {
            let packet = socket.slot(number).load(Ordering::Relaxed);
            let content = self.theirs.numbered(number);
            // SAFETY: the sender took both objects and put their numbers into this slot alone. `sent`
            // publishes the slot to this thread, its only reader.
            unsafe {
                self.skbs.give_back(packet as u32, content)?;
                self.data.give_back((packet >> 32) as u32, content)?;
            }
        }
        self.read[self.next] = end;
        self.next = (self.next + 1) % SOCKETS;
        self.from.received.store(received + (end - first), Ordering::Release);
        Ok(end - first)
    }
}

impl<P: Policy> Drop for End<'_, P> {
    fn drop(&mut self) {
        if !self.complete {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use uzram::slab::DelayedFreeze;

    use super::*;

    #[test]
    fn a_thread_whose_neighbour_ended_early_ends_too() {
        let arena = Arc::new(Arena::new(64 << 20).unwrap());
        let caches = caches::<DelayedFreeze>(&arena, 2).unwrap();
        let wires = [Wire::new(), Wire::new()];
        let (stop, broken) = (AtomicBool::new(false), AtomicBool::new(false));
        let plan = Plan { design: 0, jobs: 2, work: 0, seed: 0, stop: &stop };
        let [mut waiting, gone] =
            [0, 1].map(|thread| End::new(&caches[0], &caches[1], &wires, thread, 0, &broken));
        thread::scope(|scope| {
            let waiting = scope.spawn(move || waiting.run(&plan, 100_000));
            drop(gone);
            let deadline = Instant::now() + Duration::from_secs(10);
            while !waiting.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            let ended = waiting.is_finished();
            stop.store(true, Ordering::Relaxed);
            assert_eq!(waiting.join().unwrap().unwrap(), 0);
            assert!(ended);
        });
    }
}
