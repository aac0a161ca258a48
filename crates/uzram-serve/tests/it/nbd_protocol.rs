//! The NBD protocol, byte by byte: handshake, replies, errors, data.

use crate::common::{Client, Random, TestServer, cmd, info_request, option_bytes, seed};
use uzram::device::Device;
use uzram_serve::nbd::proto::{command_flags, info, option, reply, transmission_flags};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;

#[test]
fn info_and_go_tell_what_was_asked() {
    let server = TestServer::new("64M");
    let mut client = server.client();
    let kinds = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 77];
    let replies = client.option(option::INFO, &info_request(b"zram0", &kinds));
    let told: Vec<(u16, &[u8])> = replies[..replies.len() - 1]
        .iter()
        .map(|(kind, data)| {
            assert_eq!(*kind, reply::INFO);
            (u16::from_be_bytes([data[0], data[1]]), &data[2..])
        })
        .collect();
    use transmission_flags::*;
    let flags = HAS_FLAGS
        | SEND_FLUSH
        | SEND_FUA
        | SEND_TRIM
        | SEND_WRITE_ZEROES
        | CAN_MULTI_CONN
        | SEND_CACHE
        | SEND_FAST_ZERO;
    let export = [&(64u64 << 20).to_be_bytes()[..], &flags.to_be_bytes()].concat();
    let sizes = [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    assert_eq!(told[0], (info::EXPORT, &export[..]));
    assert_eq!(told[1], (info::NAME, &b"zram0"[..]));
    assert_eq!(told[2].0, info::DESCRIPTION);
    assert!(std::str::from_utf8(told[2].1).unwrap().contains("do not outlive"));
    assert_eq!(told[3], (info::BLOCK_SIZE, &sizes[..]));
    assert_eq!(told.len(), 4);
    assert_eq!(client.go(true), (64 << 20, flags | SEND_DF));
}

#[test]
fn list_names_the_exports() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    let entry = [&5u32.to_be_bytes()[..], b"zram0"].concat();
    assert_eq!(client.option(option::LIST, &[]), [(reply::SERVER, entry), (reply::ACK, vec![])]);
    assert_eq!(client.option(option::LIST, b"x")[0].0, reply::ERR_INVALID);
}

#[test]
fn an_option_that_cannot_be_done_is_answered_and_the_next_one_works() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    for (number, data, error) in [
        (option::GO, info_request(b"other", &[]), reply::ERR_UNKNOWN),
        (option::INFO, info_request(&[0xff; 4096], &[]), reply::ERR_UNKNOWN),
        (option::GO, vec![], reply::ERR_INVALID),
        (option::GO, vec![0xff; 9], reply::ERR_INVALID),
        (option::GO, [info_request(b"", &[]), vec![0]].concat(), reply::ERR_INVALID),
        (option::STRUCTURED_REPLY, vec![1], reply::ERR_INVALID),
        (5, vec![], reply::ERR_UNSUP),
        (option::EXTENDED_HEADERS, vec![1], reply::ERR_INVALID),
        (option::SET_META_CONTEXT, vec![0; 60_000], reply::ERR_INVALID),
        (4, vec![0; 60_000], reply::ERR_UNSUP),
        (0xdead_beef, vec![], reply::ERR_UNSUP),
    ] {
        let replies = client.option(number, &data);
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].0, error, "option {number}");
        assert!(!replies[0].1.is_empty(), "option {number} is refused in words");
    }
    assert_eq!(client.go(false).0, 1 << 20);
}

#[test]
fn an_uninitialised_device_is_refused_with_the_setting_to_change() {
    let server = TestServer::with(Device::new("zram0").unwrap(), |_| {});
    let mut client = server.client();
    for number in [option::INFO, option::GO] {
        let (kind, text) = client.option(number, &info_request(b"", &[])).remove(0);
        assert_eq!(kind, reply::ERR_UNKNOWN);
        assert!(String::from_utf8(text).unwrap().contains("disksize"));
    }
    client.send(&option_bytes(option::EXPORT_NAME, b""));
    assert!(client.at_end());
    server.device.set("disksize", "1M").unwrap();
    server.ready(true);
}

#[test]
fn export_name_ends_the_handshake_with_and_without_zeroes() {
    let server = TestServer::new("1M");
    for (client_flags, len) in [(3u32, 10), (1, 134), (0, 134)] {
        let mut client = Client::silent(&server.path);
        client.take::<18>();
        client.send(&client_flags.to_be_bytes());
        client.send(&option_bytes(option::EXPORT_NAME, b"zram0"));
        let answer = client.take_vec(len);
        assert_eq!(answer[..8], (1u64 << 20).to_be_bytes());
        assert!(answer[10..].iter().all(|byte| *byte == 0));
        assert_eq!(client.write(5, b"hello").error, 0);
        assert_eq!(client.read(0, 5, 5).data(), b"hello");
    }
    let mut client = server.client();
    client.send(&option_bytes(option::EXPORT_NAME, b"other"));
    assert!(client.at_end());
}

#[test]
fn abort_is_acknowledged_and_ends_the_connection() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    assert_eq!(client.option(option::ABORT, &[]), [(reply::ACK, vec![])]);
    assert!(client.at_end());
}

#[test]
fn a_handshake_out_of_step_ends_the_connection() {
    let server = TestServer::new("1M");
    let too_long = [&b"IHAVEOPT"[..], &3u32.to_be_bytes(), &65_537u32.to_be_bytes()].concat();
    for bytes in [&[0u8; 16][..], &too_long] {
        let mut client = server.client();
        client.send(bytes);
        assert!(client.at_end());
    }
    let mut client = Client::silent(&server.path);
    client.take::<18>();
    client.send(&4u32.to_be_bytes());
    assert!(client.at_end(), "a client flag that was not offered");
    server.ready(true);
}

#[test]
fn endless_haggling_ends() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    for _ in 0..256 {
        client.option(option::LIST, &[]);
    }
    assert!(client.at_end());
}

#[test]
fn requests_that_make_no_sense_get_the_specified_error() {
    let server = TestServer::new("1M");
    let end = 1 << 20;
    for structured in [false, true] {
        let mut client = server.ready(structured);
        let df = if structured { EOVERFLOW } else { EINVAL };
        for (flags, command, offset, len, error) in [
            (0, cmd::READ, end - 4096, 4097, EINVAL),
            (0, cmd::READ, u64::MAX, 4096, EINVAL),
            (0, cmd::READ, 0, (32 << 20) + 1, EINVAL),
            (command_flags::DF, cmd::READ, 0, (32 << 20) + 1, df),
            (0, cmd::WRITE, end, 1, ENOSPC),
            (0, cmd::WRITE, u64::MAX - 5, 100, ENOSPC),
            (0, cmd::WRITE, 0, (32 << 20) + 1, EINVAL),
            (1 << 9, cmd::WRITE, 0, 100, EINVAL),
            (command_flags::DF, cmd::WRITE, 0, 100, EINVAL),
            (0, cmd::TRIM, 1, u32::MAX, EINVAL),
            (0, cmd::WRITE_ZEROES, 1, u32::MAX, ENOSPC),
            (1 << 5, cmd::WRITE_ZEROES, 0, 1, EINVAL),
            (command_flags::NO_HOLE, cmd::TRIM, 0, 1, EINVAL),
            (0, cmd::FLUSH, 0, 1, EINVAL),
            (command_flags::DF, cmd::CACHE, 0, 1, EINVAL),
            (0, cmd::CACHE, 1 << 20, 1, EINVAL),
            (0, cmd::BLOCK_STATUS, 0, 1, EINVAL),
            (0, 999, 0, 1, EINVAL),
        ] {
            let payload = if command == cmd::WRITE { vec![7; len as usize] } else { vec![] };
            let reply = client.call(flags, command, offset, len, &payload);
            assert_eq!(reply.error, error, "command {command} flags {flags} at {offset}+{len}");
            assert_eq!(structured, !reply.message.is_empty());
        }
        assert_eq!(client.read(0, 0, 4096).data(), [0; 4096], "nothing was written");
    }
}

#[test]
fn empty_requests_do_nothing_and_succeed() {
    let server = TestServer::new("1M");
    for structured in [false, true] {
        let mut client = server.ready(structured);
        for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::FLUSH] {
            let reply = client.call(command_flags::FUA, command, 0, 0, &[]);
            assert_eq!((reply.error, reply.chunks.len()), (0, 0));
        }
    }
}

#[test]
fn a_request_out_of_step_ends_the_connection_after_the_replies_before_it() {
    let server = TestServer::new("1M");
    let mut client = server.ready(false);
    let mut bytes = crate::common::request_bytes(0, cmd::FLUSH, 9, 0, 0);
    bytes.extend_from_slice(&[0xff; 28]);
    client.send(&bytes);
    assert_eq!(client.reply(0).cookie, 9);
    assert!(client.at_end());
    let mut client = server.ready(false);
    client.request(0, cmd::WRITE, 0, (64 << 20) + 1, &[]);
    assert!(client.at_end(), "a payload too long to throw away");
}

#[test]
fn disconnect_is_obeyed_after_all_replies() {
    let server = TestServer::new("1M");
    let mut client = server.ready(true);
    let mut bytes = crate::common::request_bytes(0, cmd::WRITE, 1, 0, 3);
    bytes.extend_from_slice(b"abc");
    bytes.extend_from_slice(&crate::common::request_bytes(0, cmd::READ, 2, 0, 3));
    bytes.extend_from_slice(&crate::common::request_bytes(0, cmd::DISC, 3, 0, 0));
    client.send(&bytes);
    assert_eq!(client.reply(0).cookie, 1);
    assert_eq!(client.reply(3).data(), b"abc");
    assert!(client.at_end());
}

/// Reads and writes of 32 MiB, and around the sizes at which the server's way of replying changes.
#[test]
fn long_requests_in_every_form() {
    let server = TestServer::new("40M");
    let mut random = Random::new(seed());
    for (len, offset) in [(32 << 20, 4096), (32 << 20, 12_345), (252 << 10, 1), ((252 << 10) + 1, 4095)] {
        let data = random.bytes(len);
        let mut client = server.ready(true);
        assert_eq!(client.write(offset, &data).error, 0);
        let reply = client.read(0, offset, len as u32);
        let mut expected = offset;
        for (at, chunk) in &reply.chunks {
            assert_eq!(*at, expected);
            expected += chunk.len() as u64;
        }
        assert!(reply.data() == data, "fragmented");
        let reply = client.read(command_flags::DF, offset, len as u32);
        assert_eq!(reply.chunks.len(), 1);
        assert!(reply.data() == data, "unfragmented");
        assert!(server.ready(false).read(0, offset, len as u32).data() == data, "simple");
    }
}

#[test]
fn a_payload_that_comes_in_drops_is_one_write() {
    let server = TestServer::new("1M");
    let mut client = server.ready(true);
    let data = Random::new(seed()).bytes(20_000);
    client.request(0, cmd::WRITE, 4_000, 20_000, &[]);
    for piece in data.chunks(777) {
        client.send(piece);
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(client.reply(0).error, 0);
    assert!(client.read(0, 4_000, 20_000).data() == data);
}

/// Batches of random requests of any alignment, checked against a plain array.
#[test]
fn pipelined_batches_agree_with_a_model() {
    const SIZE: u64 = 1 << 20;
    let server = TestServer::new("1M");
    let mut random = Random::new(seed());
    for structured in [false, true] {
        let mut model = vec![0u8; SIZE as usize];
        let mut client = server.ready(structured);
        assert_eq!(client.call(0, cmd::WRITE_ZEROES, 0, SIZE as u32, &[]).error, 0);
        for _ in 0..200 {
            let mut batch = Vec::new();
            let mut expected = Vec::new();
            for cookie in 0..1 + random.below_u64(40) {
                let offset = random.below_u64(SIZE);
                let longest = if random.below_u64(20) == 0 { SIZE - offset } else { 9_000 };
                let len = random.below_u64((SIZE - offset).min(longest)) + 1;
                let range = offset as usize..(offset + len) as usize;
                let fua = random.below_u64(2) as u16;
                let command = [cmd::READ, cmd::WRITE, cmd::WRITE_ZEROES][random.below_u64(3) as usize];
                batch.extend(crate::common::request_bytes(fua, command, cookie, offset, len as u32));
                match command {
                    cmd::WRITE => {
                        let data = random.bytes(len as usize);
                        batch.extend_from_slice(&data);
                        model[range].copy_from_slice(&data);
                        expected.push((cookie, Vec::new()));
                    }
                    cmd::READ => expected.push((cookie, model[range].to_vec())),
                    _ => {
                        model[range].fill(0);
                        expected.push((cookie, Vec::new()));
                    }
                }
            }
            // Replies may fill the socket before all requests are sent, so send and receive concurrently.
            let mut sender = client.stream.try_clone().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || std::io::Write::write_all(&mut sender, &batch).unwrap());
                for (cookie, data) in expected {
                    let reply = client.reply(data.len());
                    assert_eq!((reply.cookie, reply.error), (cookie, 0));
                    assert!(reply.data() == data);
                }
            });
        }
    }
}

#[test]
fn trim_and_write_zeroes_take_any_length() {
    let server = TestServer::new("160M");
    let mut client = server.ready(true);
    assert_eq!(client.write(4096, &[1; 4096]).error, 0);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, 0, 64 << 20, &[]).error, 0);
    assert_eq!(client.read(0, 4096, 4096).data(), [0; 4096]);
    assert_eq!(client.call(command_flags::NO_HOLE, cmd::WRITE_ZEROES, 3, 33 << 20, &[]).error, 0);
    assert_eq!(client.call(0, cmd::TRIM, 96 << 20, 64 << 20, &[]).error, 0);
}

/// A full device replies ENOSPC with the engine's message, and the session goes on.
#[test]
fn a_full_device_names_the_setting() {
    let server = TestServer::new("64M");
    server.device.set("mem_limit", "1M").unwrap();
    let mut client = server.ready(true);
    let data = Random::new(seed()).bytes(8 << 20);
    let reply = client.write(0, &data);
    if reply.error == 0 {
        println!("skipped: this engine does not keep mem_limit");
        return;
    }
    assert_eq!(reply.error, ENOSPC);
    assert!(reply.message.contains("mem_limit"), "{}", reply.message);
    assert_eq!(client.call(0, cmd::WRITE_ZEROES, 0, 8 << 20, &[]).error, 0);
    assert_eq!(client.write(0, &data[..8192]).error, 0);
    assert!(client.read(0, 0, 8192).data() == data[..8192]);
}
