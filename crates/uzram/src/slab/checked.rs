//! Checks of debug builds: double allocations, double frees, and writes to free objects.
//!
//! A bit for each place says whether its object is in use. A free object is filled with the kernel's poison,
//! except for its link, and checked when it is allocated.

use std::ops::Range;
use std::slice;

use crate::base::error::Result;
use crate::base::mem::Table;
use crate::base::sync::{AtomicU64, Ordering};

use super::core::Core;
use super::slabs::{CHECKS, POISON};

pub(super) struct Checked {
    /// `None` unless [`CHECKS`].
    in_use: Option<Table<AtomicU64>>,
}

impl Checked {
    pub(super) fn new(core: &Core) -> Result<Self> {
        let places = u64::from(core.slabs.max_slabs) << core.slabs.layout.place_bits;
        let in_use = CHECKS.then(|| Table::new((places / 64 + 1) as usize)).transpose()?;
        Ok(Checked { in_use })
    }

    pub(super) fn populate(&self) -> Result<()> {
        self.in_use.as_ref().map_or(Ok(()), Table::populate)
    }

    /// Checks an object that is being allocated. Fails with `Corrupt` when it is in use already, or was
    /// written to while it was free.
    #[inline]
    pub(super) fn take(&self, core: &Core, object: u32) -> Result<()> {
        if !CHECKS {
            return Ok(());
        }
        if self.flip(object, true) {
            return Err(core.corrupt(object, "handed out twice"));
        }
        match self.damaged(core, object) {
            Some(at) => Err(core.corrupt(object, &format!("written to after it was freed, at byte {at}"))),
            None => Ok(()),
        }
    }

    pub(super) fn adopt(&self, object: u32) {
        self.flip(object, true);
    }

    /// Checks an object that is being freed, and poisons it. Fails with `Corrupt` when `object` is no object,
    /// or not in use.
    #[inline]
    pub(super) fn put(&self, core: &Core, object: u32) -> Result<()> {
        if !CHECKS {
            return Ok(());
        }
        core.check_is_object(object)?;
        if !self.flip(object, false) {
            return Err(core.corrupt(object, "freed twice"));
        }
        self.poison(core, object);
        Ok(())
    }

    /// Sets the object's bit to `in_use`; returns the previous value.
    fn flip(&self, object: u32, in_use: bool) -> bool {
        let Some(words) = &self.in_use else { return false };
        let (word, bit) = (&words[(object / 64) as usize], 1 << (object % 64));
        let old = if in_use {
            word.fetch_or(bit, Ordering::Relaxed)
        } else {
            word.fetch_and(!bit, Ordering::Relaxed)
        };
        old & bit != 0
    }

    fn poison(&self, core: &Core, object: u32) {
        for part in outside_link(core) {
            // SAFETY: the object was in use until now and belongs to the thread that frees it; its link
            // is not touched.
            unsafe { core.slabs.address(object).add(part.start).write_bytes(POISON, part.len()) };
        }
    }

    fn damaged(&self, core: &Core, object: u32) -> Option<usize> {
        outside_link(core).into_iter().find_map(|part| {
            // SAFETY: the object was free until now and belongs to the thread that takes it.
            let bytes =
                unsafe { slice::from_raw_parts(core.slabs.address(object).add(part.start), part.len()) };
            bytes.iter().position(|byte| *byte != POISON).map(|at| part.start + at)
        })
    }
}

/// The bytes of a place before and after the link.
fn outside_link(core: &Core) -> [Range<usize>; 2] {
    let layout = core.slabs.layout;
    let link = layout.link_offset_bytes;
    [0..link, link + size_of::<u32>()..layout.stride_bytes]
}
