//! The service manager's store of file descriptors, which outlives all of a daemon's processes: sd_pid_notify_with_fds(3),
//! `FileDescriptorStoreMax=` of systemd.service(5).
//!
//! Each descriptor is stored by a name with this process's ID and the descriptor's number, and then the state, which has
//! these numbers. States are counted: the last one is valid, so that a death in between leaves one. A daemon that is
//! started again finds all by sd_listen_fds(3), and goes on like the next program after an upgrade.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::handover::{Number, State};
use crate::daemon::notify;

/// The variable with the number of descriptors that the manager takes; not set without a store.
const STORE: &str = "FDSTORE";
/// The name of a descriptor begins with this; the process and the number follow.
const DESCRIPTOR: &str = "uzram-fd-";
/// The name of a state begins with this; its count follows.
const STATE: &str = "uzram-state-";
/// The number of the first descriptor that a manager hands over: `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;

/// What is in the manager's store.
pub struct FdStore {
    numbers: BTreeSet<Number>,
    /// Names to remove after the next state is stored.
    old_names: Vec<String>,
    states: u64,
}

fn name_of(number: Number) -> String {
    format!("{DESCRIPTOR}{}-{}", std::process::id(), number.raw())
}

impl FdStore {
    /// Returns an empty store, if the manager has one.
    pub fn from_env() -> Option<FdStore> {
        let count: usize = env::var(STORE).ok()?.parse().ok()?;
        (count > 0).then(|| FdStore { numbers: BTreeSet::new(), old_names: Vec::new(), states: 0 })
    }

    /// Stores a state with its descriptors in the place of the last one.
    ///
    /// # Errors
    /// The manager cannot be told. The last state is valid then.
    pub fn put(&mut self, state: &State) -> io::Result<()> {
        let numbers: BTreeSet<Number> = state.numbers().into_iter().collect();
        for number in numbers.difference(&self.numbers) {
            // SAFETY: the holder has the descriptors of its state open.
            notify::store(&name_of(*number), unsafe { number.borrow() })?;
        }
        self.old_names.extend(self.numbers.difference(&numbers).map(|number| name_of(*number)));
        self.numbers = numbers;
        let (file, _) = state.write()?;
        notify::store(&format!("{STATE}{}", self.states + 1), file.as_fd())?;
        self.old_names.push(format!("{STATE}{}", self.states));
        self.states += 1;
        for name in std::mem::take(&mut self.old_names) {
            notify::forget(&name)?;
        }
        Ok(())
    }
}

impl Drop for FdStore {
    /// Empties the store: the daemon has ended, and another would find nothing to go on with.
    fn drop(&mut self) {
        let descriptors = self.numbers.iter().map(|number| name_of(*number));
        let states = (self.states > 0).then(|| format!("{STATE}{}", self.states));
        // If the manager cannot be told, it closes them when it forgets the service.
        self.old_names
            .drain(..)
            .chain(descriptors)
            .chain(states)
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
    let (mut states, mut found, mut old_names) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for (name, number) in names.split(':').zip(FIRST..) {
        let count = name.strip_prefix(STATE).and_then(|count| count.parse::<u64>().ok());
        let old = name.strip_prefix(DESCRIPTOR).and_then(|old| old.rsplit_once('-')?.1.parse::<RawFd>().ok());
        if count.is_none() && old.is_none() {
            continue;
        }
        old_names.push(name.to_owned());
        // SAFETY: the caller's promise; the manager hands them over in the order of their names.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        match (count, old) {
            (Some(count), _) => drop(states.insert(count, fd)),
            (_, Some(old)) => drop(found.insert(old, fd)),
            (None, None) => {}
        }
    }
    let Some((states, fd)) = states.pop_last() else { return Ok(None) };
    let mut state = State::read_from(fd.into())?;
    let missing =
        |number: RawFd| io::Error::other(format!("the service manager has lost descriptor {number}"));
    for number in state.numbers_mut() {
        let fd = found.remove(&number.raw()).ok_or_else(|| missing(number.raw()))?;
        // The state has it from here on.
        *number = Number::new(fd.as_raw_fd());
        std::mem::forget(fd);
    }
    Ok(Some((state, FdStore { numbers: BTreeSet::new(), old_names, states })))
}
