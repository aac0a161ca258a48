//! Sequential readers of a file or block device. Consecutive pages were mostly written together, so the bytes after the one
//! that is read are read with it, and kept until the reader goes on.

use super::Window;
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::PageNo;
use crate::store::writeback::log::READ_AHEAD_BYTES;

/// Sequential readers tracked at a time.
const STREAMS: usize = 16;

/// The sequential readers.
pub(in crate::store::writeback) struct Streams {
    streams: [Stream; STREAMS],
    turn: Counter,
}

struct Stream {
    /// The page expected next, and its expected place.
    next_page: Counter,
    next_place: Counter,
    /// The bytes read ahead.
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
    /// Returns the reader that expects `page` at `place` next, if any.
    fn expecting(&self, page: PageNo, place: u64) -> Option<&Stream> {
        let is_next =
            |stream: &&Stream| stream.next_page.get() == page.number() && stream.next_place.get() == place;
        self.streams.iter().find(is_next).filter(|_| page.0 > 0)
    }

    /// As [`super::ReadAhead::find`].
    pub(super) fn find(&self, page: PageNo, place: u64) -> (Option<Arc<Window>>, usize) {
        match self.expecting(page, place) {
            Some(stream) => (stream.window.lock().clone(), READ_AHEAD_BYTES),
            None => (None, 0),
        }
    }

    /// Notes that `page` was read at `place`, from `window`, and that the next one is expected at `next_place`.
    pub(in crate::store::writeback) fn note(
        &self,
        page: PageNo,
        place: u64,
        next_place: u64,
        window: Arc<Window>,
    ) {
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
