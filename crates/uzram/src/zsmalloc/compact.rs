//! Compaction: moves objects together to free zspages and chunks of the arena (`docs/internals/zsmalloc.md`).
//!
//! An object is moved under its design's [`PoolLocks::MigrationGuard`], where no thread can look it up: it is
//! copied, its handle is pointed at the copy, and the old object is freed. One that is being read or written
//! stays in place.

use std::time::Duration;

use crate::base::cpu::relax;
use crate::base::mem::Gfp;
use crate::base::sync::{Access, MutexGuard, Timed};
use crate::base::work::Work;

use super::class::SizeClass;
use super::design::PoolLocks;
use super::free::{Emptied, FREE_TAG, MOST_EMPTIED, MOST_EMPTIED_BY_MOVE};
use super::lru::End;
use super::raw::RawPool;
use super::word::{Cell, Location};
use super::zspage::Lists;

/// Compaction of a class ends after this many zspages that could not be emptied.
const STUCK_ZSPAGES: usize = 8;

/// How often a thread that waits for another's compaction checks for its end and for cancellation.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The extent of compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Until no class can free a zspage.
    Zspages,
    /// Until no class can free a page.
    Tight,
}

/// The amount that compaction may move.
pub struct Budget<'a> {
    bytes: u64,
    work: Option<&'a Work<'a>>,
}

impl<'a> Budget<'a> {
    /// Allows about `bytes` bytes.
    pub fn bytes(bytes: u64) -> Self {
        Budget { bytes, work: None }
    }

    /// Allows any amount.
    pub fn unlimited() -> Self {
        Budget::bytes(u64::MAX)
    }

    /// Allows any amount until `work` is cancelled. Counts moved objects as its progress.
    pub fn of(work: &'a Work<'a>) -> Self {
        Budget { bytes: u64::MAX, work: Some(work) }
    }

    /// Spends the rest if the work is cancelled. The caller holds no class's lock.
    pub(super) fn spend_if_cancelled(&mut self) {
        if self.work.is_some_and(|work| !work.still_wanted()) {
            self.bytes = 0;
        }
    }

    /// Returns whether nothing more may be moved.
    pub fn is_spent(&self) -> bool {
        self.bytes == 0
    }

    fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.work.into_iter().for_each(|work| work.note(1));
    }

    fn with_at_most<R>(&mut self, bytes: u64, f: impl FnOnce(&mut Budget<'a>) -> R) -> R {
        let given = self.bytes.min(bytes);
        let mut part = Budget { bytes: given, work: self.work };
        let done = f(&mut part);
        self.bytes -= given - part.bytes;
        done
    }
}

/// The result of moving a zspage's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Emptied,
    /// The destination is full.
    Filled,
    /// The remaining objects are being read or written.
    Stuck,
    /// Other threads wait for the lock, or the budget is spent.
    Yield,
    /// The memory limit is reached.
    Full,
}

type MigrationLists<'a, D> = Timed<'a, <D as PoolLocks>::MigrationGuard<'a>>;

impl<D: PoolLocks> RawPool<D> {
    /// Compacts the pool; returns the number of pages freed. One thread at a time compacts; other callers
    /// wait for it until their work is cancelled.
    pub fn compact(&self, effort: Effort, budget: &mut Budget<'_>) -> u64 {
        let Some(_alone) = self.wait_for_compaction(budget) else { return 0 };
        let classes = 0..self.classes.iter().len();
        let freed: i64 = classes.map(|class| self.compact_class(class as u8, effort, budget)).sum();
        let freed = freed + self.empty_chunks(budget);
        let freed = u64::try_from(freed).unwrap_or(0);
        self.pages_compacted.add(freed);
        freed
    }

    /// Waits until no other thread compacts. Returns `None` if the work is cancelled first.
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

    /// Returns the number of pages that compaction would at least free: the sum of the kernel's `freeable`.
    pub fn freeable_pages(&self) -> u64 {
        let freeable = |(index, class): (usize, &SizeClass)| {
            self.lists(index as u8).freeable_zspages(class) * u64::from(class.pages_per_zspage)
        };
        self.classes.iter().enumerate().map(freeable).sum()
    }

    pub(super) fn lock_for_migration(&self, class: u8) -> MigrationLists<'_, D> {
        Timed::new(self.locks.lock_for_migration(class, &self.counts), self.counts.lists_hold_ns())
    }

    fn compact_class(&self, class: u8, effort: Effort, budget: &mut Budget<'_>) -> i64 {
        // Move as many bytes as the class has, at most: other threads may make new gaps without end.
        let all_bytes = self.lists(class).objs_used * u64::from(self.classes.get(class).size_bytes);
        let freed = budget.with_at_most(all_bytes, |budget| self.pack(class, effort, budget));
        budget.spend_if_cancelled();
        if effort == Effort::Tight { freed + self.tighten(class, budget) } else { freed }
    }

    /// Moves objects of a class from its emptiest zspages to its fullest; returns the number of pages freed.
    fn pack(&self, class: u8, effort: Effort, budget: &mut Budget<'_>) -> i64 {
        let shape = self.classes.get(class);
        let (mut freed, mut stuck, mut met_limit) = (0, 0, false);
        while stuck < STUCK_ZSPAGES {
            budget.spend_if_cancelled();
            if budget.is_spent() {
                break;
            }
            let (mut emptied, mut last) = (Vec::with_capacity(MOST_EMPTIED), None);
            let mut lists = self.lock_for_migration(class);
            let pages_before = lists.pages_used as i64;
            while let Some((from, to)) = self.pair(&mut lists, shape, effort) {
                let outcome = self.move_objects(&mut lists, from, to, budget, &mut emptied);
                last = Some(outcome);
                if !matches!(outcome, Outcome::Emptied | Outcome::Filled) {
                    break;
                }
                if emptied.len() + MOST_EMPTIED_BY_MOVE > MOST_EMPTIED {
                    last = Some(Outcome::Yield);
                    break;
                }
            }
            if last == Some(Outcome::Stuck) {
                // Try another zspage first next time.
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
                // The limit is reached again, or no pair is left.
                _ => break,
            }
        }
        freed
    }

    /// Returns the zspage to move objects from and the one to move them to, if any.
    fn pair(&self, lists: &mut Lists, shape: &SizeClass, effort: Effort) -> Option<(u32, u32)> {
        let is_worth_it = match effort {
            Effort::Zspages => lists.freeable_zspages(shape) > 0,
            Effort::Tight => lists.pages_used > lists.ideal_pages(shape),
        };
        let from = is_worth_it.then(|| lists.emptiest(&self.zspages)).flatten()?;
        Some((from, lists.fullest_but(&self.zspages, from)?))
    }

    /// Moves the objects of the one zspage of a class that has gaps into a new zspage, if that frees a page.
    fn tighten(&self, class: u8, budget: &mut Budget<'_>) -> i64 {
        let shape = self.classes.get(class);
        let wastes = |lists: &Lists| lists.pages_used > lists.ideal_pages(shape);
        if budget.is_spent() || !wastes(&self.lists(class)) {
            return 0;
        }
        let Ok(new) = self.alloc_zspage(class, Gfp::MayWait) else { return 0 };
        let emptied = Vec::with_capacity(MOST_EMPTIED_BY_MOVE);
        let mut lists = self.lock_for_migration(class);
        let from = wastes(&lists).then(|| lists.emptiest(&self.zspages)).flatten();
        self.move_to_new(lists, from, new, emptied, budget)
    }

    /// Moves the objects of `from` into `new`, which is on no list yet; without `from`, frees `new`.
    /// Returns the number of pages freed, which may be negative. `emptied` has room for
    /// [`MOST_EMPTIED_BY_MOVE`].
    pub(super) fn move_to_new(
        &self,
        mut lists: MigrationLists<'_, D>,
        from: Option<u32>,
        new: u32,
        mut emptied: Vec<Emptied>,
        budget: &mut Budget<'_>,
    ) -> i64 {
        let pages_before = lists.pages_used as i64;
        // SAFETY: the caller owns the zspage, which is then on the lists, and these are locked.
        unsafe { self.zspages.get(new) }.let_go();
        lists.insert(&self.zspages, new, 0);
        if let Some(from) = from {
            self.move_objects(&mut lists, from, new, budget, &mut emptied);
        }
        if !emptied.iter().any(|emptied| emptied.zspage == new) {
            match self.take_off_if_empty(&mut lists, new) {
                Some(unused) => emptied.push(unused),
                // At the back, as `leave_chunks` takes zspages from the front.
                None => {
                    lists.move_to_back(&self.zspages, new);
                    if let Some(lru) = &self.lru {
                        let page = lists.with(&self.zspages, new, |zspage| zspage.page);
                        // SAFETY: the zspage is on the lists, which are locked.
                        lru.insert(page, unsafe { self.zspages.get(new) }.class, End::Coldest);
                    }
                }
            }
        }
        let freed = pages_before - lists.pages_used as i64;
        drop(lists);
        self.give_back_all(&emptied);
        freed
    }

    /// Moves objects from one zspage to another of their class until `from` is empty, `to` is full, or
    /// another [`Outcome`] ends it. After `Stuck`, `to` may be in `emptied`.
    fn move_objects(
        &self,
        lists: &mut MigrationLists<'_, D>,
        from: u32,
        to: u32,
        budget: &mut Budget<'_>,
        emptied: &mut Vec<Emptied>,
    ) -> Outcome {
        // SAFETY: the zspage is on the lists, which are locked.
        let source = unsafe { self.zspages.get(from) };
        if source.is_held() {
            return Outcome::Stuck;
        }
        let (class, shape) = (source.class, self.classes.get(source.class));
        let (page, fresh) = lists.with(&self.zspages, from, |zspage| (zspage.page, zspage.fresh));
        for index in 0..fresh {
            let object = Location { page, class, index };
            let huge_handle = source.huge_handle();
            let Some(cell) = self.movable(object, huge_handle) else { continue };
            let Ok(place) = self.take(lists, to, shape, true) else { return Outcome::Full };
            self.copy(object, place, to);
            // SAFETY: `take` held the zspage, and its object is in use.
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
            if lists.with(&self.zspages, to, |zspage| zspage.inuse) == shape.objs_per_zspage {
                return Outcome::Filled;
            }
            if budget.is_spent() || D::is_contended(lists.guard_mut()) {
                return Outcome::Yield;
            }
        }
        Outcome::Stuck
    }

    /// Returns the cell of the handle that points at `object`, if there is one and the object can be moved.
    /// The class is locked for migration, and the zspage is not held.
    fn movable(&self, object: Location, huge_handle: u32) -> Option<&D::Cell> {
        let (start, header_bytes) = self.place(object);
        let handle = if header_bytes == 0 {
            huge_handle
        } else {
            // SAFETY: an object below `fresh` has a header: a handle, as the zspage is not held and so has no
            // unwritten object, or the tag of a free object.
            let [handle, _] = unsafe { start.cast::<[u32; 2]>().read() };
            handle
        };
        if handle == FREE_TAG {
            return None;
        }
        // A damaged header may name any number; `is_movable` rejects it.
        self.cell(handle).filter(|cell| cell.is_movable(object))
    }

    fn copy(&self, from: Location, to: Location, to_zspage: u32) {
        self.note_access(from, Access::read);
        self.note_access(to, Access::write);
        let ((source, header_bytes), (destination, _)) = (self.place(from), self.place(to));
        let size_bytes = usize::from(self.classes.get(from.class).size_bytes);
        // SAFETY: both locations have room for an object of the class, in committed pages; the new one
        // belongs to the caller alone, and no thread writes to a stored object.
        unsafe { destination.copy_from_nonoverlapping(source, size_bytes) };
        if header_bytes == 0 {
            self.set_huge_owner(to.page, self.huge_owner(from.page), to_zspage);
            // SAFETY: the object is moved from one to the other, so both zspages are in use.
            let (from, to) = unsafe { (self.zspage_at(from.page), self.zspage_at(to.page)) };
            to.set_huge_handle(from.huge_handle());
        }
    }
}
