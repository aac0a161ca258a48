//! zram in user space: compressed memory without a kernel module.
//!
//! Linux compresses cold memory with zram: a RAM disk that keeps its pages compressed, in an allocator made
//! for that (zsmalloc). This crate is that stack as a library. It needs no privileges.
//!
//! - [`Device`] is the disk, with the kernel's attributes and life cycle.
//! - [`Store`] is what lies below: page number to contents, with a memory limit, writeback to a file, and a
//!   policy that reclaims pages on its own.
//! - [`Pool`] stores byte strings of up to a page, packed tightly, for compressed caches of your own.
//!
//! ```
//! use uzram::codec::Kind;
//! use uzram::{Device, Result};
//!
//! fn main() -> Result<()> {
//!     let builder = Device::builder("zram0").algorithm(Kind::Zstd).mem_limit_bytes(64 << 20);
//!     let device = builder.build(256 << 20)?;
//!     let disk = device.open()?;
//!     disk.write(4096, &[7; 8192])?;
//!
//!     let mut read = [0; 8192];
//!     disk.read(4096, &mut read)?;
//!     assert_eq!(read, [7; 8192]);
//!     assert!(device.stats().mem_used_bytes < 8192);
//!     Ok(())
//! }
//! ```
//!
//! All types can be shared between threads. Errors name the setting to change ([`Error::setting`]). Contents
//! are memory: they are lost when the device is dropped.
//!
//! # Features
//!
//! None is enabled by default; all are additive.
//!
//! - `serde`: the statistics implement `serde::Serialize`, and [`device::DeviceStats`] also
//!   `serde::Deserialize`.
//! - `designs`: the lock designs of Linux beside the ones in use, and settings that only measurements need.
//! - `lock-stats`: records acquisitions, waits, holds and bounces between CPUs of every lock, by lock class,
//!   at some cost in speed.
//!
//! # Layers
//!
//! Each module imports only from those before it: base, `slab`, [`codec`], `stream`, `lru`, `zsmalloc`,
//! `backing`, [`store`], [`device`]. [`designs`] lists their lock designs. Hidden modules are for this
//! project's own programs and are not a stable interface.

// The loom models use only a part of the crate.
#![cfg_attr(loom, allow(dead_code))]

mod base;
#[doc(hidden)]
pub mod slab;
pub mod codec;
#[doc(hidden)]
pub mod stream;
#[doc(hidden)]
pub mod lru;
#[doc(hidden)]
pub mod zsmalloc;
#[doc(hidden)]
pub mod backing;
pub mod store;
#[cfg(not(loom))]
pub mod device;
pub mod designs;

pub use base::error::{Error, ErrorKind, Result};
#[doc(hidden)]
pub use base::file_size::check_file_size;
pub use base::mem::Arena;
#[cfg(not(loom))]
pub use device::{Device, DeviceBuilder, NamedBacking, OpenDevice};
pub use lru::{Lru, LruConfig, LruStats};
pub use slab::{Cache, CacheConfig, CacheInfo, TypedCache};
pub use store::{Store, StoreBuilder};
pub use zsmalloc::{ClassStat, Handle, LockCounts, Object, ObjectRead, Pool, PoolBuilder, SizeClass};

pub use base::units;
#[doc(hidden)]
pub use base::{
    cpu, failures, machine_memory, mem, mountinfo, named, random, sync, thread, trusted_path, work,
};

/// Public types are `Send` and `Sync`.
#[cfg(not(loom))]
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Device>();
    is_send_and_sync::<OpenDevice>();
    is_send_and_sync::<Store>();
    is_send_and_sync::<Pool>();
    is_send_and_sync::<Object<'_>>();
    is_send_and_sync::<Lru>();
    is_send_and_sync::<Cache>();
    is_send_and_sync::<TypedCache<u64>>();
    is_send_and_sync::<Arena>();
    is_send_and_sync::<Error>();
};

// Doctests of the examples in the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/library.md")]
struct Documents;
