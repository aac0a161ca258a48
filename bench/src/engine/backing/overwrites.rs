//! Bytes written to a nearly full backing file while random pages are overwritten again and again: the
//! compressed pages, and objects moved to make room for them.
//!
//! First, pages are written back until they take a share of the file ([`LIVE_PERCENT`]). Then some are
//! overwritten and written back, and so on. After three times the file's size has been written, the writes of
//! one size more are counted.

use uzram::Result;

use super::scratch::{Pages, Scratch};
use crate::harness::report::{mib, quotient};
use crate::harness::{Options, Report, SEED};

/// The share of the file that live pages take.
pub(super) const LIVE_PERCENT: u64 = 80;
/// The bytes written before counting, in units of the file's size.
const SETTLED_AFTER: u64 = 3;
/// Overwrites between two writebacks: the number of pages divided by this.
const BATCH_SHARE: usize = 32;
/// The bytes of a packed page beyond its compressed bytes: a header, and alignment of the next one.
const OVERHEAD_BYTES: f64 = 20.0;

/// Measures one row, with live pages of such a share of the file.
pub(super) fn measure(
    options: &Options,
    file_bytes: u64,
    live_percent: u64,
    scratch: &Scratch<'_>,
    report: &mut Report,
) -> Result<()> {
    let page_bytes = scratch.mean_bytes()? + OVERHEAD_BYTES;
    let page_count = (((file_bytes * live_percent / 100) as f64 / page_bytes) as usize).max(1);
    let mut pages = scratch.store(page_count, Some(scratch.file("overwritten", file_bytes)?))?;
    for batch in (0..page_count as u32).collect::<Vec<_>>().chunks(page_count.div_ceil(BATCH_SHARE)) {
        batch.iter().try_for_each(|page| pages.write(*page, *page))?;
        pages.write_back()?;
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    overwrite(options, &mut pages, &mut random, SETTLED_AFTER * file_bytes)?;
    let before = pages.backing_stats();
    overwrite(options, &mut pages, &mut random, file_bytes)?;
    let after = pages.backing_stats();
    pages.check()?;
    let percent = |bytes: u64| bytes as f64 / after.len_bytes as f64 * 100.0;
    let compressed_bytes = after.object_bytes - before.object_bytes;
    let written_bytes = after.written_bytes - before.written_bytes;
    let cells = [
        ("file MiB", mib(after.len_bytes)),
        ("pages", after.pages as f64),
        ("live %", percent(after.held_bytes)),
        ("extents %", percent(after.extent_bytes)),
        ("compressed MiB", mib(compressed_bytes)),
        ("written MiB", mib(written_bytes)),
        ("moved MiB", mib(after.cleaned_bytes - before.cleaned_bytes)),
        ("written / compressed", quotient(written_bytes, compressed_bytes)),
    ];
    report.row("random overwrites", &format!("packed, {live_percent} % live"), &cells);
    Ok(())
}

/// Overwrites random pages and writes them back, until so many bytes have been written to the file.
fn overwrite(options: &Options, pages: &mut Pages<'_>, random: &mut fastrand::Rng, bytes: u64) -> Result<()> {
    let page_count = pages.page_count();
    let until_bytes = pages.backing_stats().written_bytes + bytes;
    while pages.backing_stats().written_bytes < until_bytes {
        for _ in 0..page_count.div_ceil(BATCH_SHARE) {
            pages.write(random.u32(..page_count as u32), random.u32(..))?;
        }
        pages.write_back()?;
        options.go_on()?;
    }
    Ok(())
}
