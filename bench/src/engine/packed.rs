//! A corpus in stored form: compressed pages, and raw ones where compression saves too little.

use uzram::Result;
use uzram::codec::{Algorithm, Encoder};
use uzram::units::PAGE_SIZE;

use crate::harness::corpus::Corpus;

/// Room for the worst result of any codec.
pub(super) const ENCODED_MAX_BYTES: usize = 2 * PAGE_SIZE;

/// The pages of a corpus, one after another.
pub struct Packed {
    bytes: Vec<u8>,
    /// Where each page starts, and where the last one ends.
    starts: Vec<usize>,
}

impl Packed {
    /// Compresses each page of a corpus. Pages that compress to `huge_threshold_bytes` or more stay raw.
    pub fn new(algorithm: &Algorithm, huge_threshold_bytes: usize, corpus: &Corpus) -> Result<Packed> {
        let mut encoder = Encoder::new(algorithm)?;
        let mut out = vec![0; ENCODED_MAX_BYTES];
        let mut bytes = Vec::new();
        let mut starts = vec![0];
        for page in corpus.pages() {
            match encoder.encode(page, &mut out) {
                Some(len) if len < huge_threshold_bytes => bytes.extend_from_slice(&out[..len]),
                _ => bytes.extend_from_slice(page),
            }
            starts.push(bytes.len());
        }
        Ok(Packed { bytes, starts })
    }

    /// Returns the mean size of a page in bytes.
    pub fn mean_bytes(&self) -> f64 {
        self.bytes.len() as f64 / (self.starts.len() - 1) as f64
    }

    /// Returns page `i`, modulo the number of pages; [`PAGE_SIZE`] bytes if the page is raw.
    #[inline]
    pub fn page(&self, i: usize) -> &[u8] {
        let i = i % (self.starts.len() - 1);
        &self.bytes[self.starts[i]..self.starts[i + 1]]
    }
}
