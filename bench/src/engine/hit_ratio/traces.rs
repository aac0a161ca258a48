//! Traces of page accesses. A seed and a size give the same trace every time.

/// A kind of trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// The nth page is used in proportion to 1 / n; which page is the nth is random.
    Zipf,
    /// Zipf among one half of the pages, and after each such use one page of the other half, in order.
    ScanThroughZipf,
    /// A quarter of the pages, in order, again and again: an exact LRU with memory for less keeps none of
    /// them until it is used again.
    Loop,
}

impl Trace {
    /// All of them.
    pub const ALL: [Trace; 3] = [Trace::Zipf, Trace::ScanThroughZipf, Trace::Loop];

    /// Returns the name in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Trace::Zipf => "Zipf",
            Trace::ScanThroughZipf => "scan through Zipf",
            Trace::Loop => "loop",
        }
    }

    /// Generates so many uses of pages below `pages`, which is at least 4.
    pub(super) fn generate(self, pages: u32, uses: usize, seed: u64) -> Vec<u32> {
        match self {
            Trace::Zipf => Zipf::new(pages, 1.0, seed).take(uses).collect(),
            Trace::ScanThroughZipf => {
                let half = pages / 2;
                let scan = (half..pages).cycle();
                Zipf::new(half, 1.0, seed).zip(scan).flat_map(<[u32; 2]>::from).take(uses).collect()
            }
            Trace::Loop => (0..pages / 4).cycle().take(uses).collect(),
        }
    }
}

/// Endless draws from a Zipf distribution: the nth page is drawn in proportion to 1 / n^exponent.
pub(crate) struct Zipf {
    random: fastrand::Rng,
    /// At n - 1, the page of rank n.
    by_rank: Vec<u32>,
    /// At n - 1, the sum of the weights of the first n ranks.
    sums: Vec<f64>,
}

impl Zipf {
    /// Assigns pages to ranks at random.
    pub(crate) fn new(pages: u32, exponent: f64, seed: u64) -> Zipf {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut by_rank: Vec<u32> = (0..pages).collect();
        random.shuffle(&mut by_rank);
        let mut sum = 0.0;
        let mut sum_up_to = |rank| {
            sum += f64::from(rank).powf(exponent).recip();
            sum
        };
        Zipf { random, by_rank, sums: (1..=pages).map(&mut sum_up_to).collect() }
    }
}

impl Iterator for Zipf {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let drawn = self.random.f64() * self.sums.last()?;
        self.by_rank.get(self.sums.partition_point(|sum| *sum <= drawn)).copied()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PAGES: u32 = 1000;
    const USES: usize = 100_000;

    #[test]
    fn zipf_gives_each_rank_its_share() {
        let trace = Trace::Zipf.generate(PAGES, USES, 1);
        assert_eq!(trace.len(), USES);
        let mut counts = vec![0; PAGES as usize];
        trace.iter().for_each(|page| counts[*page as usize] += 1);
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        let harmonic = |pages: u32| (1..=pages).map(|rank| 1.0 / f64::from(rank)).sum::<f64>();
        for head in [1, 2, 10, 100, 500] {
            let wanted = harmonic(head) / harmonic(PAGES);
            let share = f64::from(counts[..head as usize].iter().sum::<u32>()) / USES as f64;
            assert!((share - wanted).abs() < 0.01, "the first {head}: {share:.3}, wanted {wanted:.3}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_trace() {
        for trace in Trace::ALL {
            let [first, again, other] = [1, 1, 2].map(|seed| trace.generate(PAGES, USES, seed));
            assert_eq!(first, again, "{}", trace.name());
            assert_eq!(first == other, trace == Trace::Loop, "{}", trace.name());
            assert!(first.iter().all(|page| *page < PAGES), "{}", trace.name());
        }
    }

    #[test]
    fn a_scan_goes_through_one_half_in_order() {
        let trace = Trace::ScanThroughZipf.generate(PAGES, USES, 3);
        assert_eq!(trace.len(), USES);
        for (nth, pair) in trace.chunks(2).enumerate() {
            assert!(pair[0] < PAGES / 2);
            assert_eq!(pair[1], PAGES / 2 + nth as u32 % (PAGES / 2));
        }
    }
}
