//! The operations on eight lanes that the coder is made of, and their portable form.
//!
//! A lane is a word (64 bits), a half (32 bits), a short (16 bits) or a byte. A mask has a bit for each lane,
//! lane 0 in bit 0. To *pack* is to move the lanes of a mask together, in order; to *spread* is the reverse,
//! with zeros in the other lanes.
//!
//! Every implementation returns the same: what is coded does not depend on the CPU. A value of an
//! implementation's type exists only on CPUs that have its instructions.

/// A mask of eight lanes; its upper 24 bits are zero.
pub(super) type Mask = u32;

/// Multipliers of the hashes: odd, without a pattern; those of xxHash32 and Knuth's golden ratio.
pub(super) const MULTIPLIERS: [u32; 4] = [0x9e37_79b1, 0x85eb_ca6b, 0xc2b2_ae35, 0x27d4_eb2f];
/// A hash is the upper bits of a 32-bit product.
pub(super) const HASH_SHIFT: u32 = 32 - 9;

/// Eight lanes of each width. All packing and spreading functions may write, or read, all eight lanes.
pub(super) trait Lanes: Copy {
    type Words: Copy;
    type Halves: Copy;
    type Shorts: Copy;

    fn words(self, from: &[u64; 8]) -> Self::Words;
    fn store_words(self, words: Self::Words, to: &mut [u64; 8]);
    fn halves(self, from: &[u32; 8]) -> Self::Halves;
    fn store_halves(self, halves: Self::Halves, to: &mut [u32; 8]);
    fn store_shorts(self, shorts: Self::Shorts, to: &mut [u16; 8]);

    /// Returns the lanes that are not zero.
    fn nonzero_words(self, words: Self::Words) -> Mask;
    fn nonzero_halves(self, halves: Self::Halves) -> Mask;
    /// Returns the lanes whose upper 48 bits are zero.
    fn short_words(self, words: Self::Words) -> Mask;
    /// Returns the lanes whose upper 16 bits are zero.
    fn short_halves(self, halves: Self::Halves) -> Mask;
    fn xor_words(self, a: Self::Words, b: Self::Words) -> Self::Words;
    fn xor_halves(self, a: Self::Halves, b: Self::Halves) -> Self::Halves;
    /// Returns `b` in the lanes of `mask`, `a` in the others.
    fn choose_words(self, mask: Mask, a: Self::Words, b: Self::Words) -> Self::Words;
    fn choose_halves(self, mask: Mask, a: Self::Halves, b: Self::Halves) -> Self::Halves;

    /// Hashes each word, and each word's upper 48 bits, to 9 bits: to elements 2 * i and 2 * i + 1.
    fn hash_words(self, words: Self::Words, to: &mut [u32; 16]);
    /// Hashes each half, and each half's upper 16 bits.
    fn hash_halves(self, halves: Self::Halves, whole: &mut [u32; 8], upper: &mut [u32; 8]);
    /// Returns, for lane `i`, `first + i - 1 - positions[i]` as a byte, and the lanes where it is from 0 to
    /// 255.
    fn distances(self, first: usize, positions: &[u16; 8]) -> (u64, Mask);

    /// Packs words to `to`; `to` has room for all eight.
    fn pack_words(self, words: Self::Words, mask: Mask, to: &mut [u64; 8]);
    fn pack_halves(self, halves: Self::Halves, mask: Mask, to: &mut [u32; 8]);
    /// Packs the low 16 bits of words.
    fn pack_shorts_of_words(self, words: Self::Words, mask: Mask, to: &mut [u16; 8]);
    /// Packs the low 16 bits of halves.
    fn pack_shorts_of_halves(self, halves: Self::Halves, mask: Mask, to: &mut [u16; 8]);
    fn pack_bytes(self, bytes: u64, mask: Mask) -> u64;
    /// Returns the lanes where both have the same byte.
    fn equal_bytes(self, a: u64, b: u64) -> Mask;
    /// Returns `b` in the lanes of `mask`, `a` in the others.
    fn choose_bytes(self, mask: Mask, a: u64, b: u64) -> u64;
    /// Spreads the low bits of `bits` to the bits of `mask`.
    fn spread_bits(self, bits: Mask, mask: Mask) -> Mask;

    fn spread_words(self, from: &[u64; 8], mask: Mask) -> Self::Words;
    fn spread_halves(self, from: &[u32; 8], mask: Mask) -> Self::Halves;
    fn spread_bytes(self, from: &[u8; 8], mask: Mask) -> u64;
    /// Spreads shorts and widens them to words.
    fn spread_shorts_to_words(self, from: &[u8; 16], mask: Mask) -> Self::Words;
    /// Spreads shorts and widens them to halves.
    fn spread_shorts_to_halves(self, from: &[u8; 16], mask: Mask) -> Self::Halves;
    /// Returns in each lane the byte of the last lane of `mask` up to this one: `from[1]` is that of the
    /// first, and `from[0]` stands for the lanes before it.
    fn last_bytes(self, from: &[u8; 16], mask: Mask) -> u64;
    /// Returns, in each lane `i` of `mask`, `first + i - 1 - distances[i]`, at least 0; in the others, 0.
    /// `first` is at least 1.
    fn slots(self, first: usize, distances: u64, mask: Mask) -> Self::Shorts;
}

/// Implements [`Lanes`] by functions that are always inlined, so that vectors stay in registers.
macro_rules! lanes {
    (
        impl Lanes for $of:ty {
            $(type $kind:ident = $type:ty;)*
            $(fn $name:ident $args:tt $(-> $result:ty)? $body:block)*
        }
    ) => {
        impl Lanes for $of {
            $(type $kind = $type;)*
            $(
                #[inline(always)]
                fn $name $args $(-> $result)? $body
            )*
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use lanes;

/// For every CPU.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn mask(is: impl Fn(usize) -> bool) -> Mask {
    (0..8).fold(0, |mask, lane| mask | Mask::from(is(lane)) << lane)
}

#[inline(always)]
fn pack<T: Copy>(from: impl Fn(usize) -> T, mask: Mask, to: &mut [T; 8]) {
    let mut at = 0;
    for lane in 0..8 {
        to[at & 7] = from(lane);
        at += (mask >> lane & 1) as usize;
    }
}

#[inline(always)]
fn spread<T: Copy + Default, F: Copy>(
    from: impl Fn(usize) -> F,
    mask: Mask,
    widen: impl Fn(F) -> T,
) -> [T; 8] {
    let (mut at, mut to) = (0, [T::default(); 8]);
    for (lane, to) in to.iter_mut().enumerate() {
        let is = mask >> lane & 1;
        if is != 0 {
            *to = widen(from(at));
        }
        at += is as usize;
    }
    to
}

#[inline(always)]
fn short(from: &[u8; 16], at: usize) -> u16 {
    u16::from_le_bytes([from[(2 * at) & 15], from[(2 * at + 1) & 15]])
}

lanes! { impl Lanes for Portable {
    type Words = [u64; 8];
    type Halves = [u32; 8];
    type Shorts = [u16; 8];

    fn words(self, from: &[u64; 8]) -> [u64; 8] {
        *from
    }
    fn store_words(self, words: [u64; 8], to: &mut [u64; 8]) {
        *to = words;
    }
    fn halves(self, from: &[u32; 8]) -> [u32; 8] {
        *from
    }
    fn store_halves(self, halves: [u32; 8], to: &mut [u32; 8]) {
        *to = halves;
    }
    fn store_shorts(self, shorts: [u16; 8], to: &mut [u16; 8]) {
        *to = shorts;
    }

    fn nonzero_words(self, words: [u64; 8]) -> Mask {
        mask(|i| words[i] != 0)
    }
    fn nonzero_halves(self, halves: [u32; 8]) -> Mask {
        mask(|i| halves[i] != 0)
    }
    fn short_words(self, words: [u64; 8]) -> Mask {
        mask(|i| words[i] >> 16 == 0)
    }
    fn short_halves(self, halves: [u32; 8]) -> Mask {
        mask(|i| halves[i] >> 16 == 0)
    }
    fn xor_words(self, a: [u64; 8], b: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }
    fn xor_halves(self, a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }
    fn choose_words(self, mask: Mask, a: [u64; 8], b: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|i| if mask >> i & 1 == 1 { b[i] } else { a[i] })
    }
    fn choose_halves(self, mask: Mask, a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        std::array::from_fn(|i| if mask >> i & 1 == 1 { b[i] } else { a[i] })
    }

    fn hash_words(self, words: [u64; 8], to: &mut [u32; 16]) {
        for (word, to) in words.iter().zip(to.as_chunks_mut::<2>().0) {
            let upper = word >> 16;
            let upper = (upper as u32)
                .wrapping_mul(MULTIPLIERS[0])
                .wrapping_add(((upper >> 32) as u32).wrapping_mul(MULTIPLIERS[1]));
            let whole = upper.wrapping_add((*word as u32).wrapping_mul(MULTIPLIERS[2]));
            *to = [whole >> HASH_SHIFT, upper >> HASH_SHIFT];
        }
    }
    fn hash_halves(self, halves: [u32; 8], whole: &mut [u32; 8], upper: &mut [u32; 8]) {
        *whole = halves.map(|half| half.wrapping_mul(MULTIPLIERS[0]) >> HASH_SHIFT);
        *upper = halves.map(|half| (half >> 16).wrapping_mul(MULTIPLIERS[0]) >> HASH_SHIFT);
    }
    fn distances(self, first: usize, positions: &[u16; 8]) -> (u64, Mask) {
        let distances: [u16; 8] =
            std::array::from_fn(|i| (first as u16 + i as u16).wrapping_sub(1).wrapping_sub(positions[i]));
        (u64::from_le_bytes(distances.map(|distance| distance as u8)), mask(|i| distances[i] < 256))
    }

    fn pack_words(self, words: [u64; 8], mask: Mask, to: &mut [u64; 8]) {
        pack(|i| words[i], mask, to);
    }
    fn pack_halves(self, halves: [u32; 8], mask: Mask, to: &mut [u32; 8]) {
        pack(|i| halves[i], mask, to);
    }
    fn pack_shorts_of_words(self, words: [u64; 8], mask: Mask, to: &mut [u16; 8]) {
        pack(|i| words[i] as u16, mask, to);
    }
    fn pack_shorts_of_halves(self, halves: [u32; 8], mask: Mask, to: &mut [u16; 8]) {
        pack(|i| halves[i] as u16, mask, to);
    }
    fn pack_bytes(self, bytes: u64, mask: Mask) -> u64 {
        let (from, mut to) = (bytes.to_le_bytes(), [0; 8]);
        pack(|i| from[i], mask, &mut to);
        u64::from_le_bytes(to)
    }
    fn equal_bytes(self, a: u64, b: u64) -> Mask {
        let differ = (a ^ b).to_le_bytes();
        mask(|i| differ[i] == 0)
    }
    fn choose_bytes(self, mask: Mask, a: u64, b: u64) -> u64 {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        u64::from_le_bytes(std::array::from_fn(|i| if mask >> i & 1 == 1 { b[i] } else { a[i] }))
    }
    fn spread_bits(self, bits: Mask, mask: Mask) -> Mask {
        let bits = spread(|at| bits >> at & 1, mask, |bit| bit);
        (0..8).fold(0, |mask, lane| mask | bits[lane] << lane)
    }

    fn spread_words(self, from: &[u64; 8], mask: Mask) -> [u64; 8] {
        spread(|at| from[at & 7], mask, |word| word)
    }
    fn spread_halves(self, from: &[u32; 8], mask: Mask) -> [u32; 8] {
        spread(|at| from[at & 7], mask, |half| half)
    }
    fn spread_bytes(self, from: &[u8; 8], mask: Mask) -> u64 {
        u64::from_le_bytes(spread(|at| from[at & 7], mask, |byte| byte))
    }
    fn spread_shorts_to_words(self, from: &[u8; 16], mask: Mask) -> [u64; 8] {
        spread(|at| short(from, at), mask, u64::from)
    }
    fn spread_shorts_to_halves(self, from: &[u8; 16], mask: Mask) -> [u32; 8] {
        spread(|at| short(from, at), mask, u32::from)
    }
    fn last_bytes(self, from: &[u8; 16], mask: Mask) -> u64 {
        let mut at = 0;
        u64::from_le_bytes(std::array::from_fn(|lane| {
            at += (mask >> lane & 1) as usize;
            from[at & 15]
        }))
    }
    fn slots(self, first: usize, distances: u64, mask: Mask) -> [u16; 8] {
        let distances = distances.to_le_bytes();
        std::array::from_fn(|i| {
            let slot = (first as u16 + i as u16 - 1).saturating_sub(distances[i].into());
            if mask >> i & 1 == 1 { slot } else { 0 }
        })
    }
} }
