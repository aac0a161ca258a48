//! The pages that codecs are measured on: of each corpus some, evenly spread.

use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::harness::Options;
use crate::harness::corpus::{Corpus, Kind, Source, processes};

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
pub(super) fn load(
    sources: &[Source],
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Corpus)>> {
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
            Source::Built(Kind::Mixed, _) => {
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
