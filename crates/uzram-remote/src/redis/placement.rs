//! Where copies are put, and which of those that are there are in danger.
//!
//! Objects are written to the masters that are well now. A master that is away, and slots that have moved,
//! put copies in danger only once that has lasted for a while: most nodes come back. So does a master whose
//! process has begun anew, as it may have lost what it had: a [home](topology::in_epoch) has the number of
//! the *epoch* in which it was chosen, and each time that masters have begun anew, another epoch begins. The
//! current epoch is kept in the device's lease, for the next process.
//!
//! Two things are not noticed: that a master has begun anew while no process of the device served, and what
//! has not been copied again when as many epochs have begun as are told apart.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uzram::Result;
use uzram::sync::Mutex;

use super::topology::{self, Topology};

/// How long a change lasts before copies are moved.
const SETTLED_AFTER: Duration = Duration::from_secs(30);

pub(super) struct Placement(Mutex<State>);

struct State {
    now: Topology,
    since: Instant,
    settled_after: Duration,
    /// The masters by which copies are judged.
    settled: Topology,
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
        Placement(Mutex::unordered(State {
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
        self.0.lock().settled_after = time;
    }

    pub(super) fn note(&self, mut now: Topology) {
        // Each node names them in another order, and copies do not depend on them.
        now.masters.iter_mut().for_each(|master| master.replicas.clear());
        let mut state = self.0.lock();
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
        let state = self.0.lock();
        state.is_epoch_known.then_some(state.epoch)
    }

    /// Counts the epochs from the last one of the process before, and returns the current one. Objects that
    /// were written meanwhile seem older than they are.
    pub(super) fn continue_from(&self, last: u32) -> u32 {
        let mut state = self.0.lock();
        if !std::mem::replace(&mut state.is_epoch_known, true) {
            state.epoch = state.epoch.wrapping_add(last);
            state.restarted.values_mut().for_each(|epoch| *epoch = epoch.wrapping_add(last));
        }
        state.epoch
    }

    /// Returns the home of an extent's next object; 0 if there are not two masters.
    pub(super) fn home(&self, extent: u32) -> u32 {
        let state = self.0.lock();
        topology::in_epoch(state.now.home(extent), state.epoch)
    }

    pub(super) fn check(&self, home: u32) -> Result<()> {
        self.0.lock().now.check(home)
    }

    pub(super) fn generation(&self) -> u64 {
        self.0.lock().generation
    }

    /// Returns whether copies are in danger: a slot has no master any more, both have the same one, or one
    /// that may have lost what it had. Those of which no copy has a master are not: there is nothing to copy
    /// until one is back.
    pub(super) fn is_at_risk(&self, home: u32) -> bool {
        let state = self.0.lock();
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

    fn endangered(placement: &Placement, homes: &[u32]) -> usize {
        homes.iter().filter(|home| placement.is_at_risk(**home)).count()
    }

    /// New objects can be written, and are not in danger.
    fn are_new_ones_well(placement: &Placement) -> bool {
        let homes = homes_of(placement);
        homes.iter().all(|home| placement.check(*home).is_ok()) && endangered(placement, &homes) == 0
    }

    /// Who is there now, after whether a change counts at once; how often that has counted, and how many of
    /// 300 are in danger then.
    type Step = (bool, [&'static str; 3], u64, std::ops::Range<usize>);

    #[test]
    fn copies_are_in_danger_once_a_change_has_lasted() {
        const ALL: [&str; 3] = ["a", "b", "c"];
        let cases: [(u64, &[Step]); 3] = [
            // Two of three had a copy at the one that is away.
            (
                0,
                &[
                    (false, ["a", "", "c"], 0, 0..1),
                    (false, ALL, 0, 0..1),
                    (true, ALL, 0, 0..1),
                    (true, ["a", "", "c"], 1, 150..250),
                ],
            ),
            // What cannot be copied waits for its masters.
            (
                0,
                &[
                    (true, ["a", "b", ""], 1, 200..201),
                    (true, ["", "b", ""], 2, 200..201),
                    (true, ["", "b", "c"], 3, 200..201),
                ],
            ),
            // After a resume a master may be away for a while, and then what is there is looked at.
            (
                1,
                &[
                    (false, ["a", "", "c"], 1, 0..1),
                    (false, ALL, 1, 0..1),
                    (true, ALL, 2, 0..1),
                    (true, ["a", "", "c"], 3, 150..301),
                ],
            ),
        ];
        for (generation, steps) in cases {
            let before = of_three();
            let homes = homes_of(&before);
            let placement = Placement::new(generation);
            if generation == 0 {
                placement.note(masters(&ALL));
            }
            for (is_settled, run_ids, generation, count) in steps {
                if *is_settled {
                    placement.set_settled_after(Duration::ZERO);
                }
                placement.note(masters(run_ids));
                let found = endangered(&placement, &homes);
                assert!(count.contains(&found), "{run_ids:?}: {found}");
                assert_eq!(placement.generation(), *generation, "{run_ids:?}");
                let are_two = run_ids.iter().filter(|id| !id.is_empty()).count() >= 2;
                assert!(!are_two || are_new_ones_well(&placement), "{run_ids:?}");
            }
        }
    }

    #[test]
    fn a_full_master_and_the_order_of_replicas_put_no_copies_in_danger() {
        let placement = of_three();
        let homes = homes_of(&placement);
        let full = Topology { full: vec!["id1".to_owned()], ..masters(&["a", "b", "c"]) };
        placement.note(full.clone());
        placement.note(full);
        assert_eq!((endangered(&placement, &homes), placement.generation()), (0, 0));
        assert_ne!(homes_of(&placement), homes);
        let mut other = masters(&["a", "b", "c"]);
        other.masters.iter_mut().for_each(|master| master.replicas.clear());
        placement.note(other);
        assert_eq!((homes_of(&placement), placement.generation()), (homes, 0));
    }

    #[test]
    fn new_copies_are_never_in_danger_while_masters_restart_in_turn() {
        let placement = of_three();
        let mut run_ids = ["a", "b", "c"].map(str::to_owned);
        let in_turn = (0..100).map(|round| (round, round % 3, 300));
        // Then one alone, as often as there are epochs, and more.
        for (round, master, most) in in_turn.chain((100..120).map(|round| (round, 1, 249))) {
            let before = homes_of(&placement);
            run_ids[master] = round.to_string();
            placement.note(masters(&run_ids.each_ref().map(String::as_str)));
            let endangered = endangered(&placement, &before);
            assert!((150..=most).contains(&endangered), "round {round}: {endangered}");
            assert!(are_new_ones_well(&placement), "round {round}");
        }
    }

    #[test]
    fn epochs_go_on_where_the_process_before_has_ended() {
        let before = of_three();
        let mut homes = Vec::new();
        for round in 0..5 {
            homes.extend(homes_of(&before));
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
        assert_eq!((placement.epoch(), endangered(&placement, &homes)), (Some(5), 0));
        placement.note(masters(&["a", "5", "c"]));
        assert_eq!(placement.epoch(), Some(6));
        assert!((750..1250).contains(&endangered(&placement, &homes)));
        assert!(are_new_ones_well(&placement));
    }
}
