//! Extended headers, byte by byte.

use crate::common::{Client, Headers, Random, TestServer, cmd, option_bytes, seed};
use uzram_serve::nbd::proto::{command_flags, option, reply, transmission_flags};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const PAYLOAD: u16 = command_flags::PAYLOAD_LEN;

/// Sends a request with exactly these fields, and receives its reply.
fn raw(
    client: &mut Client,
    flags: u16,
    command: u16,
    offset: u64,
    len: u64,
    payload: &[u8],
) -> crate::common::Reply {
    client.send(&crate::common::extended_request_bytes(flags, command, 99, offset, len));
    client.send(payload);
    let reply = client.reply(0);
    assert_eq!((reply.cookie, reply.offset), (99, Some(offset)));
    reply
}

#[test]
fn extended_headers_are_the_last_word() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    client.agree(Headers::Structured);
    client.agree(Headers::Extended);
    client.agree(Headers::Extended);
    let refused = client.option(option::STRUCTURED_REPLY, &[]).remove(0);
    assert_eq!(refused.0, reply::ERR_EXT_HEADER_REQD);
    assert!(!refused.1.is_empty());
    assert_eq!(client.option(option::STRUCTURED_REPLY, b"x").remove(0).0, reply::ERR_INVALID);
    let flags = client.enter().1;
    assert_ne!(flags & transmission_flags::SEND_DF, 0);
    assert_eq!(flags & transmission_flags::BLOCK_STATUS_PAYLOAD, 0, "no contexts are set");
    assert_eq!(client.write(0, b"extended").error, 0);
    let mut client = server.client();
    client.agree(Headers::Extended);
    client.send(&option_bytes(option::EXPORT_NAME, b"zram0"));
    assert!(client.at_end(), "not with the old way to choose an export");
    // A compact request has the wrong magic.
    let mut client = server.ready_with(Headers::Extended);
    client.send(&crate::common::request_bytes(0, cmd::FLUSH, 1, 0, 0));
    client.send(&[0; 4]);
    assert!(client.at_end());
    let mut client = server.ready(true);
    client.send(&crate::common::extended_request_bytes(0, cmd::FLUSH, 1, 0, 0));
    assert!(client.at_end());
}

#[test]
fn every_reply_is_a_chunk_that_gives_the_offset_back() {
    let server = TestServer::new("1M");
    let mut client = server.ready_with(Headers::Extended);
    let data = Random::new(seed()).bytes(9000);
    assert_eq!(client.write(777, &data).offset, Some(777));
    let reply = client.read(0, 700, 10_000);
    assert_eq!((reply.offset, reply.error), (Some(700), 0));
    assert!(reply.data()[77..9077] == data);
    for command in [cmd::FLUSH, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE, cmd::READ] {
        let reply = raw(&mut client, command_flags::FUA, command, 0, 0, &[]);
        assert_eq!((reply.error, reply.chunks.len()), (0, 0));
    }
}

#[test]
fn payloads_are_said_and_received_or_refused_in_step() {
    let server = TestServer::new("1M");
    let mut client = server.ready_with(Headers::Extended);
    let page = [9; 4096];
    assert_eq!(raw(&mut client, 0, cmd::WRITE, 8192, 4096, &page).error, 0, "as qemu sends it");
    assert_eq!(client.read(0, 8192, 4096).data(), page);
    assert_eq!(raw(&mut client, PAYLOAD, cmd::WRITE, 0, 0, &[]).error, 0);
    for command in [cmd::READ, cmd::FLUSH, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE, cmd::BLOCK_STATUS, 99] {
        assert_eq!(raw(&mut client, PAYLOAD, command, 0, 4096, &page).error, EINVAL, "{command}");
        assert_eq!(raw(&mut client, PAYLOAD, command, 0, 0, &[]).error, EINVAL, "{command}");
    }
    assert_eq!(raw(&mut client, PAYLOAD, cmd::WRITE, (1 << 20) - 5, 4096, &page).error, ENOSPC);
    assert_eq!(raw(&mut client, PAYLOAD | 1 << 11, cmd::WRITE, 0, 4096, &page).error, EINVAL);
    // The longest payload.
    let longest = vec![3; 32 << 20];
    assert_eq!(raw(&mut client, PAYLOAD, cmd::TRIM, 0, 32 << 20, &longest).error, EINVAL);
    assert_eq!(raw(&mut client, PAYLOAD, cmd::WRITE, 0, 32 << 20, &longest).error, ENOSPC);
    assert_eq!(client.read(0, 0, 4096).data(), [0; 4096], "nothing was written");
    for len in [(32 << 20) + 1, 4 << 30, u64::MAX] {
        let mut client = server.ready_with(Headers::Extended);
        client.send(&crate::common::extended_request_bytes(PAYLOAD, cmd::WRITE, 1, 0, len));
        assert!(client.at_end(), "a payload of {len} bytes");
    }
}

#[test]
fn long_lengths_work_where_no_data_goes() {
    // 3 TiB only take address space; pages that are not written take no memory.
    let server = TestServer::new("3T");
    let mut client = server.client();
    client.agree(Headers::Extended);
    client.contexts(option::SET_META_CONTEXT, b"", &[b"base:allocation"]).unwrap();
    client.enter();
    let far = (2 << 40) + 4096;
    for offset in [0, far] {
        assert_eq!(client.write(offset, b"far").error, 0);
    }
    assert_eq!(client.long_call(0, cmd::TRIM, 1, 6 << 30).error, 0);
    assert_eq!(client.read(0, 0, 3).data(), b"far", "a part of a page is not trimmed");
    assert_eq!(client.long_call(0, cmd::TRIM, 0, 6 << 30).error, 0);
    assert_eq!(client.read(0, 0, 4096).holes, [(0, 4096)]);
    assert_eq!(client.long_call(0, cmd::WRITE_ZEROES, far - (5 << 30), 6 << 30).error, 0);
    assert_eq!(client.read(0, far, 4096).holes, [(far, 4096)]);
    assert_eq!(client.long_call(0, cmd::CACHE, 0, 3 << 40).error, 0);
    let reply = client.long_call(0, cmd::BLOCK_STATUS, 0, 3 << 40);
    assert_eq!((reply.error, reply.statuses.len(), reply.statuses[0].1[0].1), (0, 1, 3));
    for (command, error) in
        [(cmd::TRIM, EINVAL), (cmd::WRITE_ZEROES, ENOSPC), (cmd::CACHE, EINVAL), (cmd::BLOCK_STATUS, EINVAL)]
    {
        for (offset, len) in [(1, 3 << 40), (0, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(client.long_call(0, command, offset, len).error, error, "{command} {offset}+{len}");
        }
    }
    for (flags, error) in [(0, EINVAL), (command_flags::DF, EOVERFLOW)] {
        assert_eq!(client.long_call(flags, cmd::READ, 0, 1 << 40).error, error);
    }
}

#[test]
fn a_payload_chooses_contexts_and_length() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    client.agree(Headers::Extended);
    let set = client.contexts(option::SET_META_CONTEXT, b"", &[b"base:allocation", b"uzram:state"]).unwrap();
    assert_ne!(client.enter().1 & transmission_flags::BLOCK_STATUS_PAYLOAD, 0);
    let (base, own) = (set[0].0, set[1].0);
    assert_eq!(client.write(8192, &[1; 4096]).error, 0);
    let payload = |len: u64, ids: &[u32]| {
        [&len.to_be_bytes()[..], &ids.iter().flat_map(|id| id.to_be_bytes()).collect::<Vec<_>>()].concat()
    };
    let mut ask = |flags, offset, payload: &[u8]| {
        raw(&mut client, PAYLOAD | flags, cmd::BLOCK_STATUS, offset, payload.len() as u64, payload)
    };
    let both = ask(0, 4096, &payload(9000, &[own, base]));
    let (all_base, all_own) =
        ((base, vec![(4096, 3), (4096, 0), (808, 3)]), (own, vec![(4096, 0), (4096, 2), (808, 0)]));
    assert_eq!(both.statuses, [all_base.clone(), all_own.clone()]);
    assert_eq!(ask(0, 4096, &payload(9000, &[own])).statuses, [all_own]);
    assert_eq!(ask(0, 4096, &payload(9000, &[base])).statuses, [all_base]);
    assert_eq!(
        ask(command_flags::REQ_ONE, 8192, &payload(9000, &[base])).statuses,
        [(base, vec![(4096, 0)])]
    );
    for (offset, bad) in [
        (0, payload(4096, &[])),
        (0, payload(4096, &[base, base])),
        (0, payload(4096, &[base, own, base])),
        (0, payload(4096, &[77])),
        (0, payload(4096, &[base])[..11].to_vec()),
        (0, vec![0; 3]),
        (0, vec![0; 70_000]),
        (0, payload(0, &[base])),
        (0, payload((1 << 20) + 1, &[base])),
        (1 << 20, payload(1, &[base])),
        (u64::MAX, payload(u64::MAX, &[base])),
    ] {
        let reply = ask(0, offset, &bad);
        assert_eq!((reply.error, reply.statuses.len()), (EINVAL, 0), "{bad:?} at {offset}");
        assert!(!reply.message.is_empty());
    }
    assert_eq!(ask(0, 0, &payload(1 << 20, &[base])).error, 0, "still in step");
}

/// Batches of random requests against a plain array, in the extended form.
#[test]
fn pipelined_batches_agree_with_a_model() {
    const SIZE: u64 = 256 << 10;
    let server = TestServer::new("256K");
    let mut random = Random::new(seed());
    let (mut model, mut client) = (vec![0u8; SIZE as usize], server.ready_with(Headers::Extended));
    for _ in 0..100 {
        let (mut batch, mut expected) = (Vec::new(), Vec::new());
        for cookie in 0..1 + random.below_u64(30) {
            let offset = random.below_u64(SIZE);
            let len = random.below_u64((SIZE - offset).min(20_000)) + 1;
            let range = offset as usize..(offset + len) as usize;
            let command = [cmd::READ, cmd::WRITE, cmd::WRITE_ZEROES][random.below_u64(3) as usize];
            let payload = if command == cmd::WRITE { PAYLOAD } else { 0 };
            batch.extend(crate::common::extended_request_bytes(payload, command, cookie, offset, len));
            let mut data = Vec::new();
            match command {
                cmd::WRITE => {
                    let written = random.bytes(len as usize);
                    batch.extend_from_slice(&written);
                    model[range].copy_from_slice(&written);
                }
                cmd::READ => data = model[range].to_vec(),
                _ => model[range].fill(0),
            }
            expected.push((cookie, offset, data));
        }
        let mut sender = client.stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || std::io::Write::write_all(&mut sender, &batch).unwrap());
            for (cookie, offset, data) in expected {
                let reply = client.reply(data.len());
                assert_eq!((reply.cookie, reply.offset, reply.error), (cookie, Some(offset), 0));
                assert!(reply.data() == data);
            }
        });
    }
}
