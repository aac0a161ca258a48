//! Fuzzes LRUs of both lock designs, with the same operations on all; the batched design with two batch
//! settings.
//!
//! Promises: lock design and batches do not affect results, so that all designs return the same pages in the
//! same order, and count the same; a page is isolated by one caller at a time, and only if it has contents;
//! every page that enters the lists leaves them in a way that is counted; a page is back soon if fewer left
//! meanwhile than are active; whatever was done before, the cold end returns all pages in the lists.
//!
//! A single thread does all of it, so missing locks do no harm: batches with wrong edges are left to the
//! LRU's own tests.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use uzram::cpu;
use uzram::lru::{Batched, Batching, List, Lru, LruConfig, LruStats, MAX_PAGEVEC_PAGES, SingleLock};

use crate::input::Input;

/// The most operations of one input, and of switches to another CPU, where they wait for their turn: a bound
/// on its time.
const MAX_OPS: usize = 128;
const MAX_MOVES: usize = 4;
/// The number of pages that are named but have no node.
const BEYOND: u32 = 2;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let cpus = Cpus::bind(input.byte());
    let pages = input.one_of(&[300, 300, 40, 3]);
    let pagevec_pages = pagevec_pages(&mut input);
    let batchings = [batching(&mut input), batching(&mut input)];
    let options = |batching| LruConfig { pagevec_pages, batching, ..LruConfig::new(u64::from(pages)) };
    let batched = |batching| (batching, Lru::new(&options(batching)).expect("address space"));
    let mut machine = Machine {
        cpus,
        single: Lru::new(&options(Batching::default())).expect("address space"),
        batched: batchings.map(batched),
        places: vec![Place::Out; (pages + BEYOND) as usize],
        nodes: pages as usize,
        dead: Vec::new(),
        held: Vec::new(),
        isolated: 0,
        put_back: 0,
        evicted: 0,
        went: 0,
        taken_out: 0,
    };
    for _ in 0..MAX_OPS {
        if input.is_empty() {
            break;
        }
        machine.step(&mut input);
        machine.check_stats();
    }
    machine.finish();
}

fn pagevec_pages(input: &mut Input<'_>) -> usize {
    input.one_of(&[1, 1, 2, 5, 14, 14, 33, MAX_PAGEVEC_PAGES])
}

fn batching(input: &mut Input<'_>) -> Batching {
    let (locks, max_pages, flags) = (input.byte() % 32, input.byte() % 60, input.byte());
    Batching {
        locks: 1 + u16::from(locks),
        max_pages: 1 + u32::from(max_pages),
        two_passes: flags & 1 == 0,
        splice: flags & 2 == 0,
    }
}

/// The CPUs that this thread may use. It is bound to one at a time, which the input chooses: pagevecs and
/// tags are per CPU, and an input that fails once must always fail.
struct Cpus {
    allowed: CpuSet,
    each: Vec<CpuSet>,
    moves: usize,
}

impl Cpus {
    fn bind(chosen: u8) -> Self {
        let allowed = sched_getaffinity(None).expect("a thread may ask where it runs");
        let alone = |cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            one
        };
        let each = (0..cpu::possible().min(CpuSet::MAX_CPU)).filter(|cpu| allowed.is_set(*cpu)).map(alone);
        let mut cpus = Cpus { allowed, each: each.collect(), moves: 0 };
        cpus.go(chosen);
        cpus
    }

    fn go(&mut self, chosen: u8) {
        if self.moves <= MAX_MOVES {
            self.moves += 1;
            let cpu = &self.each[usize::from(chosen) % self.each.len()];
            sched_setaffinity(None, cpu).expect("a thread may run where it may run");
        }
    }
}

impl Drop for Cpus {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.allowed);
    }
}

/// The model's state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It has no contents, and is in no list.
    Out,
    /// It has contents, and is in a list or on its way.
    Listed,
    /// Its contents are gone, and it is in a list unless the cold end has reached it.
    Doomed,
    /// It was isolated.
    Isolated,
    /// Its contents were evicted; and the count of evictions and promotions at that time.
    Evicted(u64),
}

/// LRUs that get the same operations, and a model of their pages.
struct Machine {
    cpus: Cpus,
    single: Lru<SingleLock>,
    batched: [(Batching, Lru<Batched>); 2],
    places: Vec<Place>,
    /// The number of pages with nodes.
    nodes: usize,
    /// Pages to be removed, sooner or later.
    dead: Vec<u32>,
    /// Pages that were isolated, some of which are dead since.
    held: Vec<u32>,
    isolated: u64,
    put_back: u64,
    evicted: u64,
    /// How often the contents of a page in a list were dropped.
    went: u64,
    /// Pages removed from the lists because of that, at the last check.
    taken_out: u64,
}

/// Does the same with each LRU, and returns the result of all.
macro_rules! each {
    ($machine:expr, $lru:ident => $call:expr) => {{
        let answer = {
            let $lru = &$machine.single;
            $call
        };
        for (batching, $lru) in &$machine.batched {
            assert_eq!($call, answer, "{batching:?}, beside a single lock");
        }
        answer
    }};
}

impl Machine {
    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0..=2 => self.some_pages(input).into_iter().for_each(|page| self.add(page)),
            3..=5 => self.some_pages(input).into_iter().for_each(|page| each!(self, lru => lru.mark(page))),
            6 => self.some_pages(input).into_iter().for_each(|page| self.mark_dead(page)),
            7 => self.remove_dead(input),
            8 => self.some_pages(input).into_iter().for_each(|page| self.remove(page)),
            9 | 10 => {
                let most = input.one_of(&[1, 2, 7, 32, 33, 100, 0, usize::MAX / 2]);
                self.isolate(most);
            }
            11 => self.put_back(input),
            12 => self.evict(input),
            13 => self.come_back(input),
            14 => self.settings(input),
            _ => self.cpus.go(input.byte()),
        }
    }

    /// Returns consecutive pages, scattered pages, or one page repeatedly.
    fn some_pages(&self, input: &mut Input<'_>) -> Vec<u32> {
        let (from, count) = (usize::from(input.u16()), usize::from(input.byte()));
        let step = input.one_of(&[1, 1, 0, 2, 7, 97, self.places.len() - 1]);
        (0..1 + count % 100).map(|index| ((from + index * step) % self.places.len()) as u32).collect()
    }

    fn has_node(&self, page: u32) -> bool {
        (page as usize) < self.nodes
    }

    fn place(&mut self, page: u32) -> &mut Place {
        &mut self.places[page as usize]
    }

    fn count(&self, is: impl Fn(Place) -> bool) -> u64 {
        self.places.iter().filter(|place| is(**place)).count() as u64
    }

    fn add(&mut self, page: u32) {
        each!(self, lru => lru.add(page));
        if self.has_node(page) && *self.place(page) != Place::Isolated {
            *self.place(page) = Place::Listed;
        }
    }

    fn mark_dead(&mut self, page: u32) {
        let is_in_list = each!(self, lru => lru.mark_dead(page));
        let may_be = matches!(*self.place(page), Place::Listed | Place::Doomed);
        assert!(may_be || !is_in_list, "page {page} is in a list, and was {:?}", self.place(page));
        self.went += u64::from(is_in_list && *self.place(page) == Place::Listed);
        *self.place(page) = if is_in_list { Place::Doomed } else { Place::Out };
        self.dead.extend(is_in_list.then_some(page));
    }

    /// Removes the pages that are dead, in order or reversed.
    fn remove_dead(&mut self, input: &mut Input<'_>) {
        let count = usize::from(input.byte()).min(self.dead.len());
        let mut told: Vec<u32> = self.dead.drain(..count).collect();
        if input.byte() % 2 == 1 {
            told.reverse();
        }
        self.take_out(&told);
    }

    fn take_out(&mut self, told: &[u32]) {
        let before = self.listed();
        each!(self, lru => lru.remove_dead(&mut told.to_vec()));
        let (gone, mut due) = (before - self.listed(), 0);
        for page in told {
            if *self.place(*page) == Place::Doomed {
                *self.place(*page) = Place::Out;
                due += 1;
            }
        }
        assert!(gone <= due, "{gone} pages were taken out, of {due}");
    }

    fn remove(&mut self, page: u32) {
        let before = self.listed();
        each!(self, lru => lru.remove(page));
        let gone = before - self.listed();
        let may_be = u64::from(matches!(*self.place(page), Place::Listed | Place::Doomed));
        assert!(gone <= may_be, "page {page} was in a list, and {:?}", self.place(page));
        self.went += if *self.place(page) == Place::Listed { gone } else { 0 };
        *self.place(page) = Place::Out;
    }

    /// Isolates the coldest pages.
    fn isolate(&mut self, most: usize) {
        let before = self.single.stats();
        let out = each!(self, lru => {
            let mut out = self.held.clone();
            lru.isolate(most, &mut out);
            out
        });
        let after = self.single.stats();
        assert!(out.starts_with(&self.held), "what was there is kept");
        let count = out.len() - self.held.len();
        assert!(count <= most, "{count} pages instead of {most}");
        for page in &out[self.held.len()..] {
            assert_eq!(*self.place(*page), Place::Listed, "page {page} is given out");
            *self.place(*page) = Place::Isolated;
        }
        assert!(after.scanned >= before.scanned + count as u64, "a page is looked at before it is given out");
        self.isolated += count as u64;
        self.held = out;
    }

    /// Takes some of the isolated pages.
    fn take_held(&mut self, input: &mut Input<'_>) -> Vec<u32> {
        let from = usize::from(input.byte()) % (self.held.len() + 1);
        let count = usize::from(input.byte()).min(self.held.len() - from);
        self.held.drain(from..from + count).collect()
    }

    fn put_back(&mut self, input: &mut Input<'_>) {
        let pages = self.take_held(input);
        each!(self, lru => lru.put_back(&pages));
        for page in pages {
            if *self.place(page) == Place::Isolated {
                *self.place(page) = Place::Listed;
                self.put_back += 1;
            }
        }
    }

    fn evict(&mut self, input: &mut Input<'_>) {
        for page in self.take_held(input) {
            each!(self, lru => lru.evicted(page));
            if *self.place(page) == Place::Isolated {
                self.evicted += 1;
                *self.place(page) = Place::Evicted(self.gone());
            }
        }
    }

    /// Returns the count of evictions and promotions so far.
    fn gone(&self) -> u64 {
        self.evicted + self.single.stats().activated
    }

    /// Gives contents to an evicted page: the first at or after the number chosen.
    fn come_back(&mut self, input: &mut Input<'_>) {
        let from = usize::from(input.u16()) % self.places.len();
        let all = self.places.iter().enumerate();
        let evicted = |(page, place): (usize, &Place)| match place {
            Place::Evicted(then) => Some((page as u32, *then)),
            _ => None,
        };
        let Some((page, then)) = all.clone().skip(from).chain(all).find_map(evicted) else { return };
        each!(self, lru => lru.drain_all());
        let before = self.single.stats();
        let is_recent = self.gone() - then < before.active;
        self.add(page);
        each!(self, lru => lru.drain_all());
        let after = self.single.stats();
        let came = (after.added - before.added, after.refaulted - before.refaulted);
        assert_eq!(came, (1, u64::from(is_recent)), "page {page} is back");
        let lens = (after.inactive - before.inactive, after.active - before.active);
        assert_eq!(lens, (u64::from(!is_recent), u64::from(is_recent)), "page {page} is back");
    }

    fn settings(&mut self, input: &mut Input<'_>) {
        match input.byte() % 4 {
            0 | 1 => self.drain(),
            2 => {
                let pages = pagevec_pages(input);
                each!(self, lru => lru.set_pagevec_pages(pages).expect("in range"));
            }
            _ => {
                let pages = input.one_of(&[0, MAX_PAGEVEC_PAGES + 1, usize::MAX]);
                each!(self, lru => {
                    let refused = lru.set_pagevec_pages(pages).expect_err("out of range");
                    assert_eq!(refused.setting(), Some("lru_pagevec"));
                });
            }
        }
    }

    /// Drains the pagevecs: afterwards all pages with contents are in a list.
    fn drain(&mut self) {
        each!(self, lru => lru.drain_all());
        let least = self.count(|place| place == Place::Listed);
        let most = least + self.count(|place| place == Place::Doomed);
        assert!(
            (least..=most).contains(&self.listed()),
            "{} are listed, not {least} to {most}",
            self.listed()
        );
    }

    /// Returns the number of pages in both lists.
    fn listed(&self) -> u64 {
        self.single.len(List::Inactive) + self.single.len(List::Active)
    }

    /// Checks that all have counted the same, and that the counts add up.
    fn check_stats(&mut self) {
        let stats = each!(self, lru => flows(lru.stats()));
        assert_eq!(
            each!(self, lru => [List::Inactive, List::Active].map(|list| lru.len(list))),
            [stats.inactive, stats.active]
        );
        let answered = (self.isolated, self.put_back, self.evicted);
        assert_eq!((stats.isolated, stats.put_back, stats.evicted), answered);
        let left = stats.isolated + stats.inactive + stats.active;
        let taken_out = stats.added.checked_sub(left).expect("what is in a list has come there");
        assert_eq!(stats.removed, taken_out, "{stats:?}");
        // Any operation that moves a dead page removes it.
        let (least, most) = (self.taken_out, self.went);
        assert!((least..=most).contains(&taken_out), "{taken_out}, not {least} to {most}: {stats:?}");
        self.taken_out = taken_out;
        assert_eq!(self.single.stats().batch_locks, 0);
    }

    /// Removes dead pages, and empties the lists from their cold end.
    fn finish(mut self) {
        let told = std::mem::take(&mut self.dead);
        self.take_out(&told);
        self.drain();
        assert_eq!(self.listed(), self.count(|place| place == Place::Listed), "a dead page stays");
        self.check_stats();
        // A call clears at least the marks, and moves half of the active pages, rounded up.
        for _ in 0..16 {
            self.isolate(self.places.len());
        }
        assert!(self.listed() == 0 && self.single.is_empty(), "{} pages stay", self.listed());
        for page in 0..self.places.len() as u32 {
            self.remove(page);
        }
        assert!(each!(self, lru => lru.is_empty()));
        self.check_stats();
    }
}

/// Returns the statistics without those that differ between designs. No other thread uses the locks.
fn flows(mut stats: LruStats) -> LruStats {
    assert_eq!((stats.lru_locks_contended, stats.batch_locks_contended), (0, 0));
    (stats.lru_locks, stats.batch_locks) = (0, 0);
    stats
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    const ADD: u8 = 0;
    const MARK: u8 = 3;
    const DOOM: u8 = 6;
    const REMOVE: u8 = 8;
    let some = |op: u8, from: u16, count: u8, step: u8| {
        let [low, high] = from.to_le_bytes();
        vec![op, low, high, count - 1, step]
    };
    let remove_dead = |count: u8, reversed: u8| vec![7, count, reversed];
    let isolate = |most: u8| vec![9, most];
    let (put_back, evict) = (|from, count| vec![11, from, count], |from, count| vec![12, from, count]);
    let come_back = |from: u8| vec![13, from, 0];
    let (drain, pagevec) = ([14, 0], |choice| vec![14, 2, choice]);
    let go = |cpu: u8| vec![15, cpu];
    let fill = [some(ADD, 0, 100, 0), some(ADD, 100, 100, 0), some(ADD, 200, 99, 4)].concat();
    let heat = [some(MARK, 10, 60, 4), some(MARK, 10, 60, 4), some(MARK, 120, 90, 0)].concat();
    let cool = [isolate(5), put_back(3, 20), evict(0, 90), isolate(3), evict(0, 200)].concat();
    let holes = [
        some(DOOM, 0, 90, 3),
        some(ADD, 20, 20, 0),
        some(REMOVE, 180, 40, 0),
        remove_dead(60, 1),
        some(DOOM, 100, 100, 0),
        isolate(4),
        remove_dead(255, 0),
    ]
    .concat();
    let refaults = (0..6).flat_map(|at| come_back(at * 20)).collect::<Vec<u8>>();
    let returns = [&heat[..], &cool, &refaults, &isolate(7), &evict(0, 255), &refaults].concat();
    let moves = [
        &go(1)[..],
        &some(ADD, 0, 70, 5),
        &some(DOOM, 0, 30, 5),
        &go(0),
        &some(ADD, 0, 50, 4),
        &heat,
        &go(1),
        &pagevec(1),
        &heat,
        &isolate(6),
        &some(MARK, 0, 50, 0),
        &put_back(0, 255),
    ]
    .concat();
    let all = [&fill[..], &heat, &cool, &holes, &drain, &returns, &moves, &fill, &returns].concat();
    // CPU, pages, pagevec, and twice locks, pages of a batch, passes and splicing.
    let with = |settings: [u8; 9], ops: &[u8]| [&settings, ops].concat();
    vec![
        with([0, 0, 4, 31, 13, 0, 31, 13, 1], &all),
        with([0, 0, 7, 0, 59, 0, 2, 3, 2], &all),
        with([1, 0, 0, 1, 0, 3, 4, 1, 0], &all),
        with([0, 0, 6, 31, 55, 1, 7, 2, 2], &[&fill[..], &moves, &returns, &moves].concat()),
        with([0, 2, 3, 1, 4, 0, 31, 6, 3], &all),
        with([1, 3, 1, 31, 2, 0, 0, 1, 2], &[&fill[..], &holes, &returns].concat()),
    ]
}
