//! Lock designs, as types: each structure of the engine is generic over how it is locked. The product is over
//! one of each: [`Pinned`], [`Batched`], [`PerCpu`] and [`Sheaves`].
//!
//! With the feature `designs` there are others: those of the Linux kernel before and after patch series that
//! changed them, for [`Pool`](crate::Pool) ([`PoolLocks`]), [`Lru`](crate::Lru) ([`LruLocks`]),
//! [`Cache`](crate::Cache) ([`Policy`]), and compression streams ([`Streams`]). All designs of a structure
//! run the same tests, and `uzram lab` compares them. A [`Store`](crate::Store) then takes its designs at run
//! time.

pub use crate::lru::{Batched, Batching, LruLocks};
pub use crate::slab::{Plain, Policy, Sheaves};
pub use crate::stream::{PerCpu, Streams};
pub use crate::zsmalloc::design::{Pinned, PoolLocks};

#[cfg(feature = "designs")]
pub use crate::{
    lru::{LruDesign, SingleLock},
    slab::{DelayedFreeze, EagerFreeze, OnPartial, UnfreezeFirst},
    stream::{IdleList, StreamDesign},
    zsmalloc::PoolDesign,
    zsmalloc::deferred::DeferredFrees,
    zsmalloc::design::{
        CLASS_IN_WORD, ClassIndexed, ClassLocks, Consolidated, FREE_WITHOUT_POOL_LOCK, PAGES_AFTER_LOCK,
        Split,
    },
};
