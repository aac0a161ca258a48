//! Which pages of a pager's address space are taken, and for what: runs, as a kernel's memory map has them.
//!
//! Neighbours that are taken for the same are one area. Free addresses are found first fit, so that they stay
//! dense: tables with an entry for each page take memory for what was ever used.

use std::collections::BTreeMap;

use uzram::units::PAGE_SHIFT;

/// Pages by their numbers, neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) pages: usize,
}

impl Run {
    pub(crate) const fn new(first: u64, pages: usize) -> Run {
        Run { first, pages }
    }

    /// Returns the number behind the last one.
    pub(crate) fn end(self) -> u64 {
        self.first + self.pages as u64
    }

    pub(crate) fn numbers(self) -> std::ops::Range<u64> {
        self.first..self.end()
    }

    pub(crate) fn bytes(self) -> usize {
        self.pages << PAGE_SHIFT
    }
}

/// What a program may do with pages: the bits of `PROT_READ`, `PROT_WRITE` and `PROT_EXEC`, mmap(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Protection(pub(crate) i32);

impl Protection {
    pub(crate) const READ_WRITE: Protection = Protection(libc::PROT_READ | libc::PROT_WRITE);

    /// Returns whether pages can leave memory and come back: the trap moves pages that a program may read and
    /// write, and not execute.
    pub(crate) fn may_leave(self) -> bool {
        self == Self::READ_WRITE
    }
}

/// What pages are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Memory that the pager manages.
    Managed(Protection),
    /// What a program has mapped there itself: a file, or shared memory.
    Foreign,
    /// Nothing any more: its contents are being freed.
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    pages: u64,
    used: Use,
}

/// See the [module's documentation](self).
pub(crate) struct Areas {
    /// By their first pages. No two overlap.
    areas: BTreeMap<u64, Area>,
    pages: u64,
}

impl Areas {
    /// Returns an address space of so many pages, all free.
    pub(crate) fn new(pages: u64) -> Areas {
        Areas { areas: BTreeMap::new(), pages }
    }

    /// Finds so many free pages, of which the first is at a multiple of `align` pages plus `offset`.
    pub(crate) fn find(&self, pages: u64, align: u64, offset: u64) -> Option<u64> {
        let fit = |free: u64, end: u64| {
            let first =
                free.checked_sub(offset).map_or(Some(0), |above| above.checked_next_multiple_of(align));
            let first = first?.checked_add(offset)?;
            (first.checked_add(pages)? <= end).then_some(first)
        };
        let mut free = 0;
        for (first, area) in &self.areas {
            if let Some(found) = fit(free, *first) {
                return Some(found);
            }
            free = first + area.pages;
        }
        fit(free, self.pages)
    }

    /// Returns whether pages are free, all of them.
    pub(crate) fn is_free(&self, run: Run) -> bool {
        run.first + run.pages as u64 <= self.pages && self.pieces(run).is_empty()
    }

    /// Takes pages for something, whatever they were before.
    pub(crate) fn set(&mut self, run: Run, used: Use) {
        if run.pages == 0 {
            return;
        }
        self.free(run);
        let (mut first, mut end) = (run.first, run.first + run.pages as u64);
        if let Some((before, area)) = self.areas.range(..first).next_back()
            && before + area.pages == first
            && area.used == used
        {
            first = *before;
        }
        if let Some(area) = self.areas.get(&end)
            && area.used == used
        {
            let pages = area.pages;
            self.areas.remove(&end);
            end += pages;
        }
        self.areas.insert(first, Area { pages: end - first, used });
    }

    /// Frees pages, as far as they are not free.
    pub(crate) fn free(&mut self, run: Run) {
        if run.pages == 0 {
            return;
        }
        let end = run.first + run.pages as u64;
        self.split(run.first);
        self.split(end);
        let gone: Vec<u64> = self.areas.range(run.first..end).map(|(first, _)| *first).collect();
        for first in gone {
            self.areas.remove(&first);
        }
    }

    /// Has an area end where `page` begins, if one goes on there.
    fn split(&mut self, page: u64) {
        let Some((first, area)) = self.areas.range_mut(..page).next_back() else { return };
        let (before, used) = (page - first, area.used);
        if area.pages > before {
            let after = area.pages - before;
            area.pages = before;
            self.areas.insert(page, Area { pages: after, used });
        }
    }

    /// Returns the parts of areas that lie in a run, in ascending order.
    pub(crate) fn pieces(&self, run: Run) -> Vec<(Run, Use)> {
        let end = run.first + run.pages as u64;
        let before = self.areas.range(..run.first).next_back();
        before
            .into_iter()
            .chain(self.areas.range(run.first..end))
            .filter_map(|(first, area)| {
                let (from, to) = ((*first).max(run.first), (first + area.pages).min(end));
                (from < to).then(|| (Run { first: from, pages: (to - from) as usize }, area.used))
            })
            .collect()
    }

    /// Returns all areas, in ascending order.
    pub(crate) fn all(&self) -> Vec<(Run, Use)> {
        self.pieces(Run { first: 0, pages: self.pages as usize })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::random::Random;

    use super::*;

    const PAGES: u64 = 96;
    const USES: [Use; 4] =
        [Use::Managed(Protection::READ_WRITE), Use::Managed(Protection(0)), Use::Foreign, Use::Closed];

    /// Returns the pieces of a run in a model that knows each page alone.
    fn pieces_of(model: &[Option<Use>], run: Run) -> Vec<(Run, Use)> {
        let mut pieces: Vec<(Run, Use)> = Vec::new();
        for page in run.first..run.first + run.pages as u64 {
            let Some(used) = model[page as usize] else { continue };
            match pieces.last_mut() {
                Some((last, same)) if *same == used && last.first + last.pages as u64 == page => {
                    last.pages += 1
                }
                _ => pieces.push((Run { first: page, pages: 1 }, used)),
            }
        }
        pieces
    }

    fn find_in(model: &[Option<Use>], pages: u64, align: u64, offset: u64) -> Option<u64> {
        (0..=PAGES.checked_sub(pages)?)
            .filter(|first| *first >= offset && (first - offset).is_multiple_of(align))
            .find(|first| model[*first as usize..][..pages as usize].iter().all(Option::is_none))
    }

    #[test]
    fn random_changes_agree_with_a_model_of_single_pages() {
        for seed in 0..40 {
            let mut random = Random::new(seed);
            let (mut areas, mut model) = (Areas::new(PAGES), vec![None; PAGES as usize]);
            for step in 0..400 {
                let first = random.next() % PAGES;
                let run = Run {
                    first,
                    pages: (random.next() % (PAGES - first).min(20) + 1).min(PAGES - first) as usize,
                };
                let part = first as usize..first as usize + run.pages;
                if random.next().is_multiple_of(3) {
                    areas.free(run);
                    model[part].fill(None);
                } else {
                    let used = USES[random.next() as usize % USES.len()];
                    areas.set(run, used);
                    model[part].fill(Some(used));
                }
                let at = || format!("seed {seed}, step {step}");
                let all = Run { first: 0, pages: PAGES as usize };
                assert_eq!(areas.all(), pieces_of(&model, all), "{}", at());
                let first = random.next() % PAGES;
                let run = Run { first, pages: (random.next() % (PAGES - first) + 1) as usize };
                assert_eq!(areas.pieces(run), pieces_of(&model, run), "{}", at());
                assert_eq!(areas.is_free(run), pieces_of(&model, run).is_empty(), "{}", at());
                let (pages, align) = (random.next() % 12 + 1, 1 << (random.next() % 4));
                let offset = random.next() % align;
                let found = areas.find(pages, align, offset);
                assert_eq!(found, find_in(&model, pages, align, offset), "{}", at());
            }
        }
    }

    #[test]
    fn sizes_beyond_all_bounds_are_not_found() {
        let areas = Areas::new(PAGES);
        assert_eq!(areas.find(PAGES, 1, 0), Some(0));
        for (pages, align, offset) in [(PAGES + 1, 1, 0), (u64::MAX, 1, 0), (1, 1 << 63, (1 << 63) - 1)] {
            assert_eq!(areas.find(pages, align, offset), None);
        }
    }
}
