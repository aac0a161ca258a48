//! Backings, where cold pages are written to: [`Blocks`], which can be overwritten, on a file or a block
//! device, and [`Objects`], which are written once, in a store on other machines. Nothing here knows what the
//! bytes mean: pages, extents, checksums and slots belong to the callers.
//!
//! A [`Transfer`] owns its [`Buffer`]: the backing keeps the buffer until the kernel no longer accesses it,
//! and then passes it to the [`Completion`], with the result.
//!
//! In the steady state, when the queues have grown to the number of transfers in flight, a transfer that
//! succeeds allocates nothing.
//!
//! Locks: `backing queue` (transfers that wait for a thread; the result of a waiter) and `backing buffers`
//! (the free buffers). Both are leaves: no system call is made, no completion called and no other lock taken
//! under them. Buffers may be taken and given back under any lock of the engine but a wait table's.

mod buffers;
#[cfg(not(loom))]
mod faulty;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
mod threads;
mod tiers;

#[cfg(test)]
mod test_memory;
#[cfg(all(test, not(loom)))]
mod tests;

pub use buffers::{Buffer, Buffers, MAX_BUFFER_BYTES};
#[cfg(not(loom))]
pub use faulty::{Fault, FaultKind, Faults, FaultyBacking};
#[cfg(not(loom))]
pub use file::{Engine, FileBacking, FileOptions, MARK_BYTES, Mark};

#[cfg(not(loom))]
pub(crate) use threads::Threads;
pub use tiers::{MAX_TIERS, Tiers};

#[cfg(test)]
pub(crate) use test_memory::Memory;

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant, SystemTime};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, Condvar, Mutex, classes};

/// The attribute that errors of this layer name.
const SETTING: &str = "backing_dev";
/// The attribute that errors name if [`FileOptions::force`] would help.
#[cfg(not(loom))]
const FORCE_SETTING: &str = "backing_force";

/// How long a write at the memory limit waits for room. No [`Health::gone_after`] is longer.
pub const MOST_WAIT: Duration = Duration::from_secs(20);

/// How long a disk may fail before it is considered gone: it does not come back by itself.
pub(crate) const DISK_GONE_AFTER: Duration = Duration::from_secs(2);

/// Bytes by offset that can be overwritten: a file or a block device.
///
/// Transfers in flight together happen in any order, even if they overlap. Dropping a backing waits for all
/// transfers that were started. A completion must therefore not drop the last handle to its backing: it would
/// wait for itself.
pub trait Blocks: Send + Sync {
    /// Returns the size in bytes, a multiple of [`Blocks::block_bytes`].
    fn len_bytes(&self) -> u64;

    /// Returns the alignment of offsets and lengths, a power of two.
    fn block_bytes(&self) -> usize;

    /// Starts a transfer and returns without waiting for it, or for room in a queue. Its completion is called
    /// exactly once, by another thread and with no lock held, even if the transfer cannot be carried out.
    /// Only [`FaultyBacking`], if it can start no thread for a fault, and a pager's spill file, while the
    /// program forks, call it on the calling thread.
    fn start(&self, transfer: Transfer);

    /// Carries out a transfer and waits for it, however many are queued. Must not be called by a completion,
    /// which other transfers wait for. Returns the buffer, and the result that a completion would get.
    fn carry_out(&self, direction: Direction, offset: u64, len_bytes: usize, buffer: Buffer) -> Done {
        let filling = Filling::default();
        wait_for(|completion| {
            self.start(Transfer { direction, offset, len_bytes, filling, buffer, token: 0, completion });
        })
    }

    /// Discards bytes: until they are written again, a read returns zeros, the old bytes, or a mix, or fails.
    /// Gives the space back to the system, unless it is reserved for this backing. It may wait for the
    /// system.
    fn discard(&self, offset: u64, len_bytes: u64);
}

/// Objects that are written once, by one transfer each, read in part, and deleted: a store on other machines.
/// Each is what an extent was filled with: another [`Filling`] of the extent is another object.
pub trait Objects: Send + Sync {
    /// Returns how many bytes all objects may have; `None` for as many as the device needs.
    fn len_bytes(&self) -> Option<u64>;

    /// Returns the most bytes of an object, a power of two. Of an object whose end was not written, a block
    /// behind what was written reads as zeros, or the rest if that is less.
    fn object_bytes(&self) -> usize;

    /// Called once, before the first use: the first of these extents has the number `first_extent` where they
    /// are sealed by `seal`. Who has copies can tell by it whether one is damaged.
    fn join(&self, _first_extent: u32, _seal: Option<&Arc<dyn Seal>>) {}

    /// Returns what the store wants to know again about the next object of an extent: [`Filling::home`].
    /// Called before the extent is filled.
    fn home(&self, _extent: u32) -> u32 {
        0
    }

    /// Starts to write an extent's object, or to read a part of it from the transfer's offset in it on, as
    /// [`Blocks::start`]. A read fails with `NotFound` if there is no such object.
    fn start(&self, extent: u32, transfer: Transfer);

    /// Reads on the calling thread, if that is faster. Returns false if [`Objects::start`] has to do it.
    fn get_here(&self, _extent: u32, _filling: Filling, _at: usize, _out: &mut [u8]) -> bool {
        false
    }

    /// Has an extent's object removed, now or later.
    fn delete(&self, extent: u32, filling: Filling);

    /// Returns what is known about the store.
    fn health(&self) -> Health;

    /// Returns whether copies of an extent's object have been lost for good, or would be lost together, and
    /// there is one to copy now.
    fn is_at_risk(&self, _filling: Filling) -> bool {
        false
    }

    /// Called when no object will be used any more. All may be refused then. Waits until what was deleted is
    /// gone, or for some seconds.
    fn end(&self) {}
}

/// A backing of either kind.
#[derive(Clone)]
pub enum Backing {
    /// Bytes that can be overwritten.
    Blocks(Arc<dyn Blocks>),
    /// Objects that are written once.
    Objects(Arc<dyn Objects>),
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the backing into the buffer.
    Read,
    /// From the buffer to the backing.
    Write,
}

/// What tells runs of a machine from the same snapshot apart.
pub type Salt = [u8; 8];

/// Encrypts `bytes` in place. Returns a tag of them, of `nonce`, of `about`, at most 16 bytes, of the salt,
/// and of the device. Each nonce is used once with a salt.
pub type SealOne<'a> = dyn Fn([u8; 12], &[u8], &mut [u8]) -> [u8; 16] + 'a;

/// Encrypts what goes to a backing, and finds out whether it came back as it was.
pub trait Seal: Send + Sync {
    /// Draws a new salt, and calls `seal_all` once, with the salt and what seals with it. A machine that runs
    /// on from a snapshot more than once should draw another salt each time.
    fn with_new_salt(&self, seal_all: &mut dyn FnMut(Salt, &SealOne<'_>));

    /// Decrypts `bytes` in place. Returns whether all is as it was sealed; otherwise the bytes are worth
    /// nothing.
    fn open(&self, salt: Salt, nonce: [u8; 12], about: &[u8], bytes: &mut [u8], tag: &[u8; 16]) -> bool;
}

/// What is known about a store on other machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Requests that took too long.
    pub expired: u64,
    /// Objects that could not be removed, and stay behind.
    pub left_behind: u64,
    /// Why nothing is written now; `None` if the store is written to.
    pub stopped: Option<Trouble>,
    /// What is wrong with a part of the store, if the rest is used as before.
    pub degraded: Option<Trouble>,
    /// When the last check of all of it began that succeeded.
    pub checked: Option<Instant>,
    /// Changes when extents have to be looked at by [`Objects::is_at_risk`]; at first 0, as long as there is
    /// nothing to be done.
    pub placement: u64,
    /// How long it may fail before it is considered gone. Until then writers at the memory limit wait for it;
    /// from then on they are refused at once, until a transfer succeeds.
    pub gone_after: Duration,
}

/// Something that is wrong, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// What is wrong.
    pub why: String,
    /// Since when something is.
    pub since: SystemTime,
}

impl Trouble {
    /// Returns one that goes on, if there was one `before`, for that reason now.
    pub fn again(before: Option<Trouble>, why: String) -> Trouble {
        Trouble { why, since: before.map_or_else(SystemTime::now, |before| before.since) }
    }
}

/// Which filling of an extent is meant. [`Blocks`] ignore it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Filling {
    /// Another one each time the extent is filled.
    pub generation: u32,
    /// What [`Objects::home`] returned before the extent was filled.
    pub home: u32,
}

/// A transfer of bytes between the start of a buffer and a backing.
pub struct Transfer {
    /// The direction.
    pub direction: Direction,
    /// The offset in the blocks or the object, in bytes.
    pub offset: u64,
    /// The number of bytes, more than 0.
    pub len_bytes: usize,
    /// The filling of the extent in which the bytes lie.
    pub filling: Filling,
    /// The buffer to read into or to write from.
    pub buffer: Buffer,
    /// Passed to the completion, to identify the transfer.
    pub token: u64,
    /// Called with the result.
    pub completion: Arc<dyn Completion>,
}

/// What is left of a transfer: its buffer, and its result.
pub type Done = (Buffer, Result<()>);

pub(crate) type Start = Box<dyn Fn(Transfer) + Send + Sync>;

/// A callback for the end of transfers.
pub trait Completion: Send + Sync {
    /// Called when the transfer of `token` has ended; `buffer` is the transfer's. After a failed read the
    /// contents of the buffer are undefined; after a failed write those of the backing are, within the
    /// transfer's range.
    ///
    /// Other transfers may wait while this runs. It may start new ones. A panic in it does not affect others.
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>);
}

/// A transfer that its backing has accepted. Dropping it calls the completion, with its result, or with an
/// error if a panic ended the thread that carried it out, so that no thread waits for it forever.
pub struct Started {
    /// `None` once it was taken out.
    transfer: Option<Transfer>,
    result: Result<()>,
}

const IS_THERE: &str = "a transfer is taken out once, at the end";

impl Started {
    /// Accepts a transfer.
    pub fn new(transfer: Transfer) -> Self {
        let what = "a defect of uzram ended a transfer to the backing device";
        let result = Err(Error::new(ErrorKind::Io, what).with_setting(SETTING));
        Started { transfer: Some(transfer), result }
    }

    #[cfg(not(loom))]
    pub(crate) fn into_transfer(mut self) -> Transfer {
        self.transfer.take().expect(IS_THERE)
    }

    /// Ends the transfer. Must be called with no lock held.
    pub fn finish(mut self, result: Result<()>) {
        self.result = result;
    }
}

impl Deref for Started {
    type Target = Transfer;

    fn deref(&self) -> &Transfer {
        self.transfer.as_ref().expect(IS_THERE)
    }
}

impl DerefMut for Started {
    fn deref_mut(&mut self) -> &mut Transfer {
        self.transfer.as_mut().expect(IS_THERE)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(transfer) = self.transfer.take() {
            transfer.finish(std::mem::replace(&mut self.result, Ok(())));
        }
    }
}

/// Returns the error of all transfers after a panic has ended a thread of their backing.
fn dead(why: &str) -> Error {
    let what = format!("the backing device is no longer used: {why}. Reset the device to go on");
    Error::new(ErrorKind::Io, what).with_setting(SETTING)
}

impl Transfer {
    /// Calls the completion. Must be called with no lock held.
    fn finish(self, result: Result<()>) {
        let Transfer { completion, token, buffer, .. } = self;
        // The panic hook has reported a panic; other transfers go on.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(move || completion.done(token, buffer, result)));
    }
}

/// Transfers that have ended, for a thread that waits for them.
pub(crate) struct Ended {
    ends: Mutex<VecDeque<(u64, Buffer, Result<()>)>>,
    arrived: Condvar,
}

impl Ended {
    /// Has room for so many without taking memory.
    pub(crate) fn new(transfers: usize) -> Arc<Self> {
        let ends = Mutex::new(&classes::BACKING_QUEUE, VecDeque::with_capacity(transfers));
        Arc::new(Ended { ends, arrived: Condvar::new() })
    }

    pub(crate) fn wait(&self) -> (u64, Buffer, Result<()>) {
        let mut ends = self.ends.lock();
        loop {
            match ends.pop_front() {
                Some(end) => return end,
                None => ends = ends.wait(&self.arrived),
            }
        }
    }
}

impl Completion for Ended {
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>) {
        self.ends.lock().push_back((token, buffer, result));
        self.arrived.notify_one();
    }
}

/// Calls `start` to start a transfer with the completion that it is given, and waits for the transfer.
pub fn wait_for(start: impl FnOnce(Arc<dyn Completion>)) -> Done {
    let ended = Ended::new(1);
    start(Arc::<Ended>::clone(&ended));
    let (_, buffer, result) = ended.wait();
    (buffer, result)
}
