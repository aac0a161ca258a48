//! Fuzzes two small formats that any process can write: the mark at the beginning of a backing file or
//! device, and the text in which programs under `uzram run` publish their figures. The first byte of the
//! input chooses: bytes as they are, or a true form that the rest of the input changes.
//!
//! Promises: bytes that are accepted are exactly those that writing what was read gives; what follows a mark
//! changes nothing, figures have one length, and a part of either is rejected; each figure is the number at
//! its place, by a naive reading.

use uzram::backing::{MARK_BYTES, Mark};
use uzram_pager::Figures;

use crate::input::Input;

/// Checks bytes as they are, or good ones with some changes, and then with more behind them.
fn check_changed(mut input: Input<'_>, good: impl Fn(&mut Input<'_>) -> Vec<u8>, check: fn(&[u8])) {
    /// The most bytes that one input changes.
    const MAX_CHANGES: usize = 64;
    if input.byte().is_multiple_of(2) {
        return check(input.rest());
    }
    let mut bytes = good(&mut input);
    for _ in 0..MAX_CHANGES {
        let (at, change) = (usize::from(input.u16()) % bytes.len(), input.byte());
        bytes[at] ^= change;
    }
    check(&bytes);
    bytes.extend_from_slice(input.rest());
    check(&bytes);
}

pub(crate) fn run_mark(bytes: &[u8]) {
    let good = |input: &mut Input<'_>| {
        let mark = Mark { id: std::array::from_fn(|_| input.byte()) };
        assert_eq!(Mark::parse(&mark.to_bytes()), Some(mark));
        mark.to_bytes().to_vec()
    };
    check_changed(Input::new(bytes), good, |bytes| {
        let Some(mark) = Mark::parse(bytes) else { return };
        assert!(bytes[..MARK_BYTES] == mark.to_bytes(), "{mark:?} is written otherwise");
        assert_eq!(Mark::parse(&bytes[..MARK_BYTES]), Some(mark));
        assert_eq!(Mark::parse(&bytes[..MARK_BYTES - 1]), None);
    });
}

pub(crate) fn run_figures(bytes: &[u8]) {
    let good = |input: &mut Input<'_>| {
        let figures = Figures {
            process: input.u32().into(),
            limit_bytes: input.u64(),
            stored_bytes: input.u64(),
            fault_us: input.u64(),
            ..Figures::default()
        };
        assert_eq!(Figures::parse(&figures.to_text()), Some(figures));
        figures.to_text().to_vec()
    };
    check_changed(Input::new(bytes), good, |bytes| {
        let Some(figures) = Figures::parse(bytes) else { return };
        assert!(bytes == figures.to_text(), "{figures:?} are written otherwise");
        assert_eq!(Figures::parse(&bytes[..bytes.len() - 1]), None);
        let text = str::from_utf8(bytes).expect("what is accepted is text");
        let words: Vec<&str> = text.split_whitespace().skip(2).collect();
        assert_eq!(words.len(), 2 * figures.all().count(), "{text}");
        for ((name, value), pair) in figures.all().zip(words.chunks(2)) {
            assert_eq!((name, Ok(value)), (pair[0], pair[1].parse()), "{text}");
        }
    });
}

pub(crate) fn seeds_of_mark() -> Vec<Vec<u8>> {
    let mark = Mark { id: *b"0123456789abcdef" };
    let as_it_is = [&[0], &mark.to_bytes()[..], b"what follows"].concat();
    let unchanged = [&[1], &mark.id[..]].concat();
    let id_changed = [&unchanged[..], &[20, 0, 1]].concat();
    let crc_changed = [&unchanged[..], &[0xff, 0x0f, 0x80]].concat();
    vec![as_it_is, unchanged, id_changed, crc_changed, vec![0; MARK_BYTES + 1]]
}

pub(crate) fn seeds_of_figures() -> Vec<Vec<u8>> {
    let figures = Figures { process: 4711, limit_bytes: 300 << 20, faults: u64::MAX, ..Figures::default() };
    let as_it_is = [&[0], &figures.to_text()[..]].concat();
    let unchanged = [&[1][..], &[7; 28]].concat();
    let digit_changed = [&unchanged[..], &[0x27, 0, 1]].concat();
    let head_changed = [&unchanged[..], &[10, 0, 3]].concat();
    vec![as_it_is, unchanged, digit_changed, head_changed, vec![0; Figures::TEXT_BYTES + 1]]
}
