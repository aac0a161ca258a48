//! The lab: kernel patch series reproduced, their *before* measured against their *after*.
//!
//! [`experiment`] is shared by all of them; every series has its own module. [`published`] has the figures of
//! others that stand beside ours, [`report`] makes one page of all tables, [`locks`] shows the locks that a
//! table takes, and [`scale`] says how many CPUs saturate them.
//!
//! Of errors, `Invalid` names an option, or lists the names that there are; `Unsupported` says what this
//! system lacks; `Corrupt` is what does not read back as it was written, or is left over; `NoMemory` and
//! `NoSpace` mean too little memory; `Busy` is an interruption.

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
pub mod out_file;
pub mod report;
#[cfg(test)]
mod worked_example;
