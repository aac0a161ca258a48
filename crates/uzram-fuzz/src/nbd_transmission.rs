//! A client that chose an export and then sends requests made from the input: mostly ones that make
//! sense, and one at last that may not.
//!
//! Promises: every request is answered once, in order, in the negotiated form; what makes sense
//! succeeds (without `mem_limit`) and what does not is refused; reads agree with a naive model; a
//! session that breaks the protocol has its good requests answered, and ends; `mem_charged` stays
//! within `mem_limit`.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{self, MAX_PAYLOAD_BYTES, NbdError, chunk, command, command_flags, option};
use uzram_serve::nbd::serve_stream;

use crate::input::Input;
use crate::model::Model;
use crate::wire::{self, Header, Heard, Wire};

const DISK_BYTES: usize = 1 << 20;
/// Requests of one input, and the bytes that they may move together: a bound on its time.
const MAX_REQUESTS: usize = 48;
const MAX_MOVED_BYTES: usize = 4 << 20;
/// How many pieces a torn session may have, for the same reason.
const MAX_PIECES: usize = 16 << 10;
/// A write that is longer ends the connection.
const MAX_DRAIN_BYTES: u32 = 2 * MAX_PAYLOAD_BYTES;

/// How the client's part ends.
enum End {
    /// It hangs up, or says so first.
    Clean,
    /// It hangs up within a message.
    Torn,
    /// It breaks the protocol.
    Violation,
    /// It sends bytes that may mean anything.
    Garbage,
}

/// All that the client says, and what it means.
struct Script {
    structured: bool,
    said: Vec<u8>,
    /// Whole requests, with a write's payload.
    requests: Vec<(Header, Vec<u8>)>,
    /// A write whose payload is cut short: it may be carried out in part.
    cut_write: Option<Header>,
    end: End,
    /// Bytes that requests may still move.
    budget_bytes: usize,
}

/// Runs one input.
///
/// # Panics
/// When a promise is broken; that is what it is for.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let settings = input.byte();
    let limit = input.one_of(&["0", "64K", "256K", "768K"]);
    let tear = input.byte();
    let device = Device::new("zram0").expect("a good name");
    for (name, value) in [
        ("comp_algorithm", if settings & 1 == 0 { "lz4" } else { "zstd" }),
        ("checksum", if settings & 2 == 0 { "0" } else { "1" }),
        ("mem_limit", limit),
        ("disksize", "1M"),
    ] {
        device.set(name, value).expect(name);
    }
    let (structured, go) = (settings & 4 != 0, settings & 8 != 0);
    let budget_bytes =
        if tear == 0 { MAX_MOVED_BYTES } else { MAX_MOVED_BYTES.min(MAX_PIECES * usize::from(tear)) };
    let script = Script::new(&mut input, structured, go, budget_bytes);
    let mut wire = Wire::new(&script.said, tear);
    let result = serve_stream(&mut wire, &Exports::new([Arc::clone(&device)]));

    let mut model = Model::new(DISK_BYTES);
    let mut heard = Heard(&wire.heard);
    heard.take(greeting_bytes(structured, go));
    for (header, payload) in &script.requests {
        let reply = Reply::take(&mut heard, script.structured, header);
        judge(&mut model, header, payload, &reply, script.structured, limit != "0");
    }
    script.check_end(&result, heard.0);
    if let Some(range) = script.cut_write.and_then(|cut| model.range(cut.offset, cut.len_bytes.into())) {
        model.lose(range);
    }
    let stats = device.stats();
    assert!(
        stats.mem_limit_bytes == 0 || stats.mem_charged_bytes <= stats.mem_limit_bytes,
        "{stats:?} is over the limit"
    );
    if !matches!(script.end, End::Garbage) {
        model.check_stats(&stats);
        model.check_all(&device.open().expect("it has a size"));
    }
    device.set("reset", "1").expect("nobody has it open when the session is over");
}

/// Bytes the server sends in the handshake of [`Script::new`].
const fn greeting_bytes(structured: bool, go: bool) -> usize {
    let acknowledgement = 20;
    18 + if structured { acknowledgement } else { 0 } + if go { 20 + 12 + acknowledgement } else { 10 }
}

impl Script {
    fn new(input: &mut Input<'_>, structured: bool, go: bool, budget_bytes: usize) -> Script {
        let mut said = 3u32.to_be_bytes().to_vec();
        if structured {
            said.extend(wire::option(option::STRUCTURED_REPLY, &[]));
        }
        said.extend(if go {
            wire::option(option::GO, &wire::info_request(b"zram0", &[]))
        } else {
            wire::option(option::EXPORT_NAME, b"")
        });
        let mut script =
            Script { structured, said, requests: Vec::new(), cut_write: None, end: End::Clean, budget_bytes };
        while !input.is_empty() && script.requests.len() < MAX_REQUESTS && script.add(input) {}
        script
    }

    /// Adds a request; `false` when nothing can follow it.
    fn add(&mut self, input: &mut Input<'_>) -> bool {
        let kind = input.byte();
        match kind {
            0..=239 => self.add_request(input, kind),
            240..=243 => {
                let mut header = self.header(input, command::DISC).bytes();
                // Whatever follows is not read.
                header.extend_from_slice(input.bytes(32));
                self.said.extend(header);
                false
            }
            244..=247 => {
                let mut header = self.header(input, u16::from(kind)).bytes();
                header[usize::from(input.byte() % 4)] ^= 1 << (input.byte() % 8);
                self.said.extend(header);
                self.end = End::Violation;
                false
            }
            248..=251 => {
                let header = self.header(input, command::READ).bytes();
                let cut_bytes = 1 + usize::from(input.byte()) % (header.len() - 1);
                self.said.extend_from_slice(&header[..cut_bytes]);
                self.end = End::Torn;
                false
            }
            _ => {
                self.said.extend_from_slice(input.bytes(usize::MAX));
                self.end = End::Garbage;
                false
            }
        }
    }

    fn header(&self, input: &mut Input<'_>, command: u16) -> Header {
        let flags = input.byte();
        Header {
            // Most requests have good flags.
            flags: match flags {
                0..=127 => 0,
                128..=159 => command_flags::FUA,
                160..=191 => command_flags::DF,
                192..=223 => command_flags::NO_HOLE,
                _ => u16::from(flags) << (flags % 9),
            },
            command,
            cookie: 0x636f_6f6b_6965_0000 + self.requests.len() as u64,
            offset: offset(input),
            len_bytes: length(input),
        }
    }

    fn add_request(&mut self, input: &mut Input<'_>, kind: u8) -> bool {
        use command::*;
        let commands = [READ, READ, WRITE, WRITE, WRITE, FLUSH, TRIM, WRITE_ZEROES, 5, 7];
        let mut header = self.header(input, commands[usize::from(kind) % commands.len()]);
        if header.command == FLUSH && header.flags == 0 {
            (header.offset, header.len_bytes) = (0, 0);
        }
        let len_bytes = header.len_bytes as usize;
        // A longer one is refused, or its payload cut.
        let moved_bytes = if len_bytes <= DISK_BYTES { len_bytes } else { 0 };
        let Some(left_bytes) = self.budget_bytes.checked_sub(moved_bytes) else { return false };
        self.budget_bytes = left_bytes;
        self.said.extend(header.bytes());
        if header.command != WRITE {
            self.requests.push((header, Vec::new()));
            return true;
        }
        let cut = input.byte() == 0xff;
        if len_bytes <= DISK_BYTES && !cut {
            let payload = input.contents(len_bytes);
            self.said.extend_from_slice(&payload);
            self.requests.push((header, payload));
            return true;
        }
        let payload_bytes = usize::from(input.u16()).min(len_bytes.saturating_sub(1));
        self.said.extend(input.contents(payload_bytes));
        if len_bytes == 0 {
            self.requests.push((header, Vec::new()));
        } else {
            self.end = if header.len_bytes > MAX_DRAIN_BYTES { End::Violation } else { End::Torn };
            self.cut_write = Some(header);
        }
        false
    }

    fn check_end(&self, result: &io::Result<()>, unexpected: &[u8]) {
        let kind = result.as_ref().err().map(io::Error::kind);
        match self.end {
            End::Garbage => {
                assert!(matches!(kind, None | Some(ErrorKind::InvalidData | ErrorKind::UnexpectedEof)));
                return;
            }
            End::Clean => assert_eq!(kind, None),
            End::Torn => assert_eq!(kind, Some(ErrorKind::UnexpectedEof)),
            End::Violation => assert_eq!(kind, Some(ErrorKind::InvalidData)),
        }
        assert!(unexpected.is_empty(), "more replies than requests: {unexpected:?}");
    }
}

/// Mostly on the disk, at a page's edge or near it.
fn offset(input: &mut Input<'_>) -> u64 {
    let page = u64::from(input.byte()) << 12;
    match input.byte() {
        0..=99 => page,
        100..=199 => page + u64::from(input.u16() % 4096),
        200..=249 => page.saturating_sub(u64::from(input.byte())),
        _ => input.u64(),
    }
}

fn length(input: &mut Input<'_>) -> u32 {
    match input.byte() {
        count @ 0..=79 => u32::from(count % 8) << 12,
        80..=159 => u32::from(input.u16() % 9000),
        160..=229 => u32::from(input.u16()),
        230..=247 => u32::from(input.u16()) << 4,
        _ => input.u32(),
    }
}

/// One whole reply.
struct Reply {
    /// 0 for success.
    error: u32,
    data: Vec<u8>,
}

impl Reply {
    fn take(heard: &mut Heard<'_>, structured: bool, request: &Header) -> Reply {
        if structured && request.command == command::READ {
            return Reply::take_chunks(heard, request);
        }
        let magic = heard.u32();
        if structured && magic == proto::NBD_STRUCTURED_REPLY_MAGIC {
            let (flags, kind) = (heard.u16(), heard.u16());
            assert_eq!((flags, kind), (chunk::FLAG_DONE, chunk::ERROR), "{request:?}");
            return Reply::take_error(heard, request);
        }
        assert_eq!(magic, proto::NBD_SIMPLE_REPLY_MAGIC, "{request:?}");
        let error = heard.u32();
        assert_eq!(heard.u64(), request.cookie, "{request:?}");
        let carries_data = error == 0 && request.command == command::READ;
        let data = heard.take(if carries_data { request.len_bytes as usize } else { 0 }).to_vec();
        Reply { error, data }
    }

    /// The chunks of a structured reply to a read: in our server in order, without gaps.
    fn take_chunks(heard: &mut Heard<'_>, request: &Header) -> Reply {
        let mut data = Vec::new();
        for chunks in 1.. {
            assert_eq!(heard.u32(), proto::NBD_STRUCTURED_REPLY_MAGIC, "{request:?}");
            let (flags, kind) = (heard.u16(), heard.u16());
            match kind {
                chunk::ERROR => {
                    assert_eq!(flags, chunk::FLAG_DONE);
                    return Reply::take_error(heard, request);
                }
                chunk::NONE => {
                    assert_eq!((flags, request.len_bytes), (chunk::FLAG_DONE, 0));
                    assert_eq!((heard.u64(), heard.u32()), (request.cookie, 0));
                    break;
                }
                _ => assert_eq!(kind, chunk::OFFSET_DATA, "{request:?}"),
            }
            assert_eq!(heard.u64(), request.cookie, "{request:?}");
            let len_bytes = heard.u32() as usize;
            assert!(len_bytes > 8, "a data chunk holds data");
            assert_eq!(heard.u64(), request.offset + data.len() as u64, "{request:?}");
            data.extend_from_slice(heard.take(len_bytes - 8));
            if flags & chunk::FLAG_DONE != 0 {
                assert!(chunks == 1 || request.flags & command_flags::DF == 0, "{request:?} in fragments");
                break;
            }
        }
        assert_eq!(data.len(), request.len_bytes as usize, "{request:?}");
        Reply { error: 0, data }
    }

    /// The rest of an error chunk, behind its type.
    fn take_error(heard: &mut Heard<'_>, request: &Header) -> Reply {
        assert_eq!(heard.u64(), request.cookie, "{request:?}");
        let (len_bytes, error, message_bytes) = (heard.u32(), heard.u32(), heard.u16());
        assert_eq!(len_bytes, 6 + u32::from(message_bytes));
        let message = str::from_utf8(heard.take(message_bytes.into()));
        assert!(message.is_ok_and(|message| !message.is_empty()), "{request:?}: {message:?}");
        assert_ne!(error, 0, "{request:?}");
        Reply { error, data: Vec::new() }
    }
}

/// Compares a reply with what the model says, and lets the model follow.
fn judge(model: &mut Model, header: &Header, payload: &[u8], reply: &Reply, structured: bool, limited: bool) {
    use command::*;
    let range = model.range(header.offset, header.len_bytes.into());
    let Some(range) = range.filter(|_| is_valid(header, structured)) else {
        let refusals = [NbdError::Inval, NbdError::NoSpc, NbdError::Overflow].map(|error| error as u32);
        assert!(refusals.contains(&reply.error), "{header:?} answered with {}", reply.error);
        return;
    };
    if reply.error != 0 {
        let full = limited && reply.error == NbdError::NoSpc as u32;
        assert!(full && matches!(header.command, WRITE | WRITE_ZEROES), "{header:?} failed: {}", reply.error);
        return model.lose(range);
    }
    match header.command {
        READ => model.check_read(header.offset, &reply.data, "a read"),
        WRITE => model.write(header.offset, payload),
        TRIM => model.discard(range),
        WRITE_ZEROES => model.write_zeroes(range),
        _ => {}
    }
}

/// Whether a request that lies on the disk makes sense.
fn is_valid(header: &Header, structured: bool) -> bool {
    use command::*;
    let known = match header.command {
        WRITE_ZEROES => command_flags::FUA | command_flags::NO_HOLE,
        READ if structured => command_flags::FUA | command_flags::DF,
        READ | WRITE | TRIM => command_flags::FUA,
        FLUSH if (header.offset, header.len_bytes) == (0, 0) => command_flags::FUA,
        _ => return false,
    };
    header.flags & !known == 0
}

/// Inputs to begin with.
pub fn seeds() -> Vec<Vec<u8>> {
    // A request's kind and flags; its page, at the page's edge; its pages; what else it has.
    let request = |kind: u8, page: u8, pages: u8, rest: &[u8]| [&[kind, 0, page, 0, pages], rest].concat();
    let read = |page, pages| request(0, page, pages, &[]);
    let write = |page, pages, contents: &[u8]| request(2, page, pages, &[&[0], contents].concat());
    let (same, text, noise) = (&[0, 0x77][..], b"\x01\x0bcompressible", &[2, 9][..]);
    let flush = request(5, 0, 0, &[]);
    let trim = request(6, 4, 3, &[]);
    let zeroes = request(7, 3, 2, &[]);
    let all =
        [write(3, 4, text), write(5, 2, noise), write(9, 1, same), trim, zeroes, flush, read(0, 7)].concat();
    // Two bytes off the page's edge, and a length in bytes.
    let unaligned =
        [&[2, 0, 7, 150, 2, 0, 100, 0x70, 0x17, 0], noise, &[0, 0, 7, 150, 0, 0, 100, 0x28, 0x23]].concat();
    let filling: Vec<u8> = (0..32).flat_map(|index| write(index * 7, 7, &[2, index])).collect();
    let long_reads = [0, 170].map(|flags| [0, flags, 0, 0, 240, 0, 0xf0]).concat();
    let bad_magic = [244, 0, 0, 0, 1, 2, 3];
    let cut_write = [2, 0, 1, 0, 4, 0xff, 0, 0x20, 2, 1];
    let bad_flags = [0, 0xff, 0, 0, 1, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0, 0x80, 1];
    // Codec, checksum, structured replies and `GO`; the limit; how messages are torn.
    let with = |settings: [u8; 3], requests: &[u8]| [&settings, requests].concat();
    vec![
        with([0, 0, 0], &all),
        with([15, 0, 0], &[&all[..], &[240, 0]].concat()),
        with([4, 0, 100], &unaligned),
        with([12, 1, 0], &filling),
        with([1, 2, 0], &filling),
        with([4, 0, 0], &long_reads),
        with([0, 0, 0], &[&all[..], &long_reads].concat()),
        with([6, 0, 33], &[&all[..], &bad_magic].concat()),
        with([4, 0, 7], &[&all[..], &cut_write].concat()),
        with([13, 3, 0], &[&bad_flags[..], &all[..]].concat()),
        with(
            [4, 0, 0],
            &[
                &[252],
                &Header { flags: 0, command: 1, cookie: 1, offset: 0, len_bytes: 4 }.bytes()[..],
                b"abcd",
            ]
            .concat(),
        ),
    ]
}
