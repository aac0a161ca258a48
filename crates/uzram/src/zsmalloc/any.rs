//! A pool of any lock design, chosen at run time.

use std::ops::{Deref, Range};

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp};
use crate::base::named::any_design;
use crate::base::sync::Arc;

use super::compact::{Budget, Effort};
use super::design::{ClassIndexed, Consolidated, Pinned, PoolLocks, Split};
use super::raw::{PoolConfig, RawPool};
use super::read::ObjectRead;
use super::reclaim::Reclaimed;
use super::stats::ClassStat;
use super::{Attach, Location, Settled};

/// Calls a macro with the list of the designs, and further arguments.
macro_rules! with_designs {
    ($name:ident! { $($more:tt)* }) => {
        $name! { [Pinned, ClassIndexed, Consolidated, Split] $($more)* }
    };
}

with_designs! { any_design! {
    PoolDesign, "no pool lock design '{}'; there are: {}", AnyPool of RawPool;
    fn new(arena: Arc<Arena>, config: &PoolConfig);
    fn reads_outlive_frees(&self) -> bool;
    fn huge_threshold(&self) -> usize;
    fn class_bytes(&self, len: usize) -> usize;
    fn populate(&self) -> Result<()>;
    fn populate_for(&self, pages: Range<u32>) -> Result<()>;
    fn store(&self, bytes: &[u8], owner: u32, gfp: Gfp) -> Result<u32>;
    fn prefetch(&self, handle: u32);
    fn attach(&self) -> Result<Attach>;
    fn find(&self, handle: u32) -> Option<Location>;
    fn prefetch_handle(&self, handle: u32);
    fn prefetch_found(&self, object: Location);
    fn claim(&self, attach: &Attach, object: Location, handle: u32, owner: u32, len: usize) -> bool;
    fn settle(&self, attach: &Attach) -> Result<Settled>;
    fn is_lost(&self, attach: &Attach, settled: &Settled, handle: u32) -> bool;
    fn rebuild(&self, attach: &Attach, settled: &Settled, grow: &dyn Fn() -> Result<()>) -> Result<()>;
    fn name_huge(&self, handle: u32);
    fn compact(&self, effort: Effort, budget: &mut Budget<'_>) -> u64;
    fn reclaim_coldest(&self, most: usize, evict: impl FnOnce(&[u32])) -> Result<Reclaimed>;
    fn freeable_pages(&self) -> u64;
    fn pages_used(&self) -> u64;
    fn pages_compacted(&self) -> u64;
    fn corrupted(&self) -> u64;
    fn class_stats(&self) -> Vec<ClassStat>;
    fn table_resident_bytes(&self) -> usize;
} }

/// Makes a read of a pool of any design, and the functions of [`AnyPool`] that are unsafe.
macro_rules! any_read {
    ([$($design:ident),*]) => {
        pub(crate) enum AnyRead<'a> {
            $($design(ObjectRead<'a, $design>),)*
        }

        impl AnyPool {
            /// As [`RawPool::read`]. Fails as [`RawPool::read`].
            ///
            /// # Safety
            /// As [`RawPool::read`].
            #[inline]
            pub unsafe fn read(&self, handle: u32, owner: u32, len: usize) -> Result<AnyRead<'_>> {
                match self {
                    $(AnyPool::$design(pool) => {
                        // SAFETY: the caller's promise.
                        unsafe { pool.read(handle, owner, len) }.map(AnyRead::$design)
                    })*
                }
            }

            /// As [`RawPool::free`].
            ///
            /// # Safety
            /// As [`RawPool::free`].
            #[inline]
            pub unsafe fn free(&self, handle: u32) {
                match self {
                    // SAFETY: the caller's promise.
                    $(AnyPool::$design(pool) => unsafe { pool.free(handle) },)*
                }
            }
        }

        impl Deref for AnyRead<'_> {
            type Target = [u8];

            #[inline]
            fn deref(&self) -> &[u8] {
                match self {
                    $(AnyRead::$design(read) => read,)*
                }
            }
        }
    };
}

with_designs! { any_read! {} }
