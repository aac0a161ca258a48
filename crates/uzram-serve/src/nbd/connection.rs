//! The transmission phase: requests in, replies out, until the client leaves.
//!
//! All complete requests of one receive are executed in order and answered with one send. A write's payload
//! is stored as it arrives. A request is a small value on the stack of its connection's thread. From its
//! header to its reply in the send buffer nothing is allocated, with two exceptions: a read that is longer
//! than the send buffer and must be answered in one piece (`Replies::read_whole`), and a request that would
//! wait for the device, which is offloaded. Both take their memory from the server's budget.
//!
//! Invariants: a connection never waits for its client while it holds unsent replies, nor for the device
//! while a pool can do that instead. Only the connection's own thread touches the stream.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::device::Wait;
use uzram::units::PAGE_SIZE;

use super::buffer::{Buffers, ReceiveBuffer};
use super::clients::{Traffic, TrafficCounters};
use super::handshake::Chosen;
use super::meta_context::{Context, Contexts};
use super::offload::Offloaded;
use super::proto::{Bytes, NbdError, command, command_flags, violation};
use super::replies::{Replies, STOPPING};
use super::request::{Refusal, Request};
use super::socket::Wake;
use crate::Access;
use crate::device_pool::DevicePools;

const READ_ONLY: Refusal = Refusal { error: NbdError::Perm, message: "the export is read-only" };

/// What a connection shares with others of its server.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub stopping: &'a Arc<AtomicBool>,
    /// The threads that wait for devices, and what wakes this one; `None` if requests are not offloaded.
    pub offload: Option<(&'a DevicePools, &'a Arc<Wake>)>,
    pub traffic: &'a TrafficCounters,
}

/// One client, from its first request to its last reply.
struct Connection<'a, S> {
    access: Access,
    contexts: Contexts,
    received: &'a mut ReceiveBuffer,
    replies: Replies<'a, S>,
    offloaded: Offloaded<'a>,
    traffic: Traffic,
    /// Where other threads read `traffic`.
    published: &'a TrafficCounters,
}

/// Serves requests until the client disconnects and all offloaded requests are done. Once the server is
/// stopping, requests that have arrived are answered with `NBD_ESHUTDOWN`. Errors: the stream's;
/// `InvalidData` for a malformed request; `UnexpectedEof` when the client disconnects within a request.
pub(super) fn serve<S: Read + Write>(
    stream: &mut S,
    chosen: Chosen,
    shared: Shared<'_>,
    buffers: &mut Buffers,
) -> io::Result<()> {
    // Counts the client until everything that uses the device is gone.
    let export = chosen.export;
    let (received, unsent, budget) = buffers.emptied();
    let mut connection = Connection {
        access: export.access,
        contexts: chosen.contexts,
        received,
        replies: Replies {
            device: &export.device,
            headers: chosen.headers,
            stopping: shared.stopping,
            budget: Some(budget),
            unsent,
            stream,
        },
        offloaded: Offloaded::new(shared.offload, export.device.device()),
        traffic: Traffic::default(),
        published: shared.traffic,
    };
    let served = connection.serve();
    match &served {
        // The requests before a malformed or incomplete one get their replies.
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {}
        _ => connection.finish()?,
    }
    served
}

impl<S: Read + Write> Connection<'_, S> {
    fn serve(&mut self) -> io::Result<()> {
        let headers = self.replies.headers;
        loop {
            let Some(request) = Request::parse(self.received.available(), headers)? else {
                if self.receive()? {
                    continue;
                }
                let is_between = self.received.available().is_empty();
                return if is_between { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            };
            self.received.consume(headers.request_bytes());
            self.traffic.count(&request);
            match self.check(&request) {
                _ if request.command == command::DISC => return Ok(()),
                Ok(()) => self.execute(&request)?,
                Err(refusal) => {
                    self.discard_payload(request.payload_bytes)?;
                    self.replies.fail(&request, refusal)?;
                }
            }
        }
    }

    /// Sends all replies, including those of requests that are still offloaded.
    fn finish(&mut self) -> io::Result<()> {
        loop {
            self.send()?;
            if !self.offloaded.wait_for_one()? {
                return Ok(());
            }
        }
    }

    #[inline]
    fn check(&self, request: &Request) -> Result<(), Refusal> {
        if self.replies.stopping.load(Ordering::Relaxed) {
            return Err(STOPPING);
        }
        if self.access == Access::Read && request.changes() {
            return Err(READ_ONLY);
        }
        request.check(self.replies.device.size_bytes(), self.replies.headers)
    }

    /// Executes a request and puts its reply into the send buffer, or offloads it.
    fn execute(&mut self, request: &Request) -> io::Result<()> {
        let (mut at, mut wait) = (request.offset, self.offloaded.wait());
        loop {
            let blocked = match request.command {
                command::WRITE => self.write(request, at, wait)?,
                command::BLOCK_STATUS => return self.block_status(request),
                _ => self.replies.execute(request, at, wait)?,
            };
            let Some(blocked_at) = blocked else { return Ok(()) };
            if let Some(mut buffers) = self.offloaded.buffers(request, blocked_at) {
                self.receive_payload(&mut buffers.payload)?;
                self.offloaded.start(&self.replies, request, blocked_at, buffers);
                return Ok(());
            }
            // This thread waits for the device itself; send the replies to other requests first.
            self.send()?;
            (at, wait) = (blocked_at, Wait::Yes);
        }
    }

    /// Receives the rest of a write's payload, from byte `at` of the export on, and stores it, as far as that
    /// need not wait; returns where it would.
    ///
    /// A payload that has not arrived completely is stored in pieces that end on page boundaries. So its
    /// length is not bounded by the buffer, and no page is written twice.
    fn write(&mut self, request: &Request, mut at: u64, wait: Wait) -> io::Result<Option<u64>> {
        loop {
            let available = self.received.available();
            let ready_bytes = ready_bytes(at, request.end(), available.len());
            let done_bytes = match self.replies.device.write_some(at, &available[..ready_bytes], wait) {
                Ok(done_bytes) => done_bytes,
                Err(error) => {
                    self.discard_payload(request.end() - at)?;
                    return self.replies.fail(request, error).map(|()| None);
                }
            };
            self.received.consume(done_bytes);
            at += done_bytes as u64;
            if at == request.end() {
                return self.replies.succeed(request).map(|()| None);
            }
            if done_bytes < ready_bytes {
                return Ok(Some(at));
            }
            self.receive_more()?;
        }
    }

    /// Receives the rest of an offloaded write's payload into `payload`. The client must not be slow, as
    /// memory is held for it.
    fn receive_payload(&mut self, mut payload: &mut [u8]) -> io::Result<()> {
        self.offloaded.expect_payload(true);
        loop {
            let available = self.received.available();
            let piece_bytes = payload.len().min(available.len());
            let (piece, rest) = payload.split_at_mut(piece_bytes);
            piece.copy_from_slice(&available[..piece_bytes]);
            self.received.consume(piece_bytes);
            if rest.is_empty() {
                break;
            }
            payload = rest;
            self.receive_more()?;
        }
        self.offloaded.expect_payload(false);
        Ok(())
    }

    /// Receives the rest of a payload and discards it, to stay in step with the client. Errors: `InvalidData`
    /// when the payload is far too long; the stream's.
    fn discard_payload(&mut self, mut left_bytes: u64) -> io::Result<()> {
        if left_bytes > self.replies.headers.max_received_bytes() {
            return Err(violation("a payload that is far too long"));
        }
        loop {
            let piece_bytes = left_bytes.min(self.received.available().len() as u64);
            self.received.consume(piece_bytes as usize);
            left_bytes -= piece_bytes;
            if left_bytes == 0 {
                return Ok(());
            }
            self.receive_more()?;
        }
    }

    /// Replies to a `BLOCK_STATUS` that has passed `Request::check`, which does not check the range in a
    /// payload.
    fn block_status(&mut self, request: &Request) -> io::Result<()> {
        let chosen = if request.has(command_flags::PAYLOAD_LEN) {
            self.status_payload(request)?
        } else {
            Ok((request.len_bytes, self.contexts))
        };
        match chosen {
            Ok((len_bytes, contexts)) => self.replies.report_status(request, len_bytes, contexts),
            Err(refusal) => self.replies.fail(request, refusal),
        }
    }

    /// Receives a payload: a length, and a selection of the contexts that were set.
    fn status_payload(&mut self, request: &Request) -> io::Result<Result<(u64, Contexts), Refusal>> {
        // A length and the id of each context: a longer payload names one twice, or an unknown one.
        let longest_bytes = 8 + 4 * Context::ALL.len();
        if request.payload_bytes > longest_bytes as u64 {
            self.discard_payload(request.payload_bytes)?;
            return Ok(Err(Refusal::invalid("a payload of more contexts than there are")));
        }
        let payload_bytes = request.payload_bytes as usize;
        while self.received.available().len() < payload_bytes {
            self.receive_more()?;
        }
        let parsed = parse_selection(&self.received.available()[..payload_bytes], self.contexts);
        self.received.consume(payload_bytes);
        let Some((len_bytes, contexts)) = parsed else {
            let message = "a payload is a length and the numbers of contexts that were set, each once";
            return Ok(Err(Refusal::invalid(message)));
        };
        let flags = request.flags & !command_flags::PAYLOAD_LEN;
        let effective = Request { flags, len_bytes, ..*request };
        let checked = effective.check(self.replies.device.size_bytes(), self.replies.headers);
        Ok(checked.map(|()| (len_bytes, contexts)))
    }

    fn receive_more(&mut self) -> io::Result<()> {
        if self.receive()? { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Sends the replies that are ready, then waits for more bytes; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        loop {
            self.published.publish(&self.traffic);
            self.send()?;
            match self.received.fill(self.replies.stream) {
                // An offloaded request has completed.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.offloaded.is_empty() => {}
                result => return Ok(result? > 0),
            }
        }
    }

    /// Sends the replies that are ready, those of offloaded requests included.
    #[inline(always)]
    fn send(&mut self) -> io::Result<()> {
        if !self.offloaded.is_empty() {
            self.offloaded.collect(self.replies.unsent, self.replies.stream)?;
        }
        self.replies.unsent.flush(self.replies.stream)
    }
}

/// Returns how many bytes of a payload for the range from `at` to `end` can be stored now: the whole rest if
/// it has arrived, otherwise up to the last page boundary that has arrived.
fn ready_bytes(at: u64, end: u64, available_bytes: usize) -> usize {
    let arrived = at + available_bytes as u64;
    if arrived >= end {
        (end - at) as usize
    } else {
        available_bytes.saturating_sub((arrived % PAGE_SIZE as u64) as usize)
    }
}

/// Parses a payload: a length in bytes, and the ids of at least one context of `set`, none twice.
fn parse_selection(payload: &[u8], set: Contexts) -> Option<(u64, Contexts)> {
    let mut bytes = Bytes(payload);
    let len_bytes = bytes.u64()?;
    let mut contexts = Contexts::default();
    while !bytes.0.is_empty() {
        let id = bytes.u32()?;
        let context = set.iter().find(|context| context.id() == id)?;
        if !contexts.insert(context) {
            return None;
        }
    }
    (!contexts.is_empty()).then_some((len_bytes, contexts))
}
