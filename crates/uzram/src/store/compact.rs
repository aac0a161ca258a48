//! Compaction on request: the pool's objects are packed together, and what that frees goes back to the system.
//!
//! `maintenance.rs` compacts without being asked.

use crate::base::work::{Unit, Work};
use crate::zsmalloc::{Budget, Effort};

use super::Store;

impl Store {
    /// Packs the pool's objects together, gives back what that frees, and returns the number of pages.
    pub fn compact(&self) -> u64 {
        self.compact_interruptible(&Work::uninterruptible(Unit::Objects))
    }

    /// As [`Store::compact`], as long as the work is wanted.
    pub fn compact_interruptible(&self, work: &Work<'_>) -> u64 {
        let freed = self.pool.compact(Effort::Tight, &mut Budget::of(work));
        self.arena.release_kept();
        freed
    }
}
