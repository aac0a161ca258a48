//! What a write does at the memory limit: it asks the policy's thread to reclaim pages, and waits or fails.
//!
//! Lock: `policy`, a leaf, in [`Watermarks`](super::Watermarks). The caller holds no slot.

use std::time::{Duration, Instant};

use crate::base::error::{Error, ErrorKind};
use crate::store::{Store, Wait};

/// How long a write waits for room, at most, before it fails.
pub(super) const MOST_WAIT: Duration = Duration::from_secs(20);

/// What a write does after it could not store its page.
pub(in crate::store) enum Room {
    /// Memory was freed: it tries again.
    Freed,
    /// Memory can be freed, but the write must not wait for that.
    WouldBlock(Error),
    /// There is no room, or the error is another one: it fails.
    Refused(Error),
}

impl Store {
    /// Makes room for a write that failed with `error`, if it failed at the limit and pages can be reclaimed. `deadline`
    /// is `None` on the first attempt of a write, and is kept from one to the next.
    #[cold]
    pub(in crate::store) fn request_room(
        &self,
        error: Error,
        wait: Wait,
        deadline: &mut Option<Instant>,
    ) -> Room {
        if error.kind() != ErrorKind::NoSpace || !self.can_reclaim() {
            return Room::Refused(error);
        }
        let watermarks = &self.watermarks;
        if self.arena.has_reserve() {
            // The write never waits for memory; pages are reclaimed for the next one.
            watermarks.request_reclaim();
            watermarks.decisions.writers_refused.add(1);
            return Room::Refused(error);
        }
        if wait == Wait::No && !watermarks.is_stuck() {
            watermarks.wake_if_high(&self.arena);
            let what = "the memory limit is reached, and pages can leave";
            return Room::WouldBlock(Error::new(ErrorKind::WouldBlock, what));
        }
        if wait == Wait::Yes {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + MOST_WAIT);
            if watermarks.wait_for_reclaim(deadline) && Instant::now() < deadline {
                return Room::Freed;
            }
        }
        watermarks.decisions.writers_refused.add(1);
        Room::Refused(match watermarks.why_died() {
            None => error,
            Some(why) => {
                let what = format!("{error}; no page leaves any more: {why}. Reset the device to go on");
                Error::new(error.kind(), what).with_setting("mem_limit")
            }
        })
    }
}
