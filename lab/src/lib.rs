//! The lab: kernel patch series reproduced, their *before* measured against their *after*.
//!
//! [`experiment`] is shared by all of them; every series has its own module. [`published`] has the figures of others that
//! stand beside ours, [`report`] makes one page of all tables, [`locks`] shows the locks that a table takes, and [`scale`]
//! says how many CPUs saturate them.

pub mod experiment;
pub mod locks;
pub mod lru_batch;
pub mod published;
pub mod report;
pub mod scale;
pub mod slab_freeze;
pub mod streams;
pub mod unmap;
pub mod zs_defer;
pub mod zs_free;
pub mod zs_lock;
#[cfg(test)]
mod worked_example;
