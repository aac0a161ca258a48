//! Pages that are written back to a backing that keeps each extent as one object, or to several backings,
//! which are used in order.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::tests::{config, discard, expect};
use super::writeback::sealed::tests::Plain;
use super::writeback_tests::{
    ALL, LAYOUTS, Layout, PACKED, Versions, agree_with_a_model, check, file, half_random, refusal, store_on,
};
use super::*;
use crate::backing::{
    Backing, Direction, Fault, FaultKind, Faults, FaultyBacking, Filling, Health, MARK_BYTES, Objects, Seal,
    Started, Tiers, Transfer, Trouble,
};
use crate::base::error::{Error, ErrorKind};
use crate::base::random::Random;
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::{PAGE_SIZE, PageNo};

const OBJECT_BYTES: usize = 64 << 10;
/// The part of a home that says when it was chosen.
const HOME_MASK: u32 = 0xff << 24;
const TIER_BYTES: u64 = 8 << 20;

/// Homes and bytes, by extent and generation.
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
    checked: Instant,
}

#[derive(Clone)]
pub(super) struct Shared(Arc<Held>);

impl Shared {
    pub(super) fn new(len_bytes: u64) -> Self {
        Self::with(len_bytes, false)
    }

    fn with(len_bytes: u64, is_sealed: bool) -> Self {
        Shared(Arc::new(Held {
            len_bytes,
            seal: is_sealed.then(|| Arc::new(Plain::default()) as Arc<dyn Seal>),
            held: Mutex::new(&classes::BACKING_QUEUE, BTreeMap::new()),
            placement: Counter::new(0),
            is_down: Counter::new(0),
            checked: Instant::now(),
        }))
    }

    fn both(len_bytes: u64) -> [Self; 2] {
        [false, true].map(|is_sealed| Self::with(len_bytes, is_sealed))
    }

    fn objects(&self) -> usize {
        self.0.held.lock().len()
    }

    /// A home that differs from extent to extent, and has the placement.
    fn home_of(&self, extent: u32) -> u32 {
        (self.0.placement.get() as u32 & 0xff) << 24 | (extent.wrapping_mul(0x9e37_79b9) >> 8) | 1
    }

    fn misplaced(&self) -> usize {
        self.0.held.lock().iter().filter(|((extent, _), (home, _))| *home != self.home_of(*extent)).count()
    }

    fn set_down(&self, is_down: bool) {
        self.0.is_down.set(is_down.into());
    }

    pub(super) fn tier(&self) -> Backing {
        Backing::Objects(Arc::new(self.clone()))
    }

    fn behind(&self, others: impl IntoIterator<Item = Backing>) -> Arc<Tiers> {
        tiers(others.into_iter().chain([self.tier()]), self.0.seal.clone())
    }

    fn alone(&self) -> Arc<Tiers> {
        self.behind([])
    }

    fn with_faults(&self, seed: u64) -> (Backing, Faults) {
        let faulty = FaultyBacking::new(self.clone(), seed);
        let faults = faulty.faults();
        (Backing::Objects(Arc::new(faulty)), faults)
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
        if *direction == Direction::Write {
            assert_eq!(at, 0, "written in parts");
            let before = held.insert(key, (filling.home, part.to_vec()));
            assert!(before.is_none(), "object {key:?} is written twice");
            return Ok(());
        }
        let none = || Error::new(ErrorKind::NotFound, "there is no such object");
        let (home, whole) = held.get(&key).ok_or_else(none)?;
        assert_eq!(*home, filling.home, "extent {extent} is looked for elsewhere");
        let there = whole.get(at..).unwrap_or_default();
        let there = &there[..there.len().min(part.len())];
        part[..there.len()].copy_from_slice(there);
        part[there.len()..].fill(0);
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

    fn start(&self, extent: u32, transfer: Transfer) {
        let objects = self.clone();
        std::thread::spawn(move || {
            let mut started = Started::new(transfer);
            let result = objects.carry_out(extent, &mut started);
            started.finish(result);
        });
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

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn in_file(dir: &tempfile::TempDir) -> Backing {
    Backing::Blocks(Arc::new(file(dir, TIER_BYTES)))
}

fn tiers(backings: impl IntoIterator<Item = Backing>, seal: Option<Arc<dyn Seal>>) -> Arc<Tiers> {
    Arc::new(Tiers::new(backings.into_iter().collect(), seal).expect("sizes"))
}

fn write(store: &Store, pages: impl IntoIterator<Item = u64>) {
    writeback_tests::write(store, pages, half_random);
    store.write_back(&ALL).expect("room");
}

/// Extents are cleaned, and their objects are gone; nothing is lost, and in the end no object is left.
#[test]
fn pages_are_overwritten_on_any_backing() {
    const PAGES: u64 = 2000;
    let dirs = [(); 6].map(|()| dir());
    let file = |at: usize| in_file(&dirs[at]);
    let [[plain, sealed], [one, other], [_, behind]] = [(); 3].map(|()| Shared::both(TIER_BYTES));
    let key: Arc<dyn Seal> = Arc::new(Plain::default());
    let cases: [(_, Layout, &[&Shared]); 7] = [
        (plain.alone(), PACKED, &[&plain]),
        (sealed.alone(), PACKED, &[&sealed]),
        (tiers([one.tier(), other.tier()], None), PACKED, &[&one, &other]),
        (behind.behind([file(0)]), PACKED, &[]),
        (tiers([file(1)], Some(key)), PACKED, &[]),
        (tiers([file(2), file(3)], None), PACKED, &[]),
        (tiers([file(4), file(5)], None), LAYOUTS[2], &[]),
    ];
    for (backing, layout, held) in cases {
        let objects = || held.iter().map(|of| of.objects()).sum::<usize>();
        let store = store_on(backing, layout, config(6000));
        let mut versions = Versions::new(PAGES, 3, half_random);
        write(&store, 0..PAGES);
        let first_objects = objects();
        for _ in 0..60 {
            versions.overwrite(&store, 200);
            store.write_back(&ALL).expect("room");
        }
        let (stats, last_objects) = (store.backing_stats(), objects() as u64);
        versions.check(&store, 0..PAGES);
        if held.is_empty() {
            continue;
        }
        assert!(stats.cleaned_bytes > 0 || held.len() > 1, "{stats:?}");
        assert_eq!(stats.pages, PAGES);
        assert!(first_objects >= 64 && last_objects <= stats.len_bytes / OBJECT_BYTES as u64);
        assert!(last_objects <= stats.extent_bytes / OBJECT_BYTES as u64 + 64, "{stats:?}");
        // What somebody else removed is an error, and nothing else.
        store.write_back(&ALL).expect("room");
        store.erase_backing();
        assert_eq!(objects(), 0);
        let (mut out, mut lost) = ([0; PAGE_SIZE], 0);
        for (page, version) in (0..).zip(&versions.0) {
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
}

#[test]
fn single_blocks_are_refused() {
    let backing = Shared::new(TIER_BYTES).alone();
    let backing = BackingOptions { backing, layout: WritebackLayout::Blocks, compressed: true };
    let refused = Store::new(&config(100).backing(backing)).map(drop).expect_err("no blocks");
    assert_eq!((refused.kind(), refused.setting()), (ErrorKind::Unsupported, Some("writeback_layout")));
}

#[test]
fn extents_in_danger_are_rewritten() {
    const PAGES: u64 = 2000;
    for objects in Shared::both(8 << 20) {
        let store = store_on(objects.alone(), PACKED, config(PAGES));
        write(&store, 0..PAGES);
        assert!(!store.must_rescue() && objects.objects() > 60);
        objects.0.placement.add(1);
        assert!(store.must_rescue() && objects.misplaced() > 60);
        assert!(!store.rescue(|| false), "it was not to begin");
        assert!(store.rescue(|| true) && !store.must_rescue());
        // Extents that are free now are discarded when others are needed.
        discard(&store, [0]);
        write(&store, [0]);
        assert_eq!(objects.misplaced(), 0);
        check(&store, 0..PAGES, half_random);
    }
}

/// Threads check their own pages, with faults, while the places of all objects change.
#[test]
fn everything_at_once_on_objects_agrees_with_a_model() {
    let [plain, sealed] = Shared::both(2 << 20);
    let behind = Shared::with(TIER_BYTES, true);
    for (seed, objects, pages) in [(100, plain, 600), (101, sealed, 600), (7, behind, 6000)] {
        let (dir, (faulty, faults)) = (dir(), objects.with_faults(seed));
        let is_alone = pages == 600;
        let first = (!is_alone).then(|| in_file(&dir));
        let backing = tiers(first.into_iter().chain([faulty]), objects.0.seal.clone());
        let store = store_on(backing, PACKED, StoreBuilder { limit_pages: 128, ..config(pages) });
        agree_with_a_model(&store, &faults, seed, 20_000, |_| {
            for _ in 0..if is_alone { 20 } else { 0 } {
                std::thread::sleep(Duration::from_millis(20));
                objects.0.placement.add(1);
                store.rescue(|| true);
            }
        });
        let stats = store.backing_stats();
        assert!(stats.pages_returned > 0, "{stats:?}");
        assert!(!is_alone || stats.cleaned_bytes > 0 && stats.failed_writes > 0, "{stats:?}");
        // Objects of which the write failed later are removed, too.
        store.erase_backing();
        assert_eq!(objects.objects(), 0, "seed {seed}");
    }
}

/// Reads pages until those that were read ahead are there. Returns how many were found there.
fn read_ahead(store: &Store, pages: impl Iterator<Item = u64>) -> u64 {
    let before = store.backing_stats().pages_read_ahead;
    for page in pages {
        expect(store, page, &half_random(page));
        // Another thread fetches extents meanwhile.
        std::thread::sleep(Duration::from_micros(200));
    }
    store.backing_stats().pages_read_ahead - before
}

/// Readers with a steady step find whole extents, several at once; one without has hardly any read.
#[test]
fn extents_are_read_ahead_where_there_is_a_trend() {
    const FAR: u64 = 20_000;
    for objects in Shared::both(32 << 20) {
        let limited = StoreBuilder { limit_pages: 400, ..config(2 * FAR) };
        let store = store_on(objects.alone(), PACKED, limited);
        for first in (0..2000).chain(FAR..FAR + 2000).step_by(200) {
            write(&store, first..first + 200);
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

#[test]
fn extents_that_cannot_be_read_now_are_tried_again() {
    const PAGES: u64 = 700;
    let objects = Shared::new(2 << 20);
    let (backing, faults) = objects.with_faults(3);
    let store = store_on(backing, PACKED, config(PAGES));
    write(&store, 0..PAGES);
    // Most extents are half dead.
    discard(&store, (0..PAGES).step_by(2));
    let failing = |direction| Fault { direction: Some(direction), ..Fault::always(FaultKind::Error) };
    faults.add(failing(Direction::Read));
    writeback_tests::write(&store, (0..PAGES).step_by(2), half_random);
    assert_eq!(refusal(&store).map(|(kind, _)| kind), Some(ErrorKind::Io), "it may not be full");
    let reads = store.backing_stats().failed_reads;
    assert!((1..10).contains(&reads), "{reads} reads");
    assert_eq!(store.backing_state().map(|state| state.name()), Some("failing"));
    objects.0.placement.add(1);
    assert!(!store.rescue(|| true) && store.must_rescue());
    faults.clear();
    faults.add(failing(Direction::Write));
    assert!(!store.rescue(|| true) && store.must_rescue());
    faults.clear();
    assert!(store.rescue(|| true) && !store.must_rescue());
    write(&store, (0..PAGES).step_by(2));
    check(&store, 0..PAGES, half_random);
}

#[test]
fn extents_that_cannot_be_read_hold_up_no_others() {
    const PAGES: u64 = 2000;
    let objects = Shared::new(8 << 20);
    let (backing, faults) = objects.with_faults(3);
    let store = store_on(backing, PACKED, config(PAGES));
    write(&store, 0..PAGES);
    objects.0.placement.add(1);
    // More than are waited for in one call, at the beginning and between others.
    for range in [0..10, 20..21, 30..31] {
        let range = range.start * OBJECT_BYTES as u64..range.end * OBJECT_BYTES as u64;
        faults.add(Fault { range, ..Fault::always(FaultKind::Error) });
    }
    assert!((0..5).all(|_| !store.rescue(|| true)));
    assert_eq!(objects.misplaced(), 12);
    faults.clear();
    assert!(store.rescue(|| true) && !store.must_rescue());
    check(&store, 0..PAGES, half_random);
}

#[test]
fn the_first_tier_is_used_first_and_again() {
    for (objects, sealed) in Shared::both(32 << 20).into_iter().zip([false, true]) {
        let dir = dir();
        let store = store_on(objects.behind([in_file(&dir)]), PACKED, config(20_000));
        write(&store, 0..3000);
        assert_eq!((objects.objects(), store.backing_stats().len_bytes), (0, TIER_BYTES + (32 << 20)));
        write(&store, 3000..6000);
        let beyond = objects.objects();
        assert!(beyond > 10, "{beyond}");
        // What is free in the first one is used before more of the second.
        store.discard_pages(0..2000);
        write(&store, 10_000..11_500);
        assert_eq!(objects.objects(), beyond);
        check(&store, (2000..6000).chain(10_000..11_500), half_random);
        let in_file = std::fs::read(dir.path().join("backing")).expect("the file").split_off(MARK_BYTES);
        let needle = &half_random(2500)[64..96];
        let is_readable = in_file.windows(needle.len()).any(|window| window == needle);
        assert_eq!(is_readable, !sealed, "what is in the file is sealed, too");
        store.erase_backing();
        assert_eq!(objects.objects(), 0);
    }
}

#[test]
fn files_are_used_one_after_another() {
    for layout in [PACKED, LAYOUTS[2]] {
        let dirs = [(); 2].map(|()| dir());
        let backing = tiers(dirs.iter().map(in_file), None);
        assert_eq!(backing.object_bytes(), None);
        let store = store_on(backing, layout, config(6000));
        let is_written = |dir: &tempfile::TempDir| {
            let bytes = std::fs::read(dir.path().join("backing")).expect("the file");
            bytes[MARK_BYTES..].iter().any(|byte| *byte != 0)
        };
        write(&store, 0..1500);
        assert_eq!(dirs.each_ref().map(is_written), [true, false]);
        write(&store, 1500..3700);
        assert_eq!(dirs.each_ref().map(is_written), [true, layout != PACKED]);
        check(&store, 0..3700, half_random);
    }
}

#[test]
fn tiers_that_do_not_fit_together_are_refused() {
    let of = |sizes: &[u64]| {
        let backings = sizes.iter().map(|size| Shared::new(*size).tier()).collect();
        Tiers::new(backings, None).map(drop)
    };
    for (sizes, hint) in
        [(&[][..], "1 to 4"), (&[TIER_BYTES; 5], "1 to 4"), (&[4 << 20, TIER_BYTES], "tier 1 needs a size")]
    {
        let error = of(sizes).expect_err(hint);
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("backing_dev")));
        assert!(error.to_string().contains(hint), "{error}");
    }
    assert!(of(&[TIER_BYTES, 4 << 20]).is_ok());
}

/// The numbers of extents and generations begin anew in each store, and so would the nonces.
#[test]
fn objects_are_for_one_store() {
    let tiers = Shared::with(TIER_BYTES, true).alone();
    let builder = config(100).backing(BackingOptions::packed(tiers.clone()));
    drop(Store::new(&builder).expect("the first store"));
    let error = Store::new(&builder).map(drop).expect_err("a second store");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::Busy, Some("backing_dev")));
    tiers.give_back();
    Store::new(&builder).expect("the first one has written nothing");
}

#[test]
fn tiers_are_stopped_once_all_are() {
    let (dir, downs) = (dir(), [0; 2].map(|_| Shared::new(TIER_BYTES)));
    let (both, with_file) = (downs[1].behind([downs[0].tier()]), downs[1].behind([in_file(&dir)]));
    let state = |tiers: &Tiers| {
        let Health { expired, stopped, degraded, checked, .. } = tiers.health().expect("it is known");
        (expired, stopped.is_some(), degraded.is_some(), checked.is_some())
    };
    assert_eq!((state(&both), state(&with_file)), ((2, false, false, true), (1, false, false, false)));
    downs[1].set_down(true);
    assert_eq!((state(&both), state(&with_file)), ((2, false, true, true), (1, false, true, false)));
    downs[0].set_down(true);
    assert_eq!((state(&both), state(&with_file)), ((2, true, false, true), (1, false, true, false)));
}

#[test]
fn a_tier_that_is_down_keeps_no_other_from_being_cleaned() {
    // The pages of the second tier, and those written before it is down, which clean it.
    for (in_second, before) in [(0, 0..0), (3000, 0..0), (3500, 9000..10_500)] {
        let (objects, dir) = (Shared::new(TIER_BYTES), dir());
        let store = store_on(objects.behind([in_file(&dir)]), PACKED, config(12_000));
        let in_first = 3600;
        write(&store, 0..in_first + in_second);
        assert_eq!(objects.objects() > 40, in_second > 0);
        discard(&store, (in_first..in_first + in_second).step_by(2));
        write(&store, before.clone());
        objects.set_down(true);
        // The first tier is half dead now, and nothing else is written to.
        discard(&store, (0..in_first).step_by(2));
        write(&store, 7900..9000);
        objects.set_down(false);
        let left = (0..in_first + in_second).skip(1).step_by(2).chain(7900..9000).chain(before);
        check(&store, left, half_random);
    }
}
