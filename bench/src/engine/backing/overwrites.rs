//! Bytes written to a nearly full backing file while random pages are overwritten again and again: the
//! compressed pages, and objects moved to make room for them.
//!
//! First, pages are written back until they take a part of the file, 80 % at most. Then some are overwritten
//! and written back, and so on. After three times the file's size has been written, the writes of one size
//! more are counted. The kernel's layout, a block for each page, gets the pages of the fullest file,
//! overwritten in the same way.

use uzram::Result;
use uzram::store::WritebackLayout;
use uzram::units::pages_to_bytes;

use super::scratch::{Pages, Scratch};
use crate::harness::report::{mib, quotient};
use crate::harness::{Options, Report, SEED};

/// The shares of the file that live pages take.
const LIVE_PERCENT: [u64; 3] = [60, 70, MOST_LIVE_PERCENT];
const MOST_LIVE_PERCENT: u64 = 80;
/// The bytes written before counting, in units of the file's size.
const SETTLED_AFTER: u64 = 3;
/// Overwrites between two writebacks: the number of pages divided by this.
const BATCH_SHARE: usize = 32;
/// The bytes of a packed page beyond its compressed bytes: a header, and alignment of the next one.
const OVERHEAD_BYTES: f64 = 20.0;

/// Measures a row for each live share of the file with the packed layout, the largest last, and then one with
/// the kernel's.
pub(super) fn measure(
    options: &Options,
    file_bytes: u64,
    scratch: &Scratch<'_>,
    report: &mut Report,
) -> Result<()> {
    let page_bytes = scratch.mean_bytes()? + OVERHEAD_BYTES;
    let pages_of = |live_percent| live_pages(file_bytes, live_percent, page_bytes);
    for live_percent in LIVE_PERCENT {
        let (layout, page_count) = (WritebackLayout::Packed, pages_of(live_percent));
        let mut packed = Overwritten::new(options, scratch, layout, file_bytes, page_count)?;
        packed.overwrite(SETTLED_AFTER * file_bytes)?;
        packed.count(file_bytes, &format!("packed, {live_percent} % live"), report)?;
    }
    let page_count = pages_of(MOST_LIVE_PERCENT);
    let blocks_bytes = blocks_file_bytes(page_count);
    let blocks = Overwritten::new(options, scratch, WritebackLayout::Blocks, blocks_bytes, page_count)?;
    blocks.count(file_bytes, &format!("blocks, {MOST_LIVE_PERCENT} % live"), report)
}

/// Returns the size of both files: the packed one, and a block for each of its pages.
pub(super) fn files_bytes(file_bytes: u64, scratch: &Scratch<'_>) -> Result<u64> {
    let page_bytes = scratch.mean_bytes()? + OVERHEAD_BYTES;
    Ok(file_bytes + blocks_file_bytes(live_pages(file_bytes, MOST_LIVE_PERCENT, page_bytes)))
}

/// Returns the number of pages that take such a share of a file, packed.
fn live_pages(file_bytes: u64, live_percent: u64, page_bytes: f64) -> usize {
    (((file_bytes * live_percent / 100) as f64 / page_bytes) as usize).max(1)
}

/// Returns the size of the file that has a block for each of so many pages, as full as the fullest packed
/// one.
fn blocks_file_bytes(page_count: usize) -> u64 {
    pages_to_bytes(page_count as u64) * 100 / MOST_LIVE_PERCENT
}

/// A store all of whose pages are on its file.
struct Overwritten<'a> {
    options: &'a Options,
    pages: Pages<'a>,
    random: fastrand::Rng,
}

impl<'a> Overwritten<'a> {
    fn new(
        options: &'a Options,
        scratch: &Scratch<'a>,
        layout: WritebackLayout,
        file_bytes: u64,
        page_count: usize,
    ) -> Result<Self> {
        let file = scratch.file(layout.name(), file_bytes)?;
        let mut pages = scratch.store(page_count, Some((file, layout)))?;
        for batch in (0..page_count as u32).collect::<Vec<_>>().chunks(batch_pages(page_count)) {
            batch.iter().try_for_each(|page| pages.write(*page, *page))?;
            pages.write_back()?;
        }
        let random = fastrand::Rng::with_seed(SEED);
        Ok(Overwritten { options, pages, random })
    }

    /// Overwrites random pages and writes them back, until so many bytes have been written to the file.
    fn overwrite(&mut self, bytes: u64) -> Result<()> {
        let page_count = self.pages.page_count();
        let until_bytes = self.pages.backing_stats().written_bytes + bytes;
        while self.pages.backing_stats().written_bytes < until_bytes {
            for _ in 0..batch_pages(page_count) {
                let page = self.random.u32(..page_count as u32);
                self.pages.write(page, self.random.u32(..))?;
            }
            self.pages.write_back()?;
            self.options.go_on()?;
        }
        Ok(())
    }

    fn count(mut self, bytes: u64, row: &str, report: &mut Report) -> Result<()> {
        let before = self.pages.backing_stats();
        self.overwrite(bytes)?;
        let after = self.pages.backing_stats();
        self.pages.check()?;
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
        report.row("random overwrites", row, &cells);
        Ok(())
    }
}

fn batch_pages(page_count: usize) -> usize {
    page_count.div_ceil(BATCH_SHARE)
}
