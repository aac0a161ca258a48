//! Once created, encoders and decoders allocate nothing, neither in Rust nor in the C libraries.

use uzram::codec::{Algorithm, Decoder, Dictionary, Encoder, Kind};
use uzram::units::{PAGE_SIZE, Page};

/// Pages per algorithm; the slow ones take a millisecond a page.
const PAGES: u64 = 2_000;

/// Fills page `number`: the higher `number % 100`, the less it compresses.
fn fill(page: &mut Page, number: u64) {
    let mut state = number + 1;
    let random_bytes = (number % 100) as usize * PAGE_SIZE / 100;
    for (i, byte) in page.iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = if i < random_bytes { (state >> 56) as u8 } else { (i / 16) as u8 };
    }
}

#[test]
fn coding_pages_allocates_nothing() {
    let text = std::hint::black_box(String::from("seen by the counter"));
    assert!(crate::allocations::count() > 0, "{text}: Rust's allocations are not counted");
    // A dictionary of raw pages.
    let mut dictionary = vec![0; 16 * PAGE_SIZE];
    for (number, page) in dictionary.as_chunks_mut().0.iter_mut().enumerate() {
        fill(page, number as u64 * 2);
    }
    let with_dictionary = |kind| {
        let dictionary = Dictionary::new("/dictionary", dictionary.clone()).unwrap();
        Algorithm::new(kind, None, Some(dictionary)).unwrap()
    };
    let names = "lz4 lz4hc:2 lz4hc zstd zstd:3 zstd:19 deflate:1 deflate deflate:12 memory";
    let plain = names.split(' ').map(|name| name.parse().unwrap());
    let with_dictionary = [Kind::Lz4, Kind::Lz4hc, Kind::Zstd, Kind::Memory].map(with_dictionary);
    for algorithm in plain.chain(with_dictionary) {
        let before = crate::allocations::count();
        let mut encoder = Encoder::new(&algorithm).unwrap();
        let mut decoder = Decoder::new(&algorithm).unwrap();
        assert!(crate::allocations::count() > before, "{algorithm}: those of C code are not counted");
        let (mut page, mut out, mut decoded) = ([0; PAGE_SIZE], [0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut did_not_fit = 0;
        let before = crate::allocations::count();
        for number in 0..PAGES {
            fill(&mut page, number);
            match encoder.encode(&page, &mut out) {
                Some(len_bytes) => {
                    decoder.decode(&out[..len_bytes], &mut decoded).unwrap();
                    assert!(decoded == page);
                    // Failing allocates nothing either.
                    assert!(decoder.decode(&out[..len_bytes / 2], &mut decoded).is_err());
                }
                None => did_not_fit += 1,
            }
            if number % 10 == 0 {
                assert!(encoder.encode(&page, &mut out[..8]).is_none());
            }
        }
        let after = crate::allocations::count();
        assert_eq!(after, before, "{algorithm}: {} allocations", after - before);
        assert!(did_not_fit < PAGES / 10, "{algorithm}: {did_not_fit} pages did not fit");
    }
}
