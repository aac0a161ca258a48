//! How each page is kept, page by page: the kernel's `block_state`.

use std::ops::Range;

use super::Store;

/// How a page is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// As one word.
    pub same: bool,
    /// On the backing device.
    pub backed: bool,
    /// As it is.
    pub huge: bool,
    /// Marked as idle, and not used since.
    pub idle: bool,
    /// By another algorithm than writes are.
    pub recompressed: bool,
    /// No algorithm made it smaller.
    pub incompressible: bool,
}

impl Store {
    /// Calls `line` for each of `pages` that holds something, with its number, when it was used last, in seconds of the
    /// system's uptime, and how it is kept; until `line` returns false.
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
