//! The lab: kernel patch series repeated, their *before* measured against their *after*.
//!
//! [`experiment`] is what all of them have in common; every series has a module of its own.

pub mod experiment;
pub mod lru_batch;
pub mod slab_freeze;
pub mod streams;
pub mod zs_free;
pub mod zs_lock;
