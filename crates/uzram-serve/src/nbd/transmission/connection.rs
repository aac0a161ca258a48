//! A connection: receives requests, checks them and executes each by its command.
//!
//! All complete requests of one receive are executed in order and answered with one send. A write's payload is
//! stored as it arrives.

use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use uzram::device::Wait;
use uzram::units::PAGE_SIZE;

use super::STOPPING;
use super::offload::{Blocked, Offloaded};
use super::replies::{Replies, Rest};
use crate::Access;
use crate::nbd::buffer::ReceiveBuffer;
use crate::nbd::clients::{Traffic, TrafficCounters};
use crate::nbd::meta_context::Contexts;
use crate::nbd::proto::NbdError;
use crate::nbd::request::{Command, Refusal, Request};
use crate::nbd::violation;

/// The reply to a command that would change a read-only export.
const READ_ONLY: Refusal = Refusal { error: NbdError::Perm, message: "the export is read-only" };
/// The reply to a command that this server does not know.
const UNKNOWN: Refusal = Refusal::invalid("an unknown command");

/// One client, from its first request to its last reply.
pub(super) struct Connection<'a, S> {
    pub access: Access,
    /// The metadata contexts that the client has set; `BLOCK_STATUS` reports them.
    pub contexts: Contexts,
    pub received: &'a mut ReceiveBuffer,
    pub replies: Replies<'a, S>,
    pub offloaded: Offloaded<'a>,
    pub traffic: Traffic,
    /// Where other threads read `traffic`.
    pub published: &'a TrafficCounters,
}

impl<S: Read + Write> Connection<'_, S> {
    /// Serves requests until the client disconnects or closes its stream.
    pub fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.next_request()? {
            if self.execute(&request)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Sends all replies, including those of requests that are still offloaded.
    pub fn finish(&mut self) -> io::Result<()> {
        loop {
            self.send()?;
            if self.offloaded.is_empty() {
                return Ok(());
            }
            self.offloaded.wait_for_one()?;
        }
    }

    /// Receives the header of the next request, but not its payload; `None` at the end of the stream.
    fn next_request(&mut self) -> io::Result<Option<Request>> {
        let headers = self.replies.headers;
        loop {
            if let Some(header) = self.received.available().get(..headers.request_bytes()) {
                let request = Request::parse(header, headers)
                    .ok_or_else(|| violation("a request without its magic"))?;
                self.received.consume(headers.request_bytes());
                self.traffic.count(&request);
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

    /// Executes a request and puts its reply into the send buffer, or offloads it. Breaks when the client
    /// disconnects.
    fn execute(&mut self, request: &Request) -> io::Result<ControlFlow<()>> {
        if let Err(refusal) = self.check(request) {
            self.refuse(request, refusal)?;
            return Ok(ControlFlow::Continue(()));
        }
        let (mut rest, mut wait) = (Rest::all(request), self.offloaded.wait());
        loop {
            let blocked = match request.command {
                Command::Read => self.replies.read(request, rest, wait)?.map(Blocked::Read),
                Command::Write => self.write(request, rest, wait)?.map(Blocked::Write),
                Command::WriteZeroes => {
                    self.replies.write_zeroes(request, rest, wait)?.map(Blocked::WriteZeroes)
                }
                Command::Trim => self.replies.trim(request).map(|()| None)?,
                // `CACHE`: a page that is not in memory comes back when it is read. `FLUSH`: a write is visible to
                // every connection before its reply, so nothing is left to do.
                Command::Cache | Command::Flush => self.replies.succeed(request).map(|()| None)?,
                Command::BlockStatus => self.block_status(request).map(|()| None)?,
                Command::Unknown => self.refuse(request, UNKNOWN).map(|()| None)?,
                Command::Disc => return Ok(ControlFlow::Break(())),
            };
            let Some(blocked) = blocked else { break };
            if let Some(mut buffers) = self.offloaded.buffers(blocked) {
                self.receive_payload(buffers.payload())?;
                self.offloaded.start(request, blocked, buffers);
                break;
            }
            // This thread waits for the device itself; send the replies to other requests first.
            self.send()?;
            (rest, wait) = (blocked.rest(), Wait::Yes);
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Checks a request against the protocol, the export and the server's state.
    fn check(&self, request: &Request) -> Result<(), Refusal> {
        // `DISC` has no reply.
        if request.command == Command::Disc {
            return Ok(());
        }
        if self.replies.stopping.load(Ordering::Relaxed) {
            return Err(STOPPING);
        }
        if self.access == Access::Read && request.command.changes() {
            return Err(READ_ONLY);
        }
        request.check(self.replies.device.size_bytes(), self.replies.headers)
    }

    /// Replies to a request with an error instead of executing it.
    fn refuse(&mut self, request: &Request, refusal: Refusal) -> io::Result<()> {
        self.discard_payload(request.payload_bytes)?;
        self.replies.fail(request, refusal)
    }

    /// Receives the rest of a write's payload and stores it, as far as that need not wait; returns what is left.
    ///
    /// A payload that has not arrived completely is stored in pieces that end on page boundaries. So its length is
    /// not bounded by the buffer, and no page is written twice.
    fn write(&mut self, request: &Request, mut rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        loop {
            let available = self.received.available();
            let ready_bytes = ready_bytes(rest, available.len());
            let written = self.replies.device.write_some(rest.at, &available[..ready_bytes], wait);
            let done_bytes = match written {
                Ok(done_bytes) => done_bytes,
                Err(error) => {
                    self.discard_payload(rest.left_bytes)?;
                    return self.replies.fail(request, error).map(|()| None);
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

    /// Receives the rest of an offloaded write's payload into `payload`. The client must not be slow, as memory is held
    /// for it.
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

    /// Receives the rest of a payload and discards it, to stay in step with the client.
    ///
    /// # Errors
    /// `InvalidData` when the payload is far too long; the stream's.
    pub fn discard_payload(&mut self, mut left_bytes: u64) -> io::Result<()> {
        if left_bytes > self.replies.headers.max_received_bytes() {
            return Err(violation("a payload that is far too long"));
        }
        loop {
            let available_bytes = self.received.available().len() as u64;
            let piece_bytes = left_bytes.min(available_bytes);
            self.received.consume(piece_bytes as usize);
            left_bytes -= piece_bytes;
            if left_bytes == 0 {
                return Ok(());
            }
            self.receive_more()?;
        }
    }

    /// Receives more of a request that is incomplete.
    pub fn receive_more(&mut self) -> io::Result<()> {
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
    fn send(&mut self) -> io::Result<()> {
        self.offloaded.collect(self.replies.unsent, self.replies.stream)?;
        self.replies.flush()
    }
}

/// Returns how many bytes of a payload can be stored now: the whole rest if it has arrived, otherwise up to the last
/// page boundary that has arrived.
fn ready_bytes(rest: Rest, available_bytes: usize) -> usize {
    match usize::try_from(rest.left_bytes) {
        Ok(left_bytes) if available_bytes >= left_bytes => left_bytes,
        _ => {
            let beyond_boundary = ((rest.at + available_bytes as u64) % PAGE_SIZE as u64) as usize;
            available_bytes.saturating_sub(beyond_boundary)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_with_the_payload_or_with_a_page() {
        let ready_bytes = |at, left_bytes, available| ready_bytes(Rest { at, left_bytes }, available);
        assert_eq!(ready_bytes(5, 100, 200), 100);
        assert_eq!(ready_bytes(0, 8192, 4095), 0);
        assert_eq!(ready_bytes(0, 8192, 8191), 4096);
        assert_eq!(ready_bytes(4000, 8192, 96), 96);
        assert_eq!(ready_bytes(4000, 8192, 95), 0);
        assert_eq!(ready_bytes(4000, 8192, 5000), 96 + 4096);
        assert_eq!(ready_bytes(0, 0, 0), 0);
    }
}
