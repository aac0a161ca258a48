//! Carrying out requests that need nothing more from the client: by its connection's thread, or by another that
//! may wait for the device.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::device::{OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::STOPPING;
use crate::budget::Budget;
use crate::nbd::buffer::SendBuffer;
use crate::nbd::proto::{NbdError, command_flags};
use crate::nbd::request::{Command, Headers, Refusal, Request};

/// How much of a zeroing or a trim is done before the next look whether the server is stopping, in
/// bytes of the disk: 16,384 pages, which take some milliseconds.
const SLICE_BYTES: u64 = 64 << 20;

/// What a request is told that somebody else was to carry out.
const MISPLACED: Refusal = Refusal { error: NbdError::Inval, message: "the request is not carried out here" };

/// What is still to be done of a request.
#[derive(Clone, Copy)]
pub(super) struct Rest {
    /// From where on, in bytes from the start of the export.
    pub at: u64,
    /// How much.
    pub left_bytes: u64,
}

impl Rest {
    /// All of it.
    pub fn all(request: &Request) -> Self {
        Rest { at: request.offset, left_bytes: request.len_bytes }
    }

    pub fn advance(&mut self, done_bytes: u64) {
        self.at += done_bytes;
        self.left_bytes -= done_bytes;
    }
}

/// Carries out requests and puts their replies into a send buffer, which goes to `stream` when it is full.
///
/// Who is told not to wait gets back what is left of a request that would, once as much of it is done and
/// answered as can be.
pub(super) struct Replies<'a, W> {
    pub device: &'a OpenDevice,
    pub headers: Headers,
    pub stopping: &'a AtomicBool,
    /// Where memory for long replies comes from; none if there is memory for all replies already.
    pub budget: Option<&'a Arc<Budget>>,
    pub unsent: &'a mut SendBuffer,
    pub stream: &'a mut W,
}

impl<W: Write> Replies<'_, W> {
    /// Carries out the rest of a request that has no payload, and has been checked, and answers it.
    pub fn execute(&mut self, request: &Request, rest: Rest, wait: Wait) -> io::Result<Option<Rest>> {
        match request.command {
            Command::Read => self.read(request, rest, wait),
            Command::Trim => self.in_slices(request, rest, |device, at, len_bytes| {
                device.discard(at, len_bytes).map(|()| len_bytes)
            }),
            // `FAST_ZERO` asks to fail at once where zeroes are no faster than a write: here they
            // always are, because a page of zeroes is a change of its slot, and nothing is compressed
            // or stored.
            Command::WriteZeroes => {
                let allocate = request.has(command_flags::NO_HOLE);
                self.in_slices(request, rest, |device, at, len_bytes| {
                    device.zero_some(at, len_bytes, allocate, wait)
                })
            }
            // What is not in memory comes back when it is read, if it is worth it. A write is visible to every
            // connection before it is answered, so a flush has nothing left to do.
            Command::Cache | Command::Flush => self.succeed(request).map(|()| None),
            // Writes and block status have a payload, or may have; a connection ends on `Disc`, and refuses what
            // is unknown: none of them comes here.
            Command::Write | Command::BlockStatus | Command::Disc | Command::Unknown => {
                self.fail(request, &MISPLACED.into()).map(|()| None)
            }
        }
    }

    /// Carries out a request without data, which may be as long as the disk, so that a server that
    /// stops does not wait for its end. `act` says how many bytes it has done.
    fn in_slices(
        &mut self,
        request: &Request,
        mut rest: Rest,
        act: impl Fn(&OpenDevice, u64, u64) -> uzram::Result<u64>,
    ) -> io::Result<Option<Rest>> {
        loop {
            // To a page's boundary, so that no page is cut in two.
            let slice_bytes = rest.left_bytes.min(SLICE_BYTES - rest.at % PAGE_SIZE as u64);
            let done_bytes = match act(self.device, rest.at, slice_bytes) {
                Ok(done_bytes) => done_bytes,
                Err(error) => return self.fail(request, &error.into()).map(|()| None),
            };
            rest.advance(done_bytes);
            if rest.left_bytes == 0 {
                return self.succeed(request).map(|()| None);
            }
            if done_bytes < slice_bytes {
                return Ok(Some(rest));
            }
            if self.stopping.load(Ordering::Relaxed) {
                return self.fail(request, &STOPPING.into()).map(|()| None);
            }
        }
    }

    /// Stores the rest of a write, waiting for that as long as it takes, and answers it.
    pub fn write_waiting(&mut self, request: &Request, at: u64, data: &[u8]) -> io::Result<()> {
        match self.device.write(at, data) {
            Ok(()) => self.succeed(request),
            Err(error) => self.fail(request, &error.into()),
        }
    }

    /// Sends what is unsent.
    pub fn flush(&mut self) -> io::Result<()> {
        self.unsent.flush(self.stream)
    }
}
