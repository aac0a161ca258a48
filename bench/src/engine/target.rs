//! What is measured: a [`Target`] whose threads each take a [`Worker`].

use uzram::units::{Page, bytes_to_pages, format_size, pages_to_bytes};
use uzram::{Error, Result};

use crate::harness::corpus::{self, AlignedPage, Corpus};
use crate::harness::read_back;

/// One thing that is measured. Its threads each take a worker.
pub trait Target: Sync {
    /// Returns the name in the report.
    fn name(&self) -> &'static str;

    /// Stores corpus page p in page p.
    fn fill(&self, corpus: &Corpus) -> Result<()>;

    /// Returns a worker, by which one thread runs its operations.
    fn worker(&self) -> Result<Box<dyn Worker + '_>>;
}

/// One thread's access to a target. Every target is called through this, at the same cost.
pub trait Worker {
    /// Reads a page into a buffer of the worker.
    fn read(&mut self, page: usize) -> Result<&Page>;

    /// Stores `contents`, a page of a corpus and thus aligned, in a page.
    fn write(&mut self, page: usize, contents: &Page) -> Result<()>;
}

/// A [`Target`] whose threads read and write pages, each for itself.
pub(super) trait Disk: Sync {
    fn name(&self) -> &'static str;

    fn page_count(&self) -> usize;

    fn read(&self, page: usize, buffer: &mut Page) -> Result<()>;

    fn write(&self, page: usize, contents: &Page) -> Result<()>;
}

struct DiskWorker<'a, D> {
    disk: &'a D,
    buffer: Box<AlignedPage>,
}

impl<D: Disk> Worker for DiskWorker<'_, D> {
    fn read(&mut self, page: usize) -> Result<&Page> {
        self.disk.read(page, &mut self.buffer.0)?;
        Ok(&self.buffer.0)
    }

    fn write(&mut self, page: usize, contents: &Page) -> Result<()> {
        self.disk.write(page, contents)
    }
}

impl<D: Disk> Target for D {
    fn name(&self) -> &'static str {
        Disk::name(self)
    }

    fn fill(&self, corpus: &Corpus) -> Result<()> {
        (0..self.page_count()).try_for_each(|page| self.write(page, corpus.page(page)))
    }

    fn worker(&self) -> Result<Box<dyn Worker + '_>> {
        Ok(Box::new(DiskWorker { disk: self, buffer: Box::new(AlignedPage([0; _])) }))
    }
}

/// Reads some pages of a target that was filled with a corpus.
pub fn verify(target: &dyn Target, corpus: &Corpus, page_count: usize) -> Result<()> {
    const CHECKED_PAGES: usize = 4096;
    let pages = (0..page_count).step_by(page_count.div_ceil(CHECKED_PAGES));
    verify_pages(target, corpus, pages.map(|page| (page, page)))
}

/// Reads pages of a target, each given with the page of the corpus that it should hold.
pub(super) fn verify_pages(
    target: &dyn Target,
    corpus: &Corpus,
    mut pages: impl Iterator<Item = (usize, usize)>,
) -> Result<()> {
    let mut worker = target.worker()?;
    pages.try_for_each(|(page, corpus_page)| {
        let found = worker.read(page)?;
        read_back(found, corpus.page(corpus_page), || format!("{}: page {page}", target.name()))
    })
}

/// Pages of what is measured, at least one and no more than a corpus may have.
pub(super) fn checked_page_count(size_bytes: u64) -> Result<usize> {
    let pages = bytes_to_pages(size_bytes);
    if pages == 0 || pages > corpus::MAX_PAGES as u64 {
        let most = format_size(pages_to_bytes(corpus::MAX_PAGES as u64));
        return Err(Error::invalid(format!("the device must have one page at least and {most} at most"))
            .with_setting("--size"));
    }
    Ok(pages as usize)
}
