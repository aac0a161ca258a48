//! The table `slab-across`: objects that are allocated on one CPU and freed on another, for ever.
//!
//! Linux 7.0 replaced the CPUs' slabs by sheaves. Ming Lei measured a null block device then, whose requests are
//! allocated by one thread and freed by another: it lost 64 % of its IOPS ("\[Regression\] mm:slab/sheaves: severe
//! performance regression in cross-CPU slab allocation", 24 February 2026). Two causes came together there. Where
//! a CPU found no filled sheaf, the node partial list was all that was left, with its lock. And requests come from
//! a mempool, which asks without permission to wait first; such an allocation filled no sheaf then, but took a
//! single object. (The second was changed by "mm/slab: allow sheaf refill if blocking is not allowed", Vlastimil
//! Babka, March 2026.)
//!
//! A job is a pair of threads, each bound to a CPU of its own. The cases:
//!
//! * `same-cpu`: each thread frees what it allocated;
//! * `across`: one allocates, the other frees, both at once;
//! * `bursts`: the same by turns, a window of 2048 objects each;
//! * `across-nowait`, `bursts-nowait`: the same with allocations that may not wait (`Gfp::NoWait`), and are
//!   repeated as ones that may if they are refused, as a mempool does.
//!
//! `delayed` stands for Linux 6.19, and `bare-sheaves` for 7.0-rc1. `NoWait` forbids the engine's own designs less
//! than the kernel's flags did: they ask the system for no memory, but fill sheaves from slabs, under locks.
//!
//! Every measurement has a fresh cache and runs twice: the first run is timed, and in the second, a quarter as
//! long, the cache counts.

mod findings;
mod pipe;
mod published;
mod work;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use uzram::Result;
use uzram::mem::{Arena, Gfp};
use uzram::slab::{BareSheaves, DelayedFreeze, ElasticSheaves, Policy, Sheaves};

use crate::experiment::clock::{CLOCKED, Total, clocked, unclocked};
use crate::experiment::{Column, Designs, Experiment, Length, Plan, Sample, Series, Unit, by_name};
use crate::slab_freeze::check_received;
use crate::slab_freeze::counters::counted;
use uzram_bench::harness::Source;
use work::Work;

/// Address space for the cache of a measurement.
const ARENA_BYTES: u64 = 8 << 30;

/// The designs: Linux 6.19, 7.0-rc1, and the engine's.
const DESIGNS: [(&str, Measure); 4] = [
    (DelayedFreeze::NAME, measure::<DelayedFreeze>),
    (BareSheaves::NAME, measure::<BareSheaves>),
    (Sheaves::NAME, measure::<Sheaves>),
    (ElasticSheaves::NAME, measure::<ElasticSheaves>),
];
/// The index of the design whose collapse was published.
const AFTER_AT: usize = 1;

type Measure = fn(&Arc<Arena>, &[usize], Case, &Plan<'_>) -> Result<Sample>;

/// Where and how objects are allocated and freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    SameCpu,
    Across,
    AcrossNowait,
    Bursts,
    BurstsNowait,
}

const CASES: [(&str, Case); 5] = [
    ("same-cpu", Case::SameCpu),
    ("across", Case::Across),
    ("across-nowait", Case::AcrossNowait),
    ("bursts", Case::Bursts),
    ("bursts-nowait", Case::BurstsNowait),
];

impl Case {
    const fn name(self) -> &'static str {
        CASES[self as usize].0
    }

    const fn gfp(self) -> Gfp {
        match self {
            Case::AcrossNowait | Case::BurstsNowait => Gfp::NoWait,
            _ => Gfp::MayWait,
        }
    }

    const fn is_in_bursts(self) -> bool {
        matches!(self, Case::Bursts | Case::BurstsNowait)
    }
}

/// One pair, which two CPUs suffice for, and so many that they share a barn.
const JOBS: [usize; 2] = [1, MOST_PAIRS];
/// The most pairs by default.
const MOST_PAIRS: usize = 4;

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "slab-across",
    about: "slab caches: objects allocated on one CPU and freed on another, with CPU slabs against with sheaves alone",
    title: "mm:slab/sheaves: severe performance regression in cross-CPU slab allocation",
    author: "Ming Lei",
    date: "24 February 2026",
    cases: &[
        (Case::SameCpu.name(), &JOBS),
        (Case::Across.name(), &JOBS),
        (Case::AcrossNowait.name(), &JOBS),
        (Case::Bursts.name(), &JOBS),
        (Case::BurstsNowait.name(), &JOBS),
    ],
    slow_cases: &[],
    unit: Unit::Object,
    designs: || Designs::of(&DESIGNS, AFTER_AT),
    columns: &[
        Column::new("ns_per_object", "ns/obj", 1.0, 1),
        Column::new("sheaf_refill_per_object", "refills", 1000.0, 2),
        Column::new("sheaf_flush_per_object", "flushes", 1000.0, 2),
        Column::new(EXCHANGES, "barn", 1000.0, 2),
        Column::new("alloc_slowpath_per_object", "slabs", 1000.0, 0),
        Column::new("cmpxchg_double_per_object", "xchgs", 1000.0, 0),
        Column::new("list_lock_acquired_per_object", "locks", 1000.0, 1),
        Column::new("list_lock_contended_per_object", "waits", 1000.0, 2),
    ],
    legend,
    total: None,
    counted_function: CLOCKED,
    length: Length::Calibrated,
    open,
    published: |case, jobs, _| published::figures(case, jobs),
    expectations: &[],
    findings: findings::paragraphs,
};

/// Sheaves exchanged with the barn, for an object.
const EXCHANGES: &str = "barn_exchanges_per_object";
/// Allocations that were refused because they might not wait, for an object.
const REFUSED: &str = "refused_per_object";

fn legend() -> Vec<String> {
    let designs = format!(
        "{}: CPU slabs and CPU partial lists, as in Linux 6.19; {}: sheaves directly above the node partial list, as in Linux 7.0-rc1: an allocation that may not wait fills no sheaf; {}: sheaves above CPU slabs, filled by such an allocation too, the default here; {}: those, with a barn that grows while it is too small",
        DelayedFreeze::NAME,
        BareSheaves::NAME,
        Sheaves::NAME,
        ElasticSheaves::NAME
    );
    vec![
        designs,
        format!("a job is a pair of threads on two CPUs (one, where there is no other), with up to {} objects of a pair in flight; same-cpu: each thread frees what it allocated; across: one allocates, the other frees; bursts: the same by turns; nowait: with allocations that may not wait, which here means that they make no system call, not that they take no lock", work::WINDOW),
        "ns/obj: elapsed for an object allocated and freed; for 1000 objects: refills, sheaves half filled from slabs, flushes, sheaves half emptied into slabs, barn, sheaves exchanged with the barn, slabs, objects taken from slabs by a slow path, xchgs, exchanges of slab words (the kernel's cmpxchg_double), locks, times list_lock was taken, waits, times it was not free".to_owned(),
        "callgrind: waiting for the other thread counts, so only same-cpu is exact".to_owned(),
        published::legend(),
    ]
}

fn open(_: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let designs = designs.iter().map(|design| by_name(&DESIGNS, design)).collect::<Result<_>>()?;
    let arena = Arc::new(Arena::new(ARENA_BYTES)?);
    Ok(Box::new(Caches { arena, cpus: work::cpus()?, designs, case: Case::SameCpu }))
}

/// The arena of each measurement's cache.
struct Caches {
    arena: Arc<Arena>,
    cpus: Vec<usize>,
    designs: Vec<Measure>,
    case: Case,
}

impl Experiment for Caches {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.case = by_name(&CASES, case)?;
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        self.designs[plan.design](&self.arena, &self.cpus, self.case, plan)
    }
}

/// Measures one design with a fresh cache.
fn measure<P: Policy>(arena: &Arc<Arena>, cpus: &[usize], case: Case, plan: &Plan<'_>) -> Result<Sample> {
    let work = Work::<P>::new(arena, case, plan.jobs, cpus)?;
    let total = Total::of(&work.run(plan, clocked)?);
    check_received(total.units, plan)?;
    let mut values = total.values(Unit::Object);
    values.push((REFUSED, total.per_unit(work.refused() as f64)));
    values.extend(counted(work.objects(), plan, |plan| {
        let total = Total::of(&work.run(plan, unclocked)?);
        check_received(total.units, plan).map(|()| total)
    })?);
    let exchanges = |(name, _): &&(&str, f64)| matches!(*name, "barn_get_per_object" | "barn_put_per_object");
    values.push((EXCHANGES, values.iter().filter(exchanges).map(|(_, count)| count).sum()));
    Ok(Sample { elapsed: total.elapsed, values })
}
