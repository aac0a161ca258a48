//! How a cache moves its slabs, as types.
//!
//! | policy | what it is |
//! |---|---|
//! | [`EagerFreeze`] | SLUB before the series below: a slab is frozen while it is on a CPU partial list |
//! | [`OnPartial`] | its patches 1 and 2: a flag says whether a slab is on the node partial list |
//! | [`UnfreezeFirst`] | and patch 3: a slab is unfrozen before the node's lock is taken |
//! | [`DelayedFreeze`] | and patches 4 and 5: only the slab a CPU allocates from is frozen |
//! | [`Sheaves`] | arrays of free objects on each CPU, filled and emptied through `DelayedFreeze` |
//! | [`Plain`] | one of these without hardening |
//!
//! The series is "slub: Delay freezing of CPU partial slabs" (Chengming Zhou, 2023).

use std::marker::PhantomData;

use crate::base::error::Result;
use crate::base::mem::Gfp;

use super::core::{Core, Freeze};
use super::sheaves::Sheaved;
use super::stats::Stat;

/// The choices that differ between caches.
pub trait Policy: Send + Sync + Sized + 'static {
    /// When slabs are frozen.
    type Freeze: Freeze;
    /// What stands before the slabs.
    type FastPath: FastPath<Self::Freeze>;
    /// Its name on paper.
    const NAME: &'static str;
    /// Links between free objects are scrambled and checked, and freed names looked at.
    const HARDENED: bool = true;
}

/// What allocations and frees meet first.
pub trait FastPath<F: Freeze>: Send + Sync + Sized {
    /// The front of a cache whose slabs are `core`'s.
    ///
    /// # Errors
    /// `Invalid` for an option that cannot be.
    fn new(core: &Core<F>) -> Result<Self>;

    /// Has all of its memory there from now on.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    fn populate(&self) -> Result<()> {
        Ok(())
    }

    /// The fast path of an allocation, where it is open.
    fn pop(&self, core: &Core<F>) -> Option<u32>;

    /// The fast path of a free, where it is open. A `hardened` one looks whether the object was freed last.
    fn push(&self, core: &Core<F>, object: u32, hardened: bool) -> bool;

    /// The other path of an allocation.
    ///
    /// # Errors
    /// As [`Cache::alloc`](super::Cache::alloc).
    fn alloc_slow(&self, core: &Core<F>, gfp: Gfp) -> Result<u32>;

    /// The other path of a free.
    ///
    /// # Errors
    /// As [`Cache::free`](super::Cache::free).
    fn free_slow(&self, core: &Core<F>, object: u32) -> Result<()>;

    /// [`FastPath::free_slow`] for many, which may be sorted for that.
    ///
    /// # Errors
    /// The first one's; the others are freed.
    fn free_many(&self, core: &Core<F>, objects: &mut [u32]) -> Result<()> {
        objects.iter().map(|object| self.free_slow(core, *object)).fold(Ok(()), Result::and)
    }

    /// Takes all free objects out that it keeps.
    fn drain(&self, core: &Core<F>) -> Vec<u32>;

    /// How many free objects it keeps. Brings the counters of its fast paths in `stats` up to date.
    fn cached(&self, core: &Core<F>, stats: &mut [[u64; Stat::COUNT]]) -> u64;

    /// Objects that a CPU's fast path holds at most; 0 if that is the slab's affair.
    fn capacity(&self) -> u32;
}

/// No fast: the fast paths are those of the CPU's active slab.
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

/// Slabs are frozen from leaving the node partial list until they go back to it.
#[derive(Debug)]
pub struct EagerFreeze;
/// [`EagerFreeze`] with a flag for slabs on the node partial list.
#[derive(Debug)]
pub struct OnPartial;
/// [`OnPartial`], unfreezing slabs before the node's lock is taken.
#[derive(Debug)]
pub struct UnfreezeFirst;
/// Slabs are frozen only while a CPU allocates from them.
#[derive(Debug)]
pub struct DelayedFreeze;
/// Arrays of free objects on each CPU.
#[derive(Debug)]
pub struct Sheaves;
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

impl<F: Freeze> Policy for F {
    type Freeze = F;
    type FastPath = Direct;
    const NAME: &'static str = F::NAME;
}

impl Policy for Sheaves {
    type Freeze = DelayedFreeze;
    type FastPath = Sheaved;
    const NAME: &'static str = "sheaves";
}

impl<P: Policy> Policy for Plain<P> {
    type Freeze = P::Freeze;
    type FastPath = P::FastPath;
    const NAME: &'static str = P::NAME;
    const HARDENED: bool = false;
}
