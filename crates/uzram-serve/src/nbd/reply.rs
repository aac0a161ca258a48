//! Encoders of replies. Pure functions, like [`super::proto`].

use super::proto::{
    NBD_EXTENDED_REPLY_MAGIC, NBD_REP_MAGIC, NBD_SIMPLE_REPLY_MAGIC, NBD_STRUCTURED_REPLY_MAGIC,
};
use super::request::{Headers, Request};

/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;

impl Headers {
    /// Bytes of a chunk's header, or of a simple reply if there are no chunks.
    pub const fn reply_bytes(self) -> usize {
        match self {
            Headers::Simple => SIMPLE_REPLY_BYTES,
            Headers::Structured => 20,
            Headers::Extended => 32,
        }
    }

    /// Bytes before the data of a read.
    pub const fn data_header_bytes(self) -> usize {
        self.reply_bytes() + if self.has_chunks() { 8 } else { 0 }
    }
}

/// Returns the header of an option reply with `len_bytes` of data.
pub fn option_reply(option: u32, reply: u32, len_bytes: u32) -> [u8; 20] {
    let mut out = [0; 20];
    out[..8].copy_from_slice(&NBD_REP_MAGIC.to_be_bytes());
    out[8..12].copy_from_slice(&option.to_be_bytes());
    out[12..16].copy_from_slice(&reply.to_be_bytes());
    out[16..].copy_from_slice(&len_bytes.to_be_bytes());
    out
}

/// Returns a simple reply's header; `error` 0 is success.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut out = [0; SIMPLE_REPLY_BYTES];
    out[..4].copy_from_slice(&NBD_SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// Fills `out`, which has [`Headers::reply_bytes`], with the header of a chunk of the reply to
/// `request`, before `payload_bytes` of payload.
pub fn put_chunk_header(
    out: &mut [u8],
    headers: Headers,
    flags: u16,
    kind: u16,
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

#[cfg(test)]
mod tests {
    use super::super::proto::chunk;
    use super::super::request::Command;
    use super::*;

    #[test]
    fn a_chunks_header_has_two_forms() {
        let request = Request {
            flags: 0,
            command: Command::Read,
            cookie: 7,
            offset: 0x1122,
            len_bytes: 0,
            payload_bytes: 0,
        };
        let mut out = [0xff; 32];
        let header = &mut out[..20];
        put_chunk_header(header, Headers::Structured, chunk::FLAG_DONE, chunk::OFFSET_DATA, &request, 4104);
        assert_eq!(header[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!((&header[8..16], &header[16..]), (&7u64.to_be_bytes()[..], &4104u32.to_be_bytes()[..]));
        put_chunk_header(&mut out, Headers::Extended, 0, chunk::OFFSET_HOLE, &request, 12);
        assert_eq!(out[..8], [0x6e, 0x8a, 0x27, 0x8c, 0, 0, 0, 2]);
        let numbers = [7u64, 0x1122, 12].map(u64::to_be_bytes).concat();
        assert_eq!(out[8..], numbers);
    }
}
