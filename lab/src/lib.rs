//! The lab: kernel patch series reproduced, their *before* measured against their *after*.
//!
//! [`experiment`] is shared by all of them; every series has its own module. [`published`] has the figures of
//! others that stand beside ours, [`report`] makes one page of all tables, [`locks`] shows the locks that a
//! table takes, and [`scale`] says how many CPUs saturate them.

pub mod published;
pub mod experiment;
pub mod streams;
pub mod slab_freeze;
pub mod zs_lock;
pub mod zs_free;
pub mod zs_defer;
pub mod lru_batch;
pub mod unmap;
pub mod tables;
pub mod scale;
pub mod locks;
pub mod report;
#[cfg(test)]
mod worked_example;
