//! A pool of any lock design, chosen at run time.

use std::ops::{Deref, Range};

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::Arc;

use super::builder::PoolBuilder;
use super::compact::{Budget, Effort};
use super::design::{ClassIndexed, Consolidated, Pinned, PoolLocks, Split};
use super::raw::RawPool;
use super::read::RawRead;
use super::reclaim::Reclaimed;
use super::stats::{ClassStat, PoolDesign};
use super::store::Reserved;
#[cfg(not(loom))]
use super::{Attach, Location, Settled};

/// A [`RawPool`] of one of the designs.
pub(crate) enum AnyPool {
    Pinned(RawPool<Pinned>),
    ClassIndexed(RawPool<ClassIndexed>),
    Consolidated(RawPool<Consolidated>),
    Split(RawPool<Split>),
}

/// A [`Reserved`] of a pool of any design.
pub(crate) enum AnyReserved<'a> {
    Pinned(Reserved<'a, Pinned>),
    ClassIndexed(Reserved<'a, ClassIndexed>),
    Consolidated(Reserved<'a, Consolidated>),
    Split(Reserved<'a, Split>),
}

/// A [`RawRead`] of a pool of any design.
pub(crate) enum AnyRead<'a> {
    Pinned(RawRead<'a, Pinned>),
    ClassIndexed(RawRead<'a, ClassIndexed>),
    Consolidated(RawRead<'a, Consolidated>),
    Split(RawRead<'a, Split>),
}

/// Evaluates `$then` with `$it` bound to the variant's value.
macro_rules! each {
    ($of:ident::$any:expr, $it:ident => $then:expr) => {
        match $any {
            $of::Pinned($it) => $then,
            $of::ClassIndexed($it) => $then,
            $of::Consolidated($it) => $then,
            $of::Split($it) => $then,
        }
    };
}

/// The same for `Result`s: wraps the value in the variant of `$into` for the same design.
macro_rules! map {
    ($any:expr, $into:ident, $it:ident => $then:expr) => {
        match $any {
            AnyPool::Pinned($it) => $then.map($into::Pinned),
            AnyPool::ClassIndexed($it) => $then.map($into::ClassIndexed),
            AnyPool::Consolidated($it) => $then.map($into::Consolidated),
            AnyPool::Split($it) => $then.map($into::Split),
        }
    };
}

impl AnyPool {
    /// As [`RawPool::new`].
    pub fn new(design: PoolDesign, arena: Arc<Arena>, builder: &PoolBuilder) -> Result<Self> {
        match design {
            PoolDesign::Pinned => RawPool::new(arena, builder).map(AnyPool::Pinned),
            PoolDesign::ClassIndexed => RawPool::new(arena, builder).map(AnyPool::ClassIndexed),
            PoolDesign::Consolidated => RawPool::new(arena, builder).map(AnyPool::Consolidated),
            PoolDesign::Split => RawPool::new(arena, builder).map(AnyPool::Split),
        }
    }

    /// Returns [`PoolLocks::READS_OUTLIVE_FREES`] of the design.
    #[inline]
    pub fn reads_outlive_frees(&self) -> bool {
        match self {
            AnyPool::Pinned(_) => Pinned::READS_OUTLIVE_FREES,
            AnyPool::ClassIndexed(_) => ClassIndexed::READS_OUTLIVE_FREES,
            AnyPool::Consolidated(_) => Consolidated::READS_OUTLIVE_FREES,
            AnyPool::Split(_) => Split::READS_OUTLIVE_FREES,
        }
    }

    /// As [`RawPool::huge_threshold`].
    #[inline]
    pub fn huge_threshold(&self) -> usize {
        each!(AnyPool::self, pool => pool.huge_threshold())
    }

    /// As [`RawPool::class_bytes`].
    pub fn class_bytes(&self, len: usize) -> usize {
        each!(AnyPool::self, pool => pool.class_bytes(len))
    }

    /// As [`RawPool::populate`].
    pub fn populate(&self) -> Result<()> {
        each!(AnyPool::self, pool => pool.populate())
    }

    /// As [`RawPool::populate_for`].
    pub fn populate_for(&self, pages: Range<u32>) -> Result<()> {
        each!(AnyPool::self, pool => pool.populate_for(pages))
    }

    /// As [`RawPool::store`].
    #[inline]
    pub fn store(&self, bytes: &[u8], owner: u32, gfp: Gfp) -> Result<u32> {
        each!(AnyPool::self, pool => pool.store(bytes, owner, gfp))
    }

    /// As [`RawPool::reserve`].
    pub fn reserve(&self, len: usize, gfp: Gfp) -> Result<AnyReserved<'_>> {
        map!(self, AnyReserved, pool => pool.reserve(len, gfp))
    }

    /// As [`RawPool::read`].
    ///
    /// # Errors
    /// As [`RawPool::read`].
    ///
    /// # Safety
    /// As [`RawPool::read`].
    #[inline]
    pub unsafe fn read(&self, handle: u32, owner: u32, len: usize) -> Result<AnyRead<'_>> {
        // SAFETY: the caller's promise.
        map!(self, AnyRead, pool => unsafe { pool.read(handle, owner, len) })
    }

    /// As [`RawPool::free`].
    ///
    /// # Safety
    /// As [`RawPool::free`].
    #[inline]
    pub unsafe fn free(&self, handle: u32) {
        // SAFETY: the caller's promise.
        each!(AnyPool::self, pool => unsafe { pool.free(handle) });
    }

    /// As [`RawPool::prefetch`].
    #[inline]
    pub fn prefetch(&self, handle: u32) {
        each!(AnyPool::self, pool => pool.prefetch(handle));
    }

    /// As [`RawPool::attach`].
    #[cfg(not(loom))]
    pub fn attach(&self) -> Result<Attach> {
        each!(AnyPool::self, pool => pool.attach())
    }

    /// As [`RawPool::find`].
    #[cfg(not(loom))]
    pub fn find(&self, handle: u32) -> Option<Location> {
        each!(AnyPool::self, pool => pool.find(handle))
    }

    /// As [`RawPool::prefetch_handle`].
    #[cfg(not(loom))]
    pub fn prefetch_handle(&self, handle: u32) {
        each!(AnyPool::self, pool => pool.prefetch_handle(handle));
    }

    /// As [`RawPool::prefetch_found`].
    #[cfg(not(loom))]
    pub fn prefetch_found(&self, object: Location) {
        each!(AnyPool::self, pool => pool.prefetch_found(object));
    }

    /// As [`RawPool::claim`].
    #[cfg(not(loom))]
    pub fn claim(&self, attach: &Attach, object: Location, handle: u32, owner: u32, len: usize) -> bool {
        each!(AnyPool::self, pool => pool.claim(attach, object, handle, owner, len))
    }

    /// As [`RawPool::settle`].
    #[cfg(not(loom))]
    pub fn settle(&self, attach: &Attach) -> Result<Settled> {
        each!(AnyPool::self, pool => pool.settle(attach))
    }

    /// As [`RawPool::is_lost`].
    #[cfg(not(loom))]
    pub fn is_lost(&self, attach: &Attach, settled: &Settled, handle: u32) -> bool {
        each!(AnyPool::self, pool => pool.is_lost(attach, settled, handle))
    }

    /// As [`RawPool::rebuild`].
    #[cfg(not(loom))]
    pub fn rebuild(&self, attach: &Attach, settled: &Settled, grow: &dyn Fn() -> Result<()>) -> Result<()> {
        each!(AnyPool::self, pool => pool.rebuild(attach, settled, grow))
    }

    /// As [`RawPool::name_huge`].
    #[cfg(not(loom))]
    pub fn name_huge(&self, handle: u32) {
        each!(AnyPool::self, pool => pool.name_huge(handle));
    }

    /// As [`RawPool::compact`].
    pub fn compact(&self, effort: Effort, budget: &mut Budget<'_>) -> u64 {
        each!(AnyPool::self, pool => pool.compact(effort, budget))
    }

    /// As [`RawPool::reclaim_coldest`].
    pub fn reclaim_coldest(&self, most: usize, evict: impl FnOnce(&[u32])) -> Result<Reclaimed> {
        each!(AnyPool::self, pool => pool.reclaim_coldest(most, evict))
    }

    /// As [`RawPool::freeable_pages`].
    pub fn freeable_pages(&self) -> u64 {
        each!(AnyPool::self, pool => pool.freeable_pages())
    }

    /// As [`RawPool::pages_used`].
    pub fn pages_used(&self) -> u64 {
        each!(AnyPool::self, pool => pool.pages_used())
    }

    /// As [`RawPool::pages_compacted`].
    pub fn pages_compacted(&self) -> u64 {
        each!(AnyPool::self, pool => pool.pages_compacted())
    }

    /// As [`RawPool::corrupted`].
    pub fn corrupted(&self) -> u64 {
        each!(AnyPool::self, pool => pool.corrupted())
    }

    /// As [`RawPool::class_stats`].
    pub fn class_stats(&self) -> Vec<ClassStat> {
        each!(AnyPool::self, pool => pool.class_stats())
    }

    /// As [`RawPool::table_resident_bytes`].
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        each!(AnyPool::self, pool => pool.table_resident_bytes())
    }
}

impl AnyReserved<'_> {
    /// As [`Reserved::write`].
    pub fn write(self, bytes: &[u8], owner: u32) -> Result<u32> {
        each!(AnyReserved::self, reserved => reserved.write(bytes, owner))
    }
}

impl Deref for AnyRead<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        each!(AnyRead::self, read => read)
    }
}
