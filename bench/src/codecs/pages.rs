//! The pages that codecs are measured on: of each corpus some, evenly spread, one after another in memory.

use std::sync::atomic::AtomicBool;

use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use super::LARGEST_PAGE_BYTES;
use crate::harness::corpus::{Corpus, Kind, Source, processes};

/// Neighbours that stay together, so that larger pages are made of pages that belong together.
const GROUP_PAGES: usize = 16;

/// Pages of one corpus, none of them same-filled.
pub(super) struct Pages {
    /// The corpus's name.
    pub(super) name: String,
    bytes: Vec<u8>,
    /// The first page's place in `bytes`, at the start of a page of memory.
    start: usize,
}

impl Pages {
    /// Takes up to `most` pages of a corpus; whole pages of the largest size.
    ///
    /// # Errors
    /// `Invalid`: there are too few that are not same-filled.
    fn new(name: String, corpus: &Corpus, most: usize) -> Result<Pages> {
        let corpus = corpus.without_same_filled()?;
        let groups = corpus.page_count().div_ceil(GROUP_PAGES);
        let wanted = (most / GROUP_PAGES).clamp(1, groups);
        let mut bytes: Vec<u8> = Vec::with_capacity((wanted * GROUP_PAGES + 1) * PAGE_SIZE);
        let start = bytes.as_ptr().align_offset(PAGE_SIZE).min(PAGE_SIZE);
        bytes.resize(start, 0);
        for group in (0..wanted).map(|which| which * groups / wanted) {
            let first = group * GROUP_PAGES;
            let numbers = first..(first + GROUP_PAGES).min(corpus.page_count());
            numbers.for_each(|number| bytes.extend_from_slice(corpus.page(number)));
        }
        let len = (bytes.len() - start) / LARGEST_PAGE_BYTES * LARGEST_PAGE_BYTES;
        if len == 0 {
            let what = format!("the corpus {name} has fewer than 4 pages that are not same-filled");
            return Err(Error::invalid(what).with_setting("--corpus"));
        }
        bytes.truncate(start + len);
        Ok(Pages { name, bytes, start })
    }

    /// Returns the pages, one after another.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// Loads corpora, the `processes` one with each program's part; adds what is missing to `notes`.
///
/// # Errors
/// A corpus cannot be loaded, or has the name of another; if `processes` is the only one, none of its programs runs here.
pub(super) fn load(
    sources: &[Source],
    most: usize,
    stop: &AtomicBool,
    notes: &mut Vec<String>,
) -> Result<Vec<Pages>> {
    let mut all = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let name = source.name();
        if sources[..at].iter().any(|other| other.name() == name) {
            let what = format!("two corpora are called '{name}': give the files different names");
            return Err(Error::invalid(what).with_setting("--corpus"));
        }
        match source {
            Source::Processes(pages) => {
                let processes = match processes::build(*pages, stop) {
                    // The others can be measured all the same.
                    Err(error) if error.kind() == ErrorKind::Unsupported && sources.len() > 1 => {
                        notes.push(error.to_string());
                        continue;
                    }
                    processes => processes?,
                };
                all.push(Pages::new(name.clone(), &processes.whole()?, most)?);
                for (program, part) in &processes.parts {
                    all.push(Pages::new(format!("{name}: {program}"), part, most)?);
                }
                notes.extend(processes.left_out);
            }
            Source::Built(Kind::Mixed, _) => {
                all.push(Pages::new(name, &in_groups(&source.load_until(stop)?)?, most)?);
            }
            _ => all.push(Pages::new(name, &source.load_until(stop)?, most)?),
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
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn corpus(pages: usize) -> Corpus {
        let page = |number: usize| (0..PAGE_SIZE).map(move |at| if at < 8 { number as u8 } else { 255 });
        Corpus::from_bytes(&(0..pages).flat_map(page).collect::<Vec<u8>>()).unwrap()
    }

    fn firsts(bytes: &[u8]) -> Vec<u8> {
        bytes.chunks(PAGE_SIZE).map(|page| page[0]).collect()
    }

    #[test]
    fn groups_are_spread_and_whole() {
        let pages = Pages::new("p".into(), &corpus(200), 40).unwrap();
        assert_eq!(firsts(pages.bytes()), (0..16).chain(96..112).collect::<Vec<u8>>());
        assert_eq!(pages.bytes().as_ptr().align_offset(PAGE_SIZE), 0);
        let pages = Pages::new("p".into(), &corpus(23), 4096).unwrap();
        assert_eq!(firsts(pages.bytes()), (0..20).collect::<Vec<u8>>(), "whole pages of 16 KiB");
        assert!(Pages::new("p".into(), &corpus(3), 4096).is_err());
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
