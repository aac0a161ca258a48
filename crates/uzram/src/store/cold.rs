//! The pages that are used least, for who has a place for them elsewhere.
//!
//! Pages are taken from the lists' cold end first, without any slot's lock, and then visited one after another
//! with their slots' locks, which are only tried: a page that somebody is busy with is not cold. One that was
//! written anew or discarded meanwhile is in the lists in its own right again, or gone, and is left out.

use crate::base::error::Result;
use crate::base::units::Page;
use crate::lru::AnyLru;

use super::Store;
use super::slot::{Contents, SlotGuard};

/// A cold page, whose slot is locked. Dropped, it stays.
pub struct ColdPage<'a> {
    store: &'a Store,
    lru: &'a AnyLru,
    slot: SlotGuard<'a>,
    page: u64,
    len: u16,
    forgotten: &'a mut bool,
}

impl Store {
    /// Shows up to `most` of the coldest pages to `visit`, the coldest first, and answers how many it saw. Those
    /// that it does not forget count as used just now. Without an LRU there are none.
    pub fn visit_cold(&self, most: usize, mut visit: impl FnMut(ColdPage<'_>)) -> usize {
        let Some(lru) = &self.lru else { return 0 };
        let mut pages = Vec::new();
        lru.isolate(most, &mut pages);
        let mut visited = 0;
        pages.retain(|page| {
            let mut forgotten = false;
            if let Some(cold) = self.cold_page(lru, *page, &mut forgotten) {
                visited += 1;
                visit(cold);
            }
            !forgotten
        });
        lru.put_back(&pages);
        visited
    }

    /// A page that was given out, unless somebody is busy with it or was since.
    fn cold_page<'a>(&'a self, lru: &'a AnyLru, page: u32, forgotten: &'a mut bool) -> Option<ColdPage<'a>> {
        let slot = self.slots.try_lock(u64::from(page))?;
        match slot.contents() {
            Contents::Stored { len, .. } if lru.is_isolated(page) => {
                Some(ColdPage { store: self, lru, slot, page: u64::from(page), len, forgotten })
            }
            _ => None,
        }
    }
}

impl ColdPage<'_> {
    /// Its number.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// What it takes compressed, in bytes: 4096 if it is stored as it is.
    pub fn len_bytes(&self) -> usize {
        usize::from(self.len)
    }

    /// Reads it, which is no use of it.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn read(&self, out: &mut Page) -> Result<()> {
        self.store.load(&self.slot, self.page, out)
    }

    /// Forgets its contents, which whoever calls this has elsewhere: it reads as zeros until it is written. When
    /// it is soon, that counts as a return.
    pub fn forget(self) {
        let ColdPage { store, lru, mut slot, page, forgotten, .. } = self;
        let old = store.exchange(&mut slot, Contents::Empty);
        lru.evicted(page as u32);
        *forgotten = true;
        drop(slot);
        store.free(old);
    }
}
