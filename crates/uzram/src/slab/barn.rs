//! The barn: the sheaves of a cache that no CPU holds, filled and empty ones, as many as the kernel's has.
//!
//! Lock: the barn's; the caller holds its CPU's sheaf lock. Nothing is locked under it.

use std::ops::Range;

use crate::base::sync::{Mutex, classes};

/// Sheaves of a barn: the kernel keeps up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(loom) { 1 } else { 10 };

/// See the [module's documentation](self).
pub(super) struct Barn(Mutex<Inner>);

/// Protected by the barn's lock.
struct Inner {
    /// Each with its number of objects.
    filled: Vec<(usize, u32)>,
    empty: Vec<usize>,
}

impl Barn {
    /// Makes a barn of these sheaves, which are empty.
    pub(super) fn new(sheaves: Range<usize>) -> Self {
        let inner = Inner { filled: Vec::with_capacity(sheaves.len()), empty: sheaves.collect() };
        Barn(Mutex::new(&classes::SLAB_BARN, inner))
    }

    /// Exchanges an empty sheaf for a filled one; returns that and its number of objects. `None` if there is
    /// none: the caller fills its sheaf from slabs.
    pub(super) fn get(&self, empty: usize) -> Option<(usize, u32)> {
        let mut inner = self.0.lock();
        let filled = inner.filled.pop()?;
        inner.empty.push(empty);
        Some(filled)
    }

    /// Exchanges a filled sheaf of `len` objects for an empty one. `None` if there is none: the caller
    /// empties its sheaf into slabs.
    pub(super) fn put(&self, filled: usize, len: u32) -> Option<usize> {
        let mut inner = self.0.lock();
        let empty = inner.empty.pop()?;
        inner.filled.push((filled, len));
        Some(empty)
    }

    /// Empties all sheaves: calls `each` with each filled one and its number of objects.
    pub(super) fn drain(&self, mut each: impl FnMut(usize, u32)) {
        let mut inner = self.0.lock();
        while let Some((sheaf, len)) = inner.filled.pop() {
            each(sheaf, len);
            inner.empty.push(sheaf);
        }
    }

    pub(super) fn objects(&self) -> u64 {
        self.0.lock().filled.iter().map(|(_, len)| u64::from(*len)).sum()
    }
}
