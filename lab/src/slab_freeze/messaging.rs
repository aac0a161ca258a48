//! Messages as `perf bench sched messaging` sends them: groups of 20 senders and 20 receivers, each sender
//! sending to each receiver of its group in turn. The sender allocates a message's buffer and the receiver
//! frees it, and a receiver's [`queue`] holds so many that slabs fill up meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use uzram::mem::Arena;
use uzram::slab::Policy;
use uzram::{Error, Result};

use super::objects::{Content, Objects};
use super::queue::{Receiver, Sender, queue};
use crate::experiment::Plan;
use crate::experiment::clock::{Done, RunWork};
use uzram_bench::harness::{Gate, run_together};

/// The number of senders of a group, and of receivers.
const SIDE: usize = 20;
/// The size of a message; perf's default.
const MESSAGE_BYTES: usize = 100;
const OBJECT_BYTES: usize = 104;
/// The length of a receiver's queue: about as many messages as fit a Unix socket's buffer of 208 KiB, which
/// counts the buffers' own size.
const QUEUE: usize = 256;
/// The most groups: the threads of more exceed what some systems allow a user.
const MAX_GROUPS: usize = 64;

/// A message's object, and its sender's index in the group.
type Message = (u32, u32);

enum Member {
    Sender { sender: usize, queues: Vec<Sender<Message>> },
    Receiver(Receiver<Message>),
}

pub(super) fn caches<P: Policy>(arena: &Arc<Arena>, groups: usize) -> Result<Vec<Objects<P>>> {
    if groups > MAX_GROUPS {
        let what = format!("{groups} groups of {} threads: there may be {MAX_GROUPS}", 2 * SIDE);
        return Err(Error::invalid(what).with_setting("--jobs"));
    }
    // For each queue, messages in it and messages received but not freed yet, and one that each sender holds.
    let in_flight = groups * SIDE * (2 * QUEUE + 1);
    Ok(vec![Objects::new(arena, "message", OBJECT_BYTES, align_of::<u64>(), in_flight as u64)?])
}

/// Sends `plan.work` messages or a few more, the same number by each sender.
pub(super) fn run<P: Policy>(caches: &[Objects<P>], plan: &Plan<'_>, run_work: RunWork) -> Result<Vec<Done>> {
    let [messages] = caches else { return Ok(Vec::new()) };
    let rounds = plan.work.div_ceil((plan.jobs * SIDE * SIDE) as u64);
    let members = (0..plan.jobs).flat_map(|_| group());
    run_together(members.map(|member| {
        move |gate: &Gate| {
            gate.pass();
            match member {
                Member::Sender { sender, queues } => {
                    run_work(&mut || send(messages, plan, rounds, sender, &queues))
                }
                Member::Receiver(queue) => run_work(&mut || receive(messages, &queue)),
            }
        }
    }))
}

fn group() -> Vec<Member> {
    let (queues, receivers): (Vec<_>, Vec<_>) = (0..SIDE).map(|_| queue(QUEUE)).unzip();
    let senders = (0..SIDE).map(|sender| Member::Sender { sender, queues: queues.clone() });
    senders.chain(receivers.into_iter().map(Member::Receiver)).collect()
}

/// Sends a message to each receiver in each of `rounds` rounds.
fn send<P: Policy>(
    messages: &Objects<P>,
    plan: &Plan<'_>,
    rounds: u64,
    sender: usize,
    queues: &[Sender<Message>],
) -> Result<u64> {
    let mut content = Content::<MESSAGE_BYTES>::of(sender);
    for round in 0..rounds {
        let content = content.numbered(round);
        for queue in queues {
            let object = messages.take(content)?;
            if !queue.send((object, sender as u32)) {
                // The receiver has failed and returns the error.
                return Ok(0);
            }
        }
        if plan.stop.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(0)
}

/// Receives until all senders have ended; returns the number of messages received.
fn receive<P: Policy>(messages: &Objects<P>, queue: &Receiver<Message>) -> Result<u64> {
    // The content of each sender, and its number of messages.
    let mut expected: Vec<_> = (0..SIDE).map(|sender| (Content::<MESSAGE_BYTES>::of(sender), 0)).collect();
    let (mut batch, mut received) = (Vec::new(), 0);
    while queue.receive(&mut batch) {
        for &(object, sender) in &batch {
            let (content, number) = &mut expected[sender as usize];
            // SAFETY: its sender took the object, and sent its number to this queue alone.
            unsafe { messages.give_back(object, content.numbered(*number))? };
            *number += 1;
        }
        received += batch.len() as u64;
    }
    Ok(received)
}
