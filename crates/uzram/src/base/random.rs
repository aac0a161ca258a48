//! Seeded random numbers for tests, benchmarks and injected faults: a failure prints its seed, and the seed
//! replays it.

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Returns the next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`, which is more than 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.below_u64(bound as u64) as usize
    }

    /// Returns a number below `bound`, which is more than 0.
    pub fn below_u64(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> u64::BITS) as u64
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
