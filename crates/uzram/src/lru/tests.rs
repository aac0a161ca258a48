//! Compares the LRU of each design with a naive model, and tests it with many threads.

use super::node::LISTS;
use super::*;
use crate::base::random::Random;
use crate::base::thread::pin_to_current_cpu;
use std::collections::{HashMap, VecDeque};

/// Sizes and steps of batches, beside the default ones.
const BATCHINGS: [Batching; 3] = [
    Batching { locks: 2, max_pages: 40, two_passes: false, splice: true },
    Batching { locks: 3, max_pages: 4, two_passes: true, splice: false },
    Batching { locks: 32, max_pages: 14, two_passes: false, splice: false },
];

/// Runs a test for every design, that of batches with several parameters.
macro_rules! for_every_design {
    ($($test:ident),* $(,)?) => {
        $(mod $test {
            use super::*;

            #[test]
            fn every_design() {
                #[cfg(feature = "designs")]
                super::$test::<SingleLock>(Batching::default());
                BATCHINGS.into_iter().chain([Batching::default()]).for_each(super::$test::<Batched>);
            }
        })*
    };
}

for_every_design!(
    agrees_with_a_naive_model,
    keeps_its_order_among_threads,
    bulk_removal,
    pagevecs,
    adopts_pages_in_their_order,
);

fn lru<D: LruLocks>(pages: u64, pagevec_pages: usize, batching: Batching) -> Lru<D> {
    Lru::new(&LruConfig { pagevec_pages, batching, ..LruConfig::new(pages) }).expect("memory")
}

fn check<D: LruLocks>(lru: &Lru<D>) {
    for list in LISTS {
        assert_eq!(lru.len(list), lru.lists.nodes.pages_of(list).len() as u64, "{list:?} of {}", D::NAME);
        if D::NAME == Batched::NAME {
            lru.lists.nodes.check_batches(list);
        }
    }
}

/// A model with plain queues, the hottest page in front, and no pagevecs.
#[derive(Default)]
struct Model {
    inactive: VecDeque<u32>,
    active: VecDeque<u32>,
    referenced: HashMap<u32, bool>,
    isolated: Vec<u32>,
    evicted: HashMap<u32, u32>,
    age: u32,
}

impl Model {
    fn take(&mut self, page: u32) -> bool {
        let before = self.inactive.len() + self.active.len();
        self.inactive.retain(|other| *other != page);
        self.active.retain(|other| *other != page);
        before > self.inactive.len() + self.active.len()
    }

    fn is_known(&self, page: u32) -> bool {
        [&self.inactive, &self.active].iter().any(|list| list.contains(&page))
            || self.isolated.contains(&page)
    }

    fn add(&mut self, page: u32) {
        if self.is_known(page) {
            return self.mark(page);
        }
        self.referenced.insert(page, false);
        match self.evicted.remove(&page) {
            Some(age) if u64::from(self.age - age) <= self.active.len() as u64 => {
                self.active.push_front(page)
            }
            _ => self.inactive.push_front(page),
        }
    }

    fn mark(&mut self, page: u32) {
        if !self.is_known(page) {
            return;
        }
        let was = self.referenced.insert(page, true);
        if was == Some(true) && self.inactive.contains(&page) {
            self.take(page);
            self.active.push_front(page);
            self.age += 1;
        }
    }

    fn remove(&mut self, page: u32) {
        self.take(page);
        self.isolated.retain(|other| *other != page);
        self.evicted.remove(&page);
    }

    fn isolate(&mut self, most: usize) -> Vec<u32> {
        let mut out = Vec::new();
        let mut scans = self.inactive.len() + 2 * self.active.len() + 1;
        while out.len() < most && scans > 0 {
            let mut short = self.active.len().saturating_sub(self.inactive.len()).div_ceil(2);
            for _ in 0..SCAN_PAGES {
                let Some(page) = self.active.back().copied().filter(|_| short > 0) else { break };
                self.take(page);
                if self.referenced.insert(page, false) == Some(true) {
                    self.active.push_front(page);
                } else {
                    self.inactive.push_front(page);
                    short -= 1;
                }
            }
            let mut scanned = 0;
            while scanned < SCAN_PAGES.min(scans) && out.len() < most {
                let Some(page) = self.inactive.pop_back() else { break };
                scanned += 1;
                if self.referenced.insert(page, false) == Some(true) {
                    self.active.push_front(page);
                    self.age += 1;
                } else {
                    self.isolated.push(page);
                    out.push(page);
                }
            }
            if scanned == 0 && self.active.is_empty() {
                break;
            }
            scans -= SCAN_PAGES.min(scans);
        }
        out
    }

    fn put_back(&mut self, page: u32) {
        if !self.isolated.contains(&page) {
            return;
        }
        self.isolated.retain(|other| *other != page);
        let list = if self.referenced[&page] { &mut self.active } else { &mut self.inactive };
        list.push_front(page);
        self.referenced.insert(page, false);
    }

    fn evict(&mut self, page: u32) {
        if self.isolated.contains(&page) {
            self.isolated.retain(|other| *other != page);
            self.evicted.insert(page, self.age);
            self.age += 1;
        }
    }
}

fn agrees_with_a_naive_model<D: LruLocks>(batching: Batching) {
    for seed in 0..6 {
        let mut random = Random::new(seed);
        let lru = lru::<D>(200, 1, batching);
        let mut model = Model::default();
        let mut out: Vec<u32> = Vec::new();
        for step in 0..4000 {
            let page = random.below(200) as u32;
            match random.below(13) {
                12 => {
                    let mut pages = [page, (page + 1) % 200, (page + 2) % 200];
                    let unused = |page: &u32| model.inactive.contains(page) && !model.referenced[page];
                    let wanted: Vec<u32> = pages.iter().copied().filter(unused).collect();
                    let count = lru.isolate_inactive(&mut pages);
                    pages[..count].sort_unstable_by_key(|other| (other + 200 - page) % 200);
                    assert_eq!(pages[..count], wanted, "seed {seed} step {step}");
                    for page in wanted {
                        model.take(page);
                        model.isolated.push(page);
                        out.push(page);
                    }
                }
                0..4 => (lru.add(page), model.add(page)).0,
                4..7 => (lru.mark(page), model.mark(page)).0,
                7 | 8 => (lru.remove(page), model.remove(page)).0,
                9 => {
                    let most = random.below(12);
                    let at = out.len();
                    lru.isolate(most, &mut out);
                    assert_eq!(out[at..], model.isolate(most), "seed {seed} step {step}");
                }
                10 if !out.is_empty() => {
                    let page = out.swap_remove(random.below(out.len()));
                    (lru.put_back(&[page]), model.put_back(page)).0
                }
                _ if !out.is_empty() => {
                    let page = out.swap_remove(random.below(out.len()));
                    (lru.evicted(page), model.evict(page)).0
                }
                _ => {}
            }
            check(&lru);
            let nodes = &lru.lists.nodes;
            assert_eq!(model.inactive, nodes.pages_of(List::Inactive), "seed {seed} step {step}");
            assert_eq!(model.active, nodes.pages_of(List::Active), "seed {seed} step {step}");
        }
        let stats = lru.stats();
        assert_eq!(stats.active + stats.inactive, (model.active.len() + model.inactive.len()) as u64);
        let came = stats.added;
        let left = stats.removed + stats.isolated + stats.active + stats.inactive;
        assert_eq!(came, left, "seed {seed}: {stats:?}");
    }
}

/// Threads use pages as a store does, whose slot locks order the operations on a page.
fn keeps_its_order_among_threads<D: LruLocks>(batching: Batching) {
    const PAGES: usize = 300;
    for seed in 0..3 {
        let lru = lru::<D>(PAGES as u64, 5, batching);
        let slots: Vec<_> = (0..PAGES).map(|_| Mutex::new(&classes::SLOT, false)).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let (lru, slots) = (&lru, &slots);
                    scope.spawn(move || {
                        let mut random = Random::new(seed * 100 + thread);
                        let mut dead = Vec::new();
                        for _ in 0..20_000 {
                            let page = random.below(PAGES);
                            match random.below(10) {
                                0..4 => {
                                    let mut has = slots[page].lock();
                                    *has = true;
                                    lru.add(page as u32);
                                }
                                4..6 => lru.mark(page as u32),
                                6..9 => {
                                    let mut has = slots[page].lock();
                                    if std::mem::take(&mut *has) && lru.mark_dead(page as u32) {
                                        dead.push(page as u32);
                                    }
                                }
                                _ => {
                                    lru.remove_dead(&mut dead);
                                    dead.clear();
                                    let mut out = Vec::new();
                                    lru.isolate(random.below(20), &mut out);
                                    for page in out {
                                        if random.below(2) == 0 {
                                            lru.put_back(&[page]);
                                            continue;
                                        }
                                        let mut has = slots[page as usize].lock();
                                        // It may have been removed, added and isolated by another thread.
                                        if *has && lru.lists.nodes.state(page).place() == Place::Isolated {
                                            *has = false;
                                            lru.evicted(page);
                                        }
                                    }
                                }
                            }
                        }
                        lru.remove_dead(&mut dead);
                    })
                })
                .collect();
            // ThreadSanitizer sees joins, but not the end of a scope.
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
        lru.drain_all();
        check(&lru);
        for (page, has) in slots.iter().enumerate() {
            let state = lru.lists.nodes.state(page as u32);
            assert_eq!(state.is_on_list(), *has.lock(), "seed {seed} page {page}: {state:?}");
            assert!(!state.has(DEAD));
        }
    }
}

fn bulk_removal<D: LruLocks>(batching: Batching) {
    pin_to_current_cpu();
    let lru = lru::<D>(4096, 14, batching);
    (0..4096).for_each(|page| lru.add(page));
    lru.drain_all();
    assert_eq!(lru.len(List::Inactive), 4096);
    let mut range: Vec<u32> = (1000..2000).filter(|page| lru.mark_dead(*page)).collect();
    assert_eq!(range.len(), 1000);
    lru.remove_dead(&mut range);
    check(&lru);
    assert_eq!(lru.len(List::Inactive), 3096);
    // Pages that have contents again stay.
    let (odd, mut all): (Vec<u32>, Vec<u32>) =
        ((0..1000).filter(|page| page % 2 == 1).collect(), (0..1000).collect());
    assert!(all.iter().all(|page| lru.mark_dead(*page)));
    odd.iter().for_each(|page| lru.add(*page));
    lru.remove_dead(&mut all);
    check(&lru);
    assert_eq!(lru.len(List::Inactive), 2596);
    let mut out = Vec::new();
    lru.isolate(5000, &mut out);
    assert_eq!(out.len(), 2596);
    assert!(out.starts_with(&odd), "the coldest first");
    assert!(lru.is_empty());
}

fn pagevecs<D: LruLocks>(batching: Batching) {
    let lru = lru::<D>(100, 8, batching);
    (0..7).for_each(|page| lru.add(page));
    assert!(lru.len(List::Inactive) <= 7);
    // A page that was removed is not put in; one that was added again is put in once.
    lru.remove(3);
    lru.add(3);
    lru.remove(4);
    lru.drain_all();
    let mut pages = lru.lists.nodes.pages_of(List::Inactive);
    pages.sort_unstable();
    assert_eq!(pages, [0, 1, 2, 3, 5, 6]);
    lru.set_pagevec_pages(1).expect("in range");
    lru.add(50);
    assert_eq!(lru.lists.nodes.pages_of(List::Inactive)[0], 50);
    for size in [0, MAX_PAGEVEC_PAGES + 1] {
        let error = lru.set_pagevec_pages(size).expect_err("out of range");
        assert!(error.to_string().contains("lru_pagevec"), "{error}");
    }
    check(&lru);
}

/// The last page numbers of the largest disk are the lists' heads.
#[test]
fn pages_without_a_node_are_never_cold() {
    let lru = Lru::<Batched>::new(&LruConfig::new(1 << 32)).expect("address space");
    assert!(lru.max_bytes() >= NODE_BYTES << 32 && lru.resident_bytes() < 1 << 20);
    let mut out = Vec::new();
    for page in [u32::MAX, u32::MAX - 1, u32::MAX - 2] {
        lru.add(page);
        lru.mark(page);
        lru.prefetch(page);
    }
    lru.isolate(5, &mut out);
    lru.isolate(5, &mut out);
    assert!(out.iter().all(|page| *page == u32::MAX - 2), "{out:?}");
    lru.remove(u32::MAX);
    check(&lru);
}

fn hits<D: LruLocks>(trace: &[u32], pages: u32, kept: usize, batching: Batching) -> usize {
    let lru = lru::<D>(u64::from(pages), DEFAULT_PAGEVEC_PAGES, batching);
    let (mut present, mut count, mut hits) = (vec![false; pages as usize], 0, 0);
    let mut out = Vec::new();
    for page in trace {
        if std::mem::replace(&mut present[*page as usize], true) {
            hits += 1;
            lru.mark(*page);
            continue;
        }
        lru.add(*page);
        count += 1;
        while count > kept {
            lru.isolate(8.min(count - kept + 4), &mut out);
            count -= out.len();
            for page in out.drain(..) {
                present[page as usize] = false;
                lru.evicted(page);
            }
        }
    }
    check(&lru);
    hits
}

fn exact_hits(trace: &[u32], pages: u32, kept: usize) -> usize {
    let mut last_use = vec![None; pages as usize];
    let mut by_use = std::collections::BTreeMap::new();
    let mut hits = 0;
    for (now, page) in trace.iter().enumerate() {
        if let Some(before) = last_use[*page as usize].replace(now) {
            by_use.remove(&before);
            hits += 1;
        }
        by_use.insert(now, *page);
        if by_use.len() > kept {
            let (_, coldest) = by_use.pop_first().expect("there are some");
            last_use[coldest as usize] = None;
        }
    }
    hits
}

/// Returns a Zipf-distributed trace over `pages` pages, in random order of popularity.
fn zipf(seed: u64, pages: u32, uses: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut names: Vec<u32> = (0..pages).collect();
    (1..pages as usize).rev().for_each(|at| names.swap(at, random.below(at + 1)));
    let mut sums: Vec<f64> = (1..=pages).map(|n| 1.0 / f64::from(n)).collect();
    (1..sums.len()).for_each(|at| sums[at] += sums[at - 1]);
    let whole = sums[sums.len() - 1];
    let mut page = || {
        let share = (random.next() >> 11) as f64 / (1u64 << 53) as f64 * whole;
        names[sums.partition_point(|sum| *sum < share).min(names.len() - 1)]
    };
    (0..uses).map(|_| page()).collect()
}

/// As [`for_every_design`], but each trace is made once, and goes through the exact LRU once.
#[test]
fn keeps_what_an_exact_lru_keeps() {
    const PAGES: u32 = 20_000;
    let uses = zipf(1, PAGES, 200_000);
    // The same trace, interleaved with a scan of the upper half.
    let scanned = (PAGES / 2..PAGES).cycle();
    let with_scan: Vec<u32> =
        uses.iter().zip(scanned).flat_map(|(page, once)| [page % (PAGES / 2), once]).collect();
    let round: Vec<u32> = (0..5000).cycle().take(100_000).collect();
    for (name, trace, least_points) in
        [("zipf", &uses, -1.0), ("scan", &with_scan, 0.0), ("round", &round, -1.0)]
    {
        for kept in [1000, 4000] {
            let exact = exact_hits(trace, PAGES, kept);
            let compare = |design: &str, hits: usize| {
                let points = (hits as f64 - exact as f64) / trace.len() as f64 * 100.0;
                println!("{design}, {name}, {kept} kept: {hits} hits, exact {exact}: {points:.2} points");
                assert!(points >= least_points, "{design}, {name}, {kept} kept: {points:.2} points");
            };
            #[cfg(feature = "designs")]
            compare(SingleLock::NAME, hits::<SingleLock>(trace, PAGES, kept, Batching::default()));
            for batching in BATCHINGS.into_iter().chain([Batching::default()]) {
                let hits = hits::<Batched>(trace, PAGES, kept, batching);
                compare(&format!("{batching:?}"), hits);
            }
        }
    }
}

/// Adopted pages are in the order of a list to which they were added, and may leave from any place of it.
fn adopts_pages_in_their_order<D: LruLocks>(batching: Batching) {
    let mut random = Random::new(9);
    for count in [0, 1, 2, 13, 14, 15, 28, 500] {
        let lru = lru::<D>(600, 8, batching);
        let mut pages: Vec<u32> = (0..600).collect();
        (0..pages.len()).rev().for_each(|at| pages.swap(at, random.below(at + 1)));
        pages.truncate(count);
        // Of a page beyond the last it takes no notice.
        lru.adopt(pages.iter().copied().chain([600]));
        check(&lru);
        let hottest_first: Vec<u32> = pages.iter().rev().copied().collect();
        assert_eq!(lru.lists.nodes.pages_of(List::Inactive), hottest_first);
        assert_eq!((lru.stats().added, lru.stats().inactive), (count as u64, count as u64));
        let (gone, kept): (Vec<u32>, Vec<u32>) = pages.iter().partition(|page| **page % 3 == 0);
        gone.iter().for_each(|page| lru.remove(*page));
        check(&lru);
        let mut isolated = Vec::new();
        lru.isolate(count, &mut isolated);
        assert_eq!(isolated, kept);
        lru.put_back(&isolated);
        lru.drain_all();
        check(&lru);
        assert_eq!(lru.len(List::Inactive), kept.len() as u64);
    }
}
