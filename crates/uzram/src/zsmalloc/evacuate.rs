//! Moving zspages out of chunks of the arena that have few, so that whole chunks go back to the system.
//!
//! The arena says which: it hides its emptiest chunks, so that new zspages lie in the others, until this
//! is done. What could not be moved, being read or written, keeps its chunk.

use crate::base::mem::{Account, Gfp, HiddenChunks};

use super::compact::Budget;
use super::design::PoolLocks;
use super::raw::RawPool;
use super::zspage::{GROUP_FULL, Lists};

/// Rounds of choosing chunks: what is left of a chosen one for want of runs of the right length finds
/// some in the next, or in one that chooses fewer.
const ROUNDS: usize = 16;
/// Zspages that are looked at under one hold of a class's lock.
const VISITS_PER_HOLD: u32 = 64;

impl<D: PoolLocks> RawPool<D> {
    /// Moves zspages out of chunks that so run empty, where there are any; returns the number of pages that
    /// freed in zspages with gaps, which may be less than none.
    pub(super) fn empty_chunks(&self, budget: &mut Budget<'_>) -> i64 {
        let (mut freed, mut most, mut kept) = (0, usize::MAX, Vec::new());
        for _ in 0..ROUNDS {
            let held = self.arena.chunks_in_use();
            let hidden = self.arena.hide_sparse_chunks(Account::Pool, most, &kept);
            for class in 0..self.classes.iter().len() {
                freed += self.leave_chunks(class as u8, &hidden, budget);
            }
            let chosen = hidden.chunks().to_vec();
            drop(hidden);
            if chosen.is_empty() || budget.is_spent() {
                break;
            }
            if self.arena.chunks_in_use() < held {
                continue;
            }
            // Each lacked runs of the right length. They may find them in one another, or others in them.
            most = chosen.len() / 2;
            if most == 0 {
                (most, kept) = (usize::MAX, [kept, chosen].concat());
            }
        }
        freed
    }

    /// Moves the zspages of a class out of the hidden chunks.
    fn leave_chunks(&self, class: u8, hidden: &HiddenChunks<'_>, budget: &mut Budget<'_>) -> i64 {
        let mut freed = 0;
        // A zspage of which some objects stay behind comes to a group that is looked at later.
        for group in (1..=GROUP_FULL).rev() {
            let mut left = self.lists(class).len(group);
            while left > 0 {
                budget.spend_if_cancelled();
                if budget.is_spent() {
                    return freed;
                }
                // Without growing: that would win nothing.
                let Ok(new) = self.alloc_zspage(class, Gfp::NoWait) else { return freed };
                let mut lists = self.lock_for_migration(class);
                let from = self.find_in(&mut lists, group, &mut left, hidden);
                freed += self.move_to_new(lists, from, new, budget);
            }
        }
        freed
    }

    /// The next zspage of a group that lies in a hidden chunk, of as many as may be looked at under one
    /// hold and are `left` to be.
    pub(super) fn find_in(
        &self,
        lists: &mut Lists,
        group: usize,
        left: &mut u32,
        hidden: &HiddenChunks<'_>,
    ) -> Option<u32> {
        let visits = VISITS_PER_HOLD.min(*left);
        for visit in 1..=visits {
            let Some(id) = lists.rotate(&self.zspages, group) else {
                // Others have emptied the group since it was counted.
                *left = 0;
                return None;
            };
            if hidden.contains(self.zspages.with(lists, id, |zspage| zspage.page)) {
                *left -= visit;
                return Some(id);
            }
        }
        *left -= visits;
        None
    }
}
