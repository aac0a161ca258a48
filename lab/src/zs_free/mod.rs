//! The table `zs-free` (docs/lab/zs-free.md): pools whose frees look up the class under a lock of the pool
//! and free pages under the class's lock, against those that do neither.
//!
//! Threads store the corpus's pages, compressed in advance, in one pool, all at the same time, so that
//! zspages hold objects of several threads; then each frees its objects, in the order of storing. Only
//! freeing is timed. A job is a thread, which stores at most 256 MiB of pages at a time; more work is done
//! in several passes.
//!
//! Every measurement has a fresh pool. It runs twice: the first run is timed; in the second, a quarter as
//! long, the pool counts lock acquisitions and measures how long its lists are locked, which costs time.

pub(crate) mod passes;

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::codec::Algorithm;
use uzram::device::{DEFAULT_CHAIN_SIZE, DEFAULT_RUN_CACHE_BATCH_PAGES};
use uzram::zsmalloc::design::{
    CLASS_IN_WORD, ClassIndexed, ClassLocks, FREE_WITHOUT_POOL_LOCK, PAGES_AFTER_LOCK, Pinned, PoolLocks,
    Split,
};
use uzram::zsmalloc::{LockCounts, huge_threshold};

use crate::experiment::clock::{COUNTED_SHARE, Total};
use crate::experiment::{
    Bound, Designs, Expect, Experiment, Figure, HeldLock, Jobs, Plan, Sample, Series, Unit, by_name,
};
use passes::{Memory, Passes};
use uzram_bench::engine::Packed;
use uzram_bench::harness::Source;

/// The kernel before the series, and its patches one by one.
type ClassInWord = ClassLocks<{ CLASS_IN_WORD }>;
type NoPoolLock = ClassLocks<{ CLASS_IN_WORD | FREE_WITHOUT_POOL_LOCK }>;
/// Its last patch alone.
type PagesAfterLock = ClassLocks<{ PAGES_AFTER_LOCK }>;

/// The designs: those before, the one after, the one beyond.
const DESIGNS: [(&str, Measure); 6] = [
    (<Split>::NAME, measure::<Split>),
    (ClassInWord::NAME, measure::<ClassInWord>),
    (NoPoolLock::NAME, measure::<NoPoolLock>),
    (PagesAfterLock::NAME, measure::<PagesAfterLock>),
    (AFTER, measure::<ClassIndexed>),
    (Pinned::NAME, measure::<Pinned>),
];
const BEFORE: &str = <Split>::NAME;
const AFTER: &str = <ClassIndexed>::NAME;

pub(crate) type Measure = fn(&Memory, &Packed, &Plan<'_>) -> Result<Sample>;

/// Numbers of jobs that the author measured.
const JOBS: [usize; 3] = [1, 2, 4];

/// With the arena's cache of free runs, and without.
pub(crate) const RUN_CACHE: &str = "run-cache";
const NO_RUN_CACHE: &str = "no-run-cache";
/// The cases, and the number of pages by which CPUs refill their run caches.
const CASES: [(&str, usize); 2] = [(RUN_CACHE, DEFAULT_RUN_CACHE_BATCH_PAGES), (NO_RUN_CACHE, 0)];

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "zs-free",
    about: "freeing in a zsmalloc pool: with the pool's lock and pages under the class's, against neither",
    published: "zs-free",
    cases: &[(RUN_CACHE, &JOBS), (NO_RUN_CACHE, &JOBS)],
    unit: Unit::Object,
    designs: || Designs::of(&DESIGNS, AFTER),
    columns: &[
        ("full_size_ms", "ms", 1.0, 1),
        ("ns_per_object", "ns/obj", 1.0, 1),
        ("pool_locks_per_object", "pool", 1.0, 2),
        ("class_locks_per_object", "class", 1.0, 2),
        ("locked_frees_per_zspage", "arena", 1.0, 2),
        ("lists_hold_ns_per_object", "held", 1.0, 1),
        ("zspages_emptied_per_object", "empty", 1000.0, 1),
        ("voluntary_switches_per_object", "sleeps", 1000.0, 2),
    ],
    legend,
    open,
    expectations: &[
        Expect {
            before: Some(BEFORE),
            ..Expect::of(Figure::Maximum("pool_locks_per_object"), Bound::AtMost(0.0))
        },
        Expect {
            before: Some(BEFORE),
            ..Expect::of(Figure::Maximum("locked_frees_per_zspage"), Bound::AtMost(0.0))
        },
        speed(RUN_CACHE, Jobs::Exactly(1), 1.05),
        speed(RUN_CACHE, Jobs::AtLeast(2), 1.4),
        speed(NO_RUN_CACHE, Jobs::Exactly(1), 1.05),
        speed(NO_RUN_CACHE, Jobs::AtLeast(2), 1.4),
    ],
    locks: &[HeldLock { name: "size_class", held: "lists_hold_ns_per_object", count: Some("equal_classes") }],
    ..Series::NEW
};

/// Returns the expectation that a free is at least this many times as fast as before the series.
const fn speed(case: &'static str, jobs: Jobs, least: f64) -> Expect {
    Expect {
        case: Some(case),
        jobs,
        before: Some(BEFORE),
        ..Expect::of(Figure::Speed, Bound::AtLeast(least))
    }
}

fn legend() -> Vec<String> {
    vec![
        format!(
            "{BEFORE}: before the series; {}: with its patch 1 (the class's number in the object word); {}: and 2 (a free takes no lock of the pool); {}: with patch 3 alone (pages are freed after the class's lock was dropped); {AFTER}: all three; {}: no lock to find an object either, which came later",
            ClassInWord::NAME,
            NoPoolLock::NAME,
            PagesAfterLock::NAME,
            Pinned::NAME
        ),
        "ms: time to free 256 MiB of pages a thread; ns/obj: elapsed divided by the objects that all threads freed; for each object freed: pool and class, acquisitions of that lock, held, ns for which its class's lists were locked, reading the clock included; arena: calls of the arena with lists locked, for each emptied zspage; for 1000 objects: empty, emptied zspages, sleeps, times a thread waited for a lock or the system".to_owned(),
        format!(
            "{}: CPUs keep free runs of pages, {DEFAULT_RUN_CACHE_BATCH_PAGES} pages at a time, as a device's do; {}: they keep none",
            RUN_CACHE,
            NO_RUN_CACHE
        ),
    ]
}

fn open(corpus: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    // Storing takes longer than freeing.
    open_pools(corpus, designs, &DESIGNS, 0.2)
}

/// Prepares to measure some of `all` designs, of whose measurements about `clocked_share` is freeing.
pub(crate) fn open_pools(
    corpus: &Source,
    designs: &[String],
    all: &[(&'static str, Measure)],
    clocked_share: f64,
) -> Result<Box<dyn Experiment>> {
    let designs = designs.iter().map(|design| by_name(all, design)).collect::<Result<_>>()?;
    // Same-filled pages never reach a pool.
    let corpus = corpus.load()?.without_same_filled()?;
    let pages = Packed::new(&Algorithm::default(), huge_threshold(DEFAULT_CHAIN_SIZE), &corpus)?;
    let run_cache_batch_pages = DEFAULT_RUN_CACHE_BATCH_PAGES;
    Ok(Box::new(Pools { pages, designs, clocked_share, run_cache_batch_pages, memory: None }))
}

struct Pools {
    pages: Packed,
    designs: Vec<Measure>,
    clocked_share: f64,
    run_cache_batch_pages: usize,
    memory: Option<Memory>,
}

impl Experiment for Pools {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.run_cache_batch_pages = by_name(&CASES, case)?;
        Ok(())
    }

    fn clocked_share(&self) -> f64 {
        self.clocked_share
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let objects = passes::most_objects(plan.jobs) * plan.jobs as u64;
        let fits = |memory: &Memory| {
            memory.run_cache_batch_pages == self.run_cache_batch_pages && memory.objects >= objects
        };
        let memory = match self.memory.take().filter(fits) {
            Some(memory) => memory,
            None => Memory::new(self.run_cache_batch_pages, objects, self.pages.mean_bytes())?,
        };
        self.designs[plan.design](self.memory.insert(memory), &self.pages, plan)
    }
}

fn measure<D: PoolLocks>(memory: &Memory, pages: &Packed, plan: &Plan<'_>) -> Result<Sample> {
    measure_frees::<D>(memory, pages, plan, None)
}

/// Measures one design with a fresh pool, which frees at once or, if so many frees may wait, defers frees.
pub(crate) fn measure_frees<D: PoolLocks>(
    memory: &Memory,
    pages: &Packed,
    plan: &Plan<'_>,
    deferred: Option<u64>,
) -> Result<Sample> {
    let freed = passes::run::<D>(memory, pages, plan, false, deferred)?;
    // The counts need only one pass.
    let work = plan.work.div_ceil(COUNTED_SHARE).min(passes::most_objects(plan.jobs) * plan.jobs as u64);
    let counted = passes::run::<D>(memory, pages, &Plan { work, ..*plan }, true, deferred)?;
    Ok(sample(plan.jobs, &freed, &counted.counts))
}

fn sample(jobs: usize, freed: &Passes, counts: &LockCounts) -> Sample {
    let mut total = Total::default();
    freed.ended.iter().for_each(|ended| total += Total::of(ended));
    freed.freers.iter().for_each(|freer| total.usage += freer.span.usage);
    let full_size_objects = (jobs as u64 * passes::FULL_SIZE_PAGES) as f64;
    let counted = |count: u64, of: u64| count as f64 / of.max(1) as f64;
    let mut values = total.values(Unit::Object.costs());
    values.extend([
        ("full_size_ms", total.per_unit(total.elapsed.as_secs_f64() * 1e3) * full_size_objects),
        ("back_s", freed.back.as_secs_f64()),
        ("full_size_back_ms", total.per_unit(freed.back.as_secs_f64() * 1e3) * full_size_objects),
        ("pool_locks_per_object", counted(counts.pool_locks, counts.frees)),
        ("class_locks_per_object", counted(counts.class_locks, counts.frees)),
        ("lists_hold_ns_per_object", counted(counts.lists_hold_ns, counts.frees)),
        ("zspages_emptied_per_object", counted(counts.runs_freed, counts.frees)),
        ("equal_classes", freed.equal_classes),
        ("locked_frees_per_zspage", counted(counts.runs_freed_locked, counts.runs_freed)),
    ]);
    Sample { elapsed: total.elapsed, values }
}
