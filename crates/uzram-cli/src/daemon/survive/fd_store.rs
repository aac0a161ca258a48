//! The service manager's store of file descriptors, which outlives all of a daemon's processes:
//! sd_pid_notify_with_fds(3), `FileDescriptorStoreMax=` of systemd.service(5).
//!
//! `docs/internals/take-over.md`, "A service manager's store", says what is stored, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use super::handover::{Number, State, Stored};
use crate::daemon::notify;

/// The variable with the number of descriptors that the manager takes; not set without a store.
const STORE: &str = "FDSTORE";
/// The name of a descriptor begins with this; this process's ID and a count follow.
const DESCRIPTOR: &str = "uzram-fd-";
/// The name of a state begins with this; its count follows.
const STATE: &str = "uzram-state-";
/// The number of the first descriptor that a manager hands over: `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;

pub struct FdStore {
    stored: Stored,
    /// The most descriptors that it keeps; `None` if the manager does not say.
    most: Option<usize>,
}

fn name_of_state(count: u64) -> String {
    format!("{STATE}{count}")
}

fn most_from_env() -> Option<usize> {
    env::var(STORE).ok()?.parse().ok()
}

impl FdStore {
    /// Returns the store, if the manager has one; `stored` is what another program of this process has put
    /// into it.
    pub fn from_env(stored: Option<Stored>) -> Option<FdStore> {
        let most = most_from_env().filter(|most| *most > 0);
        most.map(|_| FdStore { stored: stored.unwrap_or_default(), most })
    }

    pub fn stored(&self) -> &Stored {
        &self.stored
    }

    /// Stores a state with its descriptors in the place of the last one.
    pub fn put(&mut self, mut state: State) -> io::Result<()> {
        let numbers: BTreeSet<Number> = state.numbers().map(|number| *number).collect();
        // Those of closed descriptors first, whatever fails: other descriptors get the same numbers.
        let (names, closed): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.stored.names)
            .into_iter()
            .partition(|(number, _)| numbers.contains(number));
        self.stored.names = names;
        self.stored.old_names.extend(closed.into_values());
        let is_new = |number: &&Number| !self.stored.names.contains_key(number);
        let new: Vec<Number> = numbers.iter().filter(is_new).copied().collect();
        self.make_room(new.len())?;
        for number in new {
            self.stored.named += 1;
            let name = format!("{DESCRIPTOR}{}-{}", std::process::id(), self.stored.named);
            // SAFETY: the holder has the descriptors of its state open.
            notify::store(&name, unsafe { number.borrow() })?;
            self.stored.names.insert(number, name);
        }
        let mut next = self.stored.clone();
        next.retire_state();
        (next.states, next.has_state) = (next.states + 1, true);
        state.stored = Some(next.clone());
        let (file, _) = state.write()?;
        notify::store(&name_of_state(next.states), file.as_fd())?;
        self.stored = next;
        self.forget_old()
    }

    /// Makes room for so many descriptors more, and another state. Where that takes the room of the last
    /// state, that is removed before.
    fn make_room(&mut self, new: usize) -> io::Result<()> {
        let most = self.most.unwrap_or(usize::MAX);
        if self.stored.count() + new + 1 > most {
            self.stored.retire_state();
            self.forget_old()?;
        }
        let needed = self.stored.count() + new + 1;
        if needed <= most {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "{needed} descriptors are to be kept, and {STORE} allows {most}: raise FileDescriptorStoreMax= of the unit"
        )))
    }

    fn forget_old(&mut self) -> io::Result<()> {
        while let Some(name) = self.stored.old_names.last() {
            notify::forget(name)?;
            self.stored.old_names.pop();
        }
        Ok(())
    }
}

impl Stored {
    fn count(&self) -> usize {
        self.names.len() + self.old_names.len() + usize::from(self.has_state)
    }

    /// Has the last state be forgotten.
    fn retire_state(&mut self) {
        if std::mem::take(&mut self.has_state) {
            self.old_names.push(name_of_state(self.states));
        }
    }
}

impl Drop for FdStore {
    /// Empties the store: the daemon has ended, and another would find nothing to go on with.
    fn drop(&mut self) {
        self.stored.retire_state();
        let Stored { names, old_names, .. } = std::mem::take(&mut self.stored);
        // If the manager cannot be told, it closes them when it forgets the service.
        old_names.into_iter().chain(names.into_values()).for_each(|name| drop(notify::forget(&name)));
    }
}

/// Takes the state that a daemon before has stored, if the manager has handed one over, and the store.
///
/// # Safety
/// This process has just started: no descriptor that the manager may have handed over is in use.
pub unsafe fn take() -> io::Result<Option<(State, FdStore)>> {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    if variable("LISTEN_PID").parse() != Ok(std::process::id()) {
        return Ok(None);
    }
    let names = variable("LISTEN_FDNAMES");
    let (mut states, mut found) = (BTreeMap::new(), BTreeMap::new());
    for (name, number) in names.split(':').zip(FIRST..) {
        let count = name.strip_prefix(STATE).and_then(|count| count.parse::<u64>().ok());
        if count.is_none() && !name.starts_with(DESCRIPTOR) {
            continue;
        }
        // SAFETY: the caller's promise; the manager hands them over in the order of their names.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        match count {
            Some(count) => drop(states.insert(count, fd)),
            None => drop(found.insert(name, fd)),
        }
    }
    let Some((count, fd)) = states.pop_last() else { return Ok(None) };
    let mut state = State::read_from(fd.into())?;
    let before = state.stored.take().unwrap_or_default();
    let mut stored = Stored { states: count, has_state: true, named: before.named, ..Stored::default() };
    for number in state.numbers() {
        let missing = || io::Error::other(format!("the service manager has lost descriptor {}", number.0));
        let name = before.names.get(number).ok_or_else(missing)?;
        let fd = found.remove(name.as_str()).ok_or_else(missing)?;
        // The state has it from here on.
        *number = Number(fd.into_raw_fd());
        stored.names.insert(*number, name.clone());
    }
    stored.old_names.extend(found.into_keys().map(str::to_owned));
    stored.old_names.extend(states.into_keys().map(name_of_state));
    Ok(Some((state, FdStore { stored, most: most_from_env() })))
}
