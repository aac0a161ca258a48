//! The NBD wire format: constants under the specification's names, and parsers of options.
//! `request` has the headers of requests and replies.
//!
//! Pure functions of bytes: nothing here does I/O or can panic on any input. All integers on the wire are
//! big-endian. Extended headers are those of the specification's branch `extension-ext-header`, as qemu and
//! libnbd have them.

use std::io;

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

/// Declares modules of constants, each documented by its name in the specification.
macro_rules! constants {
    ($($(#[$about:meta])* $module:ident: $type:ty = $prefix:literal {
        $($(#[$more:meta])* $name:ident = $value:expr,)*
    })*) => {$(
        $(#[$about])*
        pub mod $module {
            $(
                #[doc = concat!("`", $prefix, stringify!($name), "`")]
                $(#[$more])*
                pub const $name: $type = $value;
            )*
        }
    )*};
}

constants! {
    /// Handshake flags of the server; the client's flags have the same bits.
    handshake_flags: u16 = "NBD_FLAG_" {
        FIXED_NEWSTYLE = 1 << 0,
        /// No 124 zeros after the answer to `EXPORT_NAME`.
        NO_ZEROES = 1 << 1,
    }
    /// Transmission flags: what an export can do.
    transmission_flags: u16 = "NBD_FLAG_" {
        HAS_FLAGS = 1 << 0,
        READ_ONLY = 1 << 1,
        SEND_FLUSH = 1 << 2,
        SEND_FUA = 1 << 3,
        SEND_TRIM = 1 << 5,
        SEND_WRITE_ZEROES = 1 << 6,
        /// Only when replies are chunks.
        SEND_DF = 1 << 7,
        CAN_MULTI_CONN = 1 << 8,
        SEND_CACHE = 1 << 10,
        SEND_FAST_ZERO = 1 << 11,
        /// Only with extended headers and metadata contexts.
        BLOCK_STATUS_PAYLOAD = 1 << 12,
    }
    /// Options a client may send during the handshake.
    option: u32 = "NBD_OPT_" {
        EXPORT_NAME = 1,
        ABORT = 2,
        LIST = 3,
        STARTTLS = 5,
        INFO = 6,
        GO = 7,
        STRUCTURED_REPLY = 8,
        LIST_META_CONTEXT = 9,
        SET_META_CONTEXT = 10,
        EXTENDED_HEADERS = 11,
    }
    /// Types of option replies.
    reply: u32 = "NBD_REP_" {
        ACK = 1,
        SERVER = 2,
        INFO = 3,
        META_CONTEXT = 4,
        ERR_UNSUP = (1 << 31) + 1,
        ERR_POLICY = (1 << 31) + 2,
        ERR_INVALID = (1 << 31) + 3,
        ERR_TLS_REQD = (1 << 31) + 5,
        ERR_UNKNOWN = (1 << 31) + 6,
        /// There is no way back from extended headers.
        ERR_EXT_HEADER_REQD = (1 << 31) + 10,
    }
    /// Kinds of information about an export.
    info: u16 = "NBD_INFO_" {
        EXPORT = 0,
        NAME = 1,
        DESCRIPTION = 2,
        BLOCK_SIZE = 3,
    }
    /// Commands, as they are numbered on the wire.
    command: u16 = "NBD_CMD_" {
        READ = 0,
        WRITE = 1,
        DISC = 2,
        FLUSH = 3,
        TRIM = 4,
        CACHE = 5,
        WRITE_ZEROES = 6,
        BLOCK_STATUS = 7,
    }
    /// Flags of a request.
    command_flags: u16 = "NBD_CMD_FLAG_" {
        /// Allowed on every command.
        FUA = 1 << 0,
        NO_HOLE = 1 << 1,
        /// Do not fragment the reply to a `READ`.
        DF = 1 << 2,
        /// One descriptor for each context, on `BLOCK_STATUS`.
        REQ_ONE = 1 << 3,
        /// Fail at once rather than be slow, on `WRITE_ZEROES`.
        FAST_ZERO = 1 << 4,
        /// The length is that of a payload which follows; only with extended headers.
        PAYLOAD_LEN = 1 << 5,
    }
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
            _ => NbdError::Io,
        }
    }
}

/// Returns the error for a protocol violation, which ends the connection.
pub(super) fn violation(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// A cursor over received bytes; every access is checked.
pub(super) struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
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

/// Parses the header of an option: its number, and how many bytes of data follow. `None` when it does not
/// begin with [`IHAVEOPT`].
pub(super) fn parse_option_header(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<(u32, u32)> {
    let mut bytes = Bytes(bytes);
    (bytes.u64()? == IHAVEOPT).then_some((bytes.u32()?, bytes.u32()?))
}

/// Parses the data of `NBD_OPT_INFO` and `NBD_OPT_GO`: the export's name, empty for the default one, and the
/// kinds of [`info`] that the client asks for. `None` when the lengths do not add up.
pub(super) fn parse_info(data: &[u8]) -> Option<(&[u8], &[[u8; 2]])> {
    let mut bytes = Bytes(data);
    let (name, count) = (string(&mut bytes)?, bytes.u16()?);
    let (kinds, rest) = bytes.0.as_chunks();
    (kinds.len() == usize::from(count) && rest.is_empty()).then_some((name, kinds))
}

/// Parses the data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: the export's name, empty
/// for the default one, and the number of queries and these: names of contexts, or namespace-specific ones.
/// `None` when the lengths do not add up.
pub(super) fn parse_contexts(data: &[u8]) -> Option<(&[u8], u32, impl Iterator<Item = &[u8]>)> {
    let mut bytes = Bytes(data);
    let (name, count) = (string(&mut bytes)?, bytes.u32()?);
    // Not a list: a handshake has memory for one option only.
    let mut queries = Bytes(bytes.0);
    // Each query takes at least its length field, so the data bounds their number.
    for _ in 0..count {
        string(&mut bytes)?;
    }
    bytes.0.is_empty().then_some((name, count, std::iter::from_fn(move || string(&mut queries))))
}

/// Parses a string that follows its 32-bit length.
fn string<'a>(bytes: &mut Bytes<'a>) -> Option<&'a [u8]> {
    let len_bytes = bytes.u32()?;
    let (text, rest) = bytes.0.split_at_checked(usize::try_from(len_bytes).ok()?)?;
    bytes.0 = rest;
    Some(text)
}
