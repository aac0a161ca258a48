//! Charging pages to accounts, and the limit. Lock-free: atomic counts and the pages' resident bits.

use super::runs::{group_of, mask};
use super::{Account, Arena, Usage};
use crate::base::error::{Error, ErrorKind};
use crate::base::sync::Ordering;

/// No page could be charged: the limit is reached. [`Arena::release_free`] may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl From<Full> for Error {
    fn from(_: Full) -> Self {
        Error::new(ErrorKind::NoSpace, "the device's memory limit is reached").with_setting("mem_limit")
    }
}

impl Arena {
    /// Charges pages to `account` before they are touched: `pages` pages from `page` on, of one run, none of
    /// them committed yet. Fails with `Full` if that would exceed the limit; nothing is charged then.
    pub fn commit(&self, account: Account, page: u32, pages: u32) -> Result<(), Full> {
        #[cfg(test)]
        if self.fails() {
            return Err(Full);
        }
        let (bits, word) = (mask(page, pages), &self.resident[group_of(page)]);
        let new = u64::from((bits & !word.load(Ordering::Relaxed)).count_ones());
        if new > 0 {
            if !self.usage.charged_pages.add_within(new, self.limit_pages.get()) {
                return Err(Full);
            }
            word.fetch_or(bits, Ordering::Relaxed);
        }
        let usage = self.usage(account);
        usage.pages_max.raise(usage.pages.add(u64::from(pages)));
        Ok(())
    }

    /// Returns the number of pages in memory: used pages and free pages kept for reuse. The limit bounds it.
    pub fn charged_pages(&self) -> u64 {
        self.usage.charged_pages.get()
    }

    /// Returns the number of pages committed to `account`.
    pub fn used_pages(&self, account: Account) -> u64 {
        self.usage(account).pages.get()
    }

    /// Returns the most pages committed to `account` at any time since [`Arena::reset_used_max`].
    pub fn used_pages_max(&self, account: Account) -> u64 {
        self.usage(account).pages_max.get()
    }

    /// Resets the maximum to the pages committed now.
    pub fn reset_used_max(&self, account: Account) {
        let usage = self.usage(account);
        usage.pages_max.set(usage.pages.get());
    }

    /// Returns the limit of [`Arena::charged_pages`]; 0 if there is none.
    pub fn limit_pages(&self) -> u64 {
        self.limit_pages.get()
    }

    /// Sets the limit. Free memory beyond it goes back at once; a limit below the used memory stops growth.
    pub fn set_limit_pages(&self, pages: u64) {
        self.limit_pages.set(pages);
        self.release_beyond_limit();
        self.retry_refill();
    }

    pub(super) fn is_beyond_limit(&self) -> bool {
        let limit_pages = self.limit_pages.get();
        limit_pages > 0 && self.charged_pages() > limit_pages
    }

    pub(super) fn usage(&self, account: Account) -> &Usage {
        &self.usage.of[account as usize]
    }
}
