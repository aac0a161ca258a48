//! How much may be written to a backing device: the kernel's writeback limit, which counts down, and a daily
//! budget, to bound the wear of flash. Writes that move objects are counted, but not refused.
//!
//! Where the store's memory outlives the process, each change also sets words in it, one for each number,
//! with relaxed stores: a kill leaves each number as it was before or after the change.
//!
//! Lock: `policy`, a leaf.

use crate::base::clock::uptime_s;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Region, Table};
use crate::base::sync::{Counter, Mutex, classes};

use super::WritebackLimit;
use super::extents::BLOCK_BYTES;

const DAY_S: u32 = 24 * 60 * 60;

/// The words in memory that outlives the process, one for each number.
const LEFT: usize = 0;
const DAY: usize = 1;
const SPENT: usize = 2;
const WORDS: usize = 3;

/// Units charged for a write, by their source; given back if the write fails.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use]
pub(super) struct Charge {
    limited: u64,
    spent: u64,
}

impl std::ops::AddAssign for Charge {
    fn add_assign(&mut self, other: Charge) {
        self.limited += other.limited;
        self.spent += other.spent;
    }
}

pub(in crate::store) struct Allowance {
    state: Mutex<State>,
    /// Set under the lock; `None` in private memory.
    words: Option<Table<Counter>>,
}

#[derive(Default)]
struct State {
    limit: WritebackLimit,
    /// Bytes a day; 0 for no budget.
    budget_bytes: u64,
    /// When the day began, in seconds of uptime.
    day_s: u32,
    /// Units of 4 KiB written since then.
    spent: u64,
}

impl Allowance {
    /// Creates an allowance of which nothing was used, without a budget; its words are in `region`.
    pub(super) fn new(limit: WritebackLimit, region: Option<&Region>) -> Result<Self> {
        let words = region.map(|region| Table::new_in(Some(region), WORDS)).transpose()?;
        let state = State { limit, day_s: uptime_s(), ..State::default() };
        Ok(Allowance { state: Mutex::new(&classes::POLICY, state), words })
    }

    /// Goes on with what another process left of the limit and of the day's budget.
    pub(in crate::store) fn restore(&self) {
        let (mut state, Some(words)) = (self.state.lock(), &self.words) else { return };
        state.limit.left = words[LEFT].get();
        state.day_s = words[DAY].get() as u32;
        state.spent = words[SPENT].get();
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        if let Some(words) = &self.words {
            words[LEFT].set(state.limit.left);
            // Before the day: after a kill in between, a new day begins again, and nothing was spent.
            words[SPENT].set(state.spent);
            words[DAY].set(state.day_s.into());
        }
        result
    }

    pub(super) fn check(&self) -> Result<()> {
        self.change(|state| state.check(1))
    }

    pub(super) fn charge(&self, units: u64) -> Result<Charge> {
        if units == 0 {
            return Ok(Charge::default());
        }
        self.change(|state| {
            state.check(units)?;
            let limited = if state.limit.enabled { units } else { 0 };
            state.limit.left -= limited;
            state.spent = state.spent.saturating_add(units);
            Ok(Charge { limited, spent: units })
        })
    }

    /// Counts units about to be written, regardless of the limit and the budget.
    pub(super) fn note(&self, units: u64) -> Charge {
        self.change(|state| state.spent = state.spent.saturating_add(units));
        Charge { limited: 0, spent: units }
    }

    pub(super) fn give_back(&self, charge: Charge) {
        self.change(|state| {
            if state.limit.enabled {
                state.limit.left = state.limit.left.saturating_add(charge.limited);
            }
            // A new day may have begun since the charge.
            state.spent = state.spent.saturating_sub(charge.spent);
        });
    }

    pub(super) fn limit(&self) -> WritebackLimit {
        self.state.lock().limit
    }

    pub(in crate::store) fn change_limit(&self, change: impl FnOnce(&mut WritebackLimit)) {
        self.change(|state| change(&mut state.limit));
    }

    pub(in crate::store) fn set_budget_bytes(&self, bytes: u64) {
        self.state.lock().budget_bytes = bytes;
    }

    pub(in crate::store) fn budget_left_bytes(&self) -> Option<u64> {
        self.change(|state| state.left_today(uptime_s()))
            .map(|units| units.saturating_mul(BLOCK_BYTES as u64))
    }
}

impl State {
    fn check(&mut self, units: u64) -> Result<()> {
        let spent = |what, setting| Err(Error::new(ErrorKind::Io, what).with_setting(setting));
        if self.limit.enabled && self.limit.left < units {
            return spent("the limit of writes to the backing device is used up", "writeback_limit");
        }
        if self.left_today(uptime_s()).is_some_and(|left| left < units) {
            let what = "the day's budget of writes to the backing device is used up";
            return spent(what, "writeback_budget");
        }
        Ok(())
    }

    /// Returns the units left of the day's budget; `None` without a budget.
    fn left_today(&mut self, now_s: u32) -> Option<u64> {
        if now_s.saturating_sub(self.day_s) >= DAY_S {
            (self.day_s, self.spent) = (now_s, 0);
        }
        // Round up, so that a small budget is not 0 units.
        let budget = self.budget_bytes.div_ceil(BLOCK_BYTES as u64);
        (self.budget_bytes > 0).then(|| budget.saturating_sub(self.spent))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_used_up_and_given_back() {
        let allowance = Allowance::new(WritebackLimit::default(), None).expect("private memory");
        let refusal =
            |result: Result<Charge>| result.map(drop).map_err(|error| (error.kind(), error.setting()));
        let checked = || allowance.check().map_err(|error| (error.kind(), error.setting()));
        let spent = Err((ErrorKind::Io, Some("writeback_limit")));
        let before = allowance.charge(5).expect("it does not count");
        assert_eq!(allowance.limit(), WritebackLimit::default());
        allowance.change_limit(|limit| *limit = WritebackLimit { enabled: true, left: 0 });
        assert_eq!(checked(), spent);
        allowance.change_limit(|limit| limit.left = 3);
        let mut charge = allowance.charge(2).expect("left");
        charge += allowance.note(9);
        allowance.check().expect("one is left");
        assert_eq!(refusal(allowance.charge(2)), spent);
        drop(allowance.charge(1).expect("left"));
        assert_eq!((allowance.limit().left, checked()), (0, spent));
        // Moved objects, and writes from before the limit was enabled, were never charged to the limit.
        allowance.give_back(charge);
        assert_eq!(allowance.limit().left, 2);
        allowance.give_back(before);
        assert_eq!(allowance.limit().left, 2);
        allowance.give_back(allowance.note(1000));
        assert_eq!(allowance.limit().left, 2);
    }

    #[test]
    fn a_budget_is_for_a_day() {
        let allowance = Allowance::new(WritebackLimit::default(), None).expect("private memory");
        drop(allowance.charge(7).expect("no budget"));
        assert_eq!(allowance.budget_left_bytes(), None);
        allowance.set_budget_bytes(8 * BLOCK_BYTES as u64 - 1);
        assert_eq!(allowance.budget_left_bytes(), Some(BLOCK_BYTES as u64));
        drop(allowance.note(1));
        assert_eq!(allowance.check().map_err(|error| error.setting()), Err(Some("writeback_budget")));
        let mut state = allowance.state.lock();
        let began_s = state.day_s;
        assert_eq!(state.left_today(began_s + DAY_S - 1), Some(0));
        assert_eq!(state.left_today(began_s + DAY_S), Some(8), "a day later");
        drop(state);
        allowance.set_budget_bytes(u64::MAX);
        assert_eq!(allowance.budget_left_bytes(), Some(u64::MAX));
    }
}
