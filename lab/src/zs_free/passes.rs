//! Fills a pool and empties it again, as often as the work requires; for the tables `zs-free` and `zs-defer`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uzram::mem::Arena;
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::deferred::DeferredFrees;
use uzram::zsmalloc::{Handle, LockCounts, Object, Pool, PoolLocks};
use uzram::{Error, ErrorKind, Result};

use crate::experiment::clock::{Done, RunWork, clocked, unclocked};
use crate::experiment::{Plan, kept_arena};
use uzram_bench::engine::Packed;
use uzram_bench::harness::{Gate, joined, run_together};

/// The most pages that a thread stores before it frees: 256 MiB, as the authors' processes had.
pub(crate) const FULL_SIZE_PAGES: u64 = 256 << 8;
/// The most pages that all threads store, which bounds the memory.
const MOST_PAGES: u64 = 8 * FULL_SIZE_PAGES;
/// One object in this many is read back.
const CHECKED: usize = 61;
/// How often the end of deferred frees is looked for.
const LOOK_EVERY: Duration = Duration::from_micros(100);

#[derive(Default)]
pub(crate) struct Passes {
    /// The frees of each thread, pass by pass.
    pub(crate) ended: Vec<Vec<Done>>,
    /// The thread that frees what is deferred, pass by pass.
    pub(crate) freers: Vec<Done>,
    /// From the first free of a pass until all its memory was back in the arena, of all passes together.
    pub(crate) back: Duration,
    /// The pool's lock counters while objects were freed.
    pub(crate) counts: LockCounts,
    /// The number of equally full classes in which two objects would meet as often as in the actual classes.
    pub(crate) equal_classes: f64,
}

/// Memory for the pools of a case, one pool at a time.
pub(crate) struct Memory {
    pub(crate) arena: Arc<Arena>,
    pub(crate) run_cache_batch_pages: usize,
    /// The most objects at a time.
    pub(crate) objects: u64,
}

impl Memory {
    /// Allocates memory for `objects` objects of `mean_bytes` on average. Freed memory stays in the arena.
    pub(crate) fn new(run_cache_batch_pages: usize, objects: u64, mean_bytes: f64) -> Result<Self> {
        const SPARE_PAGES: u64 = 1 << 14;
        let pool_pages = (1.25 * objects as f64 * mean_bytes) as u64 / PAGE_SIZE as u64 + SPARE_PAGES;
        let arena = kept_arena(pool_pages)?;
        arena.set_run_cache_batch_pages(run_cache_batch_pages)?;
        Ok(Memory { arena: Arc::new(arena), run_cache_batch_pages, objects })
    }
}

/// Returns the most objects that each of `jobs` threads stores before it frees them.
pub(crate) fn most_objects(jobs: usize) -> u64 {
    FULL_SIZE_PAGES.min(MOST_PAGES / jobs as u64)
}

/// Stores and frees `plan.work` objects or a few more, the same number by each thread; the pool counts lock
/// operations, or the frees are timed. If frees are deferred, so many may wait, and a thread beside the jobs
/// frees them.
pub(crate) fn run<D: PoolLocks>(
    memory: &Memory,
    pages: &Packed,
    plan: &Plan<'_>,
    counts: bool,
    deferred: Option<u64>,
) -> Result<Passes> {
    let run_work: RunWork = if counts { unclocked } else { clocked };
    let objects_each = plan.work.div_ceil(plan.jobs as u64);
    let passes = objects_each.div_ceil(most_objects(plan.jobs)).max(1);
    let objects_each = objects_each.div_ceil(passes);
    // Handles that CPUs cache count, too.
    const SPARE_OBJECTS: u64 = 1 << 16;
    let objects = objects_each * plan.jobs as u64 + SPARE_OBJECTS;
    let builder = Pool::builder("zs-free").max_objects(objects).count_locks(counts);
    let pool: Pool<D> = builder.build_in(Arc::clone(&memory.arena))?;
    let mut done = Passes::default();
    for pass in 0..passes {
        if plan.stop.load(Ordering::Relaxed) {
            break;
        }
        let shift = (plan.seed + pass) as usize * 7919;
        let handles = fill(&pool, pages, plan.jobs, objects_each as usize, shift)?;
        done.equal_classes = equal_classes(&pool);
        let before = pool.lock_counts();
        let (jobs, freer, back) = match deferred {
            None => empty(&pool, handles, run_work)?,
            Some(limit) => empty_deferred(&pool, handles, run_work, limit)?,
        };
        let start = jobs.iter().map(|done| done.span.start).min();
        done.back += start.zip(back).map_or(Duration::ZERO, |(start, back)| back - start);
        done.ended.push(jobs);
        done.freers.extend(freer);
        done.counts += pool.lock_counts().since(&before);
        if pool.pages_used() > 0 {
            let what = format!("{} pages are left in an empty pool of '{}'", pool.pages_used(), D::NAME);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    Ok(done)
}

/// Stores `objects_each` pages on each thread, all at the same time, and checks some of them.
fn fill<D: PoolLocks>(
    pool: &Pool<D>,
    pages: &Packed,
    jobs: usize,
    objects_each: usize,
    shift: usize,
) -> Result<Vec<Vec<Handle>>> {
    let of_thread = |thread: usize, object: usize| pages.page(thread * objects_each + object + shift);
    let filled = run_together((0..jobs).map(|thread| {
        move |gate: &Gate| {
            gate.pass();
            let store =
                |object| pool.store_for(of_thread(thread, object), object as u32).map(Object::into_handle);
            (0..objects_each).map(store).collect::<Result<Vec<Handle>>>()
        }
    }))?;
    for (thread, handles) in filled.iter().enumerate() {
        for (object, handle) in handles.iter().enumerate().step_by(CHECKED) {
            if *pool.read(handle)? != *of_thread(thread, object) {
                let what = format!("object {object} of thread {thread} is not what was stored");
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
    }
    Ok(filled)
}

/// Returns 1 divided by the probability that two random objects are of one class.
fn equal_classes<D: PoolLocks>(pool: &Pool<D>) -> f64 {
    let used: Vec<f64> = pool.class_stats().iter().map(|class| class.obj_used as f64).collect();
    let (all, squares) = (used.iter().sum::<f64>(), used.iter().map(|used| used * used).sum::<f64>());
    if all > 0.0 { all * all / squares } else { 0.0 }
}

/// The frees of each thread, those of the thread that frees what is deferred, and when all memory was back.
type Emptied = (Vec<Done>, Option<Done>, Option<Instant>);

/// Empties a pool that frees at once: memory is back when the last thread has freed its last object.
fn empty<D: PoolLocks>(pool: &Pool<D>, handles: Vec<Vec<Handle>>, run_work: RunWork) -> Result<Emptied> {
    let jobs = free_all(handles, run_work, &|handle| pool.free(handle))?;
    let back = jobs.iter().map(|done| done.span.end).max();
    Ok((jobs, None, back))
}

/// Empties a pool that defers frees, with a thread that frees.
fn empty_deferred<D: PoolLocks>(
    pool: &Pool<D>,
    handles: Vec<Vec<Handle>>,
    run_work: RunWork,
    limit: u64,
) -> Result<Emptied> {
    let frees = DeferredFrees::new(limit as usize / DeferredFrees::<Handle>::PAGE_VALUES);
    // A handle that is freed is this pool's.
    let free = |handle| drop(pool.free(handle));
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let freer = scope.spawn(|| {
            run_work(&mut || {
                frees.run(|| !is_done.load(Ordering::Relaxed), free);
                Ok(0)
            })
        });
        let jobs = free_all(handles, run_work, &|handle| {
            frees.defer(handle, free);
            Ok(())
        });
        while jobs.is_ok() && !freer.is_finished() && frees.waiting() > 0 {
            thread::sleep(LOOK_EVERY);
        }
        let back = Instant::now();
        is_done.store(true, Ordering::Relaxed);
        freer.thread().unpark();
        let freer = joined(freer)?;
        Ok((jobs?, Some(freer), Some(back)))
    })
}

fn free_all(
    handles: Vec<Vec<Handle>>,
    run_work: RunWork,
    free: &(impl Fn(Handle) -> Result<()> + Sync),
) -> Result<Vec<Done>> {
    run_together(handles.into_iter().map(|mut handles| {
        move |gate: &Gate| {
            gate.pass();
            run_work(&mut || {
                let freed = handles.len() as u64;
                handles.drain(..).try_for_each(free)?;
                Ok(freed)
            })
        }
    }))
}
