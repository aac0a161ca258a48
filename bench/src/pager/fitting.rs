//! A loop over memory that fits: a region whose pages are all in memory, beside a plain mapping of the kind
//! that the trap uses.

use std::hint::black_box;
use std::time::{Duration, Instant};

use uzram::units::{Page, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::memory::{Mapping, Memory};
use super::settings::{PagerSettings, Touched};
use crate::harness::rounds::order;
use crate::harness::stats::median_ratio;
use crate::harness::steps::Steps;

/// The limit, for each byte of the region.
const LIMIT: u64 = 4;

/// Is the process: a step is a number of passes over each memory; the answer is the median of the ratios of
/// their times.
pub(crate) fn run(job: &Touched, steps: &mut Steps) -> Result<()> {
    let trap = job.trap()?;
    let corpus = Mapping::file(&job.corpus)?;
    let limit_bytes = (LIMIT * pages_to_bytes(job.pages as u64)).max(uzram_pager::LEAST_LIMIT_BYTES);
    let pager = PagerSettings::new(trap, limit_bytes).build()?;
    let plain = Mapping::anonymous(job.pages)?;
    let mut memories = [Memory::map(Some(&pager), job.pages)?, Memory::Kernel(plain)];
    memories.iter_mut().for_each(|memory| memory.fill(corpus.pages(), 0));
    let wanted = sum(memories[1].pages());
    while let Some(step) = steps.next() {
        let passes: usize = step.parse().map_err(|_| Error::invalid(step))?;
        let mut times = [const { Vec::<f64>::new() }; 2];
        for pass in 0..passes {
            for which in order(pass, 2) {
                times[which].push(timed(memories[which].pages(), wanted)?.as_secs_f64());
            }
        }
        steps.answer(&median_ratio(&times[0], &times[1]))?;
    }
    Ok(())
}

/// Reads all pages, which must have this sum.
fn timed(pages: &[Page], wanted: u64) -> Result<Duration> {
    let start = Instant::now();
    let found = sum(black_box(pages));
    let elapsed = start.elapsed();
    match found == wanted {
        true => Ok(elapsed),
        false => Err(Error::new(ErrorKind::Corrupt, "memory that fits has changed")),
    }
}

#[inline(never)]
fn sum(pages: &[Page]) -> u64 {
    let words = pages.as_flattened().as_chunks::<8>().0;
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}
