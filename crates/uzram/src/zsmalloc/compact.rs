//! Moving objects together, so that zspages run empty and chunks of the arena too.
//!
//! 1. Each class's objects are moved from its emptiest zspages into its fullest that have room, as long
//!    as a zspage can be freed so: what the kernel's `zs_compact` does.
//! 2. If the caller wants it [`Effort::Tight`], on until no more than one zspage of the class has gaps,
//!    whose objects then move into a new one that has only the pages they need.
//! 3. Zspages of the arena's emptiest chunks are moved into others, if that frees chunks.
//!
//! Reads and writes go on meanwhile. A class is locked for as long as nobody else waits for it, and
//! looked at after each object; an object that is being read or written just stays where it is.
//!
//! An object is moved under its design's [`MigrationGuard`], where nobody can find it: it is copied, its
//! handle is led to the copy, and the old place is freed.

use std::time::Duration;

use crate::base::cpu::relax;
use crate::base::mem::Gfp;
use crate::base::sync::{MutexGuard, Timed};
use crate::base::work::Work;

use super::class::SizeClass;
use super::design::{MigrationGuard, PoolLocks};
use super::free::{EmptiedList, FREE_TAG};
use super::lru::End;
use super::raw::RawPool;
use super::word::{Cell, Location};
use super::zspage::Lists;

/// Zspages of a class that could not be emptied, after which its compaction ends.
const STUCK_ZSPAGES: usize = 8;

/// How often work that waits for another thread's compaction looks whether it is its turn, or no longer wanted.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How far compaction goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Until no class can free a zspage.
    Zspages,
    /// Until no class can free a page.
    Tight,
}

/// How much may be moved.
pub struct Budget<'a> {
    bytes: u64,
    work: Option<&'a Work<'a>>,
}

impl<'a> Budget<'a> {
    /// About so many bytes.
    pub fn bytes(bytes: u64) -> Self {
        Budget { bytes, work: None }
    }

    /// As much as there is.
    pub fn unlimited() -> Self {
        Budget::bytes(u64::MAX)
    }

    /// As much as there is, as long as the work is wanted. Objects that were moved are noted there.
    pub fn of(work: &'a Work<'a>) -> Self {
        Budget { bytes: u64::MAX, work: Some(work) }
    }

    /// Spends the rest if the work is no longer wanted. No lock is held.
    pub(super) fn spend_if_cancelled(&mut self) {
        if self.work.is_some_and(|work| !work.still_wanted()) {
            self.bytes = 0;
        }
    }

    /// Whether nothing more may be moved.
    pub fn is_spent(&self) -> bool {
        self.bytes == 0
    }

    /// An object of so many bytes was moved.
    fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.work.into_iter().for_each(|work| work.note(1));
    }

    /// Runs `f` with at most `bytes` of the budget.
    fn with_at_most<R>(&mut self, bytes: u64, f: impl FnOnce(&mut Budget<'a>) -> R) -> R {
        let given = self.bytes.min(bytes);
        let mut part = Budget { bytes: given, work: self.work };
        let done = f(&mut part);
        self.bytes -= given - part.bytes;
        done
    }
}

/// How moving a zspage's objects ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All are gone.
    Emptied,
    /// There is no more room where they go.
    Filled,
    /// Those that are left are being read or written.
    Stuck,
    /// Others wait for the lock, or the budget is spent.
    Yield,
    /// The limit is met.
    Full,
}

type MigrationLists<'a, D> = Timed<'a, <D as PoolLocks>::MigrationGuard<'a>>;

impl<D: PoolLocks> RawPool<D> {
    /// Moves objects together, and returns the number of pages that freed. One thread at a time does; others
    /// wait for it, as long as their work is wanted.
    pub fn compact(&self, effort: Effort, budget: &mut Budget<'_>) -> u64 {
        let Some(_alone) = self.wait_for_compaction(budget) else { return 0 };
        let classes = 0..self.classes.iter().len();
        let freed: i64 = classes.map(|class| self.compact_class(class as u8, effort, budget)).sum();
        let freed = freed + self.empty_chunks(budget);
        let freed = u64::try_from(freed).unwrap_or(0);
        self.pages_compacted.add(freed);
        freed
    }

    /// Waits until no other thread compacts. None if the work is no longer wanted before.
    fn wait_for_compaction(&self, budget: &mut Budget<'_>) -> Option<MutexGuard<'_, ()>> {
        if budget.work.is_none() {
            return Some(self.compaction.lock());
        }
        loop {
            if let Some(alone) = self.compaction.try_lock() {
                return Some(alone);
            }
            budget.spend_if_cancelled();
            if budget.is_spent() {
                return None;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Pages that compaction would free at least: the sum of the kernel's `freeable`.
    pub fn freeable_pages(&self) -> u64 {
        let freeable = |(index, class): (usize, &SizeClass)| {
            self.lists(index as u8).freeable_zspages(class) * u64::from(class.pages_per_zspage)
        };
        self.classes.iter().enumerate().map(freeable).sum()
    }

    pub(super) fn lock_for_migration(&self, class: u8) -> MigrationLists<'_, D> {
        Timed::new(self.locks.lock_for_migration(class, &self.counts), self.counts.lists_hold_ns())
    }

    /// Compacts one class, and returns the number of pages that freed.
    fn compact_class(&self, class: u8, effort: Effort, budget: &mut Budget<'_>) -> i64 {
        // Every object once at most: others may go on making gaps for ever.
        let all_bytes = self.lists(class).objs_used * u64::from(self.classes.get(class).size_bytes);
        let freed = budget.with_at_most(all_bytes, |budget| self.pack(class, effort, budget));
        budget.spend_if_cancelled();
        if effort == Effort::Tight { freed + self.tighten(class, budget) } else { freed }
    }

    /// Moves objects of a class from its emptiest zspages to its fullest, and returns the number of pages that
    /// freed.
    fn pack(&self, class: u8, effort: Effort, budget: &mut Budget<'_>) -> i64 {
        let shape = self.classes.get(class);
        let (mut freed, mut stuck, mut met_limit) = (0, 0, false);
        while stuck < STUCK_ZSPAGES {
            budget.spend_if_cancelled();
            if budget.is_spent() {
                break;
            }
            let (mut emptied, mut last) = (EmptiedList::new(), None);
            let mut lists = self.lock_for_migration(class);
            let pages_before = lists.pages_used as i64;
            while let Some((from, to)) = self.pair(&mut lists, shape, effort) {
                let outcome = self.move_objects(&mut lists, from, to, budget, &mut emptied);
                last = Some(outcome);
                if !matches!(outcome, Outcome::Emptied | Outcome::Filled) {
                    break;
                }
                if emptied.is_nearly_full() {
                    last = Some(Outcome::Yield);
                    break;
                }
            }
            if last == Some(Outcome::Stuck) {
                // Another one first, the next time.
                lists.rotate_emptiest(&self.zspages);
            }
            freed += pages_before - lists.pages_used as i64;
            drop(lists);
            self.give_back_all(&emptied);
            match last {
                Some(Outcome::Stuck) => stuck += 1,
                Some(Outcome::Yield) => relax(),
                Some(Outcome::Full) if !met_limit => {
                    met_limit = true;
                    self.arena.release_free();
                }
                // The limit is met again, or there is no pair left.
                _ => break,
            }
        }
        freed
    }

    /// From which zspage of a class objects are to be moved to which other, if any.
    fn pair(&self, lists: &mut Lists, shape: &SizeClass, effort: Effort) -> Option<(u32, u32)> {
        let is_worth_it = match effort {
            Effort::Zspages => lists.freeable_zspages(shape) > 0,
            Effort::Tight => lists.pages_used > lists.ideal_pages(shape),
        };
        let from = is_worth_it.then(|| lists.emptiest(&self.zspages)).flatten()?;
        Some((from, lists.fullest_but(&self.zspages, from)?))
    }

    /// Moves the objects of the one zspage of a class that has gaps into a new one without, if that frees
    /// a page.
    fn tighten(&self, class: u8, budget: &mut Budget<'_>) -> i64 {
        let shape = self.classes.get(class);
        let wastes = |lists: &Lists| lists.pages_used > lists.ideal_pages(shape);
        if budget.is_spent() || !wastes(&self.lists(class)) {
            return 0;
        }
        let Ok(new) = self.alloc_zspage(class, Gfp::MayWait) else { return 0 };
        let mut lists = self.lock_for_migration(class);
        let from = wastes(&lists).then(|| lists.emptiest(&self.zspages)).flatten();
        self.move_to_new(lists, from, new, budget)
    }

    /// Moves the objects of a zspage into `new`, which is in no list yet; without a zspage `new` goes back.
    /// Returns the number of pages that freed, which may be less than none.
    pub(super) fn move_to_new(
        &self,
        mut lists: MigrationLists<'_, D>,
        from: Option<u32>,
        new: u32,
        budget: &mut Budget<'_>,
    ) -> i64 {
        let pages_before = lists.pages_used as i64;
        let mut emptied = EmptiedList::new();
        // SAFETY: the zspage is the caller's, then in the lists, which are locked.
        unsafe { self.zspages.get(new) }.let_go();
        lists.insert(&self.zspages, new, 0);
        if let Some(from) = from {
            self.move_objects(&mut lists, from, new, budget, &mut emptied);
        }
        if !emptied.iter().any(|emptied| emptied.zspage == new) {
            match self.take_off_if_empty(&mut lists, new) {
                Some(unused) => emptied.push(unused),
                // Who goes through the list has seen it.
                None => {
                    lists.move_to_back(&self.zspages, new);
                    self.note_moved(&mut lists, new);
                }
            }
        }
        let freed = pages_before - lists.pages_used as i64;
        drop(lists);
        self.give_back_all(&emptied);
        freed
    }

    /// Moves objects from one zspage to another of their class until one of them is empty or full, or
    /// something is in the way. After `Stuck`, the zspage `to` may be among the `emptied`.
    fn move_objects(
        &self,
        lists: &mut MigrationLists<'_, D>,
        from: u32,
        to: u32,
        budget: &mut Budget<'_>,
        emptied: &mut EmptiedList,
    ) -> Outcome {
        // SAFETY: the lists lead to it, and are locked.
        let source = unsafe { self.zspages.get(from) };
        if source.is_held() {
            return Outcome::Stuck;
        }
        let (class, shape) = (source.class, self.classes.get(source.class));
        let (page, fresh) = self.zspages.with(lists, from, |zspage| (zspage.page, zspage.fresh));
        for index in 0..fresh {
            let object = Location { page, class, index };
            let huge_handle = source.huge_handle();
            let Some(cell) = self.movable(object, huge_handle) else { continue };
            let Ok(place) = self.take(lists, to, shape, true) else { return Outcome::Full };
            self.copy(object, place, to);
            // SAFETY: `take` held it, and its object is in use.
            unsafe { self.zspages.get(to) }.let_go();
            if !cell.relocate(object, place) {
                self.put(lists, place).into_iter().for_each(|place| emptied.push(place));
                return Outcome::Stuck;
            }
            budget.spend(u64::from(shape.size_bytes));
            if let Some(source) = self.put(lists, object) {
                emptied.push(source);
                return Outcome::Emptied;
            }
            if self.zspages.with(lists, to, |zspage| zspage.inuse) == shape.objs_per_zspage {
                return Outcome::Filled;
            }
            if budget.is_spent() || lists.guard_mut().is_contended() {
                return Outcome::Yield;
            }
        }
        Outcome::Stuck
    }

    /// Gives a zspage whose objects came from another one a place among the coldest.
    fn note_moved(&self, lists: &mut Lists, new: u32) {
        if let Some(lru) = &self.lru {
            let page = self.zspages.with(lists, new, |zspage| zspage.page);
            // SAFETY: the lists lead to it, and are locked.
            lru.insert(page, unsafe { self.zspages.get(new) }.class, End::Coldest);
        }
    }

    /// The cell of the handle that leads to `object`, if there is one and it could be moved. The class's
    /// lists are still, and its zspage is not held.
    fn movable(&self, object: Location, huge_handle: u32) -> Option<&D::Cell> {
        let (start, header_bytes) = self.place(object);
        let handle = if header_bytes == 0 {
            huge_handle
        } else {
            // SAFETY: an object below `fresh` has a header: of a handle, as its zspage is not held by one
            // who is yet to write it, or the tag of a free one.
            let [handle, _] = unsafe { start.cast::<[u32; 2]>().read() };
            handle
        };
        if handle == FREE_TAG {
            return None;
        }
        // A damaged header may name anything, and nothing is moved for it.
        self.cell(handle).filter(|cell| cell.is_movable(object))
    }

    /// Copies an object to another place of its class.
    fn copy(&self, from: Location, to: Location, to_zspage: u32) {
        self.contents().read(from);
        self.contents().write(to);
        let ((source, header_bytes), (destination, _)) = (self.place(from), self.place(to));
        let size_bytes = usize::from(self.classes.get(from.class).size_bytes);
        // SAFETY: both places have room for an object of the class, in committed pages; the new one is
        // the caller's alone, and nobody writes to a stored object.
        unsafe { destination.copy_from_nonoverlapping(source, size_bytes) };
        if header_bytes == 0 {
            self.copy_huge_names(from, to, to_zspage);
        }
    }
}
