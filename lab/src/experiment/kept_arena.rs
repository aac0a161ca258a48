//! An arena that keeps freed memory, as the kernel does.

use std::thread;

use uzram::Result;
use uzram::mem::{Account, Arena, Gfp, MAX_RUN_PAGES};
use uzram::units::pages_to_bytes;

/// Returns an arena that keeps `pages` free pages in memory once they were used, and has address space for
/// several times as many. A device has a thread that returns free memory to the system; measurements have
/// none.
pub(crate) fn kept_arena(pages: u64) -> Result<Arena> {
    // With a releaser set, the arena keeps half as many free pages as are in use, so twice `pages` are
    // allocated, but never touched.
    let used_pages = 2 * pages;
    let arena = Arena::new(pages_to_bytes(used_pages + 4 * pages))?;
    for _ in 0..used_pages.div_ceil(MAX_RUN_PAGES as u64) {
        let run = arena.alloc_run(MAX_RUN_PAGES, Account::Slab, Gfp::MayWait)?;
        arena.commit(Account::Slab, run.page, u32::from(run.pages))?;
    }
    arena.set_releaser(Some(thread::current()));
    Ok(arena)
}
