//! Fuzzes the text in which programs under `uzram run` publish their figures, and which any process can
//! write. The first byte of the input chooses: bytes as they are, or a true text that the rest of the input
//! changes.
//!
//! Promises: bytes that are accepted are exactly those that writing the figures gives, and of their length;
//! each figure is the number at its place, by a naive reading.

use uzram_pager::Figures;

use crate::input::Input;

/// The most bytes of a text that one input changes.
const MAX_CHANGES: usize = 16;

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
    let figures = Figures {
        process: input.u32().into(),
        limit_bytes: input.u64(),
        stored_bytes: input.u64(),
        fault_us: input.u64(),
        ..Figures::default()
    };
    let mut bytes = figures.to_text().to_vec();
    assert_eq!(Figures::parse(&bytes), Some(figures));
    for _ in 0..MAX_CHANGES {
        let (at, change) = (usize::from(input.u16()) % Figures::TEXT_BYTES, input.byte());
        bytes[at] ^= change;
    }
    check(&bytes);
    bytes.extend_from_slice(input.rest());
    check(&bytes);
}

fn check(bytes: &[u8]) {
    let Some(figures) = Figures::parse(bytes) else { return };
    assert!(bytes == figures.to_text(), "{figures:?} are written otherwise");
    assert_eq!(Figures::parse(&bytes[..bytes.len() - 1]), None);
    let text = str::from_utf8(bytes).expect("what is accepted is text");
    let words: Vec<&str> = text.split_whitespace().skip(2).collect();
    assert_eq!(words.len(), 2 * figures.all().count(), "{text}");
    for ((name, value), pair) in figures.all().zip(words.chunks(2)) {
        assert_eq!((name, Ok(value)), (pair[0], pair[1].parse()), "{text}");
    }
}

/// Returns the initial inputs.
pub fn seeds() -> Vec<Vec<u8>> {
    let figures = Figures { process: 4711, limit_bytes: 300 << 20, faults: u64::MAX, ..Figures::default() };
    let as_it_is = [&[0], &figures.to_text()[..]].concat();
    let unchanged = [&[1][..], &[7; 28]].concat();
    let digit_changed = [&unchanged[..], &[0x27, 0, 1]].concat();
    let head_changed = [&unchanged[..], &[10, 0, 3]].concat();
    vec![as_it_is, unchanged, digit_changed, head_changed, vec![0; Figures::TEXT_BYTES + 1]]
}
