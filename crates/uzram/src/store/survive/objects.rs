//! The objects that slots name, sorted by where they are.
//!
//! Slots that follow each other can name objects anywhere. To look at these in the slots' order takes a miss
//! of the TLB and several of the cache for each; by ranges of addresses it takes one for each page of memory.

use crate::base::units::PageNo;
use crate::zsmalloc::Location;

/// The number of ranges of addresses.
pub(super) const RANGES: usize = 256;
/// The fewest pages of a range: their entries in the page tables take a page.
const LEAST_PAGES: u32 = 512;

/// An object, as a slot and a handle name it.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub(super) object: Location,
    pub(super) handle: u32,
    pub(super) owner: PageNo,
    pub(super) len: u16,
}

/// Objects by ranges of addresses.
pub(super) struct ByAddress {
    ranges: [Vec<Named>; RANGES],
    /// Each range has two to the power of this pages.
    order: u32,
}

impl ByAddress {
    /// Makes ranges for the addresses of the arena's first pages.
    pub(super) fn new(pages: u32) -> Self {
        let range_pages = pages.div_ceil(RANGES as u32).max(LEAST_PAGES).next_power_of_two();
        ByAddress { ranges: [const { Vec::new() }; RANGES], order: range_pages.trailing_zeros() }
    }

    pub(super) fn push(&mut self, named: Named) {
        let range = (named.object.page >> self.order) as usize;
        // Objects beyond the pages are in the last range: they are not there.
        self.ranges[range.min(RANGES - 1)].push(named);
    }

    /// Returns the objects of a range, in the order in which they were pushed.
    pub(super) fn of(&self, range: usize) -> &[Named] {
        &self.ranges[range]
    }
}
