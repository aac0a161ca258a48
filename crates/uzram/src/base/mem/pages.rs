//! Private zeroed pages, for buffers that are large and often not filled.

use std::ops::{Deref, DerefMut};

use super::map::{Access, Mapping};
use crate::base::error::Result;

/// A zeroed byte buffer. A page takes memory once it is touched. Dropping the buffer gives all memory back to
/// the system.
pub struct ZeroedPages {
    mapping: Mapping,
    /// At most the mapping's.
    len_bytes: usize,
}

impl ZeroedPages {
    /// Makes a buffer of `len_bytes` bytes.
    ///
    /// # Errors
    /// `NoMemory` when the system refuses.
    pub fn new(len_bytes: usize) -> Result<Self> {
        Ok(ZeroedPages { mapping: Mapping::new(len_bytes.max(1), Access::ReadWrite)?, len_bytes })
    }
}

impl Deref for ZeroedPages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable, has at least this length, and belongs to this value; writers borrow the
        // value mutably (`deref_mut`).
        unsafe { std::slice::from_raw_parts(self.mapping.base(), self.len_bytes) }
    }
}

impl DerefMut for ZeroedPages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, has at least this length, and belongs to this value, which is
        // borrowed mutably.
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
}
