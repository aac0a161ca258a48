//! Pages that are written back to a backing that keeps each extent as one object.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::tests::config;
use super::writeback::sealed::tests::Plain;
use super::writeback_tests::{
    ALL, agree_with_a_model, check, expect, half_random, incompressible, overwrite, write,
};
use super::*;
use crate::backing::{
    Backing, Direction, Fault, FaultKind, Faults, FaultyBacking, Filling, Health, Objects, Seal, Started,
    Tiers, Transfer, Trouble,
};
use crate::base::error::{Error, ErrorKind};
use crate::base::random::Random;
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::{PAGE_SIZE, PageNo};

const OBJECT_BYTES: usize = 64 << 10;
/// The part of a home that says when it was chosen.
const HOME_MASK: u32 = 0xff << 24;

/// Homes and bytes of objects, by extent and generation.
type Map = BTreeMap<(u32, u32), (u32, Vec<u8>)>;

/// Objects in memory, by extent and filling. Changing one, and writing to one that exists, is a defect.
struct Held {
    len_bytes: u64,
    seal: Option<Arc<dyn Seal>>,
    held: Mutex<Map>,
    /// Changes the homes of all extents: those that have older ones are in danger.
    placement: Counter,
    /// Not 0 while nothing is read or written.
    is_down: Counter,
    /// When it was found to be well.
    checked: std::time::Instant,
}

/// Clones share what they hold.
#[derive(Clone)]
pub(super) struct Shared(Arc<Held>);

impl Shared {
    pub(super) fn new(len_bytes: u64) -> Self {
        Self::with(len_bytes, None)
    }

    pub(super) fn sealed(len_bytes: u64) -> Self {
        Self::with(len_bytes, Some(Arc::new(Plain::default())))
    }

    fn with(len_bytes: u64, seal: Option<Arc<dyn Seal>>) -> Self {
        let held = Mutex::new(&classes::BACKING_QUEUE, BTreeMap::new());
        Shared(Arc::new(Held {
            len_bytes,
            seal,
            held,
            placement: Counter::new(0),
            is_down: Counter::new(0),
            checked: std::time::Instant::now(),
        }))
    }

    pub(super) fn objects(&self) -> usize {
        self.0.held.lock().len()
    }

    fn home_of(&self, extent: u32) -> u32 {
        (self.0.placement.get() as u32 & 0xff) << 24 | (extent.wrapping_mul(0x9e37_79b9) >> 8) | 1
    }

    /// Returns how many objects are not where they should be.
    fn misplaced(&self) -> usize {
        self.0.held.lock().iter().filter(|((extent, _), (home, _))| *home != self.home_of(*extent)).count()
    }

    pub(super) fn set_down(&self, is_down: bool) {
        self.0.is_down.set(is_down.into());
    }

    pub(super) fn tier(&self) -> Backing {
        Backing::Objects(Arc::new(self.clone()))
    }

    /// Returns it as a whole backing.
    pub(super) fn alone(&self) -> Arc<Tiers> {
        Arc::new(Tiers::new(vec![self.tier()], self.seal()).expect("one tier"))
    }

    pub(super) fn seal(&self) -> Option<Arc<dyn Seal>> {
        self.0.seal.clone()
    }

    fn start(&self, extent: u32, transfer: Transfer) {
        let objects = self.clone();
        std::thread::spawn(move || {
            let mut started = Started::new(transfer);
            let result = objects.carry_out(extent, &mut started);
            started.finish(result);
        });
    }

    fn carry_out(&self, extent: u32, transfer: &mut Transfer) -> Result<()> {
        let Transfer { direction, offset, len_bytes, filling, buffer, .. } = transfer;
        assert!(filling.generation != 0 && filling.home & 1 == 1);
        let (key, at, part) = ((extent, filling.generation), *offset as usize, &mut buffer[..*len_bytes]);
        assert!(at + part.len() <= OBJECT_BYTES);
        if self.0.is_down.get() > 0 {
            return Err(Error::new(ErrorKind::Io, "it is down"));
        }
        let mut held = self.0.held.lock();
        match direction {
            Direction::Read => {
                let (home, whole) = held
                    .get(&key)
                    .ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such object"))?;
                assert_eq!(*home, filling.home, "extent {extent} is looked for elsewhere");
                let there = whole.get(at..).unwrap_or_default();
                let there = &there[..there.len().min(part.len())];
                part[..there.len()].copy_from_slice(there);
                part[there.len()..].fill(0);
            }
            Direction::Write => {
                assert_eq!(at, 0, "written in parts");
                match held.entry(key) {
                    Entry::Occupied(_) => panic!("object {key:?} is written twice"),
                    Entry::Vacant(vacant) => vacant.insert((filling.home, part.to_vec())),
                };
            }
        }
        Ok(())
    }
}

impl Objects for Shared {
    fn len_bytes(&self) -> Option<u64> {
        Some(self.0.len_bytes)
    }

    fn object_bytes(&self) -> usize {
        OBJECT_BYTES
    }

    fn home(&self, extent: u32) -> u32 {
        self.home_of(extent)
    }

    fn put(&self, extent: u32, transfer: Transfer) {
        self.start(extent, transfer);
    }

    fn get(&self, extent: u32, transfer: Transfer) {
        self.start(extent, transfer);
    }

    fn delete(&self, extent: u32, filling: Filling) {
        self.0.held.lock().remove(&(extent, filling.generation));
    }

    fn health(&self) -> Health {
        let stopped = (self.0.is_down.get() > 0).then(|| Trouble::again(None, "it is down".to_owned()));
        let (expired, checked) = (1, Some(self.0.checked));
        Health { expired, checked, stopped, placement: self.0.placement.get(), ..Health::default() }
    }

    fn is_at_risk(&self, filling: Filling) -> bool {
        filling.home & HOME_MASK != self.home_of(0) & HOME_MASK
    }
}

pub(super) fn store_on(backing: Arc<Tiers>, config: StoreBuilder) -> Store {
    let backing = BackingOptions::packed(backing);
    Store::new(&StoreBuilder { backing: Some(backing), ..config }).expect("a store")
}

/// Pages are overwritten at random while most of the space is taken: extents are cleaned, the objects of
/// those are gone, and nothing is lost. In the end none is left.
#[test]
fn extents_are_written_once_and_removed() {
    for objects in [Shared::new(8 << 20), Shared::sealed(8 << 20)] {
        overwrite_and_remove(objects.alone(), &|| objects.objects());
    }
}

pub(super) fn overwrite_and_remove(backing: Arc<Tiers>, objects: &dyn Fn() -> usize) {
    const PAGES: u64 = 2000;
    let store = store_on(backing, config(PAGES));
    let (mut versions, mut random) = (vec![0; PAGES as usize], Random::new(3));
    write(&store, 0..PAGES, half_random);
    assert_eq!(store.write_back(&ALL), Ok(PAGES));
    let first_objects = objects();
    overwrite(&store, &mut versions, &mut random);
    let stats = store.backing_stats();
    assert!(stats.cleaned_bytes > 0 && stats.pages == PAGES, "{stats:?}");
    assert!(first_objects >= 64 && objects() as u64 <= stats.len_bytes / OBJECT_BYTES as u64);
    assert!(objects() as u64 <= stats.extent_bytes / OBJECT_BYTES as u64 + 64, "{stats:?}");
    (0..).zip(&versions).for_each(|(page, version)| expect(&store, page, &half_random(page + version)));
    // What somebody else removed is an error, and nothing else.
    store.write_back(&ALL).expect("room");
    store.erase_backing();
    assert_eq!(objects(), 0);
    let (mut out, mut lost) = ([0; PAGE_SIZE], 0);
    for (page, version) in (0..).zip(&versions) {
        match store.read(PageNo::from_number(page), &mut out) {
            Ok(()) => assert!(out == half_random(page + version), "page {page}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io);
                lost += 1;
            }
        }
    }
    assert!(lost > 0);
}

/// Without space for more, a page stays in memory, and leaves when others were discarded.
#[test]
fn a_store_of_objects_that_is_full_refuses_more() {
    const PAGES: u64 = 400;
    let store = store_on(Shared::new(1 << 20).alone(), config(PAGES));
    write(&store, 0..PAGES, incompressible);
    let refused = store.write_back(&ALL).map_err(|error| (error.kind(), error.setting()));
    assert_eq!(refused, Err((ErrorKind::NoSpace, Some("backing_dev"))));
    assert_eq!(store.backing_state(), Some(BackingState::Full));
    let held = store.backing_stats().pages;
    assert!((180..256).contains(&held), "{held} pages in 16 extents");
    check(&store, 0..PAGES, incompressible);
    (0..PAGES / 2).for_each(|page| store.discard(PageNo::from_number(page)));
    store.write_back(&ALL).expect("room");
    assert_eq!(store.backing_state(), Some(BackingState::Ok));
    check(&store, PAGES / 2..PAGES, incompressible);
}

#[test]
fn single_blocks_and_odd_extents_are_refused() {
    let objects = Shared::new(8 << 20);
    let of = |layout, compressed| {
        let backing = BackingOptions { backing: objects.alone(), layout, compressed };
        Store::new(&StoreBuilder { backing: Some(backing), ..config(100) }).map(drop)
    };
    let refused = of(WritebackLayout::Blocks, true).expect_err("no blocks");
    assert_eq!((refused.kind(), refused.setting()), (ErrorKind::Unsupported, Some("writeback_layout")));
    of(WritebackLayout::Packed, true).expect("objects");
}

/// When the places of all copies have changed, all extents are rewritten, and nothing is lost.
#[test]
fn extents_in_danger_are_rewritten() {
    const PAGES: u64 = 2000;
    for objects in [Shared::new(8 << 20), Shared::sealed(8 << 20)] {
        let store = store_on(objects.alone(), config(PAGES));
        write(&store, 0..PAGES, half_random);
        store.write_back(&ALL).expect("room");
        assert!(!store.must_rescue() && objects.objects() > 60);
        objects.0.placement.add(1);
        assert!(store.must_rescue() && objects.misplaced() > 60);
        assert!(!store.rescue(|| false), "it was not to begin");
        assert!(store.rescue(|| true) && !store.must_rescue());
        // Extents that are free now are discarded when others are needed.
        store.discard_pages(0..1);
        store.write(PageNo(0), &half_random(0)).expect("memory");
        store.write_back(&ALL).expect("room");
        assert_eq!(objects.misplaced(), 0);
        check(&store, 0..PAGES, half_random);
    }
}

/// Threads do all operations at once, on a backing with faults, and each checks its own pages against a
/// model. The places of all objects change meanwhile.
#[test]
fn everything_at_once_on_objects_agrees_with_a_model() {
    const PAGES: u64 = 600;
    for seed in 0..2 {
        let objects = if seed == 0 { Shared::new(2 << 20) } else { Shared::sealed(2 << 20) };
        let faulty = FaultyBacking::new(objects.clone(), seed).expect("a thread");
        let faults = faulty.faults();
        let backing = Tiers::new(vec![Backing::Objects(Arc::new(faulty))], objects.seal()).expect("one tier");
        let backing = BackingOptions::packed(backing);
        let config = StoreBuilder { backing: Some(backing), limit_pages: 128, ..config(PAGES) };
        let store = Arc::new(Store::new(&config).expect("a store"));
        let policy = PolicyThread::start("test", &store).expect("a thread");
        agree_with_a_model(&store, &faults, 100 + seed, 20_000, |_| {
            for _ in 0..20 {
                std::thread::sleep(std::time::Duration::from_millis(20));
                objects.0.placement.add(1);
                store.rescue(|| true);
            }
        });
        drop(policy);
        let stats = store.backing_stats();
        assert!(stats.pages_written_back > 1000 && stats.cleaned_bytes > 0, "{stats:?}");
        assert!(stats.pages_returned > 0 && stats.failed_writes > 0, "{stats:?}");
        store.discard_pages(0..PAGES);
        assert_eq!((store.backing_stats().pages, store.backing_stats().held_bytes), (0, 0), "seed {seed}");
        // Objects of which the write failed later are removed, too.
        store.erase_backing();
        assert_eq!(objects.objects(), 0, "seed {seed}");
    }
}

/// Reads pages in some order until those that were read ahead are there, and returns how many were found
/// there.
fn read_ahead(store: &Store, pages: impl Iterator<Item = u64>) -> u64 {
    let before = store.backing_stats().pages_read_ahead;
    for page in pages {
        expect(store, page, &half_random(page));
        // Another thread fetches extents meanwhile.
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    store.backing_stats().pages_read_ahead - before
}

/// Readers with a steady step find whole extents that were read ahead of them, several at once; one without
/// finds few, and hardly any extent is read for it.
#[test]
fn extents_are_read_ahead_where_there_is_a_trend() {
    const FAR: u64 = 20_000;
    for objects in [Shared::new(32 << 20), Shared::sealed(32 << 20)] {
        let store = store_on(objects.alone(), StoreBuilder { limit_pages: 400, ..config(2 * FAR) });
        for first in (0..2000).chain(FAR..FAR + 2000).step_by(200) {
            write(&store, first..first + 200, half_random);
            assert_eq!(store.write_back(&ALL), Ok(200));
        }
        let extents = store.backing_stats().extent_bytes / OBJECT_BYTES as u64;
        assert!(extents > 100, "{extents}");
        // The thread that reads ahead may have no CPU for a while.
        let finds = |pages: &mut dyn Iterator<Item = u64>| {
            let pages: Vec<u64> = pages.collect();
            let is_found = |_| read_ahead(&store, pages.iter().copied()) > pages.len() as u64 * 9 / 10;
            (0..10).any(is_found)
        };
        // At first, pages return to memory, until it is full.
        assert!(finds(&mut (0..1000)));
        assert!(finds(&mut (1000..2000).rev()));
        assert!(finds(&mut (0..1000).map(|page| FAR + 2 * page)));
        // Two readers in turn, far apart.
        assert!(finds(&mut (1000..2000).flat_map(|page| [page, FAR + page])));
        let (mut random, before) = (Random::new(1), store.backing_stats().read_bytes);
        let found = read_ahead(&store, (0..1000).map(|_| FAR + random.next() % 2000));
        let each_bytes = (store.backing_stats().read_bytes - before) / 1000;
        // Half of them are there from before.
        assert!(found < 800 && each_bytes < PAGE_SIZE as u64, "{found}, {each_bytes} bytes each");
    }
}

fn store_with_faults(objects: &Shared, pages: u64) -> (Store, Faults) {
    let faulty = FaultyBacking::new(objects.clone(), 3).expect("a thread");
    let faults = faulty.faults();
    (store_on(Backing::Objects(Arc::new(faulty)).into(), config(pages)), faults)
}

/// A backing that does not answer for a while: cleaning and rescuing give up soon, and go on when it answers
/// again.
#[test]
fn extents_that_cannot_be_read_now_are_tried_again() {
    const PAGES: u64 = 700;
    let objects = Shared::new(2 << 20);
    let (store, faults) = store_with_faults(&objects, PAGES);
    let write = |pages: &mut dyn Iterator<Item = u64>| {
        pages.for_each(|page| store.write(PageNo::from_number(page), &half_random(page)).expect("memory"));
        store.write_back(&ALL).map_err(|error| error.kind())
    };
    write(&mut (0..PAGES)).expect("room");
    // Most extents are half dead.
    (0..PAGES).step_by(2).for_each(|page| store.discard(PageNo::from_number(page)));
    let failing = |direction| Fault { direction: Some(direction), ..Fault::always(FaultKind::Error) };
    faults.add(failing(Direction::Read));
    let reads = || store.backing_stats().failed_reads;
    assert_eq!(write(&mut (0..PAGES).step_by(2)), Err(ErrorKind::Io), "it may not be full");
    assert!((1..10).contains(&reads()), "{} reads", reads());
    assert_eq!(store.backing_state().map(|state| state.name()), Some("failing"));
    objects.0.placement.add(1);
    assert!(!store.rescue(|| true) && store.must_rescue());
    faults.clear();
    faults.add(failing(Direction::Write));
    assert!(!store.rescue(|| true) && store.must_rescue());
    faults.clear();
    assert!(store.rescue(|| true) && !store.must_rescue());
    write(&mut (0..PAGES).step_by(2)).expect("room, once extents were cleaned");
    check(&store, 0..PAGES, half_random);
}

/// Some extents in danger cannot be read: all others are rewritten, though only a few are waited for at a
/// time.
#[test]
fn extents_that_cannot_be_read_hold_up_no_others() {
    const PAGES: u64 = 2000;
    let objects = Shared::new(8 << 20);
    let (store, faults) = store_with_faults(&objects, PAGES);
    write(&store, 0..PAGES, half_random);
    store.write_back(&ALL).expect("room");
    objects.0.placement.add(1);
    // More than are waited for in one call, at the beginning and between others.
    for range in [0..10, 20..21, 30..31] {
        let range = range.start * OBJECT_BYTES as u64..range.end * OBJECT_BYTES as u64;
        faults.add(Fault { range, ..Fault::always(FaultKind::Error) });
    }
    for _ in 0..5 {
        assert!(!store.rescue(|| true));
    }
    assert_eq!(objects.misplaced(), 12);
    faults.clear();
    assert!(store.rescue(|| true) && !store.must_rescue());
    check(&store, 0..PAGES, half_random);
}
