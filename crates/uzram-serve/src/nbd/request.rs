//! Requests of the transmission phase: parsing and checking their headers.
//!
//! Pure functions of bytes, like [`super::proto`].

use super::proto::{
    Bytes, MAX_PAYLOAD_BYTES, NBD_EXTENDED_REQUEST_MAGIC, NBD_REQUEST_MAGIC, NbdError, command, command_flags,
};

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
    /// Returns the bytes of a request's header.
    pub const fn request_bytes(self) -> usize {
        match self {
            Headers::Simple | Headers::Structured => 28,
            Headers::Extended => 32,
        }
    }

    /// Returns whether replies can be chunks.
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Headers::Simple)
    }

    /// Returns the longest payload that is received, even of a refused request; a longer one ends the connection. The
    /// specification requires that beyond [`MAX_PAYLOAD_BYTES`] for extended requests; for compact ones twice as much
    /// is received and discarded.
    pub const fn max_received_bytes(self) -> u64 {
        let max = MAX_PAYLOAD_BYTES as u64;
        match self {
            Headers::Simple | Headers::Structured => 2 * max,
            Headers::Extended => max,
        }
    }
}

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read,
    /// `NBD_CMD_WRITE`: the only command that always carries a payload.
    Write,
    /// `NBD_CMD_DISC`: no reply; the connection ends.
    Disc,
    /// `NBD_CMD_FLUSH`
    Flush,
    /// `NBD_CMD_TRIM`
    Trim,
    /// `NBD_CMD_CACHE`
    Cache,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`
    BlockStatus,
    /// A command that this server does not know.
    Unknown,
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// See [`command_flags`].
    pub flags: u16,
    /// See [`Command`].
    pub command: Command,
    /// The client's identifier of this request, returned in the reply.
    pub cookie: u64,
    /// The start of its range, in bytes from the start of the export.
    pub offset: u64,
    /// The length of its range; for a `BLOCK_STATUS` with a payload, which has the length of the range, the payload's.
    pub len_bytes: u64,
    /// Bytes that follow the header.
    pub payload_bytes: u64,
}

impl Command {
    /// Returns whether the command changes the export.
    pub const fn changes(self) -> bool {
        matches!(self, Command::Write | Command::Trim | Command::WriteZeroes)
    }
}

/// An error for a request that does not reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error of the reply.
    pub error: NbdError,
    /// The message for users.
    pub message: &'static str,
}

impl Refusal {
    /// Creates the refusal of an invalid request.
    pub const fn invalid(message: &'static str) -> Self {
        Refusal { error: NbdError::Inval, message }
    }
}

impl Request {
    /// Parses a header of [`Headers::request_bytes`]; `None` when it does not begin with its magic. The stream is then
    /// out of sync, and the rest of it cannot be parsed.
    pub fn parse(bytes: &[u8], headers: Headers) -> Option<Self> {
        let mut bytes = Bytes(bytes);
        let (magic, flags) = (bytes.u32()?, bytes.u16()?);
        let command = match bytes.u16()? {
            command::READ => Command::Read,
            command::WRITE => Command::Write,
            command::DISC => Command::Disc,
            command::FLUSH => Command::Flush,
            command::TRIM => Command::Trim,
            command::CACHE => Command::Cache,
            command::WRITE_ZEROES => Command::WriteZeroes,
            command::BLOCK_STATUS => Command::BlockStatus,
            _ => Command::Unknown,
        };
        let (cookie, offset) = (bytes.u64()?, bytes.u64()?);
        let (expected, len_bytes, has_payload) = match headers {
            Headers::Simple | Headers::Structured => {
                (NBD_REQUEST_MAGIC, u64::from(bytes.u32()?), command == Command::Write)
            }
            // The specification requires PAYLOAD_LEN on writes. qemu does not set it (up to 10.0 at least) but sends
            // the payload; a write without one has no meaning, so assume it.
            Headers::Extended => {
                let has_payload = command == Command::Write || flags & command_flags::PAYLOAD_LEN != 0;
                (NBD_EXTENDED_REQUEST_MAGIC, bytes.u64()?, has_payload)
            }
        };
        let payload_bytes = if has_payload { len_bytes } else { 0 };
        (magic == expected).then_some(Request { flags, command, cookie, offset, len_bytes, payload_bytes })
    }

    /// Returns whether the client has set this one of [`command_flags`].
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Checks the request against the protocol and an export of `size_bytes`. The range in the payload of a
    /// `BLOCK_STATUS` is not known yet, and not checked.
    ///
    /// # Errors
    /// The error to reply. The specification requires `NBD_ENOSPC` for writes past the end, and `NBD_EINVAL` for
    /// everything else past the end.
    pub fn check(&self, size_bytes: u64, headers: Headers) -> Result<(), Refusal> {
        use command_flags::*;
        let payload_len = if headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
        let known = FUA
            | match self.command {
                Command::WriteZeroes => NO_HOLE | FAST_ZERO,
                Command::Read if headers.has_chunks() => DF,
                Command::Write => payload_len,
                Command::BlockStatus => REQ_ONE | payload_len,
                _ => 0,
            };
        if self.has(!known) {
            return Err(Refusal::invalid("a command flag that this command does not have"));
        }
        let too_long = self.len_bytes > u64::from(MAX_PAYLOAD_BYTES);
        let beyond_end = match self.command {
            Command::Read if too_long && self.has(DF) => {
                let message = "an unfragmented read has at most 32 MiB";
                return Err(Refusal { error: NbdError::Overflow, message });
            }
            Command::Read if too_long => return Err(Refusal::invalid("a read has at most 32 MiB")),
            Command::Write if too_long => return Err(Refusal::invalid("a write has at most 32 MiB")),
            Command::Flush if self.offset != 0 || self.len_bytes != 0 => {
                return Err(Refusal::invalid("a flush has no offset and no length"));
            }
            // These have no range, or it is in the payload.
            Command::Flush | Command::Disc | Command::Unknown => return Ok(()),
            Command::BlockStatus if self.has(PAYLOAD_LEN) => return Ok(()),
            Command::Write | Command::WriteZeroes => NbdError::NoSpc,
            Command::Read | Command::Trim | Command::Cache | Command::BlockStatus => NbdError::Inval,
        };
        let within = self.offset.checked_add(self.len_bytes).is_some_and(|end| end <= size_bytes);
        if within {
            Ok(())
        } else {
            Err(Refusal { error: beyond_end, message: "beyond the end of the device" })
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn request(command: Command, flags: u16, offset: u64, len_bytes: u64) -> Request {
        Request { flags, command, cookie: 1, offset, len_bytes, payload_bytes: 0 }
    }

    #[test]
    fn a_request_is_read_field_by_field() {
        let mut bytes: [u8; 32] = std::array::from_fn(|index| index as u8);
        bytes[6..8].copy_from_slice(&[0, 6]);
        assert_eq!(Request::parse(&bytes[..28], Headers::Simple), None);
        let expected = Request {
            flags: 0x0405,
            command: Command::WriteZeroes,
            cookie: 0x0809_0a0b_0c0d_0e0f,
            offset: 0x1011_1213_1415_1617,
            len_bytes: 0x1819_1a1b,
            payload_bytes: 0,
        };
        bytes[..4].copy_from_slice(&NBD_REQUEST_MAGIC.to_be_bytes());
        assert_eq!(Request::parse(&bytes[..28], Headers::Structured), Some(expected));
        assert_eq!(Request::parse(&bytes, Headers::Extended), None);
        bytes[..4].copy_from_slice(&NBD_EXTENDED_REQUEST_MAGIC.to_be_bytes());
        let expected = Request { len_bytes: 0x1819_1a1b_1c1d_1e1f, ..expected };
        assert_eq!(Request::parse(&bytes, Headers::Extended), Some(expected));
        assert_eq!(Request::parse(&bytes[..28], Headers::Simple), None);
    }

    #[test]
    fn writes_and_extended_requests_that_say_so_have_a_payload() {
        let payload = |command: u16, flags: u16, headers: Headers| {
            let mut bytes = [0; 32];
            let extended = headers == Headers::Extended;
            let magic = if extended { NBD_EXTENDED_REQUEST_MAGIC } else { NBD_REQUEST_MAGIC };
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            bytes[4..6].copy_from_slice(&flags.to_be_bytes());
            bytes[6..8].copy_from_slice(&command.to_be_bytes());
            bytes[headers.request_bytes() - 1] = 9;
            Request::parse(&bytes[..headers.request_bytes()], headers).unwrap().payload_bytes
        };
        use command_flags::PAYLOAD_LEN;
        assert_eq!(payload(command::WRITE, 0, Headers::Simple), 9);
        assert_eq!(payload(command::READ, PAYLOAD_LEN, Headers::Structured), 0);
        assert_eq!(payload(command::WRITE, PAYLOAD_LEN, Headers::Extended), 9);
        assert_eq!(payload(command::WRITE, 0, Headers::Extended), 9, "as qemu sends it");
        assert_eq!(payload(command::READ, 0, Headers::Extended), 0);
        assert_eq!(payload(command::READ, PAYLOAD_LEN, Headers::Extended), 9);
    }

    #[test]
    fn requests_up_to_the_very_end_pass() {
        let simple = Headers::Simple;
        for command in [Command::Read, Command::Write, Command::Trim, Command::WriteZeroes, Command::Cache] {
            assert_eq!(request(command, command_flags::FUA, 0, 4096).check(4096, simple), Ok(()));
            assert_eq!(request(command, 0, 4096, 0).check(4096, simple), Ok(()));
            assert!(request(command, 0, 1, 4096).check(4096, simple).is_err());
            assert!(request(command, 0, u64::MAX, 1).check(u64::MAX, simple).is_err());
        }
        assert_eq!(request(Command::Trim, 0, 0, u64::MAX).check(u64::MAX, Headers::Extended), Ok(()));
        assert_eq!(request(Command::Read, 0, 0, MAX_PAYLOAD_BYTES.into()).check(u64::MAX, simple), Ok(()));
    }

    #[test]
    fn flags_belong_to_commands_and_headers() {
        use Command::*;
        use command_flags::*;
        for (command, flag, headers) in [
            (Read, DF, [false, true, true]),
            (Write, PAYLOAD_LEN, [false, false, true]),
            (Write, 0, [true; 3]),
            (BlockStatus, PAYLOAD_LEN, [false, false, true]),
            (BlockStatus, REQ_ONE, [true; 3]),
            (WriteZeroes, FAST_ZERO | NO_HOLE | FUA, [true; 3]),
            (Trim, NO_HOLE, [false; 3]),
            (Cache, FUA, [true; 3]),
            (Cache, PAYLOAD_LEN, [false; 3]),
        ] {
            let all = [Headers::Simple, Headers::Structured, Headers::Extended];
            let good = all.map(|headers| request(command, flag, 0, 1).check(1, headers).is_ok());
            assert_eq!(good, headers, "{command:?} {flag}");
        }
    }
}
