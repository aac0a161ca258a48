//! How a cache manages its slabs, as types.
//!
//! | policy | description |
//! |---|---|
//! | [`EagerFreeze`] | SLUB before the series below: a slab is frozen while it is on a CPU partial list |
//! | [`OnPartial`] | its patches 1 and 2: a flag says whether a slab is on the node partial list |
//! | [`UnfreezeFirst`] | and patch 3: a slab is unfrozen before the node's lock is taken |
//! | [`DelayedFreeze`] | and patches 4 and 5: only the slab that a CPU allocates from is frozen |
//! | [`Sheaves`] | per-CPU arrays of free objects, filled and emptied through `DelayedFreeze` |
//! | [`ElasticSheaves`] | those, and a barn that grows while CPUs need it |
//! | [`BareSheaves`] | those of Linux 7.0: CPUs have no slabs, and an allocation that may not wait fills no sheaf |
//! | [`Plain`] | one of these without hardening |
//!
//! The series is "slub: Delay freezing of CPU partial slabs" (Chengming Zhou, 2023).

use std::marker::PhantomData;

use crate::base::error::Result;
use crate::base::mem::Gfp;

use super::core::{Core, Freeze};
use super::sheaves::{SheafRules, Sheaved};
use super::stats::Stat;

/// The choices that differ between caches.
pub trait Policy: Send + Sync + Sized + 'static {
    /// When slabs are frozen.
    type Freeze: Freeze;
    /// The layer in front of the slabs.
    type FastPath: FastPath<Self::Freeze>;
    /// The name in statistics.
    const NAME: &'static str;
    /// Whether links between free objects are encoded and checked, and freed names checked.
    const HARDENED: bool = true;
}

/// The layer that allocations and frees try first.
pub trait FastPath<F: Freeze>: Send + Sync + Sized {
    /// Makes the layer of a cache whose slabs are `core`'s.
    ///
    /// # Errors
    /// `Invalid` for an invalid option.
    fn new(core: &Core<F>) -> Result<Self>;

    /// Makes all of its memory resident.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    fn populate(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates an object on the fast path, if that has one.
    fn pop(&self, core: &Core<F>) -> Option<u32>;

    /// Frees an object on the fast path, if that has room; returns whether it did. If `hardened`, refuses an object
    /// that was freed last.
    fn push(&self, core: &Core<F>, object: u32, hardened: bool) -> bool;

    /// Allocates an object on the slow path.
    ///
    /// # Errors
    /// As [`Cache::alloc`](super::Cache::alloc).
    fn alloc_slow(&self, core: &Core<F>, gfp: Gfp) -> Result<u32>;

    /// Frees an object on the slow path.
    ///
    /// # Errors
    /// As [`Cache::free`](super::Cache::free).
    fn free_slow(&self, core: &Core<F>, object: u32) -> Result<()>;

    /// Frees objects on the slow path; may sort them.
    ///
    /// # Errors
    /// The first error; the other objects are freed.
    fn free_many(&self, core: &Core<F>, objects: &mut [u32]) -> Result<()> {
        objects.iter().map(|object| self.free_slow(core, *object)).fold(Ok(()), Result::and)
    }

    /// Removes and returns all free objects that the layer keeps.
    fn drain(&self, core: &Core<F>) -> Vec<u32>;

    /// Returns the number of free objects that the layer keeps. Updates the counters of fast paths in `stats`.
    fn cached(&self, core: &Core<F>, stats: &mut [[u64; Stat::COUNT]]) -> u64;

    /// Returns the objects of a sheaf; 0 without sheaves.
    fn capacity(&self) -> u32;
}

/// No extra layer: the fast paths are those of the CPU's active slab.
pub struct Direct;

impl<F: Freeze> FastPath<F> for Direct {
    fn new(_: &Core<F>) -> Result<Self> {
        Ok(Direct)
    }

    #[inline]
    fn pop(&self, core: &Core<F>) -> Option<u32> {
        core.pop()
    }

    #[inline]
    fn push(&self, core: &Core<F>, object: u32, _: bool) -> bool {
        core.push(object)
    }

    fn alloc_slow(&self, core: &Core<F>, gfp: Gfp) -> Result<u32> {
        let mut object = [0];
        core.alloc_slow(&mut object, gfp)?;
        Ok(object[0])
    }

    fn free_slow(&self, core: &Core<F>, object: u32) -> Result<()> {
        core.free_one(object)
    }

    fn free_many(&self, core: &Core<F>, objects: &mut [u32]) -> Result<()> {
        core.free_many(objects)
    }

    fn drain(&self, _: &Core<F>) -> Vec<u32> {
        Vec::new()
    }

    fn cached(&self, _: &Core<F>, _: &mut [[u64; Stat::COUNT]]) -> u64 {
        0
    }

    fn capacity(&self) -> u32 {
        0
    }
}

/// Slabs are frozen from when they leave the node partial list until they return to it.
#[derive(Debug)]
pub struct EagerFreeze;
/// [`EagerFreeze`] with a flag for slabs on the node partial list.
#[derive(Debug)]
pub struct OnPartial;
/// [`OnPartial`], but slabs are unfrozen before the node's lock is taken.
#[derive(Debug)]
pub struct UnfreezeFirst;
/// Slabs are frozen only while a CPU allocates from them.
#[derive(Debug)]
pub struct DelayedFreeze;
/// Per-CPU arrays of free objects.
#[derive(Debug)]
pub struct Sheaves;
/// [`Sheaves`] whose barn holds more of them while CPUs fill sheaves from slabs shortly after others emptied
/// sheaves into slabs.
#[derive(Debug)]
pub struct ElasticSheaves;
/// Per-CPU arrays of free objects directly above the node partial list, as in Linux 7.0-rc1. An allocation that may
/// not wait (`NoWait`) and finds no filled sheaf takes a single object, under the node's lock.
#[derive(Debug)]
pub struct BareSheaves;
/// The slabs of [`BareSheaves`]: no CPU has one of its own.
#[derive(Debug)]
pub struct NodeSlabs;
/// A policy without hardening.
#[derive(Debug)]
pub struct Plain<P>(PhantomData<fn() -> P>);

impl Freeze for EagerFreeze {
    const NAME: &'static str = "eager";
    const ON_PARTIAL: bool = false;
    const UNFREEZE_FIRST: bool = false;
    const DELAYED: bool = false;
}
impl Freeze for OnPartial {
    const NAME: &'static str = "on-partial";
    const ON_PARTIAL: bool = true;
    const UNFREEZE_FIRST: bool = false;
    const DELAYED: bool = false;
}
impl Freeze for UnfreezeFirst {
    const NAME: &'static str = "unfreeze-first";
    const ON_PARTIAL: bool = true;
    const UNFREEZE_FIRST: bool = true;
    const DELAYED: bool = false;
}
impl Freeze for DelayedFreeze {
    const NAME: &'static str = "delayed";
    const ON_PARTIAL: bool = true;
    const UNFREEZE_FIRST: bool = true;
    const DELAYED: bool = true;
}
impl Freeze for NodeSlabs {
    const NAME: &'static str = "node-slabs";
    const ON_PARTIAL: bool = true;
    const UNFREEZE_FIRST: bool = true;
    const DELAYED: bool = true;
    const CPU_SLABS: bool = false;
}

impl SheafRules for Sheaves {
    const ELASTIC: bool = false;
    const NOWAIT_REFILLS: bool = true;
}
impl SheafRules for ElasticSheaves {
    const ELASTIC: bool = true;
    const NOWAIT_REFILLS: bool = true;
}
impl SheafRules for BareSheaves {
    const ELASTIC: bool = false;
    const NOWAIT_REFILLS: bool = false;
}

impl<F: Freeze> Policy for F {
    type Freeze = F;
    type FastPath = Direct;
    const NAME: &'static str = F::NAME;
}

impl Policy for Sheaves {
    type Freeze = DelayedFreeze;
    type FastPath = Sheaved<Sheaves>;
    const NAME: &'static str = "sheaves";
}

impl Policy for ElasticSheaves {
    type Freeze = DelayedFreeze;
    type FastPath = Sheaved<ElasticSheaves>;
    const NAME: &'static str = "elastic-sheaves";
}

impl Policy for BareSheaves {
    type Freeze = NodeSlabs;
    type FastPath = Sheaved<BareSheaves>;
    const NAME: &'static str = "bare-sheaves";
}

impl<P: Policy> Policy for Plain<P> {
    type Freeze = P::Freeze;
    type FastPath = P::FastPath;
    const NAME: &'static str = P::NAME;
    const HARDENED: bool = false;
}
