//! What a holder leaves to another program that takes its place, in the same process: numbers of descriptors,
//! which stay open, and everything else as JSON.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::MemfdFlags;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uzram::store::LAYOUT_VERSION;
use uzram_serve::control::MeasureJson;
use uzram_serve::fuse::ConnectionRecord;

use super::link::{End, KeptDevice};
use crate::config::plan::Charging;

/// The version of [`State`], and of everything in shared memory but the stores, which have a version of their
/// own.
pub const VERSION: u32 = 3;

/// The longest state accepted.
const MAX_BYTES: u64 = 16 << 20;

/// The number of a descriptor that the next program gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Number(pub RawFd);

impl Number {
    pub fn of(fd: BorrowedFd<'_>) -> Number {
        Number(fd.as_raw_fd())
    }

    /// Returns the descriptor.
    ///
    /// # Safety
    /// It is open as long as the result is used.
    pub unsafe fn borrow<'fd>(self) -> BorrowedFd<'fd> {
        // SAFETY: the caller's promise.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }

    /// Takes the descriptor.
    ///
    /// # Safety
    /// The program before left this number to this program, and nothing else takes it.
    pub unsafe fn take(self) -> io::Result<OwnedFd> {
        // SAFETY: the call fails for a number that no descriptor has.
        let fd = unsafe { BorrowedFd::borrow_raw(self.0) };
        fcntl_setfd(fd, FdFlags::CLOEXEC)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { OwnedFd::from_raw_fd(self.0) })
    }
}

/// Everything that a holder has.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    /// The version of the stores' memory.
    pub layout: u64,
    pub words: Vec<OsString>,
    /// The runtime directory, and its lock.
    pub dir: [Number; 2],
    pub nbd: Vec<Number>,
    pub control: Number,
    /// What the processes share, and what outlives the one that serves files.
    pub shared: [Number; 2],
    pub connection: Option<(ConnectionRecord, Vec<Number>)>,
    pub charging: Charging,
    pub protection: Vec<MeasureJson>,
    pub processes: [Option<ProcessState>; 2],
    pub dead: Vec<i32>,
    /// The devices, each with its memory and its backing device.
    pub devices: Vec<(KeptDevice, Option<Number>, Vec<Number>)>,
    /// The command of `--exec`: its process, whether it has a process group of its own, and whether it was
    /// told to end.
    pub command: Option<(i32, bool, bool)>,
    pub command_status: Option<u8>,
    pub ending: Option<End>,
    pub stored: Option<Stored>,
}

/// What is in a service manager's store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stored {
    /// The names of the descriptors. Each keeps its name: a manager that gets one again ignores it.
    pub names: BTreeMap<Number, String>,
    /// Names to remove after the next state is stored.
    pub old_names: Vec<String>,
    /// How many names there were. No two descriptors have the same.
    pub named: u64,
    /// The count of the last state; 0 before the first.
    pub states: u64,
    pub has_state: bool,
}

/// A process that serves or waits to.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessState {
    pub pid: i32,
    /// The holder's ends of its sockets.
    pub links: [Number; 2],
    pub attendant: Option<i32>,
}

impl State {
    /// Returns the numbers of all descriptors, to read or to change them.
    pub fn numbers(&mut self) -> impl Iterator<Item = &mut Number> {
        let connection = self.connection.iter_mut().flat_map(|(_, numbers)| numbers);
        let links = self.processes.iter_mut().flatten().flat_map(|process| &mut process.links);
        let memory =
            self.devices.iter_mut().flat_map(|(_, memory, backing)| memory.iter_mut().chain(backing));
        let single = self.dir.iter_mut().chain([&mut self.control]).chain(&mut self.shared);
        single.chain(&mut self.nbd).chain(connection).chain(links).chain(memory)
    }

    /// Keeps all descriptors open across execve(2).
    pub fn leave_open(&mut self) -> io::Result<()> {
        self.numbers().try_for_each(|number| {
            // SAFETY: the call fails for a number that no descriptor has.
            let fd = unsafe { number.borrow() };
            Ok(fcntl_setfd(fd, fcntl_getfd(fd)? - FdFlags::CLOEXEC)?)
        })
    }

    /// Writes the state to memory; returns the number of its descriptor.
    pub fn write(&self) -> io::Result<(File, RawFd)> {
        let mut file = File::from(rustix::fs::memfd_create("uzram-holder", MemfdFlags::empty())?);
        file.write_all(&serde_json::to_vec(self)?)?;
        let number = file.as_fd().as_raw_fd();
        Ok((file, number))
    }

    /// Reads the state that the program before wrote.
    ///
    /// # Safety
    /// As [`Number::take`].
    pub unsafe fn read(number: RawFd) -> io::Result<State> {
        // SAFETY: the caller's promise.
        State::read_from(File::from(unsafe { Number(number).take() }?))
    }

    pub fn read_from(mut file: File) -> io::Result<State> {
        file.rewind()?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        let state: Value = serde_json::from_slice(&bytes)?;
        if state["version"] != VERSION || state["layout"] != LAYOUT_VERSION {
            return Err(io::Error::other("it is of a version that this program does not read"));
        }
        Ok(serde_json::from_value(state)?)
    }
}
