//! w64: every kernel against the portable one, the edges of its classes, and damaged bytes.

use super::super::w64::{self, Kernel};
use super::*;

/// The longest distance, in words or halves.
const LONGEST: usize = 256;

/// One encoder for each kernel; the first is portable.
struct Kernels {
    encoders: Vec<(Kernel, w64::Encoder)>,
    input: Fenced,
    output: Fenced,
}

impl Kernels {
    fn new() -> Self {
        let encoders = Kernel::all().map(|kernel| (kernel, w64::Encoder::new(kernel).unwrap()));
        Kernels { encoders: encoders.collect(), input: Fenced::new(), output: Fenced::new() }
    }

    /// Encodes a page with every kernel, into a buffer of exactly the length; returns what all give.
    fn encode(&mut self, what: &str, page: &Page) -> Vec<u8> {
        let mut first: Option<Vec<u8>> = None;
        for (which, (_, encoder)) in self.encoders.iter_mut().enumerate() {
            *self.input.page() = *page;
            let room = first.as_ref().map_or(2 * PAGE_SIZE, Vec::len);
            self.output.plant_canaries(room);
            let out = self.output.last(room);
            let len_bytes =
                encoder.encode(self.input.page(), out).unwrap_or_else(|| panic!("{what}: no room"));
            let bytes = out[..len_bytes].to_vec();
            self.output.assert_untouched_before_last(room);
            let first = first.get_or_insert_with(|| bytes.clone());
            assert!(*first == bytes, "{what}: kernel {which} encodes differently (seed {SEED})");
            // One byte less is too little, and leaves the room as it was.
            let out = self.output.last(len_bytes - 1);
            out.fill(7);
            assert_eq!(encoder.encode(self.input.page(), out), None, "{what}");
            assert!(out.iter().all(|byte| *byte == 7), "{what}: written without room");
        }
        first.unwrap()
    }

    /// Decodes bytes with every kernel; returns what all give.
    fn decode(&mut self, what: &str, bytes: &[u8]) -> Option<Page> {
        let mut first = None;
        for (which, (kernel, _)) in self.encoders.iter().enumerate() {
            self.input.last(bytes.len()).copy_from_slice(bytes);
            self.output.plant_canaries(PAGE_SIZE);
            self.output.page().fill(0x5a);
            let result = w64::decode(*kernel, self.input.last(bytes.len()), self.output.page());
            self.output.assert_untouched_before_last(PAGE_SIZE);
            let page = match result {
                Ok(()) => Some(*self.output.page()),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt);
                    assert!(*self.output.page() == [0x5a; PAGE_SIZE], "{what}: an error, and a changed page");
                    None
                }
            };
            let first = first.get_or_insert(page);
            assert!(*first == page, "{what}: kernel {which} decodes differently (seed {SEED})");
        }
        first.unwrap()
    }

    fn assert_round_trip(&mut self, what: &str, page: &Page) -> Vec<u8> {
        let bytes = self.encode(what, page);
        assert!(self.decode(what, &bytes) == Some(*page), "{what}: another page comes back (seed {SEED})");
        bytes
    }
}

fn page_of(word: impl FnMut(usize) -> u64) -> Page {
    let words: Vec<u64> = (0..PAGE_SIZE / 8).map(word).collect();
    words.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>().try_into().unwrap()
}

/// Returns a word of two halves whose upper 16 bits no other index has, in either half.
fn unique(i: usize) -> u64 {
    let half = |i: u64| ((i * 0x9e37) & 0xffff) << 16 | i;
    half(2 * i as u64 + 1) | half(2 * i as u64 + 2) << 32
}

/// Pages at the edges of what the format has classes and counts for.
fn edges() -> Vec<(String, Page)> {
    let mut pages = vec![("no word".to_owned(), [0; PAGE_SIZE])];
    for count in [1, 2, 7, 8, 9, 15, 16, 255, 256, 257, 504, 505, 511, 512] {
        pages.push((format!("{count} first words"), page_of(|i| if i < count { unique(i) } else { 0 })));
        pages
            .push((format!("{count} last words"), page_of(|i| if i >= 512 - count { unique(i) } else { 0 })));
        pages.push((format!("{count} equal words"), page_of(|i| if i < count { 77 } else { 0 })));
    }
    // Every mask of eight words that are not zero, with words of every class between.
    for base in [0, 64, 128, 192] {
        let is_set = move |i: usize| (base + i / 8) >> (i % 8) & 1 == 1;
        let word =
            move |i: usize| if i.is_multiple_of(5) { unique(i) } else { 0x7f00_0000_1000 + (i as u64 % 7) };
        pages.push((format!("masks from {base}"), page_of(|i| if is_set(i) { word(i) } else { 0 })));
    }
    // Repeats of words, their upper 48 bits, halves, upper halves, up to and beyond the longest distance.
    for distance in [1, 2, 7, 8, 9, 254, 255, 256, 257, 300] {
        let repeats = |change: fn(u64) -> u64| {
            page_of(|i| if i < distance { unique(i) } else { change(unique(i % distance)) })
        };
        pages.push((format!("words at {distance}"), repeats(|word| word)));
        pages.push((format!("uppers at {distance}"), repeats(|word| word ^ 0x55)));
        pages.push((
            format!("lower halves at {distance}"),
            repeats(|word| word.rotate_left(32) & 0xffff_ffff),
        ));
        pages.push((format!("upper halves at {distance}"), repeats(|word| word ^ 0x1234_0000_0055)));
        // The same, but only halves are not zero.
        let half = |i: usize| unique(i) >> 32 << (32 * (i % 2));
        pages.push((format!("halves at {distance}"), page_of(|i| half(i % distance))));
    }
    pages.push(("small numbers".to_owned(), page_of(|i| i as u64)));
    pages.push(("literals".to_owned(), page_of(unique)));
    pages.push((
        "one class after another".to_owned(),
        page_of(|i| match i % 4 {
            0 => unique(i),
            1 => unique(1),
            2 => unique(2) ^ i as u64,
            _ => (i as u64) << 40,
        }),
    ));
    pages
}

/// Returns a page of words that are zero, new, small, or like an earlier one, in random proportions.
fn mixed_page(random: &mut Random) -> Page {
    let weights: [usize; 6] = std::array::from_fn(|_| random.below(8));
    let mut words: Vec<u64> = Vec::new();
    for i in 0..PAGE_SIZE / 8 {
        let (earlier, low) =
            (words.get(i.wrapping_sub(1 + random.below(LONGEST + 20))).copied(), random.next());
        let mut dice = random.below(weights.iter().sum::<usize>() + 1);
        let class = weights.iter().position(|weight| {
            let is = dice < *weight;
            dice = dice.saturating_sub(*weight);
            is
        });
        words.push(match (class, earlier) {
            (Some(0), _) => 0,
            (Some(1), _) => random.next(),
            (Some(2), _) => low & 0xffff,
            (Some(3), Some(word)) => word,
            (Some(4), Some(word)) => word ^ low & 0xffff,
            (Some(5), Some(word)) => word << 32 | low & 0xff,
            _ => low & 0xffff_ffff,
        });
    }
    page_of(|i| words[i])
}

#[test]
fn pages_come_back_from_every_kernel() {
    let mut kernels = Kernels::new();
    let pages = edges().into_iter().chain(shapes()).chain(periodic()).chain(real());
    for (what, page) in pages {
        kernels.assert_round_trip(&what, &page);
    }
    let random = &mut Random::new(SEED);
    for round in 0..2000 {
        kernels.assert_round_trip(&format!("mixed {round}"), &mixed_page(random));
    }
}

#[test]
fn classes_have_their_lengths() {
    let mut kernels = Kernels::new();
    let mut len_of = |page: Page| kernels.assert_round_trip("classes", &page).len();
    assert_eq!(len_of([0; PAGE_SIZE]), 1 + 64);
    // A number below 65536 has the upper bits of the zero before the first word: two planes of a byte, a
    // distance, a short.
    assert_eq!(len_of(page_of(|i| u64::from(i == 500) * 9)), 1 + 64 + 2 + 1 + 2);
    // The distance to that zero, 1, is the one that all repeats use, and is sent once.
    assert_eq!(len_of(page_of(|_| 9)), 1 + 64 + 128 + 1 + 2);
    // 1024 literals are the most that there can be.
    assert_eq!(len_of(page_of(unique)), 1 + 64 + 128 + 128 + 256 + 4096);
}

#[test]
fn damaged_bytes_are_the_same_to_every_kernel() {
    let mut kernels = Kernels::new();
    let random = &mut Random::new(SEED);
    let mut pages: Vec<_> = edges().into_iter().map(|(_, page)| page).collect();
    pages.extend((0..60).map(|_| mixed_page(random)));
    let mut decoded = 0;
    for page in pages {
        let good = kernels.encode("good", &page);
        for _ in 0..100 {
            let mut bytes = good.clone();
            match random.below(6) {
                0 => bytes.truncate(random.below(bytes.len())),
                1 => {
                    let extra_bytes = 1 + random.below(40);
                    bytes.extend(random.bytes(extra_bytes));
                }
                2 => bytes.insert(random.below(bytes.len()), random.next() as u8),
                _ => {}
            }
            for _ in 0..random.below(4) {
                // Most damage in the planes, which decide all.
                let last = bytes.len().min(if random.below(3) == 0 { usize::MAX } else { 320 });
                if last > 0 {
                    let at = bytes.len() - 1 - random.below(last);
                    bytes[at] = if random.below(2) == 0 {
                        random.next() as u8
                    } else {
                        bytes[at] ^ 1 << random.below(8)
                    };
                }
            }
            decoded += usize::from(kernels.decode("damaged", &bytes).is_some());
        }
    }
    assert!(decoded > 500, "only {decoded} damaged pages decoded");
}

#[test]
fn garbage_is_the_same_to_every_kernel() {
    let mut kernels = Kernels::new();
    let random = &mut Random::new(SEED);
    for _ in 0..20_000 {
        // Sparse planes, so that the lengths are right now and then.
        let len_bytes = random.below(300);
        let mut bytes = random.bytes(len_bytes);
        for byte in &mut bytes {
            *byte &= (random.next() & random.next() & random.next() & random.next()) as u8;
        }
        if let Some(first) = bytes.first_mut() {
            *first = 0;
        }
        kernels.decode("garbage", &bytes);
    }
}
