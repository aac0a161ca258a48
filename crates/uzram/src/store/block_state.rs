//! How each page is stored: the kernel's `block_state`.

use std::ops::Range;

use super::Store;

/// How a page is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// Same-filled: one repeated word.
    pub same: bool,
    /// On the backing device.
    pub backed: bool,
    /// Uncompressed.
    pub huge: bool,
    /// Marked as idle, and not used since.
    pub idle: bool,
    /// Compressed by a recompression algorithm.
    pub recompressed: bool,
    /// No algorithm made it smaller.
    pub incompressible: bool,
}

impl Store {
    /// Calls `line` for each of `pages` that holds something, until `line` returns false. The arguments are the page's
    /// number, its last use in seconds of the system's uptime, and how it is stored.
    pub fn block_states(&self, pages: Range<u64>, mut line: impl FnMut(u64, u32, BlockState) -> bool) {
        for page in self.slots.touched(pages.start..pages.end.min(self.pages())) {
            let peek = self.slots.peek(page);
            if peek.is_same() || peek.is_stored() || peek.is_backed() {
                let state = BlockState {
                    same: peek.is_same(),
                    backed: peek.is_backed(),
                    huge: peek.is_huge(),
                    idle: peek.is_idle(),
                    recompressed: peek.priority() > 0,
                    incompressible: peek.is_incompressible(),
                };
                if !line(page.number(), self.slots.used_s(page), state) {
                    break;
                }
            }
        }
    }
}
