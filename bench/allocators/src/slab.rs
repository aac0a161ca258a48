//! The compared allocators: the slab caches, and the [`peers`].

use uzram::Result;
use uzram::mem::{Arena, Gfp};
use uzram::slab::{Cache, CacheConfig, Plain, Policy, Sheaves};
use uzram::sync::Arc;
use uzram_bench::harness::rounds::{Experiment, Plan, Sample};

use crate::heap::{ALIGN_BYTES, Heap};
use crate::measured::{Case, MAX_OBJECTS, Measured};
use crate::peers;

/// The slab caches by default, without hardening.
pub const PLAIN: &str = "uzram";

/// The slab caches as the engine uses them.
pub const HARDENED: &str = "uzram hardened";

/// A slab cache.
pub struct Slab<P: Policy> {
    cache: Cache<P>,
    arena: Arc<Arena>,
}

impl<P: Policy> Slab<P> {
    /// Makes a cache of at most `max_objects` objects.
    pub fn new(size_bytes: usize, max_objects: u64) -> Result<Slab<P>> {
        // Twice, to have room for partly filled slabs, and in small caches for a slab of each CPU.
        let reserve_bytes = 2 * max_objects * size_bytes as u64 + (64 << 20);
        let arena = Arc::new(Arena::new(reserve_bytes)?);
        let options = CacheConfig::new("bench", size_bytes, ALIGN_BYTES, max_objects);
        Ok(Slab { cache: Cache::new(Arc::clone(&arena), options)?, arena })
    }

    /// Returns as much memory to the system as it can.
    pub fn return_memory(&self) -> Result<()> {
        self.cache.shrink()?;
        // The arena's free memory kept for reuse is also the cache's.
        self.arena.release_free();
        Ok(())
    }
}

impl<P: Policy> Heap for Slab<P> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        self.cache.alloc(Gfp::MayWait).map(u64::from)
    }

    #[inline]
    unsafe fn address(&self, object: u64) -> *mut u64 {
        self.cache.address(object as u32).cast()
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        self.cache.free(object as u32)
    }
}

/// Returns the heaps that this build can compare; the yardstick is the last.
pub fn names() -> Vec<&'static str> {
    [&[PLAIN, HARDENED], peers::NAMES].concat()
}

/// Opens the heap of that name, for objects of one of [`SIZES_BYTES`]; returns `None` if there is no such
/// heap.
pub fn open(name: &str, size_bytes: usize, max_objects: u64) -> Result<Option<Box<dyn Measured>>> {
    fn boxed<P: Policy>(size_bytes: usize, max_objects: u64) -> Result<Box<dyn Measured>> {
        Ok(Box::new(Slab::<P>::new(size_bytes, max_objects)?))
    }
    Ok(Some(match name {
        PLAIN => boxed::<Plain<Sheaves>>(size_bytes, max_objects)?,
        HARDENED => boxed::<Sheaves>(size_bytes, max_objects)?,
        _ => return Ok(peers::open(name, size_bytes)),
    }))
}

/// One case at one size, with every allocator of this build: an experiment of the lab.
pub struct Round {
    case: Case,
    heaps: Vec<Box<dyn Measured>>,
}

impl Round {
    /// Makes the case with fresh slab caches; `designs` are [`names`].
    pub fn new(case: Case, size_bytes: usize) -> Result<Round> {
        let open = |name| open(name, size_bytes, MAX_OBJECTS);
        let heaps = names().into_iter().filter_map(|name| open(name).transpose()).collect::<Result<_>>()?;
        Ok(Round { case, heaps })
    }
}

impl Experiment for Round {
    fn begin(&mut self, _case: &str) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let elapsed = self.heaps[plan.design].time(self.case, plan.work, plan.seed)?;
        let ns_per_object = elapsed.as_secs_f64() * 1e9 / plan.work as f64;
        Ok(Sample { elapsed, values: vec![("ns_per_object", ns_per_object)] })
    }
}
