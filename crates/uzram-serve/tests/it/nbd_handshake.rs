//! Which metadata contexts count once an export is chosen. The fuzz target `nbd_handshake` compares all
//! answers with a model.

use crate::common::{EINVAL, Headers, TestServer, cmd, device, named, option_bytes};
use uzram_serve::nbd::proto::{option, transmission_flags};

const BOTH: [&[u8]; 2] = [b"base:allocation", b"uzram:state"];

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
