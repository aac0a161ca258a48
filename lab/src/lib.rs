//! The lab: kernel patch series reproduced, their *before* measured against their *after*.
//!
//! [`experiment`] is shared by all of them; every series has its own module.

pub mod experiment;
pub mod lru_batch;
pub mod slab_freeze;
pub mod streams;
pub mod unmap;
pub mod zs_defer;
pub mod zs_free;
pub mod zs_lock;
