//! An NBD client with access to every byte of the protocol, and the messages of one. The fuzz targets and the
//! command's tests use it, too.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub use uzram_serve::nbd::proto::command as cmd;
use uzram_serve::nbd::proto::{self, command_flags, option, reply};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    Simple,
    Structured,
    Extended,
}

pub const ALL_HEADERS: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

impl Headers {
    pub fn request(self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        match self {
            Headers::Extended => extended_request_bytes(flags, command, cookie, offset, len),
            _ => request_bytes(flags, command, cookie, offset, len.try_into().unwrap()),
        }
    }
}

/// Returns the data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
pub fn context_request(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let string = |text: &[u8]| [&(text.len() as u32).to_be_bytes(), text].concat();
    let mut data = [string(name), (queries.len() as u32).to_be_bytes().to_vec()].concat();
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}

/// Returns the data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
pub fn info_request(name: &[u8], kinds: &[u16]) -> Vec<u8> {
    let kinds: Vec<u8> = kinds.iter().flat_map(|kind| kind.to_be_bytes()).collect();
    let (name_len, count) = ((name.len() as u32).to_be_bytes(), (kinds.len() as u16 / 2).to_be_bytes());
    [&name_len, name, &count, &kinds].concat()
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let words = [option, data.len() as u32].map(u32::to_be_bytes).concat();
    [&proto::IHAVEOPT.to_be_bytes()[..], &words, data].concat()
}

pub fn request_bytes(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let (start, middle) = ([flags, command].map(u16::to_be_bytes), [cookie, offset].map(u64::to_be_bytes));
    [&proto::NBD_REQUEST_MAGIC.to_be_bytes()[..], &start.concat(), &middle.concat(), &len.to_be_bytes()]
        .concat()
}

pub fn extended_request_bytes(flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = request_bytes(flags, command, cookie, offset, 0);
    bytes[..4].copy_from_slice(&proto::NBD_EXTENDED_REQUEST_MAGIC.to_be_bytes());
    bytes.splice(24.., len.to_be_bytes());
    bytes
}

#[derive(Debug, Default)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub message: String,
    /// Offset and data of each chunk, zeros for holes; a simple reply has one, at offset 0.
    pub chunks: Vec<(u64, Vec<u8>)>,
    /// Offset and length of those chunks that were holes.
    pub holes: Vec<(u64, u64)>,
    /// The request's offset, which extended headers return.
    pub offset: Option<u64>,
    /// The id of each metadata context, and length and status of each descriptor.
    pub statuses: Vec<(u32, Vec<(u64, u64)>)>,
}

impl Reply {
    /// Returns the data of all chunks, which must be in order. Not byte by byte, which takes seconds where
    /// tests are not optimised.
    pub fn data(&self) -> Vec<u8> {
        self.chunks.iter().map(|(_, data)| data.as_slice()).collect::<Vec<_>>().concat()
    }
}

pub struct Client<S = UnixStream> {
    pub stream: S,
    pub headers: Headers,
    next_cookie: u64,
}

impl Client {
    /// Connects and answers the greeting with both flags.
    pub fn connect(path: &std::path::Path) -> Self {
        let mut client = Self::silent(path);
        client.greet();
        client
    }

    pub fn silent(path: &std::path::Path) -> Self {
        Self::over(UnixStream::connect(path).unwrap())
    }

    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client::on(stream)
    }
}

impl<S: Read> Client<S> {
    /// Creates a client on any stream, which has sent nothing.
    pub fn on(stream: S) -> Self {
        Client { stream, headers: Headers::Simple, next_cookie: 1 }
    }

    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn take_vec(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }

    /// Returns whether the server has closed the connection without sending more.
    pub fn at_end(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(len) => len == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Returns whether the server closes a new connection instead of sending the greeting.
    pub fn refused(mut self) -> bool {
        self.stream.read(&mut [0; 18]).map_or(true, |len| len == 0)
    }

    /// Receives one reply. `read_len` is the data length of a successful simple reply.
    pub fn reply(&mut self, read_len: usize) -> Reply {
        let mut whole = Reply::default();
        while !self.part(&mut whole, |_| read_len) {}
        whole
    }

    /// Receives a simple reply or a chunk; returns whether it is the last. `read_len` is the data length of
    /// a successful simple reply to a cookie.
    pub fn part(&mut self, whole: &mut Reply, read_len: impl Fn(u64) -> usize) -> bool {
        let magic = self.u32();
        if magic == proto::NBD_SIMPLE_REPLY_MAGIC {
            assert_ne!(self.headers, Headers::Extended, "there are no simple replies");
            whole.error = self.u32();
            whole.cookie = self.u64();
            let read_len = read_len(whole.cookie);
            if whole.error == 0 && read_len > 0 {
                assert_eq!(self.headers, Headers::Simple, "a read is answered with chunks");
                whole.chunks.push((0, self.take_vec(read_len)));
            }
            return true;
        }
        let expected = match self.headers {
            Headers::Simple => panic!("a chunk: {magic:#x}"),
            Headers::Structured => proto::NBD_STRUCTURED_REPLY_MAGIC,
            Headers::Extended => proto::NBD_EXTENDED_REPLY_MAGIC,
        };
        assert_eq!(magic, expected);
        self.chunk(whole)
    }

    /// Receives parts of replies, in any order, until the replies to all of these requests are complete;
    /// `asked` has their cookies and the data length of a simple reply. Also returns replies to other
    /// requests.
    pub fn replies(&mut self, asked: &[(u64, usize)]) -> BTreeMap<u64, Reply> {
        let read_len = |cookie| asked.iter().find(|(asked, _)| *asked == cookie).map_or(0, |(_, len)| *len);
        let mut all: BTreeMap<u64, Reply> = BTreeMap::new();
        let mut left = asked.len();
        while left > 0 {
            let mut part = Reply::default();
            let ended = self.part(&mut part, read_len);
            left -= usize::from(ended && asked.iter().any(|(cookie, _)| *cookie == part.cookie));
            let whole = all.entry(part.cookie).or_default();
            whole.cookie = part.cookie;
            whole.error = part.error;
            whole.chunks.append(&mut part.chunks);
            whole.holes.append(&mut part.holes);
        }
        all
    }

    /// Receives a chunk after its magic; returns whether it is the last.
    fn chunk(&mut self, whole: &mut Reply) -> bool {
        use proto::chunk::*;
        let (flags, kind) = (self.u16(), self.u16());
        whole.cookie = self.u64();
        let extended = self.headers == Headers::Extended;
        if extended {
            whole.offset = Some(self.u64());
        }
        let len = if extended { self.u64() as usize } else { self.u32() as usize };
        assert!(flags & !FLAG_DONE == 0, "{flags}");
        match kind {
            NONE => assert_eq!((len, flags), (0, FLAG_DONE)),
            OFFSET_DATA => {
                assert!(len > 8, "a data chunk holds data");
                let offset = self.u64();
                let data = self.take_vec(len - 8);
                whole.chunks.push((offset, data));
            }
            OFFSET_HOLE => {
                assert_eq!(len, 12);
                let (offset, hole) = (self.u64(), self.u32());
                assert_ne!(hole, 0, "a hole has a length");
                whole.holes.push((offset, hole.into()));
                whole.chunks.push((offset, vec![0; hole as usize]));
            }
            BLOCK_STATUS => {
                assert!(!extended && len % 8 == 4 && len > 4);
                let id = self.u32();
                let one = |client: &mut Self| (client.u32().into(), client.u32().into());
                whole.statuses.push((id, (0..len / 8).map(|_| one(self)).collect()));
            }
            BLOCK_STATUS_EXT => {
                assert!(extended && len % 16 == 8 && len > 8);
                let (id, count) = (self.u32(), self.u32() as usize);
                assert_eq!(len, 8 + 16 * count);
                whole.statuses.push((id, (0..count).map(|_| (self.u64(), self.u64())).collect()));
            }
            ERROR => {
                whole.error = self.u32();
                let message_len = usize::from(self.u16());
                assert_eq!(len, 6 + message_len);
                whole.message = String::from_utf8(self.take_vec(message_len)).unwrap();
                assert!(whole.error != 0 && flags == FLAG_DONE && message_len > 0);
            }
            _ => panic!("chunk type {kind}"),
        }
        flags & FLAG_DONE != 0
    }

    /// Receives a reply to an option; returns its type and its data.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!((self.u64(), self.u32()), (proto::NBD_REP_MAGIC, option));
        let (kind, len) = (self.u32(), self.u32());
        (kind, self.take_vec(len as usize))
    }
}

impl<S: Read + Write> Client<S> {
    /// Receives the greeting and sends the flags of a client: fixed newstyle, and no zeroes.
    pub fn greet(&mut self) {
        let greeting: [u8; 18] = self.take();
        assert_eq!(greeting[..8], *b"NBDMAGIC");
        assert_eq!(greeting[8..16], *b"IHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        self.send(&3u32.to_be_bytes());
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends an option and receives its replies: all `(type, data)` up to an acknowledgement or error.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&option_bytes(option, data));
        let mut replies = vec![self.option_reply(option)];
        while replies.last().is_none_or(|(kind, _)| *kind != reply::ACK && kind >> 31 == 0) {
            replies.push(self.option_reply(option));
        }
        replies
    }

    pub fn agree(&mut self, headers: Headers) {
        let option = match headers {
            Headers::Simple => return,
            Headers::Structured => option::STRUCTURED_REPLY,
            Headers::Extended => option::EXTENDED_HEADERS,
        };
        assert_eq!(self.option(option, &[]), [(reply::ACK, vec![])]);
        self.headers = headers;
    }

    /// Chooses the default export; returns its size and transmission flags.
    pub fn go(&mut self, structured: bool) -> (u64, u16) {
        self.agree(if structured { Headers::Structured } else { Headers::Simple });
        self.enter()
    }

    /// Chooses the default export, with what was negotiated; returns its size and transmission flags.
    pub fn enter(&mut self) -> (u64, u16) {
        self.enter_export(b"")
    }

    /// Chooses an export; returns its size and transmission flags.
    pub fn enter_export(&mut self, name: &[u8]) -> (u64, u16) {
        let replies = self.option(option::GO, &info_request(name, &[]));
        let [(reply::INFO, info), (reply::ACK, _)] = &replies[..] else { panic!("{replies:?}") };
        assert_eq!(info[..2], [0, 0]);
        (
            u64::from_be_bytes(info[2..10].try_into().unwrap()),
            u16::from_be_bytes(info[10..].try_into().unwrap()),
        )
    }

    /// Asks for metadata contexts of an export; returns id and name of each context in the reply, or
    /// the error.
    pub fn contexts(
        &mut self,
        option: u32,
        name: &[u8],
        queries: &[&[u8]],
    ) -> Result<Vec<(u32, String)>, u32> {
        let mut replies = self.option(option, &context_request(name, queries));
        let (last, text) = replies.pop().unwrap();
        if last != reply::ACK {
            assert!(!text.is_empty(), "an error in words");
            return Err(last);
        }
        let context = |(kind, data): (u32, Vec<u8>)| {
            assert_eq!(kind, reply::META_CONTEXT);
            (
                u32::from_be_bytes(data[..4].try_into().unwrap()),
                String::from_utf8(data[4..].to_vec()).unwrap(),
            )
        };
        Ok(replies.into_iter().map(context).collect())
    }

    /// Sends a request in the negotiated form and returns its cookie. An extended write with a payload has
    /// `PAYLOAD_LEN`.
    pub fn request(&mut self, flags: u16, command: u16, offset: u64, len: u64, payload: &[u8]) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        // As the specification has it; qemu does not say that a write has a payload.
        let has_payload = self.headers == Headers::Extended && command == cmd::WRITE;
        let flags = flags | if has_payload { command_flags::PAYLOAD_LEN } else { 0 };
        self.send(&self.headers.request(flags, command, cookie, offset, len));
        self.send(payload);
        cookie
    }

    /// Sends a request and receives its reply, which has no data.
    pub fn call(&mut self, flags: u16, command: u16, offset: u64, len: u64, payload: &[u8]) -> Reply {
        let cookie = self.request(flags, command, offset, len, payload);
        let reply = self.reply(0);
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        self.call(0, cmd::WRITE, offset, data.len() as u64, data)
    }

    pub fn read(&mut self, flags: u16, offset: u64, len: u32) -> Reply {
        let cookie = self.request(flags, cmd::READ, offset, len.into(), &[]);
        let reply = self.reply(len as usize);
        assert_eq!(reply.cookie, cookie);
        reply
    }
}
