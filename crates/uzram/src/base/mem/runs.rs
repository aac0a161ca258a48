//! Which pages of the arena are taken, and where a run of free ones is: bitmaps and a tournament
//! tree, no memory of its own contents. The arena's lock protects it.
//!
//! Pages are taken in runs of 1..=16 within a *group* of 64, one word of the bitmap: a run never
//! crosses a group's border, so a search is a few shifts. What is left over at the borders is
//! address space, not memory. The tree holds, for each group and pair of groups, the longest free
//! run (at most 16), so that the lowest group with room is found in log2(groups) steps.

use crate::base::error::{Error, ErrorKind, Result};

/// The longest run.
pub const MAX_RUN_PAGES: usize = 16;
/// Pages of a group.
pub(super) const GROUP_PAGES: u32 = u64::BITS;

/// The taken pages, a bit each.
#[derive(Default)]
pub(super) struct Runs {
    /// Set bits are taken pages; a word a group.
    taken: Vec<u64>,
    /// `longest[leaves + g]` is the longest free run of group `g`; a parent holds the larger of
    /// its children; the root is at 1.
    longest: Vec<u8>,
    leaves: usize,
}

/// The bits of `pages` pages from `page` on, within their group.
#[inline]
pub(super) fn mask(page: u32, pages: u32) -> u64 {
    debug_assert!(pages >= 1 && page % GROUP_PAGES + pages <= GROUP_PAGES, "runs stay in their group");
    (u64::MAX >> (u64::BITS - pages)) << (page % GROUP_PAGES)
}

/// The group of a page.
#[inline]
pub(super) fn group_of(page: u32) -> usize {
    (page / GROUP_PAGES) as usize
}

/// Set where `pages` free pages in a row start.
fn starts(taken: u64, pages: u32) -> u64 {
    let (mut free, mut have) = (!taken, 1);
    while have < pages {
        let step = have.min(pages - have);
        free &= free >> step;
        have += step;
    }
    free
}

fn longest_run(taken: u64) -> u8 {
    let mut free = !taken;
    let mut longest = 0;
    while free != 0 && longest < MAX_RUN_PAGES as u8 {
        free &= free >> 1;
        longest += 1;
    }
    longest
}

impl Runs {
    /// How many groups there are.
    pub(super) fn groups(&self) -> usize {
        self.taken.len()
    }

    /// The taken pages of a group.
    pub(super) fn taken(&self, group: usize) -> u64 {
        self.taken[group]
    }

    /// Adds groups of free pages after the last one.
    ///
    /// # Errors
    /// `NoMemory` when the bitmap cannot grow.
    pub(super) fn add_groups(&mut self, groups: usize) -> Result<()> {
        let no_memory = |_| Error::new(ErrorKind::NoMemory, "no memory for the arena's bitmap");
        let first = self.groups();
        let total = first + groups;
        self.taken.try_reserve(groups).map_err(no_memory)?;
        if total > self.leaves {
            let leaves = total.next_power_of_two();
            let mut longest = Vec::new();
            longest.try_reserve_exact(2 * leaves).map_err(no_memory)?;
            longest.resize(2 * leaves, 0);
            longest[leaves..leaves + first].copy_from_slice(&self.longest[self.leaves..self.leaves + first]);
            for node in (1..leaves).rev() {
                longest[node] = longest[2 * node].max(longest[2 * node + 1]);
            }
            (self.longest, self.leaves) = (longest, leaves);
        }
        self.taken.resize(total, 0);
        (first..total).for_each(|group| self.refresh(group));
        Ok(())
    }

    /// Takes the lowest run of `pages` pages, and answers its first page.
    pub(super) fn take(&mut self, pages: usize) -> Option<u32> {
        debug_assert!((1..=MAX_RUN_PAGES).contains(&pages));
        if self.leaves == 0 || usize::from(self.longest[1]) < pages {
            return None;
        }
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if usize::from(self.longest[node]) < pages {
                node += 1;
            }
        }
        let group = node - self.leaves;
        let page = group as u32 * GROUP_PAGES + starts(self.taken[group], pages as u32).trailing_zeros();
        self.mark(page, mask(page, pages as u32), true);
        Some(page)
    }

    /// Marks the pages of `mask`, in the group of `page`, as taken or as free.
    pub(super) fn mark(&mut self, page: u32, mask: u64, taken: bool) {
        let group = group_of(page);
        debug_assert_eq!(self.taken[group] & mask, if taken { 0 } else { mask }, "pages {page}+: {mask:#x}");
        self.taken[group] ^= mask;
        self.refresh(group);
    }

    fn refresh(&mut self, group: usize) {
        let mut node = self.leaves + group;
        self.longest[node] = longest_run(self.taken[group]);
        while node > 1 {
            let longest = self.longest[node].max(self.longest[node ^ 1]);
            node /= 2;
            if self.longest[node] == longest {
                break;
            }
            self.longest[node] = longest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn runs_of_every_length_start_where_a_scan_finds_them() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let taken = random.next() & random.next();
            for pages in 1..=MAX_RUN_PAGES as u32 {
                let scan = (0..=64 - pages).find(|at| taken & mask(*at, pages) == 0);
                let found = starts(taken, pages);
                assert_eq!((found != 0).then(|| found.trailing_zeros()), scan, "seed {seed} pages {pages}");
                assert_eq!(u32::from(longest_run(taken)) >= pages, scan.is_some(), "seed {seed}");
            }
        }
    }

    /// Seeded takes and frees against a plain array of pages.
    #[test]
    fn agrees_with_a_naive_model() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (mut runs, mut model) = (Runs::default(), Vec::<bool>::new());
            let mut live: Vec<(u32, usize)> = Vec::new();
            for _ in 0..3000 {
                if random.below(10) < 6 {
                    let pages = 1 + random.below(16);
                    let naive = (0..model.len()).find(|at| {
                        at % 64 + pages <= 64 && model[*at..at + pages].iter().all(|taken| !taken)
                    });
                    let naive = naive.map(|at| at as u32);
                    assert_eq!(runs.take(pages), naive, "seed {seed}");
                    match naive {
                        Some(page) => {
                            model[page as usize..page as usize + pages].fill(true);
                            live.push((page, pages));
                        }
                        None => {
                            let groups = 1 + random.below(3);
                            runs.add_groups(groups).expect("memory");
                            model.resize(model.len() + groups * 64, false);
                        }
                    }
                } else if !live.is_empty() {
                    let (page, pages) = live.swap_remove(random.below(live.len()));
                    runs.mark(page, mask(page, pages as u32), false);
                    model[page as usize..page as usize + pages].fill(false);
                }
            }
        }
    }
}
