//! What a write does at the memory limit: it asks the policy's thread to reclaim pages, and waits or fails.
//!
//! Lock: `policy`, a leaf, in [`Watermarks`](super::Watermarks). The caller holds no slot.

use std::time::{Duration, Instant};

use crate::base::error::{Error, ErrorKind, Result};
use crate::store::{Store, Wait};

/// How long a write waits for room, at most, before it fails.
pub(super) const MOST_WAIT: Duration = Duration::from_secs(20);

impl Store {
    /// Makes room for a write that failed with `error`, if it failed at the limit and pages can be reclaimed: the write
    /// then tries again. `deadline` is `None` on the first attempt of a write, and is kept from one to the next.
    ///
    /// # Errors
    /// `WouldBlock` when memory can be freed, and the write must not wait for that; else `error`, when there is no room,
    /// or it is another one.
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
        let watermarks = &self.watermarks;
        if self.arena.has_reserve() {
            // The write never waits for memory; pages are reclaimed for the next one.
            watermarks.request_reclaim();
            watermarks.decisions.writers_refused.add(1);
            return Err(error);
        }
        if wait == Wait::No && !watermarks.is_stuck() {
            let what = "the memory limit is reached, and pages can leave";
            return Err(Error::new(ErrorKind::WouldBlock, what));
        }
        if wait == Wait::Yes {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + MOST_WAIT);
            if watermarks.wait_for_reclaim(deadline) && Instant::now() < deadline {
                return Ok(());
            }
        }
        watermarks.decisions.writers_refused.add(1);
        Err(match watermarks.why_died() {
            None => error,
            Some(why) => {
                let what = format!("{error}; no page leaves any more: {why}. Reset the device to go on");
                Error::new(error.kind(), what).with_setting("mem_limit")
            }
        })
    }
}
