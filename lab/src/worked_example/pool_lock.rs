//! The table `pool-lock`: what the pool's lock alone costs a free.
//!
//! Of the series of the table zs-free, *pool-lock-kept* has patches 1 and 3, and *class-indexed* also patch
//! 2, by which a free takes no lock of the pool. Each thread stores pages in one pool, compressed in advance,
//! and frees each when it has stored so many others. A job is a thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use uzram::Result;
use uzram::codec::Algorithm;
use uzram::device::DEFAULT_CHAIN_SIZE;
use uzram::mem::Arena;
use uzram::zsmalloc::design::{CLASS_IN_WORD, ClassIndexed, ClassLocks, PAGES_AFTER_LOCK, PoolLocks};
use uzram::zsmalloc::{Pool, PoolBuilder, huge_threshold};
use uzram_bench::engine::Packed;
use uzram_bench::harness::{Gate, Source, run_together};

use crate::experiment::clock::{Total, clocked};
use crate::experiment::{
    Bound, Column, Designs, Expect, Experiment, Figure, Jobs, Plan, Sample, Series, Unit, by_name, kept_arena,
};

type PoolLockKept = ClassLocks<{ CLASS_IN_WORD | PAGES_AFTER_LOCK }>;

/// The design before, and the one after.
const DESIGNS: [(&str, Measure); 2] =
    [(PoolLockKept::NAME, measure::<PoolLockKept>), (ClassIndexed::NAME, measure::<ClassIndexed>)];

type Measure = fn(&Pools, &Plan<'_>) -> Result<Sample>;

/// Objects that a thread keeps.
const KEPT: usize = 256;
/// Pages of the arena: objects of 256 threads.
const ARENA_PAGES: u64 = 256 * KEPT as u64;

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "pool-lock",
    about: "storing and freeing in a zsmalloc pool: a free with the pool's lock, against without",
    published: "zs-free",
    cases: &[("store-free", &[1, 2, 4])],
    unit: Unit::Object,
    designs: || Designs::of(&DESIGNS, 1),
    columns: &[
        Column::new("ns_per_object", "ns/obj", 1.0, 1),
        Column::new("voluntary_switches_per_object", "sleeps", 1000.0, 2),
    ],
    legend: || {
        vec!["ns/obj: elapsed divided by the objects that all threads stored and freed; sleeps: times a thread waited for a lock or the system, for 1000 objects".to_owned()]
    },
    open: |corpus, designs| Ok(Box::new(Pools::new(corpus, designs)?)),
    expectations: &[Expect { jobs: Jobs::AtLeast(2), ..Expect::of(Figure::Speed, Bound::AtLeast(1.1)) }],
    ..Series::NEW
};

struct Pools {
    pages: Packed,
    arena: Arc<Arena>,
    designs: Vec<Measure>,
}

impl Pools {
    fn new(corpus: &Source, designs: &[String]) -> Result<Pools> {
        let designs = designs.iter().map(|design| by_name(&DESIGNS, design)).collect::<Result<_>>()?;
        // Same-filled pages never reach a pool.
        let corpus = corpus.load()?.without_same_filled()?;
        let pages = Packed::new(&Algorithm::default(), huge_threshold(DEFAULT_CHAIN_SIZE), &corpus)?;
        Ok(Pools { pages, arena: Arc::new(kept_arena(ARENA_PAGES)?), designs })
    }
}

impl Experiment for Pools {
    fn begin(&mut self, _: &str) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        self.designs[plan.design](self, plan)
    }
}

/// Measures one design with a fresh pool.
fn measure<D: PoolLocks>(pools: &Pools, plan: &Plan<'_>) -> Result<Sample> {
    let pool: Pool<D> =
        PoolBuilder::new("pool-lock").max_objects(2 * ARENA_PAGES).build_in(Arc::clone(&pools.arena))?;
    let ended = run_together((0..plan.jobs).map(|job| {
        let pool = &pool;
        move |gate: &Gate| {
            gate.pass();
            clocked(&mut || store_and_free(pool, &pools.pages, job, plan))
        }
    }))?;
    let total = Total::of(&ended);
    Ok(Sample { elapsed: total.elapsed, values: total.values(Unit::Object.costs()) })
}

/// Stores and frees a job's share of the objects; returns their number.
fn store_and_free<D: PoolLocks>(pool: &Pool<D>, pages: &Packed, job: usize, plan: &Plan<'_>) -> Result<u64> {
    let objects = plan.work.div_ceil(plan.jobs as u64);
    let mut kept = VecDeque::with_capacity(KEPT);
    for object in 0..objects {
        if kept.len() == KEPT {
            kept.pop_front().map_or(Ok(()), |oldest| pool.free(oldest))?;
        }
        let page = pages.page(plan.seed as usize + 7919 * job + object as usize);
        kept.push_back(pool.store_for(page, object as u32)?.into_handle());
        if plan.stop.load(Ordering::Relaxed) {
            break;
        }
    }
    kept.into_iter().try_for_each(|handle| pool.free(handle))?;
    Ok(objects)
}
