//! Bytes that were read ahead of the pages in them.
//!
//! - [`Streams`], on a file or block device: consecutive pages were mostly written together, so a sequential
//!   reader's bytes after a page are read with it, and kept until the reader goes on
//! - `extents.rs`: where each extent is an object of the backing: whole extents, in the background
//!
//! What was read ahead is verified like what comes from the backing for one page.
//!
//! Lock: `backing extents`, a leaf but for the locks of buffers, protects what is kept.

mod extents;

use crate::backing::{Buffer, Filling};
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::PageNo;
use crate::store::slot::Backed;

use super::log::{Log, Placed, READ_AHEAD_BYTES};
use super::sealed::Scratch;
pub(super) use extents::Extents;

pub(super) struct Window {
    pub(super) filling: Filling,
    pub(super) start: u64,
    pub(super) len_bytes: usize,
    pub(super) buffer: Buffer,
}

impl Window {
    /// As [`Log::find`], if the window has the object.
    pub(super) fn find<'a>(
        &'a self,
        log: &Log,
        object: Placed,
        scratch: &'a mut Scratch,
    ) -> Option<(u32, &'a [u8])> {
        let Placed { backed: Backed { place, .. }, filling, .. } = object;
        let at = usize::try_from(place.checked_sub(self.start)?).ok()?;
        let bytes = self.buffer[..self.len_bytes].get(at..)?;
        if self.filling != filling || log.table.extent_of(self.start) != log.table.extent_of(place) {
            return None;
        }
        log.find(bytes, object, scratch)
    }
}

pub(super) enum ReadAhead {
    Streams(Box<Streams>),
    Extents(Extents),
}

impl ReadAhead {
    /// Returns bytes that may have an object, or else how many to read from its place on at least.
    pub(super) fn find(&self, log: &Log, object: Placed) -> (Option<Arc<Window>>, usize) {
        let Placed { page, backed: Backed { place, .. }, filling } = object;
        match self {
            ReadAhead::Streams(streams) => streams.find(page, place),
            ReadAhead::Extents(extents) => (extents.find((log.table.extent_of(place), filling)), 0),
        }
    }
}

/// Sequential readers tracked at a time.
const STREAMS: usize = 16;

pub(super) struct Streams {
    streams: [Stream; STREAMS],
    turn: Counter,
}

struct Stream {
    next_page: Counter,
    next_place: Counter,
    window: Mutex<Option<Arc<Window>>>,
}

impl Default for Streams {
    fn default() -> Self {
        let stream = || Stream {
            next_page: Counter::new(0),
            next_place: Counter::new(0),
            window: Mutex::new(&classes::BACKING_EXTENTS, None),
        };
        Streams { streams: std::array::from_fn(|_| stream()), turn: Counter::new(0) }
    }
}

impl Streams {
    fn expecting(&self, page: PageNo, place: u64) -> Option<&Stream> {
        let is_next =
            |stream: &&Stream| stream.next_page.get() == page.number() && stream.next_place.get() == place;
        self.streams.iter().find(is_next).filter(|_| page.0 > 0)
    }

    fn find(&self, page: PageNo, place: u64) -> (Option<Arc<Window>>, usize) {
        match self.expecting(page, place) {
            Some(stream) => (stream.window.lock().clone(), READ_AHEAD_BYTES),
            None => (None, 0),
        }
    }

    /// Notes that `page` was read at `place`, from `window`, and the place of the next one.
    pub(super) fn note(&self, page: PageNo, place: u64, next_place: u64, window: Arc<Window>) {
        let stream = match self.expecting(page, place) {
            Some(stream) => {
                *stream.window.lock() = Some(window);
                stream
            }
            None => &self.streams[self.turn.add(1) as usize % STREAMS],
        };
        stream.next_page.set(page.number() + 1);
        stream.next_place.set(next_place);
    }
}
