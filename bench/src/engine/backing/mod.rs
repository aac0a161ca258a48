//! The gains and costs of a backing file: the speed of writeback and the room that pages take (`written`),
//! write amplification when the file is nearly full (`overwrites`), the speed of a data set larger than its
//! memory (`zipf`), and the order of reclaim (`reclaim`). `scratch` has the stores and their files.

mod overwrites;
mod reclaim;
mod scratch;
#[cfg(test)]
mod tests;
mod written;
mod zipf;

use std::fmt;
use std::path::PathBuf;

use crate::harness::report::{Table, figure_cell};
use serde::Serialize;
use uzram::store::WritebackLayout;
use uzram::units::format_size;
use uzram::{Error, Result};

use super::{Common, go_on};
use crate::harness::corpus::Corpus;
pub(crate) use overwrites::MOST_LIVE_PERCENT;
pub use overwrites::Overwrites;
pub use reclaim::ReclaimRow;
use scratch::Scratch;
pub use written::Written;
pub use zipf::ZipfAccess;

/// The default folder of the files: `/tmp` may be in memory.
pub const DEFAULT_DIR: &str = "/var/tmp";

/// How to measure.
#[derive(Clone, Debug)]
pub struct BackingOptions {
    /// The common options, except that same-filled pages are left out.
    pub common: Common,
    /// The folder in which a temporary one is made for the files.
    pub dir: PathBuf,
    /// The size of the pages that are written back all at once, and of the file.
    pub written_size_bytes: u64,
    /// The size of the file on which random pages are overwritten.
    pub overwritten_file_bytes: u64,
    /// The memory limit of the data set under Zipf access, which is four times as large before compression.
    pub limit_bytes: u64,
    /// The size of the pages of which half are to leave memory, in each order.
    pub reclaimed_size_bytes: u64,
}

impl Default for BackingOptions {
    fn default() -> Self {
        BackingOptions {
            common: Common::default(),
            dir: DEFAULT_DIR.into(),
            written_size_bytes: 512 << 20,
            overwritten_file_bytes: 128 << 20,
            limit_bytes: 64 << 20,
            reclaimed_size_bytes: 128 << 20,
        }
    }
}

impl BackingOptions {
    /// Returns room for a data set that does not compress, and for some dead data.
    fn zipf_file_bytes(&self) -> u64 {
        self.limit_bytes * zipf::PAGES_PER_LIMIT / 4 * 5
    }

    /// Returns why there can be no files, if so: the folder is not writable or has no room.
    ///
    /// # Errors
    /// A corpus that cannot be built.
    pub fn obstacle(&self) -> Result<Option<Error>> {
        let corpus = self.load_corpus()?;
        let scratch = match Scratch::new(&self.dir, &corpus, &self.common.algorithm) {
            Ok(scratch) => scratch,
            Err(error) => return Ok(Some(error)),
        };
        // The files of one part at a time.
        let parts_bytes = [
            self.written_size_bytes,
            overwrites::files_bytes(self, &scratch)?,
            2 * self.zipf_file_bytes(),
            self.reclaimed_size_bytes,
        ];
        let most_bytes = parts_bytes.into_iter().max().unwrap_or_default();
        Ok(scratch.file("room", most_bytes).err())
    }

    fn load_corpus(&self) -> Result<Corpus> {
        self.common.corpus.load_until(&self.common.stop)?.without_same_filled()
    }
}

/// The results.
#[derive(Clone, Debug, Serialize)]
pub struct BackingReport {
    /// All pages written back.
    pub written: Written,
    /// Writes to a file that is nearly full: the packed layout, the fullest last, then the kernel's layout.
    pub overwrites: Vec<Overwrites>,
    /// A data set larger than its memory, before compression.
    pub zipf: ZipfAccess,
    /// Memory reclaimed in each order.
    pub reclaim: Vec<ReclaimRow>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// Measures all of it.
///
/// # Errors
/// A folder or a file that cannot be made, a page that does not read back, a stop.
pub fn run(options: &BackingOptions) -> Result<BackingReport> {
    let corpus = options.load_corpus()?;
    let scratch = || {
        go_on(&options.common.stop)?;
        Scratch::new(&options.dir, &corpus, &options.common.algorithm)
    };
    let mut notes = Vec::new();
    // Each is a separate statement, at whose end its files are removed, before those of the next are made.
    let written = written::measure(options, &scratch()?, &mut notes)?;
    let overwrites = overwrites::measure(options, &scratch()?)?;
    let zipf = zipf::measure(options, &scratch()?)?;
    let reclaim = reclaim::measure(options, &scratch()?)?;
    Ok(BackingReport { written, overwrites, zipf, reclaim, notes })
}

impl BackingReport {
    /// Returns the writes of the packed layout to the fullest file.
    pub fn fullest(&self) -> Option<&Overwrites> {
        self.overwrites.iter().rfind(|row| row.layout == WritebackLayout::Packed.name())
    }
}

impl fmt::Display for BackingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.written.fmt_lines(f)?;
        let mut table = Table::new([
            "<random overwrites",
            "file",
            "pages",
            "live %",
            "extents %",
            "compressed",
            "written",
            "moved",
            "written/compressed",
        ]);
        for row in &self.overwrites {
            table.row([
                row.layout.to_owned(),
                format_size(row.file_bytes),
                row.pages.to_string(),
                format!("{:.1}", row.live_percent),
                format!("{:.1}", row.extents_percent),
                format_size(row.compressed_bytes),
                format_size(row.written_bytes),
                format_size(row.moved_bytes),
                figure_cell(row.bytes_ratio(), 3),
            ]);
        }
        write!(f, "\n{table}")?;
        let zipf = &self.zipf;
        writeln!(
            f,
            "\nZipf access to {}, four times the limit before compression ({} compressed, memory for {}): {:.2} % misses; accesses a second {:.0}, in memory {:.0}, reads from the file {:.0}; ratio {:.2}",
            format_size(zipf.size_bytes),
            format_size(zipf.compressed_bytes),
            format_size(zipf.limit_bytes),
            zipf.miss_percent,
            zipf.limited_per_s,
            zipf.memory_per_s,
            zipf.backing_per_s,
            zipf.speed_ratio
        )?;
        let mut table = Table::new(["<reclaim by", "MB freed / s", "freed/written back", "refaults %"]);
        for row in &self.reclaim {
            table.row([
                row.order.to_owned(),
                format!("{:.0}", row.freed_mb_per_s),
                format!("{:.2}", row.freed_per_written),
                format!("{:.2}", row.refault_percent),
            ]);
        }
        write!(f, "\n{table}")?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl Written {
    fn fmt_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fio = match (self.fio_mb_per_s, self.speed_ratio) {
            (Some(mb_per_s), Some(ratio)) => format!(", fio {mb_per_s:.0}, ratio {ratio:.2}"),
            _ => String::new(),
        };
        let direct = if self.direct { "O_DIRECT" } else { "the page cache" };
        writeln!(
            f,
            "writeback of {}, {} compressed, by {} and {direct}: {:.0} MB/s{fio}",
            format_size(self.size_bytes),
            format_size(self.compressed_bytes),
            self.engine,
            self.mb_per_s
        )?;
        writeln!(
            f,
            "written {}, extents {}; {} reads for {} random pages",
            format_size(self.written_bytes),
            format_size(self.extent_bytes),
            self.device_reads,
            self.pages_read_back
        )
    }
}
