//! A corpus as its pages are stored: compressed, and raw where that saves too little.

use uzram::Result;
use uzram::codec::{Algorithm, Encoder};
use uzram::units::PAGE_SIZE;

use crate::harness::corpus::Corpus;

/// Room for the worst any codec makes of a page.
pub(super) const ENCODED_MAX_BYTES: usize = 2 * PAGE_SIZE;

/// The pages of a corpus, one after another.
pub struct Packed {
    bytes: Vec<u8>,
    /// Where each page starts, and where the last one ends.
    starts: Vec<usize>,
}

impl Packed {
    /// Compresses each page of a corpus. Those that come to `huge_threshold_bytes` or more stay as they
    /// are.
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

    /// How many bytes a page has on average.
    pub fn mean_bytes(&self) -> f64 {
        self.bytes.len() as f64 / (self.starts.len() - 1) as f64
    }

    /// Page `i`, counted round the corpus again; [`PAGE_SIZE`] bytes of a page that is raw.
    #[inline]
    pub fn page(&self, i: usize) -> &[u8] {
        let i = i % (self.starts.len() - 1);
        &self.bytes[self.starts[i]..self.starts[i + 1]]
    }
}
