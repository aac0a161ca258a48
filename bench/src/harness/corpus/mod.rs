//! Page corpora: the pages that tests and benchmarks compress, taken from this machine.
//!
//! Files are taken in the order of their paths, so a machine gives the same text and binary pages each time.
//! Heap pages contain addresses, which differ from run to run; all else about them is seeded. Contents differ
//! between machines: compare only measurements of one run.
//!
//! If a machine has too few files, they are repeated; if it has none, text is generated.

mod files;
mod heap;
pub mod processes;

use std::convert::Infallible;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::AtomicBool;

use uzram::units::{PAGE_SIZE, Page, same_word};
use uzram::{Error, ErrorKind, Result};

use super::process::runtime_dir;

/// The most pages of a corpus (16 GiB), so that a wrong file or option cannot exhaust memory.
pub const MAX_PAGES: usize = 1 << 22;

/// Pages of a built corpus by default: 64 MiB.
pub const DEFAULT_CORPUS_PAGES: usize = 64 << 8;

/// The source of the pages.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file of pages.
    File(PathBuf),
    /// Built from this machine's files and heap, with this many pages.
    Built(Kind, usize),
    /// Built from the memory of programs, with up to this many pages.
    Processes(usize),
}

impl Source {
    /// Loads or builds the pages.
    pub fn load(&self) -> Result<Corpus> {
        self.load_until(&AtomicBool::new(false))
    }

    /// The same, ended early by setting `stop`: starting programs takes a while.
    pub fn load_until(&self, stop: &AtomicBool) -> Result<Corpus> {
        match self {
            Source::File(path) => load(path),
            Source::Built(kind, pages) => build(*kind, *pages),
            Source::Processes(pages) => processes::build(*pages, false, stop)?.whole(),
        }
    }

    /// Returns the name by which reports call it: of a file, its own without folders and suffix.
    pub fn name(&self) -> String {
        match self {
            Source::File(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            Source::Built(kind, _) => kind.name().to_owned(),
            Source::Processes(_) => "processes".to_owned(),
        }
    }
}

impl FromStr for Source {
    type Err = Infallible;

    /// The name of a corpus that is built, with [`DEFAULT_CORPUS_PAGES`], or else the path of a file.
    fn from_str(text: &str) -> std::result::Result<Self, Infallible> {
        Ok(match Kind::ALL.into_iter().find(|kind| kind.name() == text) {
            Some(kind) => Source::Built(kind, DEFAULT_CORPUS_PAGES),
            None if text == "processes" => Source::Processes(DEFAULT_CORPUS_PAGES),
            None => Source::File(text.into()),
        })
    }
}

/// The kind of data in the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sources, headers, JSON, Markdown.
    Text,
    /// Shared objects and programs.
    Binary,
    /// The live heap of this process.
    Heap,
    /// The other three, page by page in turn.
    Mixed,
}

impl Kind {
    /// Every kind, in the order they are written and listed.
    pub const ALL: [Kind; 4] = [Kind::Text, Kind::Binary, Kind::Heap, Kind::Mixed];

    /// Returns its name, which is also the stem of its file.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Text => "text",
            Kind::Binary => "binary",
            Kind::Heap => "heap",
            Kind::Mixed => "mixed",
        }
    }
}

/// A page aligned in memory to its size, as O_DIRECT requires of buffers.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct AlignedPage(pub Page);

/// A sequence of pages, at least one.
pub struct Corpus {
    pages: Vec<AlignedPage>,
}

impl Corpus {
    /// Makes a corpus of the whole pages in `bytes`; a partial page at the end is left out.
    pub fn from_bytes(bytes: &[u8]) -> Result<Corpus> {
        let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
        Corpus::new(pages.iter().map(|page| AlignedPage(*page)).collect())
    }

    fn new(pages: Vec<AlignedPage>) -> Result<Corpus> {
        if pages.is_empty() {
            return Err(Error::invalid("the corpus is empty: it needs at least one page of 4096 bytes")
                .with_setting("--corpus"));
        }
        Ok(Corpus { pages })
    }

    /// Returns the number of pages.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Returns page `i`, modulo the number of pages.
    #[inline]
    pub fn page(&self, i: usize) -> &Page {
        &self.pages[i % self.pages.len()].0
    }

    /// Returns every page, in order.
    pub fn pages(&self) -> impl Iterator<Item = &Page> {
        self.pages.iter().map(|page| &page.0)
    }

    /// Returns the corpus without its same-filled pages (all machine words equal).
    pub fn without_same_filled(&self) -> Result<Corpus> {
        let pages: Vec<_> = self.pages.iter().filter(|page| same_word(&page.0).is_none()).cloned().collect();
        if pages.is_empty() {
            return Err(Error::invalid("every page of the corpus is same-filled; a codec has nothing to do")
                .with_setting("--corpus"));
        }
        Corpus::new(pages)
    }

    /// Writes the pages to a file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let write = || {
            let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
            self.pages().try_for_each(|page| file.write_all(page))?;
            file.flush()
        };
        write().map_err(|error| io_error("cannot write the corpus", path, &error))
    }
}

/// A corpus in a file: that of its source, or a temporary one.
pub struct Saved {
    path: PathBuf,
    _dir: Option<tempfile::TempDir>,
}

impl Saved {
    /// Saves a corpus that is not in a file already.
    pub fn of(source: &Source, stop: &AtomicBool) -> Result<Saved> {
        match source {
            Source::File(path) => Ok(Saved { path: path.clone(), _dir: None }),
            _ => Saved::temporary(&source.name(), &source.load_until(stop)?),
        }
    }

    /// The same for a corpus that was loaded.
    pub fn new(source: &Source, corpus: &Corpus) -> Result<Saved> {
        if let Source::File(path) = source {
            return Ok(Saved { path: path.clone(), _dir: None });
        }
        Saved::temporary(&source.name(), corpus)
    }

    /// Saves a corpus in a temporary file, by which reports call it so.
    pub fn temporary(name: &str, corpus: &Corpus) -> Result<Saved> {
        let dir = runtime_dir()?;
        let path = dir.path().join(format!("{name}.bin"));
        corpus.save(&path)?;
        Ok(Saved { path, _dir: Some(dir) })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Fails unless the bytes read are those written: figures of a target that returns wrong bytes mean nothing.
/// `what` names the target.
#[inline]
pub fn read_back(found: &[u8], written: &[u8], what: impl FnOnce() -> String) -> Result<()> {
    match found == written {
        true => Ok(()),
        false => {
            let what = format!("{} does not read back as it was written", what());
            Err(Error::new(ErrorKind::Corrupt, what))
        }
    }
}

/// Builds a corpus of `pages` pages.
pub fn build(kind: Kind, pages: usize) -> Result<Corpus> {
    if pages == 0 || pages > MAX_PAGES {
        return Err(Error::invalid(format!("a corpus has 1 to {MAX_PAGES} pages, not {pages}")));
    }
    let bytes = match kind {
        Kind::Text => files::text(pages * PAGE_SIZE),
        Kind::Binary => files::binary(pages * PAGE_SIZE),
        Kind::Heap => heap::live_pages(pages),
        Kind::Mixed => {
            let each = pages.div_ceil(3);
            let heap = heap::live_pages(each);
            interleave(&[files::text(each * PAGE_SIZE), files::binary(each * PAGE_SIZE), heap], pages)
        }
    };
    Corpus::from_bytes(&bytes)
}

/// Returns `pages` pages taken from the parts in turn.
fn interleave(parts: &[Vec<u8>; 3], pages: usize) -> Vec<u8> {
    let mut mixed = Vec::with_capacity(pages * PAGE_SIZE);
    for i in 0..pages {
        let start = i / parts.len() * PAGE_SIZE;
        mixed.extend_from_slice(&parts[i % parts.len()][start..start + PAGE_SIZE]);
    }
    mixed
}

/// Reads a corpus of whole pages from a file; a partial page at the end is left out.
pub fn load(path: &Path) -> Result<Corpus> {
    let failed = |error: &std::io::Error| io_error("cannot read the corpus", path, error);
    let mut file = File::open(path).map_err(|error| failed(&error))?;
    let metadata = file.metadata().map_err(|error| failed(&error))?;
    let page_count = metadata.len() / PAGE_SIZE as u64;
    if !metadata.is_file() || page_count == 0 || page_count > MAX_PAGES as u64 {
        return Err(Error::invalid(format!(
            "'{}' is no corpus: it must be a file of 1 to {MAX_PAGES} pages of 4096 bytes",
            path.display()
        ))
        .with_setting("--corpus"));
    }
    let mut pages = Vec::with_capacity(page_count as usize);
    let mut page = [0; PAGE_SIZE];
    for _ in 0..page_count {
        file.read_exact(&mut page).map_err(|error| failed(&error))?;
        pages.push(AlignedPage(page));
    }
    Corpus::new(pages)
}

fn io_error(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{what} '{}': {error}", path.display()))
}

#[cfg(test)]
mod tests;
