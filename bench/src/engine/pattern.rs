//! fio's six patterns, and the page of each operation.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use uzram::{Error, Result};

/// An order of operations, named as fio names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Random reads.
    RandRead,
    /// Sequential writes.
    Write,
    /// Random writes.
    RandWrite,
    /// Sequential reads and sequential writes, as many of each.
    Rw,
    /// Random reads and writes, as many of each.
    RandRw,
}

impl Pattern {
    /// All six, in fio's order.
    pub const ALL: [Pattern; 6] =
        [Pattern::Read, Pattern::RandRead, Pattern::Write, Pattern::RandWrite, Pattern::Rw, Pattern::RandRw];

    /// Returns fio's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Read => "read",
            Pattern::RandRead => "randread",
            Pattern::Write => "write",
            Pattern::RandWrite => "randwrite",
            Pattern::Rw => "rw",
            Pattern::RandRw => "randrw",
        }
    }

    /// Returns whether it reads.
    pub const fn reads(self) -> bool {
        !matches!(self, Pattern::Write | Pattern::RandWrite)
    }

    /// Returns whether it writes.
    pub const fn writes(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::RandRead)
    }

    const fn is_random(self) -> bool {
        matches!(self, Pattern::RandRead | Pattern::RandWrite | Pattern::RandRw)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Pattern::ALL.into_iter().find(|pattern| pattern.name() == text).ok_or_else(|| {
            Error::invalid(format!(
                "'{text}' is not a pattern: write read, randread, write, randwrite, rw or randrw"
            ))
            .with_setting("--rw")
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Read { page: usize },
    Write { page: usize, corpus_page: usize },
}

/// The endless sequence of one job's operations. The same seed gives the same one.
pub(super) struct Ops {
    pattern: Pattern,
    rng: fastrand::Rng,
    page_count: usize,
    corpus_pages: usize,
    /// A sequential job cycles through its own part of the device, from a place drawn at random.
    section: Range<usize>,
    next_read: usize,
    next_write: usize,
    /// The offset from the page's number to the corpus page's in a sequential write.
    shift: usize,
}

impl Ops {
    pub(super) fn new(
        pattern: Pattern,
        seed: u64,
        job: usize,
        jobs: usize,
        page_count: usize,
        corpus_pages: usize,
    ) -> Ops {
        let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(1 << 10).wrapping_add(job as u64));
        let start = page_count * job / jobs;
        // With more jobs than pages, jobs share pages.
        let section = start..(page_count * (job + 1) / jobs).max(start + 1);
        let (next_read, next_write) = (rng.usize(section.clone()), rng.usize(section.clone()));
        let shift = rng.usize(..corpus_pages);
        Ops { pattern, rng, page_count, corpus_pages, section, next_read, next_write, shift }
    }

    #[inline]
    pub(super) fn next(&mut self) -> Op {
        let write = self.pattern.writes() && (!self.pattern.reads() || self.rng.bool());
        match (self.pattern.is_random(), write) {
            (true, false) => Op::Read { page: self.rng.usize(..self.page_count) },
            (true, true) => Op::Write {
                page: self.rng.usize(..self.page_count),
                corpus_page: self.rng.usize(..self.corpus_pages),
            },
            (false, false) => {
                let page = self.next_read;
                self.next_read = if page + 1 == self.section.end { self.section.start } else { page + 1 };
                Op::Read { page }
            }
            (false, true) => {
                let page = self.next_write;
                let corpus_page = page + self.shift;
                self.next_write = page + 1;
                if self.next_write == self.section.end {
                    self.next_write = self.section.start;
                    self.shift = (self.shift + 1) % self.corpus_pages;
                }
                Op::Write { page, corpus_page }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_others_are_refused() {
        for pattern in Pattern::ALL {
            assert_eq!(pattern.name().parse::<Pattern>().unwrap(), pattern);
        }
        assert!("trim".parse::<Pattern>().unwrap_err().to_string().contains("--rw"));
    }

    #[test]
    fn operations_stay_in_the_device_and_repeat_for_a_seed() {
        for pattern in Pattern::ALL {
            let ops = |job| Ops::new(pattern, 5, job, 3, 100, 40);
            let (mut a, mut b, mut other) = (ops(0), ops(0), ops(1));
            let (mut reads, mut differ) = (0, 0);
            for _ in 0..2000 {
                let op = a.next();
                assert_eq!(op, b.next(), "{pattern}");
                differ += usize::from(op != other.next());
                let (Op::Read { page } | Op::Write { page, .. }) = op;
                assert!(page < 100, "{pattern}: page {page}");
                reads += usize::from(matches!(op, Op::Read { .. }));
            }
            assert!(differ > 1500, "{pattern}: the jobs do the same");
            let wanted = match (pattern.reads(), pattern.writes()) {
                (true, true) => 800..=1200,
                (true, false) => 2000..=2000,
                _ => 0..=0,
            };
            assert!(wanted.contains(&reads), "{pattern}: {reads} reads of 2000");
        }
    }

    #[test]
    fn a_sequential_pass_covers_the_jobs_part_once() {
        let mut ops = Ops::new(Pattern::Write, 9, 1, 2, 10, 10);
        let mut pages: Vec<_> = (0..5)
            .map(|_| match ops.next() {
                Op::Write { page, .. } | Op::Read { page } => page,
            })
            .collect();
        pages.sort_unstable();
        assert_eq!(pages, [5, 6, 7, 8, 9]);
        // More jobs than pages.
        let mut ops = Ops::new(Pattern::Read, 1, 6, 7, 2, 1);
        assert!((0..9).all(|_| matches!(ops.next(), Op::Read { page } if page < 2)));
    }
}
