//! Which codec `memory` chooses for a page, and what it writes.

use super::*;

fn is_w64(bytes: &[u8]) -> bool {
    bytes.starts_with(&super::super::w64::FORMAT)
}

#[test]
fn pages_of_words_go_to_w64_and_text_to_lz4() {
    let (mut memory, mut lz4) = (Coder::new(&algorithm("memory")), Coder::new(&algorithm("lz4")));
    let random = &mut Random::new(SEED);
    for round in 0..50 {
        let heap = heap_page(random);
        let ours = memory.encode(&heap, ROOM_BYTES).unwrap();
        assert!(is_w64(&ours), "round {round}");
        assert!(ours.len() < lz4.encode(&heap, ROOM_BYTES).unwrap().len(), "round {round}");

        let text = text_page(random);
        let ours = memory.encode(&text, ROOM_BYTES).unwrap();
        assert!(ours == lz4.encode(&text, ROOM_BYTES).unwrap(), "round {round}: not lz4's block");
    }
    // Half a page of text, and zeros.
    let mut half = text_page(random);
    half[PAGE_SIZE / 2..].fill(0);
    assert!(!is_w64(&memory.encode(&half, ROOM_BYTES).unwrap()));
}

/// Words where the sample looks; elsewhere noise that repeats, but not at whole words.
#[test]
fn a_page_that_misleads_is_left_to_lz4() {
    let noise = Random::new(SEED).bytes(1023);
    let mut noise: Vec<u8> = noise.into_iter().cycle().take(PAGE_SIZE).collect();
    for lines in noise.chunks_mut(64 * 20) {
        let len_bytes = lines.len().min(256);
        for (i, word) in lines[..len_bytes].chunks_mut(8).enumerate() {
            word.copy_from_slice(&(i as u64 * 3 + 1).to_le_bytes());
        }
    }
    let page: Page = noise.try_into().unwrap();
    let mut coder = Coder::new(&algorithm("memory"));
    assert!(!is_w64(&coder.encode(&page, ROOM_BYTES).unwrap()));
    coder.assert_round_trip("misleading", &page);
}

#[test]
fn pages_that_look_random_are_refused_and_others_are_not() {
    let mut coder = Coder::new(&algorithm("memory"));
    let random = &mut Random::new(SEED);
    let refused = (0..1000)
        .filter(|_| coder.encode(&random.bytes(PAGE_SIZE).try_into().unwrap(), ROOM_BYTES).is_none())
        .count();
    assert!(refused > 990, "{refused} of 1000 (seed {SEED})");
    // Six bits a byte, seven, and bytes of one sign are compressible or at least not random.
    for mask in [0x3f, 0x7f] {
        let page: Page = std::array::from_fn(|_| random.next() as u8 & mask);
        assert!(coder.encode(&page, ROOM_BYTES).is_some(), "{mask:#x}");
    }
    // Every byte value as often as any other: more even than random.
    let even: Page = std::array::from_fn(|i| (i as u8).wrapping_mul(0x9d).rotate_left(3));
    coder.assert_round_trip("even", &even);
}

#[test]
fn repeats_of_the_dictionary_at_the_start_are_not_taken_for_w64() {
    let dictionary = Random::new(SEED).bytes(4000);
    let mut coder = Coder::new(&with("memory", &dictionary));
    let text = text_page(&mut Random::new(SEED));
    let mut begins_with_repeat = 0;
    for len_bytes in 0..200 {
        for at in [0, 1, 1000] {
            let mut page = text;
            page[..len_bytes].copy_from_slice(&dictionary[at..at + len_bytes]);
            let bytes = coder.encode(&page, ROOM_BYTES).unwrap();
            assert!(!is_w64(&bytes), "{len_bytes} bytes");
            begins_with_repeat += usize::from(bytes[0] < 0x10);
            coder.assert_round_trip("dictionary", &page);
        }
    }
    assert!(begins_with_repeat > 100, "only {begins_with_repeat}");
}

#[test]
fn another_first_byte_is_an_error_or_a_page() {
    let mut coder = Coder::new(&algorithm("memory"));
    let heap = heap_page(&mut Random::new(SEED));
    let mut bytes = coder.encode(&heap, ROOM_BYTES).unwrap();
    for first in 1..=u8::MAX {
        bytes[0] = first;
        coder.decode_damaged(&bytes);
    }
}
