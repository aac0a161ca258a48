//! What is measured on the memory of programs, the corpus `processes`: the algorithm `memory` beside lz4, and
//! parked programs; and what `memory` makes of pages that do not get smaller.
//!
//! The programs run once. Their pages are saved in files, all of them in one and each program's in another,
//! which the measurements share. What cannot be measured is left out, and a note says why.

use std::path::{Path, PathBuf};

use uzram::codec::{Algorithm, Encoder, Kind, ROOM_BYTES};
use uzram::units::{PAGE_SIZE, Page, pages_to_bytes};
use uzram::{ErrorKind, Result};

use crate::block::swap;
use crate::codecs;
use crate::engine::device::{self, Against, Bench};
use crate::engine::{Comparison, Pattern, ROUNDS, recompression};
use crate::harness::corpus::processes::{self, Processes};
use crate::harness::corpus::{self, Corpus};
use crate::harness::options::{FEW_PAGES, MAX_REPEAT};
use crate::harness::process::runtime_dir;
use crate::harness::{DEFAULT_CORPUS_PAGES, Options, Report, Source, lack_of_memory, unsupported};

/// The program that is parked, and whose heap is swapped out.
const PYTHON: &str = "python";
/// Pages of all programs together: with more, each program would no longer have about as many as the others.
/// Python's are many beside what the pool's size classes take in part.
const PROCESS_PAGES: usize = 2 * DEFAULT_CORPUS_PAGES;
const PARKED_PAGES: usize = (1 << 30) / PAGE_SIZE;
/// Rounds of codecs for each one of the others: two codecs take a small part of a round's time.
const CODEC_ROUNDS: usize = 5;
/// Corpora besides those of the programs: all of them together, those of their pages that the algorithm does
/// not leave to lz4, and pages of random bytes, as encrypted and compressed data are.
const ALL: &str = "processes";
const WORDS: &str = "words";
const RANDOM: &str = "random";
const RANDOM_PAGES: usize = 1024;
/// Fewer of [`WORDS`] are not measured.
const LEAST_WORDS: usize = 64;
const PER_LZ4: &str = "memory / lz4";

/// Runs all measurements that are possible here.
pub fn run(options: &Options) -> Result<Report> {
    let dir = runtime_dir()?;
    let mut report = Report::default();
    let programs = match processes::build(options.amount(PROCESS_PAGES, 600), options.small, &options.stop) {
        Ok(processes) => Some(processes),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            report.note(format!("memory of programs not measured: {error}"));
            None
        }
        Err(error) => return Err(error),
    };
    report.notes.extend(programs.iter().flat_map(|programs| programs.left_out.iter().cloned()));
    measure(options, dir.path(), programs.as_ref(), &mut report)?;
    Ok(report)
}

fn measure(options: &Options, dir: &Path, programs: Option<&Processes>, report: &mut Report) -> Result<()> {
    let algorithm = Algorithm::from(Kind::Memory);
    let save = |name: &str, corpus: &Corpus| {
        // The file's name is the corpus's in reports.
        let path = dir.join(format!("{name}.bin"));
        corpus.save(&path).map(|()| path)
    };
    let mut rng = fastrand::Rng::with_seed(11);
    let random: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(RANDOM_PAGES * PAGE_SIZE).collect();
    let mut files = vec![save(RANDOM, &Corpus::from_bytes(&random)?)?];
    let Some(programs) = programs else { return compare_codecs(options, &algorithm, &files, &[], report) };
    let (whole, mixed) = (programs.whole()?, mixed(options).load_until(&options.stop)?);
    let all = save(ALL, &whole)?;
    files.push(all.clone());
    files.extend(words(&whole, &algorithm)?.map(|words| save(WORDS, &words)).transpose()?);
    let parts = programs.parts.iter().map(|(name, corpus)| save(name, corpus)).collect::<Result<Vec<_>>>()?;
    files.extend(parts);
    let names: Vec<&str> = programs.parts.iter().map(|(name, _)| *name).collect();
    compare_codecs(options, &algorithm, &files, &names, report)?;
    let misjudged = 100.0 * misjudged(&[mixed, whole], &algorithm)?;
    report.row(PER_LZ4, "mixed and processes", &[("misjudged %", misjudged)]);

    let on = |path: &Path| Options { corpus: Source::File(path.to_owned()), ..options.clone() };
    let writes = Options { algorithm: algorithm.clone(), ..on(&all).in_slices(ROUNDS) };
    let (patterns, jobs) = (&[Pattern::RandWrite], &[1]);
    let comparison = Comparison { options: &writes, table: "pages of programs", patterns, jobs };
    let against = &[Against::Lz4, Against::Kernel];
    report.append(device::run(&Bench { comparison, size_bytes: None, against, memory: false })?);
    let python = names.contains(&PYTHON).then(|| dir.join(format!("{PYTHON}.bin")));
    let lz4 = |path: &Path| Options { algorithm: Kind::Lz4.into(), ..on(path) };
    let left_out = || unsupported(format!("{PYTHON} was left out"));
    let swapped = python.as_deref().ok_or_else(left_out);
    let swap_out = |path: &Path| {
        let daemons = ["memory", "lz4"].map(|name| ["--algorithm", name]);
        let daemons = daemons.each_ref().map(<[_; 2]>::as_slice);
        swap::compare(options, path, "a Python heap in swap", ["memory", "lz4"], daemons)
    };
    report.part("swap-out", swapped.and_then(swap_out))?;
    let parked = large_python(options, dir, report)?.or(python).ok_or_else(left_out);
    report.part("a parked program", parked.and_then(|path| recompression::parked(&lz4(&path))))
}

/// Starts a large Python and saves its pages, or adds a note that says why not.
fn large_python(options: &Options, dir: &Path, report: &mut Report) -> Result<Option<PathBuf>> {
    if options.small {
        return Ok(None);
    }
    // The program, its pages, and the device.
    let corpus = match lack_of_memory(3 * pages_to_bytes(PARKED_PAGES as u64))? {
        Some(obstacle) => Err(unsupported(obstacle)),
        None => processes::large_python(PARKED_PAGES, &options.stop),
    };
    options.go_on()?;
    match corpus {
        Ok(corpus) => {
            let path = dir.join("parked.bin");
            corpus.save(&path).map(|()| Some(path))
        }
        Err(error) => {
            report.note(format!("a parked Python of 1 GiB not measured, but a smaller one: {error}"));
            Ok(None)
        }
    }
}

/// The algorithm and lz4, each with its buffer.
struct Both([(Encoder, [u8; ROOM_BYTES]); 2]);

impl Both {
    fn new(algorithm: &Algorithm) -> Result<Both> {
        let coder = |algorithm| Encoder::new(algorithm).map(|encoder| (encoder, [0; ROOM_BYTES]));
        Ok(Both([coder(algorithm)?, coder(&Kind::Lz4.into())?]))
    }

    /// Compresses a page with both; `None` for one that does not get smaller.
    fn encode(&mut self, page: &Page) -> [Option<&[u8]>; 2] {
        self.0.each_mut().map(|(encoder, room)| {
            let len = encoder.encode(page, room).filter(|len| *len < PAGE_SIZE)?;
            Some(&room[..len])
        })
    }
}

/// Returns the pages that the algorithm compresses otherwise than lz4; `None` if they are few.
fn words(corpus: &Corpus, algorithm: &Algorithm) -> Result<Option<Corpus>> {
    let (mut both, mut words) = (Both::new(algorithm)?, Vec::new());
    for page in corpus.pages() {
        let [ours, of_lz4] = both.encode(page);
        if ours.is_some() && ours != of_lz4 {
            words.extend(page);
        }
    }
    if words.len() < LEAST_WORDS * PAGE_SIZE { Ok(None) } else { Corpus::from_bytes(&words).map(Some) }
}

/// Returns the share of the pages that lz4 makes smaller which the algorithm does not.
fn misjudged(corpora: &[Corpus], algorithm: &Algorithm) -> Result<f64> {
    let mut both = Both::new(algorithm)?;
    let (mut smaller, mut misjudged) = (0, 0);
    for page in corpora.iter().flat_map(Corpus::pages) {
        let [ours, of_lz4] = both.encode(page).map(|bytes| bytes.is_some());
        smaller += usize::from(of_lz4);
        misjudged += usize::from(of_lz4 && !ours);
    }
    Ok(misjudged as f64 / smaller as f64)
}

/// Returns the corpus `mixed`, whichever the other measurements have: targets are for its figures
/// (`targets/targets.txt`).
fn mixed(options: &Options) -> Source {
    Source::Built(corpus::Kind::Mixed, options.amount(DEFAULT_CORPUS_PAGES, FEW_PAGES))
}

/// Measures the algorithm and lz4 on the mixed corpus and those in files, of which some are a program's.
fn compare_codecs(
    options: &Options,
    algorithm: &Algorithm,
    files: &[PathBuf],
    programs: &[&str],
    report: &mut Report,
) -> Result<()> {
    let repeat = Some((CODEC_ROUNDS * options.rounds(codecs::ROUNDS)).min(MAX_REPEAT));
    let corpora: Vec<Source> =
        [mixed(options)].into_iter().chain(files.iter().cloned().map(Source::File)).collect();
    let algorithms = [Kind::Lz4.into(), algorithm.clone()];
    report.append(codecs::run(&Options { repeat, ..options.clone() }, &corpora, &algorithms)?);
    let (name, mut lowest) = (algorithm.to_string(), [f64::NAN; 2]);
    for corpus in corpora.iter().map(Source::name) {
        let of = |codec: &str, column| report.get(&codecs::table(&corpus), codec, column).unwrap_or(f64::NAN);
        let ratio = of(&name, "ratio") / of("lz4", "ratio");
        let [compress, decompress] = ["compress × lz4", "decompress × lz4"].map(|column| of(&name, column));
        if programs.contains(&corpus.as_str()) {
            lowest = [lowest[0].min(ratio), lowest[1].min(compress)];
        }
        let cells = [
            ("ratio", ratio),
            ("compress", compress),
            ("decompress", decompress),
            ("time to compress", 1.0 / compress),
        ];
        report.row(PER_LZ4, &corpus, &cells);
    }
    report.row(PER_LZ4, "lowest of a program", &[("ratio", lowest[0]), ("compress", lowest[1])]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::corpus::{Kind as CorpusKind, build};

    /// Runs all of it but swap on made-up programs.
    #[test]
    fn every_figure_but_swap_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let part = |(name, kind)| (name, build(kind, 400).unwrap());
        let parts = [(PYTHON, CorpusKind::Heap), ("other", CorpusKind::Text)].map(part).into();
        let programs = Processes { parts, left_out: Vec::new() };
        let mut report = Report::default();
        measure(&Options::tiny(96), dir.path(), Some(&programs), &mut report).unwrap();
        let of = |row: &str, column| report.get(PER_LZ4, row, column);
        for row in ["mixed", "processes", PYTHON, "other", "lowest of a program"] {
            assert!(of(row, "ratio").unwrap() >= 0.99 && of(row, "compress").unwrap() > 0.0, "{report}");
        }
        assert!(of("random", "time to compress").unwrap() > 0.0 && of("random", "decompress").is_none());
        assert!(of("mixed and processes", "misjudged %").unwrap() < 5.0, "{report}");
        assert!(report.get("pages of programs", "randwrite, 1 job, lz4", "ratio").unwrap() > 0.0, "{report}");
        let swap = "swap-out not measured: no uzram program was found".to_owned();
        assert!(report.notes.contains(&swap), "{report}");
        let mut report = Report::default();
        measure(&Options::tiny(96), dir.path(), None, &mut report).unwrap();
        assert!(report.get(PER_LZ4, "random", "time to compress").is_some());
    }
}
