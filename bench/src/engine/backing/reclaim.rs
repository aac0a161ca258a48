//! Reclaim by page, the coldest first, against reclaim by zspage, all objects of the coldest one: how fast
//! memory becomes free, and how many of the pages are read back soon.
//!
//! A store is filled and its pages are accessed with a Zipf distribution. Then it gets a limit of half its
//! memory, and the policy reclaims pages until it is within that limit. Later accesses have the same
//! distribution.

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::store::{ReclaimOrder, ReclaimPolicy, WritebackLayout};
use uzram::units::page_of;
use uzram::{Error, ErrorKind, Result};

use super::BackingOptions;
use super::scratch::Scratch;
use super::zipf::accesses;
use crate::harness::go_on;
use crate::harness::rounds::in_turn;
use crate::harness::stats::median;

/// Accesses per page before the reclaim, and after it.
const USES_PER_PAGE: [usize; 2] = [4, 1];
/// The interval at which the limit is polled.
const POLL: Duration = Duration::from_micros(200);
/// The most time for that.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The results for one order; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct ReclaimRow {
    /// `pages` or `zspages`.
    pub order: &'static str,
    /// 10^6 bytes of memory freed in a second.
    pub freed_mb_per_s: f64,
    /// Memory freed for each compressed byte that was written back.
    pub freed_per_written: f64,
    /// The accesses that followed and had to read the file, in percent.
    pub refault_percent: f64,
}

/// Measures a row for each order.
pub(super) fn measure(options: &BackingOptions, scratch: &Scratch<'_>) -> Result<Vec<ReclaimRow>> {
    let rounds: [_; ReclaimOrder::ALL.len()] =
        in_turn(options.common.repeat, &options.common.stop, |number, which| {
            round(options, scratch, ReclaimOrder::ALL[which], number)
        })?;
    let row = |(order, rounds): (ReclaimOrder, &Vec<ReclaimRow>)| {
        let middle = |figure: fn(&ReclaimRow) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
        ReclaimRow {
            order: order.name(),
            freed_mb_per_s: middle(|round| round.freed_mb_per_s),
            freed_per_written: middle(|round| round.freed_per_written),
            refault_percent: middle(|round| round.refault_percent),
        }
    };
    Ok(ReclaimOrder::ALL.into_iter().zip(&rounds).map(row).collect())
}

fn round(
    options: &BackingOptions,
    scratch: &Scratch<'_>,
    reclaim: ReclaimOrder,
    number: usize,
) -> Result<ReclaimRow> {
    let page_count = page_of(options.reclaimed_size_bytes) as usize;
    let file = scratch.file("reclaimed", options.reclaimed_size_bytes)?;
    let policy = ReclaimPolicy { order: reclaim, ..ReclaimPolicy::default() };
    let mut pages = scratch.store(page_count, Some((file, WritebackLayout::Packed)), policy)?;
    pages.fill()?;
    let accesses = accesses(page_count, options.common.seed.wrapping_add(number as u64));
    let (before, after) = accesses.split_at(USES_PER_PAGE[0] * page_count);
    before.iter().try_for_each(|access| access.carry_out(&mut pages))?;
    go_on(&options.common.stop)?;

    let used_bytes = pages.used_bytes();
    let limit_bytes = used_bytes / 2;
    let start = Instant::now();
    pages.limit(page_of(limit_bytes))?;
    while pages.used_bytes() > limit_bytes {
        if start.elapsed() > TIMEOUT {
            let what = format!("the policy, reclaiming {reclaim}, does not keep the limit");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        go_on(&options.common.stop)?;
        thread::sleep(POLL);
    }
    let elapsed = start.elapsed();
    let freed_bytes = (used_bytes - pages.used_bytes()) as f64;

    let left = pages.backing_stats();
    let uses = &after[..USES_PER_PAGE[1] * page_count];
    uses.iter().try_for_each(|access| access.carry_out(&mut pages))?;
    let refaults = pages.backing_stats().reads - left.reads;
    pages.check()?;
    Ok(ReclaimRow {
        order: reclaim.name(),
        freed_mb_per_s: freed_bytes / elapsed.as_secs_f64() / 1e6,
        freed_per_written: freed_bytes / left.object_bytes.max(1) as f64,
        refault_percent: refaults as f64 / uses.len() as f64 * 100.0,
    })
}
