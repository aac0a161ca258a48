//! Common code of the NBD tests: a server in its own directory, a client with access to every byte of the
//! protocol, and seeded random numbers.

pub mod gate;
pub mod pki;
pub mod secure;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uzram::device::Device;
#[allow(unused_imports)] // Some tests have no use for it.
pub use uzram::random::Random;
use uzram_serve::Exports;
pub use uzram_serve::nbd::proto::command as cmd;
use uzram_serve::nbd::proto::{self, command_flags, option, reply};
use uzram_serve::nbd::{Clients, Endpoint, ListenAddress, Server, ServerConfig, ServerThread};

/// Raises the descriptor limit of this process, and of those that it starts, to the maximum; prints a note
/// and returns true if that is less than `wanted`.
pub fn too_few_descriptors(wanted: u64) -> bool {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let too_few = maximum.is_some_and(|maximum| maximum < wanted);
    if too_few {
        println!("skipped: fewer than {wanted} file descriptors are allowed");
    }
    too_few
}

pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;

/// Creates a device of `size`, as text.
pub fn device(size: &str) -> Arc<Device> {
    named("zram0", size)
}

/// Creates a device of that name.
pub fn named(name: &str, size: &str) -> Arc<Device> {
    let device = Device::new(name).unwrap();
    device.set("disksize", size).unwrap();
    device
}

/// A running server with one device.
pub struct TestServer {
    pub device: Arc<Device>,
    pub thread: ServerThread,
    pub path: PathBuf,
    pub clients: Clients,
    endpoints: Vec<Endpoint>,
    directory: tempfile::TempDir,
}

impl TestServer {
    pub fn new(size: &str) -> Self {
        Self::with(device(size), |_| {})
    }

    pub fn with(device: Arc<Device>, configure: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::with_all(&[device], configure)
    }

    /// Starts a server of several devices.
    pub fn with_all(devices: &[Arc<Device>], configure: impl FnOnce(&mut ServerConfig)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let mut config = ServerConfig::new(&path);
        configure(&mut config);
        let server = Server::bind(config, Exports::new(devices.iter().cloned())).unwrap();
        let (endpoints, clients) = (server.endpoints(), server.clients());
        TestServer {
            device: Arc::clone(&devices[0]),
            thread: server.spawn().unwrap(),
            path,
            clients,
            endpoints,
            directory,
        }
    }

    /// Returns the first TCP address that it listens on.
    pub fn tcp_address(&self) -> SocketAddr {
        let tcp = self.endpoints.iter().find_map(|endpoint| match endpoint.address {
            ListenAddress::Tcp(address) => Some(address),
            ListenAddress::Unix(_) => None,
        });
        tcp.expect("it has a TCP port")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    /// Returns a directory that is removed with the server.
    pub fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.path)
    }

    /// Returns a client that has chosen the default export.
    pub fn ready(&self, structured: bool) -> Client {
        self.ready_with(if structured { Headers::Structured } else { Headers::Simple })
    }

    /// Returns a client that has chosen these headers and the default export.
    pub fn ready_with(&self, headers: Headers) -> Client {
        let mut client = self.client();
        client.agree(headers);
        client.enter();
        client
    }

    /// Returns a client that has chosen these headers, metadata contexts and the default export, and the
    /// contexts' ids.
    pub fn with_contexts(&self, headers: Headers, names: &[&[u8]]) -> (Client, Vec<u32>) {
        let mut client = self.client();
        client.agree(headers);
        let set = client.contexts(option::SET_META_CONTEXT, b"", names).unwrap();
        client.enter();
        (client, set.into_iter().map(|(id, _)| id).collect())
    }
}

/// Waits until `done` returns true, for asynchronous work of the server.
pub fn eventually(done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(2));
    }
}

/// The headers that a client negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    Simple,
    Structured,
    Extended,
}

/// All kinds of headers.
pub const ALL_HEADERS: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

impl Headers {
    /// Encodes a request's header.
    pub fn request(self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        match self {
            Headers::Extended => {
                // As the specification has it; qemu does not say that a write has a payload.
                let payload = if command == cmd::WRITE { command_flags::PAYLOAD_LEN } else { 0 };
                extended_request_bytes(flags | payload, command, cookie, offset, len)
            }
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

/// Encodes an option.
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let words = [option, data.len() as u32].map(u32::to_be_bytes).concat();
    [&proto::IHAVEOPT.to_be_bytes()[..], &words, data].concat()
}

/// Encodes a request's compact header.
pub fn request_bytes(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let (start, middle) = ([flags, command].map(u16::to_be_bytes), [cookie, offset].map(u64::to_be_bytes));
    [&proto::NBD_REQUEST_MAGIC.to_be_bytes()[..], &start.concat(), &middle.concat(), &len.to_be_bytes()]
        .concat()
}

/// Encodes a request's extended header.
pub fn extended_request_bytes(flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = request_bytes(flags, command, cookie, offset, 0);
    bytes[..4].copy_from_slice(&proto::NBD_EXTENDED_REQUEST_MAGIC.to_be_bytes());
    bytes.splice(24.., len.to_be_bytes());
    bytes
}

/// A complete reply.
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
    /// Returns the data of all chunks, which must be in order.
    pub fn data(&self) -> Vec<u8> {
        self.chunks.iter().flat_map(|(_, data)| data.iter().copied()).collect()
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

    /// Connects and sends nothing.
    pub fn silent(path: &std::path::Path) -> Self {
        Self::over(UnixStream::connect(path).unwrap())
    }

    /// Creates a client on an existing connection.
    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client::on(stream)
    }
}

impl<S: Read + Write> Client<S> {
    /// Creates a client on any stream, which has sent nothing.
    pub fn on(stream: S) -> Self {
        Client { stream, headers: Headers::Simple, next_cookie: 1 }
    }

    /// Answers the greeting with both flags.
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

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
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

    /// Sends an option and receives its replies: all `(type, data)` up to an acknowledgement or error.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&option_bytes(option, data));
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), proto::NBD_REP_MAGIC);
            assert_eq!(self.u32(), option);
            let kind = self.u32();
            let len = self.u32() as usize;
            replies.push((kind, self.take_vec(len)));
            if kind == reply::ACK || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// Negotiates headers.
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

    /// Sends a request and returns its cookie.
    pub fn request(&mut self, flags: u16, command: u16, offset: u64, len: u32, payload: &[u8]) -> u64 {
        self.long_request(flags, command, offset, len.into(), payload)
    }

    /// Sends a request in the negotiated form and returns its cookie. An extended write with a payload
    /// has `PAYLOAD_LEN`.
    pub fn long_request(&mut self, flags: u16, command: u16, offset: u64, len: u64, payload: &[u8]) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let header = self.headers.request(flags, command, cookie, offset, len);
        self.send(&header);
        self.send(payload);
        cookie
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
            }
            _ => panic!("chunk type {kind}"),
        }
        flags & FLAG_DONE != 0
    }

    /// Sends a request and receives its reply, which has no data.
    pub fn call(&mut self, flags: u16, command: u16, offset: u64, len: u32, payload: &[u8]) -> Reply {
        let cookie = self.request(flags, command, offset, len, payload);
        let reply = self.reply(0);
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// Sends a request of any length without a payload, and receives its reply.
    pub fn long_call(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> Reply {
        let cookie = self.long_request(flags, command, offset, len, &[]);
        let reply = self.reply(0);
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        self.call(0, cmd::WRITE, offset, data.len() as u32, data)
    }

    pub fn read(&mut self, flags: u16, offset: u64, len: u32) -> Reply {
        let cookie = self.request(flags, cmd::READ, offset, len, &[]);
        let reply = self.reply(len as usize);
        assert_eq!(reply.cookie, cookie);
        reply
    }
}

/// Returns a new seed, or the one in `UZRAM_TEST_SEED`, and prints it, so that a failure can be reproduced.
pub fn seed() -> u64 {
    let seed = match std::env::var("UZRAM_TEST_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
        }
    };
    println!("UZRAM_TEST_SEED={seed}");
    seed
}
