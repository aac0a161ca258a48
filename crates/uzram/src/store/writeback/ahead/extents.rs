//! Whole extents, read in the background where the backing keeps each as one object.
//!
//! Reads of pages vote about which are read next ([`Trend`]), each zone of the disk by itself, so that
//! readers of different parts do not outvote one another. Where there is a trend, a read that enters an
//! extent has the extents of the pages that come next read. A page whose extent is not there yet is read
//! alone, as ever: no read waits for another one.
//!
//! An object is never changed, so the bytes of an extent's filling stay valid; those of an older filling are
//! not found. The memory is bounded: the extents used least recently make room. If one goes of which hardly
//! any page was read, the zone's vote begins anew.

use std::collections::VecDeque;

use super::Window;
use super::trend::Trend;
use crate::backing::{Buffer, Buffers, Completion, Direction, Filling, Tiers, Transfer};
use crate::base::error::Result;
use crate::base::sync::{Arc, Mutex, classes};
use crate::base::units::PageNo;

/// The memory of extents that were read ahead.
const BUDGET_BYTES: usize = if cfg!(loom) { 1 } else { 4 << 20 };
/// At least as many extents, however large.
const LEAST_EXTENTS: usize = if cfg!(loom) { 1 } else { 4 };
/// Zones of the disk that vote by themselves at a time…
const ZONES: usize = if cfg!(loom) { 2 } else { 16 };
/// …and pages of a zone: 64 MiB.
const ZONE_PAGES: u64 = 1 << 14;
/// Pages of an extent that must be read for it to have been worth reading.
const LEAST_HITS: u32 = 4;

/// The extents that were read ahead.
pub(in super::super) struct Extents {
    zones: Box<[Mutex<Zone>; ZONES]>,
    kept: Arc<Kept>,
    buffers: Buffers,
}

#[derive(Default)]
struct Zone {
    trend: Trend,
    /// The extent of the last read.
    extent: Option<u32>,
}

/// The extents that are there, or on their way; those used last are at the end.
struct Kept(Mutex<VecDeque<Entry>>);

struct Entry {
    extent: u32,
    filling: Filling,
    /// `None` while it is on its way.
    window: Option<Arc<Window>>,
    /// The page whose read had it read, and how many pages were read from it since.
    page: PageNo,
    hits: u32,
}

impl Extents {
    /// Has room for some extents of a size.
    pub(super) fn new(extent_bytes: usize) -> Result<Self> {
        let count = (BUDGET_BYTES / extent_bytes).max(LEAST_EXTENTS);
        let kept = Mutex::new(&classes::BACKING_EXTENTS, VecDeque::with_capacity(count + 1));
        Ok(Extents {
            zones: Box::new(std::array::from_fn(|_| Mutex::new(&classes::BACKING_EXTENTS, Zone::default()))),
            kept: Arc::new(Kept(kept)),
            buffers: Buffers::new(count as u32, extent_bytes)?,
        })
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.buffers.count() * self.buffers.buffer_bytes()
    }

    fn zone(&self, page: PageNo) -> &Mutex<Zone> {
        &self.zones[(page.number() / ZONE_PAGES) as usize % ZONES]
    }

    /// Returns the bytes of an extent, if they are there.
    pub(super) fn find(&self, extent: u32, filling: Filling) -> Option<Arc<Window>> {
        let mut kept = self.kept.0.lock();
        let at = kept.iter().position(|entry| entry.extent == extent && entry.filling == filling)?;
        let window = kept[at].window.clone()?;
        kept[at].hits += 1;
        if at + 1 < kept.len() {
            let entry = kept.remove(at);
            kept.extend(entry);
        }
        Some(window)
    }

    /// Notes that a page was read from an extent. Returns the step to the pages that are read next, if there
    /// is a trend and the last read was from another extent.
    pub(in super::super) fn note(&self, page: PageNo, extent: u32) -> Option<i64> {
        let mut zone = self.zone(page).lock();
        zone.trend.note(page.number());
        let step = zone.trend.step().filter(|_| zone.extent != Some(extent));
        // Until there is a trend, the extent counts as new.
        if step.is_some() {
            zone.extent = Some(extent);
        }
        step
    }

    /// Returns a buffer to read an extent for `page`; `None` if it is there or on its way, or there is no
    /// memory for it.
    pub(in super::super) fn make_room(&self, page: PageNo, extent: u32, filling: Filling) -> Option<Buffer> {
        let mut wasted = None;
        let buffer = {
            let mut kept = self.kept.0.lock();
            if kept.iter().any(|entry| entry.extent == extent && entry.filling == filling) {
                return None;
            }
            let mut buffer = self.buffers.take();
            if buffer.is_none() {
                let oldest = kept.iter().position(|entry| entry.window.is_some())?;
                let oldest = kept.remove(oldest)?;
                wasted = (oldest.hits < LEAST_HITS).then_some(oldest.page);
                // Its buffer is free unless a thread reads from it.
                drop(oldest);
                buffer = self.buffers.take();
            }
            if buffer.is_some() {
                kept.push_back(Entry { extent, filling, window: None, page, hits: 0 });
            }
            buffer
        };
        if let Some(page) = wasted {
            let mut zone = self.zone(page).lock();
            zone.trend.forget();
            zone.extent = None;
        }
        buffer
    }

    /// Starts to read an extent, for which there is room, from `start` on.
    pub(in super::super) fn start(
        &self,
        backing: &Tiers,
        extent: u32,
        start: u64,
        filling: Filling,
        buffer: Buffer,
    ) {
        let reading =
            Reading { kept: Arc::clone(&self.kept), extent, filling, start, len_bytes: buffer.len() };
        backing.start(Transfer {
            direction: Direction::Read,
            offset: start,
            len_bytes: buffer.len(),
            filling,
            buffer,
            token: 0,
            completion: Arc::new(reading),
        });
    }
}

struct Reading {
    kept: Arc<Kept>,
    extent: u32,
    filling: Filling,
    start: u64,
    len_bytes: usize,
}

impl Completion for Reading {
    /// A failure is nobody's: the pages are read alone.
    fn done(&self, _token: u64, buffer: Buffer, result: Result<()>) {
        let Reading { extent, filling, start, len_bytes, .. } = *self;
        let window = result.is_ok().then(|| Arc::new(Window { filling, start, len_bytes, buffer }));
        let mut kept = self.kept.0.lock();
        let is_it = |entry: &Entry| entry.extent == extent && entry.filling == filling;
        let Some(at) = kept.iter().position(is_it) else { return };
        match window {
            Some(window) => kept[at].window = Some(window),
            None => drop(kept.remove(at)),
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::backing::{Backing, Blocks};
    use crate::base::error::{Error, ErrorKind};
    use crate::base::units::PAGE_SIZE;
    use crate::store::loom_tests::model;
    use loom::thread;

    /// Each byte of an extent is its number. Completes each transfer at once; that of the second fails.
    struct Numbers;

    impl Blocks for Numbers {
        fn len_bytes(&self) -> u64 {
            u64::MAX
        }

        fn block_bytes(&self) -> usize {
            1
        }

        fn start(&self, transfer: Transfer) {
            let Transfer { offset, mut buffer, token, completion, .. } = transfer;
            let extent = offset / PAGE_SIZE as u64;
            buffer.fill(extent as u8);
            let result = if extent == 2 { Err(Error::new(ErrorKind::Io, "refused")) } else { Ok(()) };
            completion.done(token, buffer, result);
        }

        fn discard(&self, _: u64, _: u64) {}
    }

    fn read_ahead(extents: &Extents, extent: u32) {
        if let Some(buffer) = extents.make_room(PageNo(0), extent, Filling::default()) {
            let start = u64::from(extent) * PAGE_SIZE as u64;
            let numbers = Arc::<Tiers>::from(Backing::Blocks(Arc::new(Numbers)));
            extents.start(&numbers, extent, start, Filling::default(), buffer);
        }
    }

    /// There is room for one extent: what is found is that extent, whatever else is read ahead meanwhile.
    #[test]
    fn loom_an_extent_makes_room_for_another_while_it_is_read_from() {
        model(|| {
            let extents = Arc::new(Extents::new(PAGE_SIZE).expect("memory"));
            let other = {
                let extents = Arc::clone(&extents);
                thread::spawn(move || [1, 2].into_iter().for_each(|extent| read_ahead(&extents, extent)))
            };
            read_ahead(&extents, 0);
            for extent in [0, 1] {
                if let Some(window) = extents.find(extent, Filling::default()) {
                    assert!(window.buffer.iter().all(|byte| *byte == extent as u8));
                }
            }
            other.join().expect("no panic");
            assert!(extents.find(2, Filling::default()).is_none());
            let kept = extents.kept.0.lock().len();
            assert_eq!(extents.buffers.free() + kept, extents.buffers.count());
        });
    }
}
