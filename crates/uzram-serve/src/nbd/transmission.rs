//! The transmission phase: requests in, replies out, until the client leaves.
//!
//! All complete requests of one receive are carried out, in order, and answered with one send.
//! Nothing is allocated for a request, with one exception: a read that is longer than the send
//! buffer and must be answered in one piece (see [`Connection::read_whole`]).
//!
//! Invariant: a connection never waits for the client while it holds unsent replies.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::base::units::PAGE_SIZE;
use uzram::device::OpenDevice;

use super::buffer::{self, BUFFER_BYTES, ReceiveBuffer, SendBuffer};
use super::handshake::Session;
use super::proto::{
    CHUNK_HEADER_BYTES, Command, DATA_CHUNK_HEADER_BYTES, MAX_PAYLOAD_BYTES, NbdError, REQUEST_BYTES,
    Refusal, Request, SIMPLE_REPLY_BYTES, chunk, chunk_header, data_chunk_header, simple_reply,
};
use super::violation;

/// The longest refused payload that is read and thrown away to stay in step with the client; beyond
/// it the connection ends. Twice what a client may send.
const MAX_DRAIN_BYTES: u32 = 2 * MAX_PAYLOAD_BYTES;
/// The longest error message sent; the specification allows 4096 bytes.
const MAX_MESSAGE_BYTES: usize = 512;
/// Data bytes of one chunk when a read takes several: whole pages.
const FRAGMENT_BYTES: usize = BUFFER_BYTES - PAGE_SIZE;

/// Why a request failed.
enum Failure {
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

/// Serves requests until the client disconnects. Once `stopping` is set, requests that have arrived
/// are answered with `NBD_ESHUTDOWN`.
///
/// # Errors
/// The stream's; `InvalidData` when a request makes no sense; `UnexpectedEof` when the client
/// vanished within one.
pub(super) fn run<S: Read + Write>(
    stream: &mut S,
    session: Session,
    stopping: &AtomicBool,
) -> io::Result<()> {
    let mut connection = Connection {
        stream,
        stopping,
        size_bytes: session.device.size_bytes(),
        device: session.device,
        structured_replies: session.structured_replies,
        received: ReceiveBuffer::new()?,
        unsent: SendBuffer::new()?,
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
    device: OpenDevice,
    size_bytes: u64,
    structured_replies: bool,
    received: ReceiveBuffer,
    unsent: SendBuffer,
}

impl<S: Read + Write> Connection<'_, S> {
    fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.next_request()? {
            if request.command == Command::Disc {
                return self.unsent.flush(self.stream);
            }
            self.execute(&request)?;
        }
        Ok(())
    }

    /// The next request's header, its payload still to be received; `None` at the end of the stream.
    fn next_request(&mut self) -> io::Result<Option<Request>> {
        loop {
            if let Some(header) = self.received.available().first_chunk::<REQUEST_BYTES>() {
                let request =
                    Request::parse(header).ok_or_else(|| violation("a request without its magic"))?;
                self.received.consume(REQUEST_BYTES);
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
            return Err(Refusal { error: NbdError::Shutdown, message: "the server is stopping" });
        }
        request.check(self.size_bytes, self.structured_replies)
    }

    fn execute(&mut self, request: &Request) -> io::Result<()> {
        let checked = self.check(request).map_err(Failure::from);
        let len_bytes = u64::from(request.len_bytes);
        let result = match (request.command, checked) {
            (Command::Write, checked) => self.write(request, checked)?,
            (_, Err(failure)) => Err(failure),
            (Command::Read, Ok(())) => return self.read(request),
            (Command::Trim, Ok(())) => self.device.discard(request.offset, len_bytes).map_err(Failure::from),
            (Command::WriteZeroes, Ok(())) => {
                self.device.write_zeroes(request.offset, len_bytes).map_err(Failure::from)
            }
            // A write is visible to every connection before it is answered, so a flush has nothing
            // left to do. `run` ends on `Disc`, and `check` refuses what is unknown.
            (Command::Flush | Command::Disc | Command::Unknown, Ok(())) => Ok(()),
        };
        match result {
            Ok(()) => self.unsent.put(self.stream, &simple_reply(0, request.cookie)),
            Err(failure) => self.reply_error(request, &failure),
        }
    }

    /// Receives a write's payload and, while `result` is a success, stores it.
    ///
    /// A payload that has not arrived as a whole is stored as it comes, in pieces that end on page
    /// boundaries, so that its length is not bounded by the buffer and no page is written twice. The
    /// first failure is kept and the rest of the payload thrown away, to stay in step.
    fn write(
        &mut self,
        request: &Request,
        mut result: Result<(), Failure>,
    ) -> io::Result<Result<(), Failure>> {
        if request.len_bytes > MAX_DRAIN_BYTES {
            return Err(violation("a write of more than 64 MiB"));
        }
        let mut offset = request.offset;
        let mut left_bytes = request.len_bytes as usize;
        loop {
            let available = self.received.available();
            let piece_bytes = match &result {
                Ok(()) => ready_bytes(offset, left_bytes, available.len()),
                Err(_) => left_bytes.min(available.len()),
            };
            if result.is_ok() && piece_bytes > 0 {
                result = self.device.write(offset, &available[..piece_bytes]).map_err(Failure::from);
                offset += piece_bytes as u64;
            }
            self.received.consume(piece_bytes);
            left_bytes -= piece_bytes;
            if left_bytes == 0 {
                return Ok(result);
            }
            if !self.receive()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn read(&mut self, request: &Request) -> io::Result<()> {
        let len_bytes = request.len_bytes as usize;
        if self.structured_replies && len_bytes == 0 {
            // A data chunk must hold data.
            let header = chunk_header(chunk::FLAG_DONE, chunk::NONE, request.cookie, 0);
            return self.unsent.put(self.stream, &header);
        }
        if len_bytes <= FRAGMENT_BYTES {
            self.read_fragment(request, request.offset, len_bytes, chunk::FLAG_DONE).map(drop)
        } else if self.structured_replies && !request.dont_fragment() {
            self.read_fragmented(request)
        } else {
            self.read_whole(request)
        }
    }

    /// Answers a long read chunk by chunk, through the send buffer.
    fn read_fragmented(&mut self, request: &Request) -> io::Result<()> {
        let mut offset = request.offset;
        let mut left_bytes = request.len_bytes as usize;
        while left_bytes > FRAGMENT_BYTES {
            if !self.read_fragment(request, offset, FRAGMENT_BYTES, 0)? {
                return Ok(());
            }
            offset += FRAGMENT_BYTES as u64;
            left_bytes -= FRAGMENT_BYTES;
        }
        self.read_fragment(request, offset, left_bytes, chunk::FLAG_DONE).map(drop)
    }

    /// Reads straight into the send buffer, behind the header; `false` when the device failed and
    /// the reply ended with its error. `flags` are the chunk's, when replies are structured.
    fn read_fragment(
        &mut self,
        request: &Request,
        offset: u64,
        len_bytes: usize,
        flags: u16,
    ) -> io::Result<bool> {
        let header_bytes = self.data_header_bytes();
        let room = self.unsent.room(self.stream, header_bytes + len_bytes)?;
        let (header, data) = room.split_at_mut(header_bytes);
        if let Err(error) = self.device.read(offset, data) {
            self.unsent.retract(header_bytes + len_bytes);
            self.reply_error(request, &error.into())?;
            return Ok(false);
        }
        put_data_header(header, self.structured_replies, flags, request, offset, len_bytes);
        Ok(true)
    }

    /// Answers a read that is longer than the send buffer and must not be fragmented.
    ///
    /// Success has to be known before the header goes, because the header is where an error would
    /// be told. So the data is read as a whole, into memory that lives as long as this reply: at
    /// most [`MAX_PAYLOAD_BYTES`]. Clients that matter for speed negotiate structured replies, or
    /// split their reads.
    fn read_whole(&mut self, request: &Request) -> io::Result<()> {
        let len_bytes = request.len_bytes as usize;
        let Ok(mut data) = buffer::long_reply(len_bytes) else {
            let message = "no memory for a reply this long";
            return self.reply_error(request, &Refusal { error: NbdError::NoMem, message }.into());
        };
        if let Err(error) = self.device.read(request.offset, &mut data) {
            return self.reply_error(request, &error.into());
        }
        let header_bytes = self.data_header_bytes();
        let header = self.unsent.room(self.stream, header_bytes)?;
        put_data_header(
            header,
            self.structured_replies,
            chunk::FLAG_DONE,
            request,
            request.offset,
            len_bytes,
        );
        self.unsent.flush(self.stream)?;
        self.stream.write_all(&data)
    }

    fn data_header_bytes(&self) -> usize {
        if self.structured_replies { DATA_CHUNK_HEADER_BYTES } else { SIMPLE_REPLY_BYTES }
    }

    /// Answers with an error: its text too, when replies are structured. Ends the reply.
    fn reply_error(&mut self, request: &Request, failure: &Failure) -> io::Result<()> {
        let error = failure.error() as u32;
        if !self.structured_replies {
            return self.unsent.put(self.stream, &simple_reply(error, request.cookie));
        }
        let mut message = [0; MAX_MESSAGE_BYTES];
        let message_bytes = failure.message(&mut message);
        let payload_bytes = 4 + 2 + message_bytes;
        let header = chunk_header(chunk::FLAG_DONE, chunk::ERROR, request.cookie, payload_bytes as u32);
        let room = self.unsent.room(self.stream, CHUNK_HEADER_BYTES + payload_bytes)?;
        room[..20].copy_from_slice(&header);
        room[20..24].copy_from_slice(&error.to_be_bytes());
        room[24..26].copy_from_slice(&(message_bytes as u16).to_be_bytes());
        room[26..].copy_from_slice(&message[..message_bytes]);
        Ok(())
    }
}

/// Fills in the header of `len_bytes` of data from `offset`.
fn put_data_header(
    header: &mut [u8],
    structured_replies: bool,
    flags: u16,
    request: &Request,
    offset: u64,
    len_bytes: usize,
) {
    if structured_replies {
        header.copy_from_slice(&data_chunk_header(flags, request.cookie, offset, len_bytes as u32));
    } else {
        header.copy_from_slice(&simple_reply(0, request.cookie));
    }
}

/// How much of a payload to store now: all that is left if it is here, otherwise up to the last page
/// boundary that is.
fn ready_bytes(offset: u64, left_bytes: usize, available_bytes: usize) -> usize {
    if available_bytes >= left_bytes {
        return left_bytes;
    }
    let beyond_boundary = ((offset + available_bytes as u64) % PAGE_SIZE as u64) as usize;
    available_bytes.saturating_sub(beyond_boundary)
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
