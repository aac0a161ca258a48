//! Arrays too large to fill before they are used: the slot table, the page table of the arena.
//!
//! A table reserves address space for all its entries and takes memory for those that were
//! touched. loom's atomics are larger than the ones they model and cannot start out as zeros, so
//! under loom a table is a vector.

use std::ops::{Index, Range};

use crate::base::error::Result;
#[cfg(not(loom))]
use crate::base::error::{Error, ErrorKind};

/// What a table may hold.
///
/// # Safety
/// All bytes zero is a valid value, equal to `Default::default()`, and dropping one does nothing.
pub unsafe trait Entry: Default + Send + Sync {
    /// Makes it the default, as the system does with a page that it takes: of a table of which pages are released.
    #[cfg(loom)]
    fn clear(&self) {
        unreachable!("no page of such a table is released");
    }
}

// SAFETY: an atomic integer of zero is its default, and has no destructor that does anything.
unsafe impl Entry for crate::base::sync::AtomicU32 {}
// SAFETY: as above.
unsafe impl Entry for crate::base::sync::AtomicU64 {}

/// A fixed number of entries, each its type's default until it is changed.
pub struct Table<T> {
    #[cfg(not(loom))]
    mapping: super::map::Mapping,
    #[cfg(loom)]
    entries: Box<[T]>,
    len: usize,
    _entries: std::marker::PhantomData<T>,
}

impl<T: Entry> Table<T> {
    /// Reserves room for `len` entries (at least 1).
    ///
    /// # Errors
    /// `NoMemory` when the system refuses.
    pub fn new(len: usize) -> Result<Self> {
        let len = len.max(1);
        #[cfg(not(loom))]
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::new(ErrorKind::NoMemory, "a table larger than the address space").with_setting("disksize")
        })?;
        Ok(Table {
            #[cfg(not(loom))]
            mapping: super::map::Mapping::new(bytes, super::map::Access::ReadWrite)?,
            #[cfg(loom)]
            entries: (0..len).map(|_| T::default()).collect(),
            len,
            _entries: std::marker::PhantomData,
        })
    }

    /// How many entries there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// An entry.
    ///
    /// # Safety
    /// `index` is below [`Table::len`].
    #[inline]
    pub unsafe fn get_unchecked(&self, index: usize) -> &T {
        debug_assert!(index < self.len);
        #[cfg(loom)]
        return &self.entries[index];
        // SAFETY: the mapping has room for `len` entries, of which this is one (the caller's promise),
        // and starts on a page boundary, its bytes are zeros or what a `T` became, and zeros are a `T`
        // (`Entry`). A `T` is only ever shared.
        #[cfg(not(loom))]
        return unsafe { &*self.mapping.base().cast::<T>().add(index) };
    }

    /// Where the entries are.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn as_ptr(&self) -> *const T {
        self.mapping.base().cast()
    }

    /// Has all entries in memory from now on.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.populate_range(0..self.len)
    }

    /// Has some entries in memory from now on.
    ///
    /// # Errors
    /// As [`Table::populate`].
    pub fn populate_range(&self, range: Range<usize>) -> Result<()> {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        #[cfg(not(loom))]
        {
            let host_page = self.mapping.page_bytes();
            let start = range.start * size_of::<T>() / host_page * host_page;
            let end = (range.end * size_of::<T>()).next_multiple_of(host_page);
            // The system maps whole pages.
            self.mapping.populate(start, end.min(self.mapping.len_bytes()) - start)?;
        }
        Ok(())
    }

    /// How many entries lie in a page of the host, the unit in which a table takes memory: the first so many in the
    /// first page, and so on.
    pub fn entries_per_page(&self) -> usize {
        #[cfg(not(loom))]
        return self.mapping.page_bytes() / size_of::<T>();
        // So few that models can have a page with more than one.
        #[cfg(loom)]
        return 2;
    }

    /// Gives the memory of a page of entries back to the system, and says whether it took it: the entries are their
    /// type's default then. Whoever looks at one meanwhile sees either. When this returns, no CPU sees the old page
    /// any more.
    ///
    /// # Safety
    /// Every writer is excluded until it has seen an entry of the page become the default.
    pub(crate) unsafe fn release_page(&self, page: usize) -> bool {
        #[cfg(not(loom))]
        {
            let page_bytes = self.mapping.page_bytes();
            // SAFETY: the caller's promise. A table of atomics of which some turn to zero is as if they had been stored.
            unsafe { self.mapping.release(page * page_bytes, page_bytes) }
        }
        #[cfg(loom)]
        {
            let first = page * self.entries_per_page();
            self.entries[first..self.len.min(first + self.entries_per_page())].iter().for_each(T::clear);
            true
        }
    }

    /// The memory that all entries together can take.
    pub fn max_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The memory the table takes now, at most: where entries were only read, the system shows a
    /// page of zeros that many tables share.
    #[cfg(not(loom))]
    pub fn resident_bytes(&self) -> usize {
        self.mapping.resident_bytes()
    }
}

/// Apart, so that looking an entry up keeps its numbers in registers.
#[cold]
#[inline(never)]
fn beyond(index: usize, len: usize) -> ! {
    panic!("entry {index} of {len}")
}

impl<T: Entry> Index<usize> for Table<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        if index >= self.len {
            beyond(index, self.len);
        }
        // SAFETY: there are so many.
        unsafe { self.get_unchecked(index) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::sync::{AtomicU64, Ordering};

    #[test]
    fn entries_take_memory_only_where_touched() {
        let table = Table::<AtomicU64>::new(1 << 30).expect("address space");
        assert_eq!((table.max_bytes(), table.resident_bytes()), (8 << 30, 0));
        table[123_456_789].store(5, Ordering::Relaxed);
        assert_eq!(table[123_456_789].load(Ordering::Relaxed), 5);
        assert_eq!(table[123_456_790].load(Ordering::Relaxed), 0);
        assert_eq!(table.resident_bytes(), rustix::param::page_size());
    }

    #[test]
    fn populated_entries_are_in_memory_and_stay_what_they_are() {
        let host_page = rustix::param::page_size();
        let entries = 10 * host_page / 8;
        let table = Table::<AtomicU64>::new(entries + 1).expect("address space");
        table[entries / 2].store(5, Ordering::Relaxed);
        table.populate_range(entries / 2 - 1..entries / 2 + 1).expect("memory");
        assert_eq!(table.resident_bytes(), 2 * host_page);
        table.populate().expect("memory");
        assert_eq!((table.resident_bytes(), table[entries / 2].load(Ordering::Relaxed)), (11 * host_page, 5));
        // As before Linux 5.14.
        let table = Table::<AtomicU64>::new(entries + 1).expect("address space");
        table[entries].store(6, Ordering::Relaxed);
        table.mapping.touch(0, table.mapping.len_bytes());
        assert_eq!((table.resident_bytes(), table[entries].load(Ordering::Relaxed)), (11 * host_page, 6));
    }

    #[test]
    #[should_panic(expected = "entry 3 of 3")]
    fn an_index_beyond_the_end_panics() {
        let _ = &Table::<AtomicU64>::new(3).expect("memory")[3];
    }
}
