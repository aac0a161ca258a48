//! Fuzzes what names a store on other machines, and what its servers answer. The first byte of the input
//! chooses.
//!
//! Promises: an address that is accepted is shown as a text that means the same, and shows no password; of
//! any answer either two masters are known, and each extent's copies are on different ones, or none is.

use uzram_remote::{Address, S3Address, read_answer};

use crate::input::Input;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte().is_multiple_of(2) {
        return read_answer(input.rest());
    }
    let text = String::from_utf8_lossy(input.rest());
    match Address::parse(&text) {
        Ok(address) => {
            assert!(!text.contains('@') && !address.servers.is_empty(), "{text}");
            let shown = address.to_string();
            assert_eq!(
                Address::parse(&shown),
                Ok(Address { size_bytes: None, ..address }),
                "{text} as {shown}"
            );
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match S3Address::parse(&text) {
        Ok(address) => {
            assert!(!text.contains(['@', '?', '#', '%']) && address.prefix.len() <= text.len(), "{text}");
            assert!(address.prefix.split('/').all(|part| part != ".."), "{text}");
            let shown = address.to_string();
            let again = S3Address { size_bytes: None, ..address };
            assert_eq!(S3Address::parse(&shown), Ok(again), "{text} as {shown}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let address = |text: &str| [&[1], text.as_bytes()].concat();
    let answer = |text: &str| [&[0], text.as_bytes()].concat();
    let node = |port: u16, id: &str| format!("*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n${}\r\n{id}\r\n", id.len());
    let range = |first: u16, last: u16, node: &str| format!("*3\r\n:{first}\r\n:{last}\r\n{node}");
    let slots = [range(0, 8191, &node(7000, "a")), range(8192, 16383, &node(7001, "b"))].concat();
    let overlap = [range(0, 9000, &node(7000, "a")), range(8192, 16383, &node(7001, "b"))].concat();
    let info = "role:master\r\nloading:0\r\nmaxmemory:5\r\nused_memory:4\r\nmaxmemory_policy:noeviction\r\n";
    vec![
        address("redis://127.0.0.1:7001:2G"),
        address("rediss://a,[::1]:7/3:64M"),
        address("redis://:secret@cache"),
        address("s3://cold:2G"),
        address("s3://a.b-c/d/e_f/:64M"),
        address("s3://id:secret@cold/../a"),
        answer(&format!("*2\r\n{slots}")),
        answer(&format!("*2\r\n{overlap}")),
        answer(&format!("${}\r\n{info}\r\n", info.len())),
        answer("-NOAUTH Authentication required.\r\n"),
    ]
}
