//! Objects of one type in runs of the arena, named by number.
//!
//! loom's atomics cannot be made out of an arena's bytes: under loom the objects stand in a table.

use super::table::Table;
use super::{Account, Arena, Entry, Full, MAX_RUN_PAGES, Run};
use crate::base::error::Result;
use crate::base::sync::Arc;
#[cfg(not(feature = "loom"))]
use crate::base::sync::{AtomicU32, Ordering};
use crate::base::units::PAGE_SIZE;

/// Room for objects of type `T`, in up to a fixed number of runs of 16 pages.
pub struct Objects<T> {
    arena: Arc<Arena>,
    /// The first page of each run, and 1; 0 where there is none yet.
    #[cfg(not(feature = "loom"))]
    pages: Table<AtomicU32>,
    #[cfg(feature = "loom")]
    objects: Table<T>,
    max_runs: u32,
    _objects: std::marker::PhantomData<T>,
}

impl<T: Entry> Objects<T> {
    /// Objects of a run.
    pub const PER_RUN: u32 = if cfg!(feature = "loom") {
        8
    } else {
        assert!(size_of::<T>().is_power_of_two() && size_of::<T>() <= PAGE_SIZE);
        (MAX_RUN_PAGES * PAGE_SIZE / size_of::<T>()) as u32
    };
    #[cfg(not(feature = "loom"))]
    const PER_PAGE: u32 = Self::PER_RUN / MAX_RUN_PAGES as u32;

    /// Room for `max_objects`, rounded up to whole runs, in the memory of `arena`. There are no
    /// runs yet.
    ///
    /// # Errors
    /// `NoMemory` when there is no address space for the list of runs.
    pub fn new(arena: Arc<Arena>, max_objects: u64) -> Result<Self> {
        let most = u64::from(u32::MAX / Self::PER_RUN);
        let max_runs = max_objects.div_ceil(u64::from(Self::PER_RUN)).clamp(1, most) as u32;
        Ok(Objects {
            arena,
            #[cfg(not(feature = "loom"))]
            pages: Table::new(max_runs as usize)?,
            #[cfg(feature = "loom")]
            objects: Table::new((max_runs * Self::PER_RUN) as usize)?,
            max_runs,
            _objects: std::marker::PhantomData,
        })
    }

    /// How many runs there may be.
    pub fn max_runs(&self) -> u32 {
        self.max_runs
    }

    /// Where the runs come from.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Makes `run`, of 16 pages, the place of the objects from `number * PER_RUN` on. It belongs
    /// to these objects from now on, and its pages are committed by [`Objects::commit`] only.
    pub fn set_run(&self, number: u32, run: Run) {
        assert_eq!(usize::from(run.pages), MAX_RUN_PAGES);
        #[cfg(not(feature = "loom"))]
        self.pages[number as usize].store(run.page + 1, Ordering::Release);
        #[cfg(feature = "loom")]
        let _ = number;
    }

    /// Charges the page that `object` is the first of, if it is the first of one. To be called
    /// once for each object, in ascending order, before it is used.
    ///
    /// # Errors
    /// `Full` when the arena's limit does not allow it.
    #[inline]
    pub fn commit(&self, object: u32) -> Result<(), Full> {
        #[cfg(not(feature = "loom"))]
        if object.is_multiple_of(Self::PER_PAGE) {
            let page = self.first_page(object) + object % Self::PER_RUN / Self::PER_PAGE;
            return self.arena.commit(Account::Slab, page, 1);
        }
        let _ = (object, Account::Slab);
        Ok(())
    }

    /// An object. Its run has been set, and it has been committed.
    #[inline]
    pub fn get(&self, object: u32) -> &T {
        #[cfg(feature = "loom")]
        return &self.objects[object as usize];
        #[cfg(not(feature = "loom"))]
        {
            let first = self.arena.address(self.first_page(object)).cast::<T>();
            // SAFETY: the run belongs to these objects for good, and its bytes are zeros or a `T`
            // (`Entry`). A run starts on a page boundary and holds a whole number of objects, so
            // the address is aligned and inside it. A `T` is only ever shared.
            unsafe { &*first.add((object % Self::PER_RUN) as usize) }
        }
    }

    /// The object of any number at all, if its run has been set: for hints.
    #[inline]
    pub fn try_get(&self, object: u32) -> Option<&T> {
        let run = object / Self::PER_RUN;
        #[cfg(not(feature = "loom"))]
        let is_set = run < self.max_runs && self.pages[run as usize].load(Ordering::Acquire) != 0;
        #[cfg(feature = "loom")]
        let is_set = run < self.max_runs;
        is_set.then(|| self.get(object))
    }

    /// What the list of runs takes at most.
    pub fn table_bytes(&self) -> usize {
        self.max_runs as usize * size_of::<u32>()
    }

    #[cfg(not(feature = "loom"))]
    #[inline]
    fn first_page(&self, object: u32) -> u32 {
        self.pages[(object / Self::PER_RUN) as usize].load(Ordering::Relaxed) - 1
    }
}
