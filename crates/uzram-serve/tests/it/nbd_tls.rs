//! TLS: where it is required, what survives its start, which clients are accepted, and how it ends. How
//! clients of both kinds are dropped that stop in mid-handshake, or when the server stops.
//! Every test has a second client, which must not be affected.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::pki::{Authority, Validity, write};
use crate::common::secure::{Encrypted, Secure, client_config, encrypt, files, start_tls};
use crate::common::{
    Client, Random, TestServer, cmd, device, eventually, info_request, option_bytes, request_bytes, seed,
};
use rustls::version::{TLS12, TLS13};
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{option, reply, transmission_flags};
use uzram_serve::nbd::{Buffers, SHARED_BYTES, Tls, TlsFiles, serve_stream};

/// Returns whether TLS is refused: the handshake fails, or the first message after it.
fn refused<S: Read + Write>(mut client: Encrypted<S>) -> bool {
    let asked = client.stream.write_all(&option_bytes(option::LIST, &[]));
    let answered = asked.and_then(|()| client.stream.flush()).and_then(|()| {
        let mut answer = [0; 20];
        client.stream.read_exact(&mut answer)
    });
    answered.is_err()
}

fn check(steady: &mut Client) {
    assert_eq!(steady.write(0, b"steady").error, 0);
    assert_eq!(steady.read(0, 0, 6).data(), b"steady");
}

/// Reads to the end, or to a reset; returns the bytes.
fn rest(stream: &mut impl Read) -> Vec<u8> {
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    heard
}

/// With the most memory, and with the smallest buffers.
#[test]
fn data_survives_both_versions_of_tls() {
    let mut random = Random::new(seed());
    for (version, shared_bytes) in [(&TLS12, SHARED_BYTES), (&TLS13, 0)] {
        let secure = Secure::with(device("32M"), |config| config.shared_bytes = shared_bytes);
        let mut steady = secure.steady();
        for structured in [false, true] {
            let mut client = secure.over(version);
            let (size, _) = client.go(structured);
            assert_eq!(size, 32 << 20);
            for longest in [700_000; 30].into_iter().chain([3 << 20]) {
                let len = 1 + random.below_u64(longest) as usize;
                let offset = 4096 + random.below_u64(28 << 20);
                let data = random.bytes(len);
                assert_eq!(client.write(offset, &data).error, 0);
                assert!(client.read(0, offset, len as u32).data() == data);
                assert!(steady.read(0, offset, len as u32).data() == data);
            }
            // Many requests at once, answered in batches.
            let requests: Vec<u8> =
                (0..500).flat_map(|page| request_bytes(0, cmd::READ, page, page * 4096, 4096)).collect();
            client.send(&requests);
            client.stream.flush().unwrap();
            for page in 0..500 {
                let reply = client.reply(4096);
                assert_eq!((reply.cookie, reply.error), (page, 0));
                assert!(reply.data() == steady.read(0, page * 4096, 4096).data());
            }
        }
        check(&mut steady);
    }
}

struct Torn(UnixStream, usize);

impl Read for Torn {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let len = buf.len().min(self.1);
        self.0.read(&mut buf[..len])
    }
}

impl Write for Torn {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let len = buf.len().min(self.1);
        self.0.write(&buf[..len])
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn records_may_be_torn_anywhere() {
    let authority = Authority::new("authority");
    let dir = tempfile::tempdir().unwrap();
    authority.write_all(dir.path());
    let tls = Tls::load(&files(dir.path(), true)).unwrap();
    let exports = Exports::new([device("4M")]);
    let mut random = Random::new(seed());
    for version in [&TLS12, &TLS13] {
        for most_bytes in [1, 2, 7, 100, 5000, 20_000, 70_000] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            std::thread::scope(|scope| {
                let server = scope.spawn(|| {
                    let mut buffers = Buffers::new(0).unwrap();
                    let mut stream = Torn(theirs, most_bytes);
                    serve_stream(&mut stream, &exports, &mut buffers, Some((&tls, true)))
                });
                let mut client = Client::over(ours);
                client.greet();
                let identity = Some(authority.issue(Validity::Now));
                let mut client = start_tls(client, client_config(&authority, identity, version));
                client.go(true);
                for _ in 0..4 {
                    let len = 1 + random.below_u64(20 * most_bytes.min(20_000) as u64) as usize;
                    let data = random.bytes(len);
                    assert_eq!(client.write(77, &data).error, 0);
                    client.stream.conn.refresh_traffic_keys().unwrap_or_default();
                    assert!(client.read(0, 77, len as u32).data() == data);
                }
                client.request(0, cmd::DISC, 0, 0, &[]);
                client.stream.flush().unwrap();
                assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
                server.join().unwrap().unwrap();
            });
        }
    }
}

#[test]
fn over_tcp_nothing_but_tls_is_answered() {
    let secure = Secure::new();
    let mut steady = secure.steady();
    let mut client = secure.tcp();
    let go = info_request(b"", &[]);
    for (number, data) in [
        (option::LIST, &[][..]),
        (option::INFO, &go),
        (option::GO, &go),
        (option::STRUCTURED_REPLY, &[]),
        (9, &[]),
        (10, &[]),
        (11, &[]),
        (77, b"unknown"),
    ] {
        let replies = client.option(number, data);
        assert!(matches!(replies[..], [(reply::ERR_TLS_REQD, _)]), "option {number}: {replies:?}");
    }
    assert_eq!(client.option(option::STARTTLS, b"data")[0].0, reply::ERR_INVALID);
    let mut client = start_tls(client, client_config(&secure.authority, None, &TLS13));
    assert_eq!(client.option(option::STARTTLS, &[])[0].0, reply::ERR_INVALID);
    assert_eq!(client.option(77, &[])[0].0, reply::ERR_UNSUP);
    client.go(true);
    assert_eq!(client.write(8192, b"encrypted").error, 0);

    let mut old = secure.tcp();
    old.send(&option_bytes(option::EXPORT_NAME, b"zram0"));
    assert_eq!(rest(&mut old.stream), b"");
    let mut leaving = secure.tcp();
    assert_eq!(leaving.option(option::ABORT, &[]), [(reply::ACK, vec![])]);
    assert_eq!(rest(&mut leaving.stream), b"");
    check(&mut steady);
}

#[test]
fn what_was_agreed_in_clear_is_forgotten() {
    let secure = Secure::new();
    let mut steady = secure.steady();
    let mut client = secure.server.client();
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(reply::ACK, vec![])]);
    let mut client = start_tls(client, client_config(&secure.authority, None, &TLS13));
    let (_, flags) = client.go(false);
    assert_eq!(flags & transmission_flags::SEND_DF, 0);
    // The client panics if the reply is structured.
    assert_eq!(client.read(0, 0, 4096).error, 0);
    check(&mut steady);
}

#[test]
fn clear_text_behind_starttls_is_not_obeyed() {
    let secure = Secure::new();
    let mut steady = secure.steady();
    for injected in [
        option_bytes(option::GO, &info_request(b"", &[])),
        option_bytes(option::ABORT, &[]),
        option_bytes(option::LIST, &[]).repeat(1000),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 5],
        vec![22, 3, 1, 255, 255],
        vec![22, 3, 1, 0, 0, 22, 3, 1, 0, 0],
    ] {
        for at_once in [false, true] {
            let mut client = secure.tcp();
            let starttls = option_bytes(option::STARTTLS, &[]);
            if at_once {
                client.send(&[starttls, injected.clone()].concat());
            } else {
                client.send(&starttls);
                client.send(&injected);
            }
            client.stream.shutdown(std::net::Shutdown::Write).unwrap();
            let heard = rest(&mut client.stream);
            // The acknowledgement, and at most an alert: no other option gets a reply.
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            let replies = heard.windows(8).filter(|word| *word == magic).count();
            assert!(replies <= 1 && heard.len() <= 20 + 7, "{heard:?}");
        }
    }
    // A client that prepends clear text to a real handshake fails in it.
    let mut client = secure.tcp();
    assert_eq!(client.option(option::STARTTLS, &[]), [(reply::ACK, vec![])]);
    client.send(&option_bytes(option::LIST, &[]));
    let config = client_config(&secure.authority, None, &TLS13);
    assert!(refused(Client::on(encrypt(client.stream, config))));
    check(&mut steady);
}

#[test]
fn a_session_ends_in_order() {
    let secure = Secure::new();
    let mut steady = secure.steady();
    // rustls reports an end without close_notify as an error.
    let mut leaving = secure.ready();
    leaving.request(0, cmd::DISC, 0, 0, &[]);
    leaving.stream.flush().unwrap();
    assert_eq!(leaving.stream.read(&mut [0]).unwrap(), 0);

    let mut closing = secure.ready();
    closing.stream.conn.send_close_notify();
    closing.stream.flush().unwrap();
    assert_eq!(closing.stream.read(&mut [0]).unwrap(), 0);

    // Requests, an end and a close in one go: the replies still arrive.
    let mut hasty = secure.ready();
    let requests: Vec<u8> = (0..200).flat_map(|n| request_bytes(0, cmd::READ, n, n * 4096, 4096)).collect();
    hasty.send(&[requests, request_bytes(0, cmd::DISC, 0, 0, 0)].concat());
    hasty.stream.conn.send_close_notify();
    hasty.stream.flush().unwrap();
    for n in 0..200 {
        assert_eq!(hasty.reply(4096).cookie, n);
    }
    assert_eq!(hasty.stream.read(&mut [0]).unwrap(), 0);

    let mut vanishing = secure.ready();
    vanishing.request(0, cmd::WRITE, 0, 1 << 20, &[1; 1000]);
    vanishing.stream.flush().unwrap();
    drop(vanishing.stream.sock);
    check(&mut steady);
}

#[test]
fn stopping_ends_idle_busy_and_stuck_clients_in_order() {
    let secure = Secure::new();
    let (mut idle, mut idle_in_clear) = (secure.ready(), secure.steady());
    let (mut haggling, mut haggling_in_clear) = (secure.over(&TLS13), secure.server.client());
    assert_eq!(haggling.option(option::LIST, &[]).len(), 2);
    let mut starting = secure.tcp();
    assert_eq!(starting.option(option::STARTTLS, &[]), [(reply::ACK, vec![])]);
    let mut in_mid_write = secure.steady();
    in_mid_write.request(0, cmd::WRITE, 0, 1 << 20, &[1; 1000]);
    // They request more than a socket holds and never read.
    let (mut stuck, mut stuck_in_clear) = (secure.ready(), secure.steady());
    stuck.request(0, cmd::READ, 0, 32 << 20, &[]);
    stuck.stream.flush().unwrap();
    stuck_in_clear.request(0, cmd::READ, 0, 32 << 20, &[]);
    let busy = [(); 2].map(|()| {
        let mut client = secure.steady();
        std::thread::spawn(move || {
            let request = request_bytes(0, cmd::READ, 0, 0, 4096);
            let mut reply = [0; 4096 + 28];
            while client.stream.write_all(&request).is_ok() && client.stream.read_exact(&mut reply).is_ok() {}
        })
    });
    std::thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    let Secure { server: TestServer { device, thread, path, .. }, port, .. } = secure;
    drop(thread);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(idle.stream.read(&mut [0]).unwrap(), 0);
    assert_eq!(haggling.stream.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(rest(&mut starting.stream), b"");
    assert!([&mut idle_in_clear, &mut haggling_in_clear, &mut in_mid_write].into_iter().all(Client::at_end));
    busy.into_iter().for_each(|client| client.join().unwrap());
    assert!(TcpStream::connect(port).is_err() && UnixStream::connect(&path).is_err());
    device.set("reset", "1").unwrap();
}

/// Returns whether the other side has closed a connection, even if there is unread data.
fn is_hung_up(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec::default())).unwrap();
    polled[0].revents().contains(PollFlags::HUP)
}

#[test]
fn whoever_stops_in_mid_handshake_is_dropped_in_time() {
    // Long enough for those that finish theirs, on a busy machine.
    let timeout = Duration::from_secs(2);
    let secure = Secure::with(device("32M"), |config| config.handshake_timeout = timeout);
    let mut steady = secure.steady();
    let started = Instant::now();
    let mut dripping = Client::silent(&secure.server.path);
    dripping.take::<18>();
    let mut stream = dripping.stream.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        while stream.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    // It requests more than its socket holds, and does not read the replies in time.
    let mut deaf = secure.server.client();
    deaf.send(&option_bytes(option::INFO, &info_request(b"", &[1, 2, 3])).repeat(255));
    let hello = {
        let mut bytes = Vec::new();
        let config = client_config(&secure.authority, None, &TLS13);
        encrypt(std::io::empty(), config).conn.write_tls(&mut bytes).unwrap();
        bytes
    };
    let starttls = option_bytes(option::STARTTLS, &[]);
    // The bytes that a client sends in clear text after the greeting, before it falls silent.
    let phases = [
        vec![],
        starttls[..7].to_vec(),
        starttls.clone(),
        [&starttls[..], &hello[..3]].concat(),
        [&starttls[..], &hello[..hello.len() - 1]].concat(),
        [&starttls[..], &hello[..]].concat(),
    ];
    let mut slow: Vec<Client<TcpStream>> = phases
        .iter()
        .map(|said| {
            let mut client = secure.tcp();
            client.send(said);
            client
        })
        .collect();
    slow.push(secure.server.tcp());
    let mut encrypted: Vec<_> = [&[][..], &starttls[..9]]
        .map(|said| {
            let mut client = secure.over(&TLS13);
            assert_eq!(client.option(option::LIST, &[]).len(), 2);
            client.send(said);
            client.stream.flush().unwrap();
            client
        })
        .into();
    check(&mut steady);
    secure.ready();
    slow.iter_mut().for_each(|client| drop(rest(&mut client.stream)));
    encrypted.iter_mut().for_each(|client| drop(rest(&mut client.stream)));
    // The client does not read before the server has closed the connection.
    eventually(|| is_hung_up(&deaf.stream));
    let heard = rest(&mut deaf.stream);
    let acknowledged = heard.windows(4).filter(|word| *word == reply::ACK.to_be_bytes()).count();
    assert!(acknowledged < 255, "the server stopped talking to it");
    drip.join().unwrap();
    assert!(started.elapsed() >= timeout);
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    check(&mut steady);
}

#[test]
fn files_that_do_not_do_are_refused_with_the_option_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("authority");
    authority.write_all(dir.path());
    let good = files(dir.path(), true);
    Tls::load(&good).unwrap();
    let file = |name: &str, text: &str| write(dir.path(), name, text);
    let issued = |validity, name: &str| {
        let (cert, key) = authority.issue(validity);
        (file(&format!("{name}-cert.pem"), &cert), file(&format!("{name}-key.pem"), &key))
    };
    let (past, past_key) = issued(Validity::Past, "past");
    let (future, future_key) = issued(Validity::Future, "future");
    let missing = dir.path().join("missing");
    let empty = file("empty", "");
    let torn = file("torn", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    let nonsense = file("nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let bad_key = file("bad-key", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
    let endless = PathBuf::from("/dev/zero");
    let long = file("long", &" ".repeat((1 << 20) + 1));
    let cert = |path: &PathBuf| TlsFiles { cert: path.clone(), ..good.clone() };
    let key = |path: &PathBuf| TlsFiles { key: path.clone(), ..good.clone() };
    let ca = |path: &PathBuf| TlsFiles { client_ca: Some(path.clone()), ..good.clone() };
    for (files, setting, words) in [
        (cert(&missing), "tls-cert", "No such file"),
        (cert(&empty), "tls-cert", "no certificate"),
        (cert(&good.key), "tls-cert", "no certificate"),
        (cert(&torn), "tls-cert", "no END line"),
        (cert(&nonsense), "tls-cert", "cannot be used"),
        (cert(&endless), "tls-cert", "not a regular file"),
        (cert(&long), "tls-cert", "1 MiB"),
        (cert(&dir.path().to_owned()), "tls-cert", "not a regular file"),
        (TlsFiles { cert: past, key: past_key, client_ca: None }, "tls-cert", "expired"),
        (TlsFiles { cert: future, key: future_key, client_ca: None }, "tls-cert", "not valid yet"),
        (key(&missing), "tls-key", "No such file"),
        (key(&good.cert), "tls-key", "no private key"),
        (key(&bad_key), "tls-key", "cannot be used"),
        (key(&dir.path().join("client-key.pem")), "tls-key", "does not belong"),
        (ca(&missing), "tls-client-ca", "No such file"),
        (ca(&empty), "tls-client-ca", "no certificate"),
        (ca(&nonsense), "tls-client-ca", "cannot be used"),
    ] {
        let error = Tls::load(&files).expect_err(words);
        assert_eq!(error.setting(), Some(setting), "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}
