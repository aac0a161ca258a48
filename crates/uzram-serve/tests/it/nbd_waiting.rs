//! Requests that wait for a backing device or for memory: they do not delay other requests, and are answered
//! when they are done.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::gate::{Gate, gated};
use crate::common::secure::Secure;
use crate::common::{ALL_HEADERS, Client, Headers, Random, Reply, TestServer, cmd, eventually, seed};
use uzram::ErrorKind;
use uzram::backing::Direction;
use uzram::device::Device;
use uzram_serve::nbd::proto::{NbdError, command_flags};

const PAGE: usize = 4096;

/// Returns a server of a disk of 16 MiB on a backing device that can be shut.
fn served(settings: &[(&str, &str)]) -> (TestServer, Arc<Device>, Gate) {
    let (device, gate) = gated("zram0", "16M", settings);
    (TestServer::with(Arc::clone(&device), |_| {}), device, gate)
}

fn at(page: u64) -> u64 {
    page * PAGE as u64
}

fn fill<S: Read + Write>(client: &mut Client<S>, pages: Range<u64>) -> Vec<u8> {
    let data: Vec<u8> = pages.clone().flat_map(|page| Random::new(page).bytes(PAGE)).collect();
    assert_eq!(client.write(at(pages.start), &data).error, 0);
    data
}

/// Asks for the first pages, and returns the requests' cookies and lengths.
fn ask<S: Read + Write>(client: &mut Client<S>, pages: u64) -> Vec<(u64, usize)> {
    (0..pages).map(|page| (client.request(0, cmd::READ, at(page), 4096, &[]), PAGE)).collect()
}

/// Receives the replies to these requests, which have these contents; returns how many a stopping server
/// refused.
fn are_answered<S: Read + Write>(client: &mut Client<S>, asked: &[(u64, usize)], data: &[u8]) -> usize {
    let replies = client.replies(asked);
    let is_refused = |((cookie, _), page): (&(u64, usize), &[u8])| {
        let is_refused = replies[cookie].error == NbdError::Shutdown as u32;
        assert!(is_refused || replies[cookie].error == 0 && replies[cookie].data() == page);
        is_refused
    };
    std::iter::zip(asked, data.chunks(PAGE)).map(is_refused).filter(|refused| *refused).count()
}

fn send_away(device: &Device, pages: Range<u64>) {
    let before = device.stats().pages_backed;
    device.set("writeback", &format!("page_indexes={}-{}", pages.start, pages.end - 1)).unwrap();
    assert!(device.stats().pages_backed > before, "{pages:?} were in memory");
}

/// Checks that requests for other pages are answered while pages below 100 wait.
fn others_are_answered<S: Read + Write>(client: &mut Client<S>) {
    for page in [100, 101, 120] {
        let data = Random::new(page).bytes(PAGE);
        assert_eq!(client.write(at(page), &data).error, 0);
        assert!(client.read(0, at(page), 4096).data() == data);
    }
    assert_eq!(client.call(0, cmd::FLUSH, 0, 0, &[]).error, 0);
    assert_eq!(client.call(0, cmd::TRIM, at(100), 4096, &[]).error, 0);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, at(101) + 5, 6000, &[]).error, 0);
    assert_ne!(client.call(0, cmd::READ, 1 << 40, 4096, &[]).error, 0);
}

/// Reads whole pages and parts while page 9 is on the backing device. As chunks, pages before it are sent at
/// once.
fn reads_wait_alone<S: Read + Write>(client: &mut Client<S>, device: &Device, gate: &Gate) {
    let data = fill(client, 8..12);
    let chunks = client.headers != Headers::Simple;
    for (from, len) in [(PAGE, PAGE), (0, 4 * PAGE), (5000, 20), (4095, 2), (100, 4 * PAGE - 200)] {
        for flags in [0, command_flags::DF] {
            let flags = if chunks { flags } else { 0 };
            send_away(device, 9..10);
            let shut = gate.shut(Direction::Read);
            let cookie = client.request(flags, cmd::READ, at(8) + from as u64, len as u64, &[]);
            let mut whole = Reply::default();
            if chunks && flags == 0 && from < PAGE {
                assert!(!client.part(&mut whole, |_| 0) && whole.cookie == cookie);
                assert!(whole.data() == data[from..PAGE]);
            }
            others_are_answered(client);
            shut.wait_for(1);
            drop(shut);
            let mut rest = client.reply(len);
            assert_eq!((rest.cookie, rest.error), (cookie, 0));
            whole.chunks.append(&mut rest.chunks);
            assert!(whole.data() == data[from..from + len]);
        }
    }
}

/// Changes parts of page 9 while it is on the backing device.
fn changes_wait_alone<S: Read + Write>(client: &mut Client<S>, device: &Device, gate: &Gate) {
    let mut data = fill(client, 8..12);
    for (from, len) in [(PAGE, 100), (5000, 20), (4095, 2), (5000, 2 * PAGE)] {
        for zero in [false, true] {
            send_away(device, 9..10);
            let shut = gate.shut(Direction::Read);
            let new = if zero { vec![0; len] } else { Random::new(from as u64 + 1).bytes(len) };
            let (command, payload) = if zero { (cmd::WRITE_ZEROES, &[][..]) } else { (cmd::WRITE, &new[..]) };
            let cookie = client.request(0, command, at(8) + from as u64, len as u64, payload);
            others_are_answered(client);
            shut.wait_for(1);
            drop(shut);
            let reply = client.reply(0);
            assert_eq!((reply.cookie, reply.error), (cookie, 0));
            data[from..from + len].copy_from_slice(&new);
            assert!(client.read(0, at(8), 4 * PAGE as u32).data() == data, "{from} {len} {zero}");
            data = fill(client, 8..12);
        }
    }
    // A waiting request does not lock the page: it can be overwritten.
    send_away(device, 9..10);
    let shut = gate.shut(Direction::Read);
    let part = client.request(0, cmd::WRITE, at(9) + 10, 20, &[7; 20]);
    shut.wait_for(1);
    let read = client.request(0, cmd::READ, at(9), 4096, &[]);
    shut.wait_for(2);
    assert_eq!(client.write(at(9), &[8; PAGE]).error, 0);
    drop(shut);
    let replies = client.replies(&[(part, 0), (read, PAGE)]);
    assert!(replies.values().all(|reply| reply.error == 0));
    let mut changed = [8; PAGE];
    changed[10..30].fill(7);
    assert_eq!(client.read(0, at(9), 4096).data(), changed);
}

#[test]
fn other_requests_of_a_connection_go_on() {
    let (server, device, gate) = served(&[]);
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        reads_wait_alone(&mut client, &device, &gate);
        changes_wait_alone(&mut client, &device, &gate);
    }
}

#[test]
fn other_requests_of_an_encrypted_connection_go_on() {
    let (device, gate) = gated("zram0", "16M", &[]);
    let secure = Secure::with(Arc::clone(&device), |_| {});
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut client = secure.over(version);
        client.go(version == &rustls::version::TLS13);
        reads_wait_alone(&mut client, &device, &gate);
        changes_wait_alone(&mut client, &device, &gate);
    }
}

/// As many requests as can be offloaded, more than there are permits, and more than there are threads.
#[test]
fn many_wait_and_all_are_answered() {
    let (server, device, gate) = served(&[]);
    for headers in ALL_HEADERS {
        for count in [1, 64, 200] {
            let mut client = server.ready_with(headers);
            let data = fill(&mut client, 0..count);
            send_away(&device, 0..count);
            let shut = gate.shut(Direction::Read);
            let asked = ask(&mut client, count);
            // Beyond 64, the connection's own thread waits, besides the 16 threads of the pool.
            shut.wait_for(if count > 64 { 17 } else { count.min(16) });
            if count <= 64 {
                others_are_answered(&mut client);
            }
            drop(shut);
            assert_eq!(are_answered(&mut client, &asked, &data), 0);
        }
    }
}

#[test]
fn long_requests_wait_as_well() {
    const LEN: usize = 5 << 20;
    const PAGES: u64 = (LEN / PAGE) as u64;
    let (device, gate) = gated("zram0", "64M", &[]);
    let server = TestServer::with(Arc::clone(&device), |_| {});
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        let mut data = fill(&mut client, 1000..1000 + PAGES);
        for (page, flags) in [(1000, 0), (1001, 0), (999 + PAGES, 0), (1100, command_flags::DF)] {
            let flags = if headers == Headers::Simple { 0 } else { flags };
            send_away(&device, page..page + 1);
            let shut = gate.shut(Direction::Read);
            let read = client.request(flags, cmd::READ, at(1000), LEN as u64, &[]);
            let flush = client.request(0, cmd::FLUSH, 0, 0, &[]);
            let mut whole = client.replies(&[(flush, 0)]).remove(&read).unwrap_or_default();
            drop(shut);
            whole.chunks.append(&mut client.reply(LEN).chunks);
            assert!(whole.data() == data, "{headers:?} {page} {flags}");
        }
        // A request that begins within a page on the backing device.
        send_away(&device, 1000..1001);
        let shut = gate.shut(Direction::Read);
        let new = Random::new(1).bytes(LEN - 100);
        let write = client.request(0, cmd::WRITE, at(1000) + 100, (LEN - 100) as u64, &new);
        others_are_answered(&mut client);
        drop(shut);
        let reply = client.reply(0);
        assert_eq!((reply.cookie, reply.error), (write, 0));
        data[100..].copy_from_slice(&new);
        assert!(client.read(0, at(1000), LEN as u32).data() == data);
    }
}

/// Writes at the limit wait for pages to leave; requests that need no memory do not wait with them.
#[test]
fn writes_wait_for_memory_alone() {
    const PAGES: u64 = 400;
    let (server, _, gate) = served(&[("mem_limit", "1M")]);
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        assert_eq!(client.write(at(1000), &[9; PAGE]).error, 0);
        let shut = gate.shut(Direction::Write);
        let mut asked = Vec::new();
        let (mut written, mut waits) = (0, 0);
        for page in 0..PAGES {
            written += 1;
            asked.push((client.request(0, cmd::WRITE, at(page), 4096, &Random::new(page).bytes(PAGE)), 0));
            let read = client.request(0, cmd::READ, at(1000), 4096, &[]);
            let replies = client.replies(&[(read, PAGE)]);
            assert_eq!(replies[&read].data(), [9; PAGE]);
            replies.iter().for_each(|(_, reply)| assert_eq!(reply.error, 0));
            asked.retain(|(cookie, _)| !replies.contains_key(cookie));
            waits += usize::from(!asked.is_empty());
            if waits == 40 {
                break;
            }
        }
        assert_eq!(waits, 40, "the limit is met");
        drop(shut);
        let replies = client.replies(&asked);
        assert!(asked.iter().all(|(cookie, _)| replies[cookie].error == 0));
        for page in 0..written {
            assert!(client.read(0, at(page), 4096).data() == Random::new(page).bytes(PAGE), "{page}");
        }
        assert_eq!(client.call(0, cmd::TRIM, 0, at(PAGES), &[]).error, 0);
    }
}

#[test]
fn who_says_goodbye_still_gets_what_waits() {
    let (server, device, gate) = served(&[]);
    for headers in ALL_HEADERS {
        for says in ["goodbye", "nothing", "nonsense"] {
            let mut client = server.ready_with(headers);
            let data = fill(&mut client, 0..40);
            send_away(&device, 0..40);
            let shut = gate.shut(Direction::Read);
            let asked = ask(&mut client, 40);
            match says {
                "goodbye" => drop(client.request(0, cmd::DISC, 0, 0, &[])),
                "nothing" => client.stream.shutdown(Shutdown::Write).unwrap(),
                _ => client.send(&[1; 100]),
            }
            shut.wait_for(16);
            assert_eq!(device.set("reset", "1").unwrap_err().kind(), ErrorKind::Busy);
            drop(shut);
            assert_eq!(are_answered(&mut client, &asked, &data), 0);
            assert!(client.at_end());
        }
    }
}

#[test]
fn who_vanishes_keeps_the_device_until_nothing_waits() {
    let (server, device, gate) = served(&[]);
    let [mut steady, mut client, mut other] = [0; 3].map(|_| server.ready(true));
    fill(&mut client, 0..99);
    send_away(&device, 0..99);
    let shut = gate.shut(Direction::Read);
    for page in 0..99 {
        client.request(0, cmd::READ, at(page), 4096, &[]);
    }
    // A client that disconnects within a write that waits.
    other.request(0, cmd::WRITE, at(1) + 1, 8192, &[1; 5000]);
    shut.wait_for(17);
    drop((client, other));
    others_are_answered(&mut steady);
    drop(steady);
    thread::sleep(Duration::from_millis(20));
    assert_eq!(device.set("reset", "1").unwrap_err().kind(), ErrorKind::Busy);
    drop(shut);
    eventually(|| device.set("reset", "1").is_ok());
}

#[test]
fn nobody_waits_for_the_backing_device_of_another() {
    let (stuck, gate) = gated("stuck", "16M", &[]);
    let (device, _open) = gated("device", "16M", &[]);
    let server = TestServer::with_all(&[Arc::clone(&stuck), Arc::clone(&device)], |_| {});
    let enter = |name: &[u8]| {
        let mut client = server.client();
        client.agree(Headers::Structured);
        client.enter_export(name);
        client
    };
    let (mut waiting, mut client) = (enter(b"stuck"), enter(b"device"));
    let data = fill(&mut waiting, 0..40);
    send_away(&stuck, 0..40);
    let shut = gate.shut(Direction::Read);
    let asked = ask(&mut waiting, 40);
    // As many as there are threads; the other requests are queued.
    shut.wait_for(16);
    let others = fill(&mut client, 0..8);
    send_away(&device, 0..8);
    assert!(client.read(0, 0, 8 * 4096).data() == others);
    drop(shut);
    assert_eq!(are_answered(&mut waiting, &asked, &data), 0);
}

#[test]
fn a_server_that_stops_waits_for_what_was_begun() {
    let (server, device, gate) = served(&[]);
    let mut client = server.ready(true);
    let data = fill(&mut client, 0..40);
    send_away(&device, 0..40);
    let shut = gate.shut(Direction::Read);
    let asked = ask(&mut client, 40);
    shut.wait_for(16);
    // When this is answered, all requests are offloaded.
    assert_eq!(client.call(0, cmd::FLUSH, 0, 0, &[]).error, 0);
    let TestServer { thread: server, .. } = server;
    let (begins, begun) = mpsc::channel();
    let stopping = thread::spawn(move || {
        begins.send(()).unwrap();
        drop(server);
    });
    begun.recv().unwrap();
    // Time for the server to notice, much less than clients get for their last replies.
    thread::sleep(Duration::from_millis(20));
    assert!(!stopping.is_finished());
    drop(shut);
    let refused = are_answered(&mut client, &asked, &data);
    assert_eq!(refused, 40 - 16, "as many as there are threads were begun");
    assert!(client.at_end());
    stopping.join().unwrap();
    device.set("reset", "1").unwrap();
}

/// The number of pages of each client of [`work`].
const WORKED_ON: u64 = 200;

/// Changes and reads pages from byte `base` on, many at a time, and checks what comes back. It continues
/// until some pages have left memory, as all may be in use at each attempt.
fn work(mut client: Client, device: &Device, base: u64, seed: u64) {
    const ROUNDS: Range<usize> = 15..1000;
    let mut random = Random::new(seed);
    let mut model = vec![0; WORKED_ON as usize * PAGE];
    for round in 0..ROUNDS.end {
        if round >= ROUNDS.start && device.stats().pages_written_back > 0 {
            break;
        }
        let mut from = 0;
        while from < model.len() {
            // Few enough that neither side fills the socket; their ranges do not overlap, so their order is
            // irrelevant.
            let mut asked = Vec::new();
            while from < model.len() && asked.len() < 20 {
                let len = (1 + random.below_u64(3 * PAGE as u64) as usize).min(model.len() - from);
                let (place, range) = (base + from as u64, from..from + len);
                let (command, new) = match random.below_u64(8) {
                    0..3 => (cmd::READ, None),
                    3..7 => (cmd::WRITE, Some(random.bytes(len))),
                    _ => (cmd::WRITE_ZEROES, Some(vec![0; len])),
                };
                let payload = new.as_deref().filter(|_| command == cmd::WRITE).unwrap_or_default();
                let cookie = client.request(0, command, place, len as u64, payload);
                asked.push((cookie, if new.is_none() { len } else { 0 }, range.clone()));
                new.into_iter().for_each(|new| model[range.clone()].copy_from_slice(&new));
                from += len;
            }
            let lengths: Vec<_> = asked.iter().map(|(cookie, len, _)| (*cookie, *len)).collect();
            let replies = client.replies(&lengths);
            for (cookie, len, range) in asked {
                let reply = &replies[&cookie];
                assert_eq!(reply.error, 0, "{range:?} {len}");
                assert!(len == 0 || reply.data() == model[range]);
            }
        }
    }
    assert!(client.read(0, base, model.len() as u32).data() == model);
}

/// Pages are written back by request, or because of the limit, while the device stalls now and then.
#[test]
fn replies_of_pages_that_come_and_go_are_right() {
    let seed = seed();
    for (limit, by_hand) in [("0", true), ("1M", false)] {
        let (server, device, gate) = served(&[("mem_limit", limit)]);
        let clients: Vec<_> = std::iter::zip(0.., ALL_HEADERS)
            .map(|(number, headers)| {
                let client = server.ready_with(headers);
                let device = Arc::clone(&device);
                thread::spawn(move || work(client, &device, at(WORKED_ON * number), seed + number))
            })
            .collect();
        let mut random = Random::new(seed);
        while !clients.iter().all(|client| client.is_finished()) {
            if by_hand {
                // Fails if the clients leave nothing to write back.
                let _ = device.set("writeback", "page_indexes=0-599");
            }
            let direction = if random.below_u64(2) == 0 { Direction::Read } else { Direction::Write };
            let shut = gate.shut(direction);
            thread::sleep(Duration::from_micros(random.below_u64(3000)));
            drop(shut);
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert!(device.stats().pages_written_back > 0);
    }
}
