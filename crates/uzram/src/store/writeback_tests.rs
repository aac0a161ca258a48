//! Pages that are written back to a backing device and return from it.

use std::path::PathBuf;
use std::time::Duration;

use super::designs::each_pool_design;
use super::policy::Reclaimed;
use super::tests::{
    config, discard, expect, get, letters, noise, objects, on_threads, page, put, recompression, until,
};
use super::*;
use crate::backing::{
    Backing, Direction, Fault, FaultKind, Faults, FaultyBacking, FileBacking, FileOptions, Tiers,
};
use crate::base::error::{Error, ErrorKind};
use crate::base::mem::{HOST_PAGE_BYTES, with_host_pages_of};
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

/// A layout, and whether pages are compressed in it.
pub(super) type Layout = (WritebackLayout, bool);
pub(super) const PACKED: Layout = (WritebackLayout::Packed, true);
pub(super) const LAYOUTS: [Layout; 3] =
    [PACKED, (WritebackLayout::Blocks, true), (WritebackLayout::Blocks, false)];

pub(super) const ALL: Writeback = Writeback {
    candidates: Candidates { idle: false, huge: false, incompressible: false },
    pages: Vec::new(),
};

pub(super) fn file(dir: &tempfile::TempDir, size_bytes: u64) -> FileBacking {
    let options =
        FileOptions { size_bytes: Some(size_bytes), ..FileOptions::new(dir.path().join("backing")) };
    FileBacking::open(&options).expect("a file")
}

pub(super) fn store_on(
    backing: impl Into<Arc<Tiers>>,
    (layout, compressed): Layout,
    config: StoreBuilder,
) -> Arc<Store> {
    let backing = Some(BackingOptions { backing: backing.into(), layout, compressed });
    Arc::new(Store::new(&StoreBuilder { backing, ..config }).expect("a store"))
}

pub(super) struct Place {
    pub(super) store: Arc<Store>,
    pub(super) faults: Faults,
    pub(super) path: PathBuf,
    _dir: tempfile::TempDir,
}

pub(super) fn place(size_bytes: u64, layout: Layout, config: StoreBuilder) -> Place {
    let dir = tempfile::tempdir().expect("a directory");
    let faulty = FaultyBacking::new(file(&dir, size_bytes), 1);
    let faults = faulty.faults();
    let store = store_on(Backing::Blocks(Arc::new(faulty)), layout, config);
    Place { store, faults, path: dir.path().join("backing"), _dir: dir }
}

impl std::ops::Deref for Place {
    type Target = Arc<Store>;

    fn deref(&self) -> &Arc<Store> {
        &self.store
    }
}

impl Place {
    pub(super) fn fail(&self, direction: Direction, kind: FaultKind) {
        self.faults.add(Fault { direction: Some(direction), ..Fault::always(kind) });
    }
}

pub(super) fn policy(store: &Arc<Store>) -> PolicyThread {
    PolicyThread::start("test", store).expect("a thread")
}

pub(super) fn write(store: &Store, pages: impl IntoIterator<Item = u64>, make: impl Fn(u64) -> Page) {
    pages.into_iter().for_each(|page| put(store, page, &make(page)));
}

pub(super) fn check(store: &Store, pages: impl IntoIterator<Item = u64>, make: impl Fn(u64) -> Page) {
    pages.into_iter().for_each(|page| expect(store, page, &make(page)));
}

/// Writes all pages back; returns why not all have left.
pub(super) fn refusal(store: &Store) -> Option<(ErrorKind, Option<&'static str>)> {
    store.write_back(&ALL).err().map(|error| (error.kind(), error.setting()))
}

pub(super) fn decided(store: &Store, name: &str) -> u64 {
    store.policy_stats().into_iter().find(|(of, _)| *of == name).expect("a decision").1
}

/// Returns a page whose object takes about 2 KiB, and whose contents depend on `seed`.
pub(super) fn half_random(seed: u64) -> Page {
    noise(PAGE_SIZE / 2, seed)
}

pub(super) fn incompressible(seed: u64) -> Page {
    noise(PAGE_SIZE, !seed)
}

pub(super) fn state(store: &Store, page: u64) -> PageState {
    store.extent(PageNo::from_number(page), 1).0
}

/// Pages that are overwritten at random. The contents of each are made of its number and its version.
pub(super) struct Versions(pub(super) Vec<u64>, Random, fn(u64) -> Page);

impl Versions {
    pub(super) fn new(pages: u64, seed: u64, makes: fn(u64) -> Page) -> Self {
        Versions(vec![0; pages as usize], Random::new(seed), makes)
    }

    pub(super) fn overwrite(&mut self, store: &Store, count: u64) {
        for _ in 0..count {
            let page = self.1.below(self.0.len());
            self.0[page] += self.0.len() as u64;
            put(store, page as u64, &(self.2)(page as u64 + self.0[page]));
        }
    }

    pub(super) fn check(&self, store: &Store, pages: impl IntoIterator<Item = u64>) {
        check(store, pages, |page| (self.2)(page + self.0[page as usize]));
    }
}

/// A page of the layout `blocks` takes 4096 bytes, on hosts with larger pages too.
#[test]
fn pages_leave_and_are_read_from_there() {
    let base = || config(500);
    let hosts = HOST_PAGE_BYTES.map(|bytes| (bytes, base()));
    let checked = (HOST_PAGE_BYTES[0], StoreBuilder { checksum: true, limit_pages: 2000, ..base() });
    let cases =
        hosts.into_iter().chain([checked]).flat_map(|case| LAYOUTS.map(|layout| (case.clone(), layout)));
    for ((host_page_bytes, config), layout) in cases {
        let store = with_host_pages_of(host_page_bytes, || place(8 << 20, layout, config));
        let mut random = Random::new(5);
        let model: Vec<Page> = (0..500).map(|_| page(&mut random)).collect();
        write(&store, 0..500, |page| model[page as usize]);
        let before = store.stats();
        let written = store.write_back(&ALL).expect("room");
        let stored = before.pages_stored - before.same_pages;
        assert_eq!(written, stored, "all that take memory");
        let after = store.stats();
        assert_eq!((after.pages_stored, after.same_pages), (before.pages_stored, before.same_pages));
        assert_eq!((after.compr_data_bytes, after.huge_pages, objects(&store)), (0, 0, 0));
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.pages_written_back), (stored, stored));
        assert_eq!(stats.object_bytes, before.compr_data_bytes);
        if layout == PACKED {
            let most = before.compr_data_bytes + stored * 24 + (1 << 16);
            assert!(stats.written_bytes <= most, "{stats:?}");
        } else {
            assert_eq!(stats.written_bytes, stored * PAGE_SIZE as u64);
        }
        for round in 0..2 {
            check(&store, 0..500, |page| model[page as usize]);
            assert!(store.backing_stats().reads <= stored, "round {round}: {:?}", store.backing_stats());
        }
        discard(&store, 0..500);
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.held_bytes, stats.corrupted), (0, 0, 0));
        assert_eq!(store.stats().pages_stored, 0);
    }
}

#[test]
fn writes_beyond_the_limit_have_others_leave() {
    for (order, layout) in
        ReclaimOrder::ALL.into_iter().flat_map(|order| [(order, LAYOUTS[0]), (order, LAYOUTS[1])])
    {
        let reclaim = ReclaimPolicy { order, ..ReclaimPolicy::default() };
        let limited = StoreBuilder { limit_pages: 512, policy: reclaim, ..config(4096) };
        let store = place(32 << 20, layout, limited);
        let _policy = policy(&store);
        for page in 0..4096 {
            put(&store, page, &half_random(page));
            assert!(store.stats().charged_pages <= 512);
        }
        for page in 0..4096 {
            expect(&store, page, &half_random(page));
            assert!(store.stats().charged_pages <= 512);
        }
        // A pass is counted at its end, and the last one may still be running.
        until("what has left is counted", || decided(&store, "written_back") > 3000);
        assert_eq!(store.stats().failed_writes, 0);
    }
}

#[test]
fn what_is_done_to_a_page_that_is_being_written_counts() {
    for layout in LAYOUTS {
        let config = StoreBuilder { recompression: recompression(["zstd:9", "", ""]), ..config(100) };
        let store = place(8 << 20, layout, config);
        write(&store, 0..20, half_random);
        store.fail(Direction::Write, FaultKind::Hold);
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| store.write_back(&ALL));
            until("the write", || (0..20).all(|page| store.slots.lock(PageNo(page)).writing() != 0));
            get(&store, 0);
            store.read_wait(PageNo(1), &mut [0; PAGE_SIZE], Wait::No).expect("in memory");
            put(&store, 2, &half_random(102));
            store.write_part(PageNo(3), 100, &[3; 50], Wait::Yes).expect("memory");
            discard(&store, [4, 6]);
            store.zero(PageNo(5));
            put(&store, 6, &half_random(6));
            store.compact();
            store.mark_idle(None);
            put(&store, 7, &half_random(107));
            put(&store, 7, &half_random(7));
            assert_eq!(store.backing_stats().pages, 0, "nothing was written yet");
            store.faults.clear();
            assert_eq!(writing.join().expect("no panic").expect("written"), 12);
        });
        let states: Vec<_> = (0..20).map(|page| state(&store, page)).collect();
        use PageState::*;
        let used = [Compressed, Compressed, Compressed, Compressed, Hole, Zero, Compressed, Compressed];
        assert_eq!(states, [&used[..], &[Backed; 12]].concat());
        let stats = store.backing_stats();
        assert_eq!((stats.pages, stats.pages_written_back, stats.pages_kept), (12, 12, 8));
        let mut changed = half_random(3);
        changed[100..150].fill(3);
        expect(&store, 2, &half_random(102));
        expect(&store, 3, &changed);
        expect(&store, 4, &[0; PAGE_SIZE]);
        check(&store, [0, 1, 6, 7].into_iter().chain(8..20), half_random);
    }
}

#[test]
fn who_does_not_want_to_wait_is_told() {
    let store = place(8 << 20, PACKED, config(100));
    write(&store, 0..20, half_random);
    store.write_back(&ALL).expect("room");
    let (before, mut out) = (store.stats(), [0; PAGE_SIZE]);
    let mut read = |page| store.read_wait(PageNo(page), &mut out, Wait::No).map_err(|error| error.kind());
    assert_eq!(read(0), Err(ErrorKind::WouldBlock));
    let after = store.stats();
    assert_eq!((after.pages_read, after.failed_reads), (before.pages_read, before.failed_reads));
    store.write_wait(PageNo(1), &half_random(101), Wait::No).expect("memory");
    store.write_part(PageNo(2), 0, &[9; 8], Wait::Yes).expect("read, changed and written");
    assert_eq!((read(1), read(2)), (Ok(()), Ok(())), "in memory");
    let mut changed = half_random(2);
    changed[..8].fill(9);
    expect(&store, 1, &half_random(101));
    expect(&store, 2, &changed);
}

/// The kernel's writeback limit counts units of 4 KiB with each layout, and failed writes are given back.
#[test]
fn a_limit_of_writes_is_kept() {
    for layout in LAYOUTS {
        let store = place(8 << 20, layout, config(400));
        write(&store, 0..400, half_random);
        store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: true, left: 50 });
        let direction = Some(Direction::Write);
        store.faults.add(Fault { times: 1, direction, ..Fault::always(FaultKind::Error) });
        store.write_back(&Writeback::of(0..10)).expect_err("it failed");
        let given_back = store.writeback_limit().left;
        assert!(given_back > 40 && store.backing_stats().pages < 10, "{given_back}");
        assert_eq!(refusal(&store), Some((ErrorKind::Io, Some("writeback_limit"))));
        let stats = store.backing_stats();
        let of_failure = 50 - given_back;
        assert!(stats.written_bytes <= (50 + 10 + of_failure) * PAGE_SIZE as u64, "{stats:?}");
        assert_eq!(store.writeback_limit().left, 0);
        let least = if layout == PACKED { 70 } else { 40 };
        assert!((least..=100).contains(&stats.pages), "{stats:?}");
        store.change_writeback_limit(|limit| *limit = WritebackLimit { enabled: false, left: 0 });
        store.write_back(&ALL).expect("no limit");
        check(&store, 0..400, half_random);
    }
}

#[test]
fn pages_that_were_written_together_are_read_together() {
    // The limit leaves no room for pages to return to memory.
    let store = place(16 << 20, PACKED, StoreBuilder { limit_pages: 700, ..config(4096) });
    let policy = policy(&store);
    write(&store, 0..4096, half_random);
    drop(policy);
    let before = store.backing_stats();
    check(&store, 0..2000, half_random);
    let reads = store.backing_stats().reads - before.reads;
    assert!((1..400).contains(&reads), "{reads}");
    let (mut random, before) = (Random::new(1), store.backing_stats());
    check(&store, (0..300).map(|_| random.below_u64(2000)), half_random);
    let read = store.backing_stats().since(&before);
    assert!(read.reads <= 300 && read.read_bytes <= 300 * 2 * PAGE_SIZE as u64, "{read:?}");
}

#[test]
fn a_policy_writes_back_and_compresses_again_what_is_old() {
    let config = StoreBuilder { recompression: recompression(["zstd:3", "", ""]), ..config(200) };
    let store = place(8 << 20, PACKED, config);
    write(&store, 0..200, letters);
    store.set_policy(ReclaimPolicy { recompress_after_s: 1, ..ReclaimPolicy::default() });
    let policy = policy(&store);
    until("recompression", || decided(&store, "old_recompressed") == 200);
    assert_eq!(store.backing_stats().pages, 0);
    store.set_policy(ReclaimPolicy { writeback_after_s: 2, ..ReclaimPolicy::default() });
    until("writeback", || store.backing_stats().pages == 200);
    drop(policy);
    check(&store, 0..200, letters);
}

/// Busy pages stay, used ones leave last, and a page that is used soon after it left counts as a refault.
#[test]
fn cold_pages_leave_and_busy_ones_stay() {
    // With a pagevec of one page, the order is that of the writes, whatever their CPUs.
    let config = || StoreBuilder { lru_pagevec_pages: 1, limit_pages: 1000, ..config(400) };
    let each_lru = [
        config(),
        #[cfg(feature = "designs")]
        config().lru_design(crate::lru::LruDesign::SingleLock),
    ];
    for config in each_lru {
        let store = place(8 << 20, PACKED, config);
        write(&store, 0..400, half_random);
        (0..2).for_each(|_| check(&store, 0..40, half_random));
        store.zero(PageNo(50));
        let steps = Counter::new(0);
        on_threads(2, |thread, _| {
            if thread == 0 {
                let _slot = store.slots.lock(PageNo(53));
                steps.set(1);
                until("relief", || steps.get() == 2);
            } else {
                until("somebody who is busy", || steps.get() == 1);
                assert_eq!(store.reclaim(), Reclaimed::Some);
                steps.set(2);
            }
        });
        let left = |page: &u64| state(&store, *page) == PageState::Backed;
        assert_eq!((state(&store, 50), state(&store, 53)), (PageState::Zero, PageState::Compressed));
        assert_eq!((0..40).filter(left).count(), 0);
        let gone = (40..400).filter(left).count() as u64;
        assert!((30..200).contains(&gone), "{gone}");
        assert!((41..50).all(|page| left(&page)), "the first came first");
        let stats = store.lru_stats();
        assert_eq!((stats.evicted, stats.put_back), (gone, 1), "{stats:?}");
        put(&store, 41, &half_random(1));
        assert_eq!(store.lru_stats().refaulted, 1);
    }
    let none = place(8 << 20, PACKED, config().lru(false));
    put(&none.store, 1, &half_random(1));
    assert_eq!(none.store.reclaim(), Reclaimed::None, "there are no lists");
}

#[test]
fn a_page_that_is_about_to_be_discarded_does_not_return() {
    let store = place(8 << 20, PACKED, StoreBuilder { limit_pages: 256, ..config(300) });
    write(&store, 0..300, half_random);
    assert_eq!(store.reclaim(), Reclaimed::Some);
    let backed = || (0..300).filter(|page| state(&store, *page) == PageState::Backed).collect::<Vec<_>>();
    let left = backed();
    assert!(!left.is_empty());
    discard(&store, (100..300).filter(|page| !left.contains(page)));
    let mut out = [0; PAGE_SIZE];
    for page in &left {
        store.read_once(PageNo::from_number(*page), &mut out).expect("sound");
        assert_eq!(out, half_random(*page));
    }
    assert_eq!((backed(), store.backing_stats().pages_returned), (left.clone(), 0));
    check(&store, left.iter().copied(), half_random);
    assert_ne!(backed(), left, "a page that is read otherwise returns");
}

#[test]
fn a_write_is_refused_when_nothing_can_leave() {
    let budget = ReclaimPolicy { writeback_budget_bytes: 1 << 20, ..ReclaimPolicy::default() };
    // The device is full; the day's budget is spent; the device is gone.
    let none = ReclaimPolicy::default();
    for (size_bytes, policy, is_gone) in
        [(1 << 20, none, false), (32 << 20, budget, false), (32 << 20, none, true)]
    {
        let store = place(size_bytes, PACKED, StoreBuilder { limit_pages: 256, policy, ..config(4096) });
        let _policy = self::policy(&store);
        let first = if is_gone { 600 } else { 0 };
        write(&store, 0..first, incompressible);
        if is_gone {
            store.faults.add(Fault::always(FaultKind::Error));
        }
        let write = |page| store.write(PageNo::from_number(page), &incompressible(page));
        let (pages, error) =
            (first..4096).find_map(|page| Some((page, write(page).err()?))).expect("refused");
        store.faults.clear();
        if !is_gone {
            assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("mem_limit")));
            assert!((350..=520).contains(&pages), "{pages}");
            assert!(store.backing_stats().written_bytes <= 1 << 20);
            assert_eq!(decided(&store, "writers_refused"), 1, "{:?}", store.policy_stats());
        }
        check(&store, 0..pages, incompressible);
    }
}

#[test]
fn everything_at_once_agrees_with_a_model() {
    const PAGES: u64 = 600;
    for (seed, layout) in (0..).zip(LAYOUTS) {
        let config = StoreBuilder {
            recompression: recompression(["zstd:1", "", ""]),
            checksum: seed == 1,
            limit_pages: 128,
            ..config(PAGES)
        };
        let designs = each_pool_design(&config);
        let config = designs[seed as usize % designs.len()].clone();
        let store = place(if layout == PACKED { 2 << 20 } else { 4 << 20 }, layout, config);
        // Pages that could not be read are not lost.
        agree_with_a_model(&store, &store.faults, seed, 55_000, |is_running| {
            while is_running() {
                assert!(store.stats().charged_pages <= 128, "the limit is kept at every instant");
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        let stats = store.backing_stats();
        assert!(stats.pages_kept > 0 && stats.pages_returned > 0 && stats.failed_writes > 0, "{stats:?}");
        assert!(layout != PACKED || stats.cleaned_bytes > 0, "{stats:?}");
    }
}

const THREADS: u64 = 6;

/// Has threads [`work`] on a store with a policy, each on its own pages, and calls `beside` meanwhile, with
/// what tells whether they still run. In the end all pages have what the threads' models say, without faults.
pub(super) fn agree_with_a_model(
    store: &Arc<Store>,
    faults: &Faults,
    seed: u64,
    events: u64,
    beside: impl Fn(&dyn Fn() -> bool) + Sync,
) {
    let policy = policy(store);
    let models = on_threads(THREADS + 1, |thread, running| match thread {
        THREADS => {
            beside(&|| running.get() > 1);
            Vec::new()
        }
        _ => work(store, faults, seed, thread, events),
    });
    faults.clear();
    for (thread, model) in (0..THREADS).zip(&models) {
        (0..).zip(model).for_each(|(at, contents)| expect(store, at * THREADS + thread, contents));
    }
    drop(policy);
    assert!(store.backing_stats().pages_written_back > 1000, "seed {seed}: {:?}", store.backing_stats());
    store.discard_pages(0..store.pages());
    let (stats, held) = (store.backing_stats(), store.stats());
    assert_eq!((stats.pages, stats.held_bytes), (0, 0), "seed {seed}");
    assert_eq!((held.pages_stored, held.compr_data_bytes, held.corrupted), (0, 0, 0), "seed {seed}");
}

fn work(store: &Store, faults: &Faults, seed: u64, thread: u64, events: u64) -> Vec<Page> {
    let mut random = Random::new(seed << 8 | thread);
    let own = (store.pages() - thread).div_ceil(THREADS) as usize;
    let mut model: Vec<Page> = vec![[0; PAGE_SIZE]; own];
    let mut out = [0; PAGE_SIZE];
    for event in 0..events {
        // Mostly on a few hot pages.
        let most = if random.below(3) == 0 { own } else { own / 8 };
        let at = random.below(most);
        let page = PageNo::from_number(at as u64 * THREADS + thread);
        let contents = &mut model[at];
        let told = || format!("seed {seed} thread {thread} event {event} page {page:?}");
        let check = |error: &Error| {
            let is_allowed = matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::NoSpace);
            assert!(is_allowed, "{}: {error}", told());
        };
        match random.below(1000) {
            0..=399 => match store.read(page, &mut out) {
                Ok(()) => assert!(out == *contents, "{}", told()),
                Err(error) => check(&error),
            },
            400..=449 => match store.read_wait(page, &mut out, Wait::No) {
                Ok(()) => assert!(out == *contents, "{}", told()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{}: {error}", told()),
            },
            450..=799 => {
                let new = super::tests::page(&mut random);
                match store.write(page, &new) {
                    Ok(()) => *contents = new,
                    Err(error) => check(&error),
                }
            }
            800..=899 => {
                let (start, mut new) = (random.below(PAGE_SIZE), *contents);
                random.fill(&mut new[start..]);
                match store.write_part(page, start, &new[start..], Wait::Yes) {
                    Ok(()) => *contents = new,
                    Err(error) => check(&error),
                }
            }
            900..=979 => {
                store.discard(page);
                *contents = [0; PAGE_SIZE];
            }
            980..=992 => {
                let first = random.below_u64(store.pages());
                let _ = store.write_back(&Writeback::of(first..first + 20));
            }
            993 => {
                let _ = store.recompress(&Recompression { max_pages: 20, ..Recompression::default() });
            }
            994 => store.mark_idle(None),
            995 if thread == 0 => _ = store.compact(),
            // Writers at the limit wait while the device fails.
            996 if thread == 1 && random.below(4) == 0 => {
                let kinds = [FaultKind::Error, FaultKind::Short, FaultKind::FlipBit, FaultKind::NoSpace];
                let stall = FaultKind::Stall(Duration::from_millis(1));
                let kind = *kinds.get(random.below(5)).unwrap_or(&stall);
                faults.add(Fault { one_in: 1 + random.below_u64(20), ..Fault::always(kind) });
            }
            997.. if thread == 1 => faults.clear(),
            _ => {}
        }
    }
    model
}
