//! Fuzzes the decoders with any bytes as a compressed page.
//!
//! The first byte chooses the algorithm, with or without a dictionary, and whether the input's bytes are
//! decoded as they are or change a good compressed page.
//!
//! Promises: an error, or exactly one page; nothing outside the page is written; the same bytes decode to the
//! same page twice; after an error the decoder still works.

use std::sync::LazyLock;

use uzram::ErrorKind;
use uzram::codec::{Algorithm, Decoder, Dictionary, Encoder, Kind};
use uzram::units::{PAGE_SIZE, Page};

use crate::input::Input;

const CANARY: [u8; 64] = [0xc5; 64];

#[repr(C)]
struct Guarded {
    before: [u8; 64],
    page: Page,
    after: [u8; 64],
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let settings = input.byte();
    let Chosen { algorithm, good } = &CHOICES[usize::from(settings >> 1) % CHOICES.len()];
    let mut decoder = Decoder::new(algorithm).expect("memory");
    let compressed: Box<[u8]> = if settings & 1 == 0 {
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
    // A separate allocation, which AddressSanitizer watches.
    let mut page = Box::new([0xff; PAGE_SIZE]);
    let again = decoder.decode(&compressed, &mut page);
    assert_eq!(result, again, "the same bytes decode differently");
    match result {
        Ok(()) => assert!(*page == guarded.page, "the same bytes decode to different pages"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
    }
    if let Some(stateless) = algorithm.stateless_decoder() {
        assert_eq!(stateless.decode(&compressed, &mut page), again, "two decoders of {algorithm} disagree");
    }
    decoder.decode(good, &mut page).expect("the decoder stays usable");
    assert!(*page == good_page(algorithm.kind()));
}

/// An algorithm, and its [`good_page`] compressed with it.
struct Chosen {
    algorithm: Algorithm,
    good: Vec<u8>,
}

/// Each decoder without and with a dictionary; lz4hc's is lz4's. lz4 checks offsets only if they can reach
/// beyond the dictionary, which they cannot when it has 64 KiB.
static CHOICES: LazyLock<Vec<Chosen>> = LazyLock::new(|| {
    let with_dictionary = |(kind, len_bytes)| {
        let bytes = (0..len_bytes).map(|at: u64| (at * at / 7 % 251) as u8).collect();
        let dictionary = Dictionary::new("/dictionary", bytes).expect("a good length");
        Algorithm::new(kind, None, Some(dictionary)).expect("memory")
    };
    let plain = [Kind::Lz4, Kind::Zstd, Kind::Deflate, Kind::Memory];
    let plain = plain.map(|kind| Algorithm::new(kind, None, None).expect("memory"));
    let dictionaries = [(Kind::Lz4, 100), (Kind::Lz4, 70_000), (Kind::Zstd, 20_000), (Kind::Memory, 20_000)];
    let all = plain.into_iter().chain(dictionaries.map(with_dictionary));
    all.map(|algorithm| Chosen { good: encode(&algorithm, &good_page(algorithm.kind())), algorithm })
        .collect()
});

/// A page with literals, and matches of many lengths; for `memory` one of words.
fn good_page(kind: Kind) -> Page {
    match kind {
        Kind::Memory => std::array::from_fn(|at| if at % 8 < 5 { (at * at / 7 % 251) as u8 } else { 0 }),
        _ => std::array::from_fn(|at| (at * at / 7 % 251) as u8),
    }
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

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let text: Page = std::array::from_fn(|at| b"compressed memory "[at % 18]);
    let letters: Page = std::array::from_fn(|at| {
        b'a' + ((at as u32).wrapping_mul(2_654_435_761) >> 24).leading_zeros() as u8 % 8
    });
    let mut seeds = Vec::new();
    for (choice, Chosen { algorithm, .. }) in (0u8..).zip(&*CHOICES) {
        let (whole, changed) = (choice << 1, choice << 1 | 1);
        seeds.extend([vec![changed], vec![changed, 3, 5, 0, 1], vec![changed, 1, 40, 0, 7]]);
        for page in [&text, &letters, &[0; PAGE_SIZE]] {
            seeds.push([&[whole], &encode(algorithm, page)[..]].concat());
        }
    }
    // lz4 ends a page of zeros with a match's length, and then a token and five literals: one byte
    // less than a page, and one more.
    let zeros = encode(&Algorithm::default(), &[0; PAGE_SIZE]);
    for change in [-1i8, 1] {
        let mut bytes = [&[0], &zeros[..]].concat();
        let length_at = bytes.len() - 7;
        bytes[length_at] = bytes[length_at].wrapping_add_signed(change);
        seeds.push(bytes);
    }
    seeds
}
