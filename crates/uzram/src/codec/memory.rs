//! The algorithm `memory`, for what programs keep in memory: w64 for pages of words, lz4 for all others.
//!
//! The first byte of a compressed page says which, at no cost: it is [`w64::FORMAT`], or the first of lz4's
//! block, which is never that (see [`Encoder::encode_lz4`]). The encoder looks at each page first, which
//! takes about a hundredth of lz4's time:
//!
//! - In a sample of its words it counts those whose upper 16 bits are zero: pointers, small numbers, zeros.
//!   Pages with many go to w64.
//! - Pages with almost none may be encrypted, or compressed already. Those are found by the frequencies of
//!   the sample's bytes, and not tried at all.
//!
//! The bounds were chosen on heaps of Python, Ruby, JVM, Node.js, redis and a compiler, and on sources,
//! shared objects and archives. For other programs the result was on average 0.5 %, and at most 2 %, above
//! what the better codec for each page gives, and one in 1500 compressible pages was not tried.

use super::{Dictionary, lz4, w64};
use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::base::units::Page;

pub(super) const LEVEL: i32 = 1;
/// That of lz4.
pub(super) const COMPRESSOR: lz4::Compressor = lz4::Compressor::Fast(lz4::DEFAULT_ACCELERATION);
/// Where w64 needs more, the sample has misled, and lz4 is tried.
const MOST_W64_BYTES: usize = 3072;

/// 64 of a page's 512 words: every other one of four times four cache lines. Lines in a row cost less than
/// the same number apart, which the CPU does not prefetch.
struct Sample([u64; 64]);

impl Sample {
    #[inline(always)]
    fn of(page: &Page) -> Sample {
        let (lines, _) = page.as_chunks::<64>();
        Sample(std::array::from_fn(|i| {
            let (line, word) = (i / 4, i % 4);
            w64::words_of(&lines[20 * (line / 4) + line % 4])[2 * word + line % 2]
        }))
    }

    #[inline(always)]
    fn count_below(&self, bound: u64) -> u32 {
        self.0.iter().map(|word| u32::from(*word < bound)).sum()
    }

    /// Returns whether bytes are as frequent as if they were random.
    ///
    /// 256 of them are looked at. Of random ones, 128 have their highest bit set, give or take 8 (a standard
    /// deviation), and 256 * (1 - (255 / 256)^256) = 162 are different, give or take 5. Five deviations are
    /// let pass, or three where few are different, as in data that is only partly compressed.
    #[inline(always)]
    fn looks_random(&self) -> bool {
        let words: [u64; 32] = std::array::from_fn(|i| self.0[2 * i + i / 4 % 2]);
        // In each byte of the sum, a count of up to 32.
        let highest: u64 = words.iter().map(|word| word >> 7 & 0x0101_0101_0101_0101).sum();
        let highest: u32 = highest.to_ne_bytes().into_iter().map(u32::from).sum();
        if !(88..=168).contains(&highest) {
            return false;
        }
        let mut seen = [0u8; 256];
        for byte in words.map(u64::to_ne_bytes).as_flattened() {
            seen[usize::from(*byte)] = 1;
        }
        let distinct: u32 = seen.into_iter().map(u32::from).sum();
        (147..=187).contains(&distinct)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Choice {
    W64,
    Lz4,
    /// None: it looks random.
    Neither,
}

impl Choice {
    #[inline(always)]
    fn of(page: &Page) -> Choice {
        let sample = Sample::of(page);
        let (low, zero) = (sample.count_below(1 << 48), sample.count_below(1));
        // If most of the low words are zeros, and the others text, lz4 is better.
        if low >= 28 && 4 * (low - zero) >= 64 - zero {
            Choice::W64
        } else if low <= 1 && sample.looks_random() {
            Choice::Neither
        } else {
            Choice::Lz4
        }
    }
}

pub(super) struct Encoder {
    w64: w64::Encoder,
    lz4: lz4::Encoder,
}

impl Encoder {
    pub(super) fn new(digest: Option<Arc<lz4::Digest>>) -> Result<Encoder> {
        let mut w64 = w64::Encoder::new(w64::Kernel::fastest())?;
        w64.encode(&super::warm_up_page(), &mut []);
        Ok(Encoder { w64, lz4: lz4::Encoder::new(COMPRESSOR, digest)? })
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match self.w64.kernel.call(
            #[inline(always)]
            || Choice::of(page),
        ) {
            Choice::W64 => {
                let room_bytes = out.len().min(MOST_W64_BYTES);
                let len_bytes = self.w64.encode(page, &mut out[..room_bytes]);
                if len_bytes.is_some() || room_bytes == out.len() {
                    len_bytes
                } else {
                    self.encode_lz4(page, out)
                }
            }
            Choice::Lz4 => self.encode_lz4(page, out),
            Choice::Neither => None,
        }
    }

    /// An LZ4 block begins with a token, and 0 stands for a repeat of 4 bytes without a literal before. At
    /// the start of a page only a dictionary can have those, and liblz4 looks for the first repeat behind the
    /// first byte: one that begins with the page has 5 bytes or more. If it ever were otherwise, the page
    /// would not be compressed.
    fn encode_lz4(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let len_bytes = self.lz4.encode(page, out)?;
        (!out.starts_with(&w64::FORMAT)).then_some(len_bytes)
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.w64.state_bytes() + self.lz4.state_bytes()
    }
}

pub(super) fn decode(
    kernel: w64::Kernel,
    bytes: &[u8],
    page: &mut Page,
    dictionary: Option<&Dictionary>,
) -> Result<()> {
    if bytes.starts_with(&w64::FORMAT) {
        w64::decode(kernel, bytes, page)
    } else {
        lz4::decode(bytes, page, dictionary)
    }
}
