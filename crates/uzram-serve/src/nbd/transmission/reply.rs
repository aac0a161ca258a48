//! Replies without data: success, and errors with their words.

use std::io::{self, Write};

use super::execute::Replies;
use crate::nbd::proto::{NbdError, chunk};
use crate::nbd::reply::{put_chunk_header, simple_reply};
use crate::nbd::request::{Headers, Refusal, Request};

/// The longest error message sent; the specification allows 4096 bytes.
const MAX_MESSAGE_BYTES: usize = 512;

/// Why a request failed.
pub(super) enum Failure {
    /// It was not valid.
    Refused(Refusal),
    /// The device could not do it.
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

    /// Writes the message into `out` and returns its length; cuts it where `out` ends.
    fn message(&self, out: &mut [u8; MAX_MESSAGE_BYTES]) -> usize {
        let mut rest = &mut out[..];
        // The only failure is a full buffer, which is the cut.
        let _ = match self {
            Failure::Refused(refusal) => write!(rest, "{}", refusal.message),
            Failure::Device(error) => write!(rest, "{error}"),
        };
        let len_bytes = MAX_MESSAGE_BYTES - rest.len();
        // A cut may fall within a character.
        std::str::from_utf8(&out[..len_bytes]).map_or_else(|error| error.valid_up_to(), str::len)
    }
}

impl<W: Write> Replies<'_, W> {
    /// Answers a request that is done and has no data to give. With structured replies a simple one
    /// is allowed here, and the shortest.
    pub(super) fn succeed(&mut self, request: &Request) -> io::Result<()> {
        match self.headers {
            Headers::Simple | Headers::Structured => {
                self.unsent.put(self.stream, &simple_reply(0, request.cookie))
            }
            Headers::Extended => self.end(request),
        }
    }

    /// Ends a reply made of chunks, with one that says nothing else.
    pub(super) fn end(&mut self, request: &Request) -> io::Result<()> {
        self.chunk(request, chunk::FLAG_DONE, chunk::NONE, 0).map(drop)
    }

    /// Answers with an error: its text too, when replies are chunks. Ends the reply.
    pub(super) fn fail(&mut self, request: &Request, failure: &Failure) -> io::Result<()> {
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

    /// Makes a chunk of a reply to `request` and returns its payload, to be filled in.
    pub(super) fn chunk(
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
