//! Fuzzes the NBD handshake with any bytes as a client's whole session, whether it answers the greeting or
//! not, of a server without a certificate, with one, and of one that requires TLS.
//!
//! The first byte determines whether there is TLS, and whether the second device has a size; the second byte,
//! how messages are torn. The client sends the rest.
//!
//! Promises: the session ends; every option is answered as a naive parser of the same bytes expects, until an
//! export is chosen or TLS starts, with a message if it is refused; and when it is over, no device is in use.
//! The devices are kept from one input to the next, emptied.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use uzram::device::{Device, OpenDevice};
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{self, info, option, reply, transmission_flags};
use uzram_serve::nbd::{Buffers, Tls, TlsFiles, serve_stream};

use crate::input::Input;
use crate::nbd_client::{
    Client, cmd, context_request, extended_request_bytes, info_request, option_bytes, request_bytes,
};
use crate::pki::Authority;
use crate::wire::Wire;

const NAMES: [&[u8]; 2] = [b"zram0", b"zram1"];
const SIZE_BYTES: u64 = 64 << 10;
const OTHER_SIZE_BYTES: u64 = 4 << 10;
/// The number and length of options that the server accepts.
const MAX_OPTIONS: usize = 256;
const MAX_OPTION_BYTES: u32 = 64 << 10;

struct Bench {
    /// Without and with a size for `zram1`.
    exports: [Exports; 2],
    /// `zram0`, and the two devices named `zram1`.
    devices: [Arc<Device>; 3],
    open: [OpenDevice; 2],
    buffers: Buffers,
    tls: Tls,
}

impl Bench {
    fn new() -> Self {
        let device = |name, size_bytes: u64| {
            let device = Device::new(name).expect("a good name");
            if size_bytes > 0 {
                device.set("disksize", &size_bytes.to_string()).expect("memory");
            }
            device
        };
        let (first, unsized_, sized) =
            (device("zram0", SIZE_BYTES), device("zram1", 0), device("zram1", OTHER_SIZE_BYTES));
        let exports =
            [&unsized_, &sized].map(|second| Exports::new([Arc::clone(&first), Arc::clone(second)]));
        let open = [&first, &sized].map(|device| device.open().expect("it has a size"));
        let buffers = Buffers::new(0).expect("memory");
        Bench { exports, devices: [first, unsized_, sized], open, buffers, tls: tls() }
    }

    fn users(&self) -> [usize; 3] {
        [0, 1, 2].map(|index| Arc::strong_count(&self.devices[index]))
    }
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

/// Generates a certificate. No promise depends on its bytes.
fn tls() -> Tls {
    let dir = tempfile::tempdir().expect("a directory");
    Authority::new("authority").write_all(dir.path());
    let [cert, key] = ["server-cert.pem", "server-key.pem"].map(|name| dir.path().join(name));
    Tls::load(&TlsFiles { cert, key, client_ca: None }).expect("a good pair")
}

pub(crate) fn run(bytes: &[u8]) {
    BENCH.with_borrow_mut(|bench| run_on(bench, bytes));
}

fn run_on(bench: &mut Bench, bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (first, tear) = (input.byte(), input.byte());
    let said = input.rest();
    let users = bench.users();
    let mut wire = Wire::new(said, tear);
    let exports = &bench.exports[usize::from(first & 1)];
    let has_tls = first & 4 != 0;
    let tls_required = has_tls && first & 2 != 0;
    let tls = has_tls.then_some((&bench.tls, tls_required));
    let result = serve_stream(&mut wire, exports, &mut bench.buffers, tls);
    let mut session = Session {
        said: Client::on(said),
        heard: Client::on(&wire.heard),
        sizes: [SIZE_BYTES, if first & 1 == 0 { 0 } else { OTHER_SIZE_BYTES }],
        has_tls,
        tls_required,
        lacked_tls: false,
        headers: None,
        contexts: None,
    };
    let end = session.follow();
    let kind = result.err().map(|error| error.kind());
    match end {
        End::GoesOn => {
            assert!(
                matches!(kind, None | Some(ErrorKind::InvalidData | ErrorKind::UnexpectedEof)),
                "{kind:?}"
            );
            bench.open.iter().for_each(|open| open.discard(0, open.size_bytes()).expect("in range"));
        }
        End::Ended(expected) => {
            assert_eq!(kind, if session.lacked_tls { Some(ErrorKind::InvalidData) } else { expected });
            assert!(session.heard.stream.is_empty(), "more was said than asked for");
        }
    }
    assert_eq!(bench.users(), users, "nobody has a device open when the session is over");
}

enum End {
    /// An export is chosen, or TLS starts.
    GoesOn,
    /// The session has ended, with this result.
    Ended(Option<ErrorKind>),
}

/// A naive parser of the client's bytes, beside the server's replies.
struct Session<'a> {
    said: Client<&'a [u8]>,
    heard: Client<&'a [u8]>,
    /// Of `zram0` and `zram1`; 0 is a device without a size.
    sizes: [u64; 2],
    has_tls: bool,
    tls_required: bool,
    /// Whether something was asked for without TLS that is required.
    lacked_tls: bool,
    /// The option that negotiated headers, if one did.
    headers: Option<u32>,
    /// The device for which contexts are set, and whether any are.
    contexts: Option<(usize, bool)>,
}

impl Session<'_> {
    fn follow(&mut self) -> End {
        let torn = End::Ended(Some(ErrorKind::UnexpectedEof));
        let violation = End::Ended(Some(ErrorKind::InvalidData));
        let heard = &mut self.heard;
        assert_eq!((heard.u64(), heard.u64(), heard.u16()), (proto::NBDMAGIC, proto::IHAVEOPT, 3));
        if self.said.stream.len() < 4 {
            return torn;
        }
        let flags = self.said.u32();
        if flags > 3 {
            return violation;
        }
        for _ in 0..MAX_OPTIONS {
            if self.said.stream.len() < 16 {
                return torn;
            }
            let (magic, asked, len_bytes) = (self.said.u64(), self.said.u32(), self.said.u32());
            if magic != proto::IHAVEOPT || len_bytes > MAX_OPTION_BYTES {
                return violation;
            }
            if self.said.stream.len() < len_bytes as usize {
                return torn;
            }
            let data = &self.said.take_vec(len_bytes as usize);
            match asked {
                option::ABORT => {
                    self.expect(asked, reply::ACK);
                    return End::Ended(None);
                }
                option::STARTTLS if self.has_tls && data.is_empty() => {
                    self.expect(asked, reply::ACK);
                    return End::GoesOn;
                }
                option::STARTTLS => {
                    self.expect(asked, if self.has_tls { reply::ERR_INVALID } else { reply::ERR_UNSUP });
                }
                _ if self.tls_required => {
                    self.lacked_tls = true;
                    if asked == option::EXPORT_NAME {
                        return violation;
                    }
                    self.expect(asked, reply::ERR_TLS_REQD);
                }
                option::EXPORT_NAME => return self.export_name(data, flags & 2 == 0),
                option::GO if self.info(asked, data) => return End::GoesOn,
                option::GO => {}
                option::INFO => drop(self.info(asked, data)),
                option::LIST if data.is_empty() => {
                    for name in NAMES {
                        let told = self.expect(asked, reply::SERVER);
                        assert_eq!(told, [&5u32.to_be_bytes()[..], name].concat());
                    }
                    self.expect(asked, reply::ACK);
                }
                option::STRUCTURED_REPLY
                    if data.is_empty() && self.headers == Some(option::EXTENDED_HEADERS) =>
                {
                    self.expect(asked, reply::ERR_EXT_HEADER_REQD);
                }
                option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if data.is_empty() => {
                    self.expect(asked, reply::ACK);
                    self.headers = Some(asked);
                }
                option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                    self.expect(asked, reply::ERR_INVALID);
                }
                option::LIST_META_CONTEXT => drop(self.meta_contexts(asked, data)),
                option::SET_META_CONTEXT => self.contexts = self.meta_contexts(asked, data),
                _ => {
                    let refused = self.any_reply(asked).0;
                    assert_ne!(refused & 1 << 31, 0, "option {asked} is answered with {refused}");
                }
            }
        }
        violation
    }

    fn any_reply(&mut self, asked: u32) -> (u32, Vec<u8>) {
        let (kind, data) = self.heard.option_reply(asked);
        let in_words = str::from_utf8(&data).is_ok_and(|text| !text.is_empty());
        assert!(kind & 1 << 31 == 0 || in_words, "option {asked} is refused in words");
        (kind, data)
    }

    fn expect(&mut self, asked: u32, kind: u32) -> Vec<u8> {
        let (told, data) = self.any_reply(asked);
        assert_eq!(told, kind, "option {asked}");
        data
    }

    fn find(name: &[u8]) -> Option<usize> {
        NAMES.iter().position(|other| *other == name).or(name.is_empty().then_some(0))
    }

    fn flags(&self, device: usize) -> u16 {
        use transmission_flags::*;
        let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | CAN_MULTI_CONN;
        let df = if self.headers.is_some() { SEND_DF } else { 0 };
        let filters = self.headers == Some(option::EXTENDED_HEADERS) && self.contexts == Some((device, true));
        always | SEND_CACHE | SEND_FAST_ZERO | df | if filters { BLOCK_STATUS_PAYLOAD } else { 0 }
    }

    fn export_name(&mut self, name: &[u8], with_zeroes: bool) -> End {
        let found = Self::find(name).filter(|_| self.headers != Some(option::EXTENDED_HEADERS));
        let Some(device) = found else { return End::Ended(Some(ErrorKind::InvalidData)) };
        if self.sizes[device] == 0 {
            return End::Ended(Some(ErrorKind::Other));
        }
        let flags = self.flags(device);
        assert_eq!((self.heard.u64(), self.heard.u16()), (self.sizes[device], flags));
        assert!(!with_zeroes || self.heard.take::<124>() == [0; 124]);
        End::GoesOn
    }

    /// Checks `INFO` and `GO`; returns whether it succeeds.
    fn info(&mut self, asked: u32, data: &[u8]) -> bool {
        let Some((name, kinds)) = split_info(data) else {
            self.expect(asked, reply::ERR_INVALID);
            return false;
        };
        let found = Self::find(name);
        let Some(device) = found.filter(|device| self.sizes[*device] > 0) else {
            let why = self.expect(asked, reply::ERR_UNKNOWN);
            let names_setting = str::from_utf8(&why).is_ok_and(|why| why.contains("disksize"));
            assert!(found.is_none() || names_setting, "{why:?} is no way to give it a size");
            return false;
        };
        let told = self.expect(asked, reply::INFO);
        let export =
            [&[0, 0][..], &self.sizes[device].to_be_bytes(), &self.flags(device).to_be_bytes()].concat();
        assert_eq!(told, export);
        for kind in [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE] {
            if !kinds.chunks(2).any(|asked| asked == kind.to_be_bytes()) {
                continue;
            }
            let told = self.expect(asked, reply::INFO);
            let (told_kind, told) = told.split_at(2);
            assert_eq!(told_kind, kind.to_be_bytes());
            match kind {
                info::NAME => assert_eq!(told, NAMES[device]),
                info::BLOCK_SIZE => assert_eq!(told, [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat()),
                _ => assert!(str::from_utf8(told).is_ok_and(|text| text.contains("do not outlive"))),
            }
        }
        self.expect(asked, reply::ACK);
        true
    }

    /// Checks both context options; returns the device, and whether any context was selected, if it succeeds.
    fn meta_contexts(&mut self, asked: u32, data: &[u8]) -> Option<(usize, bool)> {
        let split = split_queries(data).filter(|_| self.headers.is_some());
        let mut refused = |kind| {
            self.expect(asked, kind);
            None
        };
        let Some((name, queries)) = split else { return refused(reply::ERR_INVALID) };
        let Some(device) = Self::find(name) else { return refused(reply::ERR_UNKNOWN) };
        if !queries.iter().all(|query| query.contains(&b':')) {
            return refused(reply::ERR_INVALID);
        }
        let lists = asked == option::LIST_META_CONTEXT;
        let mut any = false;
        for (name, namespace) in [(&b"base:allocation"[..], &b"base:"[..]), (b"uzram:state", b"uzram:")] {
            let named =
                queries.contains(&name) || lists && (queries.is_empty() || queries.contains(&namespace));
            if named {
                let told = self.expect(asked, reply::META_CONTEXT);
                // The id is reserved, and 0 in a list.
                assert_eq!((told[..4] == [0; 4], &told[4..]), (lists, name));
                any = true;
            }
        }
        self.expect(asked, reply::ACK);
        Some((device, any))
    }
}

fn split_info(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    let (count, kinds) = rest.split_first_chunk::<2>()?;
    (kinds.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some((name, kinds))
}

fn split_queries(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (len, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let mut queries = Vec::new();
    while !rest.is_empty() {
        let (len, after) = rest.split_first_chunk::<4>()?;
        let (query, after) = after.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        queries.push(query);
        rest = after;
    }
    (queries.len() == u32::from_be_bytes(*count) as usize).then_some((name, queries))
}

fn client_hello() -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a good name");
    let mut hello = Vec::new();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).expect("a good configuration");
    client.write_tls(&mut hello).expect("memory");
    hello
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let ask_all = info_request(b"zram1", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE]);
    let starttls = option_bytes(option::STARTTLS, &[]);
    let long_read = extended_request_bytes(0, cmd::READ, 1, 0, 512);
    let read = request_bytes(0, cmd::READ, 1, 0, 512);
    let structured = option_bytes(option::STRUCTURED_REPLY, &[]);
    let extended = option_bytes(option::EXTENDED_HEADERS, &[]);
    let structured_again = structured.clone();
    let go = option_bytes(option::GO, &info_request(b"", &[]));
    let both = context_request(b"", &[b"base:allocation", b"uzram:state"]);
    let wild = context_request(b"zram1", &[b"base:", b"uzram:", b"x-y:z"]);
    let (list, set) = (option::LIST_META_CONTEXT, option::SET_META_CONTEXT);
    // The server has a certificate, and clients may (4) or must (6) start TLS.
    let with_tls = [
        ((4, 3), [option_bytes(option::STARTTLS, b"x"), starttls.clone(), client_hello()].concat()),
        ((7, 3), [option_bytes(option::GO, &ask_all), starttls.clone(), starttls.clone()].concat()),
        ((6, 3), [option_bytes(option::LIST, &[]), go.clone(), read.clone()].concat()),
        ((6, 3), [option_bytes(option::EXPORT_NAME, b"zram0"), read.clone()].concat()),
        ((62, 3), [starttls, go.clone(), option_bytes(option::ABORT, &[])].concat()),
        ((5, 3), [option_bytes(option::INFO, &ask_all), option_bytes(option::ABORT, &[])].concat()),
        ((7, 3), [option_bytes(option::INFO, &ask_all), option_bytes(option::ABORT, &[])].concat()),
    ];
    let sessions = [
        [structured.clone(), option_bytes(option::INFO, &ask_all), go.clone(), read.clone()].concat(),
        [option_bytes(option::LIST, &[]), option_bytes(option::EXPORT_NAME, b"zram0"), read].concat(),
        [option_bytes(option::LIST, b"x"), option_bytes(99, b"?"), option_bytes(option::ABORT, &[])].concat(),
        [
            structured.clone(),
            option_bytes(option::GO, &ask_all),
            option_bytes(option::EXPORT_NAME, b"nonesuch"),
        ]
        .concat(),
        [structured.clone(), option_bytes(set, &both), option_bytes(list, &wild), go.clone()].concat(),
        [extended.clone(), structured, option_bytes(set, &both), go.clone(), long_read].concat(),
        [option_bytes(list, &both), extended.clone(), option_bytes(set, &wild), option_bytes(set, b"?"), go]
            .concat(),
        [extended, option_bytes(list, &context_request(b"", &[])), option_bytes(option::EXPORT_NAME, b"")]
            .concat(),
    ];
    // Options that are refused, before one that works; and the names of both contexts, in another order.
    let refused = [
        option_bytes(option::GO, &info_request(b"other", &[])),
        option_bytes(option::INFO, &info_request(&[0xff; 4096], &[])),
        option_bytes(option::GO, b""),
        option_bytes(option::GO, &[0xff; 9]),
        option_bytes(option::GO, &[&info_request(b"", &[])[..], b"x"].concat()),
        option_bytes(option::STRUCTURED_REPLY, b"x"),
        option_bytes(option::EXTENDED_HEADERS, b"x"),
        option_bytes(set, &both[..both.len() - 1]),
        option_bytes(set, &[&[0; 4][..], &[0xff; 4]].concat()),
        option_bytes(list, &context_request(b"", &[b"no colon"])),
        option_bytes(set, &context_request(b"other", &[b"base:allocation"])),
        option_bytes(
            set,
            &context_request(b"", &[b"uzram:state", b"base:", b"base:allocation", b"uzram:state"]),
        ),
        option_bytes(option::STARTTLS, b""),
        option_bytes(4, &[0; 60_000]),
        option_bytes(option::EXPORT_NAME, b"zram0"),
    ]
    .concat();
    // Out of step: no magic, options that are too long, a flag that was not offered, endless haggling.
    let head = |number, len_bytes: u32| [&option_bytes(number, &[])[..12], &len_bytes.to_be_bytes()].concat();
    let haggling = option_bytes(option::LIST, &[]).repeat(MAX_OPTIONS + 1);
    let out_of_step: [(u8, u8, Vec<u8>); 5] = [
        (0, 3, vec![0; 16]),
        (0, 3, head(option::LIST, MAX_OPTION_BYTES + 1)),
        (0, 3, head(set, u32::MAX)),
        (0, 4, Vec::new()),
        (0, 3, haggling),
    ];
    // The tear is in the upper bits of the first number.
    let with_flags = |(first, flags, session): (u8, u8, Vec<u8>)| {
        [&[first & 7, first >> 3, 0, 0, 0, flags], &session[..]].concat()
    };
    std::iter::zip([(1, 3), (0, 2), (25, 1), (0, 3), (1, 3), (0, 3), (1, 3), (0, 3)], sessions)
        .chain([((1, 1), refused.clone()), ((0, 1), [structured_again, refused].concat())])
        .chain(with_tls)
        .map(|((first, flags), session)| (first, flags, session))
        .chain(out_of_step)
        .map(with_flags)
        .collect()
}
