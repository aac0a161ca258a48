//! A client of a block device that is never idle: one thread reads and writes random pages in turn, past the
//! page cache, and notes how long it went without an answer. It writes what each page holds already, and
//! checks what it reads.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use uzram::units::{PAGE_SIZE, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::block::PATIENCE;
use crate::harness::corpus::{AlignedPage, Corpus};
use crate::harness::process::POLL;
use crate::harness::{go_on, io_error, joined, read_back};

const FILL_PAGES: usize = 256;
/// Answers after an event, by which its gap is over.
const ANSWERS_AFTER: u64 = 32;

/// A disk, and the pages it holds: page `i` of the corpus, which is repeated, in its page `i`.
pub(super) struct Disk<'a> {
    pub(super) path: &'a Path,
    pub(super) page_count: usize,
    pub(super) corpus: &'a Corpus,
    pub(super) stop: &'a AtomicBool,
}

impl Disk<'_> {
    fn open(&self) -> Result<File> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        let opened = OpenOptions::new().read(true).write(true).custom_flags(direct).open(self.path);
        opened.map_err(|error| io_error(self.path, error))
    }

    pub(super) fn fill(&self) -> Result<()> {
        let file = self.open()?;
        for first in (0..self.page_count).step_by(FILL_PAGES) {
            go_on(self.stop)?;
            let pages = first..self.page_count.min(first + FILL_PAGES);
            let parts: Vec<_> = pages.clone().map(|page| IoSlice::new(self.corpus.page(page))).collect();
            let written = rustix::io::pwritev(&file, &parts, pages_to_bytes(first as u64));
            let written = written.map_err(|error| io_error(self.path, error))?;
            if written != pages.len() * PAGE_SIZE {
                let what =
                    format!("{}: wrote {written} bytes of {}", self.path.display(), pages.len() * PAGE_SIZE);
                return Err(Error::new(ErrorKind::Io, what));
            }
        }
        Ok(())
    }
}

/// What a client has seen; see the [module's documentation](self).
#[derive(Default)]
pub(super) struct Client {
    ends: AtomicBool,
    /// Whether it has ended, by an error.
    failed: AtomicBool,
    answers: AtomicU64,
    longest_ns: AtomicU64,
}

/// Runs a client of a disk while `disturb` runs.
pub(super) fn used_during<T>(
    disk: &Disk<'_>,
    seed: u64,
    disturb: impl FnOnce(&Client) -> Result<T>,
) -> Result<T> {
    let client = Client::default();
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, || {
            let used = client.run(disk, seed);
            client.failed.store(used.is_err(), Ordering::Relaxed);
            used
        });
        let thread = thread.map_err(|error| io_error(disk.path, error))?;
        let disturbed = client.wait_for_answers(disk.stop).and_then(|()| disturb(&client));
        client.ends.store(true, Ordering::Relaxed);
        joined(thread)?;
        disturbed
    })
}

impl Client {
    fn run(&self, disk: &Disk<'_>, seed: u64) -> Result<()> {
        let file = disk.open()?;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut found = AlignedPage([0; PAGE_SIZE]);
        let mut last = Instant::now();
        while !self.ends.load(Ordering::Relaxed) {
            let page = random.usize(..disk.page_count);
            let (contents, offset) = (disk.corpus.page(page), pages_to_bytes(page as u64));
            if self.answers.load(Ordering::Relaxed).is_multiple_of(2) {
                file.read_exact_at(&mut found.0, offset).map_err(|error| io_error(disk.path, error))?;
            } else {
                file.write_all_at(contents, offset).map_err(|error| io_error(disk.path, error))?;
                found.0 = *contents;
            }
            let now = Instant::now();
            self.longest_ns.fetch_max((now - last).as_nanos() as u64, Ordering::Relaxed);
            self.answers.fetch_add(1, Ordering::Release);
            last = now;
            read_back(&found.0, contents, || format!("page {page} of {}", disk.path.display()))?;
        }
        Ok(())
    }

    pub(super) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Acquire)
    }

    /// Returns the longest gap between two answers while `event` happens, in ms.
    pub(super) fn longest_gap_ms(
        &self,
        stop: &AtomicBool,
        event: impl FnOnce() -> Result<()>,
    ) -> Result<f64> {
        self.longest_ns.store(0, Ordering::Relaxed);
        event()?;
        self.wait_for_answers(stop)?;
        let longest = Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed));
        Ok(longest.as_secs_f64() * 1e3)
    }

    fn wait_for_answers(&self, stop: &AtomicBool) -> Result<()> {
        let (before, deadline) = (self.answers(), Instant::now() + PATIENCE);
        while self.answers() < before + ANSWERS_AFTER {
            go_on(stop)?;
            if self.failed.load(Ordering::Relaxed) || Instant::now() > deadline {
                return Err(Error::new(ErrorKind::Io, "the block device answers no more"));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::corpus::{Kind, build};

    const PAGES: usize = 600;

    /// Runs `check` with a file in place of a block device.
    fn with_disk(check: impl FnOnce(&Disk<'_>)) {
        // A folder on a disk, as not every file system in memory knows direct I/O.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(pages_to_bytes(PAGES as u64)).unwrap();
        let corpus = build(Kind::Text, 7).unwrap();
        let stop = AtomicBool::new(false);
        check(&Disk { path: &path, page_count: PAGES, corpus: &corpus, stop: &stop });
    }

    #[test]
    fn the_longest_gap_is_that_of_the_event() {
        with_disk(|disk| {
            disk.fill().unwrap();
            let file = std::fs::read(disk.path).unwrap();
            assert!(file.chunks(PAGE_SIZE).zip(0..).all(|(page, number)| page == disk.corpus.page(number)));
            let waits = Duration::from_millis(50);
            let gap = used_during(disk, 1, |client| {
                client.longest_gap_ms(disk.stop, || {
                    thread::sleep(waits);
                    // As if an answer had taken so long.
                    client.longest_ns.fetch_max(waits.as_nanos() as u64, Ordering::Relaxed);
                    Ok(())
                })
            });
            assert!(gap.unwrap() >= 50.0);
        });
    }

    #[test]
    fn a_wrong_page_and_a_stop_end_it() {
        with_disk(|disk| {
            let error =
                used_during(disk, 1, |client| client.longest_gap_ms(disk.stop, || Ok(()))).unwrap_err();
            assert!(error.to_string().contains("does not read back"), "{error}");
            disk.fill().unwrap();
            disk.stop.store(true, Ordering::Relaxed);
            assert_eq!(used_during(disk, 1, |_| Ok(())).unwrap_err().to_string(), "interrupted");
            assert_eq!(disk.fill().unwrap_err().to_string(), "interrupted");
        });
    }
}
