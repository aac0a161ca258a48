//! Where copies are put, and which of those that are there are in danger.
//!
//! Objects are written to the masters that are well now. A master that is away, and slots that have moved, put copies in danger
//! only once that has lasted for a while: most nodes come back. So does a master whose process has begun anew, as it
//! may have lost what it had: a [home](topology::home_of) has the number of the *epoch* in which it was chosen, and each time that
//! masters have begun anew, another epoch begins.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use uzram::Result;

use super::topology::{self, Topology};
use crate::lock;

/// How long a change lasts before copies are moved.
const SETTLED_AFTER: Duration = Duration::from_secs(30);

/// The masters, as far as copies are concerned.
pub(super) struct Placement(Mutex<State>);

struct State {
    /// The masters that are well.
    now: Topology,
    /// Since when they are the same.
    since: Instant,
    settled_after: Duration,
    /// The masters by which copies are judged.
    settled: Topology,
    /// How often these have changed.
    generation: u64,
    epoch: u32,
    /// Of each master that was ever seen, which process it was.
    processes: HashMap<String, String>,
    /// Of each master that has begun anew, the epoch that began then.
    restarted: HashMap<String, u32>,
}

impl Placement {
    /// With `generation` 0 if there are no objects yet.
    pub(super) fn new(generation: u64) -> Placement {
        Placement(Mutex::new(State {
            now: Topology::default(),
            since: Instant::now(),
            settled_after: SETTLED_AFTER,
            settled: Topology::default(),
            generation,
            epoch: 0,
            processes: HashMap::new(),
            restarted: HashMap::new(),
        }))
    }

    pub(super) fn set_settled_after(&self, time: Duration) {
        lock(&self.0).settled_after = time;
    }

    /// Notes which masters are well.
    pub(super) fn note(&self, now: Topology) {
        let mut state = lock(&self.0);
        let State { settled, processes, restarted, epoch, .. } = &mut *state;
        if settled.masters.is_empty() {
            *settled = now.clone();
        }
        let mut has_restarted = false;
        for master in &now.masters {
            let before = processes.insert(master.id.clone(), master.run_id.clone());
            if before.is_some_and(|run_id| run_id != master.run_id) {
                restarted.insert(master.id.clone(), (*epoch + 1) % topology::EPOCHS);
                has_restarted = true;
            }
        }
        if has_restarted {
            *epoch = (*epoch + 1) % topology::EPOCHS;
        }
        if now.masters != state.now.masters {
            (state.now, state.since) = (now, Instant::now());
        }
        if state.settled.masters != state.now.masters && state.since.elapsed() >= state.settled_after {
            state.settled = state.now.clone();
            state.generation += 1;
        }
    }

    /// Returns the home of an extent's next object; 0 if there are not two masters.
    pub(super) fn home(&self, extent: u32) -> u32 {
        let state = lock(&self.0);
        topology::in_epoch(state.now.home(extent), state.epoch)
    }

    /// Checks that an object's copies can be written.
    ///
    /// # Errors
    /// As [`Topology::check`].
    pub(super) fn check(&self, home: u32) -> Result<()> {
        lock(&self.0).now.check(home)
    }

    /// Returns which of an object's copies have a master that is well.
    pub(super) fn have(&self, home: u32) -> [bool; 2] {
        lock(&self.0).now.have(home)
    }

    /// Returns a number that changes when copies may be in danger.
    pub(super) fn generation(&self) -> u64 {
        lock(&self.0).generation
    }

    /// Returns whether copies are in danger: a slot has no master any more, both have the same one, or one that may have lost
    /// what it had.
    pub(super) fn is_at_risk(&self, home: u32) -> bool {
        let state = lock(&self.0);
        let has_restarted = |slot| {
            let master = state.settled.master_of(slot);
            master.and_then(|master| state.restarted.get(&master.id)).is_some_and(|epoch| {
                // The epochs are counted in a circle, of which the half before one is older.
                let age = (epoch + topology::EPOCHS - topology::epoch_of(home)) % topology::EPOCHS;
                (1..=topology::EPOCHS / 2).contains(&age)
            })
        };
        state.settled.check(home).is_err()
            || topology::slots(home).is_some_and(|slots| slots.into_iter().any(has_restarted))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::redis::topology::tests::of;

    fn masters(run_ids: &[&str]) -> Topology {
        let mut topology = of(&[&[(0, 5000)], &[(5001, 10000)], &[(10001, 16383)]]);
        topology.masters.iter_mut().zip(run_ids).for_each(|(master, id)| master.run_id = (*id).to_owned());
        topology.masters.retain(|master| !master.run_id.is_empty());
        topology
    }

    #[test]
    fn copies_are_in_danger_once_a_change_has_lasted() {
        let placement = Placement::new(0);
        placement.note(masters(&["a", "b", "c"]));
        let homes: Vec<u32> = (0..300).map(|extent| placement.home(extent)).collect();
        let endangered =
            |placement: &Placement| homes.iter().filter(|home| placement.is_at_risk(**home)).count();
        assert_eq!((placement.generation(), endangered(&placement)), (0, 0));
        placement.note(masters(&["a", "", "c"]));
        // New objects go elsewhere at once.
        assert!((0..300).all(|extent| placement.have(placement.home(extent)) == [true, true]));
        assert_eq!((placement.generation(), endangered(&placement)), (0, 0));
        placement.note(masters(&["a", "b", "c"]));
        placement.set_settled_after(Duration::ZERO);
        placement.note(masters(&["a", "b", "c"]));
        assert_eq!((placement.generation(), endangered(&placement)), (0, 0));
        placement.note(masters(&["a", "", "c"]));
        assert_eq!(placement.generation(), 1);
        assert!((150..250).contains(&endangered(&placement)), "two of three had a copy there");
        assert!((0..300).all(|extent| !placement.is_at_risk(placement.home(extent))));
    }

    #[test]
    fn a_master_that_begins_anew_puts_older_copies_in_danger() {
        let placement = Placement::new(0);
        placement.set_settled_after(Duration::ZERO);
        placement.note(masters(&["a", "b", "c"]));
        let mut run_id = 0;
        // As often as there are epochs, and more.
        for round in 1..20 {
            let homes: Vec<u32> = (0..300).map(|extent| placement.home(extent)).collect();
            assert!(homes.iter().all(|home| !placement.is_at_risk(*home)), "round {round}");
            run_id += 1;
            placement.note(masters(&["a", &run_id.to_string(), "c"]));
            assert_eq!(placement.generation(), round);
            let endangered = homes.iter().filter(|home| placement.is_at_risk(**home)).count();
            assert!((150..250).contains(&endangered), "round {round}: {endangered}");
        }
        // One that was away and comes back as another process.
        placement.note(masters(&["a", "", "c"]));
        let home = (0..300)
            .map(|extent| placement.home(extent))
            .find(|home| placement.have(*home) == [true, true])
            .unwrap();
        placement.note(masters(&["a", "new", "c"]));
        assert!(!placement.is_at_risk(home) && placement.generation() == 21);
    }
}
