//! Frees objects.

use crate::base::error::Result;
use crate::base::mem::{Account, Run};
use crate::base::sync::{Access, Ordering};

use super::design::{PoolLocks, Released};
use super::raw::RawPool;
use super::word::Location;
use super::zspage::Lists;

/// Replaces the handle in the header of a free object.
pub(super) const FREE_TAG: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
#[must_use = "its pages are to be given back"]
pub(super) struct Emptied {
    pub(super) zspage: u32,
    run: Run,
    committed: u8,
}

/// The most zspages that are emptied under one hold of a class's lock, where nothing may be allocated.
pub(super) const MOST_EMPTIED: usize = 64;
/// The most that are emptied by moving the objects of one.
pub(super) const MOST_EMPTIED_BY_MOVE: usize = 2;

impl<D: PoolLocks> RawPool<D> {
    /// Frees an object, at once or when its last reader is done.
    ///
    /// # Safety
    /// The handle is in use, and only this call frees it; unless [`READS_OUTLIVE_FREES`], no thread reads
    /// its object.
    ///
    /// [`READS_OUTLIVE_FREES`]: super::design::PoolLocks::READS_OUTLIVE_FREES
    #[inline]
    pub unsafe fn free(&self, handle: u32) {
        // SAFETY: the caller's promise.
        if let Some(released) = unsafe { D::free(self, handle) } {
            self.release(handle, released);
        }
    }

    /// Returns whether a freed object's header names its handle. If not, its neighbours may be damaged too:
    /// the object is leaked rather than reused.
    pub(super) fn is_sound(&self, handle: u32, object: Location) -> bool {
        let (start, header_bytes) = self.place(object);
        // SAFETY: the object is no longer read and not yet free: it belongs to the caller.
        let is_sound = header_bytes == 0 || unsafe { start.cast::<[u32; 2]>().read() }[0] == handle;
        if !is_sound {
            self.corrupted.add(1);
        }
        is_sound
    }

    /// Releases an object that is no longer used, then its handle: compaction may look a handle up as long
    /// as an object's header names it.
    #[inline(never)]
    pub(super) fn release(&self, handle: u32, (object, mut lists): Released<'_, D>) {
        self.counts.count(|share| &share.frees);
        let emptied = self.put(&mut lists, object);
        if D::FREES_PAGES_LOCKED
            && let Some(emptied) = emptied
        {
            self.counts.count(|share| &share.runs_freed_locked);
            self.give_back(emptied);
            drop(lists);
        } else {
            drop(lists);
            emptied.into_iter().for_each(|emptied| self.give_back(emptied));
        }
        // SAFETY: the handle was freed, and its last reader is gone.
        unsafe { self.free_handle(handle) };
    }

    /// Frees a handle.
    ///
    /// # Safety
    /// The handle is allocated, and no thread uses it any more.
    pub(super) unsafe fn free_handle(&self, handle: u32) {
        // SAFETY: the caller's promise.
        self.note(unsafe { self.handles.remove(handle) });
    }

    fn note(&self, freed: Result<()>) {
        if freed.is_err() {
            self.corrupted.add(1);
        }
    }

    /// Puts an unused object back into its zspage. If the zspage is empty then, takes it off the lists and
    /// returns it.
    pub(super) fn put(&self, lists: &mut Lists, object: Location) -> Option<Emptied> {
        let Location { page, class, .. } = object;
        let id = self.zspage_id_at(page);
        let inuse = lists.with(&self.zspages, id, |zspage| {
            self.note_access(object, Access::write);
            let (start, header_bytes) = self.place(object);
            if header_bytes > 0 {
                // SAFETY: the object belongs to the caller; the class's lock is held from here until the
                // object is on the free list.
                unsafe { start.cast::<[u32; 2]>().write([FREE_TAG, u32::from(zspage.free)]) };
            } else {
                // Clear the owner, so that a damaged cell cannot claim the freed object.
                self.page_table[page as usize].store(u64::from(id), Ordering::Relaxed);
            }
            zspage.free = object.index;
            zspage.inuse -= 1;
            zspage.inuse
        });
        lists.objs_used -= 1;
        if inuse > 0 {
            lists.regroup(&self.zspages, id, self.classes.get(class).objs_per_zspage);
            return None;
        }
        Some(self.take_off(lists, id, class))
    }

    fn take_off(&self, lists: &mut Lists, id: u32, class: u8) -> Emptied {
        lists.remove(&self.zspages, id);
        let (page, committed) = lists.with(&self.zspages, id, |zspage| (zspage.page, zspage.committed));
        lists.pages_used -= u64::from(committed);
        if let Some(lru) = &self.lru {
            lru.remove(page);
        }
        let run = Run { page, pages: self.classes.get(class).pages_per_zspage };
        Emptied { zspage: id, run, committed }
    }

    pub(super) fn take_off_if_empty(&self, lists: &mut Lists, id: u32) -> Option<Emptied> {
        let inuse = lists.with(&self.zspages, id, |zspage| zspage.inuse);
        // SAFETY: the zspage is on the lists, which are locked.
        (inuse == 0).then(|| self.take_off(lists, id, unsafe { self.zspages.get(id) }.class))
    }

    pub(super) fn give_back(&self, emptied: Emptied) {
        self.counts.count(|share| &share.runs_freed);
        let (run, committed) = self.give_descriptor_back(emptied);
        self.arena.free_run(run, Account::Pool, committed);
    }

    pub(super) fn give_back_all(&self, emptied: &[Emptied]) {
        let mut runs = [(Run { page: 0, pages: 0 }, 0); MOST_EMPTIED];
        for (run, emptied) in runs.iter_mut().zip(emptied) {
            *run = self.give_descriptor_back(*emptied);
        }
        if !emptied.is_empty() {
            self.counts.count(|share| &share.runs_freed);
            self.arena.free_runs(Account::Pool, &runs[..emptied.len()]);
        }
    }

    fn give_descriptor_back(&self, emptied: Emptied) -> (Run, u64) {
        // SAFETY: the zspage is empty and on no list.
        self.note(unsafe { self.zspages.remove(emptied.zspage) });
        (emptied.run, u64::from(emptied.committed))
    }
}
