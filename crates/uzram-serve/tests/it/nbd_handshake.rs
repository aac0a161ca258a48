//! The handshake, byte by byte: options, metadata contexts, and the choice of an export.

use crate::common::{EINVAL, Headers, TestServer, cmd, device, info_request, named, option_bytes};
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
