//! Accesses to pages by a Zipf distribution: of a store ([`backing`](super::backing)), and of a program's own
//! memory ([`pager`](crate::pager)).

const EXPONENT: f64 = 0.99;
const READ_PERCENT: u8 = 90;
/// Accesses generated in advance, for each page; then they repeat.
const ACCESSES_PER_PAGE: usize = 16;
/// Accesses for each page before it is measured.
pub(crate) const WARM_UP_PER_PAGE: usize = 2;
/// Pages of what is accessed, uncompressed, for each of memory.
pub(crate) const PAGES_PER_LIMIT: u64 = 4;

/// An access to a page; if it is a write, the page of the corpus to write.
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub(crate) page: u32,
    pub(crate) written: Option<u32>,
}

pub(crate) fn accesses(page_count: usize, seed: u64) -> Vec<Access> {
    let mut random = fastrand::Rng::with_seed(!seed);
    let mut access =
        |page| Access { page, written: (random.u8(..100) >= READ_PERCENT).then(|| random.u32(..)) };
    let zipf = Zipf::new(page_count as u32, EXPONENT, seed);
    zipf.take(ACCESSES_PER_PAGE * page_count).map(&mut access).collect()
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
