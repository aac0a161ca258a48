//! Lock designs, as types: the locks that each operation of a pool takes.
//!
//! | design | to allocate | to find an object | to free | to move |
//! |---|---|---|---|---|
//! | [`Split`] | class | pool (read), then the zspage is held | pool (read), class | pool (write), class |
//! | [`ClassIndexed`] | class | as `Split` | class | as `Split` |
//! | [`Consolidated`] | pool | pool, then the zspage is held | pool | pool |
//! | [`Pinned`] | class | none: the object's word is pinned | class | class |
//!
//! `Split` is the kernel's design before two patch series, of which one is `Consolidated`, the other
//! `ClassIndexed`. In these three a reader keeps all objects of a zspage from being moved, and the caller
//! keeps the object being read from being freed. In [`Pinned`], which is ours, a reader pins only its object,
//! may go on reading when it is freed, and never waits.

#[cfg(feature = "designs")]
mod class_locks;
#[cfg(feature = "designs")]
mod consolidated;
#[cfg(feature = "designs")]
mod held;
mod pinned;

#[cfg(feature = "designs")]
pub use class_locks::{
    CLASS_IN_WORD, ClassIndexed, ClassLocks, FREE_WITHOUT_POOL_LOCK, PAGES_AFTER_LOCK, Split,
};
#[cfg(feature = "designs")]
pub use consolidated::Consolidated;
pub use pinned::Pinned;

pub use super::raw::{PoolLocks, Released};
