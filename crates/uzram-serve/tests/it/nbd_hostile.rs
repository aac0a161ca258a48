//! Clients that break the protocol, each beside a client that must keep working.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{ALL_HEADERS, Client, Headers, Random, TestServer, cmd, option_bytes, seed};
use uzram_serve::nbd::proto::command_flags;

/// Runs `attack` while another client writes and reads back, and checks that this gets every reply;
/// afterwards the server accepts new clients, and the attack holds no device open.
fn beside_a_good_client(server: &TestServer, attack: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut client = server.ready(true);
            let (mut random, mut rounds) = (Random::new(seed()), 0);
            while !done.load(Ordering::Relaxed) || rounds < 3 {
                let data = random.bytes(10_000);
                assert_eq!(client.write(5000, &data).error, 0);
                assert!(client.read(0, 5000, 10_000).data() == data);
                rounds += 1;
            }
        });
        attack();
        done.store(true, Ordering::Relaxed);
        worker.join().unwrap();
    });
    server.ready(true);
}

#[test]
fn half_a_header_and_silence_or_the_end() {
    let server = TestServer::new("1M");
    beside_a_good_client(&server, || {
        let mut silent = Vec::new();
        for headers in ALL_HEADERS {
            let whole = headers.request(0, cmd::READ, 7, 0, 4096);
            for cut in 1..whole.len() {
                let mut client = server.ready_with(headers);
                client.send(&whole[..cut]);
                if cut % 9 == 0 {
                    silent.push(client);
                }
            }
        }
        // Half a header is not a request: silent clients get no reply.
        for mut client in silent {
            client.stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            assert!(client.stream.read(&mut [0]).is_err());
        }
    });
}

#[test]
fn lengths_of_4_gib_and_more() {
    let server = TestServer::new("1M");
    beside_a_good_client(&server, || {
        for headers in ALL_HEADERS {
            let most = if headers == Headers::Extended { u64::MAX } else { u32::MAX.into() };
            for len in [u64::from(u32::MAX), most] {
                // Without a payload, the request fails, and the session goes on.
                let mut client = server.ready_with(headers);
                for command in [cmd::READ, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE, cmd::BLOCK_STATUS, 4711]
                {
                    assert_ne!(client.long_call(0, command, 4096, len).error, 0, "{command}");
                }
                assert_eq!(client.write(0, b"still here").error, 0);
                // With a payload, the session ends.
                client.send(&headers.request(0, cmd::WRITE, 7, 0, len));
                assert!(client.at_end());
            }
        }
    });
}

/// A million options, sent without waiting for replies: the client is disconnected.
#[test]
fn options_without_end() {
    let server = TestServer::new("1M");
    beside_a_good_client(&server, || {
        let mut client = server.client();
        let options = option_bytes(0x1234_5678, b"?").repeat(1000);
        let mut heard = client.stream.try_clone().unwrap();
        let drain =
            std::thread::spawn(move || std::io::copy(&mut heard, &mut std::io::sink()).map_or(0, |n| n));
        let mut sent = 0;
        while sent < 1_000_000 && client.stream.write_all(&options).is_ok() {
            sent += 1000;
        }
        assert!(sent < 1_000_000, "the server would listen for ever");
        assert!(drain.join().unwrap() < 256 * 200);
    });
}

#[test]
fn disconnects_in_mid_payload() {
    let server = TestServer::new("32M");
    let mut random = Random::new(seed());
    beside_a_good_client(&server, || {
        for headers in ALL_HEADERS {
            for _ in 0..20 {
                let mut client = server.ready_with(headers);
                let (len, sent) = (1 + random.below_u64(1 << 20), random.below_u64(300_000));
                client.send(&headers.request(0, cmd::WRITE, 7, 16 << 20, len + sent));
                client.send(&vec![1; sent as usize]);
            }
        }
        for payload in [0, 1, 7, 8, 11] {
            let (mut client, _) = server.with_contexts(Headers::Extended, &[b"base:allocation"]);
            let flags = command_flags::PAYLOAD_LEN;
            client.send(&Headers::Extended.request(flags, cmd::BLOCK_STATUS, 7, 0, 12));
            client.send(&[0; 12][..payload]);
        }
    });
}

/// A client that sends requests forever and never reads replies delays no other client.
#[test]
fn questions_without_listening() {
    let server = TestServer::new("1M");
    beside_a_good_client(&server, || {
        let (mut client, _) = server.with_contexts(Headers::Extended, &[b"base:allocation", b"uzram:state"]);
        client.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let questions = Headers::Extended.request(0, cmd::BLOCK_STATUS, 7, 0, 1 << 20).repeat(1000);
        while client.stream.write_all(&questions).is_ok() {}
    });
}

/// Zeroing and trimming terabytes takes long, but delays neither other clients nor the server's end.
#[test]
fn a_server_that_stops_does_not_wait_for_terabytes() {
    let server = TestServer::new("16T");
    let mut clients: Vec<Client> = (0..2).map(|_| server.ready_with(Headers::Extended)).collect();
    let mut small = server.ready(true);
    // The first is done at once, as nothing was written; the other allocates every page.
    for (client, (flags, command)) in
        clients.iter_mut().zip([(0, cmd::TRIM), (command_flags::NO_HOLE, cmd::WRITE_ZEROES)])
    {
        client.long_request(flags, command, 0, 16 << 40, &[]);
    }
    assert_eq!(small.write(0, b"meanwhile").error, 0);
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    for mut client in clients {
        // The client got ESHUTDOWN, was disconnected, or, on a fast machine, the request is done.
        let mut heard = Vec::new();
        let _ = client.stream.read_to_end(&mut heard);
        assert!(heard.is_empty() || heard[..4] == 0x6e8a_278cu32.to_be_bytes());
    }
}
