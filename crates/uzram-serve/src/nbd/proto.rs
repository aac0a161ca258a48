//! The NBD wire format: constants under the specification's names, and parsers of options.
//! `request` parses requests, `reply` encodes replies.
//!
//! Pure functions of bytes: nothing here does I/O, allocates, or can panic on any input. All
//! integers on the wire are big-endian. Extended headers are those of the specification's branch
//! `extension-ext-header`, as qemu and libnbd have them.

use uzram::ErrorKind;

/// The server's first eight bytes, "NBDMAGIC".
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": follows [`NBDMAGIC`], and opens every option of the client.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Opens every option reply.
pub const NBD_REP_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens every request.
pub const NBD_REQUEST_MAGIC: u32 = 0x2560_9513;
/// Opens a simple reply.
pub const NBD_SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Opens a chunk of a structured reply.
pub const NBD_STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Opens every request once extended headers are negotiated.
pub const NBD_EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Opens every chunk of a reply once extended headers are negotiated.
pub const NBD_EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags of the server; the client's flags have the same bits.
pub mod handshake_flags {
    /// `NBD_FLAG_FIXED_NEWSTYLE`
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// `NBD_FLAG_NO_ZEROES`: no 124 zeros after the answer to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags: what an export can do.
pub mod transmission_flags {
    /// `NBD_FLAG_HAS_FLAGS`
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// `NBD_FLAG_READ_ONLY`
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_FLAG_SEND_FLUSH`
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_FLAG_SEND_FUA`
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_FLAG_SEND_TRIM`
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_FLAG_SEND_WRITE_ZEROES`
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_FLAG_SEND_DF`: only when replies are chunks.
    pub const SEND_DF: u16 = 1 << 7;
    /// `NBD_FLAG_CAN_MULTI_CONN`
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_FLAG_SEND_CACHE`
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_FLAG_SEND_FAST_ZERO`
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `NBD_FLAG_BLOCK_STATUS_PAYLOAD`: only with extended headers and metadata contexts.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Options a client may send during the handshake.
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`
    pub const LIST: u32 = 3;
    /// `NBD_OPT_STARTTLS`
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub mod reply {
    /// `NBD_REP_ACK`
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`
    pub const META_CONTEXT: u32 = 4;
    /// `NBD_REP_ERR_UNSUP`: an option this server does not have.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// `NBD_REP_ERR_POLICY`: not allowed here.
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// `NBD_REP_ERR_INVALID`: an option with invalid data.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// `NBD_REP_ERR_TLS_REQD`: TLS has to be started first.
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// `NBD_REP_ERR_UNKNOWN`: the export is not available.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: there is no way back from extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
}

/// Kinds of information about an export.
pub mod info {
    /// `NBD_INFO_EXPORT`: size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands, as they are numbered on the wire.
pub mod command {
    /// `NBD_CMD_READ`
    pub const READ: u16 = 0;
    /// `NBD_CMD_WRITE`
    pub const WRITE: u16 = 1;
    /// `NBD_CMD_DISC`
    pub const DISC: u16 = 2;
    /// `NBD_CMD_FLUSH`
    pub const FLUSH: u16 = 3;
    /// `NBD_CMD_TRIM`
    pub const TRIM: u16 = 4;
    /// `NBD_CMD_CACHE`
    pub const CACHE: u16 = 5;
    /// `NBD_CMD_WRITE_ZEROES`
    pub const WRITE_ZEROES: u16 = 6;
    /// `NBD_CMD_BLOCK_STATUS`
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flags {
    /// `NBD_CMD_FLAG_FUA`: allowed on every command.
    pub const FUA: u16 = 1 << 0;
    /// `NBD_CMD_FLAG_NO_HOLE`: on `WRITE_ZEROES`.
    pub const NO_HOLE: u16 = 1 << 1;
    /// `NBD_CMD_FLAG_DF`: do not fragment the reply to a `READ`.
    pub const DF: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_REQ_ONE`: one descriptor for each context, on `BLOCK_STATUS`.
    pub const REQ_ONE: u16 = 1 << 3;
    /// `NBD_CMD_FLAG_FAST_ZERO`: fail at once rather than be slow, on `WRITE_ZEROES`.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// `NBD_CMD_FLAG_PAYLOAD_LEN`: the length is that of a payload which follows; only with extended
    /// headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Chunks of structured and extended replies.
pub mod chunk {
    /// `NBD_REPLY_FLAG_DONE`: the reply's last chunk.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// `NBD_REPLY_TYPE_NONE`
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_OFFSET_HOLE`: bytes that read as zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// `NBD_REPLY_TYPE_ERROR`
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Status flags of the metadata context `base:allocation`. Data is 0.
pub mod allocation {
    /// `NBD_STATE_HOLE`: never written, or freed since.
    pub const HOLE: u32 = 1 << 0;
    /// `NBD_STATE_ZERO`: reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// Statuses of the metadata context `uzram:state`: how a page is kept. They are values, not flags.
///
/// In every state, a write may fail with `NBD_ENOSPC` when the device has reached its `mem_limit`,
/// as a page's memory depends on its new contents. `base:allocation` allows contexts to define that.
pub mod state {
    /// Never written, or freed since: reads as zeros and takes nothing.
    pub const HOLE: u32 = 0;
    /// Written, and all zeros: takes no pool memory.
    pub const ZERO: u32 = 1;
    /// Filled with one repeated word other than 0: takes no pool memory.
    pub const SAME: u32 = 2;
    /// Compressed.
    pub const COMPRESSED: u32 = 3;
    /// Stored uncompressed, because it does not compress.
    pub const HUGE: u32 = 4;
    /// On the backing device, and not in memory.
    pub const BACKING: u32 = 5;
    /// Damaged: reads fail until the page is written.
    pub const LOST: u32 = 6;
}

/// The longest `READ` or `WRITE`, in bytes: what the specification lets every client assume, and
/// the maximum in this server's `NBD_INFO_BLOCK_SIZE`.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// The smallest request, in bytes.
pub const MIN_BLOCK_BYTES: u32 = 1;
/// The best multiple for requests, in bytes: a page.
pub const PREFERRED_BLOCK_BYTES: u32 = uzram::units::PAGE_SIZE as u32;

/// Bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;

/// The errors a reply can carry, with the protocol's values, which may differ from the host's errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// `NBD_EPERM`
    Perm = 1,
    /// `NBD_EIO`
    Io = 5,
    /// `NBD_ENOMEM`
    NoMem = 12,
    /// `NBD_EINVAL`
    Inval = 22,
    /// `NBD_ENOSPC`
    NoSpc = 28,
    /// `NBD_EOVERFLOW`
    Overflow = 75,
    /// `NBD_ENOTSUP`
    NotSup = 95,
    /// `NBD_ESHUTDOWN`
    Shutdown = 108,
}

impl From<ErrorKind> for NbdError {
    /// Converts an engine error. The protocol has no "busy" and no "not found"; for a valid request both are
    /// I/O errors.
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Invalid | ErrorKind::OutOfRange => NbdError::Inval,
            ErrorKind::NoSpace => NbdError::NoSpc,
            ErrorKind::NoMemory => NbdError::NoMem,
            ErrorKind::Unsupported => NbdError::NotSup,
            ErrorKind::Permission => NbdError::Perm,
            ErrorKind::Busy
            | ErrorKind::NotFound
            | ErrorKind::Corrupt
            | ErrorKind::Io
            | ErrorKind::WouldBlock
            | ErrorKind::Interrupted
            | _ => NbdError::Io,
        }
    }
}

/// A cursor over received bytes; every access is checked.
pub(super) struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

/// The header of an option: which one, and how many bytes of data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`], or an unknown option.
    pub option: u32,
    /// Bytes of data that follow.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// Parses a header; `None` when it does not begin with [`IHAVEOPT`].
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<Self> {
        let mut bytes = Bytes(bytes);
        if bytes.u64()? != IHAVEOPT {
            return None;
        }
        Some(OptionHeader { option: bytes.u32()?, len_bytes: bytes.u32()? })
    }
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name; empty for the default export.
    pub name: &'a [u8],
    kinds: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    /// Reads the data; `None` when its lengths do not add up.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut bytes = Bytes(data);
        let name = string(&mut bytes)?;
        let count = bytes.u16()?;
        let kinds = bytes.slice(usize::from(count) * 2)?;
        bytes.0.is_empty().then_some(InfoRequest { name, kinds })
    }

    /// Returns whether the client asks for this kind of [`info`].
    pub fn wants(&self, kind: u16) -> bool {
        self.kinds.chunks_exact(2).any(|bytes| bytes == kind.to_be_bytes())
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// The export's name; empty for the default export.
    pub name: &'a [u8],
    queries: &'a [u8],
}

impl<'a> MetaContextRequest<'a> {
    /// Reads the data; `None` when its lengths do not add up.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut bytes = Bytes(data);
        let name = string(&mut bytes)?;
        let count = bytes.u32()?;
        let request = MetaContextRequest { name, queries: bytes.0 };
        // Each query takes at least its length field, so the data bounds their number.
        for _ in 0..count {
            string(&mut bytes)?;
        }
        bytes.0.is_empty().then_some(request)
    }

    /// Returns the client's queries: names of contexts, or namespace-specific queries.
    pub fn queries(&self) -> impl Iterator<Item = &'a [u8]> {
        let mut bytes = Bytes(self.queries);
        std::iter::from_fn(move || string(&mut bytes))
    }
}

/// Parses a string that follows its 32-bit length.
fn string<'a>(bytes: &mut Bytes<'a>) -> Option<&'a [u8]> {
    let len_bytes = bytes.u32()?;
    bytes.slice(usize::try_from(len_bytes).ok()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_info_request_must_add_up() {
        let good = b"\0\0\0\x03abc\0\x02\0\x03\x01\x02";
        let parsed = InfoRequest::parse(good).unwrap();
        assert_eq!(parsed.name, b"abc");
        assert!(parsed.wants(3) && parsed.wants(0x0102) && !parsed.wants(0x0301));
        for len in 0..good.len() {
            assert_eq!(InfoRequest::parse(&good[..len]), None, "cut at {len}");
        }
        assert_eq!(InfoRequest::parse(&[&good[..], &[0]].concat()), None);
        assert_eq!(InfoRequest::parse(&[0xff; 64]), None);
    }

    #[test]
    fn queries_must_add_up() {
        let good = b"\0\0\0\x02hi\0\0\0\x02\0\0\0\x03a:b\0\0\0\0";
        let parsed = MetaContextRequest::parse(good).unwrap();
        assert_eq!((parsed.name, parsed.queries().collect::<Vec<_>>()), (&b"hi"[..], vec![&b"a:b"[..], b""]));
        for len in 0..good.len() {
            assert_eq!(MetaContextRequest::parse(&good[..len]), None, "cut at {len}");
        }
        assert_eq!(MetaContextRequest::parse(&[&good[..], &[0]].concat()), None);
        assert_eq!(MetaContextRequest::parse(&[0xff; 64]), None);
        let none = MetaContextRequest::parse(&[0; 8]).unwrap();
        assert_eq!((none.name, none.queries().count()), (&b""[..], 0));
    }

    #[test]
    fn every_engine_error_has_an_nbd_error() {
        for (kind, error) in [
            (ErrorKind::Invalid, 22),
            (ErrorKind::OutOfRange, 22),
            (ErrorKind::NoSpace, 28),
            (ErrorKind::NoMemory, 12),
            (ErrorKind::Busy, 5),
            (ErrorKind::NotFound, 5),
            (ErrorKind::Unsupported, 95),
            (ErrorKind::Corrupt, 5),
            (ErrorKind::Io, 5),
            (ErrorKind::Permission, 1),
        ] {
            assert_eq!(NbdError::from(kind) as u32, error, "{kind:?}");
        }
    }
}
