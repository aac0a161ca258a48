//! The transmission phase: requests in, replies out, until the client leaves.
//!
//! All complete requests of one receive are carried out, in order, and answered with one send.
//! A request lives in the server's slab cache while it is carried out. Nothing else is allocated for
//! it, with one exception: a read that is longer than the send buffer and must be answered in one
//! piece (see `Connection::read_whole`).
//!
//! Invariant: a connection never waits for the client while it holds unsent replies.
//!
//! Here requests are received, sorted out and those that change the disk carried out; `read`
//! answers reads, `status` tells what is allocated, `reply` has the replies without data.

mod read;
mod reply;
mod status;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::base::units::PAGE_SIZE;
use uzram::device::OpenDevice;

use super::buffer::{Buffers, ReceiveBuffer, SendBuffer};
use super::handshake::Session;
use super::meta_context::Contexts;
use super::proto::{NbdError, command_flags};
use super::request::{Command, Headers, Refusal, Request};
use super::session::Terms;
use super::{RequestCache, violation};
use reply::Failure;

/// How much of a zeroing or a trim is done before the next look whether the server is stopping, in
/// bytes of the disk: 16,384 pages, which take some milliseconds.
const SLICE_BYTES: u64 = 64 << 20;
/// What a request is told once the server is stopping.
const STOPPING: Refusal = Refusal { error: NbdError::Shutdown, message: "the server is stopping" };

/// Serves requests until the client disconnects. Once `terms.stopping` is set, requests that have arrived
/// are answered with `NBD_ESHUTDOWN`.
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
    let (received, unsent) = buffers.emptied();
    let mut connection = Connection {
        stream,
        stopping: terms.stopping,
        requests: terms.requests,
        size_bytes: session.device.size_bytes(),
        device: session.device,
        headers: session.headers,
        contexts: session.contexts,
        received,
        unsent,
    };
    match connection.serve() {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            // The requests before the one that makes no sense were good, and are owed their replies.
            connection.unsent.flush(connection.stream)?;
            Err(error)
        }
        result => result,
    }
}

struct Connection<'a, S> {
    stream: &'a mut S,
    stopping: &'a AtomicBool,
    requests: &'a RequestCache,
    device: OpenDevice,
    size_bytes: u64,
    headers: Headers,
    /// Those that the client has set, which `BLOCK_STATUS` tells.
    contexts: Contexts,
    received: &'a mut ReceiveBuffer,
    unsent: &'a mut SendBuffer,
}

impl<S: Read + Write> Connection<'_, S> {
    fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.next_request()? {
            if request.command == Command::Disc {
                return self.unsent.flush(self.stream);
            }
            // It lives until its reply stands in the send buffer.
            match self.requests.hold(request) {
                Ok(request) => self.execute(&request, Ok(()))?,
                Err(refusal) => self.execute(&request, Err(refusal))?,
            }
        }
        Ok(())
    }

    /// The next request's header, its payload still to be received; `None` at the end of the stream.
    fn next_request(&mut self) -> io::Result<Option<Request>> {
        loop {
            let header_bytes = self.headers.request_bytes();
            if let Some(header) = self.received.available().get(..header_bytes) {
                let request = Request::parse(header, self.headers)
                    .ok_or_else(|| violation("a request without its magic"))?;
                self.received.consume(header_bytes);
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

    /// Sends what is unsent, then waits for more bytes; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        self.unsent.flush(self.stream)?;
        Ok(self.received.fill(self.stream)? > 0)
    }

    fn check(&self, request: &Request) -> Result<(), Refusal> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(STOPPING);
        }
        request.check(self.size_bytes, self.headers)
    }

    /// Carries out a request, unless it was not `admitted`, and answers it.
    fn execute(&mut self, request: &Request, admitted: Result<(), Refusal>) -> io::Result<()> {
        if request.payload_bytes > self.headers.max_received_bytes() {
            return Err(violation("a payload that is far too long"));
        }
        let checked = admitted.and_then(|()| self.check(request)).map_err(Failure::from);
        let result = match (request.command, checked) {
            (Command::Write, Ok(())) => self.write(request)?,
            (_, Err(failure)) => {
                self.discard_payload(request.payload_bytes)?;
                Err(failure)
            }
            (Command::Read, Ok(())) => return self.read(request),
            (Command::BlockStatus, Ok(())) => return self.block_status(request),
            (Command::Trim, Ok(())) => self.in_slices(request, OpenDevice::discard),
            // `FAST_ZERO` asks to fail at once where zeroes are no faster than a write: here they
            // always are, because a page of zeroes is a change of its slot, and nothing is compressed
            // or stored.
            (Command::WriteZeroes, Ok(())) if request.has(command_flags::NO_HOLE) => {
                self.in_slices(request, OpenDevice::write_zeroes_allocated)
            }
            (Command::WriteZeroes, Ok(())) => self.in_slices(request, OpenDevice::write_zeroes),
            // All contents are in memory: there is nothing to bring nearer.
            (Command::Cache, Ok(())) => Ok(()),
            // A write is visible to every connection before it is answered, so a flush has nothing
            // left to do. `run` ends on `Disc`, and `check` refuses what is unknown.
            (Command::Flush | Command::Disc | Command::Unknown, Ok(())) => Ok(()),
        };
        match result {
            Ok(()) => self.succeed(request),
            Err(failure) => self.fail(request, &failure),
        }
    }

    /// Carries out a request without data, which may be as long as the disk, so that a server that
    /// stops does not wait for its end.
    fn in_slices(
        &self,
        request: &Request,
        act: impl Fn(&OpenDevice, u64, u64) -> uzram::Result<()>,
    ) -> Result<(), Failure> {
        let (mut at, mut left_bytes) = (request.offset, request.len_bytes);
        loop {
            // To a page's boundary, so that no page is cut in two.
            let slice_bytes = left_bytes.min(SLICE_BYTES - at % PAGE_SIZE as u64);
            act(&self.device, at, slice_bytes)?;
            at += slice_bytes;
            left_bytes -= slice_bytes;
            if left_bytes == 0 {
                return Ok(());
            }
            if self.stopping.load(Ordering::Relaxed) {
                return Err(STOPPING.into());
            }
        }
    }

    /// Receives a write's payload and stores it.
    ///
    /// A payload that has not arrived as a whole is stored as it comes, in pieces that end on page
    /// boundaries, so that its length is not bounded by the buffer and no page is written twice.
    fn write(&mut self, request: &Request) -> io::Result<Result<(), Failure>> {
        let (mut offset, mut left_bytes) = (request.offset, request.payload_bytes);
        loop {
            let available = self.received.available();
            let piece_bytes = ready_bytes(offset, left_bytes, available.len());
            if piece_bytes > 0
                && let Err(error) = self.device.write(offset, &available[..piece_bytes])
            {
                self.discard_payload(left_bytes)?;
                return Ok(Err(error.into()));
            }
            self.received.consume(piece_bytes);
            offset += piece_bytes as u64;
            left_bytes -= piece_bytes as u64;
            if left_bytes == 0 {
                return Ok(Ok(()));
            }
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
