//! Marking pages as idle: [`Candidates::idle`](super::Candidates) selects them until they are used.

use crate::base::clock::uptime_s;
use crate::base::error::Result;
use crate::base::work::{Unit, Work};

use super::Store;

impl Store {
    /// Marks pages that hold an object as idle: all, or those not used for `age_s` seconds. Clears the mark of the
    /// others.
    pub fn mark_idle(&self, age_s: Option<u32>) {
        // It cannot be interrupted.
        let _ = self.mark_idle_interruptible(age_s, &Work::uninterruptible(Unit::Pages));
    }

    /// As [`Store::mark_idle`], until `work` is interrupted.
    ///
    /// # Errors
    /// `Interrupted`.
    pub fn mark_idle_interruptible(&self, age_s: Option<u32>, work: &Work<'_>) -> Result<()> {
        let now_s = uptime_s();
        let pages = self.slots.touched(0..self.pages());
        for page in work.while_wanted(pages).filter(|page| self.slots.peek(*page).is_stored()) {
            let mut slot = self.slots.lock(page);
            let idle_s = now_s.saturating_sub(self.slots.used_s(page));
            slot.set_idle(age_s.is_none_or(|age_s| idle_s >= age_s));
            drop(slot);
            work.step()?;
        }
        work.check()
    }
}
