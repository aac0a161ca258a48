//! Any bytes as a client's whole session, greeting answered or not.
//!
//! The first byte tears the messages and says whether the second device has a size; the rest is what
//! the client sends.
//!
//! Promises: the session ends; what is sent begins with the greeting and goes on with whole option
//! replies, until an export is chosen; and when it is over, no device is in use.

use std::io::ErrorKind;
use std::sync::Arc;

use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{self, info, option};
use uzram_serve::nbd::serve_stream;

use crate::input::Input;
use crate::wire::{self, Header, Heard, Wire};

/// Runs one input.
///
/// # Panics
/// When a promise is broken; that is what it is for.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let first = input.byte();
    let sized = Device::new("zram0").expect("a good name");
    sized.set("disksize", "64K").expect("memory");
    let other = Device::new("zram1").expect("a good name");
    if first & 1 != 0 {
        other.set("disksize", "4K").expect("memory");
    }
    let exports = Exports::new([Arc::clone(&sized), Arc::clone(&other)]);
    let mut wire = Wire::new(input.rest(), first >> 1);
    if let Err(error) = serve_stream(&mut wire, &exports) {
        // `Other` is an export without a size, asked for in the old way.
        let expected = [ErrorKind::InvalidData, ErrorKind::UnexpectedEof, ErrorKind::Other];
        assert!(expected.contains(&error.kind()), "{error:?}");
    }
    check(&wire.heard);
    for device in [sized, other] {
        device.set("reset", "1").expect("nobody has it open when the session is over");
    }
}

/// Walks the greeting and the option replies. They end with the messages, or where an export was
/// chosen.
fn check(heard: &[u8]) {
    let mut heard = Heard(heard);
    assert_eq!((heard.u64(), heard.u64(), heard.u16()), (proto::NBDMAGIC, proto::IHAVEOPT, 3));
    while heard.0.starts_with(&proto::NBD_REP_MAGIC.to_be_bytes()) {
        let (_, asked, reply, len) = (heard.u64(), heard.u32(), heard.u32(), heard.u32());
        heard.take(len as usize);
        if (asked, reply) == (option::GO, proto::reply::ACK) {
            return;
        }
    }
}

/// Inputs to begin with.
pub fn seeds() -> Vec<Vec<u8>> {
    let ask_all = wire::info_request(b"zram1", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE]);
    let read = Header { flags: 0, command: 0, cookie: 1, offset: 0, len_bytes: 512 }.bytes();
    let structured = wire::option(option::STRUCTURED_REPLY, &[]);
    let go = wire::option(option::GO, &wire::info_request(b"", &[]));
    let sessions = [
        [structured.clone(), wire::option(option::INFO, &ask_all), go, read.clone()].concat(),
        [wire::option(option::LIST, &[]), wire::option(option::EXPORT_NAME, b"zram0"), read].concat(),
        [wire::option(option::LIST, b"x"), wire::option(99, b"?"), wire::option(option::ABORT, &[])].concat(),
        [structured, wire::option(option::GO, &ask_all), wire::option(option::EXPORT_NAME, b"nonesuch")]
            .concat(),
    ];
    let with_flags =
        |(first, flags, session): (u8, u8, Vec<u8>)| [&[first, 0, 0, 0, flags], &session[..]].concat();
    std::iter::zip([(1, 3), (0, 2), (7, 1), (0, 3)], sessions)
        .map(|((first, flags), session)| with_flags((first, flags, session)))
        .collect()
}
