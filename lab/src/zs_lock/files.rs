//! A minimal file system: a disk is divided into places for one file each, and every thread has its own equal
//! share of them.

use std::sync::atomic::Ordering;

use uzram::Result;
use uzram::device::OpenDevice;
use uzram::units::{PAGE_SIZE, Page, pages_to_bytes};

use crate::experiment::Plan;
use crate::experiment::clock::{Done, clocked};
use uzram_bench::harness::corpus::{AlignedPage, Corpus};
use uzram_bench::harness::{Gate, read_back, run_together};

/// Pages of a file of 100 000 bytes.
pub(super) const FILE_PAGES: usize = 100_000usize.div_ceil(PAGE_SIZE);
/// The disk's places for files: five for each of the most threads.
const PLACES: usize = 5 * 256;
pub(super) const DISK_BYTES: u64 = (PLACES * FILE_PAGES * PAGE_SIZE) as u64;
/// One place in this many is left free.
const ONE_FREE_OF: usize = 5;

/// The files of a disk: for each place, the corpus page that the file's first page is a copy of.
#[derive(Default)]
pub(super) struct Files(Vec<Option<usize>>);

impl Files {
    /// Fills a disk to 80 %, evenly.
    pub(super) fn fill(&mut self, disk: &OpenDevice, corpus: &Corpus) -> Result<()> {
        let source = |place: usize| (!place.is_multiple_of(ONE_FREE_OF)).then_some(place * FILE_PAGES);
        self.0 = (0..PLACES).map(source).collect();
        for (place, source) in self.0.iter().enumerate() {
            match source {
                Some(source) => write(disk, corpus, place, *source)?,
                None => delete(disk, place)?,
            }
        }
        Ok(())
    }

    /// Runs threads that write files of `plan.work` pages or a few more, and read and delete as many. Returns
    /// for each thread when it ran and how many pages it wrote.
    pub(super) fn use_by_threads(
        &mut self,
        disk: &OpenDevice,
        corpus: &Corpus,
        plan: &Plan<'_>,
    ) -> Result<Vec<Done>> {
        let files_each = plan.work.div_ceil((plan.jobs * FILE_PAGES) as u64);
        let mut rest = self.0.as_mut_slice();
        let mut parts = Vec::new();
        for thread in 0..plan.jobs {
            let start = PLACES - rest.len();
            let places = PLACES * (thread + 1) / plan.jobs - start;
            let (mine, others) = rest.split_at_mut(places);
            let rng = fastrand::Rng::with_seed(plan.seed << 32 | thread as u64);
            parts.push(DiskPart::new(disk, corpus, start, mine, rng));
            rest = others;
        }
        run_together(parts.into_iter().map(|mut part| {
            move |gate: &Gate| {
                gate.pass();
                clocked(&mut || part.use_files(files_each, plan))
            }
        }))
    }
}

struct DiskPart<'a> {
    disk: &'a OpenDevice,
    corpus: &'a Corpus,
    /// Its first place.
    start: usize,
    places: &'a mut [Option<usize>],
    /// Of these, those with a file and those without.
    used: Vec<usize>,
    free: Vec<usize>,
    rng: fastrand::Rng,
    buffer: Box<AlignedPage>,
}

impl<'a> DiskPart<'a> {
    fn new(
        disk: &'a OpenDevice,
        corpus: &'a Corpus,
        start: usize,
        places: &'a mut [Option<usize>],
        rng: fastrand::Rng,
    ) -> Self {
        let (used, free) = (0..places.len()).partition(|place| places[*place].is_some());
        DiskPart { disk, corpus, start, places, used, free, rng, buffer: Box::new(AlignedPage([0; _])) }
    }

    /// Writes `files` files, and for each reads one and deletes one; returns the number of pages written.
    fn use_files(&mut self, files: u64, plan: &Plan<'_>) -> Result<u64> {
        // A run with another number of threads had other borders, so this part may be too full.
        let most = (self.places.len() - self.places.len().div_ceil(ONE_FREE_OF)).max(1);
        let mut pages = 0;
        for _ in 0..files {
            while self.used.len() >= most {
                self.delete_one()?;
            }
            self.write_one()?;
            pages += FILE_PAGES as u64;
            self.read_one()?;
            if plan.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(pages)
    }

    fn delete_one(&mut self) -> Result<()> {
        let place = self.used.swap_remove(self.rng.usize(..self.used.len()));
        self.free.push(place);
        self.places[place] = None;
        delete(self.disk, self.start + place)
    }

    fn write_one(&mut self) -> Result<()> {
        let place = self.free.swap_remove(self.rng.usize(..self.free.len()));
        let source = self.rng.usize(..self.corpus.page_count());
        write(self.disk, self.corpus, self.start + place, source)?;
        self.used.push(place);
        self.places[place] = Some(source);
        Ok(())
    }

    /// Reads a random file, and checks one of its pages.
    fn read_one(&mut self) -> Result<()> {
        let place = self.used[self.rng.usize(..self.used.len())];
        let source = self.places[place].unwrap_or_default();
        let checked = self.rng.usize(..FILE_PAGES);
        for (page, offset) in offsets(self.start + place) {
            self.disk.read(offset, &mut self.buffer.0)?;
            if page == checked {
                let written = self.corpus.page(source + page);
                let at = self.start + place;
                read_back(&self.buffer.0, written, || format!("page {page} of the file at {at}"))?;
            }
        }
        Ok(())
    }
}

/// Returns the pages of the file at a place, and their offsets on the disk.
fn offsets(place: usize) -> impl Iterator<Item = (usize, u64)> {
    (0..FILE_PAGES).map(move |page| (page, pages_to_bytes((place * FILE_PAGES + page) as u64)))
}

fn write(disk: &OpenDevice, corpus: &Corpus, place: usize, source: usize) -> Result<()> {
    offsets(place).try_for_each(|(page, offset)| {
        let contents: &Page = corpus.page(source + page);
        disk.write(offset, contents)
    })
}

fn delete(disk: &OpenDevice, place: usize) -> Result<()> {
    disk.discard(pages_to_bytes((place * FILE_PAGES) as u64), pages_to_bytes(FILE_PAGES as u64))
}
