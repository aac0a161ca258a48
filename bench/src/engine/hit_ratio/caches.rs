//! Memory for some of the pages, managed by an exact LRU and by the engine's LRU.

use std::collections::BTreeMap;

use uzram::lru::{Lru, LruConfig, LruLocks};
use uzram::{Error, ErrorKind, Result};

/// Memory for a number of pages.
pub(super) trait Cache {
    /// Uses a page, and returns whether it was in memory. Afterwards it is.
    fn touch(&mut self, page: u32) -> Result<bool>;
}

/// Evicts the page with the oldest last use.
pub(super) struct ExactLru {
    capacity_pages: usize,
    now: u64,
    /// For each page in memory, the time of its last use.
    last_uses: Vec<Option<u64>>,
    /// The inverse of `last_uses`.
    by_last_use: BTreeMap<u64, u32>,
}

impl ExactLru {
    pub(super) fn new(pages: u32, capacity_pages: usize) -> ExactLru {
        let last_uses = vec![None; pages as usize];
        ExactLru { capacity_pages, now: 0, last_uses, by_last_use: BTreeMap::new() }
    }
}

impl Cache for ExactLru {
    fn touch(&mut self, page: u32) -> Result<bool> {
        self.now += 1;
        let last_use = self.last_uses[page as usize].replace(self.now);
        last_use.inspect(|last_use| _ = self.by_last_use.remove(last_use));
        self.by_last_use.insert(self.now, page);
        if self.by_last_use.len() > self.capacity_pages
            && let Some((_, coldest)) = self.by_last_use.pop_first()
        {
            self.last_uses[coldest as usize] = None;
        }
        Ok(last_use.is_some())
    }
}

/// Pages evicted at once, the kernel's SWAP_CLUSTER_MAX.
const RECLAIM_PAGES: usize = 32;
/// The most tries to isolate pages before the LRU counts as broken. The first may find that all pages were
/// used since the last scan.
const MAX_TRIES: usize = 8;

/// Evicts the pages that the engine's LRU calls the coldest.
pub(super) struct EngineLru<D: LruLocks> {
    lru: Lru<D>,
    capacity_pages: usize,
    in_memory: Vec<bool>,
    pages_in_memory: usize,
    isolated: Vec<u32>,
}

impl<D: LruLocks> EngineLru<D> {
    pub(super) fn new(pages: u32, capacity_pages: usize) -> Result<EngineLru<D>> {
        Ok(EngineLru {
            lru: Lru::new(&LruConfig::new(u64::from(pages)))?,
            capacity_pages,
            in_memory: vec![false; pages as usize],
            pages_in_memory: 0,
            isolated: Vec::new(),
        })
    }

    /// Makes room for a page.
    fn reclaim(&mut self) -> Result<()> {
        for _ in 0..MAX_TRIES {
            if self.pages_in_memory < self.capacity_pages {
                return Ok(());
            }
            self.lru.isolate(RECLAIM_PAGES.min(self.capacity_pages), &mut self.isolated);
            for page in self.isolated.drain(..) {
                if !std::mem::take(&mut self.in_memory[page as usize]) {
                    return Err(broken::<D>(format!("gave page {page} out, which is not in memory")));
                }
                self.lru.evicted(page);
                self.pages_in_memory -= 1;
            }
        }
        Err(broken::<D>(format!("gave none of {} pages out", self.pages_in_memory)))
    }
}

fn broken<D: LruLocks>(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the LRU of design {} {what}", D::NAME))
}

impl<D: LruLocks> Cache for EngineLru<D> {
    fn touch(&mut self, page: u32) -> Result<bool> {
        if self.in_memory[page as usize] {
            self.lru.mark(page);
            return Ok(true);
        }
        self.reclaim()?;
        self.in_memory[page as usize] = true;
        self.pages_in_memory += 1;
        self.lru.add(page);
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use uzram::lru::{Batched, SingleLock};

    fn hits(cache: &mut impl Cache, trace: &[u32]) -> Vec<bool> {
        trace.iter().map(|page| cache.touch(*page).unwrap()).collect()
    }

    #[test]
    fn the_exact_lru_evicts_what_was_used_the_longest_ago() {
        let hit = |at: &[usize], len: usize| (0..len).map(|use_| at.contains(&use_)).collect::<Vec<_>>();
        // 3 evicts 1, because 0 was used again; then 1 evicts 2, and 4 evicts 0.
        let trace = [0, 1, 2, 0, 3, 1, 0, 3, 4, 1, 2];
        assert_eq!(hits(&mut ExactLru::new(5, 3), &trace), hit(&[3, 6, 7], trace.len()));
        assert_eq!(hits(&mut ExactLru::new(5, 1), &[0, 0, 1, 0]), hit(&[1], 4));
        let all: Vec<u32> = (0..5).chain(0..5).collect();
        assert_eq!(hits(&mut ExactLru::new(5, 5), &all), hit(&[5, 6, 7, 8, 9], 10));
    }

    #[test]
    fn the_exact_lru_agrees_with_a_queue() {
        for seed in 0..4 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut exact = ExactLru::new(40, 13);
            let mut queue: Vec<u32> = Vec::new();
            for step in 0..2000 {
                let page = random.u32(..40).min(random.u32(..40));
                let before = queue.iter().position(|other| *other == page).map(|at| queue.remove(at));
                queue.push(page);
                if queue.len() > 13 {
                    queue.remove(0);
                }
                assert_eq!(exact.touch(page).unwrap(), before.is_some(), "seed {seed} step {step}");
            }
        }
    }

    fn keeps_what_fits<D: LruLocks>() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut cache = EngineLru::<D>::new(400, 100).unwrap();
        let mut hits = 0;
        for _ in 0..20_000 {
            let page = random.u32(..400);
            let was_in_memory = cache.in_memory[page as usize];
            assert_eq!(cache.touch(page).unwrap(), was_in_memory);
            hits += usize::from(was_in_memory);
            let in_memory = cache.in_memory.iter().filter(|is_in_memory| **is_in_memory).count();
            assert_eq!(cache.pages_in_memory, in_memory);
            assert!(in_memory <= 100 && cache.in_memory[page as usize]);
        }
        // With uniform use, the hit ratio is about the share of memory, which is not always full.
        assert!((3000..5500).contains(&hits), "{hits}");
        let stats = cache.lru.stats();
        assert_eq!(stats.evicted, stats.isolated);
        assert_eq!(20_000 - hits as u64 - stats.evicted, cache.pages_in_memory as u64);
    }

    #[test]
    fn the_engines_lru_keeps_what_fits() {
        keeps_what_fits::<Batched>();
        keeps_what_fits::<SingleLock>();
    }

    /// All pages are used when memory is full: the first try isolates none.
    #[test]
    fn pages_that_are_all_in_use_are_evicted_nonetheless() {
        let mut cache = EngineLru::<Batched>::new(50, 40).unwrap();
        let used: Vec<u32> = (0..40).flat_map(|page| [page; 3]).collect();
        hits(&mut cache, &used);
        assert!(!cache.touch(45).unwrap());
        assert!(cache.pages_in_memory <= 40);
    }
}
