//! The lanes in AVX2, with BMI2 for bytes and shorts.

use std::arch::x86_64::*;

use super::lanes::{HASH_SHIFT, Lanes, MULTIPLIERS, Mask, lanes};

/// Proves that the CPU has AVX2, BMI1, BMI2 and POPCNT.
#[derive(Clone, Copy)]
pub(in crate::codec) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has these instructions.
    pub(super) const unsafe fn new() -> Self {
        Avx2(())
    }
}

/// For each mask of four words, as indices of halves: the words of the mask, packed.
static PACK: [[u32; 8]; 16] = packing(false);
/// For each mask of four words, as indices of halves: where each word of the mask is when they are packed.
static SPREAD: [[u32; 8]; 16] = packing(true);
/// For each mask of four words: all bits of the words of the mask.
static KEEP: [[u64; 4]; 16] = {
    let (mut keep, mut mask) = ([[0; 4]; 16], 0);
    while mask < 64 {
        if (mask / 4) >> (mask % 4) & 1 == 1 {
            keep[mask / 4][mask % 4] = u64::MAX;
        }
        mask += 1;
    }
    keep
};

const fn packing(reverse: bool) -> [[u32; 8]; 16] {
    let (mut table, mut mask) = ([[0; 8]; 16], 0);
    while mask < 16 {
        let (mut lane, mut at) = (0, 0);
        while lane < 4 {
            if mask >> lane & 1 == 1 {
                let (from, to) = if reverse { (at, lane) } else { (lane, at) };
                table[mask][2 * to] = 2 * from as u32;
                table[mask][2 * to + 1] = 2 * from as u32 + 1;
                at += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
}

const LANES: u64 = 0x0706_0504_0302_0100;
const ONES: u64 = 0x0101_0101_0101_0101;

#[target_feature(enable = "bmi2")]
#[inline]
fn byte_mask(mask: Mask) -> u64 {
    _pdep_u64(mask.into(), ONES) * 255
}

/// Returns all bits of the shorts of `mask`, which has four lanes.
#[target_feature(enable = "bmi2")]
#[inline]
fn short_mask(mask: Mask) -> u64 {
    _pdep_u64(mask.into(), 0x0001_0001_0001_0001) * 0xffff
}

#[target_feature(enable = "avx2")]
#[inline]
fn half_mask(mask: Mask) -> __m256i {
    let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask.cast_signed()), bits), bits)
}

#[target_feature(enable = "avx2")]
#[inline]
fn load<T>(from: &[T; 4]) -> __m256i {
    const { assert!(size_of::<T>() == 8) }
    // SAFETY: 32 bytes, read at any alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_halves(from: &[u32; 8]) -> __m256i {
    // SAFETY: 32 bytes, read at any alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store_four(words: __m256i, to: &mut [u64; 4]) {
    // SAFETY: 32 bytes, written at any alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), words) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_16(from: &[u8; 16]) -> __m128i {
    // SAFETY: 16 bytes, read at any alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn word_bits(four: __m256i) -> Mask {
    _mm256_movemask_pd(_mm256_castsi256_pd(four)).cast_unsigned()
}

#[target_feature(enable = "avx2")]
#[inline]
fn zero_words(words: [__m256i; 2]) -> Mask {
    let zero = _mm256_setzero_si256();
    word_bits(_mm256_cmpeq_epi64(words[0], zero)) | word_bits(_mm256_cmpeq_epi64(words[1], zero)) << 4
}

#[target_feature(enable = "avx2")]
#[inline]
fn zero_halves(halves: __m256i) -> Mask {
    let zero = _mm256_cmpeq_epi32(halves, _mm256_setzero_si256());
    _mm256_movemask_ps(_mm256_castsi256_ps(zero)).cast_unsigned()
}

#[target_feature(enable = "avx2")]
#[inline]
fn hash_four(words: __m256i) -> __m256i {
    let [a, b, c, _] = MULTIPLIERS.map(i64::from);
    let products = _mm256_mullo_epi32(_mm256_srli_epi64::<16>(words), _mm256_set1_epi64x(b << 32 | a));
    let upper = _mm256_add_epi32(products, _mm256_srli_epi64::<32>(products));
    let whole = _mm256_add_epi32(upper, _mm256_mullo_epi32(words, _mm256_set1_epi64x(c)));
    let both = _mm256_blend_epi32::<0xaa>(whole, _mm256_slli_epi64::<32>(upper));
    _mm256_srli_epi32::<{ HASH_SHIFT as i32 }>(both)
}

#[target_feature(enable = "bmi2,popcnt")]
#[inline]
fn pack_shorts(shorts: [i64; 2], mask: Mask, to: &mut [u16; 8]) {
    let low = _pext_u64(shorts[0].cast_unsigned(), short_mask(mask & 15));
    let high = _pext_u64(shorts[1].cast_unsigned(), short_mask(mask >> 4));
    let at = (mask & 15).count_ones() as usize;
    // SAFETY: `at` is at most 4: both are four of the eight shorts, written at any alignment.
    unsafe {
        to.as_mut_ptr().cast::<u64>().write_unaligned(low);
        to.as_mut_ptr().add(at).cast::<u64>().write_unaligned(high);
    }
}

#[target_feature(enable = "bmi2,popcnt")]
#[inline]
fn spread_shorts(from: &[u8; 16], mask: Mask) -> [i64; 2] {
    let at = 2 * (mask & 15).count_ones() as usize;
    // SAFETY: `at` is at most 8: both are eight of the 16 bytes, read at any alignment.
    let (low, high) = unsafe {
        (from.as_ptr().cast::<u64>().read_unaligned(), from.as_ptr().add(at).cast::<u64>().read_unaligned())
    };
    [_pdep_u64(low, short_mask(mask & 15)), _pdep_u64(high, short_mask(mask >> 4))].map(u64::cast_signed)
}

macro_rules! with {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { $($body)* }
    };
}

lanes! { impl Lanes for Avx2 {
    type Words = [__m256i; 2];
    type Halves = __m256i;
    type Shorts = __m128i;

    fn words(self, from: &[u64; 8]) -> Self::Words {
        let [low, high] = halved(from);
        with! { [load(low), load(high)] }
    }
    fn store_words(self, words: Self::Words, to: &mut [u64; 8]) {
        let ([low, high], _) = to.as_chunks_mut() else { unreachable!() };
        with! { store_four(words[0], low); store_four(words[1], high) }
    }
    fn halves(self, from: &[u32; 8]) -> __m256i {
        with! { load_halves(from) }
    }
    fn store_halves(self, halves: __m256i, to: &mut [u32; 8]) {
        with! { _mm256_storeu_si256(to.as_mut_ptr().cast(), halves) }
    }
    fn store_shorts(self, shorts: __m128i, to: &mut [u16; 8]) {
        with! { _mm_storeu_si128(to.as_mut_ptr().cast(), shorts) }
    }

    fn nonzero_words(self, words: Self::Words) -> Mask {
        with! { zero_words(words) ^ 255 }
    }
    fn nonzero_halves(self, halves: __m256i) -> Mask {
        with! { zero_halves(halves) ^ 255 }
    }
    fn short_words(self, words: Self::Words) -> Mask {
        with! { zero_words([_mm256_srli_epi64::<16>(words[0]), _mm256_srli_epi64::<16>(words[1])]) }
    }
    fn short_halves(self, halves: __m256i) -> Mask {
        with! { zero_halves(_mm256_srli_epi32::<16>(halves)) }
    }
    fn xor_words(self, a: Self::Words, b: Self::Words) -> Self::Words {
        with! { [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])] }
    }
    fn xor_halves(self, a: __m256i, b: __m256i) -> __m256i {
        with! { _mm256_xor_si256(a, b) }
    }
    fn choose_words(self, mask: Mask, a: Self::Words, b: Self::Words) -> Self::Words {
        let keep = [&KEEP[(mask & 15) as usize], &KEEP[(mask >> 4 & 15) as usize]];
        with! { [_mm256_blendv_epi8(a[0], b[0], load(keep[0])), _mm256_blendv_epi8(a[1], b[1], load(keep[1]))] }
    }
    fn choose_halves(self, mask: Mask, a: __m256i, b: __m256i) -> __m256i {
        with! { _mm256_blendv_epi8(a, b, half_mask(mask)) }
    }

    fn hash_words(self, words: Self::Words, to: &mut [u32; 16]) {
        with! {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), hash_four(words[0]));
            _mm256_storeu_si256(to.as_mut_ptr().add(8).cast(), hash_four(words[1]));
        }
    }
    fn hash_halves(self, halves: __m256i, whole: &mut [u32; 8], upper: &mut [u32; 8]) {
        with! {
            let multiplier = _mm256_set1_epi32(MULTIPLIERS[0].cast_signed());
            let hash = |halves| _mm256_srli_epi32::<{ HASH_SHIFT as i32 }>(_mm256_mullo_epi32(halves, multiplier));
            self.store_halves(hash(halves), whole);
            self.store_halves(hash(_mm256_srli_epi32::<16>(halves)), upper);
        }
    }
    fn distances(self, first: usize, positions: &[u16; 8]) -> (u64, Mask) {
        with! {
            let lanes = _mm_setr_epi16(-1, 0, 1, 2, 3, 4, 5, 6);
            let lanes = _mm_add_epi16(_mm_set1_epi16(first as i16), lanes);
            let distances = _mm_sub_epi16(lanes, _mm_loadu_si128(positions.as_ptr().cast()));
            let is_byte = _mm_cmpeq_epi16(_mm_srli_epi16::<8>(distances), _mm_setzero_si128());
            let bytes = _mm_packus_epi16(_mm_and_si128(distances, _mm_set1_epi16(255)), distances);
            let mask = _mm_movemask_epi8(_mm_packs_epi16(is_byte, _mm_setzero_si128()));
            (_mm_cvtsi128_si64(bytes).cast_unsigned(), mask.cast_unsigned())
        }
    }

    fn pack_words(self, words: Self::Words, mask: Mask, to: &mut [u64; 8]) {
        let (low, high) = ((mask & 15) as usize, (mask >> 4 & 15) as usize);
        let at = (mask & 15).count_ones() as usize;
        with! {
            let words = [
                _mm256_permutevar8x32_epi32(words[0], load_halves(&PACK[low])),
                _mm256_permutevar8x32_epi32(words[1], load_halves(&PACK[high])),
            ];
            // `at` is at most 4.
            _mm256_storeu_si256(to.as_mut_ptr().cast(), words[0]);
            _mm256_storeu_si256(to.as_mut_ptr().add(at).cast(), words[1]);
        }
    }
    fn pack_halves(self, halves: __m256i, mask: Mask, to: &mut [u32; 8]) {
        with! {
            let order = _pext_u64(LANES, byte_mask(mask)).cast_signed();
            let order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(order));
            self.store_halves(_mm256_permutevar8x32_epi32(halves, order), to);
        }
    }
    fn pack_shorts_of_words(self, words: Self::Words, mask: Mask, to: &mut [u16; 8]) {
        with! {
            // The low shorts of the two words of each 128-bit lane, in its first four bytes.
            let lows = _mm256_setr_epi8(
                0, 1, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, //
                0, 1, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
            );
            let [low, high] = words.map(|words| _mm256_shuffle_epi8(words, lows));
            let pairs = _mm256_unpacklo_epi32(low, high);
            let (pairs, others) = (_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
            let shorts = _mm_unpacklo_epi32(pairs, others);
            pack_shorts([_mm_cvtsi128_si64(shorts), _mm_extract_epi64::<1>(shorts)], mask, to);
        }
    }
    fn pack_shorts_of_halves(self, halves: __m256i, mask: Mask, to: &mut [u16; 8]) {
        with! {
            let lows = _mm256_and_si256(halves, _mm256_set1_epi32(0xffff));
            let lows = _mm256_packus_epi32(lows, lows);
            let (low, high) = (_mm256_castsi256_si128(lows), _mm256_extracti128_si256::<1>(lows));
            pack_shorts([_mm_cvtsi128_si64(low), _mm_cvtsi128_si64(high)], mask, to);
        }
    }
    fn pack_bytes(self, bytes: u64, mask: Mask) -> u64 {
        with! { _pext_u64(bytes, byte_mask(mask)) }
    }
    fn equal_bytes(self, a: u64, b: u64) -> Mask {
        with! {
            let (a, b) = (_mm_cvtsi64_si128(a.cast_signed()), _mm_cvtsi64_si128(b.cast_signed()));
            _mm_movemask_epi8(_mm_cmpeq_epi8(a, b)).cast_unsigned() & 255
        }
    }
    fn choose_bytes(self, mask: Mask, a: u64, b: u64) -> u64 {
        with! { a ^ (a ^ b) & byte_mask(mask) }
    }
    fn spread_bits(self, bits: Mask, mask: Mask) -> Mask {
        with! { _pdep_u32(bits, mask) }
    }

    fn spread_words(self, from: &[u64; 8], mask: Mask) -> Self::Words {
        let (low, high) = ((mask & 15) as usize, (mask >> 4 & 15) as usize);
        let at = (mask & 15).count_ones() as usize;
        with! {
            // `at` is at most 4.
            let words = [
                _mm256_loadu_si256(from.as_ptr().cast()),
                _mm256_loadu_si256(from.as_ptr().add(at).cast()),
            ];
            [
                _mm256_and_si256(_mm256_permutevar8x32_epi32(words[0], load_halves(&SPREAD[low])), load(&KEEP[low])),
                _mm256_and_si256(_mm256_permutevar8x32_epi32(words[1], load_halves(&SPREAD[high])), load(&KEEP[high])),
            ]
        }
    }
    fn spread_halves(self, from: &[u32; 8], mask: Mask) -> __m256i {
        with! {
            let order = _pdep_u64(LANES, byte_mask(mask)).cast_signed();
            let order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(order));
            _mm256_and_si256(_mm256_permutevar8x32_epi32(load_halves(from), order), half_mask(mask))
        }
    }
    fn spread_bytes(self, from: &[u8; 8], mask: Mask) -> u64 {
        with! { _pdep_u64(u64::from_le_bytes(*from), byte_mask(mask)) }
    }
    fn spread_shorts_to_words(self, from: &[u8; 16], mask: Mask) -> Self::Words {
        with! {
            spread_shorts(from, mask).map(|four| _mm256_cvtepu16_epi64(_mm_cvtsi64_si128(four)))
        }
    }
    fn spread_shorts_to_halves(self, from: &[u8; 16], mask: Mask) -> __m256i {
        with! {
            let [low, high] = spread_shorts(from, mask);
            _mm256_cvtepu16_epi32(_mm_set_epi64x(high, low))
        }
    }
    fn last_bytes(self, from: &[u8; 16], mask: Mask) -> u64 {
        with! {
            // The product sums up the bits to and including each lane.
            let order = _mm_cvtsi64_si128((_pdep_u64(mask.into(), ONES) .wrapping_mul(ONES)).cast_signed());
            _mm_cvtsi128_si64(_mm_shuffle_epi8(load_16(from), order)).cast_unsigned()
        }
    }
    fn slots(self, first: usize, distances: u64, mask: Mask) -> __m128i {
        with! {
            let lanes = _mm_add_epi16(_mm_set1_epi16(first as i16), _mm_setr_epi16(-1, 0, 1, 2, 3, 4, 5, 6));
            let distances = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(distances.cast_signed()));
            let bits = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
            let keep = _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(mask as i16), bits), bits);
            _mm_and_si128(_mm_subs_epu16(lanes, distances), keep)
        }
    }
} }

#[inline(always)]
fn halved<T>(all: &[T; 8]) -> [&[T; 4]; 2] {
    let ([low, high], _) = all.as_chunks() else { unreachable!() };
    [low, high]
}
