//! How a cache manages its slabs, as types.

use std::marker::PhantomData;

use crate::base::error::Result;
use crate::base::mem::Gfp;

use super::core::Core;
use super::stats::Stat;

/// The choices that differ between caches.
pub trait Policy: Send + Sync + Sized + 'static {
    type Layer: CpuLayer;
    /// The name in statistics.
    const NAME: &'static str;
    /// Whether links between free objects are encoded and checked, and freed names checked.
    const HARDENED: bool = true;
}

/// The layer of each CPU's own, which allocations and frees try first.
pub trait CpuLayer: Send + Sync + Sized {
    /// Makes the layer of a cache whose slabs are `core`'s. Fails with `Invalid` for an invalid option.
    fn new(core: &Core) -> Result<Self>;

    /// Makes all of its memory resident. Fails with `NoMemory` when the system gives none.
    fn populate(&self) -> Result<()> {
        Ok(())
    }

    fn pop(&self, core: &Core) -> Option<u32>;

    /// Frees an object on the fast path, if that has room; returns whether it did. If `hardened`, refuses an
    /// object that was freed last.
    fn push(&self, core: &Core, object: u32, hardened: bool) -> bool;

    /// Allocates an object on the slow path. Fails as [`Cache::alloc`](super::Cache::alloc).
    fn alloc_slow(&self, core: &Core, gfp: Gfp) -> Result<u32>;

    /// Frees an object on the slow path. Fails as [`Cache::free`](super::Cache::free).
    fn free_slow(&self, core: &Core, object: u32) -> Result<()>;

    /// Gives all slabs and free objects back to `core`. Fails with `Corrupt` when a free object is found
    /// damaged; the rest is done all the same.
    fn drain(&self, core: &Core) -> Result<()>;

    /// Returns the number of free objects that the layer keeps. Updates the counters of fast paths in
    /// `stats`.
    fn cached(&self, core: &Core, stats: &mut [[u64; Stat::COUNT]]) -> u64;
}

/// A policy without hardening.
#[derive(Debug)]
pub struct Plain<P>(PhantomData<fn() -> P>);

impl<P: Policy> Policy for Plain<P> {
    type Layer = P::Layer;
    const NAME: &'static str = P::NAME;
    const HARDENED: bool = false;
}
