//! The lanes in AVX-512: as in AVX2, but for what masks, compresses and expands.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::lanes::{Lanes, Mask, lanes};

/// Proves that the CPU has AVX-512 F, BW, VL and VBMI2, and what [`Avx2`] needs.
#[derive(Clone, Copy)]
pub(in crate::codec) struct Avx512(Avx2);

impl Avx512 {
    /// # Safety
    /// The CPU has these instructions.
    pub(super) const unsafe fn new() -> Self {
        // SAFETY: the caller knows that the CPU has these too.
        Avx512(unsafe { Avx2::new() })
    }
}

macro_rules! with {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has these instructions; they read and write the arrays that they
        // are given, at any alignment.
        unsafe { $($body)* }
    };
}

/// Defines functions that return their vector as it is, in a register. An expansion of it then cannot be
/// merged with the load of it: straight from memory it is microcode on AMD.
macro_rules! in_register {
    ($($name:ident: $vector:ty, $class:ident;)*) => {
        $(
            #[target_feature(enable = "avx512f,avx512vl")]
            #[inline]
            fn $name(mut vector: $vector) -> $vector {
                // SAFETY: no instruction at all, and the compiler does not know that.
                unsafe {
                    asm!("/* {0} */", inout($class) vector, options(pure, nomem, nostack, preserves_flags));
                }
                vector
            }
        )*
    };
}

in_register! {
    words_in_register: __m512i, zmm_reg;
    halves_in_register: __m256i, ymm_reg;
    shorts_in_register: __m128i, xmm_reg;
}

lanes! { impl Lanes for Avx512 {
    type Words = __m512i;
    type Halves = __m256i;
    type Shorts = __m128i;

    fn words(self, from: &[u64; 8]) -> __m512i {
        with! { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
    fn store_words(self, words: __m512i, to: &mut [u64; 8]) {
        with! { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) }
    }
    fn halves(self, from: &[u32; 8]) -> __m256i {
        self.0.halves(from)
    }
    fn store_halves(self, halves: __m256i, to: &mut [u32; 8]) {
        self.0.store_halves(halves, to);
    }
    fn store_shorts(self, shorts: __m128i, to: &mut [u16; 8]) {
        self.0.store_shorts(shorts, to);
    }

    fn nonzero_words(self, words: __m512i) -> Mask {
        with! { _mm512_test_epi64_mask(words, words).into() }
    }
    fn nonzero_halves(self, halves: __m256i) -> Mask {
        with! { _mm256_test_epi32_mask(halves, halves).into() }
    }
    fn short_words(self, words: __m512i) -> Mask {
        with! { _mm512_testn_epi64_mask(words, _mm512_set1_epi64(!0xffff)).into() }
    }
    fn short_halves(self, halves: __m256i) -> Mask {
        with! { _mm256_testn_epi32_mask(halves, _mm256_set1_epi32(!0xffff)).into() }
    }
    fn xor_words(self, a: __m512i, b: __m512i) -> __m512i {
        with! { _mm512_xor_si512(a, b) }
    }
    fn xor_halves(self, a: __m256i, b: __m256i) -> __m256i {
        self.0.xor_halves(a, b)
    }
    fn choose_words(self, mask: Mask, a: __m512i, b: __m512i) -> __m512i {
        with! { _mm512_mask_blend_epi64(mask as u8, a, b) }
    }
    fn choose_halves(self, mask: Mask, a: __m256i, b: __m256i) -> __m256i {
        with! { _mm256_mask_blend_epi32(mask as u8, a, b) }
    }

    fn hash_words(self, words: __m512i, to: &mut [u32; 16]) {
        with! {
            self.0.hash_words([_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64::<1>(words)], to);
        }
    }
    fn hash_halves(self, halves: __m256i, whole: &mut [u32; 8], upper: &mut [u32; 8]) {
        self.0.hash_halves(halves, whole, upper);
    }
    fn distances(self, first: usize, positions: &[u16; 8]) -> (u64, Mask) {
        with! {
            let lanes = _mm_setr_epi16(-1, 0, 1, 2, 3, 4, 5, 6);
            let lanes = _mm_add_epi16(_mm_set1_epi16(first as i16), lanes);
            let distances = _mm_sub_epi16(lanes, _mm_loadu_si128(positions.as_ptr().cast()));
            let is_byte = _mm_testn_epi16_mask(distances, _mm_set1_epi16(!0xff));
            (_mm_cvtsi128_si64(_mm_cvtepi16_epi8(distances)).cast_unsigned(), is_byte.into())
        }
    }

    fn pack_words(self, words: __m512i, mask: Mask, to: &mut [u64; 8]) {
        with! { self.store_words(_mm512_maskz_compress_epi64(mask as u8, words), to) }
    }
    fn pack_halves(self, halves: __m256i, mask: Mask, to: &mut [u32; 8]) {
        with! { self.store_halves(_mm256_maskz_compress_epi32(mask as u8, halves), to) }
    }
    fn pack_shorts_of_words(self, words: __m512i, mask: Mask, to: &mut [u16; 8]) {
        with! { self.store_shorts(_mm_maskz_compress_epi16(mask as u8, _mm512_cvtepi64_epi16(words)), to) }
    }
    fn pack_shorts_of_halves(self, halves: __m256i, mask: Mask, to: &mut [u16; 8]) {
        with! { self.store_shorts(_mm_maskz_compress_epi16(mask as u8, _mm256_cvtepi32_epi16(halves)), to) }
    }
    fn pack_bytes(self, bytes: u64, mask: Mask) -> u64 {
        self.0.pack_bytes(bytes, mask)
    }
    fn equal_bytes(self, a: u64, b: u64) -> Mask {
        self.0.equal_bytes(a, b)
    }
    fn choose_bytes(self, mask: Mask, a: u64, b: u64) -> u64 {
        self.0.choose_bytes(mask, a, b)
    }
    fn spread_bits(self, bits: Mask, mask: Mask) -> Mask {
        self.0.spread_bits(bits, mask)
    }

    fn spread_words(self, from: &[u64; 8], mask: Mask) -> __m512i {
        with! { _mm512_maskz_expand_epi64(mask as u8, words_in_register(self.words(from))) }
    }
    fn spread_halves(self, from: &[u32; 8], mask: Mask) -> __m256i {
        with! { _mm256_maskz_expand_epi32(mask as u8, halves_in_register(self.halves(from))) }
    }
    fn spread_bytes(self, from: &[u8; 8], mask: Mask) -> u64 {
        self.0.spread_bytes(from, mask)
    }
    fn spread_shorts_to_words(self, from: &[u8; 16], mask: Mask) -> __m512i {
        with! {
            let shorts = shorts_in_register(_mm_loadu_si128(from.as_ptr().cast()));
            _mm512_cvtepu16_epi64(_mm_maskz_expand_epi16(mask as u8, shorts))
        }
    }
    fn spread_shorts_to_halves(self, from: &[u8; 16], mask: Mask) -> __m256i {
        with! {
            let shorts = shorts_in_register(_mm_loadu_si128(from.as_ptr().cast()));
            _mm256_cvtepu16_epi32(_mm_maskz_expand_epi16(mask as u8, shorts))
        }
    }
    fn last_bytes(self, from: &[u8; 16], mask: Mask) -> u64 {
        self.0.last_bytes(from, mask)
    }
    fn slots(self, first: usize, distances: u64, mask: Mask) -> __m128i {
        with! {
            let lanes = _mm_add_epi16(_mm_set1_epi16(first as i16), _mm_setr_epi16(-1, 0, 1, 2, 3, 4, 5, 6));
            let distances = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(distances.cast_signed()));
            _mm_maskz_subs_epu16(mask as u8, lanes, distances)
        }
    }
} }
