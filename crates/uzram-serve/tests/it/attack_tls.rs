//! Access: every kind of listener, with every TLS configuration and every kind of client; TLS files that
//! other users can change; and files that are replaced while clients work.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::pki::{Authority, Validity, write};
use crate::common::secure::{client_config, encrypt, files, start_tls};
use crate::common::{Client, device};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, SupportedProtocolVersion};
use uzram::ErrorKind;
use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::option;
use uzram_serve::nbd::{Endpoint, ListenAddress, Server, ServerConfig, ServerThread, Tls};

/// The attacker.
const NOBODY: u32 = 65534;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Unix,
    Loopback,
    AllAddresses,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Nothing,
    /// It has a certificate, and requires none of clients.
    Tls,
    /// The same, with `tls_anyone`.
    TlsOfAnyone,
    Certificate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comer {
    /// Without TLS, or with TLS that a man in the middle stripped.
    Clear,
    /// Starts TLS, after which a man in the middle sends clear text.
    ClearAfterStart,
    /// Sends TLS from the first byte.
    TlsAtOnce,
    WithoutCertificate,
    Stranger,
    Expired,
    Known,
}

const PLACES: [Place; 3] = [Place::Unix, Place::Loopback, Place::AllAddresses];
const ASKS: [Asks; 4] = [Asks::Nothing, Asks::Tls, Asks::TlsOfAnyone, Asks::Certificate];
const COMERS: [Comer; 7] = {
    use Comer::*;
    [Clear, ClearAfterStart, TlsAtOnce, WithoutCertificate, Stranger, Expired, Known]
};

/// Returns whether a server may listen: the rule.
fn may_listen(place: Place, asks: Asks) -> bool {
    place != Place::AllAddresses || matches!(asks, Asks::TlsOfAnyone | Asks::Certificate)
}

/// Returns whether a client is accepted by a server that may listen: the rule.
fn gets_in(place: Place, asks: Asks, comer: Comer) -> bool {
    let speaks_tls = asks != Asks::Nothing;
    match comer {
        Comer::Clear => !speaks_tls || place == Place::Unix,
        // Without TLS, STARTTLS is refused, and the client goes on in clear text.
        Comer::ClearAfterStart => !speaks_tls,
        Comer::TlsAtOnce => false,
        Comer::Known => speaks_tls,
        // Without client certificates, every client is accepted.
        Comer::WithoutCertificate | Comer::Stranger | Comer::Expired => {
            speaks_tls && asks != Asks::Certificate
        }
    }
}

trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

struct Rig {
    authority: Authority,
    device: Arc<Device>,
    endpoints: Vec<Endpoint>,
    tls: Option<Tls>,
    dir: tempfile::TempDir,
    _thread: ServerThread,
}

impl Rig {
    fn new(place: Place, asks: Asks) -> uzram::Result<Rig> {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new("authority");
        authority.write_all(dir.path());
        let listen: ListenAddress = match place {
            Place::Unix => ListenAddress::Unix(dir.path().join("nbd.sock")),
            Place::Loopback => "tcp:127.0.0.1:0".parse().unwrap(),
            Place::AllAddresses => "tcp:0.0.0.0:0".parse().unwrap(),
        };
        let tls = (asks != Asks::Nothing)
            .then(|| Tls::load(&files(dir.path(), asks == Asks::Certificate)).unwrap());
        let config = ServerConfig {
            listen: vec![listen.into()],
            tls: tls.clone(),
            tls_anyone: asks == Asks::TlsOfAnyone,
            ..ServerConfig::new("unused")
        };
        let device = device("1M");
        let server = Server::bind(config, Exports::new([Arc::clone(&device)]))?;
        let endpoints = server.endpoints();
        Ok(Rig { authority, device, endpoints, tls, dir, _thread: server.spawn().unwrap() })
    }

    fn connect(&self) -> Client<Box<dyn Stream>> {
        Client::on(match &self.endpoints[0].address {
            ListenAddress::Unix(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                Box::new(stream)
            }
            ListenAddress::Tcp(address) => {
                let stream = TcpStream::connect(("127.0.0.1", address.port())).unwrap();
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                Box::new(stream)
            }
        })
    }

    fn config(&self, comer: Comer, version: &'static SupportedProtocolVersion) -> Option<ClientConfig> {
        let identity = match comer {
            Comer::Clear | Comer::ClearAfterStart => return None,
            Comer::TlsAtOnce | Comer::WithoutCertificate => None,
            Comer::Stranger => Some(Authority::new("stranger").issue(Validity::Now)),
            Comer::Expired => Some(self.authority.issue(Validity::Past)),
            Comer::Known => Some(self.authority.issue(Validity::Now)),
        };
        Some(client_config(&self.authority, identity, version))
    }

    fn writes(&self, comer: Comer, data: &[u8]) -> bool {
        let [old, new] =
            [&TLS12, &TLS13].map(|version| self.writes_with(comer, self.config(comer, version), data));
        assert_eq!(old, new, "{comer:?}");
        new
    }

    fn writes_with(&self, comer: Comer, config: Option<ClientConfig>, data: &[u8]) -> bool {
        let mut client = if comer == Comer::TlsAtOnce { self.connect() } else { self.greeted() };
        // A client that is refused panics.
        let attempt = || match config {
            Some(config) if comer == Comer::TlsAtOnce => {
                let mut client = Client::on(encrypt(client.stream, config));
                client.greet();
                write_data(client, data)
            }
            Some(config) => write_data(start_tls(client, config), data),
            None => {
                if comer == Comer::ClearAfterStart {
                    client.option(option::STARTTLS, &[]);
                }
                write_data(client, data)
            }
        };
        catch_unwind(AssertUnwindSafe(attempt)).unwrap_or(false)
    }

    fn greeted(&self) -> Client<Box<dyn Stream>> {
        let mut client = self.connect();
        client.greet();
        client
    }

    fn contents(&self, len: usize) -> Vec<u8> {
        let mut contents = vec![0; len];
        self.device.open().unwrap().read(0, &mut contents).unwrap();
        contents
    }
}

fn write_data(mut client: Client<impl Stream>, data: &[u8]) -> bool {
    client.enter();
    client.write(0, data).error == 0
}

#[test]
fn every_listener_lets_in_whom_the_rule_says() {
    for place in PLACES {
        for asks in ASKS {
            let rig = match Rig::new(place, asks) {
                Ok(rig) => rig,
                Err(error) => {
                    assert!(!may_listen(place, asks), "{place:?}, {asks:?}: {error}");
                    assert_eq!(error.kind(), ErrorKind::Permission);
                    let text = error.to_string();
                    for word in ["tls-client-ca", "tls-anyone", "127.0.0.1"] {
                        assert!(text.contains(word), "{word}: {text}");
                    }
                    continue;
                }
            };
            let mut written = b"nothing".to_vec();
            rig.device.open().unwrap().write(0, &written).unwrap();
            for comer in COMERS {
                let data = format!("{comer:?}").into_bytes();
                let wrote = rig.writes(comer, &data);
                if !may_listen(place, asks) {
                    assert!(!wrote, "{place:?}, {asks:?}: {comer:?} wrote, from wherever it came");
                    continue;
                }
                assert_eq!(wrote, gets_in(place, asks, comer), "{place:?}, {asks:?}, {comer:?}");
                if wrote {
                    written = data;
                }
                assert_eq!(rig.contents(written.len()), written, "{place:?}, {asks:?}, {comer:?}");
            }
            assert!(may_listen(place, asks), "{place:?}, {asks:?} is open to all");
        }
    }
}

#[test]
fn letting_everyone_in_is_said_without_contradiction() {
    let dir = tempfile::tempdir().unwrap();
    Authority::new("authority").write_all(dir.path());
    let bind = |listen: &str, tls| {
        let listen = vec![listen.parse().unwrap()];
        let config = ServerConfig { listen, tls, tls_anyone: true, ..ServerConfig::new("unused") };
        Server::bind(config, Exports::new([device("64K")])).err().expect("a contradiction")
    };
    let asking = Tls::load(&files(dir.path(), true)).unwrap();
    for listen in ["tcp:0.0.0.0:0", "tcp:127.0.0.1:0"] {
        let error = bind(listen, Some(asking.clone()));
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("tls-anyone")), "{error}");
        let error = bind(listen, None);
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("tls-cert")), "{error}");
    }
}

/// A change to a TLS file, the reason why the file is then refused, and the only file to which that applies.
type Tampering = (fn(&Path), &'static str, Option<&'static str>);

#[test]
fn files_that_others_have_a_hand_in_are_refused() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: this user is not root, and cannot give files away");
        return;
    }
    let give_away = |path: &Path| chown(path, Some(NOBODY), None).unwrap();
    let all_write = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o602)).unwrap();
    let group_writes = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o620)).unwrap();
    let all_read = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    let lead_elsewhere = |path: &Path| {
        let elsewhere = path.with_extension("elsewhere");
        fs::rename(path, &elsewhere).unwrap();
        chown(&elsewhere, Some(NOBODY), None).unwrap();
        symlink(&elsewhere, path).unwrap();
    };
    // Opening it for reading would wait for a writer.
    let make_pipe = |path: &Path| {
        fs::remove_file(path).unwrap();
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    };
    let all =
        [("server-cert.pem", "tls-cert"), ("server-key.pem", "tls-key"), ("ca-cert.pem", "tls-client-ca")];
    let tamperings: [Tampering; 6] = [
        (give_away, "belongs to user 65534", None),
        (all_write, "users other than its owner may write it", None),
        (group_writes, "users other than its owner may write it", None),
        (lead_elsewhere, "belongs to user 65534", None),
        (make_pipe, "not a regular file", None),
        (all_read, "every user of this machine may read this key", Some("server-key.pem")),
    ];
    for (name, setting) in all {
        for (tamper, why, only) in tamperings {
            let dir = tempfile::tempdir().unwrap();
            Authority::new("authority").write_all(dir.path());
            let files = files(dir.path(), true);
            Tls::load(&files).unwrap();
            tamper(&dir.path().join(name));
            if only.is_some_and(|only| only != name) {
                Tls::load(&files).unwrap();
                continue;
            }
            let error = Tls::load(&files).expect_err(name);
            assert!(error.to_string().contains(why), "{name}: {error}");
            assert_eq!(error.setting(), Some(setting), "{error}");
        }
    }
}

/// Replaces a server's files by renaming new ones, as tools that renew certificates do.
fn renew(dir: &Path) -> Authority {
    let authority = Authority::new("renewed");
    let new = tempfile::tempdir_in(dir).unwrap();
    authority.write_all(new.path());
    for entry in fs::read_dir(new.path()).unwrap() {
        let entry = entry.unwrap();
        fs::rename(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    authority
}

#[test]
fn new_files_are_for_new_clients_and_those_at_work_go_on() {
    let mut rig = Rig::new(Place::Loopback, Asks::Certificate).unwrap();
    let tls = rig.tls.clone().unwrap();
    let mut at_work = start_tls(rig.greeted(), rig.config(Comer::Known, &TLS13).unwrap());
    at_work.go(true);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut rounds = 0u64;
            while !done.load(Ordering::Relaxed) || rounds < 100 {
                let data = rounds.to_be_bytes().repeat(8192);
                let offset = (1 + rounds % 7) * 65536;
                assert_eq!(at_work.write(offset, &data).error, 0);
                assert!(at_work.read(0, offset, data.len() as u32).data() == data);
                rounds += 1;
            }
            rounds
        });
        for _ in 0..10 {
            let before = rig.config(Comer::Known, &TLS13);
            assert!(rig.writes(Comer::Known, b"before"));
            rig.authority = renew(rig.dir.path());
            // Before the reload, the old files are in force.
            assert!(!rig.writes(Comer::Known, b"early"));
            tls.reload().unwrap();
            assert!(rig.writes(Comer::Known, b"known"));
            assert!(!rig.writes(Comer::WithoutCertificate, b"nobody"));
            // The client trusts only the old authority, and is no longer trusted.
            assert!(!rig.writes_with(Comer::Known, before, b"past"));
            assert_eq!(rig.contents(5), b"known");
        }
        done.store(true, Ordering::Relaxed);
        assert!(worker.join().unwrap() >= 100);
    });
}

#[test]
fn files_that_cannot_be_used_leave_the_old_ones_in_force() {
    let rig = Rig::new(Place::Loopback, Asks::Certificate).unwrap();
    let tls = rig.tls.as_ref().unwrap();
    let file = |name: &str| rig.dir.path().join(name);
    let damage = |name: &str, text: &str, setting: &str| {
        let good = fs::read(file(name)).unwrap();
        write(rig.dir.path(), name, text);
        let error = tls.reload().expect_err(name);
        assert_eq!(error.setting(), Some(setting), "{error}");
        assert!(rig.writes(Comer::Known, b"known") && !rig.writes(Comer::WithoutCertificate, b"nobody"));
        fs::write(file(name), good).unwrap();
    };
    let (expired, _) = rig.authority.issue(Validity::Past);
    // An incomplete renewal: the key does not match the new certificate.
    let (other, _) = rig.authority.issue(Validity::Now);
    damage("server-cert.pem", "", "tls-cert");
    damage("server-cert.pem", &expired, "tls-cert");
    damage("server-cert.pem", &other, "tls-key");
    damage("server-key.pem", "-----BEGIN PRIVATE KEY-----\n", "tls-key");
    damage("ca-cert.pem", "", "tls-client-ca");
    fs::rename(file("ca-cert.pem"), file("gone.pem")).unwrap();
    assert_eq!(tls.reload().unwrap_err().setting(), Some("tls-client-ca"));
    fs::rename(file("gone.pem"), file("ca-cert.pem")).unwrap();
    if rustix::process::geteuid().is_root() {
        chown(file("ca-cert.pem"), Some(NOBODY), None).unwrap();
        let error = tls.reload().unwrap_err();
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Permission, Some("tls-client-ca")));
        assert!(rig.writes(Comer::Known, b"known") && !rig.writes(Comer::Stranger, b"stranger"));
        chown(file("ca-cert.pem"), Some(0), None).unwrap();
    } else {
        println!("skipped: this user is not root, and cannot give files away");
    }
    tls.reload().unwrap();
    assert!(rig.writes(Comer::Known, b"known"));
}
