//! Large sparse arrays, such as the slot table and the pool's page table.
//!
//! A table reserves address space for all its entries and takes memory only for those that were
//! touched. loom's atomics are larger than the ones they model and cannot start out as zeros, so
//! under loom a table is a vector.

use std::ops::{Index, Range};

use super::file::Region;
use crate::base::error::Result;
#[cfg(not(loom))]
use crate::base::error::{Error, ErrorKind};

/// A type that a table may hold.
///
/// # Safety
/// All bytes zero is a valid value, equal to `Default::default()`, and dropping one does nothing.
pub unsafe trait Entry: Default + Send + Sync {
    /// Sets the entry to its default, as `Table::release_page` does. Only for tables that release pages.
    #[cfg(loom)]
    fn clear(&self) {
        unreachable!("no page of such a table is released");
    }
}

// SAFETY: a zeroed atomic integer is its default, and dropping one does nothing.
unsafe impl Entry for crate::base::sync::AtomicU32 {}
// SAFETY: as above.
unsafe impl Entry for crate::base::sync::AtomicU64 {}
// SAFETY: as above; it is an atomic integer.
unsafe impl Entry for crate::base::sync::Counter {}

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
    /// Reserves room for `len` entries (at least 1). Fails with `NoMemory` when the system refuses.
    pub fn new(len: usize) -> Result<Self> {
        Table::new_in(None, len)
    }

    /// As [`Table::new`], in a region of a file of at least [`Table::bytes_of`] bytes, whose contents stay;
    /// in private memory if `region` is `None`. Fails as [`Table::new`].
    pub fn new_in(region: Option<&Region>, len: usize) -> Result<Self> {
        #[cfg(loom)]
        assert!(region.is_none(), "models have no files");
        let len = len.max(1);
        #[cfg(not(loom))]
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::new(ErrorKind::NoMemory, "a table larger than the address space").with_setting("disksize")
        })?;
        Ok(Table {
            #[cfg(not(loom))]
            mapping: super::map::Mapping::new_in(region, bytes, super::map::Access::ReadWrite)?,
            #[cfg(loom)]
            entries: (0..len).map(|_| T::default()).collect(),
            len,
            _entries: std::marker::PhantomData,
        })
    }

    /// Returns the bytes of a region for `len` entries.
    pub fn bytes_of(len: usize) -> u64 {
        (len.max(1) as u64).saturating_mul(size_of::<T>() as u64)
    }

    /// Returns the number of entries.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns an entry.
    ///
    /// # Safety
    /// `index` is below [`Table::len`].
    #[inline]
    pub unsafe fn get_unchecked(&self, index: usize) -> &T {
        debug_assert!(index < self.len);
        #[cfg(loom)]
        return &self.entries[index];
        // SAFETY: the mapping has room for `len` entries, of which this is one (the caller's promise),
        // and is page-aligned; its bytes are zeros, which are a valid `T` (`Entry`), or a `T` that was
        // changed since. Only shared references to a `T` exist.
        #[cfg(not(loom))]
        return unsafe { &*self.mapping.base().cast::<T>().add(index) };
    }

    #[cfg(not(loom))]
    pub(crate) fn as_ptr(&self) -> *const T {
        self.mapping.base().cast()
    }

    /// Makes all entries resident. Fails with `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.populate_range(0..self.len)
    }

    /// Makes the entries of `range` resident. Fails as [`Table::populate`].
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

    /// Returns the number of entries per page of the host, the unit in which a table takes memory. The first
    /// entry starts a page.
    pub fn entries_per_page(&self) -> usize {
        #[cfg(not(loom))]
        return self.mapping.page_bytes() / size_of::<T>();
        // Few, so that models can have more than one page.
        #[cfg(loom)]
        return 2;
    }

    /// Gives the memory of a page of entries back to the system; returns whether it took it. The entries are
    /// then their type's default. A concurrent reader sees the old value or the default. After this returns,
    /// no CPU sees the old page.
    ///
    /// # Safety
    /// Every writer is excluded until it has seen an entry of the page become the default.
    pub(crate) unsafe fn release_page(&self, page: usize) -> bool {
        #[cfg(not(loom))]
        {
            let page_bytes = self.mapping.page_bytes();
            // SAFETY: the caller's promise. To readers, atomics that become zero look as if zero had been
            // stored.
            unsafe { self.mapping.release(page * page_bytes, page_bytes) }
        }
        #[cfg(loom)]
        {
            let first = page * self.entries_per_page();
            self.entries[first..self.len.min(first + self.entries_per_page())].iter().for_each(T::clear);
            true
        }
    }

    /// Calls `f` with the ranges of entries that are in memory, in order; all other entries have the default
    /// value. For a table in private memory, calls `f` once, with all entries. Fails with `Io` if the system
    /// does not report which pages are in memory.
    pub fn for_each_resident(&self, mut f: impl FnMut(Range<usize>)) -> Result<()> {
        #[cfg(not(loom))]
        let region = self.mapping.region();
        #[cfg(loom)]
        let region = None::<&Region>;
        let Some(region) = region else {
            f(0..self.len);
            return Ok(());
        };
        let entry_bytes = size_of::<T>() as u64;
        let mut from = 0;
        region.for_each_data(|data| {
            // An entry may cross a page boundary.
            let range = from.max((data.start / entry_bytes) as usize)
                ..self.len.min(data.end.div_ceil(entry_bytes) as usize);
            from = range.end.max(from);
            if !range.is_empty() {
                f(range);
            }
        })
    }

    /// Returns the bytes of all entries.
    pub fn max_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns an upper bound of the memory that the table takes: pages that were only read count, though
    /// the system maps one shared page of zeros there.
    pub fn resident_bytes(&self) -> usize {
        #[cfg(not(loom))]
        return self.mapping.resident_bytes();
        #[cfg(loom)]
        return self.max_bytes();
    }
}

/// Out of line, so that an index keeps its numbers in registers.
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
        // SAFETY: `index` is below `len`.
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
