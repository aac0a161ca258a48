//! A store's backing device: its log, and the buffers that are being filled and written.

use crate::backing::{Buffer, Buffers, Ended, Start};
#[cfg(not(loom))]
use crate::backing::{Started, Threads, Transfer};
use crate::base::error::Result;
use crate::base::mem::Region;
use crate::base::sync::{Arc, Counter, Mutex, classes};

use super::ahead::{Extents, ReadAhead};
use super::allowance::{Allowance, Charge};
#[cfg(not(loom))]
use super::log::Format;
use super::log::Log;
use super::object::Object;
#[cfg(not(loom))]
use super::sealed;
use super::{BackingOptions, MAX_WRITEBACK_BATCH, WritebackLimit};

/// Buffers beyond those in flight: two being filled, one being cleaned from.
const MORE_BUFFERS: u64 = 3;
const NUMBERS: usize = (MAX_WRITEBACK_BATCH + MORE_BUFFERS) as usize;
const _: () = assert!(NUMBERS <= u8::MAX as usize);

pub(in crate::store) struct BackingDevice {
    pub(in crate::store) log: Log,
    pub(in crate::store) allowance: Allowance,
    pub(super) ahead: ReadAhead,
    /// The [`Health::placement`](crate::backing::Health::placement) for which all extents are where they
    /// should be.
    pub(super) rescued: Counter,
    /// The extent at which rescuing goes on.
    pub(super) rescue_from: Counter,
    /// The maximum number of writes in flight.
    pub(super) batch: Counter,
    pub(super) buffers: Buffers,
    /// Writes that have ended and were not processed yet.
    pub(super) ended: Arc<Ended>,
    pub(super) writer: Mutex<Writer>,
    /// Starts to write what a buffer was filled with, after it was sealed if it is to be.
    pub(super) start: Start,
}

pub(super) struct Writer {
    /// The writes whose buffers are being filled, by purpose, and the buffers.
    pub(super) open: [Option<(usize, Buffer)>; 2],
    /// Partly filled extents and their fill level, by purpose; held to be filled further.
    pub(super) begun: [Option<(u32, usize)>; 2],
    /// The write of number `n` is at index `n - 1`.
    pub(super) flights: Vec<Flight>,
    pub(super) in_flight: u64,
    /// The extent whose objects are moved, by the reserve of its tier.
    pub(super) moved_from: u32,
    /// Pages that have left memory and are still in the LRU's lists.
    pub(super) dead: Vec<u32>,
}

/// A write, and the objects in its buffer.
#[derive(Default)]
pub(super) struct Flight {
    pub(super) is_used: bool,
    pub(super) extent: u32,
    /// Where in the extent the buffer begins.
    pub(super) start: usize,
    /// The bytes of the buffer that are filled.
    pub(super) fill: usize,
    /// Given back if the write fails.
    pub(super) charge: Charge,
    pub(super) entries: Vec<Entry>,
}

pub(super) struct Entry {
    pub(super) object: Object,
    /// Where the object lies in the extent.
    pub(super) at: u32,
    /// The length of the page's object in the pool.
    pub(super) pool_bytes: u16,
    /// The old place, if the object is being moved.
    pub(super) from: Option<u64>,
}

impl BackingDevice {
    /// Creates the backing device of a store, with all of its space free.
    pub(in crate::store) fn new(
        options: &BackingOptions,
        limit: WritebackLimit,
        batch: Option<u64>,
        [extents, allowance]: [Option<&Region>; 2],
    ) -> Result<Self> {
        let log = Log::new(options, extents)?;
        let writer = Writer {
            open: [const { None }; 2],
            begun: [None; 2],
            flights: (0..NUMBERS).map(|_| Flight::default()).collect(),
            in_flight: 0,
            moved_from: 0,
            dead: Vec::new(),
        };
        let start = start_of(&log)?;
        Ok(BackingDevice {
            batch: Counter::new(
                batch.unwrap_or(options.layout.default_batch()).clamp(1, MAX_WRITEBACK_BATCH),
            ),
            buffers: Buffers::new(NUMBERS as u32, log.table.extent_bytes)?,
            ended: Ended::new(NUMBERS),
            writer: Mutex::new(&classes::WRITEBACK, writer),
            allowance: Allowance::new(limit, allowance)?,
            ahead: match log.table.written_once {
                true => ReadAhead::Extents(Extents::new(log.table.extent_bytes)?),
                false => ReadAhead::Streams(Box::default()),
            },
            start,
            rescued: Counter::new(0),
            rescue_from: Counter::new(0),
            log,
        })
    }

    pub(in crate::store) fn max_bytes(&self) -> usize {
        let writes = (self.batch.get() + MORE_BUFFERS) as usize * self.log.table.extent_bytes;
        let ahead = match &self.ahead {
            // The buffers are those of reads.
            ReadAhead::Streams(_) => 0,
            ReadAhead::Extents(extents) => extents.buffers.max_bytes(),
        };
        self.log.table.entries.max_bytes() + writes + self.log.reads.max_bytes() + ahead
    }
}

/// Where objects are sealed, a thread of its own does that, as it takes longer than filling a buffer.
fn start_of(log: &Log) -> Result<Start> {
    let backing = Arc::clone(&log.backing);
    #[cfg(not(loom))]
    if let Format::Sealed(seal) = &log.format {
        let (seal, extent_bytes) = (Arc::clone(seal), log.table.extent_bytes as u64);
        let carry_out = move |mut started: Started, usable: Result<()>| {
            if usable.is_err() {
                return started.finish(usable);
            }
            let Transfer { offset, len_bytes, filling, buffer, .. } = &mut *started;
            let extent = (*offset / extent_bytes) as u32;
            sealed::seal_all(&*seal, &mut buffer[..*len_bytes], extent, filling.generation);
            backing.start(started.into_transfer());
        };
        let thread = Threads::new("uzram-seal", 1, NUMBERS, Box::new(carry_out))?;
        return Ok(Box::new(move |transfer| thread.start(transfer)));
    }
    Ok(Box::new(move |transfer| backing.start(transfer)))
}
