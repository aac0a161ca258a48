//! Findings beyond the expectations: each phase of the pager beside the kernel's, and what the pool's locks are for unmapping.

use uzram_bench::harness::stats::PairedRatio;
use uzram_bench::pager::unmap::Phase;

use super::{KERNEL_LZ4, KERNEL_LZO, phase_name};
use crate::experiment::{Row, jobs_text, side};

/// The sides of a pager as it is.
const PAGERS: [&str; 2] = ["uffd", "guard"];

pub(super) fn paragraphs(rows: &[Row], _: usize) -> Vec<String> {
    let mut jobs: Vec<usize> = rows.iter().map(|row| row.jobs).collect();
    jobs.dedup();
    let of_jobs = |jobs: &usize| {
        let pairs =
            PAGERS.into_iter().flat_map(|pager| [KERNEL_LZ4, KERNEL_LZO].map(|kernel| (pager, kernel)));
        pairs.filter_map(|(pager, kernel)| compared(rows, *jobs, pager, kernel)).collect::<Vec<_>>()
    };
    jobs.iter().flat_map(of_jobs).collect()
}

/// Returns the time of each phase of one side divided by that of another, the median of the rounds' ratios.
fn compared(rows: &[Row], jobs: usize, pager: &str, kernel: &str) -> Option<String> {
    let (pager_side, kernel_side) = (side(rows, jobs, pager)?, side(rows, jobs, kernel)?);
    let ratio = |phase: Phase| {
        let rounds = [pager_side, kernel_side].map(|side| side.values.get(phase_name(phase)));
        let ratio = PairedRatio::new(rounds[0]?, rounds[1]?)?;
        Some(format!("{} {ratio:.2}", phase.name()))
    };
    let ratios: Vec<String> = Phase::ALL.into_iter().filter_map(ratio).collect();
    (!ratios.is_empty())
        .then(|| format!("{pager} / {kernel}, {}, time: {}.", jobs_text(jobs), ratios.join(", ")))
}
