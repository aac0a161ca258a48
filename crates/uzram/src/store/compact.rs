//! Compaction on request: the pool's objects are packed together, and the freed memory goes back to the system.
//!
//! `maintenance.rs` compacts in the background.

use crate::base::work::{Unit, Work};
use crate::zsmalloc::{Budget, Effort};

use super::Store;

impl Store {
    /// Packs the pool's objects together, gives the freed pages back to the system, and returns their number.
    pub fn compact(&self) -> u64 {
        self.compact_interruptible(&Work::uninterruptible(Unit::Objects))
    }

    /// As [`Store::compact`], until `work` is interrupted.
    pub fn compact_interruptible(&self, work: &Work<'_>) -> u64 {
        let freed = self.pool.compact(Effort::Tight, &mut Budget::of(work));
        self.arena.release_kept();
        freed
    }
}
