//! Once made, encoders and decoders take no memory: neither Rust's nor, inside zstd, C's.

#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(clippy::unwrap_used)]

mod allocations;

use uzram::base::units::{PAGE_SIZE, Page};
use uzram::codec::{Algorithm, Decoder, Encoder};

/// Page `number`: the higher the number in its hundred, the less it compresses.
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
    assert!(allocations::count() > 0, "{text}: Rust's allocations are not counted");
    let algorithms = [Algorithm::Lz4, Algorithm::Zstd { level: 1 }, Algorithm::Zstd { level: 3 }];
    for algorithm in algorithms {
        let before = allocations::count();
        let mut encoder = Encoder::new(&algorithm).unwrap();
        let mut decoder = Decoder::new(&algorithm).unwrap();
        assert!(allocations::count() > before, "{algorithm}: the allocations of C code are not counted");

        let (mut page, mut out, mut decoded) = ([0; PAGE_SIZE], [0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut did_not_fit = 0;
        let before = allocations::count();
        for number in 0..10_000 {
            fill(&mut page, number);
            match encoder.encode(&page, &mut out) {
                Some(len_bytes) => {
                    decoder.decode(&out[..len_bytes], &mut decoded).unwrap();
                    assert!(decoded == page);
                    // Failing is free as well.
                    assert!(decoder.decode(&out[..len_bytes / 2], &mut decoded).is_err());
                }
                None => did_not_fit += 1,
            }
            if number % 10 == 0 {
                assert!(encoder.encode(&page, &mut out[..8]).is_none());
            }
        }
        let after = allocations::count();
        assert_eq!(after, before, "{algorithm}: {} allocations", after - before);
        assert!(did_not_fit < 1_000, "{algorithm}: {did_not_fit} pages did not fit");
    }
}
