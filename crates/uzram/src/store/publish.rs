//! Replacing the contents of a slot: the steps shared by writes, discards, writeback and pages that return to memory.
//!
//! [`Store::publish`] is the commit point, under the slot's lock. The page's LRU node is updated under the same lock
//! ([`Store::note_in_lru`]). After the slot is unlocked, the old contents are freed ([`Store::free`]) and the LRU's
//! lists are updated ([`Store::update_lists`]).

use crate::base::units::PageNo;

use super::Store;
use super::slot::{Backed, Contents, SlotGuard};

/// The update of the LRU's lists that is due once a page's slot is unlocked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ListUpdate {
    None,
    Add,
    Remove,
}

impl Store {
    /// Publishes `new` as the contents of a locked slot. Returns the old contents, for [`Store::free`] once the slot is
    /// unlocked.
    #[inline]
    pub(super) fn publish(&self, slot: &mut SlotGuard<'_>, new: Contents) -> Contents {
        let old = slot.replace(new);
        // Under the lock, so that the next change of the page is counted after this one.
        self.counters.local().replaced(&old, &new);
        old
    }

    /// Notes in a page's LRU node, under the slot's lock, that `new` replaced `old`. Returns the list update that is
    /// due.
    #[inline]
    pub(super) fn note_in_lru(&self, page: PageNo, old: &Contents, new: &Contents) -> ListUpdate {
        let is_stored = matches!(new, Contents::Stored { .. });
        // Only these are in the lists. Looking up others would fault in the memory of their nodes.
        let was_listed = matches!(old, Contents::Stored { .. } | Contents::Backed(_));
        match &self.lru {
            Some(lru) if is_stored && lru.arrive(page.0) => ListUpdate::Add,
            Some(lru) if !is_stored && was_listed && lru.mark_dead(page.0) => ListUpdate::Remove,
            _ => ListUpdate::None,
        }
    }

    /// Carries out the update that [`Store::note_in_lru`] returned, without the slot's lock.
    #[inline]
    pub(super) fn update_lists(&self, page: PageNo, update: ListUpdate) {
        match &self.lru {
            Some(lru) if update == ListUpdate::Add => lru.queue(page.0),
            Some(lru) if update == ListUpdate::Remove => lru.remove_dead(&mut [page.0]),
            _ => {}
        }
    }

    /// Frees the old contents of a slot that is unlocked now.
    #[inline]
    pub(super) fn free(&self, old: Contents) {
        match old {
            // SAFETY: either `publish` took `old` out of the slot under its lock, so that exactly one caller has it, or
            // it was stored and never published.
            Contents::Stored { handle, .. } => unsafe { self.pool.free(handle) },
            Contents::Backed(Backed { place, len, .. }) => {
                self.backing.iter().for_each(|backing| backing.log.died(place, usize::from(len)));
            }
            Contents::Empty | Contents::Same(_) | Contents::Lost => {}
        }
    }

    /// Does all steps in order: publishes `new` in a locked slot as a use of the page, unlocks the slot, frees the old
    /// contents, and updates the LRU's lists.
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
