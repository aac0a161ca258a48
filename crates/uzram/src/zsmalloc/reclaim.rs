//! Reclaim of the coldest zspages: the owners of their objects are asked to free them.
//!
//! The zspage is *isolated* first: nothing more is stored into it. Then `evict` is called with the owners
//! of its objects, no lock held; it frees the objects or leaves them. A zspage that is not empty then is
//! put back as the hottest. "Implement writeback for zsmalloc" (N. Pham, 2022) did the same.

use crate::base::error::{Error, Result};

use super::design::PoolLocks;
use super::free::FREE_TAG;
use super::lru::Lru;
use super::raw::RawPool;
use super::word::Location;
use super::zspage::{GROUP_ISOLATED, Lists};

struct Isolated {
    page: u32,
    class: u8,
    committed: u8,
}

/// What [`RawPool::reclaim_coldest`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Zspages examined.
    pub looked_at: u64,
    /// Pages freed.
    pub freed_pages: u64,
}

impl<D: PoolLocks> RawPool<D> {
    /// See [`Pool::reclaim`](super::Pool::reclaim). `evict` may be called for an object that is gone already.
    /// Fails with `Invalid` for a pool that does not keep its zspages in LRU order.
    pub fn reclaim(&self, pages: u64, mut evict: impl FnMut(u32)) -> Result<u64> {
        let (mut freed, mut left) = (0, self.lru.as_ref().map_or(1, Lru::len));
        while freed < pages && left > 0 {
            let emptied = self.reclaim_coldest(1, |owners| owners.iter().for_each(|owner| evict(*owner)))?;
            freed += emptied.freed_pages;
            left = left.saturating_sub(emptied.looked_at.max(1));
        }
        Ok(freed)
    }

    /// Empties up to `most` of the zspages that were stored into longest ago: calls `evict` once, with the
    /// owners of all their objects. Fails as [`RawPool::reclaim`].
    pub fn reclaim_coldest(&self, most: usize, evict: impl FnOnce(&[u32])) -> Result<Reclaimed> {
        let Some(lru) = &self.lru else {
            let what = "the pool does not keep its zspages in LRU order: build it with `reclaim`";
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

    /// Isolates a zspage, unless it is gone or held; adds the owners of its objects to `owners`.
    fn isolate(&self, lru: &Lru, page: u32, class: u8, owners: &mut Vec<u32>) -> Option<Isolated> {
        let mut lists = self.lists(class);
        if !lru.contains(page, class) {
            return None;
        }
        let id = self.zspage_id_at(page);
        // SAFETY: the zspage is in use: it is on the class's lists, which are locked.
        let descriptor = unsafe { self.zspages.get(id) };
        if descriptor.is_held() {
            lru.touch(page, class);
            return None;
        }
        let (fresh, committed) = lists.with(&self.zspages, id, |zspage| (zspage.fresh, zspage.committed));
        if owners.try_reserve(usize::from(fresh)).is_err() {
            return None;
        }
        owners.extend((0..fresh).filter_map(|index| self.owner_of(Location { page, class, index })));
        lists.remove(&self.zspages, id);
        lists.insert(&self.zspages, id, GROUP_ISOLATED);
        lru.remove(page);
        Some(Isolated { page, class, committed })
    }

    /// Puts an isolated zspage back if it is not empty; returns the number of pages freed.
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

    fn find_isolated(&self, lists: &mut Lists, page: u32) -> Option<u32> {
        (0..lists.lengths[GROUP_ISOLATED]).find_map(|_| {
            let id = lists.rotate(&self.zspages, GROUP_ISOLATED)?;
            (lists.with(&self.zspages, id, |zspage| zspage.page) == page).then_some(id)
        })
    }

    /// Returns the owner of an object, if it is in use. Its class is locked, and its zspage is not held.
    fn owner_of(&self, object: Location) -> Option<u32> {
        let (start, header_bytes) = self.place(object);
        if header_bytes == 0 {
            return Some(self.huge_owner(object.page));
        }
        // SAFETY: an object below `fresh` has a header: the zspage is not held, so no object of it is
        // unwritten.
        let [handle, owner] = unsafe { start.cast::<[u32; 2]>().read() };
        (handle != FREE_TAG).then_some(owner)
    }
}
