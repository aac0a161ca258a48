//! The table `slab-freeze` (docs/lab/slab-freeze.md): slab caches that freeze a slab as soon as it leaves the
//! node partial list, against those that freeze it only while a CPU allocates from it.
//!
//! The threads and objects of two programs run in this process, without the work of the scheduler and the
//! network: a job of `messaging` is a group of 40 threads, one of `rawpkt` a thread. Every measurement has
//! fresh caches. It runs twice: the first run is timed; in the second, a quarter as long, the caches count
//! their operations and measure how long they hold `list_lock`, which costs time.

pub(crate) mod counters;
mod messaging;
pub(crate) mod objects;
mod queue;
mod rawpkt;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use uzram::mem::Arena;
use uzram::slab::{DelayedFreeze, EagerFreeze, OnPartial, Policy, Sheaves, UnfreezeFirst};
use uzram::{Error, ErrorKind, Result};

use crate::experiment::clock::{Done, RunWork, Total, clocked, unclocked};
use crate::experiment::{
    Bound, Designs, Expect, Experiment, Figure, HeldLock, Jobs, Plan, Sample, Series, Unit, by_name,
};
use counters::counted;
use objects::Objects;
use uzram_bench::harness::Source;

/// Address space for all caches of a measurement.
const ARENA_BYTES: u64 = 8 << 30;

const DESIGNS: [(&str, Measure); 5] = [
    (EagerFreeze::NAME, measure::<EagerFreeze>),
    (OnPartial::NAME, measure::<OnPartial>),
    (UnfreezeFirst::NAME, measure::<UnfreezeFirst>),
    (DelayedFreeze::NAME, measure::<DelayedFreeze>),
    (Sheaves::NAME, measure::<Sheaves>),
];

type Measure = fn(&Arc<Arena>, Case, &Plan<'_>) -> Result<Sample>;

#[derive(Clone, Copy, Debug)]
enum Case {
    Messaging,
    Rawpkt,
}

const MESSAGING: &str = "messaging";
const RAWPKT: &str = "rawpkt";
const CASES: [(&str, Case); 2] = [(MESSAGING, Case::Messaging), (RAWPKT, Case::Rawpkt)];

const MESSAGING_JOBS: [usize; 3] = [1, 2, 5];
const RAWPKT_JOBS: [usize; 4] = [1, 2, 4, 8];

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "slab-freeze",
    about: "slab caches: slabs frozen while a CPU keeps them against only while it allocates from them",
    published: "slab-freeze",
    cases: &[(MESSAGING, &MESSAGING_JOBS), (RAWPKT, &RAWPKT_JOBS)],
    unit: Unit::Object,
    designs: || Designs::of(&DESIGNS, DelayedFreeze::NAME),
    columns: &[
        ("elapsed_s", "elapsed", 1.0, 3),
        ("ns_per_object", "ns/obj", 1.0, 1),
        ("cmpxchg_double_per_object", "xchgs", 1000.0, 0),
        ("cmpxchg_double_fail_per_object", "failed", 1000.0, 2),
        ("list_lock_acquired_per_object", "locks", 1000.0, 1),
        ("list_lock_contended_per_object", "waits", 1000.0, 2),
        ("list_lock_hold_ns_per_object", "held", 1.0, 2),
    ],
    legend,
    open,
    expectations: &[
        Expect {
            case: Some(RAWPKT),
            jobs: Jobs::AtLeast(2),
            before: Some(EagerFreeze::NAME),
            ..Expect::of(Figure::Speed, Bound::AtLeast(1.05))
        },
        Expect {
            case: Some(MESSAGING),
            before: Some(EagerFreeze::NAME),
            ..Expect::of(Figure::Speed, Bound::AtLeast(0.98))
        },
    ],
    locks: &[HeldLock { name: "list_lock", held: "list_lock_hold_ns_per_object", count: Some("caches") }],
    ..Series::NEW
};

fn legend() -> Vec<String> {
    let steps = format!(
        "{}: SLUB before the series; {}: with its patches 1 and 2 (a flag for slabs on the node partial list); {}: and 3 (unfrozen before the lock is taken); {}: all five; {}: arrays of free objects for each CPU on top of that, which came later",
        EagerFreeze::NAME,
        OnPartial::NAME,
        UnfreezeFirst::NAME,
        DelayedFreeze::NAME,
        Sheaves::NAME
    );
    vec![
        steps,
        "elapsed: seconds; ns/obj: elapsed for an object allocated and freed; for 1000 objects: xchgs, exchanges of slab words (the kernel's cmpxchg_double), failed ones among them, locks, times list_lock was taken, waits, times it was not free; held: µs for which it was held for 1000 objects, reading the clock included".to_owned(),
        "a job of messaging is a group of 20 senders and 20 receivers, one of rawpkt a thread".to_owned(),
    ]
}

fn open(_: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let designs = designs.iter().map(|design| by_name(&DESIGNS, design)).collect::<Result<_>>()?;
    Ok(Box::new(Caches { arena: Arc::new(Arena::new(ARENA_BYTES)?), designs, case: Case::Messaging }))
}

struct Caches {
    arena: Arc<Arena>,
    designs: Vec<Measure>,
    case: Case,
}

impl Experiment for Caches {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.case = by_name(&CASES, case)?;
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        self.designs[plan.design](&self.arena, self.case, plan)
    }
}

fn measure<P: Policy>(arena: &Arc<Arena>, case: Case, plan: &Plan<'_>) -> Result<Sample> {
    let caches = match case {
        Case::Messaging => messaging::caches::<P>(arena, plan.jobs)?,
        Case::Rawpkt => rawpkt::caches(arena, plan.jobs)?,
    };
    let total = Total::of(&run(case, &caches, plan, clocked)?);
    check_received(total.units, plan)?;
    let mut values = total.values(Unit::Object.costs());
    values.push(("caches", caches.len() as f64));
    values.extend(counted(&caches, plan, |plan| {
        let total = Total::of(&run(case, &caches, plan, unclocked)?);
        check_received(total.units, plan).map(|()| total)
    })?);
    Ok(Sample { elapsed: total.elapsed, values })
}

/// Runs each thread's work; its units are the objects that the thread received.
fn run<P: Policy>(
    case: Case,
    caches: &[Objects<P>],
    plan: &Plan<'_>,
    run_work: RunWork,
) -> Result<Vec<Done>> {
    match case {
        Case::Messaging => messaging::run(caches, plan, run_work),
        Case::Rawpkt => rawpkt::run(caches, plan, run_work),
    }
}

/// Fails if fewer objects were received than should have been sent, unless the run was stopped.
pub(crate) fn check_received(received: u64, plan: &Plan<'_>) -> Result<()> {
    if received < plan.work && !plan.stop.load(Ordering::Relaxed) {
        let what = format!("{} objects were sent and {received} received", plan.work);
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(())
}
