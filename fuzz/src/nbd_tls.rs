//! Fuzzes an NBD server that has a certificate with any bytes as a client's whole session.
//!
//! The first byte determines how messages are torn and whether TLS is required; the client sends the rest.
//!
//! Promises: the session ends; the server sends the greeting and then whole option replies, until an export
//! is chosen or TLS starts; if TLS is required, no export is described without it; and when it is over, no
//! device is in use.

use std::cell::RefCell;
use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{self, info, option};
use uzram_serve::nbd::{Buffers, Tls, TlsFiles, serve_stream};

use crate::input::Input;
use crate::nbd_client::{Client, cmd, info_request, option_bytes, request_bytes};
use crate::wire::Wire;

/// State kept from one input to the next.
struct Bench {
    device: Arc<Device>,
    exports: Exports,
    buffers: Buffers,
    tls: Tls,
}

impl Bench {
    fn new() -> Self {
        let device = Device::new("zram0").expect("a good name");
        device.set("disksize", "64K").expect("memory");
        let exports = Exports::new([Arc::clone(&device)]);
        let buffers = Buffers::new(0).expect("memory");
        Bench { device, exports, buffers, tls: tls() }
    }
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

/// Generates a certificate. No promise depends on its bytes.
fn tls() -> Tls {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a good name");
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a file of ours");
        path
    };
    let cert = file("cert.pem", certified.cert.pem());
    let key = file("key.pem", certified.signing_key.serialize_pem());
    Tls::load(&TlsFiles { cert, key, client_ca: None }).expect("a good pair")
}

pub(crate) fn run(bytes: &[u8]) {
    BENCH.with_borrow_mut(|bench| run_on(bench, bytes));
}

fn run_on(bench: &mut Bench, bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let first = input.byte();
    let required = first & 1 != 0;
    let mut wire = Wire::new(input.rest(), first >> 1);
    let users = Arc::strong_count(&bench.device);
    let Bench { exports, buffers, tls, .. } = bench;
    let served = serve_stream(&mut wire, exports, buffers, Some((tls, required)));
    if let Err(error) = served {
        let expected = [ErrorKind::InvalidData, ErrorKind::UnexpectedEof];
        assert!(expected.contains(&error.kind()), "{error:?}");
    }
    check(&wire.heard, required);
    assert_eq!(Arc::strong_count(&bench.device), users, "nobody has it open when the session is over");
    let disk = bench.device.open().expect("it has a size");
    disk.discard(0, disk.size_bytes()).expect("in range");
}

/// Parses the greeting and the option replies. They end with the messages, or where an export was chosen or
/// TLS started.
fn check(heard: &[u8], tls_required: bool) {
    let mut heard = Client::on(heard);
    assert_eq!((heard.u64(), heard.u64(), heard.u16()), (proto::NBDMAGIC, proto::IHAVEOPT, 3));
    while heard.stream.starts_with(&proto::NBD_REP_MAGIC.to_be_bytes()) {
        let (_, asked, reply, len) = (heard.u64(), heard.u32(), heard.u32(), heard.u32());
        heard.take_vec(len as usize);
        assert!(!tls_required || reply != proto::reply::INFO, "exports are told about after TLS only");
        if [option::GO, option::STARTTLS].contains(&asked) && reply == proto::reply::ACK {
            return;
        }
    }
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
    let ask_all = info_request(b"zram0", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE]);
    let read = request_bytes(0, cmd::READ, 1, 0, 512);
    let go = option_bytes(option::GO, &info_request(b"", &[]));
    let starttls = option_bytes(option::STARTTLS, &[]);
    let sessions = [
        [option_bytes(option::STARTTLS, b"x"), starttls.clone(), client_hello()].concat(),
        [option_bytes(option::GO, &ask_all), starttls.clone(), starttls.clone()].concat(),
        [option_bytes(option::LIST, &[]), go.clone(), read.clone()].concat(),
        [option_bytes(option::EXPORT_NAME, b"zram0"), read].concat(),
        [starttls, go, option_bytes(option::ABORT, &[])].concat(),
        [option_bytes(option::INFO, &ask_all), option_bytes(option::ABORT, &[])].concat(),
    ];
    let greeted = |(first, session): (u8, Vec<u8>)| [&[first, 0, 0, 0, 3], &session[..]].concat();
    std::iter::zip([0, 1, 2, 1, 15, 0], sessions).map(greeted).collect()
}
