//! `uzram bench --codecs`: what each codec makes of pages of each corpus, and how fast.
//!
//! Rows are codecs, at some levels, with pages of 4 KiB, as the engine codes them, and of 16 KiB. `pages` takes the pages,
//! `measure` times the codecs, `wide` codes larger pages.

mod coder;
mod measure;
mod pages;
mod report;
#[cfg(test)]
mod tests;
mod wide;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::Result;
use uzram::codec::{Algorithm, Kind};
use uzram::units::PAGE_SIZE;

use crate::engine::Common;
use crate::harness::corpus::Source;
use crate::harness::{DEFAULT_CORPUS_PAGES, go_on};
use measure::{Classes, Variant};
pub use report::{CodecRow, CodecsReport};

/// The levels that are measured besides the default of each kind. The kinds themselves are the engine's.
const LEVELS: [&str; 7] = ["lz4:2", "lz4:8", "lz4hc:4", "zstd:-5", "zstd:3", "zstd:9", "deflate:1"];

/// Larger pages: of some arm64 kernels, and the smallest of the kernel's multi-size huge pages that are in use.
const LARGEST_PAGE_BYTES: usize = 4 * PAGE_SIZE;
const PAGE_SIZES: [usize; 2] = [PAGE_SIZE, LARGEST_PAGE_BYTES];

/// What to measure.
#[derive(Clone, Debug)]
pub struct CodecsOptions {
    /// The corpora, in the order of the report.
    pub corpora: Vec<Source>,
    /// The codecs; `None` for every kind of the engine, and more levels of it. All are compared with lz4: without it there are
    /// no rows.
    pub algorithms: Option<Vec<Algorithm>>,
    /// The sizes of pages in bytes: 4 KiB, and as the case may be 16 KiB.
    pub page_sizes: Vec<usize>,
    /// The most pages of 4 KiB of each corpus that are measured.
    pub pages: usize,
    /// How long a round of one corpus takes.
    pub duration: Duration,
    /// How many rounds.
    pub repeat: usize,
    /// Setting it ends the run with an error.
    pub stop: Arc<AtomicBool>,
}

impl Default for CodecsOptions {
    fn default() -> Self {
        let Common { duration, repeat, stop, .. } = Common::default();
        CodecsOptions {
            corpora: vec![
                Source::Built(crate::harness::corpus::Kind::Mixed, DEFAULT_CORPUS_PAGES),
                Source::Processes(DEFAULT_CORPUS_PAGES),
            ],
            algorithms: None,
            page_sizes: PAGE_SIZES.to_vec(),
            // All codecs take some seconds for them.
            pages: 4096,
            duration,
            repeat,
            stop,
        }
    }
}

/// Returns the codecs that are measured by default: each kind of the engine, and further levels of it.
fn algorithms() -> Result<Vec<Algorithm>> {
    let levels = LEVELS.iter().map(|text| text.parse()).collect::<Result<Vec<Algorithm>>>()?;
    let of_kind = |kind: Kind| {
        let more = levels.iter().filter(move |algorithm| algorithm.kind() == kind).cloned();
        std::iter::once(Algorithm::from(kind)).chain(more)
    };
    Ok(Kind::ALL.into_iter().flat_map(of_kind).collect())
}

/// Measures the codecs.
///
/// # Errors
/// `Invalid` names the invalid option; a corpus that cannot be loaded; `Corrupt` for a codec that does not decode what it
/// coded.
pub fn run(options: &CodecsOptions) -> Result<CodecsReport> {
    let (duration, repeat, stop) = (options.duration, options.repeat, &options.stop);
    Common { duration, repeat, ..Common::default() }.check()?;
    let algorithms = options.algorithms.clone().map_or_else(algorithms, Ok)?;
    let classes = Classes::new()?;
    let mut report = CodecsReport::default();
    for pages in pages::load(&options.corpora, options.pages, stop, &mut report.notes)? {
        let mut variants = Vec::new();
        for &page_bytes in &options.page_sizes {
            for algorithm in &algorithms {
                match Variant::new(algorithm, page_bytes)? {
                    Some(variant) => variants.push(variant),
                    None => report.note_missing(algorithm, page_bytes),
                }
            }
        }
        let mut stored = Vec::new();
        for variant in &mut variants {
            stored.push(variant.store(&pages, &classes, stop)?);
        }
        measure::measure(&mut variants, &pages, repeat, duration, stop)?;
        go_on(stop)?;
        report.add(&pages, &variants, &stored);
    }
    report.describe(options);
    Ok(report)
}
