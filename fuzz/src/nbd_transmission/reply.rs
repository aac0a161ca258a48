//! Parses replies as a client does, and checks their form.

use uzram_serve::nbd::proto::{self, chunk, command, command_flags};

use super::script::Headers;
use crate::wire::{Header, Heard};

/// One whole reply.
#[derive(Default)]
pub(super) struct Reply {
    /// 0 for success.
    pub error: u32,
    /// The data of a read, zeros for holes.
    pub data: Vec<u8>,
    /// Offset and length of each hole.
    pub holes: Vec<(u64, u64)>,
    /// For each metadata context its number, and length and status of each descriptor.
    pub statuses: Vec<(u32, Vec<(u64, u64)>)>,
}

impl Reply {
    pub fn take(heard: &mut Heard<'_>, headers: Headers, request: &Header) -> Reply {
        let mut reply = Reply::default();
        let simple = proto::NBD_SIMPLE_REPLY_MAGIC.to_be_bytes();
        if headers != Headers::Extended && heard.0.starts_with(&simple) {
            let carries_data = request.command == command::READ;
            assert!(headers == Headers::Simple || !carries_data, "{request:?}: a simple reply");
            heard.u32();
            reply.error = heard.u32();
            assert_eq!(heard.u64(), request.cookie, "{request:?}");
            if carries_data && reply.error == 0 {
                reply.data.extend_from_slice(heard.take(request.len_bytes as usize));
            }
            return reply;
        }
        let mut contents = 0;
        while !reply.take_chunk(heard, headers, request, &mut contents) {}
        let whole = request.flags & command_flags::DF != 0;
        assert!(contents <= 1 || !whole, "{request:?} in fragments");
        if reply.error == 0 && request.command == command::READ {
            assert_eq!(reply.data.len() as u64, request.len_bytes, "{request:?}");
        }
        reply
    }

    /// Takes one chunk; returns whether it is the last. This server sends contents in order and without gaps.
    fn take_chunk(
        &mut self,
        heard: &mut Heard<'_>,
        headers: Headers,
        request: &Header,
        contents: &mut u32,
    ) -> bool {
        let extended = headers == Headers::Extended;
        let magic =
            if extended { proto::NBD_EXTENDED_REPLY_MAGIC } else { proto::NBD_STRUCTURED_REPLY_MAGIC };
        assert!(headers.has_chunks());
        assert_eq!(heard.u32(), magic, "{request:?}");
        let (flags, kind) = (heard.u16(), heard.u16());
        assert_eq!(heard.u64(), request.cookie, "{request:?}");
        assert!(!extended || heard.u64() == request.offset, "{request:?}");
        let len_bytes = if extended { heard.u64() } else { u64::from(heard.u32()) };
        let mut payload = Heard(heard.take(len_bytes as usize));
        let next = request.offset + self.data.len() as u64;
        let is_last = flags == chunk::FLAG_DONE;
        assert!(is_last || flags == 0, "{request:?}: {flags}");
        match (kind, request.command) {
            (chunk::NONE, _) => {
                assert!(is_last && (extended || request.len_bytes == 0), "{request:?}: nothing");
            }
            (chunk::OFFSET_DATA, command::READ) => {
                assert_eq!(payload.u64(), next, "{request:?}");
                assert!(!payload.0.is_empty(), "a data chunk holds data");
                self.data.extend_from_slice(payload.take(payload.0.len()));
                *contents += 1;
            }
            (chunk::OFFSET_HOLE, command::READ) => {
                assert_eq!(payload.u64(), next, "{request:?}");
                let hole_bytes = payload.u32();
                assert_ne!(hole_bytes, 0, "a hole has a length");
                assert!(next + u64::from(hole_bytes) <= request.offset + request.len_bytes, "{request:?}");
                assert!(
                    self.holes.last().is_none_or(|(at, len)| at + len < next),
                    "{request:?}: one hole in two"
                );
                self.holes.push((next, hole_bytes.into()));
                self.data.resize(self.data.len() + hole_bytes as usize, 0);
                *contents += 1;
            }
            (chunk::BLOCK_STATUS, command::BLOCK_STATUS) if !extended => {
                let id = payload.u32();
                let mut descriptors = Vec::new();
                while !payload.0.is_empty() {
                    descriptors.push((payload.u32().into(), payload.u32().into()));
                }
                self.statuses.push((id, descriptors));
            }
            (chunk::BLOCK_STATUS_EXT, command::BLOCK_STATUS) if extended => {
                let (id, count) = (payload.u32(), payload.u32());
                self.statuses.push((id, (0..count).map(|_| (payload.u64(), payload.u64())).collect()));
            }
            (chunk::ERROR, _) => {
                self.error = payload.u32();
                let message_bytes = payload.u16();
                let message = str::from_utf8(payload.take(message_bytes.into()));
                assert!(message.is_ok_and(|message| !message.is_empty()), "{request:?}: {message:?}");
                assert!(is_last && self.error != 0, "{request:?}");
            }
            _ => panic!("{request:?} answered with a chunk of type {kind}"),
        }
        assert!(payload.0.is_empty(), "{request:?}: chunk type {kind} is {len_bytes} bytes long");
        is_last
    }
}
