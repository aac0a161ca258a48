//! Executes requests that need nothing more from the client, and writes the replies.
//!
//! The connection's thread replies through its send buffer and stream; an offloaded task, which may wait for
//! the device, through its own buffer. Both call the same functions. If replies are chunks, ranges that are
//! known to be zeros are sent as holes, which carry no data, and the rest as data, read straight into the
//! send buffer.

use std::borrow::Cow;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::device::{OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::buffer::{Memory, SendBuffer};
use super::meta_context::{Context, Contexts};
use super::proto::{NbdError, chunk, command, command_flags};
use super::request::{Headers, Refusal, Request, put_chunk_header, simple_reply};
use crate::device_pool::Budget;

/// The longest error message sent; the specification allows 4096 bytes.
const MAX_MESSAGE_BYTES: usize = 512;
/// The bytes of a zeroing or a trim between two checks whether the server is stopping: 16,384 pages, which
/// take some milliseconds.
const SLICE_BYTES: u64 = 64 << 20;
/// The most bytes of the disk that one chunk of a `BLOCK_STATUS` covers: 262,144 pages.
const MAX_COVERED_BYTES: u64 = 1 << 30;

pub(super) const STOPPING: Refusal = Refusal { error: NbdError::Shutdown, message: "the server is stopping" };

/// The device, and the buffer and stream for replies. Replies go into `unsent`, and from there to `stream`
/// when it is full.
///
/// A function that takes a [`Wait`] executes a request from byte `at` of the export on. If it would have to
/// wait but may not, it returns where; it has executed and answered the part before.
pub(super) struct Replies<'a, W> {
    pub device: &'a Arc<OpenDevice>,
    pub headers: Headers,
    pub stopping: &'a Arc<AtomicBool>,
    /// Memory for long replies; `None` if `unsent` has room for the whole reply.
    pub budget: Option<&'a Arc<Budget>>,
    pub unsent: &'a mut SendBuffer,
    pub stream: &'a mut W,
}

/// Why a request failed: the error of the reply, and its message, cut to [`MAX_MESSAGE_BYTES`].
pub(super) struct Failure {
    error: NbdError,
    message: Cow<'static, str>,
}

impl From<Refusal> for Failure {
    fn from(Refusal { error, message }: Refusal) -> Self {
        Failure { error, message: message.into() }
    }
}

impl From<uzram::Error> for Failure {
    fn from(error: uzram::Error) -> Self {
        let mut message = error.to_string();
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        Failure { error: error.kind().into(), message: message.into() }
    }
}

impl<W: Write> Replies<'_, W> {
    /// Executes a request that has passed `Request::check` and has no payload.
    #[inline(always)]
    pub fn execute(&mut self, request: &Request, at: u64, wait: Wait) -> io::Result<Option<u64>> {
        match request.command {
            command::READ => self.read(request, at, wait),
            // `FAST_ZERO` asks to fail at once if zeroing is not faster than a write. Here it always is:
            // zeroing a page only changes its slot.
            command::WRITE_ZEROES => {
                let allocate = request.has(command_flags::NO_HOLE);
                self.in_slices(request, at, |device, at, len| device.zero_some(at, len, allocate, wait))
            }
            command::TRIM => {
                self.in_slices(request, at, |device, at, len| device.discard(at, len).map(|()| len))
            }
            // `CACHE`: a page that is not in memory comes back when it is read. `FLUSH`: a write is visible
            // to every connection before its reply, so nothing is left to do.
            command::CACHE | command::FLUSH => self.succeed(request).map(|()| None),
            _ => self.fail(request, Refusal::invalid("an unknown command")).map(|()| None),
        }
    }

    /// Executes a request without data, which may be as long as the disk, in slices, so that a stopping
    /// server does not wait for its end. `act` returns the number of bytes done.
    fn in_slices(
        &mut self,
        request: &Request,
        mut at: u64,
        act: impl Fn(&OpenDevice, u64, u64) -> uzram::Result<u64>,
    ) -> io::Result<Option<u64>> {
        loop {
            // Slices end on page boundaries, so that no page is split.
            let slice_bytes = (request.end() - at).min(SLICE_BYTES - at % PAGE_SIZE as u64);
            let done_bytes = match act(self.device, at, slice_bytes) {
                Ok(done_bytes) => done_bytes,
                Err(error) => return self.fail(request, error).map(|()| None),
            };
            at += done_bytes;
            if at == request.end() {
                return self.succeed(request).map(|()| None);
            }
            if done_bytes < slice_bytes {
                return Ok(Some(at));
            }
            if self.stopping.load(Ordering::Relaxed) {
                return self.fail(request, STOPPING).map(|()| None);
            }
        }
    }

    /// Reads at most `MAX_PAYLOAD_BYTES`, and replies with the data: with chunks, holes and data in turn, if
    /// it may.
    fn read(&mut self, request: &Request, mut at: u64, wait: Wait) -> io::Result<Option<u64>> {
        let most_bytes = self.most_data_bytes() as u64;
        if request.len_bytes == 0 {
            // A data chunk must not be empty.
            let replied = if self.headers.has_chunks() { self.end(request) } else { self.succeed(request) };
            return replied.map(|()| None);
        }
        if !self.headers.has_chunks() || request.has(command_flags::DF) {
            if request.len_bytes > most_bytes {
                return self.read_whole(request, wait);
            }
            let done = self.data(request, at, request.len_bytes as usize, true, wait)?;
            return Ok((done == Some(0)).then_some(at));
        }
        while at < request.end() {
            let zero_bytes = match self.device.zero_bytes(at, request.end() - at) {
                Ok(zero_bytes) => zero_bytes,
                Err(error) => return self.fail(request, error).map(|()| None),
            };
            if zero_bytes > 0 {
                let payload =
                    self.chunk(request, done_flag(request, at + zero_bytes), chunk::OFFSET_HOLE, 12)?;
                payload[..8].copy_from_slice(&at.to_be_bytes());
                payload[8..].copy_from_slice(&(zero_bytes as u32).to_be_bytes());
                at += zero_bytes;
                continue;
            }
            let len_bytes = (request.end() - at).min(most_bytes) as usize;
            match self.data(request, at, len_bytes, false, wait)? {
                Some(0) => return Ok(Some(at)),
                Some(data_bytes) => at += data_bytes as u64,
                None => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Returns the most data bytes of one chunk of a read with several: whole pages.
    #[inline(always)]
    fn most_data_bytes(&self) -> usize {
        self.unsent.capacity_bytes() - PAGE_SIZE
    }

    /// Reads data into the send buffer after its header: all of `len_bytes`, which fit the buffer, if it must
    /// be `whole`, otherwise up to the first zeros. Returns the number of bytes: 0 when the read would wait,
    /// and nothing was added; `None` when the device failed and the reply ended with its error.
    fn data(
        &mut self,
        request: &Request,
        at: u64,
        len_bytes: usize,
        whole: bool,
        wait: Wait,
    ) -> io::Result<Option<usize>> {
        let header_bytes = self.headers.data_header_bytes();
        let room = self.unsent.room(self.stream, header_bytes + len_bytes)?;
        let (header, data) = room.split_at_mut(header_bytes);
        let read = match whole {
            true => self.device.read_some(at, data, wait),
            false => self.device.read_until_zeros(at, data, wait),
        };
        match read {
            Ok(data_bytes) if data_bytes > 0 && (!whole || data_bytes == len_bytes) => {
                put_data_header(header, self.headers, request, at, data_bytes);
                self.unsent.retract(len_bytes - data_bytes);
                Ok(Some(data_bytes))
            }
            failed => {
                self.unsent.retract(header_bytes + len_bytes);
                match failed {
                    Ok(_) => Ok(Some(0)),
                    Err(error) => self.fail(request, error).map(|()| None),
                }
            }
        }
    }

    /// Replies to a read that is longer than the send buffer and must not be fragmented.
    ///
    /// The header carries the error, so the read must succeed before the header is sent. So all data is read
    /// first, into memory that lives as long as this reply, if the budget allows it. Fast clients negotiate
    /// structured replies, or split their reads.
    fn read_whole(&mut self, request: &Request, wait: Wait) -> io::Result<Option<u64>> {
        let len_bytes = request.len_bytes as usize;
        let share = self.budget.and_then(|budget| budget.take(len_bytes));
        let Some((mut data, _share)) = share.and_then(|share| Some((Memory::new(len_bytes).ok()?, share)))
        else {
            return self.stream_whole(request).map(|()| None);
        };
        match self.device.read_some(request.offset, &mut data, wait) {
            Ok(data_bytes) if data_bytes < len_bytes => return Ok(Some(request.offset)),
            Ok(_) => {}
            Err(error) => return self.fail(request, error).map(|()| None),
        }
        let header = self.unsent.room(self.stream, self.headers.data_header_bytes())?;
        put_data_header(header, self.headers, request, request.offset, len_bytes);
        self.unsent.put(self.stream, &data).map(|()| None)
    }

    /// Replies to such a read without memory for all of its data: sends the header, which reports success,
    /// then the data through the send buffer.
    ///
    /// If the device fails after that, the connection ends: the specification prescribes that for simple
    /// replies, and a client that asked for one chunk cannot receive the error otherwise. This waits for the
    /// device: without memory for the reply, the request cannot be offloaded.
    fn stream_whole(&mut self, request: &Request) -> io::Result<()> {
        // Send the replies to other requests before waiting.
        self.unsent.flush(self.stream)?;
        let header = self.unsent.room(self.stream, self.headers.data_header_bytes())?;
        put_data_header(header, self.headers, request, request.offset, request.len_bytes as usize);
        let mut at = request.offset;
        while at < request.end() {
            // Pieces end on page boundaries, so that no page is read twice.
            let most_bytes = self.most_data_bytes() as u64 - at % PAGE_SIZE as u64;
            let piece_bytes = (request.end() - at).min(most_bytes);
            let piece = self.unsent.room(self.stream, piece_bytes as usize)?;
            self.device.read(at, piece).map_err(|error| {
                let text = format!("the device failed in the middle of a reply that had begun: {error}");
                io::Error::new(io::ErrorKind::ConnectionAborted, text)
            })?;
            at += piece_bytes;
        }
        Ok(())
    }

    /// Replies to `BLOCK_STATUS`: a chunk for each of `contexts`, with a descriptor for each run of pages
    /// that have the same status in it.
    ///
    /// A reply may cover less than the request; the client then asks again from its end. A chunk ends at a
    /// quarter of the send buffer, which is thousands of descriptors, or at [`MAX_COVERED_BYTES`], so that a
    /// request takes some milliseconds at most.
    pub fn report_status(&mut self, request: &Request, len_bytes: u64, contexts: Contexts) -> io::Result<()> {
        if contexts.is_empty() {
            return self.fail(request, Refusal::invalid("no metadata context was set"));
        }
        if len_bytes == 0 {
            return self.fail(request, Refusal::invalid("a request of 0 bytes has no status"));
        }
        let (headers, is_extended) = (self.headers, self.headers == Headers::Extended);
        let (prefix_bytes, one_bytes) = if is_extended { (8, 16) } else { (4, 8) };
        let header_bytes = headers.reply_bytes() + prefix_bytes;
        let most_bytes = match request.has(command_flags::REQ_ONE) {
            true => one_bytes,
            false => (self.unsent.capacity_bytes() / 4).next_multiple_of(one_bytes),
        };
        let last = contexts.iter().last();
        for context in contexts.iter() {
            let room = self.unsent.room(self.stream, header_bytes + most_bytes)?;
            let (header, descriptors) = room.split_at_mut(header_bytes);
            let filled =
                put_descriptors(self.device, context, request.offset, len_bytes, one_bytes, descriptors);
            let count = match filled {
                Ok(count) => count,
                Err(error) => {
                    self.unsent.retract(header_bytes + most_bytes);
                    return self.fail(request, error);
                }
            };
            let flags = if Some(context) == last { chunk::FLAG_DONE } else { 0 };
            let kind = if is_extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
            let (header, prefix) = header.split_at_mut(headers.reply_bytes());
            put_chunk_header(header, headers, (flags, kind), request, prefix_bytes + count * one_bytes);
            prefix[..4].copy_from_slice(&context.id().to_be_bytes());
            if is_extended {
                prefix[4..].copy_from_slice(&(count as u32).to_be_bytes());
            }
            self.unsent.retract(most_bytes - count * one_bytes);
        }
        Ok(())
    }

    /// Replies to a successful request without data. Structured replies allow a simple reply here, which is
    /// the shortest.
    pub fn succeed(&mut self, request: &Request) -> io::Result<()> {
        match self.headers {
            Headers::Simple | Headers::Structured => {
                self.unsent.put(self.stream, &simple_reply(0, request.cookie))
            }
            Headers::Extended => self.end(request),
        }
    }

    fn end(&mut self, request: &Request) -> io::Result<()> {
        self.chunk(request, chunk::FLAG_DONE, chunk::NONE, 0).map(drop)
    }

    /// Replies with an error, including its text if replies are chunks. Ends the reply.
    pub fn fail(&mut self, request: &Request, failure: impl Into<Failure>) -> io::Result<()> {
        let Failure { error, message } = failure.into();
        if !self.headers.has_chunks() {
            return self.unsent.put(self.stream, &simple_reply(error as u32, request.cookie));
        }
        let payload = self.chunk(request, chunk::FLAG_DONE, chunk::ERROR, 4 + 2 + message.len())?;
        payload[..4].copy_from_slice(&(error as u32).to_be_bytes());
        payload[4..6].copy_from_slice(&(message.len() as u16).to_be_bytes());
        payload[6..].copy_from_slice(message.as_bytes());
        Ok(())
    }

    fn chunk(
        &mut self,
        request: &Request,
        flags: u16,
        kind: u16,
        payload_bytes: usize,
    ) -> io::Result<&mut [u8]> {
        let header_bytes = self.headers.reply_bytes();
        let room = self.unsent.room(self.stream, header_bytes + payload_bytes)?;
        let (header, payload) = room.split_at_mut(header_bytes);
        put_chunk_header(header, self.headers, (flags, kind), request, payload_bytes);
        Ok(payload)
    }
}

/// Fills `out`, which has [`Headers::data_header_bytes`], with the header of `len_bytes` of data from byte
/// `at` of the export on.
fn put_data_header(out: &mut [u8], headers: Headers, request: &Request, at: u64, len_bytes: usize) {
    if headers == Headers::Simple {
        return out.copy_from_slice(&simple_reply(0, request.cookie));
    }
    let (header, from) = out.split_at_mut(headers.reply_bytes());
    let flags = done_flag(request, at + len_bytes as u64);
    put_chunk_header(header, headers, (flags, chunk::OFFSET_DATA), request, 8 + len_bytes);
    from.copy_from_slice(&at.to_be_bytes());
}

#[inline(always)]
fn done_flag(request: &Request, end: u64) -> u16 {
    if end == request.end() { chunk::FLAG_DONE } else { 0 }
}

/// Fills `out` with descriptors of `one_bytes` each, of the `len_bytes` from `at` on, up to the end of `out`
/// or [`MAX_COVERED_BYTES`], and returns their number. A descriptor is a length and a status, each half of
/// it.
fn put_descriptors(
    device: &OpenDevice,
    context: Context,
    mut at: u64,
    len_bytes: u64,
    one_bytes: usize,
    out: &mut [u8],
) -> uzram::Result<usize> {
    let mut slots = out.chunks_exact_mut(one_bytes);
    let (most, mut count) = (slots.len(), 0);
    let mut put = |(len_bytes, status): (u64, u32)| {
        if let Some(slot) = slots.next() {
            let (len, state) = slot.split_at_mut(one_bytes / 2);
            // A compact request has a length of 32 bits.
            len.copy_from_slice(&len_bytes.to_be_bytes()[8 - len.len()..]);
            state.copy_from_slice(&u64::from(status).to_be_bytes()[8 - state.len()..]);
            count += 1;
        }
        count
    };
    let mut left_bytes = len_bytes.min(MAX_COVERED_BYTES);
    let mut run = None;
    while left_bytes > 0 {
        let extent = device.extent(at, left_bytes)?;
        at += extent.len_bytes;
        left_bytes -= extent.len_bytes;
        let status = context.status(extent.state);
        run = match run {
            Some((run_bytes, same)) if same == status => Some((run_bytes + extent.len_bytes, same)),
            Some(ended) if put(ended) == most => return Ok(most),
            _ => Some((extent.len_bytes, status)),
        };
    }
    Ok(run.map_or(0, put))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_message_is_cut_between_characters() {
        for (text, len_bytes) in [
            ("é".repeat(1000), MAX_MESSAGE_BYTES),
            (format!("x{}", "é".repeat(1000)), MAX_MESSAGE_BYTES - 1),
            ("short".to_owned(), 5),
        ] {
            assert_eq!(Failure::from(uzram::Error::invalid(text)).message.len(), len_bytes);
        }
        let full = uzram::Error::new(uzram::ErrorKind::NoSpace, "full").with_setting("mem_limit");
        assert_eq!(Failure::from(full).message, "full (setting: mem_limit)");
    }
}
