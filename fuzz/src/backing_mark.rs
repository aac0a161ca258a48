//! Fuzzes the beginning of a backing file or device, in which uzram looks for its mark. The first byte of the
//! input chooses: bytes as they are, or a true mark that the rest of the input changes.
//!
//! Promises: bytes accepted as a mark are exactly those that writing that mark gives; what follows a mark
//! changes nothing, and a part of a mark is rejected.

use uzram::backing::{MARK_BYTES, Mark};

use crate::input::Input;

/// The most bytes of a mark that one input changes.
const MAX_CHANGES: usize = 64;

/// Runs one input.
///
/// # Panics
/// A promise is broken; that is its purpose.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte().is_multiple_of(2) {
        check(input.rest());
        return;
    }
    let mark = Mark { id: std::array::from_fn(|_| input.byte()) };
    let mut bytes = mark.to_bytes().to_vec();
    assert_eq!(Mark::parse(&bytes), Some(mark));
    for _ in 0..MAX_CHANGES {
        let (at, change) = (usize::from(input.u16()) % MARK_BYTES, input.byte());
        bytes[at] ^= change;
    }
    check(&bytes);
    bytes.extend_from_slice(input.rest());
    check(&bytes);
}

fn check(bytes: &[u8]) {
    let Some(mark) = Mark::parse(bytes) else { return };
    assert!(bytes[..MARK_BYTES] == mark.to_bytes(), "{mark:?} is written otherwise");
    assert_eq!(Mark::parse(&bytes[..MARK_BYTES]), Some(mark));
    assert_eq!(Mark::parse(&bytes[..MARK_BYTES - 1]), None);
}

/// Returns the initial inputs.
pub fn seeds() -> Vec<Vec<u8>> {
    let mark = Mark { id: *b"0123456789abcdef" };
    let as_it_is = [&[0], &mark.to_bytes()[..], b"what follows"].concat();
    let unchanged = [&[1], &mark.id[..]].concat();
    let id_changed = [&unchanged[..], &[20, 0, 1]].concat();
    let crc_changed = [&unchanged[..], &[0xff, 0x0f, 0x80]].concat();
    vec![as_it_is, unchanged, id_changed, crc_changed, vec![0; MARK_BYTES + 1]]
}
