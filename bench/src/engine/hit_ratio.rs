//! The hit ratio of the engine's LRU, beside that of an exact LRU with as much memory.
//!
//! One thread uses the pages of a `Trace` one by one, beginning with empty memory, and every use counts. A
//! page that is not in memory is added to the LRU, one that is there is marked as used, and when memory is
//! full, 32 pages at once are isolated at the cold end and evicted. The seed decides all except when the
//! thread changes its CPU, which delays the pages in the last CPU's pagevec a little.

use std::collections::BTreeMap;

use uzram::lru::{Batched, Lru, LruConfig};
use uzram::{Error, ErrorKind, Result};

use super::zipf::Zipf;
use crate::harness::{Options, Report, SEED};

/// The sizes of memory, in percent of the pages.
const MEMORY_PERCENT: [u32; 2] = [5, 20];

/// Replays every trace with each size of memory.
pub fn run(options: &Options) -> Result<Report> {
    let (pages, uses) = options.amount((100_000, 1_000_000), (2000, 20_000));
    let mut report = Report::default();
    for (name, generate) in TRACES {
        let used = generate(pages, uses, SEED);
        for percent in MEMORY_PERCENT {
            options.go_on()?;
            let capacity_pages = (u64::from(pages) * u64::from(percent) / 100) as usize;
            let mut exact = ExactLru::new(pages, capacity_pages);
            let mut engine = EngineLru::new(pages, capacity_pages)?;
            let exact = replay(&used, |page| Ok(exact.touch(page)))?;
            let hits = replay(&used, |page| engine.touch(page))?;
            let row = format!("{name}, {percent} % in memory");
            let cells = [("hits %", hits), ("exact LRU %", exact), ("points", hits - exact)];
            report.row("hits", &row, &cells);
        }
    }
    report.note(format!("hits of {uses} uses of {pages} pages"));
    Ok(report)
}

/// Returns the percentage of uses that found their page in memory. `touch` uses a page, and returns whether
/// it was there; afterwards it is.
fn replay(used: &[u32], mut touch: impl FnMut(u32) -> Result<bool>) -> Result<f64> {
    let mut hits = 0usize;
    for page in used {
        hits += usize::from(touch(*page)?);
    }
    Ok(hits as f64 / used.len() as f64 * 100.0)
}

/// Evicts the page with the oldest last use.
struct ExactLru {
    capacity_pages: usize,
    now: u64,
    /// For each page in memory, the time of its last use.
    last_uses: Vec<Option<u64>>,
    /// The inverse of `last_uses`.
    by_last_use: BTreeMap<u64, u32>,
}

impl ExactLru {
    fn new(pages: u32, capacity_pages: usize) -> ExactLru {
        let last_uses = vec![None; pages as usize];
        ExactLru { capacity_pages, now: 0, last_uses, by_last_use: BTreeMap::new() }
    }

    fn touch(&mut self, page: u32) -> bool {
        self.now += 1;
        let last_use = self.last_uses[page as usize].replace(self.now);
        last_use.inspect(|last_use| _ = self.by_last_use.remove(last_use));
        self.by_last_use.insert(self.now, page);
        if self.by_last_use.len() > self.capacity_pages
            && let Some((_, coldest)) = self.by_last_use.pop_first()
        {
            self.last_uses[coldest as usize] = None;
        }
        last_use.is_some()
    }
}

/// Pages evicted at once, the kernel's SWAP_CLUSTER_MAX.
const RECLAIM_PAGES: usize = 32;
/// The most tries to isolate pages before the LRU counts as broken. The first may find that all pages were
/// used since the last scan.
const MAX_TRIES: usize = 8;

/// Evicts the pages that the engine's LRU calls the coldest.
struct EngineLru {
    lru: Lru<Batched>,
    capacity_pages: usize,
    in_memory: Vec<bool>,
    pages_in_memory: usize,
    isolated: Vec<u32>,
}

impl EngineLru {
    fn new(pages: u32, capacity_pages: usize) -> Result<EngineLru> {
        Ok(EngineLru {
            lru: Lru::new(&LruConfig::new(u64::from(pages)))?,
            capacity_pages,
            in_memory: vec![false; pages as usize],
            pages_in_memory: 0,
            isolated: Vec::new(),
        })
    }

    fn reclaim(&mut self) -> Result<()> {
        for _ in 0..MAX_TRIES {
            if self.pages_in_memory < self.capacity_pages {
                return Ok(());
            }
            self.lru.isolate(RECLAIM_PAGES.min(self.capacity_pages), &mut self.isolated);
            for page in self.isolated.drain(..) {
                if !std::mem::take(&mut self.in_memory[page as usize]) {
                    return Err(broken(format!("gave page {page} out, which is not in memory")));
                }
                self.lru.evicted(page);
                self.pages_in_memory -= 1;
            }
        }
        Err(broken(format!("gave none of {} pages out", self.pages_in_memory)))
    }

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

fn broken(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the LRU {what}"))
}

/// Generates so many uses of pages below a number, which is at least 4; a seed gives the same trace every
/// time.
type Generate = fn(u32, usize, u64) -> Vec<u32>;

const TRACES: [(&str, Generate); 3] = [
    ("Zipf", zipf),
    ("scan through Zipf", scan_through_zipf),
    ("loop", |pages, uses, _| in_loop(pages, uses)),
];

/// The nth page is used in proportion to 1 / n; which page is the nth is random.
fn zipf(pages: u32, uses: usize, seed: u64) -> Vec<u32> {
    Zipf::new(pages, 1.0, seed).take(uses).collect()
}

/// Zipf among one half of the pages, and after each such use one page of the other half, in order.
fn scan_through_zipf(pages: u32, uses: usize, seed: u64) -> Vec<u32> {
    let half = pages / 2;
    Zipf::new(half, 1.0, seed).zip((half..pages).cycle()).flat_map(<[u32; 2]>::from).take(uses).collect()
}

/// A quarter of the pages, in order, again and again: an exact LRU with memory for less keeps none of them
/// until it is used again.
fn in_loop(pages: u32, uses: usize) -> Vec<u32> {
    (0..pages / 4).cycle().take(uses).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
                assert_eq!(exact.touch(page), before.is_some(), "seed {seed} step {step}");
            }
        }
    }

    #[test]
    fn the_engines_lru_keeps_what_fits() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut cache = EngineLru::new(400, 100).unwrap();
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

    /// All pages are used when memory is full: the first try isolates none.
    #[test]
    fn pages_that_are_all_in_use_are_evicted_nonetheless() {
        let mut cache = EngineLru::new(50, 40).unwrap();
        let used: Vec<u32> = (0..40).flat_map(|page| [page; 3]).collect();
        replay(&used, |page| cache.touch(page)).unwrap();
        assert!(!cache.touch(45).unwrap());
        assert!(cache.pages_in_memory <= 40);
    }

    const PAGES: u32 = 1000;
    const USES: usize = 100_000;

    #[test]
    fn zipf_gives_each_rank_its_share() {
        let trace = zipf(PAGES, USES, 1);
        assert_eq!(trace.len(), USES);
        let mut counts = vec![0; PAGES as usize];
        trace.iter().for_each(|page| counts[*page as usize] += 1);
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        let harmonic = |pages: u32| (1..=pages).map(|rank| 1.0 / f64::from(rank)).sum::<f64>();
        for head in [1, 2, 10, 100, 500] {
            let wanted = harmonic(head) / harmonic(PAGES);
            let share = f64::from(counts[..head as usize].iter().sum::<u32>()) / USES as f64;
            assert!((share - wanted).abs() < 0.01, "the first {head}: {share:.3}, wanted {wanted:.3}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_trace() {
        for (name, generate) in TRACES {
            let [first, again, other] = [1, 1, 2].map(|seed| generate(PAGES, USES, seed));
            assert_eq!(first, again, "{name}");
            assert_eq!(first == other, name == "loop", "{name}");
            assert!(first.iter().all(|page| *page < PAGES), "{name}");
        }
    }

    #[test]
    fn a_scan_goes_through_one_half_in_order() {
        let trace = scan_through_zipf(PAGES, USES, 3);
        assert_eq!(trace.len(), USES);
        for (nth, pair) in trace.chunks(2).enumerate() {
            assert!(pair[0] < PAGES / 2);
            assert_eq!(pair[1], PAGES / 2 + nth as u32 % (PAGES / 2));
        }
    }

    #[test]
    fn every_trace_is_replayed() {
        let report = run(&Options { small: true, ..Options::default() }).unwrap();
        assert_eq!(report.column("hits", "points").count(), 3 * 2);
        assert!(report.column("hits", "hits %").all(|hits| (0.0..100.0).contains(&hits)), "{report}");
        let of = |row: &str, column| report.get("hits", row, column).unwrap();
        assert_eq!(of("loop, 5 % in memory", "exact LRU %"), 0.0);
        for trace in ["Zipf", "scan through Zipf"] {
            let [little, much] = [5, 20].map(|percent| format!("{trace}, {percent} % in memory"));
            for column in ["hits %", "exact LRU %"] {
                assert!(of(&little, column) < of(&much, column), "{report}");
            }
        }
        // Half of the uses of this trace hit only in long rounds; so less than half of all uses can hit.
        assert!(of("scan through Zipf, 20 % in memory", "hits %") < 50.0);
    }
}
