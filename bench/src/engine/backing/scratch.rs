//! Stores for this benchmark, each with a backing file in a folder that is removed when it is dropped.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use uzram::Result;
use uzram::backing::{Backing, FileBacking, FileOptions};
use uzram::codec::Algorithm;
use uzram::device::DEFAULT_CHAIN_SIZE;
use uzram::store::{BackingOptions, BackingStats, PolicyThread, Store, StoreBuilder, Writeback};
use uzram::units::PageNo;
use uzram::zsmalloc::huge_threshold;

use crate::engine::packed::Packed;
use crate::harness::corpus::{AlignedPage, Corpus};
use crate::harness::process::temporary;
use crate::harness::read_back;

/// Pages that are read when contents are checked.
const CHECKED_PAGES: usize = 4096;

/// The folder, and the common parts of the stores in it.
pub(super) struct Scratch<'a> {
    dir: TempDir,
    corpus: &'a Corpus,
    algorithm: &'a Algorithm,
}

impl<'a> Scratch<'a> {
    pub(super) fn new(dir: &Path, corpus: &'a Corpus, algorithm: &'a Algorithm) -> Result<Scratch<'a>> {
        Ok(Scratch { dir: temporary(dir)?, corpus, algorithm })
    }

    pub(super) fn mean_bytes(&self) -> Result<f64> {
        Ok(Packed::new(self.algorithm, huge_threshold(DEFAULT_CHAIN_SIZE), self.corpus)?.mean_bytes())
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Opens the file with that name and size; creates it if it does not exist.
    pub(super) fn file(&self, name: &str, size_bytes: u64) -> Result<Arc<FileBacking>> {
        let options = FileOptions { size_bytes: Some(size_bytes), ..FileOptions::new(self.path(name)) };
        FileBacking::open(&options).map(Arc::new)
    }

    /// Returns an empty store of so many pages without a memory limit, with its own file, if any.
    pub(super) fn store(&self, page_count: usize, backing: Option<Arc<FileBacking>>) -> Result<Pages<'a>> {
        let mut builder = StoreBuilder::new("bench", page_count as u64).algorithm(self.algorithm.clone());
        if let Some(backing) = backing {
            builder = builder.backing(BackingOptions::packed(Backing::Blocks(backing)));
        }
        let store = builder.build()?;
        Ok(Pages {
            policy_thread: None,
            store: Arc::new(store),
            corpus: self.corpus,
            contents: vec![None; page_count],
            buffer: Box::new(AlignedPage([0; _])),
        })
    }
}

/// A store, and which page of the corpus each of its pages holds. For use by one thread.
pub(super) struct Pages<'a> {
    /// Declared before the store, which it keeps alive.
    policy_thread: Option<PolicyThread>,
    store: Arc<Store>,
    corpus: &'a Corpus,
    contents: Vec<Option<u32>>,
    buffer: Box<AlignedPage>,
}

impl Pages<'_> {
    pub(super) fn page_count(&self) -> usize {
        self.contents.len()
    }

    pub(super) fn backing_stats(&self) -> BackingStats {
        self.store.backing_stats()
    }

    /// Limits its memory from now on, and starts the policy.
    pub(super) fn limit(&mut self, limit_pages: u64) -> Result<()> {
        if self.policy_thread.is_none() {
            self.policy_thread = Some(PolicyThread::start("bench", &self.store)?);
        }
        self.store.set_limit_pages(limit_pages);
        Ok(())
    }

    pub(super) fn compressed_bytes(&self) -> u64 {
        self.store.stats().compr_data_bytes
    }

    #[inline]
    pub(super) fn read(&mut self, page: u32) -> Result<()> {
        self.store.read(PageNo(page), &mut self.buffer.0)
    }

    #[inline]
    pub(super) fn write(&mut self, page: u32, corpus_page: u32) -> Result<()> {
        self.store.write(PageNo(page), self.corpus.page(corpus_page as usize))?;
        self.contents[page as usize] = Some(corpus_page);
        Ok(())
    }

    /// Stores a page of the corpus in each page.
    pub(super) fn fill(&mut self) -> Result<()> {
        (0..self.page_count() as u32).try_for_each(|page| self.write(page, page))
    }

    pub(super) fn shuffled(&self, seed: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.page_count() as u32).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        order
    }

    /// Writes back all pages that are in memory, and returns how many left it.
    pub(super) fn write_back(&self) -> Result<u64> {
        self.store.write_back(&Writeback::default())
    }

    /// Reads some pages: figures of a store that lost one mean nothing.
    pub(super) fn check(&mut self) -> Result<()> {
        for page in (0..self.page_count()).step_by(self.page_count().div_ceil(CHECKED_PAGES)) {
            self.read(page as u32)?;
            let wanted =
                self.contents[page].map_or(&[0; _], |corpus_page| self.corpus.page(corpus_page as usize));
            read_back(&self.buffer.0, wanted, || format!("page {page}"))?;
        }
        Ok(())
    }
}
