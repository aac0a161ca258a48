//! What size and which memory limit a store can begin with.
//!
//! Below the least limit not even the first pages could be stored: every write would fail, of a device that looks sound. So a store is
//! not made with such a limit. One that there is takes any limit ([`Store::set_limit_pages`](super::Store::set_limit_pages)):
//! as with the kernel's `mem_limit`, one below what is in use takes nothing away and only stops growth.

use crate::base::error::{Error, Result};
use crate::base::mem::{CHUNK_PAGES, reserve_chunks};
use crate::base::units::{format_size, pages_to_bytes};

use super::{Config, MAX_PAGES};

/// What a pool takes that holds one page of each kind, a compressed one and one stored as it is, each in a zspage of its
/// own: two pages, and the first slabs of handles and of zspage descriptors, one page and three.
const FIRST_PAGES: u64 = 6;

impl Config {
    /// Whether a store could be made so, as far as that can be told without making one.
    ///
    /// # Errors
    /// `Invalid` for a size that no disk can have, or a limit below what its first pages take.
    pub fn check(&self) -> Result<()> {
        if self.pages == 0 || self.pages > MAX_PAGES {
            return Err(Error::invalid("a disk has from 4 KiB to 16 TiB").with_setting("disksize"));
        }
        let reserve_pages = reserve_chunks(self.reserve_pages).saturating_mul(u64::from(CHUNK_PAGES));
        check(self.limit_pages, reserve_pages)
    }
}

/// Fails for a limit below what the first pages take: with a reserve that is the reserve, which is there as a whole before
/// the first write, and has the two chunks that the first page needs.
///
/// # Errors
/// `Invalid`, with the least limit.
fn check(limit_pages: u64, reserve_pages: u64) -> Result<()> {
    let least_pages = reserve_pages.max(FIRST_PAGES);
    if limit_pages == 0 || limit_pages >= least_pages {
        return Ok(());
    }
    let least = format_size(pages_to_bytes(least_pages));
    let needs = if reserve_pages > 0 { "its reserve" } else { "its first pages" };
    let what = format!("the memory limit leaves the device no room for {needs}: it takes at least {least}");
    Err(Error::invalid(what).with_setting("mem_limit"))
}
