//! The handshake, byte by byte: options, metadata contexts, and the choice of an export.

use crate::common::{ALL_HEADERS, Client, EINVAL, Headers, TestServer, cmd, context_request, device};
use crate::common::{extended_request_bytes, info_request, named, option_bytes, request_bytes};
use uzram::device::Device;
use uzram_serve::nbd::proto::{info, option, reply, transmission_flags};

const BOTH: [&[u8]; 2] = [b"base:allocation", b"uzram:state"];

#[test]
fn info_and_go_tell_what_was_asked() {
    use transmission_flags::*;
    let server = TestServer::new("64M");
    let mut client = server.client();
    let kinds = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 77];
    let mut replies = client.option(option::INFO, &info_request(b"zram0", &kinds));
    assert_eq!(replies.pop(), Some((reply::ACK, vec![])));
    assert!(replies.iter().all(|(kind, _)| *kind == reply::INFO));
    let told: Vec<(u16, &[u8])> =
        replies.iter().map(|(_, data)| (u16::from_be_bytes([data[0], data[1]]), &data[2..])).collect();
    let flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | CAN_MULTI_CONN;
    let flags = flags | SEND_CACHE | SEND_FAST_ZERO;
    let export = [&(64u64 << 20).to_be_bytes()[..], &flags.to_be_bytes()].concat();
    let sizes = [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    let [one, two, description, four] = &told[..] else { panic!("{told:?}") };
    assert_eq!((one, two), (&(info::EXPORT, &export[..]), &(info::NAME, &b"zram0"[..])));
    assert!(description.0 == info::DESCRIPTION && four == &(info::BLOCK_SIZE, &sizes[..]));
    assert!(std::str::from_utf8(description.1).unwrap().contains("do not outlive"));
    assert_eq!(client.go(true), (64 << 20, flags | SEND_DF));

    let mut client = server.client();
    let entry = [&5u32.to_be_bytes()[..], b"zram0"].concat();
    assert_eq!(client.option(option::LIST, &[]), [(reply::SERVER, entry), (reply::ACK, vec![])]);
}

#[test]
fn an_option_that_cannot_be_done_is_answered_and_the_next_one_works() {
    let server = TestServer::new("1M");
    for headers in ALL_HEADERS {
        let mut client = server.client();
        client.agree(headers);
        for (number, data, error) in [
            (option::GO, info_request(b"other", &[]), reply::ERR_UNKNOWN),
            (option::INFO, info_request(&[0xff; 4096], &[]), reply::ERR_UNKNOWN),
            (option::GO, vec![], reply::ERR_INVALID),
            (option::GO, vec![0xff; 9], reply::ERR_INVALID),
            (option::GO, [info_request(b"", &[]), vec![0]].concat(), reply::ERR_INVALID),
            (option::INFO, vec![0xff; 60_000], reply::ERR_INVALID),
            (option::LIST, vec![1], reply::ERR_INVALID),
            (option::STRUCTURED_REPLY, vec![1], reply::ERR_INVALID),
            (option::STARTTLS, vec![], reply::ERR_UNSUP),
            (option::EXTENDED_HEADERS, vec![1], reply::ERR_INVALID),
            (option::SET_META_CONTEXT, vec![0; 60_000], reply::ERR_INVALID),
            (option::LIST_META_CONTEXT, vec![0, 0, 0, 5, b'z'], reply::ERR_INVALID),
            (4, vec![0; 60_000], reply::ERR_UNSUP),
            (0xdead_beef, vec![], reply::ERR_UNSUP),
        ] {
            let replies = client.option(number, &data);
            assert!(replies.len() == 1 && replies[0].0 == error, "option {number}: {replies:?}");
            assert!(!replies[0].1.is_empty(), "option {number} is refused in words");
        }
        assert_eq!(client.enter().0, 1 << 20);
    }
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
}

/// What a client says after the greeting, the last of which ends its connection.
#[test]
fn a_handshake_out_of_step_ends_the_connection() {
    let server = TestServer::new("1M");
    let long =
        |number: u32, len: u32| [b"IHAVEOPT", &[number, len].map(u32::to_be_bytes).concat()[..]].concat();
    for bytes in [
        vec![0; 16],
        long(3, 65_537),
        long(option::SET_META_CONTEXT, 1 << 31),
        long(option::SET_META_CONTEXT, u32::MAX),
        option_bytes(option::EXPORT_NAME, b"other"),
    ] {
        let mut client = server.client();
        client.send(&bytes);
        assert!(client.at_end(), "{bytes:?}");
    }
    let mut client = Client::silent(&server.path);
    client.take::<18>();
    client.send(&4u32.to_be_bytes());
    assert!(client.at_end(), "a client flag that was not offered");
    let mut client = server.client();
    assert_eq!(client.option(option::ABORT, &[]), [(reply::ACK, vec![])]);
    assert!(client.at_end());
    let mut client = server.client();
    for _ in 0..256 {
        client.option(option::LIST, &[]);
    }
    assert!(client.at_end(), "endless haggling");
    server.ready(true);
}

#[test]
fn extended_headers_are_the_last_word() {
    let server = TestServer::new("1M");
    let mut client = server.client();
    for headers in [Headers::Structured, Headers::Extended, Headers::Extended] {
        client.agree(headers);
    }
    let refused = client.option(option::STRUCTURED_REPLY, &[]).remove(0);
    assert_eq!(refused.0, reply::ERR_EXT_HEADER_REQD);
    let flags = client.enter().1;
    assert_ne!(flags & transmission_flags::SEND_DF, 0);
    assert_eq!(flags & transmission_flags::BLOCK_STATUS_PAYLOAD, 0, "no contexts are set");
    assert_eq!(client.write(0, b"extended").error, 0);
    let mut client = server.client();
    client.agree(Headers::Extended);
    client.send(&option_bytes(option::EXPORT_NAME, b"zram0"));
    assert!(client.at_end(), "not with the old way to choose an export");
    // The other form of requests has the wrong magic.
    let compact = [request_bytes(0, cmd::FLUSH, 1, 0, 0), vec![0; 4]].concat();
    let extended = extended_request_bytes(0, cmd::FLUSH, 1, 0, 0);
    for (headers, wrong) in [(Headers::Extended, compact), (Headers::Structured, extended)] {
        let mut client = server.ready_with(headers);
        client.send(&wrong);
        assert!(client.at_end());
    }
}

#[test]
fn contexts_are_listed_and_set_by_query() {
    let server = TestServer::new("1M");
    let too_long = [b"base:".to_vec(), vec![b'x'; 5000]].concat();
    for headers in [Headers::Structured, Headers::Extended] {
        let mut client = server.client();
        client.agree(headers);
        for (queries, listed, set) in [
            (&[][..], &BOTH[..], &[][..]),
            (&BOTH, &BOTH, &BOTH),
            (&[b"uzram:state", b"base:allocation", b"uzram:state"], &BOTH, &BOTH),
            (&[b"base:"], &BOTH[..1], &[]),
            (&[b"uzram:"], &BOTH[1..], &[]),
            (&[b"qemu:dirty-bitmap:x", b"x-y:", b"base:nonesuch", &too_long], &[], &[]),
            (&[b"base:", b"uzram:state"], &BOTH, &BOTH[1..]),
        ] {
            for name in [&b""[..], b"zram0"] {
                for (option, expected) in
                    [(option::LIST_META_CONTEXT, listed), (option::SET_META_CONTEXT, set)]
                {
                    let contexts = client.contexts(option, name, queries).unwrap();
                    let names: Vec<&[u8]> = contexts.iter().map(|(_, name)| name.as_bytes()).collect();
                    assert_eq!(names, expected);
                    let mut ids: Vec<u32> = contexts.iter().map(|(id, _)| *id).collect();
                    ids.dedup();
                    let is_list = option == option::LIST_META_CONTEXT;
                    assert!(if is_list {
                        ids.iter().all(|id| *id == 0)
                    } else {
                        ids.len() == expected.len()
                    });
                }
            }
        }
    }
}

#[test]
fn bad_context_options_are_refused_and_forget_what_was_set() {
    let server = TestServer::new("1M");
    let good = context_request(b"", &BOTH);
    for (data, error) in [
        (good[..good.len() - 1].to_vec(), reply::ERR_INVALID),
        ([&good[..], b"x"].concat(), reply::ERR_INVALID),
        (vec![], reply::ERR_INVALID),
        ([&[0; 4][..], &u32::MAX.to_be_bytes()].concat(), reply::ERR_INVALID),
        (context_request(b"", &[b"no colon"]), reply::ERR_INVALID),
        (context_request(b"other", &BOTH), reply::ERR_UNKNOWN),
    ] {
        let mut client = server.client();
        client.agree(Headers::Structured);
        assert_eq!(client.contexts(option::SET_META_CONTEXT, b"", &BOTH).unwrap().len(), 2);
        // Listing does not change the contexts that are set.
        assert_eq!(client.option(option::LIST_META_CONTEXT, &data).pop().unwrap().0, error);
        assert_eq!(client.option(option::SET_META_CONTEXT, &data).pop().unwrap().0, error, "{data:?}");
        client.enter();
        assert_eq!(client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]).error, EINVAL);
    }
    let mut client = server.client();
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(client.contexts(option, b"", &BOTH), Err(reply::ERR_INVALID), "not with simple replies");
    }
}

#[test]
fn contexts_belong_to_the_export_they_were_set_for() {
    let server = TestServer::with_all(&[device("1M"), named("zram1", "2M")], |_| {});
    // What was set, one after the other; the export that was entered, by the new or the old way; how many
    // count.
    for (sets, entered, count) in [
        (&[("", &BOTH[..1])][..], "zram0", 1),
        (&[("zram0", &BOTH[..1])], "", 1),
        (&[("zram1", &BOTH[..1])], "zram1", 1),
        (&[("zram1", &BOTH[..1])], "zram0", 0),
        (&[("", &BOTH[..1])], "zram1", 0),
        (&[("zram1", &BOTH)], "zram1", 2),
        (&[("", &BOTH), ("", &BOTH[1..])], "", 1),
        (&[("", &BOTH), ("", &[])], "", 0),
    ] {
        for headers in [Headers::Structured, Headers::Extended] {
            let mut client = server.client();
            client.agree(headers);
            let set = |(name, queries): &(&str, &[&[u8]])| {
                client.contexts(option::SET_META_CONTEXT, name.as_bytes(), queries).unwrap()
            };
            let last = sets.iter().map(set).last().unwrap();
            if count == 2 && headers == Headers::Structured {
                client.send(&option_bytes(option::EXPORT_NAME, entered.as_bytes()));
                client.take::<10>();
            } else {
                let flags = client.enter_export(entered.as_bytes()).1;
                let takes_payload = flags & transmission_flags::BLOCK_STATUS_PAYLOAD != 0;
                assert_eq!(takes_payload, count > 0 && headers == Headers::Extended, "{sets:?} {entered}");
            }
            let reply = client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]);
            assert_eq!(reply.error, if count > 0 { 0 } else { EINVAL }, "{sets:?} {entered}");
            assert_eq!(reply.statuses.len(), count);
            assert!(
                count == 0 || reply.statuses.iter().map(|(id, _)| *id).eq(last.iter().map(|(id, _)| *id))
            );
        }
    }
}
