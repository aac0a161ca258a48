//! The settings of a cache.

use crate::base::error::Result;
use crate::base::mem::{Region, Table};
use crate::base::sync::AtomicU32;
use crate::base::units::pages_to_bytes;

use super::core::max_slabs;
use super::slabs::Layout;

/// The settings of a [`Cache`](super::Cache).
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// The name in statistics and errors.
    pub name: String,
    /// Bytes of an object, at most 4096.
    pub size_bytes: usize,
    /// The alignment of objects: a power of two of at most 4096.
    pub align_bytes: usize,
    /// The number of objects that can be in use. The cache has room for more, so that no allocation
    /// fails because other CPUs keep objects free.
    pub max_objects: u64,
    /// The setting that an error names when the cache is full.
    pub max_objects_setting: &'static str,
    /// Empty slabs are kept as long as the node partial list has fewer slabs than this.
    pub min_partial: usize,
    /// The approximate maximum of free objects in the slabs of a CPU partial list.
    pub cpu_partial_objects: usize,
    /// Objects of a sheaf, 1 to 256.
    pub sheaf_objects: usize,
    /// Whether to use restartable sequences if the system has them, and compare-exchanges otherwise.
    pub restartable: bool,
    /// Whether dropping the cache frees objects in use, instead of reporting them as leaks.
    pub free_objects_on_drop: bool,
    /// A region of [`CacheConfig::slab_table_bytes`] for the *slab table*: it holds the first page of each slab, so
    /// that another process can find the objects (`Cache::adopt`).
    pub slab_table: Option<Region>,
}

impl CacheConfig {
    /// Returns the kernel's settings for objects of this size, with sheaves about twice as large, for a cache
    /// that reports leaks.
    pub fn new(name: impl Into<String>, size_bytes: usize, align_bytes: usize, max_objects: u64) -> Self {
        CacheConfig {
            name: name.into(),
            size_bytes,
            align_bytes,
            max_objects,
            max_objects_setting: "disksize",
            min_partial: (size_bytes.max(2).ilog2() as usize / 2).clamp(5, 10),
            cpu_partial_objects: match size_bytes {
                4096.. => 6,
                1024.. => 24,
                256.. => 52,
                _ => 120,
            },
            sheaf_objects: match size_bytes {
                _ if cfg!(loom) => 2,
                1025.. => 8,
                257.. => 32,
                _ => 128,
            },
            restartable: true,
            free_objects_on_drop: false,
            slab_table: None,
        }
    }

    /// Returns the bytes of [`CacheConfig::slab_table`].
    ///
    /// # Errors
    /// `Invalid` for an invalid size or alignment.
    pub fn slab_table_bytes(&self) -> Result<u64> {
        let layout = Layout::new(self.size_bytes, self.align_bytes)?;
        Ok(Table::<AtomicU32>::bytes_of(max_slabs(self, layout) as usize))
    }

    /// Returns the bytes of address space that an arena needs for this cache alone.
    ///
    /// # Errors
    /// `Invalid` for an invalid size or alignment.
    pub fn reserve_bytes(&self) -> Result<u64> {
        let layout = Layout::new(self.size_bytes, self.align_bytes)?;
        // A run crosses no border of 64 pages: twice as much suffices, whatever is left over at the borders.
        Ok(2 * pages_to_bytes(max_slabs(self, layout) * layout.pages as u64))
    }
}
