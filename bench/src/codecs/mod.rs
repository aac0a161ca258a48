//! `uzram bench --codecs`: what each codec makes of pages of each corpus, and how fast.
//!
//! Rows are codecs, at some levels. Of each corpus some pages are taken, evenly spread; `measure` times the
//! codecs.

mod measure;

use uzram::codec::{Algorithm, Kind};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::harness::corpus::{self, Corpus, processes};
use crate::harness::{DEFAULT_CORPUS_PAGES, Options, Report, Source};
use measure::Variant;

/// The levels that are measured besides the default of each kind. The kinds themselves are the engine's.
const LEVELS: [&str; 7] = ["lz4:2", "lz4:8", "lz4hc:4", "zstd:-5", "zstd:3", "zstd:9", "deflate:1"];
pub(crate) const ROUNDS: usize = 5;

/// Returns the corpora that are measured by default.
pub fn default_corpora() -> Vec<Source> {
    let mixed = Source::Built(corpus::Kind::Mixed, DEFAULT_CORPUS_PAGES);
    vec![mixed, Source::Processes(DEFAULT_CORPUS_PAGES)]
}

/// Returns the codecs that are measured by default: each kind of the engine, and further levels of it.
pub fn default_algorithms() -> Result<Vec<Algorithm>> {
    let levels = LEVELS.iter().map(|text| text.parse()).collect::<Result<Vec<Algorithm>>>()?;
    let of_kind = |kind: Kind| {
        let more = levels.iter().filter(move |algorithm| algorithm.kind() == kind).cloned();
        std::iter::once(Algorithm::from(kind)).chain(more)
    };
    Ok(Kind::ALL.into_iter().flat_map(of_kind).collect())
}

pub(crate) fn table(corpus: &str) -> String {
    format!("codecs on {corpus}")
}

/// Measures codecs on corpora, in the order of the report. All are compared with lz4, which must be one of
/// them.
pub fn run(options: &Options, corpora: &[Source], algorithms: &[Algorithm]) -> Result<Report> {
    options.check(&[])?;
    let (rounds, stop, lz4) = (options.rounds(ROUNDS), &options.stop, Algorithm::from(Kind::Lz4));
    let mut report = Report::default();
    for (name, pages) in load(corpora, options, &mut report.notes)? {
        let mut variants = algorithms.iter().map(Variant::new).collect::<Result<Vec<_>>>()?;
        let stored = variants.iter_mut().map(|variant| variant.store(&pages, stop));
        let stored = stored.collect::<Result<Vec<_>>>()?;
        measure::measure(&mut variants, &pages, rounds, options.duration, stop)?;
        options.go_on()?;
        let bytes = (pages.page_count() * PAGE_SIZE) as f64;
        let yardstick = variants.iter().find(|variant| variant.algorithm == lz4).map(Variant::speeds);
        let [lz4_compress, lz4_decompress] = yardstick.unwrap_or([f64::NAN; 2]);
        for (variant, stored_bytes) in variants.iter().zip(stored) {
            let [compress, decompress] = variant.speeds();
            let cells = [
                ("ratio", bytes / stored_bytes as f64),
                ("compress MB/s", compress),
                ("compress × lz4", compress / lz4_compress),
                ("decompress MB/s", decompress),
                ("decompress × lz4", decompress / lz4_decompress),
                ("KiB a CPU", variant.state_bytes().div_ceil(1024) as f64),
            ];
            report.row(&table(&name), &variant.algorithm.to_string(), &cells);
        }
    }
    report.note(format!(
        "{rounds} rounds of {:.2} s for each corpus, in which all codecs code the same pages, 64 at a time, in turn; speeds \
         are by the sums of the medians of CPU time for these 64",
        options.duration.as_secs_f64()
    ));
    report.note(
        "same-filled pages are left out; pages that do not get smaller count as they are, and are not \
         decompressed",
    );
    Ok(report)
}

/// Neighbours that stay together.
const GROUP_PAGES: usize = 16;

/// Takes up to `most` pages of a corpus, none of them same-filled.
fn some(corpus: &Corpus, most: usize) -> Result<Corpus> {
    let corpus = corpus.without_same_filled()?;
    let groups = corpus.page_count().div_ceil(GROUP_PAGES);
    let wanted = (most / GROUP_PAGES).clamp(1, groups);
    let mut bytes: Vec<u8> = Vec::with_capacity(wanted * GROUP_PAGES * PAGE_SIZE);
    for group in (0..wanted).map(|which| which * groups / wanted) {
        let first = group * GROUP_PAGES;
        let numbers = first..(first + GROUP_PAGES).min(corpus.page_count());
        numbers.for_each(|number| bytes.extend_from_slice(corpus.page(number)));
    }
    Corpus::from_bytes(&bytes)
}

/// Loads corpora, each with its name, the `processes` one with each program's part; adds what is missing to
/// `notes`.
fn load(sources: &[Source], options: &Options, notes: &mut Vec<String>) -> Result<Vec<(String, Corpus)>> {
    let (most, stop) = (options.amount(4096, 64), &options.stop);
    let mut all = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let name = source.name();
        if sources[..at].iter().any(|other| other.name() == name) {
            let what = format!("two corpora are called '{name}': give the files different names");
            return Err(Error::invalid(what).with_setting("--corpus"));
        }
        match source {
            Source::Processes(pages) => {
                let processes = match processes::build(*pages, options.small, stop) {
                    // The others can be measured all the same.
                    Err(error) if error.kind() == ErrorKind::Unsupported && sources.len() > 1 => {
                        notes.push(error.to_string());
                        continue;
                    }
                    processes => processes?,
                };
                all.push((name.clone(), some(&processes.whole()?, most)?));
                for (program, part) in &processes.parts {
                    all.push((format!("{name}: {program}"), some(part, most)?));
                }
                notes.extend(processes.left_out);
            }
            Source::Built(corpus::Kind::Mixed, _) => {
                all.push((name, some(&in_groups(&source.load_until(stop)?)?, most)?));
            }
            _ => all.push((name, some(&source.load_until(stop)?, most)?)),
        }
    }
    Ok(all)
}

/// Returns the pages of a mixed corpus, whose three kinds are in turn page by page, in turn group by group.
fn in_groups(mixed: &Corpus) -> Result<Corpus> {
    const KINDS: usize = 3;
    let count = mixed.page_count();
    let chunks = (0..count).step_by(KINDS * GROUP_PAGES);
    let order = chunks.flat_map(|first| {
        (0..KINDS).flat_map(move |kind| (0..GROUP_PAGES).map(move |page| first + page * KINDS + kind))
    });
    let bytes: Vec<u8> = order.filter(|page| *page < count).flat_map(|page| *mixed.page(page)).collect();
    Corpus::from_bytes(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_measured_at_several_levels() {
        let algorithms = default_algorithms().unwrap();
        assert_eq!(algorithms.len(), Kind::ALL.len() + LEVELS.len());
        let report = run(&Options::tiny(96), &[Options::tiny(96).corpus], &algorithms).unwrap();
        for algorithm in &algorithms {
            let of = |column| report.get("codecs on mixed", &algorithm.to_string(), column).unwrap();
            assert!(of("ratio") > 1.0, "{report}");
            assert!(of("compress MB/s") > 0.0 && of("decompress × lz4") > 0.0, "{report}");
        }
        assert_eq!(report.get("codecs on mixed", "lz4", "compress × lz4"), Some(1.0));
    }

    #[test]
    fn what_does_not_compress_counts_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("noise.bin");
        let mut rng = fastrand::Rng::with_seed(9);
        std::fs::write(&path, (0..20 * PAGE_SIZE).map(|_| rng.u8(..)).collect::<Vec<_>>()).unwrap();
        let report = run(&Options::tiny(1), &[Source::File(path)], &[Kind::Lz4.into()]).unwrap();
        let of = |column| report.get("codecs on noise", "lz4", column);
        assert_eq!([of("ratio"), of("decompress MB/s")], [Some(1.0), None]);
    }

    fn corpus(pages: usize) -> Corpus {
        let page = |number: usize| (0..PAGE_SIZE).map(move |at| if at < 8 { number as u8 } else { 255 });
        Corpus::from_bytes(&(0..pages).flat_map(page).collect::<Vec<u8>>()).unwrap()
    }

    #[test]
    fn groups_are_spread() {
        let some = some(&corpus(200), 40).unwrap();
        let firsts: Vec<u8> = some.pages().map(|page| page[0]).collect();
        assert_eq!(firsts, (0..16).chain(96..112).collect::<Vec<u8>>());
    }

    #[test]
    fn pages_of_a_kind_come_together() {
        let grouped = in_groups(&corpus(100)).unwrap();
        assert_eq!(grouped.page_count(), 100);
        let numbers: Vec<u8> = grouped.pages().map(|page| page[0]).collect();
        assert_eq!(numbers[..4], [0, 3, 6, 9]);
        assert_eq!(numbers[16..20], [1, 4, 7, 10]);
        assert_eq!(numbers[96..], [96, 99, 97, 98]);
    }
}
