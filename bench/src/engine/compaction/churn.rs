//! Overwrites that scatter a pool: random pages, with contents whose sizes change over time.
//!
//! The corpus's pages are sorted by compressed size, and taken alternately from the upper and the lower half:
//! in each pass some classes lose objects that others gain, as when a disk's use changes.

use uzram::Result;
use uzram::codec::Algorithm;
use uzram::units::PAGE_SIZE;

use crate::engine::Packed;
use crate::harness::corpus::Corpus;

/// The pages of a corpus in two halves.
pub(super) struct Halves {
    by_size: Vec<usize>,
}

impl Halves {
    /// Splits the corpus by the sizes that the algorithm gives.
    pub(super) fn new(corpus: &Corpus, algorithm: &Algorithm) -> Result<Halves> {
        let packed = Packed::new(algorithm, PAGE_SIZE, corpus)?;
        let mut by_size: Vec<usize> = (0..corpus.page_count()).collect();
        by_size.sort_by_key(|page| packed.page(*page).len());
        Ok(Halves { by_size })
    }

    fn pages(&self, upper: bool) -> &[usize] {
        let (low, high) = self.by_size.split_at(self.by_size.len() / 2);
        if upper || low.is_empty() { high } else { low }
    }
}

/// Contents for a page of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overwrite {
    pub(super) page: usize,
    pub(super) corpus_page: usize,
}

/// An endless sequence of overwrites; the same seed gives the same one.
pub(super) struct Churn<'a> {
    halves: &'a Halves,
    page_count: usize,
    /// Overwrites from one half before those from the other.
    pass: usize,
    done: usize,
    rng: fastrand::Rng,
}

impl<'a> Churn<'a> {
    pub(super) fn new(halves: &'a Halves, page_count: usize, pass: usize, seed: u64) -> Churn<'a> {
        Churn { halves, page_count, pass: pass.max(1), done: 0, rng: fastrand::Rng::with_seed(seed) }
    }
}

impl Iterator for Churn<'_> {
    type Item = Overwrite;

    fn next(&mut self) -> Option<Overwrite> {
        let from = self.halves.pages((self.done / self.pass).is_multiple_of(2));
        self.done = self.done.wrapping_add(1);
        let page = self.rng.usize(..self.page_count);
        Some(Overwrite { page, corpus_page: from[self.rng.usize(..from.len())] })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Returns pages whose first `noisy` bytes are noise.
    fn corpus(noisy: &[usize]) -> Corpus {
        let mut rng = fastrand::Rng::with_seed(3);
        let page = |noisy: &usize| -> Vec<u8> {
            (0..PAGE_SIZE).map(|at| if at < *noisy { rng.u8(..) } else { 7 }).collect()
        };
        Corpus::from_bytes(&noisy.iter().flat_map(page).collect::<Vec<u8>>()).unwrap()
    }

    #[test]
    fn passes_take_from_the_halves_in_turn() {
        let corpus = corpus(&[4000, 100, 3000, 50, 2000]);
        let halves = Halves::new(&corpus, &Algorithm::default()).unwrap();
        let overwrites = |seed| Churn::new(&halves, 9, 10, seed).take(40).collect::<Vec<_>>();
        let done = overwrites(1);
        assert!(done == overwrites(1) && done != overwrites(2));
        for (number, overwrite) in done.iter().enumerate() {
            assert!(overwrite.page < 9);
            let large = [0, 2, 4].contains(&overwrite.corpus_page);
            assert_eq!(large, number / 10 % 2 == 0, "{number}: {overwrite:?}");
        }
    }

    #[test]
    fn a_corpus_of_one_page_is_both_halves() {
        let halves = Halves::new(&corpus(&[9]), &Algorithm::default()).unwrap();
        assert!(Churn::new(&halves, 2, 1, 1).take(9).all(|overwrite| overwrite.corpus_page == 0));
    }
}
