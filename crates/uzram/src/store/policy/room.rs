//! What a write does at the memory limit: it asks the policy's thread to reclaim pages, and waits or fails.
//!
//! Lock: `policy`, a leaf, in [`Watermarks`](super::Watermarks). The caller holds no slot.

use std::time::Instant;

use crate::backing::MOST_WAIT;
use crate::base::error::{Error, ErrorKind, Result};
use crate::store::{Store, Wait};

impl Store {
    /// Makes room for a write that failed with `error`, if it failed at the limit and pages can be reclaimed; the
    /// caller then retries. `deadline` is `None` on the first attempt of a write, and is kept for the next ones.
    ///
    /// # Errors
    /// `WouldBlock` when memory can be freed, and the write must not wait for that; else `error`, if it is of another
    /// kind or there is no room.
    #[cold]
    pub(in crate::store) fn request_room(
        &self,
        error: Error,
        wait: Wait,
        deadline: &mut Option<Instant>,
    ) -> Result<()> {
        if error.kind() != ErrorKind::NoSpace || !self.can_reclaim() {
            return Err(error);
        }
        let (watermarks, gone_pages) = (&self.watermarks, self.gone_pages());
        if self.arena.has_reserve() {
            // The write never waits for memory; pages are reclaimed for later writes.
            watermarks.request_reclaim(gone_pages);
            watermarks.decisions.writers_refused.add(1);
            return Err(error);
        }
        if wait == Wait::No && !watermarks.is_stuck(gone_pages) {
            let what = "the memory limit is reached, and pages can be reclaimed";
            return Err(Error::new(ErrorKind::WouldBlock, what));
        }
        if wait == Wait::Yes {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + MOST_WAIT);
            if watermarks.wait_for_reclaim(deadline, gone_pages) && Instant::now() < deadline {
                return Ok(());
            }
        }
        watermarks.decisions.writers_refused.add(1);
        Err(match watermarks.why_died() {
            None => error,
            Some(why) => {
                let what =
                    format!("{error}; pages are no longer reclaimed: {why}. Reset the device to go on");
                Error::new(error.kind(), what).with_setting("mem_limit")
            }
        })
    }
}
