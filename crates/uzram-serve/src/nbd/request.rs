//! The headers of requests and replies in the transmission phase, and the check of a request.
//!
//! Pure functions of bytes, like [`super::proto`].

use std::io;
use std::ops::Range;

use super::proto::{
    MAX_PAYLOAD_BYTES, NBD_EXTENDED_REPLY_MAGIC, NBD_EXTENDED_REQUEST_MAGIC, NBD_REQUEST_MAGIC,
    NBD_SIMPLE_REPLY_MAGIC, NBD_STRUCTURED_REPLY_MAGIC, NbdError, command, command_flags, violation,
};

pub const SIMPLE_REPLY_BYTES: usize = 16;

/// The headers of requests and replies, as negotiated in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests; replies with data, and errors, are chunks (`NBD_OPT_STRUCTURED_REPLY`).
    Structured,
    /// Long requests, and every reply is chunks with long headers (`NBD_OPT_EXTENDED_HEADERS`).
    Extended,
}

impl Headers {
    #[inline(always)]
    pub const fn request_bytes(self) -> usize {
        match self {
            Headers::Simple | Headers::Structured => 28,
            Headers::Extended => 32,
        }
    }

    /// Returns the bytes of a chunk's header, or of a simple reply if there are no chunks.
    #[inline(always)]
    pub const fn reply_bytes(self) -> usize {
        match self {
            Headers::Simple => SIMPLE_REPLY_BYTES,
            Headers::Structured => 20,
            Headers::Extended => 32,
        }
    }

    /// Returns the bytes before the data of a read.
    #[inline(always)]
    pub const fn data_header_bytes(self) -> usize {
        self.reply_bytes() + if self.has_chunks() { 8 } else { 0 }
    }

    #[inline(always)]
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Headers::Simple)
    }

    /// Returns the longest payload that is received, even of a refused request; a longer one ends the
    /// connection. The specification requires that beyond [`MAX_PAYLOAD_BYTES`] for extended requests; for
    /// compact ones twice as much is received and discarded.
    pub const fn max_received_bytes(self) -> u64 {
        let max = MAX_PAYLOAD_BYTES as u64;
        match self {
            Headers::Simple | Headers::Structured => 2 * max,
            Headers::Extended => max,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// The length of its range; for a `BLOCK_STATUS` with a payload, which has the length of the range, the
    /// payload's.
    pub len_bytes: u64,
    pub payload_bytes: u64,
}

/// An error for a request that does not reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub error: NbdError,
    pub message: &'static str,
}

impl Refusal {
    pub const fn invalid(message: &'static str) -> Self {
        Refusal { error: NbdError::Inval, message }
    }
}

impl Request {
    /// Parses the header at the start of `bytes`; `None` if it is incomplete. Errors: `InvalidData` when it
    /// does not begin with its magic: the rest of the stream cannot be parsed.
    pub fn parse(bytes: &[u8], headers: Headers) -> io::Result<Option<Self>> {
        let Some(bytes) = bytes.get(..headers.request_bytes()) else { return Ok(None) };
        let number = |range: Range<usize>| bytes[range].iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        let (flags, command) = (number(4..6) as u16, number(6..8) as u16);
        let (magic, has_payload) = match headers {
            Headers::Simple | Headers::Structured => (NBD_REQUEST_MAGIC, command == command::WRITE),
            // The specification requires PAYLOAD_LEN on writes. qemu does not set it (up to 10.0 at least)
            // but sends the payload; a write without one has no meaning, so assume it.
            Headers::Extended => {
                let has_payload = command == command::WRITE || flags & command_flags::PAYLOAD_LEN != 0;
                (NBD_EXTENDED_REQUEST_MAGIC, has_payload)
            }
        };
        if number(0..4) != u64::from(magic) {
            return Err(violation("a request without its magic"));
        }
        let len_bytes = number(24..bytes.len());
        let payload_bytes = if has_payload { len_bytes } else { 0 };
        let (cookie, offset) = (number(8..16), number(16..24));
        Ok(Some(Request { flags, command, cookie, offset, len_bytes, payload_bytes }))
    }

    /// Returns the end of its range. The range has been checked.
    #[inline(always)]
    pub const fn end(&self) -> u64 {
        self.offset + self.len_bytes
    }

    #[inline(always)]
    pub const fn changes(&self) -> bool {
        matches!(self.command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
    }

    #[inline(always)]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Checks the request against the protocol and an export of `size_bytes`. The range in the payload of a
    /// `BLOCK_STATUS` is not known yet, and not checked. Errors: the error to reply. The specification
    /// requires `NBD_ENOSPC` for writes past the end, and `NBD_EINVAL` for everything else past the end.
    pub fn check(&self, size_bytes: u64, headers: Headers) -> Result<(), Refusal> {
        use command::*;
        use command_flags::*;
        let payload_len = if headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
        let known = FUA
            | match self.command {
                WRITE_ZEROES => NO_HOLE | FAST_ZERO,
                READ if headers.has_chunks() => DF,
                WRITE => payload_len,
                BLOCK_STATUS => REQ_ONE | payload_len,
                _ => 0,
            };
        if self.has(!known) {
            return Err(Refusal::invalid("a command flag that this command does not have"));
        }
        let too_long = self.len_bytes > u64::from(MAX_PAYLOAD_BYTES);
        let beyond_end = match self.command {
            READ if too_long && self.has(DF) => {
                let message = "an unfragmented read has at most 32 MiB";
                return Err(Refusal { error: NbdError::Overflow, message });
            }
            READ if too_long => return Err(Refusal::invalid("a read has at most 32 MiB")),
            WRITE if too_long => return Err(Refusal::invalid("a write has at most 32 MiB")),
            FLUSH if self.offset != 0 || self.len_bytes != 0 => {
                return Err(Refusal::invalid("a flush has no offset and no length"));
            }
            // Its range is in the payload.
            BLOCK_STATUS if self.has(PAYLOAD_LEN) => return Ok(()),
            WRITE | WRITE_ZEROES => NbdError::NoSpc,
            READ | TRIM | CACHE | BLOCK_STATUS => NbdError::Inval,
            // The others have none.
            _ => return Ok(()),
        };
        let within = self.offset.checked_add(self.len_bytes).is_some_and(|end| end <= size_bytes);
        if within {
            Ok(())
        } else {
            Err(Refusal { error: beyond_end, message: "beyond the end of the device" })
        }
    }
}

/// Returns a simple reply's header; `error` 0 is success.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut out = [0; SIMPLE_REPLY_BYTES];
    out[..4].copy_from_slice(&NBD_SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// Fills `out`, which has [`Headers::reply_bytes`], with the header of a chunk of the reply to `request`,
/// before `payload_bytes` of payload.
pub fn put_chunk_header(
    out: &mut [u8],
    headers: Headers,
    (flags, kind): (u16, u16),
    request: &Request,
    payload_bytes: usize,
) {
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&request.cookie.to_be_bytes());
    if headers == Headers::Extended {
        out[..4].copy_from_slice(&NBD_EXTENDED_REPLY_MAGIC.to_be_bytes());
        out[16..24].copy_from_slice(&request.offset.to_be_bytes());
        out[24..].copy_from_slice(&(payload_bytes as u64).to_be_bytes());
    } else {
        out[..4].copy_from_slice(&NBD_STRUCTURED_REPLY_MAGIC.to_be_bytes());
        // It fits: the longest payload is `MAX_PAYLOAD_BYTES` of data and its offset.
        out[16..].copy_from_slice(&(payload_bytes as u32).to_be_bytes());
    }
}
