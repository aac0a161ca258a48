//! Replies: executes requests that need nothing more from the client, and writes the replies.
//!
//! The connection's thread replies through its send buffer and stream; an offloaded task, which may wait for the
//! device, through its own buffer. Both call the same functions.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::device::{OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::STOPPING;
use crate::budget::Budget;
use crate::nbd::buffer::SendBuffer;
use crate::nbd::proto::{NbdError, chunk, command_flags};
use crate::nbd::reply::{put_chunk_header, simple_reply};
use crate::nbd::request::{Headers, Refusal, Request};

/// The longest error message sent; the specification allows 4096 bytes.
const MAX_MESSAGE_BYTES: usize = 512;
/// The bytes of a zeroing or a trim between two checks whether the server is stopping: 16,384 pages, which take some
/// milliseconds.
const SLICE_BYTES: u64 = 64 << 20;

/// The part of a request that is still to be executed.
#[derive(Clone, Copy)]
pub(super) struct Rest {
    /// Its start, in bytes from the start of the export.
    pub at: u64,
    pub left_bytes: u64,
}

impl Rest {
    /// Returns the whole range of a request.
    pub fn all(request: &Request) -> Self {
        Rest { at: request.offset, left_bytes: request.len_bytes }
    }

    pub fn advance(&mut self, done_bytes: u64) {
        self.at += done_bytes;
        self.left_bytes -= done_bytes;
    }
}

/// The device, and the buffer and stream for replies. Replies go into `unsent`, and from there to `stream` when it is
/// full.
///
/// A function that takes a [`Wait`] returns the rest of the request if it would have to wait but may not; it has
/// executed and answered the part before that.
pub(super) struct Replies<'a, W> {
    pub device: &'a OpenDevice,
    pub headers: Headers,
    pub stopping: &'a AtomicBool,
    /// Memory for long replies; `None` if `unsent` has room for the whole reply.
    pub budget: Option<&'a Arc<Budget>>,
    pub unsent: &'a mut SendBuffer,
    pub stream: &'a mut W,
}

/// Why a request failed.
pub(super) enum Failure {
    /// The server refused it.
    Refused(Refusal),
    /// The device failed.
    Device(uzram::Error),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::Refused(refusal)
    }
}

impl From<uzram::Error> for Failure {
    fn from(error: uzram::Error) -> Self {
        Failure::Device(error)
    }
}

impl Failure {
    fn error(&self) -> NbdError {
        match self {
            Failure::Refused(refusal) => refusal.error,
            Failure::Device(error) => NbdError::from(error.kind()),
        }
    }

    /// Writes the message into `out`, truncated to its size, and returns its length.
    fn message(&self, out: &mut [u8; MAX_MESSAGE_BYTES]) -> usize {
        let mut rest = &mut out[..];
        // The only failure is a full buffer, which truncates the message.
        let _ = match self {
            Failure::Refused(refusal) => write!(rest, "{}", refusal.message),
            Failure::Device(error) => write!(rest, "{error}"),
        };
        let len_bytes = MAX_MESSAGE_BYTES - rest.len();
        // Do not end within a character.
        std::str::from_utf8(&out[..len_bytes]).map_or_else(|error| error.valid_up_to(), str::len)
    }
}

impl<W: Write> Replies<'_, W> {
    /// Zeroes the rest of a request's range, and replies.
    ///
    /// `FAST_ZERO` asks to fail at once if zeroing is not faster than a write. Here it always is: zeroing a page only
    /// changes its slot.
    pub fn write_zeroes(&mut self, request: &Request, rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        let allocate = request.has(command_flags::NO_HOLE);
        self.in_slices(request, rest, |device, at, len_bytes| device.zero_some(at, len_bytes, allocate, wait))
    }

    /// Discards a request's range, and replies. Never waits for the device.
    pub fn trim(&mut self, request: &Request) -> io::Result<()> {
        let discard = |device: &OpenDevice, at, len_bytes| device.discard(at, len_bytes).map(|()| len_bytes);
        self.in_slices(request, Rest::all(request), discard).map(drop)
    }

    /// Executes a request without data, which may be as long as the disk, in slices, so that a stopping server does not
    /// wait for its end. `act` returns the number of bytes done.
    fn in_slices(
        &mut self,
        request: &Request,
        mut rest: Rest,
        act: impl Fn(&OpenDevice, u64, u64) -> uzram::Result<u64>,
    ) -> io::Result<Option<Rest>> {
        loop {
            // Slices end on page boundaries, so that no page is split.
            let slice_bytes = rest.left_bytes.min(SLICE_BYTES - rest.at % PAGE_SIZE as u64);
            let done_bytes = match act(self.device, rest.at, slice_bytes) {
                Ok(done_bytes) => done_bytes,
                Err(error) => return self.fail(request, error).map(|()| None),
            };
            rest.advance(done_bytes);
            if rest.left_bytes == 0 {
                return self.succeed(request).map(|()| None);
            }
            if done_bytes < slice_bytes {
                return Ok(Some(rest));
            }
            if self.stopping.load(Ordering::Relaxed) {
                return self.fail(request, STOPPING).map(|()| None);
            }
        }
    }

    /// Replies with the device's result.
    pub fn finish(&mut self, request: &Request, done: uzram::Result<()>) -> io::Result<()> {
        match done {
            Ok(()) => self.succeed(request),
            Err(error) => self.fail(request, error),
        }
    }

    /// Replies to a successful request without data. Structured replies allow a simple reply here, which is the
    /// shortest.
    pub fn succeed(&mut self, request: &Request) -> io::Result<()> {
        match self.headers {
            Headers::Simple | Headers::Structured => {
                self.unsent.put(self.stream, &simple_reply(0, request.cookie))
            }
            Headers::Extended => self.end(request),
        }
    }

    /// Ends a reply made of chunks with one that has no payload.
    pub fn end(&mut self, request: &Request) -> io::Result<()> {
        self.chunk(request, chunk::FLAG_DONE, chunk::NONE, 0).map(drop)
    }

    /// Replies with an error, including its text if replies are chunks. Ends the reply.
    pub fn fail(&mut self, request: &Request, failure: impl Into<Failure>) -> io::Result<()> {
        let failure = failure.into();
        let error = failure.error() as u32;
        if !self.headers.has_chunks() {
            return self.unsent.put(self.stream, &simple_reply(error, request.cookie));
        }
        let mut message = [0; MAX_MESSAGE_BYTES];
        let message_bytes = failure.message(&mut message);
        let payload = self.chunk(request, chunk::FLAG_DONE, chunk::ERROR, 4 + 2 + message_bytes)?;
        payload[..4].copy_from_slice(&error.to_be_bytes());
        payload[4..6].copy_from_slice(&(message_bytes as u16).to_be_bytes());
        payload[6..].copy_from_slice(&message[..message_bytes]);
        Ok(())
    }

    /// Adds a chunk to the reply and returns its payload, to be filled in.
    pub fn chunk(
        &mut self,
        request: &Request,
        flags: u16,
        kind: u16,
        payload_bytes: usize,
    ) -> io::Result<&mut [u8]> {
        let header_bytes = self.headers.reply_bytes();
        let room = self.unsent.room(self.stream, header_bytes + payload_bytes)?;
        let (header, payload) = room.split_at_mut(header_bytes);
        put_chunk_header(header, self.headers, flags, kind, request, payload_bytes);
        Ok(payload)
    }

    /// Sends all unsent replies.
    pub fn flush(&mut self) -> io::Result<()> {
        self.unsent.flush(self.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_cut_between_characters() {
        let mut out = [0; MAX_MESSAGE_BYTES];
        let long = Failure::from(uzram::Error::invalid("é".repeat(1000)));
        assert_eq!(long.message(&mut out), MAX_MESSAGE_BYTES);
        let odd = Failure::from(uzram::Error::invalid(format!("x{}", "é".repeat(1000))));
        assert_eq!(odd.message(&mut out), MAX_MESSAGE_BYTES - 1);
        let full = uzram::Error::new(uzram::ErrorKind::NoSpace, "full").with_setting("mem_limit");
        let len_bytes = Failure::from(full).message(&mut out);
        assert_eq!(&out[..len_bytes], b"full (setting: mem_limit)");
    }
}
