//! What a cache is made of.

use crate::base::error::Result;
use crate::base::units::pages_to_bytes;

use super::core::max_slabs;
use super::slabs::Layout;

/// How a [`Cache`](super::Cache) is made.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// The name in statistics and errors.
    pub name: String,
    /// Bytes of an object, at most 4096.
    pub size_bytes: usize,
    /// Where objects begin: a power of two of at most 4096.
    pub align_bytes: usize,
    /// How many objects may be in use. There are more, so that none is refused because of those that
    /// other CPUs keep free.
    pub max_objects: u64,
    /// The setting that an error names when there are so many.
    pub max_objects_setting: &'static str,
    /// Empty slabs are kept as long as the node partial list has fewer slabs than this.
    pub min_partial: usize,
    /// About how many free objects the slabs of a CPU partial list may have.
    pub cpu_partial_objects: usize,
    /// Objects of a sheaf, 1 to 256.
    pub sheaf_objects: usize,
    /// Use restartable sequences where there are any; compare-exchanges otherwise.
    pub restartable: bool,
    /// The objects in use when the cache is dropped go with it, and are no leak.
    pub free_objects_on_drop: bool,
}

impl CacheConfig {
    /// The kernel's choices for objects of that size, with sheaves about twice as large: a cache that
    /// reports leaks.
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
        }
    }

    /// How large an arena must be for this cache alone, in bytes of address space.
    ///
    /// # Errors
    /// `Invalid` for a size or an alignment that cannot be.
    pub fn reserve_bytes(&self) -> Result<u64> {
        let layout = Layout::new(self.size_bytes, self.align_bytes)?;
        // A run does not cross a border of 64 pages: twice as much is enough, whatever is left there.
        Ok(2 * pages_to_bytes(max_slabs(self, layout) * layout.pages as u64))
    }
}
