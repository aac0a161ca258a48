//! zram in user space: compressed memory without a kernel module.
//!
//! [`device::Device`] is a compressed RAM disk; [`store::Store`] holds its pages. Below them lie,
//! each built only on those before it: `base`, `slab`, `codec`, `stream`, `zsmalloc`, `lru`, `backing`.

// loom's models use less than the product does.
#![cfg_attr(loom, allow(dead_code))]

mod base;
pub mod slab;
pub mod codec;
pub mod stream;
pub mod zsmalloc;
pub mod lru;
pub mod backing;
pub mod store;
#[cfg(not(loom))]
pub mod device;

pub use base::error::{Error, ErrorKind, Result};
pub use base::{cpu, mem, named, random, sync, trusted_path, units, work};
#[cfg(not(loom))]
pub use base::{machine_memory, mountinfo};
