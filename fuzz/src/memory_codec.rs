//! Fuzzes the algorithm `memory` on pages of words, with every kernel of w64.
//!
//! An input is a page, made of words like those that programs have, and a seed for damage to its compressed
//! form; or compressed bytes themselves.
//!
//! Promises: all kernels write the same bytes; these decode to the page, and damaged ones to an error or to
//! the same page with every kernel; nothing outside the buffers is read or written (they have exactly their
//! length, for AddressSanitizer).

use std::cell::RefCell;

use uzram::ErrorKind;
use uzram::codec::{Algorithm, Encoder, Kind, StatelessDecoder};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

use crate::input::Input;

/// How often the compressed page of an input is damaged.
const DAMAGES: usize = 64;

thread_local! {
    /// A coder for each kernel; what they have coded before does not matter to them.
    static CODERS: RefCell<Vec<(Encoder, StatelessDecoder)>> = {
        let algorithms = Algorithm::from(Kind::Memory).with_each_kernel();
        let coder = |algorithm: Algorithm| {
            (Encoder::new(&algorithm).expect("memory"), algorithm.stateless_decoder().expect("it has one"))
        };
        RefCell::new(algorithms.into_iter().map(coder).collect())
    };
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    CODERS.with_borrow_mut(|coders| {
        if input.byte() == 0 {
            // w64 begins with 0.
            decode(coders, [&[0], input.rest()].concat().into());
            return;
        }
        let mut random = Random::new(u64::from(input.u16()));
        let page = page(&mut input);
        let Some(good) = encode(coders, &page) else { return };
        assert!(decode(coders, good.clone()) == Some(page), "another page comes back");
        for _ in 0..DAMAGES {
            decode(coders, damaged(&good, &mut random));
        }
    });
}

/// Encodes a page with every kernel, and returns what all give.
fn encode(coders: &mut [(Encoder, StatelessDecoder)], page: &Page) -> Option<Box<[u8]>> {
    let mut first: Option<Option<Box<[u8]>>> = None;
    for (encoder, _) in coders {
        let mut out =
            vec![0; first.as_ref().and_then(Option::as_ref).map_or(PAGE_SIZE + 512, |bytes| bytes.len())];
        let bytes = encoder.encode(page, &mut out).map(|len| out[..len].into());
        assert!(*first.get_or_insert_with(|| bytes.clone()) == bytes, "two kernels write different bytes");
    }
    first.flatten()
}

/// Decodes bytes with every kernel, and returns what all give.
fn decode(coders: &[(Encoder, StatelessDecoder)], bytes: Box<[u8]>) -> Option<Page> {
    let mut first = None;
    for (_, decoder) in coders {
        let mut page = Box::new([0xc5; PAGE_SIZE]);
        let result = decoder.decode(&bytes, &mut page);
        if let Err(error) = &result {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
        let page = result.is_ok().then_some(*page);
        assert!(*first.get_or_insert(page) == page, "two kernels decode differently");
    }
    first.flatten()
}

/// Returns bytes with some changes, most of them in the planes at their end.
fn damaged(good: &[u8], random: &mut Random) -> Box<[u8]> {
    let mut bytes = good.to_vec();
    match random.below(8) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => bytes.resize(good.len() + 1 + random.below(40), random.next() as u8),
        2 => bytes.insert(random.below(good.len()), random.next() as u8),
        _ => {}
    }
    for _ in 0..1 + random.below(3) {
        let from_end = if random.below(3) == 0 { bytes.len() } else { bytes.len().min(320) };
        if from_end > 0 {
            let at = bytes.len() - 1 - random.below(from_end);
            bytes[at] = match random.below(3) {
                0 => random.next() as u8,
                1 => 0,
                _ => bytes[at] ^ 1 << random.below(8),
            };
        }
    }
    bytes.into()
}

/// Returns a page of words: zeros, small numbers, pointers, new ones, and some like an earlier one.
fn page(input: &mut Input<'_>) -> Page {
    let mut words: Vec<u64> = Vec::new();
    while words.len() < PAGE_SIZE / 8 {
        if input.is_empty() {
            words.resize(PAGE_SIZE / 8, 0);
            break;
        }
        let (choice, value) = (input.byte(), u64::from(input.u16()));
        let earlier = words.len().checked_sub(1 + usize::from(input.byte()) + usize::from(choice >> 7));
        let earlier = earlier.map_or(0, |at| words[at]);
        // Some words come several times.
        let times = 1 + usize::from(choice >> 3 & 7) * usize::from(choice >> 6 & 1) * 4;
        let word = match choice & 7 {
            0 => 0,
            1 => value,
            2 => 0x7f12_3400_0000 + value * 16,
            3 => value.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            4 => earlier,
            5 => earlier ^ value,
            6 => earlier << 32 | value,
            _ => value << 32 | earlier >> 32,
        };
        let room = PAGE_SIZE / 8 - words.len();
        words.extend(std::iter::repeat_n(word, times.min(room)));
    }
    let mut page = [0; PAGE_SIZE];
    for (word, to) in words.iter().zip(page.as_chunks_mut::<8>().0) {
        *to = word.to_le_bytes();
    }
    page
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut random = Random::new(0);
    let mut seeds: Vec<Vec<u8>> = vec![vec![], vec![0; 65], vec![1, 7, 0]];
    for classes in [&[1u8, 2][..], &[2, 4, 5], &[0, 1, 2, 3, 4, 5, 6, 7], &[6, 7, 2], &[0x42, 4, 5, 1]] {
        let mut seed = vec![1, random.next() as u8, 0];
        for _ in 0..512 {
            let [class, low, distance] = [random.below(classes.len()), random.below(256), random.below(40)];
            seed.extend([classes[class], low as u8, (low / 7) as u8, distance as u8]);
        }
        let page = page(&mut Input::new(&seed[3..]));
        seeds.extend(CODERS.with_borrow_mut(|coders| encode(coders, &page)).map(Vec::from));
        seeds.push(seed);
    }
    seeds
}
