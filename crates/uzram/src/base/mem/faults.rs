//! Fault injection for tests: allocations that fail as when memory is short.

use super::Arena;
use crate::base::random::Random;

pub(super) enum Faults {
    /// About one in `one_in`.
    Seeded { random: Random, one_in: usize },
    /// One, after this many that succeed.
    After(u64),
}

impl Arena {
    /// Makes about one in `one_in` calls that can fail do so, by the random sequence of `seed`; 0: none.
    pub fn inject_faults(&self, seed: u64, one_in: usize) {
        *self.faults.lock().expect("no panic under it") =
            (one_in > 0).then(|| Faults::Seeded { random: Random::new(seed), one_in });
    }

    /// Makes one call fail: of those that can fail, the one after `calls` others.
    pub fn inject_fault_after(&self, calls: u64) {
        *self.faults.lock().expect("no panic under it") = Some(Faults::After(calls));
    }

    /// Returns whether calls may still fail by injection.
    pub fn injects_faults(&self) -> bool {
        self.faults.lock().expect("no panic under it").is_some()
    }

    /// Makes refills of the reserve fail while `hold` is true.
    pub fn hold_refills(&self, hold: bool) {
        self.holds_refills.set(u64::from(hold));
    }

    pub(super) fn fails(&self) -> bool {
        let mut faults = self.faults.lock().expect("no panic under it");
        match &mut *faults {
            None => false,
            Some(Faults::Seeded { random, one_in }) => random.below(*one_in) == 0,
            Some(Faults::After(0)) => {
                *faults = None;
                true
            }
            Some(Faults::After(calls)) => {
                *calls -= 1;
                false
            }
        }
    }
}
