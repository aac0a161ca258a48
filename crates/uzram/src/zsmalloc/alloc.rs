//! Allocates objects: from the fullest zspage of the class that has room, else from a new one.

use crate::base::error::{Error, Result};
use crate::base::mem::{Account, Full, Gfp};
use crate::base::sync::Ordering;

use super::class::SizeClass;
use super::design::PoolLocks;
use super::raw::RawPool;
use super::word::Location;
use super::zspage::{Descriptor, Lists, NONE_INDEX};

/// Zspages of a group that are searched for a freed object when none may grow.
const HOLE_SEARCH: usize = 32;

impl<D: PoolLocks> RawPool<D> {
    /// Allocates an object; returns it with its zspage, which is held for the caller.
    #[inline]
    pub(super) fn alloc(&self, class: u8, gfp: Gfp) -> Result<(u32, Location)> {
        let shape = self.classes.get(class);
        let mut lists = self.lists(class);
        if let Some((zspage, object)) = self.alloc_in_existing(&mut lists, shape)? {
            self.note_store(object);
            return Ok((zspage, object));
        }
        drop(lists);
        let zspage = self.alloc_zspage(class, gfp)?;
        let mut lists = self.lists(class);
        lists.insert(&self.zspages, zspage, 0);
        match self.take(&mut lists, zspage, shape, true) {
            Ok(object) => {
                // The object has a hold of its own; this drops the one of `alloc_zspage`.
                // SAFETY: the object keeps the zspage in use.
                unsafe { self.zspages.get(zspage) }.let_go();
                self.note_store(object);
                Ok((zspage, object))
            }
            Err(full) => {
                let emptied = self.take_off_if_empty(&mut lists, zspage);
                drop(lists);
                emptied.into_iter().for_each(|emptied| self.give_back(emptied));
                Err(full.into())
            }
        }
    }

    #[inline]
    fn note_store(&self, object: Location) {
        if let Some(lru) = &self.lru {
            lru.touch(object.page, object.class);
        }
    }

    #[inline]
    fn alloc_in_existing(
        &self,
        lists: &mut Lists,
        shape: &SizeClass,
    ) -> Result<Option<(u32, Location)>, Full> {
        let Some(zspage) = lists.fullest_with_room() else { return Ok(None) };
        if let Ok(object) = self.take(lists, zspage, shape, true) {
            return Ok(Some((zspage, object)));
        }
        // The fullest zspage cannot grow, but another may have a free object in its committed pages.
        let hole = |lists: &mut Lists, zspage| {
            self.take(lists, zspage, shape, false).ok().map(|object| (zspage, object))
        };
        lists.find_with_room(&self.zspages, HOLE_SEARCH, hole).map(Some).ok_or(Full)
    }

    /// Takes an object of a zspage that has room, and holds the zspage, as the object cannot be moved
    /// before it is written. Commits further pages of the zspage only if `may_grow`.
    #[inline]
    pub(super) fn take(
        &self,
        lists: &mut Lists,
        zspage_id: u32,
        shape: &SizeClass,
        may_grow: bool,
    ) -> Result<Location, Full> {
        let arena = &self.arena;
        // SAFETY: the class's lists lead to it, and are locked.
        let descriptor = unsafe { self.zspages.get(zspage_id) };
        let taken = lists.with(&self.zspages, zspage_id, |zspage| {
            let mut grown = 0;
            let index = zspage.free;
            let index = if index != NONE_INDEX {
                let offset = usize::from(index) * usize::from(shape.size_bytes);
                let start = arena.address(zspage.page).wrapping_add(offset);
                // SAFETY: a freed object starts with the tag and the index of the next freed object;
                // the class's lock is held, and the object has no owner.
                let [_, next] = unsafe { start.cast::<[u32; 2]>().read() };
                zspage.free = next as u16;
                index
            } else {
                let pages = shape.pages_for(usize::from(zspage.fresh) + 1) as u8;
                grown = pages.saturating_sub(zspage.committed);
                if grown > 0 {
                    if !may_grow {
                        return Err(Full);
                    }
                    let first = zspage.page + u32::from(zspage.committed);
                    arena.commit(Account::Pool, first, u32::from(grown))?;
                    zspage.committed = pages;
                }
                zspage.fresh += 1;
                zspage.fresh - 1
            };
            zspage.inuse += 1;
            Ok((Location { page: zspage.page, class: descriptor.class, index }, grown))
        });
        let (object, grown) = taken?;
        descriptor.hold();
        lists.objs_used += 1;
        lists.pages_used += u64::from(grown);
        lists.regroup(&self.zspages, zspage_id, shape.objs_per_zspage);
        Ok(object)
    }

    /// Makes an empty zspage, held once and on no list. The caller holds no lock.
    #[cold]
    pub(super) fn alloc_zspage(&self, class: u8, gfp: Gfp) -> Result<u32> {
        let shape = self.classes.get(class);
        let run = self.arena.alloc_run(usize::from(shape.pages_per_zspage), Account::Pool, gfp)?;
        let no_run = |_: &Error| self.arena.free_run(run, Account::Pool, 0);
        let id = self.zspages.insert(Descriptor::new(run.page, class), gfp).inspect_err(no_run)?;
        self.page_table[run.page as usize].store(u64::from(id), Ordering::Relaxed);
        Ok(id)
    }
}
