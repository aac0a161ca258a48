//! The front ends of uzram: what turns a [`uzram::device::Device`] into something other programs use.

pub mod control;
mod exports;
pub mod nbd;
mod waiters;

pub use exports::Exports;
