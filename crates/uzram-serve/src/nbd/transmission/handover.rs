//! Requests that would wait are handed over to threads of the server's, which carry out what is left of them while
//! the connection goes on.
//!
//! A job has all that it needs: a hold on the open device, a write's payload, memory for the reply. It waits for
//! the device, puts the reply into that memory, and returns it to the connection, whose thread sends it: that
//! thread alone touches the stream, and no chunk is ever cut by another. It is woken when it waits for its client.
//!
//! Invariant: every job that is started returns, once, whatever becomes of it, and after it has let go of the device.
//!
//! Lock: `Returned::jobs`, a leaf.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uzram::device::{OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::STOPPING;
use super::execute::{Replies, Rest};
use crate::nbd::buffer::{Memory, SendBuffer};
use crate::nbd::request::{Command, Headers, Request};
use crate::nbd::request_cache::InFlight;
use crate::nbd::wake::Wake;
use crate::waiters::{Crew, Room, Waiters};

/// Requests of one connection that are handed over at once. Further ones are carried out by its own thread.
const MAX_HANDED_OVER: usize = 64;
/// The longest chunk without its data: a hole with extended headers, 32 + 12 bytes; rounded up.
const MAX_CHUNK_OVERHEAD_BYTES: usize = 48;

/// To whom a connection hands its requests over.
#[derive(Clone, Copy)]
pub(in crate::nbd) struct Handover<'a> {
    /// They wait.
    pub waiters: &'a Waiters,
    /// Ends the connection's wait for its client.
    pub wake: &'a Arc<Wake>,
}

/// Those of the connection's device.
#[derive(Clone)]
struct Helpers<'a> {
    crew: Arc<Crew>,
    wake: &'a Arc<Wake>,
}

/// The requests that a connection has handed over. Dropped, it waits until those are done that were begun.
pub(super) struct HandedOver<'a> {
    helpers: Option<Helpers<'a>>,
    device: &'a Arc<OpenDevice>,
    headers: Headers,
    stopping: &'a Arc<AtomicBool>,
    returned: Arc<Returned>,
    /// By their numbers; none where a number is free.
    requests: Vec<Option<InFlight<'a>>>,
    count: usize,
}

/// What it takes to hand over the rest of a request.
pub(super) struct Places<'a> {
    helpers: Helpers<'a>,
    room: Room,
    payload: Memory,
    reply: SendBuffer,
}

impl Places<'_> {
    /// Where all that is left of a write's payload is to go.
    pub fn payload(&mut self) -> &mut [u8] {
        &mut self.payload
    }
}

/// What a connection's jobs have given back.
#[derive(Default)]
struct Returned {
    jobs: Mutex<VecDeque<Ended>>,
    /// Nobody will hear the replies: what is not begun need not be.
    abandoned: AtomicBool,
}

impl Returned {
    /// Nothing panics while it is held, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Ended>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that has ended.
struct Ended {
    number: usize,
    /// None when it was not begun, or ended by a panic.
    reply: Option<SendBuffer>,
    /// Until the reply is sent.
    room: Room,
}

/// Returns a job when it is dropped.
struct Ticket {
    returned: Arc<Returned>,
    wake: Arc<Wake>,
    ended: Option<Ended>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            self.returned.lock().push_back(ended);
            self.wake.signal();
        }
    }
}

/// A job. Its fields are dropped in their order, however it ends.
struct Job {
    device: Arc<OpenDevice>,
    headers: Headers,
    stopping: Arc<AtomicBool>,
    request: Request,
    rest: Rest,
    payload: Memory,
    reply: Option<SendBuffer>,
    ticket: Ticket,
}

impl Job {
    fn run(&mut self) {
        let Some(mut reply) = self.reply.take() else { return };
        if self.ticket.returned.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let mut replies = Replies {
            device: &self.device,
            headers: self.headers,
            stopping: &self.stopping,
            budget: None,
            unsent: &mut reply,
            stream: &mut NoStream,
        };
        let answered = if self.stopping.load(Ordering::Relaxed) {
            replies.fail(&self.request, &STOPPING.into())
        } else if self.request.command == Command::Write {
            replies.write_waiting(&self.request, self.rest.at, &self.payload)
        } else {
            replies.execute(&self.request, self.rest, Wait::Yes).map(drop)
        };
        if let (Ok(()), Some(ended)) = (answered, &mut self.ticket.ended) {
            ended.reply = Some(reply);
        }
    }
}

/// Where replies would go that do not fit the memory made for them.
struct NoStream;

impl Write for NoStream {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The most that the reply to a request can take which reads `data_bytes`.
fn reply_bytes(data_bytes: usize) -> usize {
    // A chunk has a page at least, but for the first and the last one. A page more is for an error that ends it
    // all, and keeps [`Replies`] from cutting what it could answer at once.
    data_bytes + (data_bytes / PAGE_SIZE + 2) * MAX_CHUNK_OVERHEAD_BYTES + PAGE_SIZE
}

impl<'a> HandedOver<'a> {
    /// Empty; stays empty if `handover` is `None`.
    pub fn new(
        handover: Option<Handover<'a>>,
        device: &'a Arc<OpenDevice>,
        headers: Headers,
        stopping: &'a Arc<AtomicBool>,
    ) -> Self {
        let helpers =
            |Handover { waiters, wake }: Handover<'a>| Helpers { crew: waiters.crew(device.device()), wake };
        HandedOver {
            helpers: handover.map(helpers),
            device,
            headers,
            stopping,
            returned: Arc::default(),
            requests: Vec::new(),
            count: 0,
        }
    }

    /// Whether the connection's own thread may wait for the device before it has tried to hand a request over.
    pub fn wait(&self) -> Wait {
        if self.helpers.is_some() { Wait::No } else { Wait::Yes }
    }

    /// Whether all have been answered.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// What it takes to hand over the rest of a request; `None` when too much is handed over already, or the
    /// system does not give it.
    pub fn places(&self, request: &Request, rest: Rest) -> Option<Places<'a>> {
        let helpers = self.helpers.as_ref()?;
        let left_bytes = usize::try_from(rest.left_bytes).ok()?;
        let (payload_bytes, data_bytes) = match request.command {
            Command::Write => (left_bytes, 0),
            Command::Read => (0, left_bytes),
            _ => (0, 0),
        };
        let reply_bytes = reply_bytes(data_bytes);
        if self.count == MAX_HANDED_OVER || helpers.wake.prepare().is_err() {
            return None;
        }
        let room = helpers.crew.room(payload_bytes + reply_bytes)?;
        Some(Places {
            helpers: helpers.clone(),
            room,
            payload: Memory::new(payload_bytes).ok()?,
            reply: SendBuffer::new(reply_bytes).ok()?,
        })
    }

    /// Says whether a payload is to come that there are [`Places`] for: then the client must not be slow.
    pub fn expect_payload(&self, expected: bool) {
        if let Some(Helpers { wake, .. }) = &self.helpers {
            wake.expect_payload(expected);
        }
    }

    /// Hands over the rest of a request, with its payload, if it has one, in its place.
    pub fn start(&mut self, request: InFlight<'a>, rest: Rest, places: Places<'a>) {
        let Places { helpers: Helpers { crew, wake }, room, payload, reply } = places;
        let copy = *request;
        let number = match self.requests.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.requests.push(None);
                self.requests.len() - 1
            }
        };
        self.requests[number] = Some(request);
        self.count += 1;
        wake.arm(true);
        let ended = Some(Ended { number, reply: None, room });
        let mut job = Job {
            device: Arc::clone(self.device),
            headers: self.headers,
            stopping: Arc::clone(self.stopping),
            request: copy,
            rest,
            payload,
            reply: Some(reply),
            ticket: Ticket { returned: Arc::clone(&self.returned), wake: Arc::clone(wake), ended },
        };
        crew.start(Box::new(move || job.run()));
    }

    /// Puts the replies of those that are done into `unsent`.
    ///
    /// # Errors
    /// The stream's; `Other` when one has no reply, because a panic ended it or its reply had no room.
    pub fn collect(&mut self, unsent: &mut SendBuffer, stream: &mut impl Write) -> io::Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        loop {
            let Some(ended) = self.returned.lock().pop_front() else { break };
            let Ended { number, reply, room: _until_sent } = ended;
            let _request = self.requests[number].take();
            self.count -= 1;
            let reply = reply.ok_or_else(|| io::Error::other("a request ended without a reply"))?;
            unsent.put(stream, reply.filled())?;
        }
        if let Some(Helpers { wake, .. }) = &self.helpers {
            wake.arm(self.count > 0);
        }
        Ok(())
    }

    /// Waits until one of those that are left may be done.
    pub fn wait_for_one(&self) -> io::Result<()> {
        match &self.helpers {
            Some(Helpers { wake, .. }) if self.count > 0 => wake.wait(),
            _ => Ok(()),
        }
    }
}

impl Drop for HandedOver<'_> {
    fn drop(&mut self) {
        self.returned.abandoned.store(true, Ordering::Relaxed);
        loop {
            let ended = std::mem::take(&mut *self.returned.lock());
            self.count -= ended.len();
            // Requests go before rooms: there are as many of them at most.
            ended.iter().for_each(|ended| self.requests[ended.number] = None);
            drop(ended);
            if self.count == 0 || self.wait_for_one().is_err() {
                break;
            }
        }
        if let Some(Helpers { wake, .. }) = &self.helpers {
            wake.arm(false);
        }
    }
}
