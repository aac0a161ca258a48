//! The same tests for every algorithm, and comparisons with independent implementations.
//!
//! Each buffer that C code reads or writes ends at an inaccessible page and begins after canary bytes: an
//! access beyond its end kills the test, a write before its start fails it.

#![allow(clippy::unwrap_used)]

mod algorithm;
mod dictionary;
mod memory;
mod w64;

use std::sync::LazyLock;

use super::*;
use crate::base::error::ErrorKind;
use crate::base::mem::{Access, Mapping};
use crate::base::random::Random;
use crate::base::units::PAGE_SIZE;

fn algorithms() -> Vec<Algorithm> {
    let plain = "lz4 lz4:8 lz4hc:2 lz4hc:3 lz4hc zstd zstd:3 zstd:-5 zstd:19 deflate:1 deflate:4 deflate \
                 deflate:9 deflate:12 memory";
    let of_raw = "lz4 lz4hc:2 lz4hc:4 zstd".split(' ').map(|name| with(name, raw()));
    let of_trained =
        "lz4:3 lz4hc zstd zstd:3 zstd:-3 zstd:19 memory".split(' ').map(|name| with(name, trained()));
    plain.split(' ').map(algorithm).chain(of_raw).chain(of_trained).collect()
}

fn algorithm(text: &str) -> Algorithm {
    text.parse().unwrap()
}

fn with(name: &str, bytes: &[u8]) -> Algorithm {
    let plain = algorithm(name);
    let dictionary = Dictionary::new(&format!("/dictionary/{}", bytes.len()), bytes.to_vec()).unwrap();
    Algorithm::new(plain.kind(), Some(plain.level()), Some(dictionary)).unwrap()
}

/// Returns a raw dictionary, longer than lz4's offsets reach.
fn raw() -> &'static [u8] {
    static RAW: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let random = &mut Random::new(SEED);
        (0..9).flat_map(|_| [text_page(random), heap_page(random)]).flatten().collect()
    });
    &RAW
}

fn trained() -> &'static [u8] {
    static TRAINED: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let random = &mut Random::new(SEED);
        let samples: Vec<Page> = (0..30).flat_map(|_| [text_page(random), heap_page(random)]).collect();
        train(&samples, 8 << 10).unwrap()
    });
    &TRAINED
}

/// Larger than any compressed page.
const ROOM_BYTES: usize = 2 * PAGE_SIZE;

const SEED: u64 = 0x7a72_616d;

/// Memory whose last byte lies just before an inaccessible page.
struct Fenced(Mapping);

impl Fenced {
    /// A multiple of every Linux page size.
    const BYTES: usize = 64 << 10;
    const CANARY: u8 = 0xa5;

    fn new() -> Self {
        let mapping = Mapping::new(2 * Self::BYTES, Access::None).unwrap();
        mapping.enable(0, Self::BYTES).unwrap();
        let mut fenced = Fenced(mapping);
        fenced.whole().fill(Self::CANARY);
        fenced
    }

    fn whole(&mut self) -> &mut [u8] {
        // SAFETY: the accessible half of this mapping, borrowed as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.0.base(), Self::BYTES) }
    }

    fn last(&mut self, len_bytes: usize) -> &mut [u8] {
        self.whole().split_at_mut(Self::BYTES - len_bytes).1
    }

    fn page(&mut self) -> &mut Page {
        self.last(PAGE_SIZE).try_into().unwrap()
    }

    fn assert_untouched_before_last(&mut self, len_bytes: usize) {
        let before = &self.whole()[Self::BYTES - len_bytes - 256..Self::BYTES - len_bytes];
        assert!(before.iter().all(|&byte| byte == Self::CANARY), "written before the buffer");
    }

    fn plant_canaries(&mut self, len_bytes: usize) {
        self.whole()[Self::BYTES - len_bytes - 256..Self::BYTES - len_bytes].fill(Self::CANARY);
    }
}

/// An encoder and a decoder behind fences; every call checks the canaries.
struct Coder {
    name: String,
    encoder: Encoder,
    decoder: Decoder,
    input: Fenced,
    output: Fenced,
}

impl Coder {
    fn new(algorithm: &Algorithm) -> Self {
        Coder {
            name: algorithm.to_string(),
            encoder: Encoder::new(algorithm).unwrap(),
            decoder: Decoder::new(algorithm).unwrap(),
            input: Fenced::new(),
            output: Fenced::new(),
        }
    }

    fn all() -> impl Iterator<Item = Coder> {
        algorithms().into_iter().map(|algorithm| Coder::new(&algorithm))
    }

    fn encode(&mut self, page: &Page, room_bytes: usize) -> Option<Vec<u8>> {
        *self.input.page() = *page;
        self.output.plant_canaries(room_bytes);
        let out = self.output.last(room_bytes);
        let len_bytes = self.encoder.encode(self.input.page(), out)?;
        let bytes = out[..len_bytes].to_vec();
        self.output.assert_untouched_before_last(room_bytes);
        assert_eq!(self.input.page(), page, "{} changed its input", self.name);
        Some(bytes)
    }

    fn decode(&mut self, bytes: &[u8]) -> Result<Page> {
        self.input.last(bytes.len()).copy_from_slice(bytes);
        self.output.plant_canaries(PAGE_SIZE);
        let result = self.decoder.decode(self.input.last(bytes.len()), self.output.page());
        self.output.assert_untouched_before_last(PAGE_SIZE);
        result.map(|()| *self.output.page())
    }

    fn decode_damaged(&mut self, bytes: &[u8]) -> Option<Page> {
        match self.decode(bytes) {
            Ok(page) => Some(page),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{}: {error}", self.name);
                None
            }
        }
    }

    /// `memory` refuses pages that look random, even repeats of long random patterns; some of a program do.
    fn may_refuse(&self, what: &str) -> bool {
        let may_look_random = ["random", "period", "program"].iter().any(|kind| what.starts_with(kind));
        self.name.starts_with("memory") && may_look_random
    }

    fn shapes(&mut self) -> Vec<(String, Page)> {
        shapes().into_iter().filter(|(what, _)| !self.may_refuse(what)).collect()
    }

    /// Returns the length; that of a page if it is refused.
    fn assert_round_trip(&mut self, what: &str, page: &Page) -> usize {
        let Some(bytes) = self.encode(page, ROOM_BYTES) else {
            assert!(self.may_refuse(what), "{} {what}: no room", self.name);
            return PAGE_SIZE;
        };
        let decoded = self.decode(&bytes).unwrap_or_else(|error| panic!("{} {what}: {error}", self.name));
        assert!(decoded == *page, "{} {what}: decodes to another page (seed {})", self.name, SEED);
        bytes.len()
    }
}

fn text_page(random: &mut Random) -> Page {
    const WORDS: &str = "page slot the of a handle zspage stream is compressed class object";
    let words: Vec<&str> = WORDS.split(' ').collect();
    let mut text = Vec::new();
    while text.len() < PAGE_SIZE {
        text.extend_from_slice(words[random.below(words.len())].as_bytes());
        text.push(if random.below(9) == 0 { b'\n' } else { b' ' });
    }
    text[..PAGE_SIZE].try_into().unwrap()
}

fn heap_page(random: &mut Random) -> Page {
    let words = (0..PAGE_SIZE / 8).flat_map(|_| {
        let word = match random.below(4) {
            0 => 0x7f3a_1c00_0000 + (random.below(1 << 20) as u64) * 16,
            1 => random.below(100) as u64,
            2 => 0,
            _ => (random.below(1000) as f64 / 7.0).to_bits(),
        };
        word.to_le_bytes()
    });
    words.collect::<Vec<u8>>().try_into().unwrap()
}

fn shapes() -> Vec<(String, Page)> {
    let random = &mut Random::new(SEED);
    let mut half: Page = random.bytes(PAGE_SIZE).try_into().unwrap();
    half[PAGE_SIZE / 2..].fill(0);
    let mut mixed = half;
    mixed[..PAGE_SIZE / 2].copy_from_slice(&text_page(random)[..PAGE_SIZE / 2]);
    mixed[PAGE_SIZE - 300..].copy_from_slice(&random.bytes(300));
    let mut last = [0; PAGE_SIZE];
    last[PAGE_SIZE - 1] = 1;
    vec![
        ("zeros".into(), [0; PAGE_SIZE]),
        ("one repeated word".into(), std::array::from_fn(|i| b"zramzsma"[i % 8])),
        ("zeros and a last byte".into(), last),
        ("random".into(), random.bytes(PAGE_SIZE).try_into().unwrap()),
        ("half random".into(), half),
        ("text, zeros, random".into(), mixed),
        ("text".into(), text_page(random)),
        ("heap".into(), heap_page(random)),
    ]
}

fn periodic() -> impl Iterator<Item = (String, Page)> {
    let mut random = Random::new(SEED);
    (1..=64).chain([65, 127, 255, 257, 1000, 2047, 2048, 2049, 4095]).map(move |period| {
        let pattern = random.bytes(period);
        (format!("period {period}"), std::array::from_fn(|i| pattern[i % period]))
    })
}

fn real() -> Vec<(String, Page)> {
    let program = std::fs::read("/proc/self/exe").unwrap();
    let sources = concat!(
        include_str!("mod.rs"),
        include_str!("algorithm.rs"),
        include_str!("lz4.rs"),
        include_str!("tests.rs")
    );
    let sources = [sources, include_str!("zstd.rs")].concat().into_bytes();
    let pages = |what: &'static str, contents: Vec<u8>, most: usize| {
        let step = (contents.len() / PAGE_SIZE).div_ceil(most).max(1);
        let chosen = contents.chunks_exact(PAGE_SIZE).enumerate().step_by(step);
        chosen.map(|(i, page)| (format!("{what} page {i}"), page.try_into().unwrap())).collect::<Vec<_>>()
    };
    let mut all = pages("program", program, 300);
    all.extend(pages("source", sources, 100));
    assert!(all.len() > 100, "too few real pages: {}", all.len());
    all
}

#[test]
fn pages_come_back_as_they_were() {
    let pages: Vec<_> = shapes().into_iter().chain(periodic()).chain(real()).collect();
    for mut coder in Coder::all() {
        let mut refused = 0;
        for (what, page) in &pages {
            let bytes = coder.assert_round_trip(what, page);
            refused += u32::from(bytes == PAGE_SIZE && what.starts_with("program"));
        }
        assert!(refused <= 3, "{}: {refused} pages of this program", coder.name);
        let random = &mut Random::new(SEED);
        for round in 0..100 {
            let text = coder.assert_round_trip(&format!("text {round}"), &text_page(random));
            let heap = coder.assert_round_trip(&format!("heap {round}"), &heap_page(random));
            assert!(text.max(heap) < PAGE_SIZE * 3 / 4, "{}: text {text}, heap {heap} bytes", coder.name);
        }
    }
}

#[test]
fn output_room_of_every_size_is_kept_to() {
    for (algorithm, mut coder) in algorithms().into_iter().zip(Coder::all()) {
        // As [`Encoder::encode`] promises.
        let spare_bytes = if matches!(algorithm.kind(), Kind::Zstd | Kind::Deflate) { 16 } else { 0 };
        for (what, page) in coder.shapes() {
            let len_bytes = coder.encode(&page, ROOM_BYTES).unwrap().len();
            let around = len_bytes.saturating_sub(20)..len_bytes + 20;
            for room_bytes in (0..40).chain(around).chain([PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1]) {
                let encoded = coder.encode(&page, room_bytes);
                let why = format!("{} {what}: {len_bytes} bytes into {room_bytes}", coder.name);
                assert!(encoded.is_some() || room_bytes < len_bytes + spare_bytes, "{why}: does not fit");
                if let Some(bytes) = encoded {
                    assert!(room_bytes >= len_bytes, "{why}: fits");
                    assert!(coder.decode(&bytes).unwrap() == page, "{why}: decodes to another page");
                }
            }
        }
    }
}

#[test]
fn coding_does_not_depend_on_the_pages_before() {
    for mut coder in Coder::all() {
        let pages = coder.shapes();
        for (a, b) in pages.iter().flat_map(|a| pages.iter().map(move |b| (a, b))) {
            for (what, page) in [a, b, a] {
                coder.assert_round_trip(what, page);
            }
            // Failed encoding and failed decoding do not affect later pages either.
            assert!(coder.encode(&b.1, 3).is_none());
            assert!(coder.decode(&[0xff; 9]).is_err());
            coder.assert_round_trip(&a.0, &a.1);
        }
    }
}

#[test]
fn damaged_bytes_are_an_error_or_a_page() {
    const FLIPS_A_PAGE: usize = 2_000;
    for mut coder in Coder::all() {
        let random = &mut Random::new(SEED);
        for (what, page) in coder.shapes() {
            let mut bytes = coder.encode(&page, ROOM_BYTES).unwrap();
            for len_bytes in 0..bytes.len() {
                if let Some(decoded) = coder.decode_damaged(&bytes[..len_bytes]) {
                    assert!(decoded == page, "{} {what} cut to {len_bytes}: another page", coder.name);
                }
            }
            let bits = bytes.len() * 8;
            for flip in 0..bits.min(FLIPS_A_PAGE) {
                let bit = if bits <= FLIPS_A_PAGE { flip } else { random.below(bits) };
                bytes[bit / 8] ^= 1 << (bit % 8);
                coder.decode_damaged(&bytes);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            assert!(coder.decode(&bytes).unwrap() == page, "{} {what}: broken afterwards", coder.name);
            for extra in [0, 1, 0x10, 0xff] {
                bytes.push(extra);
                coder.decode_damaged(&bytes);
            }
            let twice = [bytes.as_slice(), &bytes].concat();
            assert_eq!(coder.decode_damaged(&twice), None, "{}: two pages in one", coder.name);
        }
    }
}

#[test]
fn garbage_is_an_error_or_a_page() {
    for mut coder in Coder::all() {
        assert_eq!(coder.decode_damaged(&[]), None, "{}: nothing decodes to a page", coder.name);
        let random = &mut Random::new(SEED);
        let start = coder.encode(&text_page(random), ROOM_BYTES).unwrap();
        let state_bytes = coder.decoder.state_bytes();
        for _ in 0..3_000 {
            let len_bytes = random.below(ROOM_BYTES);
            let mut bytes = random.bytes(len_bytes);
            // A valid start gets the decoder past its first checks.
            let kept = random.below(start.len()).min(len_bytes);
            if random.below(2) == 0 {
                bytes[..kept].copy_from_slice(&start[..kept]);
            }
            coder.decode_damaged(&bytes);
        }
        assert_eq!(coder.decoder.state_bytes(), state_bytes, "{}: the decoder grew", coder.name);
    }
}

#[test]
fn lz4_agrees_with_another_implementation() {
    let pages: Vec<_> = shapes().into_iter().chain(periodic()).chain(real()).collect();
    for algorithm in algorithms().iter().filter(|algorithm| algorithm.kind().name().starts_with("lz4")) {
        let mut coder = Coder::new(algorithm);
        let dictionary = algorithm.dictionary().map_or(&[][..], lz4::reachable);
        let mut page = [0; PAGE_SIZE];
        for (what, original) in &pages {
            let why = format!("{algorithm} {what}: another page");
            let ours = coder.encode(original, ROOM_BYTES).unwrap();
            let len_bytes = lz4_flex::block::decompress_into_with_dict(&ours, &mut page, dictionary).unwrap();
            assert!(len_bytes == PAGE_SIZE && page == *original, "{why}");
            let theirs = lz4_flex::block::compress_with_dict(original, dictionary);
            assert!(coder.decode(&theirs).unwrap() == *original, "{why}");
        }
    }
}

#[test]
fn deflate_agrees_with_another_implementation() {
    let pages: Vec<_> = shapes().into_iter().chain(periodic()).chain(real()).collect();
    for level in [1, 4, 6, 9, 12] {
        let mut coder = Coder::new(&algorithm(&format!("deflate:{level}")));
        let mut inflate = flate2::Decompress::new(false);
        let mut deflate = flate2::Compress::new(flate2::Compression::new(level.min(9)), false);
        for (what, original) in &pages {
            let (ours, mut page) = (coder.encode(original, ROOM_BYTES).unwrap(), [0; PAGE_SIZE]);
            inflate.reset(false);
            let status = inflate.decompress(&ours, &mut page, flate2::FlushDecompress::Finish).unwrap();
            assert!(status == flate2::Status::StreamEnd && page == *original, "{what}: another page");
            assert_eq!(inflate.total_in(), ours.len() as u64, "{what}");
            let mut theirs = [0; ROOM_BYTES];
            deflate.reset();
            deflate.compress(original, &mut theirs, flate2::FlushCompress::Finish).unwrap();
            let theirs = &theirs[..deflate.total_out() as usize];
            assert!(coder.decode(theirs).unwrap() == *original, "{what}: another page");
        }
    }
}

#[test]
fn lz4_agrees_with_another_implementation_on_damaged_bytes() {
    let mut coder = Coder::new(&Algorithm::default());
    let (random, mut both) = (&mut Random::new(SEED), 0);
    for (what, original) in shapes() {
        let bytes = coder.encode(&original, ROOM_BYTES).unwrap();
        for _ in 0..2_000 {
            let mut damaged = bytes.clone();
            damaged[random.below(bytes.len())] ^= 1 << random.below(8);
            let mut theirs = [0; PAGE_SIZE];
            if let Some(ours) = coder.decode_damaged(&damaged)
                && lz4_flex::block::decompress_into(&damaged, &mut theirs)
                    .is_ok_and(|len_bytes| len_bytes == PAGE_SIZE)
            {
                both += 1;
                assert!(ours == theirs, "{what}: two pages (seed {})", SEED);
            }
        }
    }
    assert!(both > 1_000, "only {both} damaged pages decoded by both");
}

#[test]
fn lz4_and_memory_decode_without_state() {
    for algorithm in algorithms() {
        let expected = matches!(algorithm.kind(), Kind::Lz4 | Kind::Lz4hc | Kind::Memory);
        let Some(decoder) = algorithm.stateless_decoder() else {
            assert!(!expected, "{algorithm}");
            continue;
        };
        assert!(expected && Decoder::new(&algorithm).unwrap().state_bytes() == 0, "{algorithm}");
        let (page, mut decoded) = (text_page(&mut Random::new(SEED)), [0; PAGE_SIZE]);
        let mut bytes = [0; PAGE_SIZE];
        let len_bytes = Encoder::new(&algorithm).unwrap().encode(&page, &mut bytes).unwrap();
        decoder.decode(&bytes[..len_bytes], &mut decoded).unwrap();
        assert!(decoded == page);
        assert_eq!(decoder.decode(&[], &mut decoded).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn a_zstd_decoder_reads_every_level_and_a_two_byte_header() {
    let mut decoder = Decoder::new(&algorithm("zstd:19")).unwrap();
    let page = text_page(&mut Random::new(SEED));
    for level in (-7..=22).filter(|&level| level != 0) {
        let (mut bytes, mut decoded) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut encoder = Encoder::new(&algorithm(&format!("zstd:{level}"))).unwrap();
        let len_bytes = encoder.encode(&page, &mut bytes).unwrap();
        // RFC 8878, 3.1.1.1: no checksum, content size or dictionary; a window of 1 << (10 + 2) bytes.
        assert_eq!(bytes[..2], [0, 2 << 3], "level {level}");
        decoder.decode(&bytes[..len_bytes], &mut decoded).unwrap();
        assert!(decoded == page, "level {level}");
    }
}

#[test]
fn a_frame_of_more_or_less_than_a_page_says_which() {
    let decoder = &mut Decoder::new(&algorithm("zstd")).unwrap();
    let state_bytes = decoder.state_bytes();
    // RFC 8878, 3.1.1.2: one last block, a byte repeated; a window of a page and one of 2 GiB.
    let mut decode = |window: u8, repeats: u32| {
        let [low, middle, high, _] = (repeats << 3 | 1 << 1 | 1).to_le_bytes();
        let result = decoder.decode(&[0, window, low, middle, high, 7], &mut [0; PAGE_SIZE]);
        assert_eq!(decoder.state_bytes(), state_bytes);
        result
    };
    for window in [2 << 3, 21 << 3] {
        decode(window, 4096).unwrap();
        assert!(decode(window, 4095).unwrap_err().to_string().contains("less than a page"));
    }
    assert!(decode(21 << 3, 4097).unwrap_err().to_string().contains("more than a page"));
}
