//! The service manager's store of file descriptors, which outlives all of a daemon's processes: sd_pid_notify_with_fds(3),
//! `FileDescriptorStoreMax=` of systemd.service(5).
//!
//! Each descriptor is stored by a name with this process's ID and the descriptor's number, and then the state, which says
//! which name each of its descriptors has. States are counted: the last one is valid, so that a death in between leaves one. A
//! daemon that is started again finds all by sd_listen_fds(3), and goes on like the next program after an upgrade.
//!
//! A manager keeps so many descriptors as `FDSTORE` says, and ignores what is beyond, and a descriptor that it has already,
//! without a word.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::handover::{Number, State, Stored};
use crate::daemon::notify;

/// The variable with the number of descriptors that the manager takes; not set without a store.
const STORE: &str = "FDSTORE";
/// The name of a descriptor begins with this; the process and the number follow.
const DESCRIPTOR: &str = "uzram-fd-";
/// The name of a state begins with this; its count follows.
const STATE: &str = "uzram-state-";
/// The number of the first descriptor that a manager hands over: `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;

/// The manager's store.
pub struct FdStore {
    stored: Stored,
    /// The most descriptors that it keeps; `None` if the manager does not say.
    most: Option<usize>,
}

fn name_of(number: Number) -> String {
    format!("{DESCRIPTOR}{}-{}", std::process::id(), number.raw())
}

fn name_of_state(count: u64) -> String {
    format!("{STATE}{count}")
}

fn most_from_env() -> Option<usize> {
    env::var(STORE).ok()?.parse().ok()
}

impl FdStore {
    /// Returns the store, if the manager has one; `stored` is what another program of this process has put into it.
    pub fn from_env(stored: Option<Stored>) -> Option<FdStore> {
        let most = most_from_env().filter(|most| *most > 0);
        most.map(|_| FdStore { stored: stored.unwrap_or_default(), most })
    }

    /// Returns what is in it.
    pub fn stored(&self) -> &Stored {
        &self.stored
    }

    /// Stores a state with its descriptors in the place of the last one.
    ///
    /// # Errors
    /// The manager cannot be told; the last state is valid then. Or it keeps too few descriptors: none is valid then, for
    /// what is in the last one may be gone since.
    pub fn put(&mut self, mut state: State) -> io::Result<()> {
        let numbers: BTreeSet<Number> = state.numbers().into_iter().collect();
        let new: Vec<Number> =
            numbers.iter().filter(|number| !self.stored.names.contains_key(number)).copied().collect();
        self.check_room(new.len())?;
        for number in new {
            let name = name_of(number);
            // SAFETY: the holder has the descriptors of its state open.
            notify::store(&name, unsafe { number.borrow() })?;
            self.stored.names.insert(number, name);
        }
        let mut next = self.stored.clone();
        next.names.retain(|number, _| numbers.contains(number));
        let gone = self.stored.names.iter().filter(|(number, _)| !numbers.contains(number));
        next.old_names.extend(gone.map(|(_, name)| name.clone()));
        next.old_names.extend((next.states > 0).then(|| name_of_state(next.states)));
        next.states += 1;
        state.stored = Some(next.clone());
        let (file, _) = state.write()?;
        notify::store(&name_of_state(next.states), file.as_fd())?;
        self.stored = next;
        for name in std::mem::take(&mut self.stored.old_names) {
            notify::forget(&name)?;
        }
        Ok(())
    }

    /// Checks that the manager keeps so many descriptors more, and another state.
    fn check_room(&self, new: usize) -> io::Result<()> {
        let Stored { names, old_names, states } = &self.stored;
        let has = names.len() + old_names.len() + usize::from(*states > 0);
        let needs = has + new + 1;
        match self.most.filter(|most| needs > *most) {
            None => Ok(()),
            Some(most) => {
                notify::forget(&name_of_state(*states))?;
                Err(io::Error::other(format!(
                    "{needs} descriptors are to be kept, and {STORE} allows {most}: raise FileDescriptorStoreMax= of the unit"
                )))
            }
        }
    }
}

impl Drop for FdStore {
    /// Empties the store: the daemon has ended, and another would find nothing to go on with.
    fn drop(&mut self) {
        let Stored { names, old_names, states } = std::mem::take(&mut self.stored);
        let state = (states > 0).then(|| name_of_state(states));
        // If the manager cannot be told, it closes them when it forgets the service.
        old_names
            .into_iter()
            .chain(names.into_values())
            .chain(state)
            .for_each(|name| drop(notify::forget(&name)));
    }
}

/// Takes the state that a daemon before has stored, if the manager has handed one over, and the store.
///
/// # Errors
/// The state cannot be read, or a descriptor is missing.
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
    let mut stored = Stored { states: count, ..Stored::default() };
    for number in state.numbers_mut() {
        let missing =
            || io::Error::other(format!("the service manager has lost descriptor {}", number.raw()));
        let name = before.names.get(number).ok_or_else(missing)?;
        let fd = found.remove(name.as_str()).ok_or_else(missing)?;
        // The state has it from here on.
        *number = Number::new(fd.as_raw_fd());
        std::mem::forget(fd);
        stored.names.insert(*number, name.clone());
    }
    stored.old_names.extend(found.into_keys().map(str::to_owned));
    stored.old_names.extend(states.into_keys().map(name_of_state));
    Ok(Some((state, FdStore { stored, most: most_from_env() })))
}
