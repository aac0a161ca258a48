//! The transmission phase: requests in, replies out, until the client leaves.
//!
//! All complete requests of one receive are carried out, in order, and answered with one send.
//! A request lives in the server's slab cache while it is carried out. Nothing else is allocated for
//! it, with two exceptions: a read that is longer than the send buffer and must be answered in one
//! piece (see `Replies::read_whole`), and what would wait for the device and is handed over to other
//! threads (`handover`), to be answered when it is done. Both take what they allocate from the server's budget.
//!
//! Invariants: a connection never waits for the client while it holds unsent replies; nor for the device,
//! where others can do that for it. Its own thread alone touches the stream.
//!
//! Here requests are received and sorted out, and the payloads of writes stored as they come; `execute`
//! carries out the others, `read` answers reads, `status` tells what is allocated, `reply` has the
//! replies without data.

mod execute;
mod handover;
mod read;
mod reply;
mod status;

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::device::Wait;
use uzram::units::PAGE_SIZE;

use super::buffer::{Buffers, ReceiveBuffer};
use super::clients::{Traffic, TrafficCounters};
use super::handshake::Session;
use super::meta_context::Contexts;
use super::proto::NbdError;
use super::request::{Command, Headers, Refusal, Request};
use super::request_cache::InFlight;
use super::session::Terms;
use super::{RequestCache, violation};
use crate::Access;
use execute::{Replies, Rest};
use handover::HandedOver;

pub(super) use handover::Handover;

/// What a request is told once the server is stopping.
const STOPPING: Refusal = Refusal { error: NbdError::Shutdown, message: "the server is stopping" };

/// What a change of an export is told that is for reading only.
const READ_ONLY: Refusal = Refusal { error: NbdError::Perm, message: "the export is read-only" };

/// Serves requests until the client disconnects, and those that were handed over are done. Once
/// `terms.stopping` is set, requests that have arrived are answered with `NBD_ESHUTDOWN`.
///
/// # Errors
/// The stream's; `InvalidData` when a request makes no sense; `UnexpectedEof` when the client
/// vanished within one.
pub(super) fn run<S: Read + Write>(
    stream: &mut S,
    session: Session,
    terms: Terms<'_>,
    buffers: &mut Buffers,
) -> io::Result<()> {
    let (received, unsent, budget) = buffers.emptied();
    let Session { export, headers, contexts } = session;
    let access = export.access;
    // The client counts as one until all that use the device are gone.
    let (device, _client) = export.into_parts();
    let device = Arc::new(device);
    let mut connection = Connection {
        stopping: terms.stopping,
        requests: terms.requests,
        access,
        headers,
        contexts,
        received,
        replies: Replies {
            device: &device,
            headers,
            stopping: terms.stopping,
            budget: Some(budget),
            unsent,
            stream,
        },
        handed_over: HandedOver::new(terms.handover, &device, headers, terms.stopping),
        traffic: Traffic::default(),
        shown: terms.traffic,
    };
    let served = connection.serve();
    match &served {
        // The requests before one that makes no sense, or breaks off, were good, and are owed their replies.
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {}
        _ => connection.finish()?,
    }
    served
}

struct Connection<'a, S> {
    stopping: &'a AtomicBool,
    requests: &'a RequestCache,
    access: Access,
    headers: Headers,
    /// Those that the client has set, which `BLOCK_STATUS` tells.
    contexts: Contexts,
    received: &'a mut ReceiveBuffer,
    replies: Replies<'a, S>,
    handed_over: HandedOver<'a>,
    traffic: Traffic,
    /// Where `traffic` is shown.
    shown: &'a TrafficCounters,
}

impl<'a, S: Read + Write> Connection<'a, S> {
    /// Serves requests until the client disconnects or leaves.
    fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.next_request()? {
            if request.command == Command::Disc {
                break;
            }
            // It lives until its reply stands in the send buffer.
            match self.requests.hold(request) {
                Ok(request) => {
                    if let Some(rest) = self.execute(&request, Ok(()))? {
                        self.hand_over(request, rest)?;
                    }
                }
                Err(refusal) => self.execute(&request, Err(refusal)).map(drop)?,
            }
        }
        Ok(())
    }

    /// Sends all replies, those too that are still to come.
    fn finish(&mut self) -> io::Result<()> {
        loop {
            self.send()?;
            if self.handed_over.is_empty() {
                return Ok(());
            }
            self.handed_over.wait_for_one()?;
        }
    }

    /// The next request's header, its payload still to be received; `None` at the end of the stream.
    fn next_request(&mut self) -> io::Result<Option<Request>> {
        loop {
            let header_bytes = self.headers.request_bytes();
            if let Some(header) = self.received.available().get(..header_bytes) {
                let request = Request::parse(header, self.headers)
                    .ok_or_else(|| violation("a request without its magic"))?;
                self.received.consume(header_bytes);
                self.count(&request);
                return Ok(Some(request));
            }
            if !self.receive()? {
                return match self.received.available() {
                    [] => Ok(None),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
        }
    }

    fn count(&mut self, request: &Request) {
        self.traffic.requests += 1;
        match request.command {
            Command::Read => {
                self.traffic.read_bytes = self.traffic.read_bytes.saturating_add(request.len_bytes)
            }
            Command::Write => {
                self.traffic.written_bytes = self.traffic.written_bytes.saturating_add(request.len_bytes);
            }
            _ => {}
        }
    }

    /// Sends all replies that there are.
    fn send(&mut self) -> io::Result<()> {
        self.handed_over.collect(self.replies.unsent, self.replies.stream)?;
        self.replies.flush()
    }

    /// Sends all replies that there are, then waits for more bytes; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        loop {
            self.shown.show(&self.traffic);
            self.send()?;
            match self.received.fill(self.replies.stream) {
                // A request that was handed over is done.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.handed_over.is_empty() => {}
                result => return Ok(result? > 0),
            }
        }
    }

    fn check(&self, request: &Request) -> Result<(), Refusal> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(STOPPING);
        }
        if self.access == Access::Read && request.command.changes() {
            return Err(READ_ONLY);
        }
        request.check(self.replies.device.size_bytes(), self.headers)
    }

    /// Carries out a request, unless it was not `admitted`, and answers it; gives back what is left of it
    /// if that would wait for the device.
    fn execute(&mut self, request: &Request, admitted: Result<(), Refusal>) -> io::Result<Option<Rest>> {
        if request.payload_bytes > self.headers.max_received_bytes() {
            return Err(violation("a payload that is far too long"));
        }
        match admitted.and_then(|()| self.check(request)) {
            Ok(()) => self.execute_rest(request, Rest::all(request), self.handed_over.wait()),
            Err(refusal) => {
                self.discard_payload(request.payload_bytes)?;
                self.replies.fail(request, &refusal.into()).map(|()| None)
            }
        }
    }

    fn execute_rest(&mut self, request: &Request, rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        match request.command {
            Command::Write => self.write(request, rest, wait),
            Command::BlockStatus => self.block_status(request).map(|()| None),
            _ => self.replies.execute(request, rest, wait),
        }
    }

    /// Lets another thread wait for the device, and answer the rest of a request, if there is room for
    /// that.
    fn hand_over(&mut self, request: InFlight<'a>, rest: Rest) -> io::Result<()> {
        let Some(mut places) = self.handed_over.places(&request, rest) else {
            // Others' replies need not wait with this one.
            self.send()?;
            return self.execute_rest(&request, rest, Wait::Yes).map(drop);
        };
        self.handed_over.expect_payload(true);
        self.receive_payload(places.payload())?;
        self.handed_over.expect_payload(false);
        self.handed_over.start(request, rest, places);
        Ok(())
    }

    /// Receives the rest of a write's payload, and stores it as far as that need not wait.
    ///
    /// A payload that has not arrived as a whole is stored as it comes, in pieces that end on page
    /// boundaries, so that its length is not bounded by the buffer and no page is written twice.
    fn write(&mut self, request: &Request, mut rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        loop {
            let available = self.received.available();
            let ready_bytes = ready_bytes(rest.at, rest.left_bytes, available.len());
            let done_bytes = match self.replies.device.write_some(rest.at, &available[..ready_bytes], wait) {
                Ok(done_bytes) => done_bytes,
                Err(error) => {
                    self.discard_payload(rest.left_bytes)?;
                    return self.replies.fail(request, &error.into()).map(|()| None);
                }
            };
            self.received.consume(done_bytes);
            rest.advance(done_bytes as u64);
            if rest.left_bytes == 0 {
                return self.replies.succeed(request).map(|()| None);
            }
            if done_bytes < ready_bytes {
                return Ok(Some(rest));
            }
            self.receive_more()?;
        }
    }

    /// Receives a payload.
    fn receive_payload(&mut self, mut payload: &mut [u8]) -> io::Result<()> {
        loop {
            let available = self.received.available();
            let piece_bytes = payload.len().min(available.len());
            let (piece, rest) = payload.split_at_mut(piece_bytes);
            piece.copy_from_slice(&available[..piece_bytes]);
            self.received.consume(piece_bytes);
            if rest.is_empty() {
                return Ok(());
            }
            payload = rest;
            self.receive_more()?;
        }
    }

    /// Receives the rest of a payload and throws it away, to stay in step.
    fn discard_payload(&mut self, mut left_bytes: u64) -> io::Result<()> {
        loop {
            let here_bytes = usize::try_from(left_bytes).unwrap_or(usize::MAX);
            let piece_bytes = here_bytes.min(self.received.available().len());
            self.received.consume(piece_bytes);
            left_bytes -= piece_bytes as u64;
            if left_bytes == 0 {
                return Ok(());
            }
            self.receive_more()?;
        }
    }

    /// Receives more of a request that is not complete.
    fn receive_more(&mut self) -> io::Result<()> {
        if self.receive()? { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// How much of a payload to store now: all that is left if it is here, otherwise up to the last page
/// boundary that is.
fn ready_bytes(offset: u64, left_bytes: u64, available_bytes: usize) -> usize {
    match usize::try_from(left_bytes) {
        Ok(left_bytes) if available_bytes >= left_bytes => left_bytes,
        _ => {
            let beyond_boundary = ((offset + available_bytes as u64) % PAGE_SIZE as u64) as usize;
            available_bytes.saturating_sub(beyond_boundary)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_with_the_payload_or_with_a_page() {
        assert_eq!(ready_bytes(5, 100, 200), 100);
        assert_eq!(ready_bytes(0, 8192, 4095), 0);
        assert_eq!(ready_bytes(0, 8192, 8191), 4096);
        assert_eq!(ready_bytes(4000, 8192, 96), 96);
        assert_eq!(ready_bytes(4000, 8192, 95), 0);
        assert_eq!(ready_bytes(4000, 8192, 5000), 96 + 4096);
        assert_eq!(ready_bytes(0, 0, 0), 0);
    }
}
