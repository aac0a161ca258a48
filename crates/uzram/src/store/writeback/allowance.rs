//! How much may be written to a backing device: the kernel's limit, which somebody sets and which is used up, and a
//! budget for each day, for flash that wears out. Writes that move objects count, and are not refused.
//!
//! Lock: `policy`, a leaf.

use crate::base::clock::uptime_s;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Mutex, classes};

use super::WritebackLimit;
use super::log::BLOCK_BYTES;

const DAY_S: u32 = 24 * 60 * 60;

/// What is left of both.
pub(super) struct Allowance(Mutex<State>);

#[derive(Default)]
struct State {
    limit: WritebackLimit,
    /// Bytes a day; 0 for any.
    budget_bytes: u64,
    /// When the day began, in seconds of uptime.
    day_s: u32,
    /// Units of 4 KiB that were written since.
    spent: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Allowance(Mutex::new(&classes::POLICY, State { day_s: uptime_s(), ..State::default() }))
    }
}

impl Allowance {
    /// Whether anything may be written.
    ///
    /// # Errors
    /// `Io`, as the kernel answers, when the limit is spent, or the day's budget.
    pub(super) fn check(&self) -> Result<()> {
        self.0.lock().check(1)
    }

    /// Takes units that are to be written.
    ///
    /// # Errors
    /// As [`Allowance::check`], when there are not so many.
    pub(super) fn charge(&self, units: u64) -> Result<()> {
        if units > 0 {
            let state = &mut *self.0.lock();
            state.check(units)?;
            state.limit.left -= if state.limit.enabled { units } else { 0 };
            state.spent += units;
        }
        Ok(())
    }

    /// Units that are to be written whatever the limit.
    pub(super) fn note(&self, units: u64) {
        self.0.lock().spent += units;
    }

    /// Units that could not be written.
    pub(super) fn give_back(&self, units: u64) {
        let mut state = self.0.lock();
        if state.limit.enabled {
            state.limit.left = state.limit.left.saturating_add(units);
        }
        state.spent = state.spent.saturating_sub(units);
    }

    pub(super) fn limit(&self) -> WritebackLimit {
        self.0.lock().limit
    }

    /// Changes the limit, and nobody charges anything meanwhile.
    pub(super) fn change_limit(&self, change: impl FnOnce(&mut WritebackLimit)) {
        change(&mut self.0.lock().limit);
    }

    /// Sets how many bytes may be written a day; 0 for any.
    pub(in crate::store) fn set_budget_bytes(&self, bytes: u64) {
        self.0.lock().budget_bytes = bytes;
    }

    /// How many bytes of the day's budget are left, if there is one.
    pub(in crate::store) fn budget_left_bytes(&self) -> Option<u64> {
        self.0.lock().left_today(uptime_s()).map(|units| units * BLOCK_BYTES as u64)
    }
}

impl State {
    fn check(&mut self, units: u64) -> Result<()> {
        let spent = |what, setting| Err(Error::new(ErrorKind::Io, what).with_setting(setting));
        if self.limit.enabled && self.limit.left < units {
            return spent("as much was written to the backing device as was allowed", "writeback_limit");
        }
        if self.left_today(uptime_s()).is_some_and(|left| left < units) {
            let what = "as much was written to the backing device as is allowed in a day";
            return spent(what, "writeback_budget");
        }
        Ok(())
    }

    /// Units that are left of the day's budget; none without one.
    fn left_today(&mut self, now_s: u32) -> Option<u64> {
        if now_s.saturating_sub(self.day_s) >= DAY_S {
            (self.day_s, self.spent) = (now_s, 0);
        }
        // A budget below a unit is one: it would be none otherwise.
        let budget = self.budget_bytes.div_ceil(BLOCK_BYTES as u64);
        (self.budget_bytes > 0).then(|| budget.saturating_sub(self.spent))
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_used_up_and_given_back() {
        let allowance = Allowance::default();
        let refusal = |result: Result<()>| result.map_err(|error| (error.kind(), error.setting()));
        let spent = Err((ErrorKind::Io, Some("writeback_limit")));
        allowance.charge(5).expect("it does not count");
        assert_eq!(allowance.limit(), WritebackLimit::default());
        allowance.change_limit(|limit| *limit = WritebackLimit { enabled: true, left: 0 });
        assert_eq!(refusal(allowance.check()), spent);
        allowance.change_limit(|limit| limit.left = 3);
        allowance.charge(2).expect("left");
        allowance.note(9);
        allowance.check().expect("one is left");
        assert_eq!(refusal(allowance.charge(2)), spent);
        allowance.charge(1).expect("left");
        assert_eq!((allowance.limit().left, refusal(allowance.check())), (0, spent));
        allowance.give_back(2);
        assert_eq!(allowance.limit().left, 2);
    }

    #[test]
    fn a_budget_is_for_a_day() {
        let allowance = Allowance::default();
        allowance.charge(7).expect("no budget");
        assert_eq!(allowance.budget_left_bytes(), None);
        allowance.set_budget_bytes(8 * BLOCK_BYTES as u64 - 1);
        assert_eq!(allowance.budget_left_bytes(), Some(BLOCK_BYTES as u64));
        allowance.note(1);
        assert_eq!(allowance.check().map_err(|error| error.setting()), Err(Some("writeback_budget")));
        let mut state = allowance.0.lock();
        let began_s = state.day_s;
        assert_eq!(state.left_today(began_s + DAY_S - 1), Some(0));
        assert_eq!(state.left_today(began_s + DAY_S), Some(8), "a day later");
    }
}
