//! The settings of a cache, and what follows from them: the layout of its slabs.

use crate::base::cpu;
use crate::base::error::{Error, Result};
use crate::base::mem::{MAX_RUN_PAGES, Region, Table};
use crate::base::sync::AtomicU32;
use crate::base::units::PAGE_SIZE;

/// Sheaves of a barn: the kernel keeps up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(loom) { 1 } else { 10 };
/// Bytes of a unit, in which places are counted.
pub(super) const UNIT_BYTES: usize = 8;
/// The most pages of a slab: the kernel's `slub_max_order` of 3.
const MAX_SLAB_PAGES: usize = 8;
/// The least objects that a slab should have: the kernel's rule, 4 * (fls(CPUs) + 1), for 4 to 7 CPUs.
const MIN_OBJECTS: usize = 16;
/// A slab page of this many objects hardly ever runs empty: if one object in ten is in use, one page in
/// a thousand does.
const MANY_OBJECTS: usize = 64;
/// At most this fraction of a slab may be left over at its end: the kernel's first choice.
const WASTE_FRACTION: usize = 16;
const _: () = assert!(MAX_SLAB_PAGES <= MAX_RUN_PAGES);
const _: () = assert!(MAX_SLAB_PAGES * PAGE_SIZE / UNIT_BYTES < 1 << 15, "places and counts fit the words");

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
    /// A region of [`CacheConfig::slab_table_bytes`] for the *slab table*: it holds the first page of each
    /// slab, so that another process can find the objects (`Cache::adopt`).
    pub slab_table: Option<Region>,
}

impl CacheConfig {
    /// Returns the kernel's settings for objects of this size, with sheaves about twice as large.
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
            slab_table: None,
        }
    }

    /// Returns the size of [`CacheConfig::slab_table`]. Fails with `Invalid` for an invalid size or
    /// alignment.
    pub fn slab_table_bytes(&self) -> Result<u64> {
        let layout = Layout::new(self.size_bytes, self.align_bytes)?;
        Ok(Table::<AtomicU32>::bytes_of(max_slabs(self, layout) as usize))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) stride_bytes: usize,
    pub(super) pages: usize,
    pub(super) objects: u16,
    pub(super) place_bits: u32,
    pub(super) link_offset_bytes: usize,
}

impl Layout {
    /// Fails with `Invalid` for an invalid size or alignment.
    pub(super) fn new(size_bytes: usize, align_bytes: usize) -> Result<Self> {
        if !(1..=PAGE_SIZE).contains(&size_bytes) || !align_bytes.is_power_of_two() || align_bytes > PAGE_SIZE
        {
            let what = "an object of a slab has 1 to 4096 bytes, aligned to a power of two up to that";
            return Err(Error::invalid(what));
        }
        let stride_bytes = size_bytes.next_multiple_of(align_bytes.max(UNIT_BYTES));
        let (pages, objects) = if cfg!(loom) { (1, LOOM_OBJECTS) } else { slab_of(stride_bytes) };
        Ok(Layout {
            stride_bytes,
            pages,
            objects: objects as u16,
            place_bits: (pages * PAGE_SIZE / UNIT_BYTES).next_power_of_two().ilog2(),
            link_offset_bytes: (stride_bytes / 2) & !(size_of::<u32>() - 1),
        })
    }

    pub(super) fn stride(self) -> u16 {
        (self.stride_bytes / UNIT_BYTES) as u16
    }
}

/// Models have slabs of two objects: enough to be empty, partial and full.
const LOOM_OBJECTS: usize = 2;

/// Returns the pages and objects of a slab: the fewest pages that hold enough objects with little left over,
/// but at least two where a page would hardly ever run empty, which halves the number of slabs to manage.
fn slab_of(stride_bytes: usize) -> (usize, usize) {
    let fits = |pages: usize| pages * PAGE_SIZE / stride_bytes;
    let is_good = |pages: &usize| {
        let bytes = pages * PAGE_SIZE;
        fits(*pages) >= MIN_OBJECTS && (bytes % stride_bytes) * WASTE_FRACTION <= bytes
    };
    let fewest = if fits(1) >= MANY_OBJECTS { 2 } else { 1 };
    let pages = (fewest..=MAX_SLAB_PAGES).find(is_good).unwrap_or(MAX_SLAB_PAGES);
    (pages, fits(pages))
}

/// Returns the most slabs of a CPU partial list, by the kernel's rule, which takes them for half full.
pub(super) fn cpu_partial_slabs(options: &CacheConfig, layout: Layout) -> usize {
    (options.cpu_partial_objects * 2).div_ceil(usize::from(layout.objects))
}

/// Returns the most slabs of a cache: those for objects in use; for each CPU its active slab, its partial
/// list, one being made, and those of its sheaves; and as many for the barn. The slab table has so many
/// entries, whatever the policy.
pub(super) fn max_slabs(options: &CacheConfig, layout: Layout) -> u64 {
    let in_use = options.max_objects.div_ceil(u64::from(layout.objects));
    if cfg!(loom) {
        return in_use;
    }
    let sheaves = (BARN_SHEAVES * options.sheaf_objects).div_ceil(usize::from(layout.objects));
    let kept = (cpu::possible() + 1) * (2 + cpu_partial_slabs(options, layout) + sheaves);
    in_use.saturating_add(kept as u64).min(u32::MAX.into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slabs_hold_enough_objects_and_waste_little() {
        let shape = |size, align| {
            let layout = Layout::new(size, align).expect("an object");
            (layout.stride_bytes, layout.pages, layout.objects)
        };
        assert_eq!(shape(8, 8), (8, 2, 1024));
        assert_eq!(shape(32, 32), (32, 2, 256));
        assert_eq!(shape(64, 64), (64, 2, 128));
        assert_eq!(shape(100, 8), (104, 1, 39));
        assert_eq!(shape(256, 8), (256, 1, 16));
        assert_eq!(shape(704, 64), (704, 3, 17));
        assert_eq!(shape(2048, 8), (2048, 8, 16));
        assert_eq!(shape(4096, 4096), (4096, 8, 8));
        assert_eq!(shape(1, 1), (8, 2, 1024));
        for size in 1..=PAGE_SIZE {
            let layout = Layout::new(size, 8).expect("an object");
            let bytes = layout.pages * PAGE_SIZE;
            assert!(usize::from(layout.objects) * layout.stride_bytes <= bytes);
            assert!(layout.link_offset_bytes + 4 <= layout.stride_bytes);
            assert!(1 << layout.place_bits >= bytes / UNIT_BYTES);
        }
        for (size, align) in [(0, 8), (4097, 8), (8, 3), (8, 0), (8, 8192)] {
            assert!(Layout::new(size, align).is_err(), "{size} {align}");
        }
    }
}
