//! The table `lru-batch` (docs/lab/lru-batch.md): page faults that put pages into an LRU with one lock,
//! against one with batch locks.
//!
//! A task is a thread that takes a page of an arena, clears it, adds it to the LRU and uses it, 32768 times,
//! then removes all of them from the LRU in bulk and frees them. The arena's cache of free runs models the
//! kernel's per-CPU page lists: with the larger batch the zone's lock no longer hides `lru_lock`.
//!
//! Every design has its own LRU and all share the arena. Each measurement runs twice: the first run is timed;
//! the second, a quarter as long, also times every hold of `lru_lock`, which costs time.

mod tasks;

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::device::DEFAULT_RUN_CACHE_BATCH_PAGES;
use uzram::lru::{Batched, Batching, DEFAULT_PAGEVEC_PAGES, LruConfig, LruStats, SingleLock};
use uzram::mem::Arena;

use crate::experiment::clock::{COUNTED_SHARE, Total, clocked, unclocked};
use crate::experiment::{
    Bound, Designs, Expect, Experiment, Figure, HeldLock, Jobs, Plan, Sample, Series, Unit, by_name,
    kept_arena,
};
use tasks::Faults;
use uzram_bench::harness::Source;

const CASE: &str = "page-fault";
const JOBS: [usize; 4] = [1, 2, 4, 8];

const SINGLE_LOCK: &str = "single-lock";
const ZONE_BATCH: &str = "zone-batch";
const ONE_PASS: &str = "one-pass";
const TWO_PASSES: &str = "two-passes";
const AFTER: &str = "splice";
const LONG_BATCHES: &str = "batch-56";

/// The series' setting of the per-CPU page lists' batch.
const ZONE_BATCH_PAGES: usize = 310;
/// The factor by which longer batches were tried: `LRU_BATCH_MAX`, and with it the pagevec that fills them.
const LONGER: usize = 4;

#[derive(Clone, Copy)]
struct Setup {
    /// `None` for a single lock.
    batching: Option<Batching>,
    zone_batch_pages: usize,
    pagevec_pages: usize,
}

/// A single lock, and the old per-CPU page lists.
const BEFORE: Setup = Setup {
    batching: None,
    zone_batch_pages: DEFAULT_RUN_CACHE_BATCH_PAGES,
    pagevec_pages: DEFAULT_PAGEVEC_PAGES,
};

const fn batched(two_passes: bool, splice: bool, longer: usize) -> Setup {
    Setup {
        batching: Some(Batching {
            locks: 32,
            max_pages: (DEFAULT_PAGEVEC_PAGES * longer) as u32,
            two_passes,
            splice,
        }),
        zone_batch_pages: ZONE_BATCH_PAGES,
        pagevec_pages: DEFAULT_PAGEVEC_PAGES * longer,
    }
}

/// The designs: the series' steps up to the one after, and a later variant of it.
const DESIGNS: [(&str, Setup); 6] = [
    (SINGLE_LOCK, BEFORE),
    (ZONE_BATCH, Setup { zone_batch_pages: ZONE_BATCH_PAGES, ..BEFORE }),
    (ONE_PASS, batched(false, false, 1)),
    (TWO_PASSES, batched(true, false, 1)),
    (AFTER, batched(true, true, 1)),
    (LONG_BATCHES, batched(true, true, LONGER)),
];

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "lru-batch",
    about: "page faults with an LRU: one lock for its lists, against locks for batches of its pages",
    published: "lru-batch",
    cases: &[(CASE, &JOBS)],
    unit: Unit::Page,
    designs: || Designs::of(&DESIGNS, AFTER),
    columns: &[
        ("faults_per_s", "k/s", 1e-3, 0),
        ("ns_per_page", "ns/page", 1.0, 1),
        ("lru_locks_per_page", "lru", 1000.0, 1),
        ("lru_lock_contended_share", "cont%", 100.0, 2),
        ("lru_lock_hold_ns_per_page", "held", 1.0, 1),
        ("batch_locks_per_page", "batch", 1000.0, 1),
        ("batch_lock_contended_share", "cont%", 100.0, 2),
        ("voluntary_switches_per_page", "sleeps", 1000.0, 2),
    ],
    legend,
    open,
    expectations: &[Expect {
        case: Some(CASE),
        jobs: Jobs::Exactly(1),
        before: Some(ZONE_BATCH),
        ..Expect::of(Figure::Speed, Bound::NotBelow(1.0))
    }],
    locks: &[HeldLock { name: "lru_lock", held: "lru_lock_hold_ns_per_page", count: None }],
    ..Series::NEW
};

fn legend() -> Vec<String> {
    vec![
        format!(
            "{SINGLE_LOCK}: before the series; {ZONE_BATCH}: and free pages come and go {ZONE_BATCH_PAGES} at a time, not {DEFAULT_RUN_CACHE_BATCH_PAGES}, as in all that follow; {ONE_PASS}: and batches of {DEFAULT_PAGEVEC_PAGES} pages with 32 locks; {TWO_PASSES}: and pages that are not sentinels are removed first; {AFTER}: and a pagevec's pages are linked before lru_lock is taken; {LONG_BATCHES}: the same with batches and pagevecs of {} pages",
            DEFAULT_PAGEVEC_PAGES * LONGER
        ),
        "k/s: thousands of pages a second that were allocated, cleared, added, used, removed and freed, by all tasks; ns/page: elapsed for each of them; for 1000 pages: lru and batch, acquisitions of that lock, sleeps, times a task waited for a lock or the system; cont%: contended acquisitions of the lock on the left; held: ns a page for which lru_lock was held, reading the clock included".to_owned(),
    ]
}

fn open(_: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let setups = designs.iter().map(|design| by_name(&DESIGNS, design)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(Lrus { setups, memory: None }))
}

/// An LRU for each design, twice, and the pages for all of them.
struct Lrus {
    setups: Vec<Setup>,
    memory: Option<Memory>,
}

struct Memory {
    /// The number of tasks.
    jobs: usize,
    arena: Arena,
    /// For each design an LRU to be timed, and one that measures its holds of `lru_lock`.
    lrus: Vec<[Box<dyn Faults>; 2]>,
}

impl Memory {
    fn new(setups: &[Setup], jobs: usize) -> Result<Self> {
        // Spare pages for the CPUs' caches and the tail of a pass.
        const SPARE_PAGES: u64 = 1 << 14;
        let arena = kept_arena(jobs as u64 * tasks::MAPPED_PAGES + SPARE_PAGES)?;
        let pages = arena.reserved_pages() as u64;
        let lrus = setups.iter().map(|setup| Ok([lru(setup, pages, false)?, lru(setup, pages, true)?]));
        let lrus = lrus.collect::<Result<_>>()?;
        Ok(Memory { jobs, arena, lrus })
    }
}

fn lru(setup: &Setup, pages: u64, times_holds: bool) -> Result<Box<dyn Faults>> {
    let options = LruConfig {
        pagevec_pages: setup.pagevec_pages,
        batching: setup.batching.unwrap_or_default(),
        times_holds,
        ..LruConfig::new(pages)
    };
    Ok(match setup.batching {
        None => Box::new(uzram::lru::Lru::<SingleLock>::new(&options)?),
        Some(_) => Box::new(uzram::lru::Lru::<Batched>::new(&options)?),
    })
}

impl Experiment for Lrus {
    fn begin(&mut self, _: &str) -> Result<()> {
        Ok(())
    }

    fn clocked_share(&self) -> f64 {
        1.0 / (1.0 + 1.0 / COUNTED_SHARE as f64)
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let memory = match self.memory.take().filter(|memory| memory.jobs >= plan.jobs) {
            Some(memory) => memory,
            None => Memory::new(&self.setups, plan.jobs)?,
        };
        let Memory { arena, lrus, .. } = self.memory.insert(memory);
        arena.set_run_cache_batch_pages(self.setups[plan.design].zone_batch_pages)?;
        let [clocked_lru, counted_lru] = &lrus[plan.design];
        let (done, counts) = clocked_lru.run(arena, plan, clocked)?;
        let counted_plan = Plan { work: plan.work.div_ceil(COUNTED_SHARE), ..*plan };
        let (counted_done, held_counts) = counted_lru.run(arena, &counted_plan, unclocked)?;
        let mut sample = sample(&Total::of(&done), &counts);
        let hold_ns = Total::of(&counted_done).per_unit(held_counts.lru_lock_hold_ns as f64);
        sample.values.push(("lru_lock_hold_ns_per_page", hold_ns));
        Ok(sample)
    }
}

fn sample(total: &Total, counts: &LruStats) -> Sample {
    let elapsed_s = total.elapsed.as_secs_f64();
    let share = |of: u64, all: u64| of as f64 / all.max(1) as f64;
    let mut values = total.values(Unit::Page.costs());
    values.extend([
        ("faults_per_s", total.units.max(1) as f64 / elapsed_s.max(1e-9)),
        ("lru_locks_per_page", total.per_unit(counts.lru_locks as f64)),
        ("lru_lock_contended_share", share(counts.lru_locks_contended, counts.lru_locks)),
        ("batch_locks_per_page", total.per_unit(counts.batch_locks as f64)),
        ("batch_lock_contended_share", share(counts.batch_locks_contended, counts.batch_locks)),
    ]);
    Sample { elapsed: total.elapsed, values }
}
