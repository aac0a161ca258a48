//! Where copies are put, and which of those that are there are in danger.
//!
//! Objects are written to the masters that are well now. A master that is away, and slots that have moved, put copies in danger
//! only once that has lasted for a while: most nodes come back. So does a master whose process has begun anew, as it
//! may have lost what it had: a [home](topology::in_epoch) has the number of the *epoch* in which it was chosen, and each time that
//! masters have begun anew, another epoch begins. The current epoch is kept in the device's lease, for the next process.
//!
//! Two things are not noticed: that a master has begun anew while no process of the device served, and what has not been copied
//! again when as many epochs have begun as are told apart.

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
    /// How often masters have begun anew.
    epoch: u32,
    /// Whether the epochs of the processes before are counted, too.
    is_epoch_known: bool,
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
            is_epoch_known: generation == 0,
            processes: HashMap::new(),
            restarted: HashMap::new(),
        }))
    }

    pub(super) fn set_settled_after(&self, time: Duration) {
        lock(&self.0).settled_after = time;
    }

    /// Notes which masters are well.
    pub(super) fn note(&self, mut now: Topology) {
        // Each node names them in another order, and copies do not depend on them.
        now.masters.iter_mut().for_each(|master| master.replicas.clear());
        let mut state = lock(&self.0);
        let State { settled, generation, processes, restarted, epoch, .. } = &mut *state;
        // If there are objects already, one of their masters may be away just now.
        if settled.masters.is_empty() && *generation == 0 {
            *settled = now.clone();
        }
        let mut has_restarted = false;
        for master in &now.masters {
            let before = processes.insert(master.id.clone(), master.run_id.clone());
            if before.is_some_and(|run_id| run_id != master.run_id) {
                restarted.insert(master.id.clone(), epoch.wrapping_add(1));
                has_restarted = true;
            }
        }
        if has_restarted {
            *epoch = epoch.wrapping_add(1);
        }
        if now.masters != state.now.masters {
            state.since = Instant::now();
        }
        // With which of them are full, which puts no copies in danger.
        state.now = now;
        if state.settled.masters != state.now.masters && state.since.elapsed() >= state.settled_after {
            state.settled = state.now.clone();
            state.generation += 1;
        }
    }

    /// Returns the current epoch; `None` while that of the process before is not known.
    pub(super) fn epoch(&self) -> Option<u32> {
        let state = lock(&self.0);
        state.is_epoch_known.then_some(state.epoch)
    }

    /// Counts the epochs from the last one of the process before. Objects that were written meanwhile seem older than they are.
    pub(super) fn continue_from(&self, last: u32) {
        let mut state = lock(&self.0);
        if !std::mem::replace(&mut state.is_epoch_known, true) {
            state.epoch = state.epoch.wrapping_add(last);
            state.restarted.values_mut().for_each(|epoch| *epoch = epoch.wrapping_add(last));
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

    /// Returns a number that changes when copies may be in danger.
    pub(super) fn generation(&self) -> u64 {
        lock(&self.0).generation
    }

    /// Returns whether copies are in danger: a slot has no master any more, both have the same one, or one that may have lost
    /// what it had. Those of which no copy has a master are not: there is nothing to copy until one is back.
    pub(super) fn is_at_risk(&self, home: u32) -> bool {
        let state = lock(&self.0);
        if state.settled.masters.is_empty() {
            // Nothing is known yet.
            return false;
        }
        // No home is newer than the current epoch.
        let age = state.epoch.wrapping_sub(topology::epoch_of(home)) % topology::EPOCHS;
        let has_restarted = |slot| {
            let master = state.settled.master_of(slot);
            master
                .and_then(|master| state.restarted.get(&master.id))
                .is_some_and(|epoch| state.epoch.wrapping_sub(*epoch) < age)
        };
        match topology::slots(home) {
            Some(slots) if slots.iter().all(|slot| state.settled.master_of(*slot).is_none()) => false,
            Some(slots) => state.settled.check(home).is_err() || slots.into_iter().any(has_restarted),
            None => true,
        }
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

    /// Returns one with three masters, for which each change has lasted.
    fn of_three() -> Placement {
        let placement = Placement::new(0);
        placement.set_settled_after(Duration::ZERO);
        placement.note(masters(&["a", "b", "c"]));
        placement
    }

    fn homes_of(placement: &Placement) -> Vec<u32> {
        (0..300).map(|extent| placement.home(extent)).collect()
    }

    #[test]
    fn copies_are_in_danger_once_a_change_has_lasted() {
        let placement = Placement::new(0);
        placement.note(masters(&["a", "b", "c"]));
        let homes = homes_of(&placement);
        let endangered =
            |placement: &Placement| homes.iter().filter(|home| placement.is_at_risk(**home)).count();
        assert_eq!((placement.generation(), endangered(&placement)), (0, 0));
        placement.note(masters(&["a", "", "c"]));
        // New objects go elsewhere at once.
        assert!((0..300).all(|extent| placement.check(placement.home(extent)).is_ok()));
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
    fn what_cannot_be_copied_waits_for_its_masters() {
        let placement = of_three();
        let homes = homes_of(&placement);
        let endangered = || homes.iter().filter(|home| placement.is_at_risk(**home)).count();
        placement.note(masters(&["a", "b", ""]));
        let of_two = endangered();
        placement.note(masters(&["", "b", ""]));
        assert_eq!(
            (of_two, endangered(), placement.generation()),
            (200, 200, 2),
            "all but those of the other two"
        );
        placement.note(masters(&["", "b", "c"]));
        assert_eq!((endangered(), placement.generation()), (200, 3));
    }

    #[test]
    fn a_full_master_puts_no_copies_in_danger() {
        let placement = of_three();
        let homes = homes_of(&placement);
        let full = Topology { full: vec!["id1".to_owned()], ..masters(&["a", "b", "c"]) };
        placement.note(full.clone());
        placement.note(full);
        assert!(homes.iter().all(|home| !placement.is_at_risk(*home)) && placement.generation() == 0);
        assert!((0..300).any(|extent| placement.home(extent) != homes[extent as usize]));
        placement.note(masters(&["a", "b", "c"]));
        assert!((0..300).all(|extent| placement.home(extent) == homes[extent as usize]));
    }

    #[test]
    fn new_copies_are_never_in_danger_while_masters_restart_in_turn() {
        let placement = of_three();
        let mut run_ids = ["a", "b", "c"].map(str::to_owned);
        for round in 0..100 {
            let before = homes_of(&placement);
            run_ids[round % 3] = round.to_string();
            placement.note(masters(&run_ids.each_ref().map(String::as_str)));
            let endangered = before.iter().filter(|home| placement.is_at_risk(**home)).count();
            assert!((150..=300).contains(&endangered), "round {round}: {endangered}");
            assert!((0..300).all(|extent| !placement.is_at_risk(placement.home(extent))), "round {round}");
        }
        // Then one alone, as often as there are epochs, and more.
        for round in 0..20 {
            run_ids[1] = format!("again {round}");
            placement.note(masters(&run_ids.each_ref().map(String::as_str)));
            assert!((0..300).all(|extent| !placement.is_at_risk(placement.home(extent))), "round {round}");
        }
    }

    #[test]
    fn epochs_go_on_where_the_process_before_has_ended() {
        let before = of_three();
        let mut homes = Vec::new();
        for round in 0..5 {
            homes.extend((0..300).map(|extent| before.home(extent)));
            before.note(masters(&["a", &round.to_string(), "c"]));
        }
        assert_eq!(before.epoch(), Some(5));
        let placement = Placement::new(1);
        placement.set_settled_after(Duration::ZERO);
        placement.note(masters(&["a", "4", "c"]));
        assert_eq!(placement.epoch(), None);
        placement.continue_from(5);
        // Once.
        placement.continue_from(7);
        let endangered = || homes.iter().filter(|home| placement.is_at_risk(**home)).count();
        assert_eq!((placement.epoch(), endangered()), (Some(5), 0));
        placement.note(masters(&["a", "5", "c"]));
        assert_eq!(placement.epoch(), Some(6));
        assert!((750..1250).contains(&endangered()), "{}", endangered());
        assert!((0..300).all(|extent| !placement.is_at_risk(placement.home(extent))));
    }

    #[test]
    fn the_order_of_replicas_is_no_change() {
        let placement = of_three();
        let mut other = masters(&["a", "b", "c"]);
        other.masters.iter_mut().for_each(|master| master.replicas.clear());
        placement.note(other);
        assert_eq!(placement.generation(), 0);
    }

    #[test]
    fn after_a_resume_a_master_may_be_away_for_a_while() {
        let before = Placement::new(0);
        before.note(masters(&["a", "b", "c"]));
        let homes = homes_of(&before);
        let placement = Placement::new(1);
        let endangered = |placement: &Placement| {
            let count = homes.iter().filter(|home| placement.is_at_risk(**home)).count();
            (placement.generation(), count)
        };
        assert_eq!(endangered(&placement), (1, 0));
        placement.note(masters(&["a", "", "c"]));
        assert_eq!(endangered(&placement), (1, 0));
        // Objects can be written at once.
        assert!((0..300).all(|extent| placement.check(placement.home(extent)).is_ok()));
        placement.note(masters(&["a", "b", "c"]));
        assert_eq!(endangered(&placement), (1, 0));
        placement.set_settled_after(Duration::ZERO);
        placement.note(masters(&["a", "b", "c"]));
        assert_eq!(endangered(&placement), (2, 0), "what is there is looked at");
        placement.note(masters(&["a", "", "c"]));
        assert!(endangered(&placement) >= (3, 150));
    }

    #[test]
    fn a_master_that_begins_anew_puts_older_copies_in_danger() {
        let placement = of_three();
        let mut run_id = 0;
        // As often as there are epochs, and more.
        for round in 1..20 {
            let homes = homes_of(&placement);
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
            .find(|home| placement.check(*home).is_ok())
            .unwrap();
        placement.note(masters(&["a", "new", "c"]));
        assert!(!placement.is_at_risk(home) && placement.generation() == 21);
    }
}
