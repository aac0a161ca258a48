//! Reclaim by page, the coldest first, against reclaim by zspage, all objects of the coldest one: how fast
//! memory becomes free, and how many of the pages are read back soon.
//!
//! A store is filled and its pages are accessed with a Zipf distribution. Then it gets a limit of half its
//! memory, and the policy reclaims pages until it is within that limit. Later accesses have the same
//! distribution.

use std::thread;
use std::time::{Duration, Instant};

use uzram::store::{ReclaimOrder, ReclaimPolicy, WritebackLayout};
use uzram::units::page_of;
use uzram::{Error, ErrorKind, Result};

use super::scratch::Scratch;
use super::zipf::accesses;
use crate::engine::compare::ROUNDS;
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, SEED};

/// Accesses per page before the reclaim, and after it.
const USES_PER_PAGE: [usize; 2] = [4, 1];
/// The interval at which the limit is polled.
const POLL: Duration = Duration::from_micros(200);
/// The most time for that.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The figures of a round: memory freed in a second; memory freed for each compressed byte that was written
/// back; and the accesses that followed and had to read the file.
const COLUMNS: [&str; 3] = ["MB freed / s", "freed / written back", "refaults %"];

/// Measures a row for each order.
pub(super) fn measure(
    options: &Options,
    size_bytes: u64,
    scratch: &Scratch<'_>,
    report: &mut Report,
) -> Result<()> {
    let rounds: [Vec<[f64; 3]>; ReclaimOrder::ALL.len()] =
        in_turn(options.rounds(ROUNDS), &options.stop, |number, which| {
            round(options, size_bytes, scratch, ReclaimOrder::ALL[which], number)
        })?;
    for (order, rounds) in ReclaimOrder::ALL.into_iter().zip(&rounds) {
        for (at, column) in COLUMNS.into_iter().enumerate() {
            let figures: Vec<f64> = rounds.iter().map(|round| round[at]).collect();
            report.rounds("reclaim by", order.name(), column, &figures);
        }
    }
    Ok(())
}

fn round(
    options: &Options,
    size_bytes: u64,
    scratch: &Scratch<'_>,
    reclaim: ReclaimOrder,
    number: usize,
) -> Result<[f64; 3]> {
    let page_count = page_of(size_bytes) as usize;
    let file = scratch.file("reclaimed", size_bytes)?;
    let policy = ReclaimPolicy { order: reclaim, ..ReclaimPolicy::default() };
    let mut pages = scratch.store(page_count, Some((file, WritebackLayout::Packed)), policy)?;
    pages.fill()?;
    let accesses = accesses(page_count, SEED.wrapping_add(number as u64));
    let (before, after) = accesses.split_at(USES_PER_PAGE[0] * page_count);
    before.iter().try_for_each(|access| access.carry_out(&mut pages))?;
    options.go_on()?;

    let used_bytes = pages.used_bytes();
    let limit_bytes = used_bytes / 2;
    let start = Instant::now();
    pages.limit(page_of(limit_bytes))?;
    while pages.used_bytes() > limit_bytes {
        if start.elapsed() > TIMEOUT {
            let what = format!("the policy, reclaiming {reclaim}, does not keep the limit");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        options.go_on()?;
        thread::sleep(POLL);
    }
    let elapsed = start.elapsed();
    let freed_bytes = (used_bytes - pages.used_bytes()) as f64;

    let left = pages.backing_stats();
    let uses = &after[..USES_PER_PAGE[1] * page_count];
    uses.iter().try_for_each(|access| access.carry_out(&mut pages))?;
    let refaults = pages.backing_stats().reads - left.reads;
    pages.check()?;
    Ok([
        freed_bytes / elapsed.as_secs_f64() / 1e6,
        freed_bytes / left.object_bytes.max(1) as f64,
        refaults as f64 / uses.len() as f64 * 100.0,
    ])
}
