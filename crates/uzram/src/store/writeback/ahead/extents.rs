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

pub(in super::super) struct Extents {
    zones: Box<[Mutex<Zone>; ZONES]>,
    kept: Arc<Kept>,
    pub(in super::super) buffers: Buffers,
}

#[derive(Default)]
struct Zone {
    trend: Trend,
    extent: Option<u32>,
}

type Key = (u32, Filling);

/// The extents that are there, or on their way; those used last are at the end.
type Kept = Mutex<VecDeque<Entry>>;

struct Entry {
    key: Key,
    /// `None` while it is on its way.
    window: Option<Arc<Window>>,
    /// The page whose read had it read, and how many pages were read from it since.
    page: PageNo,
    hits: u32,
}

impl Extents {
    pub(in super::super) fn new(extent_bytes: usize) -> Result<Self> {
        let count = (BUDGET_BYTES / extent_bytes).max(LEAST_EXTENTS);
        let kept = VecDeque::with_capacity(count + 1);
        Ok(Extents {
            zones: Box::new(std::array::from_fn(|_| Mutex::new(&classes::BACKING_EXTENTS, Zone::default()))),
            kept: Arc::new(Mutex::new(&classes::BACKING_EXTENTS, kept)),
            buffers: Buffers::new(count as u32, extent_bytes)?,
        })
    }

    fn zone(&self, page: PageNo) -> &Mutex<Zone> {
        &self.zones[(page.number() / ZONE_PAGES) as usize % ZONES]
    }

    pub(super) fn find(&self, key: Key) -> Option<Arc<Window>> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|entry| entry.key == key)?;
        let window = kept[at].window.clone()?;
        kept[at].hits += 1;
        if at + 1 < kept.len() {
            let entry = kept.remove(at);
            kept.extend(entry);
        }
        Some(window)
    }

    /// Notes that a page was read. Returns the step to the next ones, on a trend that entered another extent.
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

    /// Starts to read an extent, from `start` on, for a reader of `page`. Returns false if it is there or on
    /// its way, or there is no memory.
    pub(in super::super) fn fetch(&self, backing: &Tiers, page: PageNo, key: Key, start: u64) -> bool {
        let Some(buffer) = self.make_room(page, key) else { return false };
        let completion = Arc::new(Reading { kept: Arc::clone(&self.kept), key, start });
        let (direction, offset, len_bytes, filling, token) = (Direction::Read, start, buffer.len(), key.1, 0);
        backing.start(Transfer { direction, offset, len_bytes, filling, buffer, token, completion });
        true
    }

    fn make_room(&self, page: PageNo, key: Key) -> Option<Buffer> {
        let mut wasted = None;
        let buffer = {
            let mut kept = self.kept.lock();
            if kept.iter().any(|entry| entry.key == key) {
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
                kept.push_back(Entry { key, window: None, page, hits: 0 });
            }
            buffer
        };
        if let Some(page) = wasted {
            *self.zone(page).lock() = Zone::default();
        }
        buffer
    }
}

struct Reading {
    kept: Arc<Kept>,
    key: Key,
    start: u64,
}

impl Completion for Reading {
    /// A failure is nobody's: the pages are read alone.
    fn done(&self, _token: u64, buffer: Buffer, result: Result<()>) {
        let (len_bytes, filling) = (buffer.len(), self.key.1);
        let window = Arc::new(Window { filling, start: self.start, len_bytes, buffer });
        let mut kept = self.kept.lock();
        let Some(at) = kept.iter().position(|entry| entry.key == self.key) else { return };
        match result {
            Ok(()) => kept[at].window = Some(window),
            Err(_) => drop(kept.remove(at)),
        }
    }
}

const STEPS: usize = 32;
/// The last steps that are counted first.
const LEAST_STEPS: usize = 4;

/// The last reads, which vote about the next (H. A. Maruf and M. Chowdhury, "Effectively Prefetching Remote
/// Memory with Leap", USENIX ATC 2020, algorithm 1). A step that more than half of the last reads took is the
/// trend; the votes of the last few are counted first, then of twice as many, and so on. The majority is
/// found by R. S. Boyer and J S. Moore's algorithm.
#[derive(Default)]
struct Trend {
    last_page: Option<u64>,
    /// A ring.
    steps: [i64; STEPS],
    count: usize,
}

impl Trend {
    fn note(&mut self, page: u64) {
        if let Some(last) = self.last_page.replace(page).filter(|last| *last != page) {
            self.steps[self.count % STEPS] = page.wrapping_sub(last) as i64;
            self.count += 1;
        }
    }

    fn step(&self) -> Option<i64> {
        let mut counted = LEAST_STEPS;
        while counted <= self.count.min(STEPS) {
            if let Some(step) = self.majority(counted) {
                return Some(step);
            }
            counted *= 2;
        }
        None
    }

    fn majority(&self, counted: usize) -> Option<i64> {
        let last = || (1..=counted).map(|back| self.steps[(self.count - back) % STEPS]);
        let (mut candidate, mut lead) = (0, 0);
        for step in last() {
            match lead {
                0 => (candidate, lead) = (step, 1),
                _ if step == candidate => lead += 1,
                _ => lead -= 1,
            }
        }
        (last().filter(|step| *step == candidate).count() > counted / 2).then_some(candidate)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;

    fn of(pages: impl IntoIterator<Item = u64>) -> Option<i64> {
        let mut trend = Trend::default();
        pages.into_iter().for_each(|page| trend.note(page));
        trend.step()
    }

    #[test]
    fn most_of_the_last_steps_are_the_trend() {
        assert_eq!(of([]), None);
        assert_eq!(of(5..9), None, "three steps");
        assert_eq!(of(5..10), Some(1));
        assert_eq!(of((0..10).rev()), Some(-1));
        assert_eq!(of((0..10).map(|page| page * 7)), Some(7));
        // One jump in four is outvoted; so are repeated reads.
        assert_eq!(of([10, 11, 12, 12, 12, 500, 501]), Some(1));
        assert_eq!(of([0, 1, 50, 51, 100, 101, 150, 151]), None);
        // An old trend yields to a new one.
        assert_eq!(of((0..100).chain((200..206).rev())), Some(-1));
        assert_eq!(of([u64::MAX, 0, 1, 2, 3]), Some(1));
    }

    #[test]
    fn the_vote_agrees_with_a_count() {
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let (mut page, mut pages) = (1 << 20, Vec::new());
            for _ in 0..random.below(80) {
                page += random.below(3) as u64;
                pages.push(page);
            }
            let mut all: Vec<i64> = pages.windows(2).map(|two| (two[1] - two[0]) as i64).collect();
            all.retain(|step| *step != 0);
            let voted = [4, 8, 16, 32].into_iter().filter(|counted| *counted <= all.len());
            let expected = voted.into_iter().find_map(|counted| {
                let last = &all[all.len() - counted..];
                [1, 2]
                    .into_iter()
                    .find(|step| last.iter().filter(|other| *other == step).count() > counted / 2)
            });
            assert_eq!(of(pages), expected, "seed {seed}");
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
        let numbers = Arc::<Tiers>::from(Backing::Blocks(Arc::new(Numbers)));
        let start = u64::from(extent) * PAGE_SIZE as u64;
        extents.fetch(&numbers, PageNo(0), (extent, Filling::default()), start);
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
                if let Some(window) = extents.find((extent, Filling::default())) {
                    assert!(window.buffer.iter().all(|byte| *byte == extent as u8));
                }
            }
            other.join().expect("no panic");
            assert!(extents.find((2, Filling::default())).is_none());
            let kept = extents.kept.lock().len();
            assert_eq!(extents.buffers.free() + kept, LEAST_EXTENTS);
        });
    }
}
