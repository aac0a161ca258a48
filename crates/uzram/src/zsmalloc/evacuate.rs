//! Evacuates sparse chunks of the arena, so that whole chunks go back to the system.
//!
//! The arena chooses the emptiest chunks and hides them during the evacuation, so that new zspages go into
//! the others. A zspage that cannot be moved, as it is read or written, keeps its chunk.

use crate::base::mem::{Account, Gfp, HiddenChunks};

use super::compact::Budget;
use super::design::PoolLocks;
use super::free::MOST_EMPTIED_BY_MOVE;
use super::raw::RawPool;
use super::zspage::{GROUP_FULL, Lists};

/// Rounds of choosing chunks: a zspage that found no run of its length in one round may find one in the
/// next, or in one that hides fewer chunks.
const ROUNDS: usize = 16;
/// Zspages that are examined per acquisition of a class's lock.
const VISITS_PER_HOLD: u32 = 64;

impl<D: PoolLocks> RawPool<D> {
    /// Evacuates sparse chunks; returns the number of committed pages that this freed, which may be negative.
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
            // Each chunk's zspages lacked runs of their length, which other chosen chunks may have: hide
            // fewer.
            most = chosen.len() / 2;
            if most == 0 {
                (most, kept) = (usize::MAX, [kept, chosen].concat());
            }
        }
        freed
    }

    fn leave_chunks(&self, class: u8, hidden: &HiddenChunks<'_>, budget: &mut Budget<'_>) -> i64 {
        let mut freed = 0;
        // A zspage that some objects stay in moves to an emptier group, which is visited later.
        for group in (1..=GROUP_FULL).rev() {
            let mut left = self.lists(class).lengths[group];
            while left > 0 {
                budget.spend_if_cancelled();
                if budget.is_spent() {
                    return freed;
                }
                // Do not grow the arena: that would free nothing.
                let Ok(new) = self.alloc_zspage(class, Gfp::NoWait) else { return freed };
                let emptied = Vec::with_capacity(MOST_EMPTIED_BY_MOVE);
                let mut lists = self.lock_for_migration(class);
                let from = self.find_in(&mut lists, group, &mut left, hidden);
                freed += self.move_to_new(lists, from, new, emptied, budget);
            }
        }
        freed
    }

    /// Returns the next zspage of a group that lies in a hidden chunk. Examines at most `VISITS_PER_HOLD`
    /// zspages, and subtracts them from `left`.
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
                // Other threads have emptied the group since it was counted.
                *left = 0;
                return None;
            };
            if hidden.contains(lists.with(&self.zspages, id, |zspage| zspage.page)) {
                *left -= visit;
                return Some(id);
            }
        }
        *left -= visits;
        None
    }
}
