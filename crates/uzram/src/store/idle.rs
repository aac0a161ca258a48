//! Pages that are marked as idle: until they are used, [`Candidates::idle`](super::Candidates) selects them.

use crate::base::clock::uptime_s;
use crate::base::error::Result;
use crate::base::work::{Unit, Work};

use super::Store;

impl Store {
    /// Marks pages that hold an object as idle: all, or those that were not used for `age_s` seconds. Of the
    /// others the mark is taken away.
    pub fn mark_idle(&self, age_s: Option<u32>) {
        // Nobody interrupts it.
        let _ = self.mark_idle_interruptible(age_s, &Work::uninterruptible(Unit::Pages));
    }

    /// The same, as long as the work is wanted.
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
