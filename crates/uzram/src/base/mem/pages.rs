//! Zeroed pages, for buffers that are large and often not filled.

use std::ops::{Deref, DerefMut};

use super::file::Region;
use super::map::{Access, Mapping};
use crate::base::error::Result;

/// A zeroed byte buffer. A page takes memory once it is touched. Dropping the buffer gives all memory back to
/// the system, unless it is a file's.
pub struct ZeroedPages {
    mapping: Mapping,
    /// At most the mapping's.
    len_bytes: usize,
}

impl ZeroedPages {
    /// Makes a buffer of `len_bytes` bytes. Fails with `NoMemory` when the system refuses.
    pub fn new(len_bytes: usize) -> Result<Self> {
        Ok(ZeroedPages { mapping: Mapping::new(len_bytes.max(1), Access::ReadWrite)?, len_bytes })
    }

    /// Makes a buffer of a region of a file: what was written to it is there, and stays when the buffer is
    /// dropped. Fails with `Invalid` for an empty region; `NoMemory` when the system refuses.
    ///
    /// # Safety
    /// While the buffer lives, nobody else writes to the region, in this process or another.
    pub unsafe fn of_region(region: &Region) -> Result<Self> {
        let len_bytes = region.len_bytes as usize;
        Ok(ZeroedPages { mapping: Mapping::new_in(Some(region), len_bytes, Access::ReadWrite)?, len_bytes })
    }

    /// Makes all of it resident. The contents stay. Fails with `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.mapping.populate(0, self.mapping.len_bytes())
    }
}

impl Deref for ZeroedPages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable, has at least this length, and belongs to this value; writers
        // borrow the value mutably (`deref_mut`), and there are no others (`of_region`).
        unsafe { std::slice::from_raw_parts(self.mapping.base(), self.len_bytes) }
    }
}

impl DerefMut for ZeroedPages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, has at least this length, and belongs to this value
        // alone (`of_region`), which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base(), self.len_bytes) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zeros_and_can_be_changed() {
        let mut pages = ZeroedPages::new(10_000).expect("memory");
        assert!(pages.len() == 10_000 && pages.iter().all(|byte| *byte == 0));
        pages.fill(7);
        assert!(pages.iter().all(|byte| *byte == 7));
        assert!(ZeroedPages::new(usize::MAX / 2).is_err());
    }

    #[test]
    fn pages_of_a_file_stay() {
        let file = super::super::MemoryFile::create("test", 3 << 16).expect("a file");
        let region = file.region(1 << 16, 1 << 16).expect("inside");
        // SAFETY: there is one buffer at a time.
        let map = || unsafe { ZeroedPages::of_region(&region).expect("mapped") };
        let mut pages = map();
        pages.populate().expect("memory");
        assert!(pages.len() == 1 << 16 && pages.iter().all(|byte| *byte == 0));
        pages[1234] = 7;
        drop(pages);
        let pages = map();
        pages.populate().expect("memory");
        assert!(pages[1234] == 7 && pages[1233] == 0);
        // SAFETY: it has no bytes.
        assert!(unsafe { ZeroedPages::of_region(&file.region(0, 0).expect("inside")) }.is_err());
    }
}
