//! Compression with dictionaries, and training of dictionaries.

use super::*;

/// Returns a page of pieces of a pool that itself is incompressible.
fn page_of_stretches(pool: &[u8], random: &mut Random) -> Page {
    let mut page = Vec::new();
    while page.len() < PAGE_SIZE {
        let start = random.below(pool.len() - 256);
        page.extend_from_slice(&pool[start..start + 256]);
    }
    page.try_into().unwrap()
}

#[test]
fn dictionaries_help_and_are_independent_of_the_level() {
    let random = &mut Random::new(SEED);
    let pool = random.bytes(8 << 10);
    let samples: Vec<Page> = (0..64).map(|_| page_of_stretches(&pool, random)).collect();
    let trained = train(&samples, 10 << 10).unwrap();
    for (kind, levels) in [
        ("lz4", "lz4 lz4:9 lz4hc:2 lz4hc:5 lz4hc:9"),
        ("zstd", "zstd:-7 zstd:1 zstd:2 zstd:4 zstd:6 zstd:9 zstd:13 zstd:16 zstd:22"),
    ] {
        for bytes in [&pool, &trained] {
            let mut decoder = Coder::new(&with(kind, bytes));
            for level in levels.split(' ') {
                let mut coder = Coder::new(&with(level, bytes));
                let mut sum_bytes = 0;
                for _ in 0..40 {
                    let page = page_of_stretches(&pool, random);
                    let coded = coder.encode(&page, ROOM_BYTES).unwrap();
                    assert!(decoder.decode(&coded).unwrap() == page, "{}", coder.name);
                    sum_bytes += coded.len();
                }
                assert!(sum_bytes < 40 * PAGE_SIZE / 3, "{}: {sum_bytes} bytes", coder.name);
            }
        }
    }
}

#[test]
fn a_wrong_dictionary_is_an_error_or_another_page() {
    let mut altered = trained().to_vec();
    altered.iter_mut().rev().take(4 << 10).for_each(|byte| *byte = byte.wrapping_add(1));
    for name in ["lz4", "lz4hc", "zstd", "zstd:19"] {
        let mut encoder = Coder::new(&with(name, trained()));
        let others = [with(name, &altered), with(name, raw()), algorithm(name)];
        let (random, mut wrong) = (&mut Random::new(SEED), 0);
        for _ in 0..50 {
            let page = text_page(random);
            let coded = encoder.encode(&page, ROOM_BYTES).unwrap();
            for other in &others {
                wrong += usize::from(Coder::new(other).decode_damaged(&coded) != Some(page));
            }
        }
        assert!(wrong > 100, "{name}: only {wrong} of 150 pages came back wrong");
    }
}

#[test]
fn coders_share_a_dictionary_and_keep_it() {
    for name in ["lz4", "lz4hc", "zstd:3"] {
        let algorithm = with(name, trained());
        assert!(algorithm.shared_bytes() > trained().len(), "{name}");
        let alone = Encoder::new(&self::algorithm(name)).unwrap().state_bytes();
        let coders: Vec<_> = (0..4).map(|_| Coder::new(&algorithm)).collect();
        drop(algorithm);
        std::thread::scope(|scope| {
            for (seed, mut coder) in coders.into_iter().enumerate() {
                assert!(coder.encoder.state_bytes() <= 2 * alone, "{name}: a dictionary for each encoder?");
                scope.spawn(move || {
                    let random = &mut Random::new(SEED + seed as u64);
                    for _ in 0..300 {
                        coder.assert_round_trip("text", &text_page(random));
                        coder.assert_round_trip("heap", &heap_page(random));
                    }
                });
            }
        });
    }
}

#[test]
fn the_trainer_says_what_it_lacks() {
    let random = &mut Random::new(SEED);
    let pages: Vec<Page> = (0..16).map(|_| text_page(random)).collect();
    for (samples, len_bytes, hint) in [
        (&pages[..], 1000, "1024 to 1048576"),
        (&pages, MAX_DICTIONARY_BYTES + 1, "1024 to 1048576"),
        (&pages[..15], 8 << 10, "give 16"),
        (&[], 4 << 10, "give 8"),
    ] {
        let error = train(samples, len_bytes).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(hint), "{error}");
    }
    let trained = train(&pages, 8 << 10).unwrap();
    assert!(trained.len() <= 8 << 10 && trained.starts_with(&0xec30_a437_u32.to_le_bytes()));
    // With nothing to learn, the result is an error or a dictionary, never a panic.
    for page in [[0; PAGE_SIZE], [7; PAGE_SIZE]] {
        if let Ok(bytes) = train(&[page; 16], 8 << 10) {
            with("zstd", &bytes);
        }
    }
}
