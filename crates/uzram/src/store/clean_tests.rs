//! Devices that are full, or nearly: what cleaning writes, when it ends, and that it goes on.

use std::time::{Duration, Instant};

use super::objects_tests::Shared;
use super::tests::{config, discard, expect, until};
use super::writeback_tests::{
    ALL, LAYOUTS, PACKED, Versions, check, decided, half_random, incompressible, policy, refusal, store_on,
    write,
};
use super::*;
use crate::backing::Memory;
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

/// The most that is written for what leaves, by the rule of cleaning.
const MOST_WRITTEN: u64 = 32;
/// What a page takes that does not compress.
const FOOTPRINT: u64 = PAGE_SIZE as u64 + 16;

/// Returns how many bytes are written for each that leaves where pages are overwritten at random and the
/// share `live` of the device is live: 1 / (1 - s) with live = (s - 1) / ln s, as `writeback/clean.rs` says.
fn theory(live: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..60 {
        let s = (low + high) / 2.0;
        if (s - 1.0) / s.ln() < live { low = s } else { high = s }
    }
    1.0 / (1.0 - low)
}

#[test]
fn the_theory_is_as_documented() {
    for (live, bytes) in [(0.8, 2.7), (0.9, 5.2), (0.95, 10.2), (0.97, 16.8), (0.984, 31.4)] {
        assert!((theory(live) - bytes).abs() < 0.05, "{live}: {}", theory(live));
    }
}

/// A store whose pages are overwritten at random, and what the model says of each.
struct Model {
    store: Arc<Store>,
    seed: u64,
    pages: Versions,
    /// Bytes that were live on the device and are not any more.
    died_bytes: u64,
    flushes: u64,
}

impl Model {
    fn new(len_bytes: u64, pages: u64, seed: u64, makes: fn(u64) -> Page) -> Model {
        let store = store_on(Memory::backing(len_bytes), PACKED, config(pages));
        write(&store, 0..pages, makes);
        Model { store, seed, pages: Versions::new(pages, seed, makes), died_bytes: 0, flushes: 0 }
    }

    fn expect(&self, pages: impl Iterator<Item = u64>) {
        self.pages.check(&self.store, pages);
    }

    fn overwrite(&mut self, count: u64) {
        let before = self.store.backing_stats().held_bytes;
        self.pages.overwrite(&self.store, count);
        self.died_bytes += before - self.store.backing_stats().held_bytes;
    }

    /// Has pages leave. Returns whether the device was full.
    fn write_back(&mut self) -> bool {
        self.flushes += 1;
        let refusal = refusal(&self.store).map(|(kind, _)| kind);
        assert!(matches!(refusal, None | Some(ErrorKind::NoSpace)), "seed {}: {refusal:?}", self.seed);
        refusal.is_some()
    }

    /// Checks that the bytes moved so far are bounded by those that died, and by what flushes wasted.
    fn check(&self) {
        let stats = self.store.backing_stats();
        let wasted_bytes = self.flushes * 2 * PAGE_SIZE as u64 + stats.len_bytes / 16;
        let most = MOST_WRITTEN * (self.died_bytes + wasted_bytes);
        assert!(stats.cleaned_bytes <= most, "seed {}: {stats:?}, {} died", self.seed, self.died_bytes);
    }

    /// Checks that nothing is written, whatever is asked for, as no page is gone.
    fn check_rest(&mut self) {
        let before = self.store.backing_stats();
        assert!((0..20).all(|_| self.write_back()), "seed {}", self.seed);
        let after = self.store.backing_stats();
        assert_eq!(after.written_bytes, before.written_bytes, "seed {}: {after:?}", self.seed);
        assert_eq!(self.store.backing_state(), Some(BackingState::Full), "seed {}", self.seed);
    }
}

#[test]
fn what_is_written_is_bounded_at_any_live_share() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        // From 64 to 256 KiB an extent.
        let len_bytes = (2 << 20) << random.below(5);
        let (makes, footprint): (fn(u64) -> Page, _) =
            if random.below(3) == 0 { (half_random, FOOTPRINT / 2) } else { (incompressible, FOOTPRINT) };
        let share = 60 + 3 * random.below(15) as u64;
        let pages = len_bytes * share / 100 / footprint;
        let mut model = Model::new(len_bytes, pages, seed, makes);
        let mut was_full = model.write_back();
        for _ in 0..4 * pages / 100 {
            model.overwrite(100);
            was_full |= model.write_back();
            model.check();
        }
        let stats = model.store.backing_stats();
        // A page that left cost no more than the rule says, the reserve and what is just being filled aside.
        let most = MOST_WRITTEN * stats.pages_written_back * footprint + len_bytes;
        assert!(stats.written_bytes <= most, "seed {seed}, {share} %: {stats:?}");
        assert!(was_full || share < 97, "seed {seed}, {share} %: {stats:?}");
        if model.write_back() {
            model.check_rest();
        }
        model.expect(0..pages);
    }
}

/// At a high share that a large device still takes, cleaning costs no more than the theory says, and a part
/// for what is neither live nor free: the reserve, the extents being filled, and the ends of extents.
#[test]
fn overwriting_costs_what_the_theory_says() {
    // In the long form, 97 % of a device of 1 GiB.
    let (len_bytes, extents, cases): (u64, _, &[_]) = match std::env::var_os("UZRAM_CLEAN_LONG") {
        Some(_) => (1 << 30, 1024, &[(97, 3)]),
        None => (64 << 20, 128, &[(80, 1), (90, 2)]),
    };
    for &(share, seed) in cases {
        let pages = len_bytes * share / 100 / FOOTPRINT;
        let mut model = Model::new(len_bytes, pages, seed, incompressible);
        model.write_back();
        let mut turn_over = || {
            for _ in 0..pages / 256 {
                model.overwrite(256);
                assert!(!model.write_back(), "seed {seed}, {share} %");
            }
            model.store.backing_stats()
        };
        let (before, after) = (turn_over(), turn_over());
        let left_bytes = (after.pages_written_back - before.pages_written_back) * FOOTPRINT;
        let cost = (after.written_bytes - before.written_bytes) as f64 / left_bytes as f64;
        let live = after.held_bytes as f64 / (len_bytes - 4 * len_bytes / extents) as f64;
        assert!(cost <= 1.3 * theory(live), "seed {seed}, {share} %: {cost} bytes, theory {}", theory(live));
    }
}

#[test]
fn a_full_device_goes_on_when_pages_are_gone() {
    for seed in 0..4 {
        let (len_bytes, pages) = (4 << 20, 1400);
        let mut model = Model::new(len_bytes, pages, seed, incompressible);
        assert_eq!(model.store.backing_state(), Some(BackingState::Ok));
        assert!(model.write_back());
        model.check_rest();
        // Some of each extent, or all of some.
        let (some, step) = if seed % 2 == 0 { (0..pages, 5) } else { (0..pages / 5, 1) };
        let is_gone = |page: &u64| some.contains(page) && page.is_multiple_of(step);
        discard(&model.store, (0..pages).filter(is_gone));
        assert_eq!(model.store.backing_state(), Some(BackingState::Ok), "seed {seed}");
        let before = model.store.backing_stats().pages;
        model.write_back();
        assert!(model.store.backing_stats().pages > before + pages / 10, "seed {seed}");
        model.expect((0..pages).filter(|page| !is_gone(page)));
    }
}

#[test]
fn a_full_device_of_blocks_or_objects_goes_on_when_pages_are_gone() {
    const PAGES: u64 = 400;
    let checked = StoreBuilder { checksum: true, ..config(PAGES) };
    for store in [
        store_on(Memory::backing(1 << 20), LAYOUTS[1], checked),
        store_on(Shared::new(1 << 20).tier(), PACKED, config(PAGES)),
    ] {
        write(&store, 0..PAGES, incompressible);
        assert_eq!(refusal(&store), Some((ErrorKind::NoSpace, Some("backing_dev"))));
        assert_eq!(store.backing_state(), Some(BackingState::Full));
        let held = store.backing_stats().pages;
        assert!((180..=256).contains(&held), "{held} pages");
        check(&store, 0..PAGES, incompressible);
        discard(&store, 0..PAGES / 2);
        assert_eq!(store.backing_state(), Some(BackingState::Ok));
        assert!(store.write_back(&ALL).is_ok_and(|pages| pages > 0));
        check(&store, PAGES / 2..PAGES, incompressible);
    }
}

/// Writes are refused when nothing can leave, then the policy rests; and they succeed once pages are gone.
#[test]
fn a_policy_rests_while_the_device_is_full() {
    const PAGES: u64 = 4000;
    let limited = StoreBuilder { limit_pages: 512, ..config(PAGES) };
    let store = store_on(Memory::backing(4 << 20), PACKED, limited);
    let _policy = policy(&store);
    let write = |page: u64, version: u64| {
        store.write(PageNo::from_number(page), &incompressible(page + version * PAGES))
    };
    let mut random = Random::new(7);
    let refused = (0..PAGES).find(|page| write(*page, 0).is_err()).expect("6 MiB are less than 16");
    // Dead objects in all extents: what was once moved round and round.
    let mut versions = vec![0; refused as usize];
    for version in 1..2000 {
        let page = random.below(versions.len());
        if write(page as u64, version).is_ok() {
            versions[page] = version;
        }
    }
    let written = || store.backing_stats().written_bytes;
    until("the policy found nothing that can leave", || {
        let (stuck, before) = (decided(&store, "stuck"), written());
        std::thread::sleep(Duration::from_millis(300));
        before == written() && stuck > 0
    });
    assert_eq!(store.backing_state(), Some(BackingState::Full));
    let (before, wakeups) = (written(), decided(&store, "wakeups"));
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!((written(), decided(&store, "wakeups")), (before, wakeups));
    // A tenth of the pages is gone: others can leave at once, and the refused one is written.
    discard(&store, 0..refused / 10);
    let began = Instant::now();
    (refused..refused + 100).for_each(|page| write(page, 0).expect("others leave"));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(store.backing_state(), Some(BackingState::Ok));
    for page in refused / 10..refused {
        expect(&store, page, &incompressible(page + versions[page as usize] * PAGES));
    }
}
