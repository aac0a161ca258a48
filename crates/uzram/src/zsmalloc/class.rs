//! Size classes: the object sizes, and the number of pages and objects of a zspage of each.
//!
//! The rule is that of current kernels: sizes step by 16 bytes from 32 to 4096, the zspage of
//! a size has the number of pages (up to the chain size) that wastes the least, and a class whose
//! zspages have the same shape as those of the next larger class is merged into it.

use crate::base::units::PAGE_SIZE;

/// Bytes at the start of each object that name its handle and its owner.
pub(super) const HEADER_BYTES: usize = 8;
/// The pages a zspage may have; the kernel's CONFIG_ZSMALLOC_CHAIN_SIZE offers the same range.
pub const CHAIN_SIZES: std::ops::RangeInclusive<usize> = 4..=16;
/// The most objects a zspage can hold: 16 pages of 48 bytes each.
pub(super) const MAX_OBJECTS: usize = 16 * PAGE_SIZE / 48;

const MIN_BYTES: usize = 32;
const STEP_BYTES: usize = PAGE_SIZE >> 8;
const RAW_CLASSES: usize = (PAGE_SIZE - MIN_BYTES) / STEP_BYTES + 1;

/// The shape of the zspages of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct SizeClass {
    /// Bytes of an object, its header included.
    pub size_bytes: u16,
    /// Pages of a zspage.
    pub pages_per_zspage: u8,
    /// Objects of a zspage.
    pub objs_per_zspage: u16,
}

impl SizeClass {
    fn of(size_bytes: usize, chain_size: usize) -> Self {
        let pages = if size_bytes.is_power_of_two() {
            1
        } else {
            let waste = |pages: &usize| pages * PAGE_SIZE % size_bytes;
            // On a tie, `min_by_key` returns the smallest zspage.
            (1..=chain_size).min_by_key(waste).unwrap_or(1)
        };
        SizeClass {
            size_bytes: size_bytes as u16,
            pages_per_zspage: pages as u8,
            objs_per_zspage: (pages * PAGE_SIZE / size_bytes) as u16,
        }
    }

    fn same_shape(&self, other: &SizeClass) -> bool {
        (self.pages_per_zspage, self.objs_per_zspage) == (other.pages_per_zspage, other.objs_per_zspage)
    }

    /// Returns whether a zspage of the class is one page that holds one object: a raw page without a header.
    #[inline]
    pub fn is_huge(&self) -> bool {
        self.pages_per_zspage == 1 && self.objs_per_zspage == 1
    }

    #[inline]
    pub(super) fn pages_for(&self, objects: usize) -> usize {
        (objects * usize::from(self.size_bytes)).div_ceil(PAGE_SIZE)
    }
}

pub(super) struct ClassTable {
    /// The largest class first.
    classes: Vec<SizeClass>,
    by_raw_size: [u8; RAW_CLASSES],
    /// The length from which contents take a whole page.
    pub(super) huge_threshold: usize,
}

impl ClassTable {
    pub(super) fn new(chain_size: usize) -> Self {
        let mut classes: Vec<SizeClass> = Vec::new();
        let mut by_raw_size = [0; RAW_CLASSES];
        for raw in (0..RAW_CLASSES).rev() {
            let class = SizeClass::of(MIN_BYTES + raw * STEP_BYTES, chain_size);
            if !classes.last().is_some_and(|larger| larger.same_shape(&class)) {
                classes.push(class);
            }
            by_raw_size[raw] = (classes.len() - 1) as u8;
        }
        let largest_normal =
            classes.iter().find(|class| !class.is_huge()).map_or(0, |class| class.size_bytes);
        let huge_threshold = usize::from(largest_normal) - (HEADER_BYTES - 1);
        ClassTable { classes, by_raw_size, huge_threshold }
    }

    /// Returns the index of the class for `len` bytes of contents, 1..=4096.
    #[inline]
    pub(super) fn index_for(&self, len: usize) -> u8 {
        let raw = (len + HEADER_BYTES).max(MIN_BYTES) - MIN_BYTES;
        self.by_raw_size[raw.div_ceil(STEP_BYTES).min(RAW_CLASSES - 1)]
    }

    #[inline]
    pub(super) fn get(&self, index: u8) -> &SizeClass {
        &self.classes[usize::from(index)]
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &SizeClass> + ExactSizeIterator {
        self.classes.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's numbers for each chain size: distinct classes, and the largest that is not huge.
    const DISTINCT: [usize; 13] = [69, 86, 94, 110, 119, 136, 141, 153, 159, 173, 179, 186, 192];
    const LARGEST: [usize; 13] =
        [3264, 3408, 3504, 3584, 3632, 3680, 3712, 3744, 3776, 3792, 3808, 3840, 3840];

    #[test]
    fn class_counts_and_huge_thresholds_are_the_kernels() {
        for (chain_size, (distinct, largest)) in CHAIN_SIZES.zip(DISTINCT.into_iter().zip(LARGEST)) {
            let table = ClassTable::new(chain_size);
            assert_eq!((table.iter().len(), table.huge_threshold), (distinct, largest - 7), "{chain_size}");
        }
        assert_eq!(ClassTable::new(8).huge_threshold, 3625);
    }

    #[test]
    fn every_length_has_a_class_with_room_and_no_smaller_one() {
        for chain_size in CHAIN_SIZES {
            let table = ClassTable::new(chain_size);
            for len in 1..=PAGE_SIZE {
                let class = table.get(table.index_for(len));
                if class.is_huge() {
                    assert!(len >= table.huge_threshold, "{len}");
                    continue;
                }
                let size = usize::from(class.size_bytes);
                assert!(len < table.huge_threshold && len + HEADER_BYTES <= size, "{len} in {size}");
                let smaller = table.iter().find(|class| usize::from(class.size_bytes) < size);
                assert!(smaller.is_none_or(|smaller| len + HEADER_BYTES > usize::from(smaller.size_bytes)));
            }
        }
    }

    #[test]
    fn zspages_fit_the_object_word_and_the_arena() {
        for class in CHAIN_SIZES.flat_map(|chain| ClassTable::new(chain).iter().copied().collect::<Vec<_>>())
        {
            let objects = usize::from(class.objs_per_zspage);
            assert!(objects <= MAX_OBJECTS && class.pages_per_zspage <= 16, "{class:?}");
            assert_eq!(class.pages_for(objects), usize::from(class.pages_per_zspage), "{class:?}");
        }
    }
}
