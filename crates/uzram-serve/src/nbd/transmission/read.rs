//! Replies to reads.
//!
//! If replies are chunks, ranges that are known to be zeros are sent as holes, which carry no data, and the rest as
//! data, read straight into the send buffer.

use std::io::{self, Write};

use uzram::device::Wait;
use uzram::units::PAGE_SIZE;

use super::replies::{Replies, Rest};
use crate::nbd::buffer::Memory;
use crate::nbd::proto::{chunk, command_flags};
use crate::nbd::reply::{put_chunk_header, simple_reply};
use crate::nbd::request::{Headers, Request};

impl<W: Write> Replies<'_, W> {
    /// Reads the rest of a request that has passed `Request::check`, at most `MAX_PAYLOAD_BYTES`, and replies with the
    /// data.
    pub(super) fn read(&mut self, request: &Request, rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        let len_bytes = request.len_bytes as usize;
        match (self.headers.has_chunks(), len_bytes) {
            // A data chunk must not be empty.
            (true, 0) => self.end(request).map(|()| None),
            (false, 0) => self.succeed(request).map(|()| None),
            (true, _) if !request.has(command_flags::DF) => self.read_chunks(request, rest, wait),
            _ if len_bytes <= self.fragment_bytes() => {
                let waits = self.data(request, rest.at, len_bytes, true, wait)? == Some(0);
                Ok(waits.then_some(rest))
            }
            _ => self.read_whole(request, rest, wait),
        }
    }

    /// Returns the most data bytes of one chunk of a read with several: whole pages.
    fn fragment_bytes(&self) -> usize {
        self.unsent.capacity_bytes() - PAGE_SIZE
    }

    /// Replies with chunks, holes and data in turn.
    fn read_chunks(&mut self, request: &Request, mut rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        while rest.left_bytes > 0 {
            let zero_bytes = match self.device.zero_bytes(rest.at, rest.left_bytes) {
                Ok(zero_bytes) => zero_bytes,
                Err(error) => return self.fail(request, error).map(|()| None),
            };
            if zero_bytes > 0 {
                self.hole(request, rest.at, zero_bytes)?;
                rest.advance(zero_bytes);
                continue;
            }
            let most_bytes = rest.left_bytes.min(self.fragment_bytes() as u64) as usize;
            match self.data(request, rest.at, most_bytes, false, wait)? {
                Some(0) => return Ok(Some(rest)),
                Some(data_bytes) => rest.advance(data_bytes as u64),
                None => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Adds a hole chunk for `len_bytes` from `offset` on.
    fn hole(&mut self, request: &Request, offset: u64, len_bytes: u64) -> io::Result<()> {
        let payload = self.chunk(request, done_flag(request, offset, len_bytes), chunk::OFFSET_HOLE, 12)?;
        payload[..8].copy_from_slice(&offset.to_be_bytes());
        payload[8..].copy_from_slice(&(len_bytes as u32).to_be_bytes());
        Ok(())
    }

    /// Reads data into the send buffer after its header: all of `len_bytes`, which fit the buffer, if it must be
    /// `whole`, otherwise up to the first zeros. Returns the number of bytes: 0 when the read would wait, and nothing
    /// was added; `None` when the device failed and the reply ended with its error.
    fn data(
        &mut self,
        request: &Request,
        offset: u64,
        len_bytes: usize,
        whole: bool,
        wait: Wait,
    ) -> io::Result<Option<usize>> {
        let header_bytes = self.headers.data_header_bytes();
        let room = self.unsent.room(self.stream, header_bytes + len_bytes)?;
        let (header, data) = room.split_at_mut(header_bytes);
        let read = if whole {
            self.device.read_some(offset, data, wait)
        } else {
            self.device.read_until_zeros(offset, data, wait)
        };
        match read {
            Ok(data_bytes) if data_bytes == 0 || (whole && data_bytes < len_bytes) => {
                self.unsent.retract(header_bytes + len_bytes);
                Ok(Some(0))
            }
            Ok(data_bytes) => {
                put_data_header(header, self.headers, request, offset, data_bytes);
                self.unsent.retract(len_bytes - data_bytes);
                Ok(Some(data_bytes))
            }
            Err(error) => {
                self.unsent.retract(header_bytes + len_bytes);
                self.fail(request, error).map(|()| None)
            }
        }
    }

    /// Replies to a read that is longer than the send buffer and must not be fragmented.
    ///
    /// The header carries the error, so the read must succeed before the header is sent. So all data is read first,
    /// into memory that lives as long as this reply, if the budget allows it. Fast clients negotiate structured
    /// replies, or split their reads.
    fn read_whole(&mut self, request: &Request, rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        let len_bytes = request.len_bytes as usize;
        let share = self.budget.and_then(|budget| budget.take(len_bytes));
        let Some((mut data, _share)) = share.and_then(|share| Some((Memory::new(len_bytes).ok()?, share)))
        else {
            return self.stream_whole(request).map(|()| None);
        };
        match self.device.read_some(request.offset, &mut data, wait) {
            Ok(data_bytes) if data_bytes < len_bytes => return Ok(Some(rest)),
            Ok(_) => {}
            Err(error) => return self.fail(request, error).map(|()| None),
        }
        let header = self.unsent.room(self.stream, self.headers.data_header_bytes())?;
        put_data_header(header, self.headers, request, request.offset, len_bytes);
        self.unsent.put(self.stream, &data).map(|()| None)
    }

    /// Replies to such a read without memory for all of its data: sends the header, which reports success, then the
    /// data through the send buffer.
    ///
    /// If the device fails after that, the connection ends: the specification prescribes that for simple replies, and
    /// a client that asked for one chunk cannot receive the error otherwise. This waits for the device: without memory
    /// for the reply, the request cannot be offloaded.
    fn stream_whole(&mut self, request: &Request) -> io::Result<()> {
        // Send the replies to other requests before waiting.
        self.flush()?;
        let header = self.unsent.room(self.stream, self.headers.data_header_bytes())?;
        put_data_header(header, self.headers, request, request.offset, request.len_bytes as usize);
        let mut rest = Rest::all(request);
        while rest.left_bytes > 0 {
            // Pieces end on page boundaries, so that no page is read twice.
            let most_bytes = self.fragment_bytes() as u64 - rest.at % PAGE_SIZE as u64;
            let piece_bytes = rest.left_bytes.min(most_bytes);
            let piece = self.unsent.room(self.stream, piece_bytes as usize)?;
            self.device.read(rest.at, piece).map_err(|error| {
                let text = format!("the device failed in the middle of a reply that had begun: {error}");
                io::Error::new(io::ErrorKind::ConnectionAborted, text)
            })?;
            rest.advance(piece_bytes);
        }
        Ok(())
    }
}

/// Fills `out`, which has [`Headers::data_header_bytes`], with the header of `len_bytes` of data
/// from `offset` on.
fn put_data_header(out: &mut [u8], headers: Headers, request: &Request, offset: u64, len_bytes: usize) {
    if headers == Headers::Simple {
        return out.copy_from_slice(&simple_reply(0, request.cookie));
    }
    let (header, from) = out.split_at_mut(headers.reply_bytes());
    let flags = done_flag(request, offset, len_bytes as u64);
    put_chunk_header(header, headers, flags, chunk::OFFSET_DATA, request, 8 + len_bytes);
    from.copy_from_slice(&offset.to_be_bytes());
}

/// Returns `FLAG_DONE` for the chunk that reaches the end of the request.
fn done_flag(request: &Request, offset: u64, len_bytes: u64) -> u16 {
    if offset + len_bytes == request.offset + request.len_bytes { chunk::FLAG_DONE } else { 0 }
}
