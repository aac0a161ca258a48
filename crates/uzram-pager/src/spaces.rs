//! Which pages of a pager are mapped: runs, first fit.
//!
//! Behind each run a unit stays free, so that nothing that begins in one region reaches into the next.

use uzram::units::{PAGE_SIZE, bytes_to_pages};
use uzram::{Error, ErrorKind, Result};

use crate::trap::Run;

pub(crate) struct Spaces {
    /// In ascending order.
    runs: Vec<Run>,
    pages: u64,
    unit_pages: u64,
}

impl Spaces {
    pub(crate) fn new(pages: u64, unit_pages: u64) -> Spaces {
        Spaces { runs: Vec::new(), pages, unit_pages }
    }

    /// Takes a run of whole units for so many bytes.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn take(&mut self, len: usize) -> Result<Run> {
        let full = || {
            let what = "the pager has no address space for a region of this size";
            Error::new(ErrorKind::NoSpace, what).with_setting("capacity")
        };
        let len = len.checked_next_multiple_of(self.unit_pages as usize * PAGE_SIZE).ok_or_else(full)?;
        let pages = bytes_to_pages(len as u64);
        let mut first = 0;
        let fits = |first: u64, end: u64| first + pages + self.unit_pages <= end;
        let mut at = 0;
        while at < self.runs.len() && !fits(first, self.runs[at].first) {
            first = self.runs[at].first + self.runs[at].pages as u64 + self.unit_pages;
            at += 1;
        }
        if at == self.runs.len() && !fits(first, self.pages) {
            return Err(full());
        }
        let run = Run { first, pages: pages as usize };
        self.runs.insert(at, run);
        Ok(run)
    }

    /// Gives a run back.
    pub(crate) fn give_back(&mut self, run: Run) {
        self.runs.retain(|other| *other != run);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn regions_do_not_touch_and_fit_into_gaps() {
        let mut spaces = Spaces::new(100, 1);
        let runs: Vec<Run> = [10, 20, 30].map(|pages| spaces.take(pages * PAGE_SIZE).unwrap()).into();
        assert_eq!(runs.iter().map(|run| run.first).collect::<Vec<_>>(), [0, 11, 32]);
        spaces.give_back(runs[1]);
        assert!(spaces.take(37 * PAGE_SIZE).is_err(), "36 are left at the end");
        assert_eq!(spaces.take(19 * PAGE_SIZE + 1).unwrap(), Run { first: 11, pages: 20 });
        assert_eq!(spaces.take(36 * PAGE_SIZE).unwrap().first, 63);
        assert!(spaces.take(1).is_err() && spaces.take(usize::MAX).is_err());
    }

    #[test]
    fn units_are_whole() {
        let mut spaces = Spaces::new(64, 16);
        assert_eq!(spaces.take(1).unwrap(), Run { first: 0, pages: 16 });
        assert_eq!(spaces.take(1).unwrap(), Run { first: 32, pages: 16 });
        assert!(spaces.take(1).is_err());
    }
}
