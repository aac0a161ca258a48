//! How a slot comes to hold other contents: the steps that writes, discards, writeback and pages that return share.
//!
//! [`Store::publish`] is the commit point, under the slot's lock. What the LRU must know of it is noted under the same
//! lock ([`Store::note_in_lru`]). Once the slot is unlocked, the old contents are freed ([`Store::free`]) and the
//! LRU's lists updated ([`Store::update_lists`]).

use crate::base::units::PageNo;

use super::Store;
use super::slot::{Backed, Contents, SlotGuard};

/// What the LRU's lists still need once a page's slot is unlocked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ListUpdate {
    None,
    Add,
    Remove,
}

impl Store {
    /// Publishes `new` in a locked slot: from here on the page holds it. Returns what the slot held, for
    /// [`Store::free`] once the slot is unlocked.
    #[inline]
    pub(super) fn publish(&self, slot: &mut SlotGuard<'_>, new: Contents) -> Contents {
        let old = slot.replace(new);
        // Under the lock: who changes the page next counts after this.
        self.counters.local().replaced(&old, &new);
        old
    }

    /// Notes in a page's LRU node, under the slot's lock, that `new` replaced `old`.
    #[inline]
    pub(super) fn note_in_lru(&self, page: PageNo, old: &Contents, new: &Contents) -> ListUpdate {
        let is_stored = matches!(new, Contents::Stored { .. });
        // Only these are in the lists. To ask for others would bring the memory of their nodes.
        let was_listed = matches!(old, Contents::Stored { .. } | Contents::Backed(_));
        match &self.lru {
            Some(lru) if is_stored && lru.arrive(page.0) => ListUpdate::Add,
            Some(lru) if !is_stored && was_listed && lru.mark_dead(page.0) => ListUpdate::Remove,
            _ => ListUpdate::None,
        }
    }

    /// Carries out what [`Store::note_in_lru`] returned, without the slot's lock.
    #[inline]
    pub(super) fn update_lists(&self, page: PageNo, update: ListUpdate) {
        match &self.lru {
            Some(lru) if update == ListUpdate::Add => lru.queue(page.0),
            Some(lru) if update == ListUpdate::Remove => lru.remove_dead(&mut [page.0]),
            _ => {}
        }
    }

    /// Frees what a slot held before it was unlocked.
    #[inline]
    pub(super) fn free(&self, old: Contents) {
        match old {
            // SAFETY: `old` comes from `publish`, which took it out of the slot under its lock, so that exactly one
            // caller has it; or it was stored and never published.
            Contents::Stored { handle, .. } => unsafe { self.pool.free(handle) },
            Contents::Backed(Backed { place, len, .. }) => {
                self.backing.iter().for_each(|backing| backing.log.died(place, usize::from(len)));
            }
            Contents::Empty | Contents::Same(_) => {}
        }
    }

    /// Publishes `new` in a locked slot as a use of the page, unlocks it, and frees what it held: all steps in order.
    #[inline]
    pub(super) fn replace(&self, mut slot: SlotGuard<'_>, page: PageNo, new: Contents) {
        let old = self.publish(&mut slot, new);
        slot.touch();
        let update = self.note_in_lru(page, &old, &new);
        drop(slot);
        self.free(old);
        self.update_lists(page, update);
    }
}
