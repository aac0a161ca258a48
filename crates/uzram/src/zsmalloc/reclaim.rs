//! Emptying the coldest zspages, with the help of those whose objects are in them.
//!
//! A zspage whose turn it is is *isolated*: nothing more is stored into it. Then the owners of its objects
//! are told, one after another and without any lock, who free them or do not. What is left after that is
//! put back, as the hottest. This is what "Implement writeback for zsmalloc" (N. Pham, 2022) did.

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;

use super::design::PoolLocks;
use super::free::FREE_TAG;
use super::lru::Lru;
use super::raw::RawPool;
use super::word::Location;
use super::zspage::{GROUP_ISOLATED, Lists};

/// A zspage that is being emptied.
struct Isolated {
    page: u32,
    class: u8,
    committed: u8,
}

/// What [`RawPool::reclaim_coldest`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Zspages that it looked at.
    pub looked_at: u64,
    /// Pages that are free by it.
    pub freed_pages: u64,
}

impl<D: PoolLocks> RawPool<D> {
    /// Empties the zspages that were stored into longest ago, until `pages` pages are free, or there is
    /// none left to try; returns the number of pages freed. `evict` is told the owner of each object in
    /// them, and is to free it. No lock is held meanwhile; the object may be gone already.
    ///
    /// # Errors
    /// `Invalid` for a pool that does not keep the order of its zspages.
    pub fn reclaim(&self, pages: u64, mut evict: impl FnMut(u32)) -> Result<u64> {
        let (mut freed, mut left) = (0, self.lru.as_ref().map_or(1, Lru::len));
        while freed < pages && left > 0 {
            let emptied = self.reclaim_coldest(1, |owners| owners.iter().for_each(|owner| evict(*owner)))?;
            freed += emptied.freed_pages;
            left = left.saturating_sub(emptied.looked_at.max(1));
        }
        Ok(freed)
    }

    /// Empties up to `most` of the zspages that were stored into longest ago, all at once: `evict` is told the owners
    /// of their objects.
    ///
    /// # Errors
    /// As [`RawPool::reclaim`].
    pub fn reclaim_coldest(&self, most: usize, evict: impl FnOnce(&[u32])) -> Result<Reclaimed> {
        let Some(lru) = &self.lru else {
            let what = "the pool does not keep the order of its zspages: make it with `reclaim`";
            return Err(Error::invalid(what).with_setting("reclaim"));
        };
        let (mut isolated, mut owners, mut emptied) =
            (Vec::with_capacity(most), Vec::new(), Reclaimed::default());
        for _ in 0..lru.len().min(most as u64) {
            let Some((page, class)) = lru.coldest() else { break };
            emptied.looked_at += 1;
            isolated.extend(self.isolate(lru, page, class, &mut owners));
        }
        evict(&owners);
        emptied.freed_pages = isolated.iter().map(|isolated| self.end_isolation(lru, isolated)).sum();
        Ok(emptied)
    }

    /// Isolates a zspage, unless it is gone, or someone is about to write to it, and tells whose objects are in it.
    fn isolate(&self, lru: &Lru, page: u32, class: u8, owners: &mut Vec<u32>) -> Option<Isolated> {
        let mut lists = self.lists(class);
        if !lru.contains(page, class) {
            return None;
        }
        let id = self.zspage_id_at(page);
        // SAFETY: it is in use: it is among the class's, which are locked.
        let descriptor = unsafe { self.zspages.get(id) };
        if descriptor.is_held() {
            lru.touch(page, class);
            return None;
        }
        let (fresh, committed) = self.zspages.with(&mut lists, id, |zspage| (zspage.fresh, zspage.committed));
        if owners.try_reserve(usize::from(fresh)).is_err() {
            return None;
        }
        owners.extend((0..fresh).filter_map(|index| self.owner_of(Location { page, class, index })));
        lists.remove(&self.zspages, id);
        lists.insert(&self.zspages, id, GROUP_ISOLATED);
        lru.remove(page);
        Some(Isolated { page, class, committed })
    }

    /// Puts back what is left of an isolated zspage; returns how many pages are free.
    fn end_isolation(&self, lru: &Lru, isolated: &Isolated) -> u64 {
        let Isolated { page, class, committed } = *isolated;
        let mut lists = self.lists(class);
        let Some(id) = self.find_isolated(&mut lists, page) else { return u64::from(committed) };
        lists.remove(&self.zspages, id);
        lists.insert(&self.zspages, id, 0);
        lists.regroup(&self.zspages, id, self.classes.get(class).objs_per_zspage);
        lru.touch(page, class);
        0
    }

    /// The isolated zspage of a class that starts at `page`, if it is still there.
    fn find_isolated(&self, lists: &mut Lists, page: u32) -> Option<u32> {
        (0..lists.len(GROUP_ISOLATED)).find_map(|_| {
            let id = lists.rotate(&self.zspages, GROUP_ISOLATED)?;
            (self.zspages.with(lists, id, |zspage| zspage.page) == page).then_some(id)
        })
    }

    /// Whose an object is, if it is in use. Its class is locked, and its zspage not held.
    fn owner_of(&self, object: Location) -> Option<u32> {
        let (start, header_bytes) = self.place(object);
        if header_bytes == 0 {
            return Some((self.page_table[object.page as usize].load(Ordering::Relaxed) >> 32) as u32);
        }
        // SAFETY: an object below `fresh` has a header, as nobody is yet to write it.
        let [handle, owner] = unsafe { start.cast::<[u32; 2]>().read() };
        (handle != FREE_TAG).then_some(owner)
    }
}
