//! A request allocates nothing. What garbage does, the fuzz targets `nbd_handshake` and `nbd_transmission`
//! test.

use std::io::{self, Read, Write};

use crate::allocations;
use crate::common::{cmd, device, info_request, option_bytes, request_bytes};
use uzram_serve::Exports;
use uzram_serve::nbd::proto::option;
use uzram_serve::nbd::{BUFFER_BYTES, Buffers, serve_stream};

/// A client that sends all of `input`, and discards replies.
struct Script<'a> {
    input: &'a [u8],
    sent_bytes: usize,
    /// This thread's, when the last byte was read.
    allocations: u64,
}

impl Read for Script<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.input.len().min(buf.len());
        buf[..len].copy_from_slice(&self.input[..len]);
        self.input = &self.input[len..];
        self.allocations = allocations::count();
        Ok(len)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.sent_bytes += buf.len();
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A handshake, and so many writes, reads, refused reads and flushes.
fn session(rounds: usize) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    bytes.extend(option_bytes(option::INFO, &info_request(b"zram0", &[1, 2, 3])));
    bytes.extend(option_bytes(option::GO, &info_request(b"", &[3])));
    for _ in 0..rounds {
        bytes.extend(request_bytes(0, cmd::WRITE, 1, 4096, 4096));
        bytes.extend([9; 4096]);
        bytes.extend(request_bytes(0, cmd::READ, 2, 4096, 4096));
        bytes.extend(request_bytes(0, cmd::READ, 3, 1 << 30, 4096));
        bytes.extend(request_bytes(0, cmd::FLUSH, 4, 0, 0));
    }
    bytes
}

#[test]
fn a_session_allocates_nothing_for_a_request() {
    let exports = Exports::new([device("1M")]);
    let mut buffers = Buffers::new(BUFFER_BYTES).unwrap();
    let mut allocations = |rounds: usize| {
        let input = session(rounds);
        let mut client = Script { input: &input, sent_bytes: 0, allocations: 0 };
        let before = allocations::count();
        serve_stream(&mut client, &exports, &mut buffers, None).unwrap();
        assert!(client.sent_bytes > rounds * 4096);
        client.allocations - before
    };
    allocations(10);
    assert_eq!(allocations(10), allocations(1000));
}
