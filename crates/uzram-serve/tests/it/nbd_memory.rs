//! The memory of a session: a request allocates nothing, and a session no more than its limit. What garbage
//! does, the fuzz targets `nbd_handshake` and `nbd_transmission` test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::alone::alone;
use crate::common::{cmd, device, info_request, option_bytes, request_bytes};
use uzram_serve::Exports;
use uzram_serve::nbd::proto::option;
use uzram_serve::nbd::{BUFFER_BYTES, Buffers, serve_stream};

/// Counts allocations, and records the peak of allocated bytes.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static NOW_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Relaxed);
        let now = NOW_BYTES.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK_BYTES.fetch_max(now, Relaxed);
        // SAFETY: the caller upholds `alloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller guarantees that `pointer` came from this allocator, that is, `System`, with this
        // layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A client that sends all of `input`, and discards replies.
struct Script<'a> {
    input: &'a [u8],
    sent_bytes: usize,
    /// Allocations when the last byte was read.
    calls_at_end: usize,
}

impl Read for Script<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.input.len().min(buf.len());
        buf[..len].copy_from_slice(&self.input[..len]);
        self.input = &self.input[len..];
        self.calls_at_end = CALLS.load(Relaxed);
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
fn a_session_allocates_its_buffers_and_nothing_for_a_request() {
    // Alone in its process, whose allocations are counted.
    if !alone("nbd_memory::a_session_allocates_its_buffers_and_nothing_for_a_request") {
        return;
    }
    let exports = Exports::new([device("1M")]);
    let allocations = |rounds: usize| {
        let input = session(rounds);
        let mut client = Script { input: &input, sent_bytes: 0, calls_at_end: 0 };
        let (before, before_bytes) = (CALLS.load(Relaxed), NOW_BYTES.load(Relaxed));
        PEAK_BYTES.store(before_bytes, Relaxed);
        serve_stream(&mut client, &exports, &mut Buffers::new(BUFFER_BYTES).unwrap()).unwrap();
        assert!(client.sent_bytes > rounds * 4096);
        let peak_bytes = PEAK_BYTES.load(Relaxed) - before_bytes;
        assert!(peak_bytes <= 2 * BUFFER_BYTES + (64 << 10), "{peak_bytes} bytes");
        client.calls_at_end - before
    };
    allocations(10);
    assert_eq!(allocations(10), allocations(1000));
}
