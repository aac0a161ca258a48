//! Replies to `NBD_CMD_BLOCK_STATUS`: a chunk for each metadata context, with a descriptor for each run of pages that
//! have the same status in it.
//!
//! A reply may cover less than the request; the client then asks again from its end. A reply ends at a quarter of the
//! send buffer, which is thousands of descriptors, or at [`MAX_COVERED_BYTES`], so that a request takes some
//! milliseconds at most.

use std::io::{self, Read, Write};

use uzram::device::OpenDevice;

use super::connection::Connection;
use super::replies::{Failure, Replies};
use crate::nbd::meta_context::{Context, Contexts};
use crate::nbd::proto::{Bytes, chunk, command_flags};
use crate::nbd::reply::put_chunk_header;
use crate::nbd::request::{Headers, Refusal, Request};

/// The most bytes of the disk that one chunk covers: 262,144 pages.
const MAX_COVERED_BYTES: u64 = 1 << 30;

impl Headers {
    /// Bytes of a chunk's payload before its descriptors.
    const fn status_prefix_bytes(self) -> usize {
        if matches!(self, Headers::Extended) { 8 } else { 4 }
    }

    /// Bytes of a descriptor: its length and its status.
    const fn descriptor_bytes(self) -> usize {
        if matches!(self, Headers::Extended) { 16 } else { 8 }
    }

    fn put_descriptor(self, out: &mut [u8], len_bytes: u64, status: u32) {
        if self == Headers::Extended {
            out[..8].copy_from_slice(&len_bytes.to_be_bytes());
            out[8..].copy_from_slice(&u64::from(status).to_be_bytes());
        } else {
            // At most the requested length, which has 32 bits in a compact request.
            out[..4].copy_from_slice(&(len_bytes as u32).to_be_bytes());
            out[4..].copy_from_slice(&status.to_be_bytes());
        }
    }
}

impl<S: Read + Write> Connection<'_, S> {
    /// Replies to a request that has passed `Request::check`, which does not check the range in a payload.
    pub(super) fn block_status(&mut self, request: &Request) -> io::Result<()> {
        if !request.has(command_flags::PAYLOAD_LEN) {
            return self.replies.report_status(request, request.len_bytes, self.contexts);
        }
        match self.status_payload(request)? {
            Ok((len_bytes, contexts)) => self.replies.report_status(request, len_bytes, contexts),
            Err(refusal) => self.replies.fail(request, refusal),
        }
    }

    /// Receives a payload: a length, and a selection of the contexts that were set.
    fn status_payload(&mut self, request: &Request) -> io::Result<Result<(u64, Contexts), Refusal>> {
        // A length and the id of each context: a longer payload names one twice, or an unknown one.
        let longest_bytes = 8 + 4 * Context::ALL.len();
        let Some(payload_bytes) =
            usize::try_from(request.payload_bytes).ok().filter(|bytes| *bytes <= longest_bytes)
        else {
            self.discard_payload(request.payload_bytes)?;
            return Ok(Err(Refusal::invalid("a payload of more contexts than there are")));
        };
        while self.received.available().len() < payload_bytes {
            self.receive_more()?;
        }
        let parsed = parse_payload(&self.received.available()[..payload_bytes], self.contexts);
        self.received.consume(payload_bytes);
        let Some((len_bytes, contexts)) = parsed else {
            let message = "a payload is a length and the numbers of contexts that were set, each once";
            return Ok(Err(Refusal::invalid(message)));
        };
        let flags = request.flags & !command_flags::PAYLOAD_LEN;
        let effective = Request { flags, len_bytes, ..*request };
        let checked = effective.check(self.replies.device.size_bytes(), self.replies.headers);
        Ok(checked.map(|()| (len_bytes, contexts)))
    }
}

impl<W: Write> Replies<'_, W> {
    /// Adds a chunk for each of `contexts`.
    fn report_status(&mut self, request: &Request, len_bytes: u64, contexts: Contexts) -> io::Result<()> {
        if contexts.is_empty() {
            return self.fail(request, Refusal::invalid("no metadata context was set"));
        }
        if len_bytes == 0 {
            return self.fail(request, Refusal::invalid("a request of 0 bytes has no status"));
        }
        let count = contexts.iter().count();
        for (index, context) in contexts.iter().enumerate() {
            let flags = if index + 1 == count { chunk::FLAG_DONE } else { 0 };
            if let Err(failure) = self.status_chunk(request, len_bytes, context, flags)? {
                return self.fail(request, failure);
            }
        }
        Ok(())
    }

    fn status_chunk(
        &mut self,
        request: &Request,
        len_bytes: u64,
        context: Context,
        flags: u16,
    ) -> io::Result<Result<(), Failure>> {
        let headers = self.headers;
        let header_bytes = headers.reply_bytes() + headers.status_prefix_bytes();
        let most_bytes = match headers.descriptor_bytes() {
            one_bytes if request.has(command_flags::REQ_ONE) => one_bytes,
            one_bytes => (self.unsent.capacity_bytes() / 4).next_multiple_of(one_bytes),
        };
        let room = self.unsent.room(self.stream, header_bytes + most_bytes)?;
        let (header, descriptors) = room.split_at_mut(header_bytes);
        match put_descriptors(self.device, headers, context, request.offset, len_bytes, descriptors) {
            Ok(count) => {
                let (header, prefix) = header.split_at_mut(headers.reply_bytes());
                let filled_bytes = count * headers.descriptor_bytes();
                let payload_bytes = prefix.len() + filled_bytes;
                let kind = match headers {
                    Headers::Extended => chunk::BLOCK_STATUS_EXT,
                    Headers::Simple | Headers::Structured => chunk::BLOCK_STATUS,
                };
                put_chunk_header(header, headers, flags, kind, request, payload_bytes);
                prefix[..4].copy_from_slice(&context.id().to_be_bytes());
                if headers == Headers::Extended {
                    prefix[4..].copy_from_slice(&(count as u32).to_be_bytes());
                }
                self.unsent.retract(most_bytes - filled_bytes);
                Ok(Ok(()))
            }
            Err(error) => {
                self.unsent.retract(header_bytes + most_bytes);
                Ok(Err(error.into()))
            }
        }
    }
}

/// Fills `out` with descriptors of the `len_bytes` from `offset` on, up to the end of `out` or [`MAX_COVERED_BYTES`],
/// and returns their number.
fn put_descriptors(
    device: &OpenDevice,
    headers: Headers,
    context: Context,
    offset: u64,
    len_bytes: u64,
    out: &mut [u8],
) -> uzram::Result<usize> {
    let mut slots = out.chunks_exact_mut(headers.descriptor_bytes());
    let (most, mut count) = (slots.len(), 0);
    let mut put = |(len_bytes, status)| {
        if let Some(slot) = slots.next() {
            headers.put_descriptor(slot, len_bytes, status);
            count += 1;
        }
        count
    };
    let (mut at, mut left_bytes) = (offset, len_bytes.min(MAX_COVERED_BYTES));
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

/// Parses a payload: a length in bytes, and the ids of at least one context of `set`, none twice.
fn parse_payload(payload: &[u8], set: Contexts) -> Option<(u64, Contexts)> {
    let mut bytes = Bytes(payload);
    let len_bytes = bytes.u64()?;
    let mut contexts = Contexts::default();
    while !bytes.0.is_empty() {
        let id = bytes.u32()?;
        let context = set.iter().find(|context| context.id() == id)?;
        if !contexts.insert(context) {
            return None;
        }
    }
    (!contexts.is_empty()).then_some((len_bytes, contexts))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_payload_names_contexts_that_were_set_each_once() {
        let payload = |len: u64, ids: &[u32]| {
            let ids = ids.iter().flat_map(|id| id.to_be_bytes());
            len.to_be_bytes().into_iter().chain(ids).collect::<Vec<_>>()
        };
        let [one, two] = Context::ALL;
        let all: Contexts = Context::ALL.into_iter().collect();
        let only_two: Contexts = [two].into_iter().collect();
        let good = payload(5, &[two.id(), one.id()]);
        assert_eq!(parse_payload(&good, all), Some((5, all)));
        assert_eq!(parse_payload(&payload(u64::MAX, &[two.id()]), all), Some((u64::MAX, only_two)));
        assert_eq!(parse_payload(&good, only_two), None, "the first was not set");
        for bad in [&[][..], &[one.id(), one.id()], &[0], &[77]] {
            assert_eq!(parse_payload(&payload(5, bad), all), None, "{bad:?}");
        }
        for len in (0..good.len()).filter(|len| *len != 12) {
            assert_eq!(parse_payload(&good[..len], all), None, "cut at {len}");
        }
    }

    #[test]
    fn descriptors_are_runs_of_the_same_status() {
        let device = uzram::device::Device::new("zram0").unwrap();
        device.set("disksize", "2G").unwrap();
        let disk = device.open().unwrap();
        disk.write(4096, &[1; 4096]).unwrap();
        disk.write(8192, b"abc").unwrap();
        let told = |headers: Headers, context, offset, len, most: usize| {
            let mut out = vec![0; most * headers.descriptor_bytes()];
            let count = put_descriptors(&disk, headers, context, offset, len, &mut out).unwrap();
            let number = |bytes: &[u8]| bytes.iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
            let half = headers.descriptor_bytes() / 2;
            out.chunks(2 * half)
                .take(count)
                .map(|d| (number(&d[..half]), number(&d[half..])))
                .collect::<Vec<_>>()
        };
        for headers in [Headers::Structured, Headers::Extended] {
            let [allocation, state] = Context::ALL.map(|context| told(headers, context, 10, 20_000, 9));
            assert_eq!(allocation, [(4086, 3), (8192, 0), (7722, 3)]);
            assert_eq!(state, [(4086, 0), (4096, 2), (4096, 3), (7722, 0)]);
            assert_eq!(told(headers, Context::Allocation, 10, 20_000, 2), allocation[..2]);
            assert_eq!(told(headers, Context::State, 10, 20_000, 1), state[..1]);
            let cut = told(headers, Context::State, 16384, u64::from(u32::MAX) / 4 * 2, 9);
            assert_eq!(cut, [(MAX_COVERED_BYTES, 0)], "bounded work");
        }
    }
}
