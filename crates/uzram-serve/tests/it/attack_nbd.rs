//! Slow, silent and invalid NBD clients, and clients with huge requests: their effect on other clients.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::gate::{Gate, gated};
use crate::common::secure::Secure;
use crate::common::{
    ALL_HEADERS, Client, Headers, Random, TestServer, cmd, device, eventually, option_bytes, request_bytes,
};
use uzram::backing::{Direction, Fault, FaultKind};
use uzram::device::Device;
use uzram_serve::nbd::proto::{command_flags, option, reply};
use uzram_serve::nbd::{Clients, Kicked, ServerConfig};

const PAGE: usize = 4096;
const LONGEST: usize = 32 << 20;
/// The time limit for slow clients in these tests.
const SHORT: Duration = Duration::from_millis(300);

/// Starts a server with a TCP port besides its Unix socket.
fn with_tcp(device: Arc<Device>, configure: impl FnOnce(&mut ServerConfig)) -> TestServer {
    TestServer::with(device, |config| {
        config.listen.push("tcp:127.0.0.1:0".parse().unwrap());
        configure(config);
    })
}

fn tcp_ready(server: &TestServer) -> Client<TcpStream> {
    let mut client = server.tcp();
    client.greet();
    client.go(false);
    client
}

fn chosen(clients: &Clients) -> usize {
    clients.list().iter().filter(|client| client.export.is_some()).count()
}

fn drain(stream: &mut impl Read) -> usize {
    let (mut buf, mut len) = (vec![0; 1 << 16], 0);
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return len,
            Ok(more) => len += more,
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection has not ended");
                return len;
            }
        }
    }
}

fn filled(device: &Arc<Device>, len: usize) -> Vec<u8> {
    let data = Random::new(1).bytes(len);
    device.open().unwrap().write(0, &data).unwrap();
    data
}

#[test]
fn long_replies_are_right_with_and_without_memory_for_them() {
    // Around the sizes at which the way of replying changes, and the longest.
    let long = [(0, 3 << 20), (1, 3 << 20), (4095, 2 << 20), (5000, 100_001), (0, 40_000)];
    let edges = [(1, 252 << 10), (4095, (252 << 10) + 1), (4096, LONGEST), (12_345, LONGEST)];
    for (shared_bytes, ranges) in [(0, &long[..]), (1 << 20, &long), (64 << 20, &long), (64 << 20, &edges)] {
        let disk = device("64M");
        let data = filled(&disk, LONGEST + 12_345);
        let server = TestServer::with(disk, |config| config.shared_bytes = shared_bytes);
        for headers in ALL_HEADERS {
            let mut client = server.ready_with(headers);
            for (from, len) in ranges {
                let df = if headers == Headers::Simple { 0 } else { command_flags::DF };
                for flags in [0, df] {
                    let reply = client.read(flags, *from as u64, *len as u32);
                    assert!(reply.error == 0 && reply.data() == data[*from..from + len]);
                    assert!(flags == 0 || reply.chunks.len() == 1);
                    let mut next = if headers == Headers::Simple { 0 } else { *from as u64 };
                    for (at, chunk) in &reply.chunks {
                        assert_eq!(*at, next);
                        next += chunk.len() as u64;
                    }
                }
            }
            // Errors that are known before the reply are reported normally.
            assert_ne!(client.read(0, 63 << 20, 2 << 20).error, 0);
            assert_eq!(client.write(0, &data[..LONGEST]).error, 0);
        }
    }
}

/// Returns a device whose backing device is controlled by the test and has pages 512 to 527.
fn backed() -> (Arc<Device>, Gate) {
    let (device, gate) = gated("zram0", "64M", &[]);
    filled(&device, 4 << 20);
    device.set("writeback", "page_indexes=512-527").unwrap();
    assert!(device.stats().pages_backed > 0);
    (device, gate)
}

#[test]
fn a_reply_that_cannot_be_finished_ends_its_connection_alone() {
    let (device, gate) = backed();
    let server = TestServer::with(device, |config| config.shared_bytes = 0);
    gate.faults.add(Fault { direction: Some(Direction::Read), ..Fault::always(FaultKind::Error) });
    let mut steady = server.ready(true);
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        let flags = if headers == Headers::Simple { 0 } else { command_flags::DF };
        client.request(flags, cmd::READ, 0, 4 << 20, &[]);
        let len = drain(&mut client.stream);
        assert!((1..4 << 20).contains(&len), "{headers:?}: {len} bytes, and then the end");
        // An error that can be reported is reported.
        assert_ne!(steady.read(0, 512 * PAGE as u64, 4096).error, 0);
        assert_eq!(steady.read(0, 0, 4096).error, 0);
    }
}

/// A client that reads nothing, and one that reads single bytes.
#[test]
fn who_takes_no_reply_is_cut_off() {
    let server = with_tcp(device("64M"), |config| config.send_timeout = SHORT);
    let clients = server.clients.clone();
    let mut steady = server.ready(true);
    let mut idle = tcp_ready(&server);
    for by_bytes in [false, true] {
        let mut over_unix = server.ready(false);
        let mut over_tcp = tcp_ready(&server);
        eventually(|| chosen(&clients) == 4);
        over_unix.request(0, cmd::READ, 0, LONGEST as u64, &[]);
        over_tcp.request(0, cmd::READ, 0, LONGEST as u64, &[]);
        let over_unix = over_unix.stream.try_clone().unwrap();
        let over_tcp = over_tcp.stream.try_clone().unwrap();
        let mut streams: [(Box<dyn Read + Send>, bool); 2] =
            [(Box::new(over_unix), true), (Box::new(over_tcp), true)];
        let began = Instant::now();
        while chosen(&clients) > 2 {
            assert!(began.elapsed() < Duration::from_secs(20), "they are still there");
            if by_bytes {
                streams.iter_mut().for_each(|(stream, goes_on)| {
                    *goes_on = *goes_on && stream.read(&mut [0]).is_ok();
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(steady.write(0, b"meanwhile").error, 0);
    }
    // A client without outstanding replies may be idle forever.
    thread::sleep(2 * SHORT);
    assert_eq!(idle.write(0, b"awake").error, 0);
}

#[test]
fn who_takes_a_long_reply_slowly_but_steadily_gets_it() {
    let server = TestServer::with(device("64M"), |config| config.send_timeout = Duration::from_secs(2));
    let mut client = server.ready(false);
    client.request(0, cmd::READ, 0, LONGEST as u64, &[]);
    client.take_vec(16);
    // Faster than the minimum speed: a MiB per 2 s.
    for _ in 0..LONGEST >> 20 {
        client.take_vec(1 << 20);
        thread::sleep(Duration::from_millis(80));
    }
    assert_eq!(client.write(0, b"and on").error, 0);
}

#[test]
fn who_takes_no_reply_over_tls_is_cut_off() {
    let secure = Secure::with(device("32M"), |config| config.send_timeout = SHORT);
    let clients = secure.server.clients.clone();
    let mut steady = secure.steady();
    let mut deaf = secure.over(&rustls::version::TLS13);
    deaf.go(false);
    deaf.request(0, cmd::READ, 0, LONGEST as u64, &[]);
    deaf.stream.flush().unwrap();
    eventually(|| chosen(&clients) == 1);
    assert_eq!(steady.write(0, b"meanwhile").error, 0);
}

/// A write that waits holds memory once it is offloaded, so its payload must not be slow. The payload of a
/// write that does not wait may be arbitrarily slow.
#[test]
fn who_does_not_send_a_payload_that_memory_is_held_for_is_cut_off() {
    let (device, gate) = backed();
    let server = TestServer::with(device, |config| config.payload_timeout = SHORT);
    let clients = server.clients.clone();
    let mut steady = server.ready(true);
    let mut idle = server.ready(false);
    idle.send(&request_bytes(0, cmd::WRITE, 1, 0, 8192));
    idle.send(&[1; 5000]);
    for trickles in [false, true] {
        let held = gate.shut(Direction::Read);
        let mut slow = server.ready(false);
        eventually(|| chosen(&clients) == 3);
        // It begins within a page on the backing device.
        slow.send(&request_bytes(0, cmd::WRITE, 1, 512 * PAGE as u64 + 100, 2 << 20));
        slow.send(&[1; 5000]);
        let began = Instant::now();
        let mut goes_on = trickles;
        while chosen(&clients) > 2 {
            assert!(began.elapsed() < Duration::from_secs(20), "it is still there");
            goes_on = goes_on && slow.stream.write_all(&[1]).is_ok();
            thread::sleep(Duration::from_millis(10));
        }
        drop(held);
        assert_eq!(steady.write(0, b"meanwhile").error, 0);
    }
    idle.send(&[1; 8192 - 5000]);
    assert_eq!(idle.reply(0).error, 0);
}

#[test]
fn floods_over_tls_leave_other_listeners_alone() {
    let secure = Secure::with(device("32M"), |config| config.max_connections = 100);
    // They ask for TLS, and then send nothing, or garbage.
    let mut flood: Vec<_> = (0..100)
        .map(|index| {
            let mut client = secure.server.tcp();
            client.send(&3u32.to_be_bytes());
            client.send(&option_bytes(option::STARTTLS, &[]));
            if index % 3 == 0 {
                client.send(&[0x16, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff]);
            }
            client
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(secure.steady().write(0, b"here").error, 0);
    }
    assert_eq!(secure.ready().write(0, b"there").error, 0);
    flood.truncate(1);
}

#[test]
fn a_kicked_client_goes_and_others_stay() {
    let secure = Secure::new();
    let server = &secure.server;
    let clients = server.clients.clone();
    let mut steady = server.ready(true);
    let steady_id = clients.list()[0].id;
    let mut idle = server.ready(true);
    let mut haggling = server.client();
    let mut encrypted = secure.ready();
    let mut busy = server.ready(false);
    busy.request(0, cmd::READ, 0, LONGEST as u64, &[]);
    eventually(|| clients.list().len() == 5);
    let listed = clients.list();
    let uid = rustix::process::geteuid().as_raw();
    assert_eq!((listed[0].pid, listed[0].uid), (Some(std::process::id() as i32), Some(uid)));
    assert_eq!(listed[3].peer, encrypted.stream.sock.local_addr().unwrap().to_string());
    assert_eq!(listed[3].listener, format!("tcp:{}", server.tcp_address()));
    assert_eq!((listed[0].export.as_deref(), &listed[2].export), (Some("zram0"), &None));
    for client in clients.list() {
        if client.id != steady_id {
            assert_eq!(clients.kick(client.id), Kicked::Gone);
            assert_eq!(clients.kick(client.id), Kicked::Unknown);
        }
    }
    assert!(idle.at_end() && haggling.at_end());
    assert!(matches!(encrypted.stream.read(&mut [0]), Ok(0) | Err(_)));
    assert!(drain(&mut busy.stream) < LONGEST + 16);
    assert_eq!(steady.write(0, b"still here").error, 0);
    assert_eq!(clients.list().len(), 1);
    assert_eq!(clients.kick(steady_id), Kicked::Gone);
    eventually(|| server.device.set("reset", "1").is_ok());
}

/// A kicked connection whose request waits for a device ends when the device has finished it.
#[test]
fn a_kicked_client_that_waits_for_its_device_ends_with_that() {
    let (device, gate) = backed();
    let server = TestServer::with(Arc::clone(&device), |_| {});
    let clients = server.clients.clone();
    let held = gate.shut(Direction::Read);
    let mut client = server.ready(true);
    client.request(0, cmd::READ, 512 * PAGE as u64, 4096, &[]);
    held.wait_for(1);
    let id = clients.list()[0].id;
    assert_eq!(clients.kick(id), Kicked::Ending);
    drop(held);
    eventually(|| clients.list().is_empty());
    device.set("reset", "1").unwrap();
}

/// Invalid names and lengths do not affect a listener's other clients; and a client that chooses an export
/// repeatedly counts as one.
#[test]
fn a_client_is_counted_once_whatever_it_says() {
    let server = TestServer::with(device("1M"), |config| config.max_connections = 2);
    let clients = server.clients.clone();
    for _ in 0..10 {
        let mut client = server.client();
        for _ in 0..20 {
            let replies = client.option(option::INFO, &crate::common::info_request(b"", &[1, 2, 3]));
            assert_eq!(replies.last().unwrap().0, reply::ACK);
            assert_ne!(client.option(option::GO, &[0xff; 8]).pop().unwrap().0, reply::ACK);
        }
        assert_eq!(chosen(&clients), 0);
    }
    let [first, mut second] = [server.ready(true), server.ready(true)];
    eventually(|| chosen(&clients) == 2);
    assert!(Client::silent(&server.path).refused());
    assert_eq!(second.write(0, b"still served").error, 0);
    drop(first);
    eventually(|| !Client::silent(&server.path).refused());
}
