//! Measures the compressed size of mixed pages with and without a dictionary, and the speed beside lz4's without one: the
//! table of dictionaries in docs/algorithms.md.
//!
//! `cargo run --release -p uzram-bench --example dictionaries [MIXED_CORPUS]`. Half of the corpus trains a
//! dictionary, the other half is measured. In each round every algorithm compresses the same pages, one
//! algorithm after another; a figure is the median over the rounds of lz4's time divided by the algorithm's.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use uzram::codec::{Algorithm, Decoder, Dictionary, Encoder, ROOM_BYTES, train};
use uzram::units::{PAGE_SIZE, Page};
use uzram_bench::harness::corpus;
use uzram_bench::harness::stats::median_ratio;

const CORPUS_PAGES: usize = 8192;
/// The most pages measured; a round of the slowest takes about as many milliseconds.
const MEASURED_PAGES: usize = 1024;
const DICTIONARY_BYTES: usize = 64 << 10;
const ROUNDS: usize = 9;

/// Without a dictionary, and with one.
const ALGORITHMS: [&str; 8] = ["lz4", "lz4hc:2", "lz4hc:4", "lz4hc", "zstd:-1", "zstd", "zstd:3", "zstd:9"];

struct Row {
    name: String,
    encoder: Encoder,
    decoder: Decoder,
    /// Each page, compressed, or `None` if compression saves nothing.
    coded: Vec<Option<Vec<u8>>>,
    stored_bytes: usize,
    shared_bytes: usize,
    /// Seconds of each round.
    encoding: Vec<f64>,
    decoding: Vec<f64>,
}

impl Row {
    fn new(algorithm: &Algorithm, name: String, pages: &[Page]) -> uzram::Result<Row> {
        let (mut encoder, mut out) = (Encoder::new(algorithm)?, [0; ROOM_BYTES]);
        let mut code = |page| {
            let len_bytes = encoder.encode(page, &mut out).filter(|len_bytes| *len_bytes < PAGE_SIZE)?;
            Some(out[..len_bytes].to_vec())
        };
        let coded: Vec<_> = pages.iter().map(&mut code).collect();
        let stored_bytes = coded.iter().map(|bytes| bytes.as_ref().map_or(PAGE_SIZE, Vec::len)).sum();
        let (decoder, shared_bytes) = (Decoder::new(algorithm)?, algorithm.shared_bytes());
        let (encoding, decoding) = (Vec::new(), Vec::new());
        Ok(Row { name, encoder, decoder, coded, stored_bytes, shared_bytes, encoding, decoding })
    }

    fn round(&mut self, pages: &[Page]) -> uzram::Result<()> {
        let mut out = [0; ROOM_BYTES];
        let start = Instant::now();
        for page in pages {
            black_box(self.encoder.encode(page, &mut out));
        }
        let encoding = start.elapsed();
        let (mut page, start) = ([0; PAGE_SIZE], Instant::now());
        for bytes in self.coded.iter().flatten() {
            self.decoder.decode(bytes, &mut page)?;
            black_box(&page);
        }
        self.encoding.push(encoding.as_secs_f64());
        self.decoding.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = match std::env::args().nth(1) {
        Some(path) => corpus::load(Path::new(&path))?,
        None => corpus::build(corpus::Kind::Mixed, CORPUS_PAGES)?,
    };
    let corpus = corpus.without_same_filled()?;
    // In pairs, because neighbouring pages are alike.
    let half = |which: usize| corpus.pages().enumerate().filter(move |(i, _)| i / 2 % 2 == which);
    let training: Vec<Page> = half(0).map(|(_, page)| *page).collect();
    let step = (corpus.page_count() / 2).div_ceil(MEASURED_PAGES).max(1);
    let pages: Vec<Page> = half(1).step_by(step).map(|(_, page)| *page).collect();
    let trained = train(&training, DICTIONARY_BYTES)?;

    let mut rows = Vec::new();
    for name in ALGORITHMS {
        rows.push(Row::new(&name.parse()?, name.to_owned(), &pages)?);
    }
    for name in ALGORITHMS {
        let plain: Algorithm = name.parse()?;
        let dictionary = Dictionary::new("/trained", trained.clone())?;
        let algorithm = Algorithm::new(plain.kind(), Some(plain.level()), Some(dictionary))?;
        rows.push(Row::new(&algorithm, format!("{name},dict"), &pages)?);
    }
    for _ in 0..ROUNDS {
        for row in &mut rows {
            row.round(&pages)?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }

    println!(
        "{} pages, {ROUNDS} rounds; load {}",
        pages.len(),
        std::fs::read_to_string("/proc/loadavg")?.trim()
    );
    println!(
        "| algorithm | stored / page | compresses, lz4 = 1 | decompresses, lz4 = 1 | KiB per CPU | KiB shared |"
    );
    println!("|---|---|---|---|---|---|");
    let (lz4_encoding, lz4_decoding) = (rows[0].encoding.clone(), rows[0].decoding.clone());
    for row in &rows {
        println!(
            "| {} | {:.1} % | {:.2} | {:.2} | {} | {} |",
            row.name,
            100.0 * row.stored_bytes as f64 / (pages.len() * PAGE_SIZE) as f64,
            median_ratio(&lz4_encoding, &row.encoding),
            median_ratio(&lz4_decoding, &row.decoding),
            (row.encoder.state_bytes() + row.decoder.state_bytes()).div_ceil(1024),
            row.shared_bytes.div_ceil(1024),
        );
    }
    Ok(())
}
