//! Findings beyond the expectations: the three times of deferred frees, each divided by that of frees at once.

use uzram_bench::harness::stats::PairedRatio;

use super::{PINNED, PINNED_DEFERRED, SPLIT, SPLIT_DEFERRED};
use crate::experiment::{Row, Side, jobs_text, side};

/// Deferred against at once: with the same locks, and all of it.
const PAIRS: [(&str, &str); 3] =
    [(SPLIT_DEFERRED, SPLIT), (PINNED_DEFERRED, PINNED), (PINNED_DEFERRED, SPLIT)];

pub(super) fn paragraphs(rows: &[Row], _: usize) -> Vec<String> {
    let mut jobs: Vec<usize> = rows.iter().map(|row| row.jobs).collect();
    jobs.dedup();
    let of_jobs =
        |jobs: usize| PAIRS.into_iter().filter_map(move |(later, at_once)| times(rows, jobs, later, at_once));
    jobs.into_iter().flat_map(of_jobs).collect()
}

/// Returns the ratios of the three times, the median of the rounds with its interval.
fn times(rows: &[Row], jobs: usize, later: &str, at_once: &str) -> Option<String> {
    let sides = [side(rows, jobs, later)?, side(rows, jobs, at_once)?];
    let ratio = |seconds: fn(&Side) -> Option<Vec<f64>>| {
        PairedRatio::new(&seconds(sides[0])?, &seconds(sides[1])?).map(|ratio| format!("{ratio:.2}"))
    };
    Some(format!(
        "{later} / {at_once}, {}, time: until the jobs have freed {}, CPU of all threads {}, until all memory is back {}.",
        jobs_text(jobs),
        ratio(|side| side.values.get("elapsed_s").cloned())?,
        ratio(Side::processor_s)?,
        ratio(|side| side.values.get("back_s").cloned())?
    ))
}
