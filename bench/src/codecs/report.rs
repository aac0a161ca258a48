//! The table of codecs.

use std::fmt;

use serde::Serialize;
use uzram::codec::{Algorithm, Kind};
use uzram::units::{PAGE_SIZE, format_size};

use super::measure::{Stored, Variant};
use super::pages::Pages;
use super::{CodecsOptions, LARGEST_PAGE_BYTES};
use crate::harness::report::{Table, figure_cell};

/// One codec on pages of one size of one corpus. Speeds are in 10^6 bytes of pages a second of CPU time.
#[derive(Clone, Debug, Serialize)]
pub struct CodecRow {
    /// The algorithm as `--algorithm` takes it.
    pub codec: String,
    /// The corpus.
    pub corpus: String,
    /// The size of a page.
    pub page_bytes: usize,
    /// The bytes of all pages.
    pub bytes: usize,
    /// What they take compressed; a page that does not get smaller counts as it is.
    pub stored_bytes: usize,
    /// What objects of these lengths take in the size classes of the default pool; `None` for pages above 4 KiB, which
    /// it does not store.
    pub class_bytes: Option<usize>,
    /// `bytes / stored_bytes`.
    pub ratio: f64,
    /// Memory that the engine's encoder and decoder take on each CPU; `None` for larger pages.
    pub state_bytes: Option<usize>,
    /// The speed of compression.
    pub compress_mb_per_s: f64,
    /// That divided by lz4's with pages of 4 KiB.
    pub compress_per_lz4: f64,
    /// The speed of decompression of the pages that were compressed; `None` if none was.
    pub decompress_mb_per_s: Option<f64>,
    /// That divided by lz4's with pages of 4 KiB.
    pub decompress_per_lz4: Option<f64>,
}

/// All rows. `Display` prints a table for each corpus; the JSON has the fields as keys.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CodecsReport {
    /// A row for each corpus, size of pages and codec, in this order.
    pub rows: Vec<CodecRow>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl CodecsReport {
    /// Returns the row of a codec with pages of 4 KiB of a corpus, if it was measured.
    pub fn row(&self, codec: &str, corpus: &str) -> Option<&CodecRow> {
        let is_wanted =
            |row: &&CodecRow| row.codec == codec && row.corpus == corpus && row.page_bytes == PAGE_SIZE;
        self.rows.iter().find(is_wanted)
    }

    /// Adds the rows of a corpus.
    pub(super) fn add(&mut self, pages: &Pages, variants: &[Variant], stored: &[Stored]) {
        let is_lz4 = |variant: &&Variant| {
            variant.page_bytes == PAGE_SIZE && variant.algorithm == Algorithm::from(Kind::Lz4)
        };
        let Some(lz4) = variants.iter().find(is_lz4).map(Variant::speeds) else { return };
        for (variant, stored) in variants.iter().zip(stored) {
            let (speeds, bytes) = (variant.speeds(), pages.bytes().len());
            self.rows.push(CodecRow {
                codec: variant.algorithm.to_string(),
                corpus: pages.name.clone(),
                page_bytes: variant.page_bytes,
                bytes,
                stored_bytes: stored.bytes,
                class_bytes: stored.class_bytes,
                ratio: bytes as f64 / stored.bytes as f64,
                state_bytes: variant.coder.state_bytes(),
                compress_mb_per_s: speeds.encoding,
                compress_per_lz4: speeds.encoding / lz4.encoding,
                decompress_mb_per_s: speeds.decoding,
                decompress_per_lz4: speeds.decoding.zip(lz4.decoding).map(|(codec, lz4)| codec / lz4),
            });
        }
    }

    /// Notes why a codec has no row, once.
    pub(super) fn note_missing(&mut self, algorithm: &Algorithm, page_bytes: usize) {
        let size = format_size(page_bytes as u64);
        let note =
            format!("{algorithm} has no row of {size}: it is the engine's own code, for pages of 4 KiB only");
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds the notes that every report has.
    pub(super) fn describe(&mut self, options: &CodecsOptions) {
        self.notes.push(format!(
            "{} rounds of {:.2} s for each corpus, in which all codecs code the same pages, 64 at a time, in turn; speeds are by the sums of the medians of CPU time for these 64",
            options.repeat,
            options.duration.as_secs_f64()
        ));
        self.notes.extend(
            [
                "× lz4: divided by the speed of lz4 with pages of 4 KiB of the same corpus",
                "same-filled pages are left out; pages that do not get smaller count as they are, and are not decompressed",
                "in classes: pages of 4 KiB to the bytes that their objects take in a pool, each rounded up to its size class",
            ]
            .map(str::to_owned),
        );
        if options.page_sizes.contains(&LARGEST_PAGE_BYTES) {
            self.notes.push(
                "16 KiB: four pages that follow each other in the corpus, coded at once by the engine's libraries; its pool does not store them".into(),
            );
        }
    }

    /// Returns the tables, each with the name of its corpus and its size.
    fn tables(&self) -> impl Iterator<Item = (String, Table)> {
        self.rows.chunk_by(|a, b| a.corpus == b.corpus).map(|rows| {
            let mut table = Table::new([
                "<codec",
                "page",
                "ratio",
                "in classes",
                "compress MB/s",
                "× lz4",
                "decompress MB/s",
                "× lz4",
                "KiB a CPU",
            ]);
            for row in rows {
                let in_classes = row.class_bytes.map(|bytes| row.bytes as f64 / bytes as f64);
                table.row([
                    row.codec.clone(),
                    format_size(row.page_bytes as u64),
                    format!("{:.2}", row.ratio),
                    figure_cell(in_classes, 2),
                    format!("{:.0}", row.compress_mb_per_s),
                    format!("{:.2}", row.compress_per_lz4),
                    figure_cell(row.decompress_mb_per_s, 0),
                    figure_cell(row.decompress_per_lz4, 2),
                    figure_cell(row.state_bytes.map(|bytes| bytes.div_ceil(1024) as f64), 0),
                ]);
            }
            let bytes = rows.first().map_or(0, |row| row.bytes as u64);
            let name = rows.first().map_or("", |row| &row.corpus);
            (format!("corpus {name}, {}", format_size(bytes)), table)
        })
    }

    /// Returns the report in Markdown.
    pub fn to_markdown(&self) -> String {
        let tables = self.tables().map(|(corpus, table)| format!("{corpus}:\n\n{}\n", table.to_markdown()));
        let notes = self.notes.iter().map(|note| format!("- {note}\n"));
        tables.chain(notes).collect()
    }
}

impl fmt::Display for CodecsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (corpus, table) in self.tables() {
            writeln!(f, "{corpus}\n\n{table}")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
