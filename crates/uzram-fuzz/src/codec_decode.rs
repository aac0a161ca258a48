//! Any bytes as a compressed page.
//!
//! The first byte chooses the algorithm and whether the input's bytes are taken as they are or as
//! changes to a good compressed page.
//!
//! Promises: an error, or exactly one page; nothing outside the page is written; the same bytes
//! decode the same way twice; after an error the decoder still decodes.

use std::sync::LazyLock;

use uzram::ErrorKind;
use uzram::base::units::{PAGE_SIZE, Page};
use uzram::codec::{Algorithm, Decoder, Encoder};

use crate::input::Input;

const CANARY: [u8; 64] = [0xc5; 64];

/// A page between canaries.
#[repr(C)]
struct Guarded {
    before: [u8; 64],
    page: Page,
    after: [u8; 64],
}

/// Runs one input.
///
/// # Panics
/// When a promise is broken; that is what it is for.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let settings = input.byte();
    let algorithm = algorithm(settings);
    let mut decoder = Decoder::new(&algorithm).expect("memory");
    let good = &GOOD[usize::from(settings & 1)];
    let compressed: Box<[u8]> = if settings & 2 == 0 {
        input.rest().into()
    } else {
        let mut changed = good.clone();
        while !input.is_empty() {
            change(&mut changed, &mut input);
        }
        changed.into()
    };

    let mut guarded = Box::new(Guarded { before: CANARY, page: [0; PAGE_SIZE], after: CANARY });
    let result = decoder.decode(&compressed, &mut guarded.page);
    assert!(guarded.before == CANARY && guarded.after == CANARY, "it writes outside the page");
    // A page of its own, which AddressSanitizer watches.
    let mut page = Box::new([0xff; PAGE_SIZE]);
    let again = decoder.decode(&compressed, &mut page);
    assert_eq!(result, again, "the same bytes decode differently");
    match result {
        Ok(()) => assert!(*page == guarded.page, "the same bytes decode to different pages"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
    }
    if let Some(decode) = algorithm.stateless_decode() {
        assert_eq!(decode(&compressed, &mut page), again, "two decoders of {algorithm} disagree");
    }
    decoder.decode(good, &mut page).expect("the decoder stays usable");
    assert!(*page == good_page());
}

/// [`good_page`] compressed, with each algorithm.
static GOOD: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| [0, 1].map(|settings| encode(&algorithm(settings), &good_page())));

/// A page with literals, and matches of many lengths.
fn good_page() -> Page {
    std::array::from_fn(|at| (at * at / 7 % 251) as u8)
}

fn algorithm(settings: u8) -> Algorithm {
    if settings & 1 == 0 { Algorithm::Lz4 } else { Algorithm::Zstd { level: 1 } }
}

fn encode(algorithm: &Algorithm, page: &Page) -> Vec<u8> {
    let mut out = vec![0; 2 * PAGE_SIZE];
    let len = Encoder::new(algorithm).expect("memory").encode(page, &mut out);
    out.truncate(len.expect("twice a page is room enough"));
    out
}

/// Changes, removes or adds a byte somewhere.
fn change(bytes: &mut Vec<u8>, input: &mut Input<'_>) {
    let (what, at, value) = (input.byte(), usize::from(input.u16()), input.byte());
    let at = at % (bytes.len() + 1);
    match what % 4 {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, value),
        2 if at < bytes.len() => drop(bytes.remove(at)),
        _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= value),
    }
}

/// Inputs to begin with.
pub fn seeds() -> Vec<Vec<u8>> {
    let text: Page = std::array::from_fn(|at| b"compressed memory "[at % 18]);
    let letters: Page = std::array::from_fn(|at| {
        b'a' + ((at as u32).wrapping_mul(2_654_435_761) >> 24).leading_zeros() as u8 % 8
    });
    let mut seeds = vec![vec![2], vec![3, 3, 5, 0, 1], vec![2, 0, 9, 0, 0], vec![3, 1, 40, 0, 7]];
    for settings in [0, 1] {
        for page in [&text, &letters, &[0; PAGE_SIZE]] {
            seeds.push([&[settings], &encode(&algorithm(settings), page)[..]].concat());
        }
    }
    // lz4 ends a page of zeros with a match's length, and then a token and five literals: one byte
    // less than a page, and one more.
    let zeros = encode(&Algorithm::Lz4, &[0; PAGE_SIZE]);
    for change in [-1i8, 1] {
        let mut bytes = [&[0], &zeros[..]].concat();
        let length_at = bytes.len() - 7;
        bytes[length_at] = bytes[length_at].wrapping_add_signed(change);
        seeds.push(bytes);
    }
    seeds
}
