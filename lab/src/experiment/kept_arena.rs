//! An arena whose freed memory stays, as memory stays in the kernel.

use std::thread;

use uzram::Result;
use uzram::mem::{Account, Arena, Gfp, MAX_RUN_PAGES};
use uzram::units::pages_to_bytes;

/// An arena that keeps as many free pages as `pages` in memory once they were used, and has address space for
/// several times as many. A device has a thread that gives some back meanwhile; measurements have none.
///
/// # Errors
/// As [`Arena::new`].
pub(crate) fn kept_arena(pages: u64) -> Result<Arena> {
    // As long as somebody else is to give memory back, as much is kept as half of what is in use, if that
    // was never touched either.
    let used_pages = 2 * pages;
    let arena = Arena::new(pages_to_bytes(used_pages + 4 * pages))?;
    for _ in 0..used_pages.div_ceil(MAX_RUN_PAGES as u64) {
        let run = arena.alloc_run(MAX_RUN_PAGES, Account::Slab, Gfp::MayWait)?;
        arena.commit(Account::Slab, run.page, u32::from(run.pages))?;
    }
    arena.set_releaser(Some(thread::current()));
    Ok(arena)
}
