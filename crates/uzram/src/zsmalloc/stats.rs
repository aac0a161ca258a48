//! A pool's statistics.

use crate::base::mem::Account;

use super::class::SizeClass;
use super::design::PoolLocks;
use super::raw::RawPool;
use super::zspage::FULLNESS_GROUPS;

/// The statistics of one class, in the columns of the kernel's `classes` file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ClassStat {
    /// Its shape.
    pub class: SizeClass,
    /// Zspages by fullness group.
    pub zspages: [u32; FULLNESS_GROUPS],
    /// Objects that the zspages have room for.
    pub obj_allocated: u64,
    /// Objects in use.
    pub obj_used: u64,
    /// Pages committed to the zspages.
    pub pages_used: u64,
}

impl ClassStat {
    /// Returns the number of pages that compacting the class would free: the kernel's `freeable`.
    pub fn freeable_pages(&self) -> u64 {
        let spare = (self.obj_allocated - self.obj_used) / u64::from(self.class.objs_per_zspage);
        spare * u64::from(self.class.pages_per_zspage)
    }
}

impl<D: PoolLocks> RawPool<D> {
    /// Returns the number of pages committed to zspages: the kernel's `mem_used_total` in pages.
    pub fn pages_used(&self) -> u64 {
        self.arena.used_pages(Account::Pool)
    }

    /// Returns the number of objects found damaged when they were freed; their memory is not reused.
    pub fn corrupted(&self) -> u64 {
        self.corrupted.get()
    }

    /// Returns the number of pages that compaction has freed.
    pub fn pages_compacted(&self) -> u64 {
        self.pages_compacted.get()
    }

    /// Returns the resident bytes of the pool's tables; they grow with the pool.
    pub fn table_resident_bytes(&self) -> usize {
        self.page_table.resident_bytes()
            + self.handles.cache().table_resident_bytes()
            + self.zspages.cache().table_resident_bytes()
    }

    /// Returns the state of each class, smallest first.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        let stat = |(index, class): (usize, &SizeClass)| {
            let lists = self.lists(index as u8);
            ClassStat {
                class: *class,
                zspages: lists.by_fullness(),
                obj_allocated: lists.zspages() * u64::from(class.objs_per_zspage),
                obj_used: lists.objs_used,
                pages_used: lists.pages_used,
            }
        };
        self.classes.iter().enumerate().rev().map(stat).collect()
    }
}
