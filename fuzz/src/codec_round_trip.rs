//! Fuzzes the codecs with pages made from the input, compressed and decompressed.
//!
//! Promises: any bytes are accepted as a dictionary, or rejected with a message; an encoder's output decodes
//! to the page, whatever the encoder and the decoder processed before; the encoder writes only into its
//! buffer; a page fits a buffer of the worst-case size, except that `memory` refuses pages that look random.

use uzram::codec::{Algorithm, Decoder, Dictionary, Encoder, Kind, train};
use uzram::units::{PAGE_SIZE, Page};
use uzram::{Error, ErrorKind};

use crate::input::Input;

/// Room for any page's compressed form: above the worst case of all, zstd's compress bound (4174 bytes for a
/// page).
const ENOUGH_BYTES: usize = PAGE_SIZE + 128;
const CANARY: u8 = 0xc5;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let Some(algorithm) = algorithm(&mut input) else { return };
    let room_bytes = usize::from(input.u16()) % (ENOUGH_BYTES + 1);
    let mut encoder = Encoder::new(&algorithm).expect("memory");
    let mut decoder = Decoder::new(&algorithm).expect("memory");
    let (first, second) = (page(&mut input), page(&mut input));

    let Some(roomy) = encode(&mut encoder, &first, ENOUGH_BYTES) else {
        assert!(algorithm.kind() == Kind::Memory, "{algorithm} has room for any page");
        return;
    };
    check(&mut decoder, &roomy, &first);
    for page in [&second, &first] {
        if let Some(tight) = encode(&mut encoder, page, room_bytes) {
            check(&mut decoder, &tight, page);
        }
    }
    let again = encode(&mut encoder, &first, ENOUGH_BYTES).expect("it fits");
    assert!(again == roomy, "{algorithm} codes a page differently after another");
}

/// Returns any kind at a level that is quick to make, without or with a dictionary of the input's bytes;
/// `None` if it rejects the dictionary.
fn algorithm(input: &mut Input<'_>) -> Option<Algorithm> {
    let (choice, level) = (input.byte(), i32::from(input.byte()));
    let kind = Kind::ALL[usize::from(choice % 5)];
    let level = match kind {
        Kind::Lz4 => 1 + level,
        Kind::Lz4hc => 2 + level % 8,
        // A higher level takes milliseconds to make its tables.
        Kind::Zstd if level < 250 => 1 + level % 4,
        Kind::Zstd => 249 - level,
        Kind::Deflate => 1 + level % 9,
        Kind::Memory => 1,
    };
    let bytes = match choice / 5 % 4 {
        0 | 1 => None,
        2 => {
            let len_bytes = usize::from(input.u16()) % 2048;
            Some(input.bytes(len_bytes).to_vec())
        }
        // Longer than lz4's offsets reach.
        _ => Some(input.contents(usize::from(choice / 20) * 5000)),
    };
    let dictionary = match bytes.map(|bytes| Dictionary::new("/dictionary", bytes)) {
        Some(Err(error)) => return refused(&error),
        Some(Ok(dictionary)) => Some(dictionary),
        None => None,
    };
    Algorithm::new(kind, Some(level), dictionary).map_or_else(|error| refused(&error), Some)
}

fn refused<T>(error: &Error) -> Option<T> {
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("dict"), "{error}");
    None
}

fn encode(encoder: &mut Encoder, page: &Page, room_bytes: usize) -> Option<Vec<u8>> {
    let mut out = vec![CANARY; room_bytes + 64];
    let (room, beyond) = out.split_at_mut(room_bytes);
    let len = encoder.encode(page, room);
    assert!(beyond.iter().all(|byte| *byte == CANARY), "it writes beyond its room");
    // A buffer of exactly that length, which AddressSanitizer watches.
    let mut exact = vec![0; room_bytes];
    assert_eq!(encoder.encode(page, &mut exact), len, "the same page has two lengths");
    let len = len?;
    assert!((1..=room_bytes).contains(&len), "{len} of {room_bytes}");
    exact.truncate(len);
    assert!(exact == out[..len], "the same page has two forms");
    Some(exact)
}

fn check(decoder: &mut Decoder, compressed: &[u8], page: &Page) {
    let mut decoded = Box::new([0xff; PAGE_SIZE]);
    decoder.decode(compressed, &mut decoded).expect("what was encoded decodes");
    assert!(*decoded == *page, "another page comes back");
}

fn page(input: &mut Input<'_>) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut at = 0;
    while at < PAGE_SIZE && !input.is_empty() {
        let kind = input.byte();
        let len = (1 + usize::from(input.u16()) % 1024).min(PAGE_SIZE - at);
        if kind & 1 == 0 || at == 0 {
            page[at..at + len].copy_from_slice(&input.contents(len));
        } else {
            // A match: copy earlier bytes at some distance.
            let distance = 1 + usize::from(input.u16()) % at;
            (at..at + len).for_each(|to| page[to] = page[to - distance]);
        }
        at += len;
    }
    page
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let noise = [0, 0xff, 3, 2, 1];
    let text = *b"\0\xff\x03\x01\x0bcompressible";
    let repeated = [1, 0xff, 3, 0x40, 0];
    let page = [&text[..], &noise, &repeated, &text].concat();
    let incompressible = [0, 1, 2, 3].map(|seed| [0, 0xff, 3, 2, seed]).concat();
    let with = |algorithm: &[u8], room: u16, pages: &[&[u8]]| {
        [algorithm, &room.to_le_bytes()[..], &pages.concat()].concat()
    };
    let samples: Vec<Page> =
        (0..16).map(|number| std::array::from_fn(|at| (at * (at + number) / 9 % 97) as u8)).collect();
    let trained = train(&samples, 1536).unwrap_or_default();
    let dictionary = [&[2 * 5 + 2, 1], &(trained.len() as u16).to_le_bytes()[..], &trained].concat();
    let mut seeds = vec![
        with(&[2, 250], 3000, &[&incompressible, &page]),
        with(&[0, 0], 2000, &[&incompressible, &page]),
        with(&[2, 2], 40, &[&[], &page]),
        with(&dictionary, 4096, &[&page, &incompressible]),
    ];
    for kind in 0..5 {
        seeds.push(with(&[kind, 0], 4096, &[&page, &incompressible]));
        seeds.push(with(&[11 * 20 + 3 * 5 + kind, 5], 4096, &[&noise, &page, &noise]));
    }
    seeds
}
