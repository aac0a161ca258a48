//! What is measured on the memory of programs, the corpus `processes`: the algorithm `memory` beside lz4, parked programs,
//! and hot pages; and what `memory` makes of pages that do not get smaller.
//!
//! The programs run once. Their pages are saved in files, all of them in one and each program's in another, which the
//! measurements share. What cannot be measured is left out, and a note says why.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use uzram::codec::{Algorithm, Encoder, Kind, ROOM_BYTES};
use uzram::units::{PAGE_SIZE, Page, format_size, pages_to_bytes};
use uzram::{ErrorKind, Result};

use crate::block::{self, BlockOptions, SwapTimes, disk_obstacle, swap};
use crate::codecs::{self, CodecRow, CodecsOptions, CodecsReport};
use crate::engine::recompression::parked::{self, ParkedReport};
use crate::engine::{self, Against, Common, Pattern};
use crate::harness::corpus::Corpus;
use crate::harness::corpus::processes::{self, Processes};
use crate::harness::stats::{median, median_ratio};
use crate::harness::{Source, go_on, lack_of_memory};

/// The program that is parked, and whose heap is swapped out.
const PYTHON: &str = "python";
/// Rounds of codecs for each one of the others: two codecs take a small part of a round's time.
const CODEC_ROUNDS: usize = 5;
/// Corpora besides those of the programs: all of them together, those of their pages that the algorithm does not leave to
/// lz4, and pages of random bytes, as encrypted and compressed data are.
const ALL: &str = "processes";
const WORDS: &str = "words";
const RANDOM: &str = "random";
const RANDOM_PAGES: usize = 1024;
/// Fewer of [`WORDS`] are not measured.
const LEAST_WORDS: usize = 64;

/// How to measure.
pub(super) struct ProgramsOptions<'a> {
    /// The common options; their corpus is the mixed one.
    pub(super) common: &'a Common,
    /// The most pages of all programs together; 0 to start none.
    pub(super) pages: usize,
    /// The pages of a parked Python that has more of them than the others; 0 to take the same.
    pub(super) parked_pages: usize,
    /// The algorithm that is compared with lz4.
    pub(super) algorithm: Algorithm,
    /// The programs for swap, if there are any.
    pub(super) programs: Option<&'a block::Programs>,
    /// The amounts for swap.
    pub(super) amounts: &'a block::Amounts,
    /// A folder for files of pages.
    pub(super) dir: &'a Path,
}

/// The results, as far as there are any.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ProgramsReport {
    /// The algorithm beside lz4.
    pub codecs: Option<CodecsReport>,
    /// The share of the pages that lz4 makes smaller, of programs and mixed, that the algorithm stores as they are.
    pub misjudged: Option<f64>,
    /// Devices with either algorithm, and kernel zram.
    pub writes: Option<engine::BenchReport>,
    /// A heap of Python on swap areas with either algorithm.
    pub swap_out: Option<SwapOut>,
    /// A parked Python.
    pub parked: Option<ParkedReport>,
}

/// A program's memory swapped out, and in page by page; medians over the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SwapOut {
    /// The program's memory.
    pub size_bytes: u64,
    /// The time to swap it out, with the algorithm and with lz4.
    pub out_ms: [f64; 2],
    /// The time to touch all of it again.
    pub in_ms: [f64; 2],
    /// The speed of swapping out, divided by that with lz4: the median of the rounds' ratios.
    pub out_speed_ratio: f64,
    /// That of swapping in.
    pub in_speed_ratio: f64,
}

/// Files of pages.
struct Saved {
    whole: PathBuf,
    /// Of the pages that the algorithm does not leave to lz4, if there are enough.
    words: Option<PathBuf>,
    parts: Vec<(&'static str, PathBuf)>,
    /// Of the parked Python, if it has others than the part.
    parked: Option<PathBuf>,
}

impl Saved {
    fn part(&self, name: &str) -> Option<&Path> {
        self.parts.iter().find(|(part, _)| *part == name).map(|(_, path)| path.as_path())
    }
}

/// Runs all measurements that are possible here.
///
/// # Errors
/// A program that fails, a page that does not read back, a file that cannot be written, a stop.
pub(super) fn run(options: &ProgramsOptions<'_>, notes: &mut Vec<String>) -> Result<ProgramsReport> {
    let mut saved = processes_of(options, notes)?.map(|processes| save(&processes, options)).transpose()?;
    if let Some(saved) = &mut saved {
        saved.parked = parked_of(options, notes)?;
    }
    measure(options, saved.as_ref(), notes)
}

/// Starts a large Python and saves its pages, or adds a note that says why not.
fn parked_of(options: &ProgramsOptions<'_>, notes: &mut Vec<String>) -> Result<Option<PathBuf>> {
    let pages = options.parked_pages;
    if pages == 0 {
        return Ok(None);
    }
    let wanted = format!("a parked Python of {}", format_size(pages_to_bytes(pages as u64)));
    // The program, its pages, and the device.
    let needed_bytes = 3 * pages_to_bytes(pages as u64);
    if let Some(obstacle) = lack_of_memory(needed_bytes)? {
        notes.push(format!("{wanted} not measured, but a smaller one: {obstacle}"));
        return Ok(None);
    }
    match processes::large_python(pages, &options.common.stop) {
        Ok(corpus) => {
            let path = options.dir.join("parked.bin");
            corpus.save(&path).map(|()| Some(path))
        }
        Err(error) => {
            go_on(&options.common.stop)?;
            notes.push(format!("{wanted} not measured, but a smaller one: {error}"));
            Ok(None)
        }
    }
}

/// Starts the programs and takes their memory, or adds a note that says why not.
fn processes_of(options: &ProgramsOptions<'_>, notes: &mut Vec<String>) -> Result<Option<Processes>> {
    if options.pages == 0 {
        notes.push("memory of programs not measured: no pages of it are wanted".into());
        return Ok(None);
    }
    match processes::build(options.pages, &options.common.stop) {
        Ok(processes) => {
            notes.extend(processes.left_out.iter().cloned());
            Ok(Some(processes))
        }
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            notes.push(format!("memory of programs not measured: {error}"));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Saves the pages of all programs, those of each, and those that the algorithm does not leave to lz4.
fn save(processes: &Processes, options: &ProgramsOptions<'_>) -> Result<Saved> {
    let part = |(name, corpus): &(&'static str, Corpus)| {
        let path = path_of(options, name);
        corpus.save(&path).map(|()| (*name, path))
    };
    let parts = processes.parts.iter().map(part).collect::<Result<_>>()?;
    let (whole, path) = (processes.whole()?, path_of(options, ALL));
    whole.save(&path)?;
    let words = words(&whole, &options.algorithm)?;
    let save_words = |words: Corpus| {
        let path = path_of(options, WORDS);
        words.save(&path).map(|()| path)
    };
    Ok(Saved { whole: path, words: words.map(save_words).transpose()?, parts, parked: None })
}

/// Returns the path of a corpus: the file's name is the corpus's in reports.
fn path_of(options: &ProgramsOptions<'_>, corpus: &str) -> PathBuf {
    options.dir.join(format!("{corpus}.bin"))
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

/// Saves pages of random bytes.
fn save_random(options: &ProgramsOptions<'_>) -> Result<PathBuf> {
    let (mut rng, path) = (fastrand::Rng::with_seed(11), path_of(options, RANDOM));
    let bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(RANDOM_PAGES * PAGE_SIZE).collect();
    Corpus::from_bytes(&bytes)?.save(&path)?;
    Ok(path)
}

fn measure(
    options: &ProgramsOptions<'_>,
    saved: Option<&Saved>,
    notes: &mut Vec<String>,
) -> Result<ProgramsReport> {
    let mut report = ProgramsReport::default();
    let (algorithm, lz4) = (&options.algorithm, Algorithm::from(Kind::Lz4));
    report.codecs = Some(compare_codecs(options, algorithm, saved)?);
    let Some(saved) = saved else { return Ok(report) };
    let corpora = [&options.common.corpus, &Source::File(saved.whole.clone())];
    let corpora = corpora.map(|corpus| corpus.load_until(&options.common.stop));
    report.misjudged = Some(misjudged(&corpora.into_iter().collect::<Result<Vec<_>>>()?, algorithm)?);
    report.writes = Some(compare_writes(options.common, algorithm, &saved.whole)?);
    report.swap_out = swap_out(options, algorithm, saved, notes)?;
    match saved.parked.as_deref().or_else(|| saved.part(PYTHON)) {
        Some(path) => {
            report.parked = parked::run(&Common { algorithm: lz4.clone(), ..on(options.common, path) })?;
            if report.parked.is_none() {
                notes.push(
                    "a parked program not measured: its thread of idle priority got too little CPU time"
                        .into(),
                );
            }
        }
        None => notes.push(format!("a parked program not measured: {PYTHON} was left out")),
    }
    Ok(report)
}

/// Returns the options for another corpus.
fn on(common: &Common, path: &Path) -> Common {
    Common { corpus: Source::File(path.to_owned()), ..common.clone() }
}

/// Measures the algorithm and lz4 on the mixed corpus, on random bytes, on all programs' pages, on those of each program, and
/// on those that the algorithm does not leave to lz4.
fn compare_codecs(
    options: &ProgramsOptions<'_>,
    algorithm: &Algorithm,
    saved: Option<&Saved>,
) -> Result<CodecsReport> {
    let Common { corpus: mixed, duration, repeat, stop, .. } = options.common.clone();
    let parts = saved.iter().flat_map(|saved| saved.parts.iter().map(|(_, path)| path));
    let programs = saved.iter().flat_map(|saved| [&saved.whole].into_iter().chain(&saved.words)).chain(parts);
    let random = Source::File(save_random(options)?);
    codecs::run(&CodecsOptions {
        corpora: [mixed, random].into_iter().chain(programs.cloned().map(Source::File)).collect(),
        algorithms: Some(vec![Kind::Lz4.into(), algorithm.clone()]),
        page_sizes: vec![PAGE_SIZE],
        duration,
        repeat: (CODEC_ROUNDS * repeat).min(engine::MAX_REPEAT),
        stop,
        ..CodecsOptions::default()
    })
}

/// Measures random writes of a device with the algorithm, beside one with lz4 and kernel zram.
fn compare_writes(common: &Common, algorithm: &Algorithm, whole: &Path) -> Result<engine::BenchReport> {
    engine::run(engine::BenchOptions {
        common: Common { algorithm: algorithm.clone(), ..on(common, whole).in_slices() },
        patterns: vec![Pattern::RandWrite],
        jobs: vec![1],
        against: vec![Against::Lz4, Against::Kernel],
        ..engine::BenchOptions::default()
    })
}

/// Measures a heap of Python that is swapped out to areas with the algorithm and with lz4, or adds a note that says why not.
fn swap_out(
    options: &ProgramsOptions<'_>,
    algorithm: &Algorithm,
    saved: &Saved,
    notes: &mut Vec<String>,
) -> Result<Option<SwapOut>> {
    let (programs, python) = match (options.programs, saved.part(PYTHON)) {
        (Some(programs), Some(python)) => (programs, python),
        (None, _) => {
            notes.push(format!("swap with {algorithm} not measured: no uzram program was found"));
            return Ok(None);
        }
        (_, None) => {
            notes.push(format!("swap with {algorithm} not measured: {PYTHON} was left out"));
            return Ok(None);
        }
    };
    if let Some(obstacle) = disk_obstacle(&programs.uzram)?.or_else(swap::obstacle) {
        notes.push(format!("swap with {algorithm} not measured: {obstacle}"));
        return Ok(None);
    }
    let block = BlockOptions {
        programs: programs.clone(),
        corpus: python.to_owned(),
        repeat: options.common.repeat,
        amounts: options.amounts.clone(),
        stop: options.common.stop.clone(),
    };
    let names = [algorithm.to_string(), Kind::Lz4.name().to_owned()];
    let daemons = names.each_ref().map(|name| ["--algorithm", name.as_str()]);
    let rounds = swap::in_turn_with(&block, daemons.each_ref().map(<[_; 2]>::as_slice))?;
    Ok(Some(SwapOut::new(options.amounts.swapped_bytes, &rounds)))
}

impl SwapOut {
    fn new(size_bytes: u64, rounds: &[Vec<SwapTimes>; 2]) -> SwapOut {
        let times = |time: fn(&SwapTimes) -> f64| {
            rounds.each_ref().map(|rounds| rounds.iter().map(time).collect::<Vec<_>>())
        };
        let (swapped_out, swapped_in) = (times(|times| times.swap_out_ms), times(|times| times.fault_in_ms));
        let medians = |times: &[Vec<f64>; 2]| times.each_ref().map(|times| median(times));
        let speed_ratio = |[times, of_lz4]: &[Vec<f64>; 2]| median_ratio(of_lz4, times);
        SwapOut {
            size_bytes,
            out_ms: medians(&swapped_out),
            in_ms: medians(&swapped_in),
            out_speed_ratio: speed_ratio(&swapped_out),
            in_speed_ratio: speed_ratio(&swapped_in),
        }
    }
}

/// What a codec does to pages, divided by what lz4 does to them.
pub(super) struct PerLz4 {
    pub(super) ratio: f64,
    pub(super) compression: f64,
    /// `None` if nothing was compressed.
    pub(super) decompression: Option<f64>,
}

impl ProgramsReport {
    /// Compares the codecs on a corpus.
    pub(super) fn per_lz4(&self, corpus: &str) -> Option<PerLz4> {
        self.all_per_lz4().find(|(row, _)| row.corpus == corpus).map(|(_, per_lz4)| per_lz4)
    }

    /// Returns the lowest figure of any program's own pages.
    pub(super) fn lowest_of_programs(&self, figure: fn(&PerLz4) -> f64) -> Option<f64> {
        let is_program = |row: &CodecRow| !["mixed", RANDOM, ALL, WORDS].contains(&row.corpus.as_str());
        let figures =
            self.all_per_lz4().filter(|(row, _)| is_program(row)).map(|(_, per_lz4)| figure(&per_lz4));
        figures.reduce(f64::min)
    }

    fn all_per_lz4(&self) -> impl Iterator<Item = (&CodecRow, PerLz4)> {
        self.codecs.iter().flat_map(|codecs| {
            let rows = codecs.rows.iter().filter(|row| row.codec != Kind::Lz4.name());
            rows.filter_map(|row| {
                let lz4 = codecs.row(Kind::Lz4.name(), &row.corpus)?;
                let (compression, decompression) = (row.compress_per_lz4, row.decompress_per_lz4);
                Some((row, PerLz4 { ratio: row.ratio / lz4.ratio, compression, decompression }))
            })
        })
    }
}

impl fmt::Display for ProgramsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(codecs) = &self.codecs {
            writeln!(f, "{codecs}")?;
        }
        if let Some(writes) = &self.writes {
            writeln!(f, "{writes}")?;
        }
        if let Some(SwapOut { size_bytes, out_ms, in_ms, out_speed_ratio, in_speed_ratio }) = self.swap_out {
            writeln!(
                f,
                "swap-out of {} of Python: {:.0} ms, with lz4 {:.0} ms, speed {out_speed_ratio:.2}; page by page in: {:.0} ms, with lz4 {:.0} ms, speed {in_speed_ratio:.2}\n",
                format_size(size_bytes),
                out_ms[0],
                out_ms[1],
                in_ms[0],
                in_ms[1],
            )?;
        }
        if let Some(parked) = &self.parked {
            writeln!(f, "{parked}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::harness::corpus::{self, Kind as CorpusKind};
    use crate::harness::to_json;
    use crate::targets::wanted::programs_targets;

    /// Runs all of it but swap on made-up programs, or without any.
    fn short(algorithm: &str, parts: &[(&'static str, CorpusKind)]) -> (ProgramsReport, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let mixed = dir.path().join("mixed.bin");
        corpus::build(CorpusKind::Mixed, 96).unwrap().save(&mixed).unwrap();
        let corpus = Source::File(mixed);
        let common = Common { corpus, duration: Duration::from_millis(2), repeat: 1, ..Common::default() };
        let options = ProgramsOptions {
            common: &common,
            pages: 0,
            parked_pages: 0,
            algorithm: algorithm.parse().unwrap(),
            programs: None,
            amounts: &block::Amounts::default(),
            dir: dir.path(),
        };
        let mut notes = Vec::new();
        if parts.is_empty() {
            return (run(&options, &mut notes).unwrap(), notes);
        }
        let part = |(name, kind): &(&'static str, CorpusKind)| (*name, corpus::build(*kind, 400).unwrap());
        let processes = Processes { parts: parts.iter().map(part).collect(), left_out: Vec::new() };
        let saved = save(&processes, &options).unwrap();
        (measure(&options, Some(&saved), &mut notes).unwrap(), notes)
    }

    #[test]
    fn every_figure_but_swap_is_there() {
        let parts = [(PYTHON, CorpusKind::Heap), ("other", CorpusKind::Text)];
        let (report, mut notes) = short("lz4hc", &parts);
        assert!(notes.iter().any(|note| note.contains("swap with lz4hc not measured")), "{notes:?}");
        let all = report.per_lz4("processes").unwrap();
        let lowest = report.lowest_of_programs(|program| program.ratio).unwrap();
        assert!(lowest >= 1.0 && all.ratio >= lowest && all.compression > 0.0, "{lowest} {}", all.ratio);
        let targets = programs_targets(&report, &mut notes);
        let missing: Vec<_> = targets.iter().filter(|target| target.measured.is_none()).collect();
        // An idle thread, and a kernel's zram, are not to be had everywhere.
        for target in &missing {
            let left_out = ["swap-out", "a parked", "/ kernel zram"];
            assert!(left_out.iter().any(|part| target.name.contains(part)), "{target:?}");
        }
        let [none_misjudged, others]: [Vec<_>; 2] = [true, false]
            .map(|is| targets.iter().filter(|target| target.name.ends_with("per cent") == is).collect());
        assert!(none_misjudged.iter().all(|target| target.measured == Some(0.0)), "{none_misjudged:?}");
        assert!(others.iter().all(|target| target.measured.is_none_or(|measured| measured > 0.0)));
        let text = report.to_string();
        for said in ["corpus other, ", "uzram device with lz4\n"] {
            assert!(text.contains(said), "{said}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
        assert_eq!(json["codecs"]["rows"][1]["codec"], "lz4hc");
    }

    #[test]
    fn what_is_not_there_is_left_out() {
        let (report, notes) = short("memory", &[("other", CorpusKind::Text)]);
        assert!(report.writes.is_some() && report.parked.is_none());
        assert!(notes.iter().any(|note| note.contains("python was left out")), "{notes:?}");
        let (report, notes) = short("lz4:8", &[]);
        assert!(report.per_lz4("mixed").unwrap().ratio <= 1.0 && report.per_lz4("processes").is_none());
        assert!(report.lowest_of_programs(|program| program.ratio).is_none());
        assert!(notes[0].contains("no pages of it are wanted"), "{notes:?}");
    }

    #[test]
    fn a_speed_above_one_is_faster_than_lz4() {
        let times = |out_ms, in_ms| SwapTimes {
            swap_out_ms: out_ms,
            fault_in_ms: in_ms,
            random_in_ms: in_ms,
            swapped_bytes: 1,
            cached_bytes: 0,
        };
        let rounds = [vec![times(10.0, 8.0), times(20.0, 8.0)], vec![times(20.0, 4.0), times(20.0, 4.0)]];
        let swap_out = SwapOut::new(1 << 20, &rounds);
        assert_eq!((swap_out.out_speed_ratio, swap_out.in_speed_ratio), (1.5, 0.5));
        assert_eq!((swap_out.out_ms, swap_out.in_ms), ([15.0, 20.0], [8.0, 4.0]));
        let report = ProgramsReport { swap_out: Some(swap_out), ..ProgramsReport::default() };
        assert!(
            report.to_string().contains("swap-out of 1 MiB of Python: 15 ms, with lz4 20 ms, speed 1.50")
        );
    }
}
