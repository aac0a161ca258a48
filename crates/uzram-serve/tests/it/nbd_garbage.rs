//! Sessions of garbage, over memory: no input may cause a panic, a loop, or more memory use than a
//! session's limit; and a valid session allocates nothing for a request.
//!
//! One test function, because it counts the allocations of the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::alone::alone;
use crate::common::{Random, cmd, device, info_request, option_bytes, request_bytes, seed};
use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::option;
use uzram_serve::nbd::{BUFFER_BYTES, Buffers};

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
    /// The most bytes of one read, so that messages are split.
    most: usize,
    sent_bytes: usize,
    /// Allocations when the last byte was read.
    calls_at_end: usize,
}

impl<'a> Script<'a> {
    fn new(input: &'a [u8], most: usize) -> Self {
        Script { input, most, sent_bytes: 0, calls_at_end: 0 }
    }
}

impl Read for Script<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.input.len().min(buf.len()).min(self.most);
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

/// Serves a session with its own buffers.
fn serve_stream(client: &mut Script<'_>, exports: &Exports) -> io::Result<()> {
    uzram_serve::nbd::serve_stream(client, exports, &mut Buffers::new(BUFFER_BYTES)?)
}

fn negotiated(structured: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    if structured {
        bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    }
    bytes.extend(option_bytes(option::LIST, &[]));
    bytes.extend(option_bytes(option::INFO, &info_request(b"zram0", &[1, 2, 3])));
    bytes.extend(option_bytes(option::GO, &info_request(b"", &[3])));
    bytes
}

/// Returns a session of mostly valid requests for a device of 1 MiB.
fn session(random: &mut Random) -> Vec<u8> {
    let mut bytes = negotiated(random.below_u64(2) == 0);
    for cookie in 0..random.below_u64(60) {
        let command = [0, 0, 1, 1, 3, 4, 5, 6, 7][random.below_u64(9) as usize];
        let flags = if random.below_u64(4) == 0 { random.below_u64(16) as u16 } else { 0 };
        let offset = random.below_u64((1 << 20) + 100);
        let longest = if random.below_u64(10) == 0 { 400_000 } else { 20_000 };
        let len = random.below_u64(longest) as u32;
        bytes.extend(request_bytes(flags, command, cookie, offset, len));
        if command == cmd::WRITE {
            bytes.extend(random.bytes(len as usize));
        }
    }
    bytes
}

fn garbage(device: &Arc<Device>, seed: u64) {
    let exports = Exports::new([Arc::clone(device)]);
    let mut random = Random::new(seed);
    let before_bytes = NOW_BYTES.load(Relaxed);
    for round in 0..3000 {
        let mut input = match round % 4 {
            0 => {
                let len = random.below_u64(300) as usize;
                random.bytes(len)
            }
            // A valid beginning, so that the garbage gets further.
            1 => [negotiated(round % 8 == 1), random.bytes(200)].concat(),
            _ => session(&mut random),
        };
        let len = input.len() as u64;
        match round % 4 {
            2 => input.truncate(random.below_u64(len + 1) as usize),
            3 => {
                for _ in 0..1 + random.below_u64(4) {
                    input[random.below_u64(len) as usize] ^= 1 << random.below_u64(8);
                }
            }
            _ => {}
        }
        let input_bytes = input.capacity();
        let most = [1 + random.below_u64(64) as usize, usize::MAX][round % 2];
        PEAK_BYTES.store(NOW_BYTES.load(Relaxed), Relaxed);
        let mut client = Script::new(&input, most);
        // Any result is fine, as long as the session ends.
        let _ = serve_stream(&mut client, &exports);
        let peak_bytes = PEAK_BYTES.load(Relaxed) - before_bytes - input_bytes;
        // Two buffers; a long unfragmented reply has at most the device's 1 MiB; an option 64 KiB.
        assert!(
            peak_bytes <= 2 * BUFFER_BYTES + (1 << 20) + (128 << 10),
            "{peak_bytes} bytes, round {round}"
        );
    }
}

/// Every prefix of a session ends cleanly, wherever it is cut.
fn every_prefix(device: &Arc<Device>) {
    let exports = Exports::new([Arc::clone(device)]);
    let mut whole = negotiated(true);
    whole.extend(request_bytes(0, cmd::WRITE, 1, 10, 30));
    whole.extend([5; 30]);
    whole.extend(request_bytes(0, cmd::READ, 2, 0, 8192));
    whole.extend(request_bytes(0, cmd::DISC, 3, 0, 0));
    for len in 0..whole.len() {
        let result = serve_stream(&mut Script::new(&whole[..len], usize::MAX), &exports);
        if let Err(error) = result {
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "cut at {len}: {error}");
        }
    }
    serve_stream(&mut Script::new(&whole, 7), &exports).unwrap();
}

/// After the handshake a session allocates its two buffers and then nothing, however long it is.
fn requests_allocate_nothing(device: &Arc<Device>) {
    let exports = Exports::new([Arc::clone(device)]);
    let allocations = |rounds: usize| {
        let mut input = negotiated(true);
        for _ in 0..rounds {
            input.extend(request_bytes(0, cmd::WRITE, 1, 4096, 4096));
            input.extend([9; 4096]);
            input.extend(request_bytes(0, cmd::READ, 2, 4096, 4096));
            input.extend(request_bytes(0, cmd::READ, 3, 1 << 30, 4096));
            input.extend(request_bytes(0, cmd::FLUSH, 4, 0, 0));
        }
        let mut client = Script::new(&input, usize::MAX);
        let before = CALLS.load(Relaxed);
        serve_stream(&mut client, &exports).unwrap();
        assert!(client.sent_bytes > rounds * 4096);
        client.calls_at_end - before
    };
    allocations(10);
    assert_eq!(allocations(10), allocations(1000));
}

#[test]
fn garbage_costs_a_session_and_nothing_else() {
    if !alone("nbd_garbage::garbage_costs_a_session_and_nothing_else") {
        return;
    }
    let device = device("1M");
    every_prefix(&device);
    requests_allocate_nothing(&device);
    garbage(&device, seed());
}
