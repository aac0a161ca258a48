//! The table `zs-defer` (docs/lab/zs-defer.md): pools whose frees go to per-CPU pages and are done by a
//! thread, against pools that free at once. The measurement is that of [`zs_free`]; the thread that frees
//! what is deferred comes beside the jobs. The arena keeps free runs on each CPU, as a device's does.

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::zsmalloc::design::{Pinned, PoolLocks, Split};

use crate::experiment::{Bound, Designs, Expect, Experiment, Figure, Jobs, Series, Unit};
use crate::zs_free::{self, measure_frees};
use uzram_bench::harness::Source;

/// The designs: those that free at once, then with today's locks and deferred, and with the author's locks
/// and deferred.
const DESIGNS: [(&str, zs_free::Measure); 4] = [
    (SPLIT, |memory, pages, plan| measure_frees::<Split>(memory, pages, plan, None)),
    (PINNED, |memory, pages, plan| measure_frees::<Pinned>(memory, pages, plan, None)),
    (PINNED_DEFERRED, |memory, pages, plan| {
        measure_frees::<Pinned>(memory, pages, plan, Some(DEFERRED_LIMIT))
    }),
    (SPLIT_DEFERRED, |memory, pages, plan| measure_frees::<Split>(memory, pages, plan, Some(DEFERRED_LIMIT))),
];
const SPLIT: &str = <Split>::NAME;
const PINNED: &str = Pinned::NAME;
const PINNED_DEFERRED: &str = "pinned-deferred";
const SPLIT_DEFERRED: &str = "split-deferred";

/// Numbers of jobs that the author measured.
const JOBS: [usize; 2] = [1, 3];

/// Objects whose frees may wait: all those of three jobs, as far as the author's figures do not fall with
/// larger sizes.
const DEFERRED_LIMIT: u64 = 1 << 18;

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "zs-defer",
    about: "freeing in a zsmalloc pool: by a thread, from per-CPU pages, against at once",
    published: "zs-defer",
    cases: &[(zs_free::RUN_CACHE, &JOBS)],
    unit: Unit::Object,
    designs: || Designs::of(&DESIGNS, PINNED_DEFERRED),
    columns: &[
        ("full_size_ms", "ms", 1.0, 2),
        ("full_size_back_ms", "back", 1.0, 1),
        ("cpu_ns_per_object", "cpu/obj", 1.0, 1),
        ("pool_locks_per_object", "pool", 1.0, 3),
        ("class_locks_per_object", "class", 1.0, 3),
        ("lists_hold_ns_per_object", "held", 1.0, 1),
        ("voluntary_switches_per_object", "sleeps", 1000.0, 2),
    ],
    legend,
    open,
    expectations: &[
        expect(1, Figure::Speed, Bound::AtLeast(3.0)),
        expect(3, Figure::Speed, Bound::AtLeast(2.9)),
        expect(1, Figure::ProcessorTime, Bound::AtMost(1.0)),
        expect(3, Figure::ProcessorTime, Bound::AtMost(1.0)),
    ],
    ..Series::NEW
};

/// Returns an expectation about deferred frees with today's locks against each design that frees at once.
const fn expect(jobs: usize, figure: Figure, bound: Bound) -> Expect {
    Expect { jobs: Jobs::Exactly(jobs), ..Expect::of(figure, bound) }
}

fn legend() -> Vec<String> {
    vec![
        format!(
            "{SPLIT}: before the author's series, of which the base of his figures has nothing; {PINNED}: today's locks; both free at once; {PINNED_DEFERRED}, {SPLIT_DEFERRED}: with the same locks, frees wait on pages of their CPUs, {DEFERRED_LIMIT} at most, and a thread beside the jobs does them"
        ),
        "ms: until the jobs have freed 256 MiB of pages each; back: until all their memory is back in the arena; for each object: cpu/obj, ns of CPU time, that of the thread that frees included; pool and class, acquisitions of that lock, held, ns for which its class's lists were locked, reading the clock included; for 1000 objects: sleeps, times a thread waited for a lock, for work, or the system".to_owned(),
    ]
}

fn open(corpus: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    // Deferring takes a small part of the time of storing and freeing.
    zs_free::open_pools(corpus, designs, &DESIGNS, 0.02)
}
