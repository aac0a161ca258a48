//! The NBD wire format: constants under the specification's names, parsers and encoders.
//!
//! Pure functions of bytes: nothing here does I/O, allocates, or can panic on any input. All
//! integers on the wire are big-endian.

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

/// Handshake flags of the server, and the client's answers to them, which have the same bits.
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
    /// `NBD_FLAG_SEND_FLUSH`
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_FLAG_SEND_FUA`
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_FLAG_SEND_TRIM`
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_FLAG_SEND_WRITE_ZEROES`
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_FLAG_SEND_DF`: only when structured replies are negotiated.
    pub const SEND_DF: u16 = 1 << 7;
    /// `NBD_FLAG_CAN_MULTI_CONN`
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Options a client may send during the handshake.
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`
    pub const LIST: u32 = 3;
    /// `NBD_OPT_INFO`
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`
    pub const STRUCTURED_REPLY: u32 = 8;
}

/// Types of option replies.
pub mod reply {
    /// `NBD_REP_ACK`
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`
    pub const INFO: u32 = 3;
    /// `NBD_REP_ERR_UNSUP`: an option this server does not have.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// `NBD_REP_ERR_INVALID`: an option whose data makes no sense.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// `NBD_REP_ERR_UNKNOWN`: the export is not available.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
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
    /// `NBD_CMD_WRITE_ZEROES`
    pub const WRITE_ZEROES: u16 = 6;
}

/// Flags of a request.
pub mod command_flags {
    /// `NBD_CMD_FLAG_FUA`: allowed on every command.
    pub const FUA: u16 = 1 << 0;
    /// `NBD_CMD_FLAG_NO_HOLE`: on `WRITE_ZEROES`.
    pub const NO_HOLE: u16 = 1 << 1;
    /// `NBD_CMD_FLAG_DF`: do not fragment the reply to a `READ`.
    pub const DF: u16 = 1 << 2;
}

/// Chunks of structured replies.
pub mod chunk {
    /// `NBD_REPLY_FLAG_DONE`: the reply's last chunk.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// `NBD_REPLY_TYPE_NONE`
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_ERROR`
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// The longest `READ` or `WRITE`, in bytes: what the specification lets every client assume, and
/// what `NBD_INFO_BLOCK_SIZE` says here.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// The smallest request, in bytes.
pub const MIN_BLOCK_BYTES: u32 = 1;
/// The best multiple for requests, in bytes: a page.
pub const PREFERRED_BLOCK_BYTES: u32 = uzram::base::units::PAGE_SIZE as u32;

/// Bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of a request's header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk's header.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// Bytes before the data in an `OFFSET_DATA` chunk.
pub const DATA_CHUNK_HEADER_BYTES: usize = CHUNK_HEADER_BYTES + 8;

/// The errors a reply can carry. Their values are the protocol's, whatever the host's errno are.
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
    /// The protocol has no "busy" and no "not found"; for a request that was well formed both are
    /// failures of the disk.
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Invalid | ErrorKind::OutOfRange => NbdError::Inval,
            ErrorKind::NoSpace => NbdError::NoSpc,
            ErrorKind::NoMemory => NbdError::NoMem,
            ErrorKind::Unsupported => NbdError::NotSup,
            ErrorKind::Permission => NbdError::Perm,
            ErrorKind::Busy | ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Io => NbdError::Io,
        }
    }
}

/// A cursor over received bytes; every take is checked.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

/// The header of an option: which one, and how many bytes of data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`], or something this server does not know.
    pub option: u32,
    /// Bytes of data that follow.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// Reads a header; `None` when it does not open with [`IHAVEOPT`].
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
        let name_len_bytes = bytes.u32()?;
        let name = bytes.slice(usize::try_from(name_len_bytes).ok()?)?;
        let count = bytes.u16()?;
        let kinds = bytes.slice(usize::from(count) * 2)?;
        bytes.0.is_empty().then_some(InfoRequest { name, kinds })
    }

    /// Whether the client asks for this kind of [`info`].
    pub fn wants(&self, kind: u16) -> bool {
        self.kinds.chunks_exact(2).any(|bytes| bytes == kind.to_be_bytes())
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read,
    /// `NBD_CMD_WRITE`: the only command whose request carries a payload.
    Write,
    /// `NBD_CMD_DISC`: no reply; the connection ends.
    Disc,
    /// `NBD_CMD_FLUSH`
    Flush,
    /// `NBD_CMD_TRIM`
    Trim,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes,
    /// Anything else.
    Unknown,
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// See [`command_flags`].
    pub flags: u16,
    /// What to do.
    pub command: Command,
    /// The client's name for this request, given back in the reply.
    pub cookie: u64,
    /// Where, in bytes from the start of the export.
    pub offset: u64,
    /// How much; for `WRITE` also the bytes of payload that follow.
    pub len_bytes: u32,
}

/// Why a request is answered with an error before it reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error of the reply.
    pub error: NbdError,
    /// What was wrong, for people.
    pub message: &'static str,
}

impl Request {
    /// Reads a header; `None` when it does not open with [`NBD_REQUEST_MAGIC`]: the stream is out
    /// of step and nothing after it can be trusted.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut bytes = Bytes(bytes);
        if bytes.u32()? != NBD_REQUEST_MAGIC {
            return None;
        }
        let flags = bytes.u16()?;
        let command = match bytes.u16()? {
            command::READ => Command::Read,
            command::WRITE => Command::Write,
            command::DISC => Command::Disc,
            command::FLUSH => Command::Flush,
            command::TRIM => Command::Trim,
            command::WRITE_ZEROES => Command::WriteZeroes,
            _ => Command::Unknown,
        };
        Some(Request { flags, command, cookie: bytes.u64()?, offset: bytes.u64()?, len_bytes: bytes.u32()? })
    }

    /// Whether this is a `READ` whose reply must be one chunk.
    pub const fn dont_fragment(&self) -> bool {
        self.flags & command_flags::DF != 0
    }

    /// Checks the request against the protocol and an export of `size_bytes`.
    ///
    /// # Errors
    /// What to answer instead of carrying it out. `NBD_ENOSPC` for data past the end and
    /// `NBD_EINVAL` for everything else past the end is the specification's choice.
    pub fn check(&self, size_bytes: u64, structured_replies: bool) -> Result<(), Refusal> {
        let refuse = |error, message| Err(Refusal { error, message });
        let known = command_flags::FUA
            | match self.command {
                Command::WriteZeroes => command_flags::NO_HOLE,
                Command::Read if structured_replies => command_flags::DF,
                _ => 0,
            };
        if self.flags & !known != 0 {
            return refuse(NbdError::Inval, "a command flag that this command does not have");
        }
        let past_end = self.offset.checked_add(u64::from(self.len_bytes)).is_none_or(|end| end > size_bytes);
        let too_long = self.len_bytes > MAX_PAYLOAD_BYTES;
        match self.command {
            Command::Read if too_long && self.dont_fragment() => {
                refuse(NbdError::Overflow, "an unfragmented read has at most 32 MiB")
            }
            Command::Read if too_long => refuse(NbdError::Inval, "a read has at most 32 MiB"),
            Command::Write if too_long => refuse(NbdError::Inval, "a write has at most 32 MiB"),
            Command::Read | Command::Trim if past_end => {
                refuse(NbdError::Inval, "beyond the end of the device")
            }
            Command::Write | Command::WriteZeroes if past_end => {
                refuse(NbdError::NoSpc, "beyond the end of the device")
            }
            Command::Flush if self.offset != 0 || self.len_bytes != 0 => {
                refuse(NbdError::Inval, "a flush has no offset and no length")
            }
            Command::Unknown => refuse(NbdError::Inval, "an unknown command"),
            _ => Ok(()),
        }
    }
}

/// The header of an option reply with `len_bytes` of data.
pub fn option_reply(option: u32, reply: u32, len_bytes: u32) -> [u8; 20] {
    let mut out = [0; 20];
    out[..8].copy_from_slice(&NBD_REP_MAGIC.to_be_bytes());
    out[8..12].copy_from_slice(&option.to_be_bytes());
    out[12..16].copy_from_slice(&reply.to_be_bytes());
    out[16..].copy_from_slice(&len_bytes.to_be_bytes());
    out
}

/// A simple reply's header; `error` 0 is success.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut out = [0; SIMPLE_REPLY_BYTES];
    out[..4].copy_from_slice(&NBD_SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// A chunk's header, before `len_bytes` of payload.
pub fn chunk_header(flags: u16, kind: u16, cookie: u64, len_bytes: u32) -> [u8; CHUNK_HEADER_BYTES] {
    let mut out = [0; CHUNK_HEADER_BYTES];
    out[..4].copy_from_slice(&NBD_STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..].copy_from_slice(&len_bytes.to_be_bytes());
    out
}

/// An `OFFSET_DATA` chunk up to its data: `data_len_bytes` from `offset`.
///
/// `data_len_bytes` is at most [`MAX_PAYLOAD_BYTES`], so the chunk's length fits.
pub fn data_chunk_header(
    flags: u16,
    cookie: u64,
    offset: u64,
    data_len_bytes: u32,
) -> [u8; DATA_CHUNK_HEADER_BYTES] {
    let mut out = [0; DATA_CHUNK_HEADER_BYTES];
    let header = chunk_header(flags, chunk::OFFSET_DATA, cookie, data_len_bytes.saturating_add(8));
    out[..CHUNK_HEADER_BYTES].copy_from_slice(&header);
    out[CHUNK_HEADER_BYTES..].copy_from_slice(&offset.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn request(command: Command, flags: u16, offset: u64, len_bytes: u32) -> Request {
        Request { flags, command, cookie: 1, offset, len_bytes }
    }

    #[test]
    fn a_request_is_read_field_by_field() {
        let mut bytes = [0; REQUEST_BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = index as u8;
        }
        assert_eq!(Request::parse(&bytes), None);
        bytes[..4].copy_from_slice(&NBD_REQUEST_MAGIC.to_be_bytes());
        bytes[6..8].copy_from_slice(&[0, 6]);
        let expected = Request {
            flags: 0x0405,
            command: Command::WriteZeroes,
            cookie: 0x0809_0a0b_0c0d_0e0f,
            offset: 0x1011_1213_1415_1617,
            len_bytes: 0x1819_1a1b,
        };
        assert_eq!(Request::parse(&bytes), Some(expected));
    }

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
    fn requests_up_to_the_very_end_pass() {
        for command in [Command::Read, Command::Write, Command::Trim, Command::WriteZeroes] {
            assert_eq!(request(command, command_flags::FUA, 0, 4096).check(4096, false), Ok(()));
            assert_eq!(request(command, 0, 4096, 0).check(4096, false), Ok(()));
            assert!(request(command, 0, 1, 4096).check(4096, false).is_err());
            assert!(request(command, 0, u64::MAX, 1).check(u64::MAX, false).is_err());
        }
        assert_eq!(request(Command::Trim, 0, 0, u32::MAX).check(u64::MAX, false), Ok(()));
        assert_eq!(request(Command::Read, 0, 0, MAX_PAYLOAD_BYTES).check(u64::MAX, false), Ok(()));
    }

    #[test]
    fn dont_fragment_belongs_to_structured_replies() {
        let read = request(Command::Read, command_flags::DF, 0, 1);
        assert_eq!(read.check(1, true), Ok(()));
        assert_eq!(read.check(1, false).unwrap_err().error, NbdError::Inval);
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

    #[test]
    fn a_data_chunk_counts_its_offset_as_payload() {
        let header = data_chunk_header(chunk::FLAG_DONE, 7, 0x1122, 4096);
        assert_eq!(header[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!(header[8..16], 7u64.to_be_bytes());
        assert_eq!(header[16..20], 4104u32.to_be_bytes());
        assert_eq!(header[20..], 0x1122u64.to_be_bytes());
    }
}
