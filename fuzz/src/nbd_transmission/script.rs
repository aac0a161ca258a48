//! The client's messages, made from the input, and their meaning.

use std::io::{self, ErrorKind};

use uzram_serve::nbd::proto::{MAX_PAYLOAD_BYTES, command, command_flags, option, reply, transmission_flags};

use crate::input::Input;
use crate::nbd_client::{Client, Headers, context_request, info_request, option_bytes};

/// The most requests of one input, bytes that they may transfer together, and pages of contents that are slow
/// to compress: a bound on its time.
const MAX_REQUESTS: usize = 12;
const MAX_MOVED_BYTES: usize = 2 * DISK_BYTES;
const MAX_COMPRESSED_BYTES: usize = 3 << 12;
/// The most pieces of a torn session, for the same reason.
const MAX_PIECES: usize = 256;

const DISK_PAGES: usize = 8;
pub(super) const DISK_BYTES: usize = DISK_PAGES << 12;

pub(super) enum End {
    /// It disconnects, with or without saying so first.
    Clean,
    /// It disconnects within a message.
    Torn,
    /// It breaks the protocol.
    Violation,
    /// It sends bytes that may mean anything.
    Garbage,
}

pub(super) struct Script {
    pub headers: Headers,
    go: bool,
    /// The contexts it sets: `base:allocation` and `uzram:state`.
    sets: [bool; 2],
    pub said: Vec<u8>,
    /// Whole requests, with their payloads.
    pub requests: Vec<(Header, Vec<u8>)>,
    /// A write whose payload is cut short: it may be carried out in part.
    pub cut_write: Option<Header>,
    pub end: End,
    /// Bytes that requests may still transfer, and that a codec may still compress slowly.
    budget_bytes: usize,
    compressed_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// Only 32 bits in the compact form.
    pub len_bytes: u64,
}

impl Header {
    /// Returns the header as a client sends it.
    pub fn bytes(&self, headers: Headers) -> Vec<u8> {
        headers.request(self.flags, self.command, self.cookie, self.offset, self.len_bytes)
    }
}

const NAMES: [&str; 2] = ["base:allocation", "uzram:state"];

impl Script {
    /// `settings` chooses headers (2 bits), the way to choose the export, and contexts (2 bits).
    pub fn new(input: &mut Input<'_>, settings: u8, tear: u8) -> Script {
        let headers = [Headers::Extended, Headers::Simple, Headers::Structured, Headers::Extended]
            [usize::from(settings % 4)];
        let go = headers == Headers::Extended || settings & 4 == 0;
        let sets = [settings & 8 == 0, settings & 16 == 0].map(|set| set && headers != Headers::Simple);
        let mut said = 3u32.to_be_bytes().to_vec();
        match headers {
            Headers::Simple => {}
            Headers::Structured => said.extend(option_bytes(option::STRUCTURED_REPLY, &[])),
            Headers::Extended => said.extend(option_bytes(option::EXTENDED_HEADERS, &[])),
        }
        if sets != [false; 2] {
            let queries: Vec<&[u8]> =
                NAMES.iter().zip(sets).filter(|(_, set)| *set).map(|(name, _)| name.as_bytes()).collect();
            said.extend(option_bytes(option::SET_META_CONTEXT, &context_request(b"", &queries)));
        }
        said.extend(if go {
            option_bytes(option::GO, &info_request(b"zram0", &[]))
        } else {
            option_bytes(option::EXPORT_NAME, b"")
        });
        let torn_bytes = MAX_PIECES * usize::from(tear);
        let mut script = Script {
            headers,
            go,
            sets,
            said,
            requests: Vec::new(),
            cut_write: None,
            end: End::Clean,
            budget_bytes: if tear == 0 { MAX_MOVED_BYTES } else { MAX_MOVED_BYTES.min(torn_bytes) },
            compressed_bytes: MAX_COMPRESSED_BYTES,
        };
        while !input.is_empty() && script.requests.len() < MAX_REQUESTS && script.add(input) {}
        script
    }

    /// Parses the server's side of the handshake; returns the number of each context that was set, and
    /// whether it is uzram's own.
    pub fn take_handshake(&self, heard: &mut Client<&[u8]>) -> Vec<(u32, bool)> {
        heard.take::<18>();
        heard.headers = self.headers;
        let acknowledged = (reply::ACK, vec![]);
        match self.headers {
            Headers::Simple => {}
            Headers::Structured => assert_eq!(heard.option_reply(option::STRUCTURED_REPLY), acknowledged),
            Headers::Extended => assert_eq!(heard.option_reply(option::EXTENDED_HEADERS), acknowledged),
        }
        let mut contexts = Vec::new();
        for (name, _) in NAMES.iter().zip(self.sets).filter(|(_, set)| *set) {
            let (kind, data) = heard.option_reply(option::SET_META_CONTEXT);
            let (id, told) = data.split_first_chunk::<4>().expect("a number");
            assert_eq!((kind, told), (reply::META_CONTEXT, name.as_bytes()));
            contexts.push((u32::from_be_bytes(*id), *name == NAMES[1]));
        }
        if !contexts.is_empty() {
            assert_eq!(heard.option_reply(option::SET_META_CONTEXT), acknowledged);
        }
        let told = if self.go { heard.option_reply(option::GO).1.split_off(2) } else { heard.take_vec(10) };
        assert_eq!(told[..8], (DISK_BYTES as u64).to_be_bytes());
        let flags = u16::from_be_bytes([told[8], told[9]]);
        use transmission_flags::*;
        assert_eq!(flags & SEND_DF != 0, self.headers != Headers::Simple);
        let filters = self.headers == Headers::Extended && !contexts.is_empty();
        assert_eq!(flags & BLOCK_STATUS_PAYLOAD != 0, filters);
        if self.go {
            assert_eq!(heard.option_reply(option::GO), acknowledged);
        }
        contexts
    }

    /// Adds a request; returns `false` if nothing can follow it.
    fn add(&mut self, input: &mut Input<'_>) -> bool {
        let kind = input.byte();
        match kind {
            0..=239 => return self.add_request(input, kind),
            240..=243 => {
                let mut header = self.header(input, command::DISC);
                header.flags &= !command_flags::PAYLOAD_LEN;
                self.say(&header);
                // The server does not read what follows.
                self.said.extend_from_slice(input.bytes(32));
            }
            244..=247 => {
                let header = self.header(input, u16::from(kind));
                let mut header = header.bytes(self.headers);
                header[usize::from(input.byte() % 4)] ^= 1 << (input.byte() % 8);
                self.said.extend(header);
                self.end = End::Violation;
            }
            248..=251 => {
                let header = self.header(input, command::READ).bytes(self.headers);
                let cut_bytes = 1 + usize::from(input.byte()) % (header.len() - 1);
                self.said.extend_from_slice(&header[..cut_bytes]);
                self.end = End::Torn;
            }
            _ => {
                self.said.extend_from_slice(input.bytes(256));
                self.end = End::Garbage;
            }
        }
        false
    }

    fn say(&mut self, header: &Header) {
        self.said.extend(header.bytes(self.headers));
    }

    fn header(&self, input: &mut Input<'_>, command: u16) -> Header {
        let flags = input.byte();
        let longest = if self.headers == Headers::Extended { u64::MAX } else { u32::MAX.into() };
        Header {
            // Most requests have good flags.
            flags: match flags {
                0..=127 => 0,
                128..=143 => command_flags::FUA,
                144..=159 => command_flags::REQ_ONE,
                160..=175 => command_flags::DF,
                176..=191 => command_flags::FAST_ZERO,
                192..=223 => command_flags::NO_HOLE,
                224..=239 => command_flags::PAYLOAD_LEN,
                _ => u16::from(flags) << (flags % 9),
            },
            command,
            cookie: 0x636f_6f6b_6965_0000 + self.requests.len() as u64,
            offset: offset(input),
            len_bytes: length(input) & longest,
        }
    }

    fn add_request(&mut self, input: &mut Input<'_>, kind: u8) -> bool {
        use command::*;
        let command = match kind % 12 {
            0 | 1 => READ,
            2..=4 => WRITE,
            5 => FLUSH,
            6 => TRIM,
            7 => WRITE_ZEROES,
            8 => CACHE,
            9 | 10 => BLOCK_STATUS,
            _ => 9,
        };
        let mut header = self.header(input, command);
        if header.command == FLUSH && header.flags == 0 {
            (header.offset, header.len_bytes) = (0, 0);
        }
        let is_filter = header.command == BLOCK_STATUS && self.has_payload(&header);
        let filter = if is_filter { self.filter(input, &header) } else { Vec::new() };
        if is_filter {
            header.len_bytes = filter.len() as u64;
        }
        // A longer one is refused, or its payload is cut.
        let is_moved = header.len_bytes <= DISK_BYTES as u64;
        let moved_bytes = if is_moved { header.len_bytes as usize } else { 0 };
        let Some(left_bytes) = self.budget_bytes.checked_sub(moved_bytes) else { return false };
        self.budget_bytes = left_bytes;
        self.say(&header);
        if is_filter || !self.has_payload(&header) {
            self.said.extend_from_slice(&filter);
            self.requests.push((header, filter));
            return true;
        }
        let cut = input.byte() == 0xff;
        if is_moved && !cut {
            let payload = self.contents(input, moved_bytes);
            self.said.extend_from_slice(&payload);
            self.requests.push((header, payload));
            return true;
        }
        let most_bytes = usize::try_from(header.len_bytes.saturating_sub(1)).unwrap_or(usize::MAX);
        let payload_bytes = usize::from(input.u16()).min(most_bytes).min(self.budget_bytes);
        let payload = self.contents(input, payload_bytes);
        self.said.extend(payload);
        if header.len_bytes == 0 {
            self.requests.push((header, Vec::new()));
        } else {
            let is_too_long = header.len_bytes > self.max_received_bytes();
            self.end = if is_too_long { End::Violation } else { End::Torn };
            if header.command == WRITE {
                self.cut_write = Some(header);
            }
        }
        false
    }

    /// Returns the payload of a block status: a length and numbers of contexts, mostly valid ones.
    fn filter(&self, input: &mut Input<'_>, header: &Header) -> Vec<u8> {
        let mut filter = header.len_bytes.to_be_bytes().to_vec();
        let kinds = input.byte();
        for shift in [0, 2, 4] {
            let id: u32 = match kinds >> shift & 3 {
                0 => continue,
                3 if kinds >= 64 => u32::from(kinds),
                id => id.into(),
            };
            filter.extend_from_slice(&id.to_be_bytes());
        }
        if kinds >= 0xf0 {
            filter.truncate(usize::from(input.byte() % 16));
        }
        filter
    }

    /// Returns contents of a write; those that are slow to compress only while the budget lasts.
    fn contents(&mut self, input: &mut Input<'_>, len_bytes: usize) -> Vec<u8> {
        match self.compressed_bytes.checked_sub(len_bytes) {
            Some(left_bytes) => {
                self.compressed_bytes = left_bytes;
                input.contents(len_bytes)
            }
            // Of one word, if it is a page.
            None => vec![input.byte() % 3; len_bytes],
        }
    }

    fn has_payload(&self, header: &Header) -> bool {
        let has_flag = header.flags & command_flags::PAYLOAD_LEN != 0;
        header.command == command::WRITE || self.headers == Headers::Extended && has_flag
    }

    /// A longer payload ends the connection.
    fn max_received_bytes(&self) -> u64 {
        let max_bytes = u64::from(MAX_PAYLOAD_BYTES);
        if self.headers == Headers::Extended { max_bytes } else { 2 * max_bytes }
    }

    /// Returns whether a request is valid, apart from its range and the payload of a block status.
    pub fn is_valid(&self, header: &Header) -> bool {
        use command::*;
        use command_flags::*;
        let payload_len = if self.headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
        let known = match header.command {
            WRITE_ZEROES => FUA | NO_HOLE | FAST_ZERO,
            READ if self.headers != Headers::Simple => FUA | DF,
            READ | TRIM | CACHE => FUA,
            WRITE => FUA | payload_len,
            FLUSH if (header.offset, header.len_bytes) == (0, 0) => FUA,
            BLOCK_STATUS => FUA | REQ_ONE | payload_len,
            _ => return false,
        };
        header.flags & !known == 0
    }

    /// Returns the length and the contexts that a block status asks about, in the order of the answer; `None`
    /// if it is invalid.
    pub fn status_asked(
        &self,
        header: &Header,
        payload: &[u8],
        contexts: &[(u32, bool)],
    ) -> Option<(u64, Vec<(u32, bool)>)> {
        let (len_bytes, asked) = if self.has_payload(header) {
            let (len_bytes, ids) = payload.split_first_chunk::<8>()?;
            let (ids, rest) = ids.as_chunks::<4>();
            let ids: Vec<u32> = ids.iter().map(|id| u32::from_be_bytes(*id)).collect();
            let are_set = ids.iter().all(|id| contexts.iter().any(|(set, _)| set == id));
            let twice = (1..ids.len()).any(|at| ids[..at].contains(&ids[at]));
            if !rest.is_empty() || !are_set || twice {
                return None;
            }
            let asked = contexts.iter().filter(|(id, _)| ids.contains(id)).copied().collect();
            (u64::from_be_bytes(*len_bytes), asked)
        } else {
            (header.len_bytes, contexts.to_vec())
        };
        (len_bytes > 0 && !asked.is_empty()).then_some((len_bytes, asked))
    }

    pub fn check_end(&self, result: &io::Result<()>, unexpected: &[u8]) {
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

/// Returns an offset, mostly on the disk, at a page's edge or near it.
fn offset(input: &mut Input<'_>) -> u64 {
    let page = u64::from(input.byte() % 9) << 12;
    match input.byte() {
        0..=99 => page,
        100..=199 => page + u64::from(input.u16() % 4096),
        200..=249 => page.saturating_sub(u64::from(input.byte())),
        _ => input.u64(),
    }
}

fn length(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        count @ 0..=79 => u64::from(count % 8) << 12,
        80..=159 => u64::from(input.u16() % 9000),
        160..=229 => u64::from(input.u16()),
        230..=244 => u64::from(input.u16()) << 4,
        245..=249 => input.u64(),
        _ => u64::from(input.u32()),
    }
}
