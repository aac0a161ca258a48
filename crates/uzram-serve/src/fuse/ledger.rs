//! What must outlive the process that serves a connection: a small file of shared memory, made of 64-bit
//! words.
//!
//! | words | contents |
//! |---|---|
//! | [`MAGIC_AT`] to [`LANES_AT`] | the format, the lives, the last number of a device |
//! | [`LANES_AT`] | for each thread a cache line with the number of requests that it answered |
//! | [`REQUESTS_AT`] | two sets of requests under way, of lives with even and with odd numbers |
//! | [`HANDLES_AT`] | the open files |
//! | [`DEVICES_AT`] | the devices' numbers |
//!
//! **Lives.** A *life* is that of a process that serves the connection; they are numbered from 1. The words
//! are:
//!
//! ```text
//!          32 bits            32 bits
//! life   | number           | strikes |   the life that began last
//! next   | number           | strikes |   the same, or the one that is about to begin
//! ```
//!
//! A life with an even number has its requests in the first set, another in the second. So when life n + 1
//! begins, the set of life n is as its death left it, and the other is still that of life n - 1.
//! [`Ledger::begin_life`] compares them, stores the outcome in `next`, which settles it even if this process
//! dies before it has begun its life, empties the other set for itself, and commits by a store to `life`.
//!
//! **Open files**, by their handles:
//!
//! ```text
//!           32 bits       29 bits   3 bits
//! state   | generation  |         | access |   access: the mode of open(2) plus 1; 0 for no file
//! file    | inode number                   |
//! unique  | of the request that opened it  |
//! ```
//!
//! A store to `state` opens or closes. A closed file leaves the next generation behind, which is part of the
//! next file's handle: a request to close that is carried out twice closes no other file.
//!
//! **Devices' numbers**: a number, 0 for none, and the name, with zeros up to its longest length. The number
//! is stored last.
//!
//! A process may die between any two stores. So each change has one store that commits it, and all stores are
//! ordered (`Release`): what was stored before the commit is there if the commit is. A killed process's
//! stores are all visible to the one that finds it dead.
//!
//! Another program may have written anything into the file, so nothing read from it is an index, a length or
//! a promise.
//!
//! Locks: none here. Each open file is changed under its handle's lock, the devices' numbers under the
//! tree's; a word of the requests belongs to the thread that took it by compare-and-swap; lives begin before
//! threads are started.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use uzram::mem::{MemoryFile, Table};
use uzram::sync::{Arc, AtomicU64, Ordering};
use uzram::{Error, Result};

use super::proto::FUSE_UNIQUE_RESEND;
use super::received;

/// The name of the file, which `/proc/PID/maps` shows.
const NAME: &str = "uzram-ledger";
/// "uzramled", and the version of the format in its last byte.
const MAGIC: u64 = u64::from_be_bytes(*b"uzramle\x01");
const LINE_WORDS: usize = 8;

pub(super) const MAX_OPEN: usize = 1024;
const MAX_DEVICES: usize = 1024;
/// The most requests under way that are known.
const MAX_REQUESTS: usize = 2048;
/// Lanes for threads; with more threads, some share one.
const MAX_LANES: usize = 256;

const MAGIC_AT: usize = 0;
const LIFE_AT: usize = 1;
const NEXT_LIFE_AT: usize = 2;
const ANSWERED_AT: usize = 3;
const LAST_NUMBER_AT: usize = 5;
const LANES_AT: usize = 2 * LINE_WORDS;
const REQUESTS_AT: usize = LANES_AT + MAX_LANES * LINE_WORDS;
const HANDLES_AT: usize = REQUESTS_AT + 2 * MAX_REQUESTS;
const DEVICES_AT: usize = HANDLES_AT + MAX_OPEN * HANDLE_WORDS;
const WORDS: usize = DEVICES_AT + MAX_DEVICES * DEVICE_WORDS;

/// Words of an open file's entry, and their places in it.
const HANDLE_WORDS: usize = 4;
const STATE: usize = 0;
const FILE: usize = 1;
const UNIQUE: usize = 2;
const MAX_ACCESS: u32 = libc::O_RDWR as u32 + 1;

/// The longest name of a device, `Device::check_name`.
const NAME_BYTES: usize = 64;
const NAME_WORDS: usize = NAME_BYTES / size_of::<u64>();
/// Words of a device's entry, and their places in it.
const DEVICE_WORDS: usize = 1 + NAME_WORDS;
const NUMBER: usize = 0;
const DEVICE_NAME: usize = 1;

/// Returns the length of the file: whole pages of the host.
fn file_bytes() -> u64 {
    Table::<AtomicU64>::bytes_of(WORDS).next_multiple_of(rustix::param::page_size() as u64)
}

/// The entry of a request under way; the default for none, if too many are.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    /// The word, plus 1; 0 for none.
    word: u32,
}

/// What is known of the lives before this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strikes {
    /// The number of this life, from 1.
    pub life: u32,
    /// Lives in a row, up to the last one, that died without having answered any request, all at the same
    /// ones: those under way in one and in the next have one in common. The first of a row counts in any
    /// case, so that this is 0 in the first life only.
    pub strikes: u32,
}

impl Strikes {
    fn from_word(word: u64) -> Self {
        Strikes { life: (word >> 32) as u32, strikes: word as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.life) << 32 | u64::from(self.strikes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenFileRecord {
    pub ino: u64,
    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
    pub mode: i32,
    pub unique: u64,
}

/// Open files, devices' numbers and requests under way, in memory that outlives the process.
pub struct Ledger {
    file: Arc<MemoryFile>,
    words: Table<AtomicU64>,
}

impl Ledger {
    /// Creates an empty ledger, locked in memory if the system allows it. Errors: `NoMemory` or `Io`: the
    /// system refuses the memory.
    pub fn new() -> Result<Ledger> {
        let ledger = Ledger::map(MemoryFile::create(NAME, file_bytes())?)?;
        ledger.store(MAGIC_AT, MAGIC);
        Ok(ledger)
    }

    /// Opens a ledger that [`Ledger::new`] created, in this process or another. Errors: `Invalid` for any
    /// other file, or a ledger of another version; else as [`Ledger::new`].
    pub fn from_fd(fd: OwnedFd) -> Result<Ledger> {
        let file = MemoryFile::from_fd(fd)?;
        let invalid = || Error::invalid("the descriptor is not of a ledger of this version");
        if file.len_bytes() != file_bytes() {
            return Err(invalid());
        }
        let ledger = Ledger::map(file)?;
        if ledger.load(MAGIC_AT) != MAGIC {
            return Err(invalid());
        }
        Ok(ledger)
    }

    fn map(file: Arc<MemoryFile>) -> Result<Ledger> {
        let region = file.region(0, file.len_bytes())?;
        let words = Table::<AtomicU64>::new_in(Some(&region), WORDS)?;
        words.populate()?;
        received::lock(std::ptr::from_ref(&words[0]).cast(), words.max_bytes());
        Ok(Ledger { file, words })
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, at: usize, word: u64) {
        #[cfg(test)]
        tests::before_store();
        self.words[at].store(word, Ordering::Release);
    }

    /// Begins the life of a process that serves. Call it once, before it serves, and when the one before is
    /// dead.
    pub fn begin_life(&self) -> Strikes {
        let last = self.life();
        let life = last.life.wrapping_add(1);
        let settled = Strikes::from_word(self.load(NEXT_LIFE_AT));
        let next = if settled.life == life {
            settled
        } else {
            let next = Strikes { life, strikes: self.count_strikes(last) };
            self.store(NEXT_LIFE_AT, next.to_word());
            next
        };
        self.store(answered_at(life), self.answered());
        set_of(life).for_each(|at| self.store(at, 0));
        self.store(LIFE_AT, next.to_word());
        next
    }

    /// Returns this life; life 0 before the first.
    pub(super) fn life(&self) -> Strikes {
        Strikes::from_word(self.load(LIFE_AT))
    }

    fn count_strikes(&self, last: Strikes) -> u32 {
        if last.life == 0 {
            return 0;
        }
        if self.answered() != self.load(answered_at(last.life)) {
            return 1;
        }
        let [under_way, before] = [last.life, last.life.wrapping_sub(1)].map(|life| {
            let uniques = set_of(life).map(|at| self.load(at) & !FUSE_UNIQUE_RESEND);
            uniques.filter(|unique| *unique != 0).collect::<BTreeSet<_>>()
        });
        if under_way.is_disjoint(&before) { 1 } else { last.strikes.saturating_add(1) }
    }

    fn answered(&self) -> u64 {
        (0..MAX_LANES).map(|lane| self.load(lane_at(lane))).fold(0, u64::wrapping_add)
    }

    #[inline]
    pub(super) fn begin_request(&self, thread: usize, unique: u64) -> UnderWay {
        let set = set_of(self.life().life);
        // Each thread begins to look at a cache line of its own.
        let hint = thread.wrapping_mul(LINE_WORDS);
        for probe in 0..MAX_REQUESTS {
            let word = set.start + hint.wrapping_add(probe) % MAX_REQUESTS;
            let is_free = self.words[word].load(Ordering::Relaxed) == 0;
            if is_free
                && self.words[word].compare_exchange(0, unique, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return UnderWay { word: word as u32 + 1 };
            }
        }
        UnderWay::default()
    }

    #[inline]
    pub(super) fn end_request(&self, thread: usize, request: UnderWay) {
        // The thread itself and tasks that it started may count at the same time. A lost count does not
        // matter: it only matters that the number changes.
        let lane = lane_at(thread % MAX_LANES);
        self.store(lane, self.load(lane).wrapping_add(1));
        if let Some(word) = request.word.checked_sub(1) {
            self.store(word as usize, 0);
        }
    }

    /// Returns the generation of handle `index`, and its file, if one is open.
    pub(super) fn open_file(&self, index: usize) -> (u32, Option<OpenFileRecord>) {
        let at = entry_at(index);
        let state = self.load(at + STATE);
        let (generation, access) = ((state >> 32) as u32, state as u32);
        let file = (1..=MAX_ACCESS).contains(&access).then(|| OpenFileRecord {
            ino: self.load(at + FILE),
            mode: access as i32 - 1,
            unique: self.load(at + UNIQUE),
        });
        (generation, file)
    }

    pub(super) fn enter_file(&self, index: usize, generation: u32, file: OpenFileRecord) {
        let at = entry_at(index);
        self.store(at + FILE, file.ino);
        self.store(at + UNIQUE, file.unique & !FUSE_UNIQUE_RESEND);
        let access = file.mode as u32 + 1;
        self.store(at + STATE, u64::from(generation) << 32 | u64::from(access));
    }

    /// Clears the entry of handle `index`, and leaves `generation` behind for the next.
    pub(super) fn clear_file(&self, index: usize, generation: u32) {
        self.store(entry_at(index) + STATE, u64::from(generation) << 32);
    }

    /// Returns the handle that a request opened, if it did: its index and generation.
    pub(super) fn opened_by(&self, unique: u64) -> Option<(usize, u32)> {
        (0..MAX_OPEN).find_map(|index| {
            let (generation, file) = self.open_file(index);
            (file?.unique == unique & !FUSE_UNIQUE_RESEND).then_some((index, generation))
        })
    }

    pub(super) fn last_number(&self) -> u64 {
        self.load(LAST_NUMBER_AT)
    }

    /// Returns the devices' names and numbers. Only names that a device can have are UTF-8.
    pub(super) fn device_numbers(&self) -> Vec<(u64, Vec<u8>)> {
        let entry = |at| {
            let number = self.load(at + NUMBER);
            let words = (0..NAME_WORDS).map(|word| self.load(at + DEVICE_NAME + word));
            let mut name: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES));
            (number, name)
        };
        device_entries().map(entry).filter(|(number, _)| *number != 0).collect()
    }

    /// Enters a device's number, which is larger than all before; returns whether there was room for it.
    pub(super) fn enter_device(&self, number: u64, name: &str) -> bool {
        // Never given again, even if this process dies now.
        self.store(LAST_NUMBER_AT, number);
        let free = device_entries().find(|at| self.load(at + NUMBER) == 0);
        let Some(at) = free.filter(|_| name.len() <= NAME_BYTES) else { return false };
        let mut bytes = [0; NAME_BYTES];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        for (word, bytes) in bytes.as_chunks().0.iter().enumerate() {
            self.store(at + DEVICE_NAME + word, u64::from_ne_bytes(*bytes));
        }
        self.store(at + NUMBER, number);
        true
    }

    pub(super) fn retain_devices(&self, is_kept: impl Fn(u64) -> bool) {
        for at in device_entries() {
            let number = self.load(at + NUMBER);
            if number != 0 && !is_kept(number) {
                self.store(at + NUMBER, 0);
            }
        }
    }
}

fn lane_at(lane: usize) -> usize {
    LANES_AT + lane * LINE_WORDS
}

fn answered_at(life: u32) -> usize {
    ANSWERED_AT + (life & 1) as usize
}

fn set_of(life: u32) -> Range<usize> {
    let start = REQUESTS_AT + (life & 1) as usize * MAX_REQUESTS;
    start..start + MAX_REQUESTS
}

fn entry_at(index: usize) -> usize {
    HANDLES_AT + index % MAX_OPEN * HANDLE_WORDS
}

fn device_entries() -> impl Iterator<Item = usize> {
    (0..MAX_DEVICES).map(|index| DEVICES_AT + index * DEVICE_WORDS)
}

impl AsFd for Ledger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
