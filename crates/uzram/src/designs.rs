//! Lock designs, as types: each structure of the engine is generic over how it is locked.
//!
//! The designs are those of the Linux kernel before and after patch series that changed them, and our own. All designs
//! of a structure run the same tests, and `uzram lab` compares them. A [`Store`](crate::Store) takes its designs as
//! run-time settings: [`PoolDesign`], [`LruDesign`], [`StreamDesign`].
//!
//! | structure | trait | designs |
//! |---|---|---|
//! | [`Pool`](crate::Pool) | [`PoolLocks`] | [`Pinned`], [`ClassIndexed`], [`Consolidated`], [`Split`] |
//! | [`Lru`](crate::Lru) | [`LruLocks`] | [`Batched`], [`SingleLock`] |
//! | [`Cache`](crate::Cache) | [`Policy`] | [`Sheaves`], [`ElasticSheaves`], [`BareSheaves`], [`DelayedFreeze`], [`UnfreezeFirst`], [`OnPartial`], [`EagerFreeze`] |
//! | compression streams | [`Streams`] | [`PerCpu`], [`IdleList`] |

pub use crate::lru::{Batched, Batching, LruDesign, LruLocks, SingleLock};
pub use crate::slab::{
    BareSheaves, DelayedFreeze, EagerFreeze, ElasticSheaves, OnPartial, Plain, Policy, Sheaves, UnfreezeFirst,
};
pub use crate::stream::{IdleList, PerCpu, StreamCount, StreamDesign, Streams};
pub use crate::zsmalloc::PoolDesign;
pub use crate::zsmalloc::design::{
    CLASS_IN_WORD, ClassIndexed, ClassLocks, Consolidated, FREE_WITHOUT_POOL_LOCK, PAGES_AFTER_LOCK, Pinned,
    PoolLocks, Split,
};
