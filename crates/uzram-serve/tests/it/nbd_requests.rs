//! Requests and replies, byte by byte, in all three forms of headers.

use crate::common::{
    ALL_HEADERS, EINVAL, ENOSPC, EOVERFLOW, Headers, Random, TestServer, cmd, eventually,
    extended_request_bytes, request_bytes, seed,
};
use uzram_serve::nbd::Client;
use uzram_serve::nbd::proto::command_flags;

const PAYLOAD: u16 = command_flags::PAYLOAD_LEN;
/// The end of a disk, and the length of what is before it that requests may change.
const END: u64 = 5000 << 10;
const TAIL: usize = 4 * 4096;

/// Ranges that reach past the end get the specified error and change nothing; those within do what they
/// should.
#[test]
fn a_range_past_the_end_gets_the_specified_error_and_changes_nothing() {
    let server = TestServer::new("5000K");
    let start = END - TAIL as u64;
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        let mut model: Vec<u8> = (0..TAIL).map(|at| (at / 3) as u8 | 1).collect();
        assert_eq!(client.write(start, &model).error, 0);
        for offset in [END - 4097, END - 4096, END - 1, END, END + 1, END + 4096, u64::MAX - 1, u64::MAX] {
            for len in [0, 1, 2, 4096, 4097, 3 << 20] {
                let is_inside = offset.checked_add(len).is_some_and(|end| end <= END);
                let at = offset.saturating_sub(start) as usize;
                for (command, error) in [
                    (cmd::READ, EINVAL),
                    (cmd::WRITE, ENOSPC),
                    (cmd::WRITE_ZEROES, ENOSPC),
                    (cmd::TRIM, EINVAL),
                    (cmd::CACHE, EINVAL),
                    // No metadata context was set.
                    (cmd::BLOCK_STATUS, EINVAL),
                ] {
                    let payload = if command == cmd::WRITE { vec![7; len as usize] } else { vec![] };
                    let cookie = client.request(0, command, offset, len, &payload);
                    let reply = client.reply(if command == cmd::READ { len as usize } else { 0 });
                    let is_done = is_inside && command != cmd::BLOCK_STATUS;
                    let wanted = if is_done { 0 } else { error };
                    assert_eq!((reply.cookie, reply.error), (cookie, wanted), "{command}: {len} at {offset}");
                    match command {
                        cmd::WRITE if is_done => model[at..at + len as usize].fill(7),
                        cmd::WRITE_ZEROES if is_done => model[at..at + len as usize].fill(0),
                        cmd::TRIM if is_done => {
                            let first = at.next_multiple_of(4096);
                            model[first..(at + len as usize).max(first) & !4095].fill(0);
                        }
                        _ => {}
                    }
                    assert!(
                        client.read(0, start, TAIL as u32).data() == model,
                        "{command}: {len} at {offset}"
                    );
                }
            }
        }
    }
}

#[test]
fn requests_that_make_no_sense_get_the_specified_error() {
    let server = TestServer::new("1M");
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        let df = if headers == Headers::Simple { EINVAL } else { EOVERFLOW };
        for (flags, command, offset, len, error) in [
            (0, cmd::READ, 0, (32 << 20) + 1, EINVAL),
            (command_flags::DF, cmd::READ, 0, (32 << 20) + 1, df),
            (0, cmd::WRITE, u64::MAX - 5, 100, ENOSPC),
            (1 << 9, cmd::WRITE, 0, 100, EINVAL),
            (command_flags::DF, cmd::WRITE, 0, 100, EINVAL),
            (0, cmd::TRIM, 1, u32::MAX.into(), EINVAL),
            (0, cmd::WRITE_ZEROES, 1, u32::MAX.into(), ENOSPC),
            (1 << 6, cmd::WRITE_ZEROES, 0, 1, EINVAL),
            (command_flags::NO_HOLE, cmd::TRIM, 0, 1, EINVAL),
            (0, cmd::FLUSH, 0, 1, EINVAL),
            (command_flags::DF, cmd::CACHE, 0, 1, EINVAL),
            (0, cmd::CACHE, 1 << 20, 1, EINVAL),
            (0, 999, 0, 1, EINVAL),
        ] {
            let payload = if command == cmd::WRITE { vec![7; len as usize] } else { vec![] };
            let reply = client.call(flags, command, offset, len, &payload);
            assert_eq!(reply.error, error, "command {command} flags {flags} at {offset}+{len}");
            assert_eq!(headers != Headers::Simple, !reply.message.is_empty());
        }
        for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::FLUSH, cmd::CACHE] {
            let reply = client.call(command_flags::FUA, command, 0, 0, &[]);
            assert_eq!((reply.error, reply.chunks.len()), (0, 0), "an empty request");
        }
        if headers != Headers::Extended {
            let longest = vec![7; (32 << 20) + 1];
            assert_eq!(client.call(0, cmd::WRITE, 0, longest.len() as u64, &longest).error, EINVAL);
        }
        assert_eq!(client.read(0, 0, 4096).data(), [0; 4096], "nothing was written");
    }
}

#[test]
fn payloads_up_to_the_longest_are_discarded_and_longer_ones_end_the_connection() {
    let server = TestServer::new("1M");
    let mut client = server.ready_with(Headers::Extended);
    let longest = vec![3; 32 << 20];
    for (command, error) in [(cmd::TRIM, EINVAL), (cmd::WRITE, ENOSPC)] {
        assert_eq!(client.call(PAYLOAD, command, 0, 32 << 20, &longest).error, error);
    }
    assert_eq!(client.read(0, 0, 4096).data(), [0; 4096], "nothing was written");
    for len in [(32 << 20) + 1, 4 << 30, u64::MAX] {
        let mut client = server.ready_with(Headers::Extended);
        client.send(&extended_request_bytes(PAYLOAD, cmd::WRITE, 1, 0, len));
        assert!(client.at_end(), "a payload of {len} bytes");
    }
    let mut client = server.ready(false);
    client.request(0, cmd::WRITE, 0, (64 << 20) + 1, &[]);
    assert!(client.at_end(), "a payload too long to throw away");
}

#[test]
fn long_lengths_work_where_no_data_goes() {
    // 3 TiB only take address space; pages that are not written take no memory.
    let server = TestServer::new("3T");
    let (mut client, _) = server.with_contexts(Headers::Extended, &[b"base:allocation"]);
    let far = (2 << 40) + 4096;
    for offset in [0, far] {
        assert_eq!(client.write(offset, b"far").error, 0);
    }
    assert_eq!(client.call(0, cmd::TRIM, 1, 6 << 30, &[]).error, 0);
    assert_eq!(client.read(0, 0, 3).data(), b"far", "a part of a page is not trimmed");
    assert_eq!(client.call(0, cmd::TRIM, 0, 6 << 30, &[]).error, 0);
    assert_eq!(client.read(0, 0, 4096).holes, [(0, 4096)]);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, far - (5 << 30), 6 << 30, &[]).error, 0);
    assert_eq!(client.read(0, far, 4096).holes, [(far, 4096)]);
    assert_eq!(client.call(0, cmd::CACHE, 0, 3 << 40, &[]).error, 0);
    let reply = client.call(0, cmd::BLOCK_STATUS, 0, 3 << 40, &[]);
    assert_eq!((reply.error, reply.statuses.len(), reply.statuses[0].1[0].1), (0, 1, 3));
    for (command, error) in
        [(cmd::TRIM, EINVAL), (cmd::WRITE_ZEROES, ENOSPC), (cmd::CACHE, EINVAL), (cmd::BLOCK_STATUS, EINVAL)]
    {
        for (offset, len) in [(1, 3 << 40), (0, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(client.call(0, command, offset, len, &[]).error, error, "{command} {offset}+{len}");
        }
    }
    for (flags, error) in [(0, EINVAL), (command_flags::DF, EOVERFLOW)] {
        assert_eq!(client.call(flags, cmd::READ, 0, 1 << 40, &[]).error, error);
    }
    // Compact requests, in slices.
    let server = TestServer::new("160M");
    let mut client = server.ready(true);
    assert_eq!(client.call(command_flags::NO_HOLE, cmd::WRITE_ZEROES, 3, 133 << 20, &[]).error, 0);
    assert_eq!(client.write(4096, &[1; 4096]).error, 0);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, 0, 160 << 20, &[]).error, 0);
    assert_eq!(client.read(0, 4096, 4096).data(), [0; 4096]);
}

/// A full device replies ENOSPC with the engine's message, and the session goes on.
#[test]
fn a_full_device_names_the_setting() {
    let server = TestServer::new("64M");
    server.device.set("mem_limit", "1M").unwrap();
    let mut client = server.ready(true);
    let data = Random::new(seed()).bytes(8 << 20);
    let reply = client.write(0, &data);
    assert_eq!(reply.error, ENOSPC);
    assert!(reply.message.contains("mem_limit"), "{}", reply.message);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, 0, 8 << 20, &[]).error, 0);
    assert_eq!(client.write(0, &data[..8192]).error, 0);
    assert!(client.read(0, 0, 8192).data() == data[..8192]);
}

/// Returns each client's requests, and bytes read and written.
fn traffic(server: &TestServer) -> Vec<(u64, u64, u64)> {
    let of = |client: Client| (client.requests, client.read_bytes, client.written_bytes);
    server.clients.list().into_iter().map(of).collect()
}

#[test]
fn half_a_write_waits_for_its_other_half_and_leaves_with_its_client() {
    let server = TestServer::new("16M");
    let mut clients: Vec<_> = (0..5).map(|_| server.ready(false)).collect();
    let all_have = |count: usize, requests: u64| {
        eventually(|| {
            let traffic = traffic(&server);
            traffic.len() == count && traffic.iter().all(|traffic| traffic.0 == requests)
        });
    };
    all_have(5, 0);
    for client in &mut clients {
        client.send(&[request_bytes(0, cmd::WRITE, 1, 0, 8192), vec![1; 4096]].concat());
    }
    all_have(5, 1);
    for client in &mut clients {
        client.send(&[vec![2; 4096], request_bytes(0, cmd::WRITE, 2, 0, 8192)].concat());
        assert_eq!(client.take::<16>()[4..], [&[0; 4][..], &1u64.to_be_bytes()].concat());
    }
    all_have(5, 2);
    clients.truncate(2);
    all_have(2, 2);
    drop(clients);
    all_have(0, 0);
    let mut client = server.ready(true);
    assert_eq!(client.read(0, 0, 8192).data(), [[1; 4096], [2; 4096]].concat());
}

#[test]
fn every_request_is_counted_refused_ones_too() {
    let server = TestServer::new("16M");
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        for page in 0..200 {
            assert_eq!(client.write(page * 4096, &[page as u8; 4096]).error, 0);
            assert_eq!(client.read(0, page * 4096, 4096).data(), [page as u8; 4096]);
            assert_ne!(client.call(0, cmd::FLUSH, 4096, 0, &[]).error, 0);
        }
        eventually(|| traffic(&server).contains(&(600, 200 * 4096, 200 * 4096)));
    }
}

#[test]
fn long_answers_are_cut_and_go_on() {
    // Every other page is written: one descriptor each.
    let server = TestServer::new("4G");
    let open = server.device.open().unwrap();
    for page in 0..10_000u64 {
        open.write(page << 13, &[1; 4096]).unwrap();
    }
    for headers in [Headers::Structured, Headers::Extended] {
        let (mut client, _) = server.with_contexts(headers, &[b"base:allocation", b"uzram:state"]);
        let (mut at, mut answers, mut descriptors) = (0u64, 0, 0);
        while at < 4 << 30 {
            let left = ((4u64 << 30) - at).min(u32::MAX.into());
            let reply = client.call(0, cmd::BLOCK_STATUS, at, left, &[]);
            assert_eq!(reply.error, 0);
            let told = &reply.statuses[0].1;
            let told_bytes: u64 = told.iter().map(|(len, _)| len).sum();
            assert!(told.len() <= 1 << 20 && (1..=left.min(1 << 30)).contains(&told_bytes));
            at += told_bytes;
            descriptors += told.len();
            answers += 1;
        }
        assert!((20_000..20_020).contains(&descriptors) && answers < 20, "{descriptors} in {answers}");
    }
}
