//! What must outlive the process that serves a connection: a small file of shared memory, made of 64-bit words.
//!
//! | words | contents |
//! |---|---|
//! | [`MAGIC_AT`] to [`LANES_AT`] | the format, the lives (`lives`), the last number of a device |
//! | [`LANES_AT`] | for each thread a cache line with the number of requests that it answered |
//! | [`REQUESTS_AT`] | two sets of requests under way, of lives with even and with odd numbers (`lives`) |
//! | [`HANDLES_AT`] | the open files (`open_files`) |
//! | [`DEVICES_AT`] | the devices' numbers (`device_numbers`) |
//!
//! A process may die between any two stores. So each change has one store that commits it, and all stores are ordered
//! (`Release`): what was stored before the commit is there if the commit is. A killed process's stores are all visible to
//! the one that finds it dead.
//!
//! Another program may have written anything into the file, so nothing read from it is an index, a length or a promise.
//!
//! Locks: none here. Each open file is changed under its handle's lock, the devices' numbers under the tree's; a word of
//! the requests belongs to the thread that took it by compare-and-swap; lives begin before threads are started.

mod device_numbers;
mod lives;
mod open_files;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use uzram::mem::{MemoryFile, Table};
use uzram::sync::{Arc, AtomicU64, Ordering};
use uzram::{Error, Result};

pub use lives::Strikes;
pub(super) use lives::UnderWay;
pub(super) use open_files::OpenFileRecord;

/// The name of the file, which `/proc/PID/maps` shows.
const NAME: &str = "uzram-ledger";
/// "uzramled", and the version of the format in its last byte.
const MAGIC: u64 = u64::from_be_bytes(*b"uzramle\x01");
/// Words of a cache line.
const LINE_WORDS: usize = 8;

/// The most open files.
pub(super) const MAX_OPEN: usize = 1024;
/// The most devices whose numbers are kept.
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
const DEVICES_AT: usize = HANDLES_AT + MAX_OPEN * open_files::WORDS;
const WORDS: usize = DEVICES_AT + MAX_DEVICES * device_numbers::WORDS;

/// Returns the length of the file: whole pages of the host.
fn file_bytes() -> u64 {
    Table::<AtomicU64>::bytes_of(WORDS).next_multiple_of(rustix::param::page_size() as u64)
}

/// Open files, devices' numbers and requests under way, in memory that outlives the process.
pub struct Ledger {
    file: Arc<MemoryFile>,
    words: Table<AtomicU64>,
}

impl Ledger {
    /// Creates an empty ledger, locked in memory if the system allows it.
    ///
    /// # Errors
    /// `NoMemory` or `Io`: the system refuses the memory.
    pub fn new() -> Result<Ledger> {
        let ledger = Ledger::map(MemoryFile::create(NAME, file_bytes())?)?;
        ledger.store(MAGIC_AT, MAGIC);
        Ok(ledger)
    }

    /// Opens a ledger that [`Ledger::new`] created, in this process or another.
    ///
    /// # Errors
    /// `Invalid` for any other file, or a ledger of another version; else as [`Ledger::new`].
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
        super::resident::lock(std::ptr::from_ref(&words[0]).cast(), words.max_bytes());
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
}

impl AsFd for Ledger {
    /// Returns the descriptor with which another process can open the ledger.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("file", &self.file).finish_non_exhaustive()
    }
}
