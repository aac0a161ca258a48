//! Fuzzes pools of any lock design with a sequence of operations: stores, reads, frees, compaction, eviction,
//! limits.
//!
//! Promises: every read returns what was stored, whatever was moved before or is moved meanwhile; an
//! operation fails only for a valid reason, and then stores nothing; statistics add up to what is stored;
//! over the limit nothing grows; compaction leaves no more pages than the objects need; freed objects return
//! their memory.

use std::collections::{BTreeMap, BTreeSet};

use uzram::mem::{Arena, MAX_BATCH_PAGES};
use uzram::random::Random;
use uzram::sync::Arc;
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::design::ClassLocks;
use uzram::zsmalloc::{
    ClassIndexed, ClassStat, Consolidated, Handle, Object, Pinned, Pool, PoolBuilder, PoolLocks, SizeClass,
    Split,
};
use uzram::{Error, ErrorKind};

use crate::input::Input;

/// The most operations of one input, and the most bytes that it stores: a bound on its time.
const MAX_OPS: usize = 48;
const MAX_STORED_BYTES: usize = 3 << 20;
/// Bytes before each object that is not huge.
const HEADER_BYTES: usize = 8;
/// Address space and number of objects that no input exhausts.
const ROOMY_BYTES: u64 = 64 << 20;
const ROOMY_OBJECTS: u64 = 1 << 20;

/// Every design.
const DESIGNS: &[fn(&mut Input<'_>)] = &[
    operate::<Pinned>,
    operate::<Split>,
    operate::<ClassIndexed>,
    operate::<Consolidated>,
    operate::<ClassLocks<1>>,
    operate::<ClassLocks<3>>,
    operate::<ClassLocks<4>>,
];

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    input.one_of(DESIGNS)(&mut input);
}

/// Makes a pool of one design, and runs the rest of the input on it.
fn operate<D: PoolLocks>(input: &mut Input<'_>) {
    let chain_size = 4 + usize::from(input.byte()) % 13;
    let reserve_bytes = input.one_of(&[ROOMY_BYTES, ROOMY_BYTES, 8 << 20, 4 << 20]);
    let max_objects = input.one_of(&[ROOMY_OBJECTS, ROOMY_OBJECTS, 16]);
    let arena = Arc::new(Arena::new(reserve_bytes).expect("address space"));
    let builder = PoolBuilder::new("fuzz")
        .max_objects(max_objects)
        .chain_size(chain_size)
        .count_locks(true)
        .reclaim(true);
    let pool: Pool<D> = builder.build_in(Arc::clone(&arena)).expect("in range");
    let mut machine = Machine {
        arena: &arena,
        pool: &pool,
        live: BTreeMap::new(),
        held: BTreeSet::new(),
        next_owner: 0,
        stored_bytes: 0,
        freed: 0,
        roomy: reserve_bytes == ROOMY_BYTES && max_objects == ROOMY_OBJECTS,
        limit_pages: 0,
        charged_pages: 0,
    };
    machine.set_batch(input);
    for _ in 0..MAX_OPS {
        if input.is_empty() {
            break;
        }
        machine.step(input);
        machine.check_stats();
    }
    machine.finish();
}

/// The object stored for an owner.
struct Entry {
    handle: Handle,
    bytes: Vec<u8>,
}

/// A pool and its model: a map.
struct Machine<'a, D: PoolLocks> {
    arena: &'a Arena,
    pool: &'a Pool<D>,
    live: BTreeMap<u32, Entry>,
    /// Owners of entries that are being read, and are not in `live` meanwhile.
    held: BTreeSet<u32>,
    next_owner: u32,
    stored_bytes: usize,
    freed: u64,
    /// Without a limit, everything can be stored.
    roomy: bool,
    limit_pages: u64,
    /// The charge when the limit was set or last checked.
    charged_pages: u64,
}

impl<D: PoolLocks> Machine<'_, D> {
    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0..=3 => self.store_some(input),
            4 | 5 => self.free_some(input),
            6 => self.free_scattered(input),
            7 | 8 => self.read(input),
            9 | 10 => self.step_while_reading(input),
            11 => self.compact(),
            12 | 13 => self.reclaim(input),
            14 => self.limit(input),
            _ => self.settings(input),
        }
    }

    /// Stores objects of one length, or of increasing lengths.
    fn store_some(&mut self, input: &mut Input<'_>) {
        let (len, count) = (len(input), 1 + input.byte() % 64);
        let step = input.one_of(&[0, 0, 16, 48, 1]);
        if !(1..=PAGE_SIZE).contains(&len) {
            return self.store(len);
        }
        for index in 0..usize::from(count) {
            self.store(1 + (len - 1 + index * step) % PAGE_SIZE);
        }
    }

    fn store(&mut self, len: usize) {
        if self.stored_bytes + len > MAX_STORED_BYTES {
            return;
        }
        self.stored_bytes += len;
        let owner = self.next_owner;
        let mut bytes = vec![0; len];
        Random::new(u64::from(owner)).fill(&mut bytes);
        match self.pool.store_for(&bytes, owner).map(Object::into_handle) {
            Ok(handle) => {
                assert_eq!((handle.owner(), handle.len()), (owner, len));
                self.live.insert(owner, Entry { handle, bytes });
                self.next_owner += 1;
            }
            Err(error) => self.check_refusal(&error, len),
        }
    }

    /// Checks that a store failed for its length, or because there is no room.
    fn check_refusal(&self, error: &Error, len: usize) {
        if !(1..=PAGE_SIZE).contains(&len) {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            return;
        }
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        match error.setting() {
            Some("mem_limit") => assert_ne!(self.limit_pages, 0),
            _ => assert!(!self.roomy, "{error}"),
        }
    }

    /// Returns the owner of an object, the first at or after the number chosen.
    fn choose(&self, input: &mut Input<'_>) -> Option<u32> {
        let from = u32::from(input.u16()) % self.next_owner.max(1);
        self.live.range(from..).next().or(self.live.iter().next()).map(|(owner, _)| *owner)
    }

    fn free(&mut self, owner: u32) {
        let Some(Entry { handle, .. }) = self.live.remove(&owner) else { return };
        self.pool.free(handle).expect("it is this pool's");
        self.freed += 1;
    }

    fn free_some(&mut self, input: &mut Input<'_>) {
        let count = 1 + u32::from(input.byte()) % 32;
        if let Some(first) = self.choose(input) {
            (first..first.saturating_add(count)).for_each(|owner| self.free(owner));
        }
    }

    /// Frees one of so many objects, or all but these.
    fn free_scattered(&mut self, input: &mut Input<'_>) {
        let (period, at) = (2 + u32::from(input.byte()) % 15, u32::from(input.byte()));
        let all_but = input.byte() % 2 == 1;
        let chosen = |owner: &u32| (*owner % period == at % period) != all_but;
        let owners: Vec<u32> = self.live.keys().copied().filter(chosen).collect();
        owners.into_iter().for_each(|owner| self.free(owner));
    }

    fn read(&self, input: &mut Input<'_>) {
        if let Some(owner) = self.choose(input) {
            self.check(owner, &self.live[&owner]);
        }
    }

    fn check(&self, owner: u32, entry: &Entry) {
        let read = self.pool.read(&entry.handle).expect("what is stored can be read");
        assert!(*read == *entry.bytes, "the object of {owner} holds other bytes than were stored");
    }

    /// Runs another operation while some objects are read.
    fn step_while_reading(&mut self, input: &mut Input<'_>) {
        let count = 1 + usize::from(input.byte()) % 8;
        let mut entries = Vec::new();
        for owner in (0..count).filter_map(|_| self.choose(input)).collect::<BTreeSet<_>>() {
            entries.extend(self.live.remove_entry(&owner));
        }
        self.held = entries.iter().map(|(owner, _)| *owner).collect();
        let pool = self.pool;
        let reads: Vec<_> = entries.iter().map(|(_, entry)| pool.read(&entry.handle)).collect();
        match input.byte() % 8 {
            0 => self.store_some(input),
            1 => self.free_some(input),
            2 => self.free_scattered(input),
            3..=5 => self.compact(),
            6 => self.reclaim(input),
            _ => self.limit(input),
        }
        self.check_stats();
        for ((owner, entry), read) in entries.iter().zip(reads) {
            let read = read.expect("what is stored can be read");
            assert!(*read == *entry.bytes, "the object of {owner} changed while it was read");
        }
        self.live.extend(entries);
        self.held.clear();
    }

    fn compact(&mut self) {
        let (used, compacted) = (self.pool.pages_used(), self.pool.pages_compacted());
        let freed = self.pool.compact();
        // A zspage with objects being read, or for which the limit is reached halfway, is in two places. One
        // whose objects fill the gaps of two others may take a page more there, until the class is moved into
        // a new zspage: for that there may be no address space.
        let may_grow = !self.roomy || self.limit_pages != 0 || !self.held.is_empty();
        let now = self.pool.pages_used();
        assert!(now <= used || may_grow, "compaction took {} pages", now - used);
        assert_eq!((freed, self.pool.pages_compacted()), (used.saturating_sub(now), compacted + freed));
        if !may_grow {
            let ideal: u64 = self.pool.class_stats().iter().map(ideal_pages).sum();
            assert_eq!(now, ideal, "compaction leaves gaps");
        }
    }

    /// Evicts the coldest objects, of which the owners give up some.
    fn reclaim(&mut self, input: &mut Input<'_>) {
        let (pages, gives_up, then) = (u64::from(input.byte()), input.byte(), input.byte());
        let (used, compacted) = (self.pool.pages_used(), self.pool.pages_compacted());
        let (pool, mut asked, mut at) = (self.pool, BTreeSet::new(), 0);
        let done = pool.reclaim(pages, |owner| {
            assert!(owner < self.next_owner, "{owner} was never stored");
            // Unless another operation runs meanwhile, no owner is asked twice, or for an object that is
            // gone.
            if then < 192 {
                assert!(self.live.contains_key(&owner) || self.held.contains(&owner), "{owner} is gone");
                assert!(asked.insert(owner), "{owner} is asked twice");
            }
            if gives_up >> (at % 8) & 1 == 0 {
                self.free(owner);
            }
            // The pool may be used meanwhile.
            match then {
                192..=223 if at % 16 == 0 => self.store(1 + usize::from(then) * 7 * at % PAGE_SIZE),
                224..=239 if at == 3 => drop(pool.compact()),
                240..=255 if at == 3 => drop(pool.reclaim(1, |owner| self.free(owner))),
                _ => {}
            }
            at += 1;
        });
        let freed = done.expect("the pool keeps the order of its zspages");
        if then < 192 {
            assert_eq!((pool.pages_used(), pool.pages_compacted()), (used - freed, compacted));
        }
        if gives_up == 0 && then < 192 && self.held.is_empty() {
            assert!(freed >= pages || pool.pages_used() == 0, "{freed} of {pages} pages: objects are left");
        }
    }

    fn limit(&mut self, input: &mut Input<'_>) {
        self.charged_pages = self.arena.charged_pages();
        let (now, some) = (self.charged_pages, u64::from(input.byte()));
        self.limit_pages = input.one_of(&[0, now, now / 2, 1, some, now + some]);
        self.arena.set_limit_pages(self.limit_pages);
        assert_eq!(self.arena.limit_pages(), self.limit_pages);
    }

    fn settings(&mut self, input: &mut Input<'_>) {
        match input.byte() % 3 {
            0 => self.arena.release_free(),
            1 => self.set_batch(input),
            _ => {
                let refused =
                    self.arena.set_run_cache_batch_pages(MAX_BATCH_PAGES + 1).expect_err("too many");
                assert_eq!(refused.setting(), Some("run_cache_batch"));
            }
        }
    }

    fn set_batch(&self, input: &mut Input<'_>) {
        let batch_pages = input.one_of(&[0, 1, 7, 32, MAX_BATCH_PAGES]);
        self.arena.set_run_cache_batch_pages(batch_pages).expect("in range");
    }

    /// Checks that the statistics add up, and that nothing has grown over the limit.
    fn check_stats(&mut self) {
        let stats = self.pool.class_stats();
        let sum = |of: &dyn Fn(&ClassStat) -> u64| stats.iter().map(of).sum::<u64>();
        assert_eq!(sum(&|stat| stat.obj_used), (self.live.len() + self.held.len()) as u64);
        assert_eq!(sum(&|stat| stat.pages_used), self.pool.pages_used());
        assert_eq!(sum(&ClassStat::freeable_pages), self.pool.freeable_pages());
        for stat in &stats {
            let zspages: u64 = stat.zspages.iter().map(|count| u64::from(*count)).sum();
            assert_eq!(stat.zspages[0], 0, "an empty zspage is kept: {stat:?}");
            assert_eq!(stat.obj_allocated, zspages * u64::from(stat.class.objs_per_zspage));
            assert!(zspages <= stat.obj_used && stat.obj_used <= stat.obj_allocated, "{stat:?}");
            let most_pages = zspages * u64::from(stat.class.pages_per_zspage);
            assert!((ideal_pages(stat)..=most_pages).contains(&stat.pages_used), "{stat:?}");
        }
        let charged_pages = self.arena.charged_pages();
        assert!(self.pool.pages_used() <= charged_pages);
        let bound_pages = self.charged_pages.max(self.limit_pages);
        assert!(self.limit_pages == 0 || charged_pages <= bound_pages, "grown over the limit");
        self.charged_pages = charged_pages;
    }

    /// Compares everything, then frees everything.
    fn finish(mut self) {
        let stats = self.pool.class_stats();
        let mut objects = vec![0; stats.len()];
        for (owner, entry) in &self.live {
            self.check(*owner, entry);
            objects[class_for(&stats, entry.bytes.len())] += 1;
        }
        for (stat, objects) in stats.iter().zip(objects) {
            assert_eq!(stat.obj_used, objects, "{stat:?}");
        }
        let owners: Vec<u32> = self.live.keys().copied().collect();
        owners.into_iter().for_each(|owner| self.free(owner));
        self.check_stats();
        assert_eq!(self.pool.pages_used(), 0, "an empty pool uses memory");
        let counts = self.pool.lock_counts();
        assert_eq!((counts.allocs, counts.frees), (u64::from(self.next_owner), self.freed));
        assert!(D::FREES_PAGES_LOCKED || counts.runs_freed_locked == 0, "pages were freed under a lock");
        self.arena.set_limit_pages(0);
        self.stored_bytes = 0;
        self.store(PAGE_SIZE);
        assert_eq!(self.live.len(), 1, "an empty pool has no room");
    }
}

/// Returns a length: any, one near the boundary of two size classes, a common one, or one that is refused.
fn len(input: &mut Input<'_>) -> usize {
    match input.byte() {
        0..=79 => 1 + usize::from(input.u16()) % PAGE_SIZE,
        80..=159 => (24 + 16 * usize::from(input.byte()) + usize::from(input.byte() % 2)).min(PAGE_SIZE),
        160..=249 => input.one_of(&[1, 24, 100, 500, 1000, 1500, 2000, 3000, 3600, PAGE_SIZE - 1, PAGE_SIZE]),
        _ => input.one_of(&[0, PAGE_SIZE + 1, 1 << 16]),
    }
}

/// Returns the index of the class for contents of that length, smallest first.
fn class_for(stats: &[ClassStat], len: usize) -> usize {
    let has_room = |stat: &ClassStat| len + HEADER_BYTES <= usize::from(stat.class.size_bytes);
    stats.iter().position(has_room).unwrap_or(stats.len() - 1)
}

/// Returns the pages of a class's objects, packed without a gap.
fn ideal_pages(stat: &ClassStat) -> u64 {
    let SizeClass { size_bytes, pages_per_zspage, objs_per_zspage } = stat.class;
    let (zspages, rest) =
        (stat.obj_used / u64::from(objs_per_zspage), stat.obj_used % u64::from(objs_per_zspage));
    zspages * u64::from(pages_per_zspage) + (rest * u64::from(size_bytes)).div_ceil(PAGE_SIZE as u64)
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    // So many objects of one of the common lengths; of one near a boundary, and of the classes above it.
    let store = |usual: u8, count: u8| vec![0, 160, usual, count - 1, 0];
    let sweep = |border: u8, count: u8| vec![0, 80, border, 1, count - 1, 2];
    let fill: Vec<u8> = (0..10).flat_map(|usual| store(usual, 50)).collect();
    let sweeps: Vec<u8> = (0..4).flat_map(|quarter| sweep(quarter * 64, 64)).collect();
    let scatter = |period: u8| vec![6, period, 1, 1];
    let (compact, read, release) = ([11], [7, 40, 0], [15, 0]);
    let reclaim = |pages: u8, gives_up: u8, then: u8| [12, pages, gives_up, then];
    let while_reading = |then: &[u8]| [&[9, 3, 5, 0, 60, 0, 100, 1, 7, 1], then].concat();
    let churn = [
        &fill[..],
        &scatter(3),
        &compact,
        &read,
        &reclaim(20, 0, 0),
        &while_reading(&[3]),
        &fill,
        &reclaim(100, 0x55, 0),
        &release,
        &sweeps,
    ]
    .concat();
    let chunks =
        [&sweeps[..], &sweeps, &fill, &scatter(14), &release, &compact, &while_reading(&[3])].concat();
    let limited = [
        &fill[..],
        &[14, 0, 1],
        &scatter(2),
        &fill,
        &compact,
        &reclaim(30, 0, 200),
        &[14, 90, 4],
        &sweeps,
        &reclaim(30, 1, 230),
        &compact,
        &[14, 0, 0],
        &fill,
        &reclaim(200, 2, 250),
    ]
    .concat();
    // Design, chain size, address space, objects, run cache.
    let with = |settings: [u8; 5], ops: &[u8]| [&settings, ops].concat();
    let mut seeds: Vec<Vec<u8>> = (0..DESIGNS.len() as u8)
        .map(|design| {
            with([design, 12 - design, 0, 0, design % 5], [&churn, &chunks, &limited][design as usize % 3])
        })
        .collect();
    seeds.extend([
        with([0, 4, 0, 0, 3], &chunks),
        with([0, 12, 3, 0, 3], &churn),
        with([0, 12, 2, 0, 4], &limited),
        with([1, 12, 0, 2, 0], &churn),
        // Few objects are left in each of many zspages of the same classes.
        with(
            [1, 11, 0, 0, 1],
            &[&sweeps[..], &sweeps, &fill, &[6, 14, 1, 0], &fill[15..], &[6, 14, 1, 1], &release, &compact]
                .concat(),
        ),
    ]);
    seeds
}
