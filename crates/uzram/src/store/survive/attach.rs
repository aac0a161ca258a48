//! Restores a store from the memory that another process left, as docs/internals/survival.md tells.

use std::collections::HashSet;
use std::ops::Range;
use std::thread::Builder;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Counter;
use crate::base::thread::{OtherCpus, share_out};
use crate::base::units::{PAGE_SIZE, PageNo};
use crate::zsmalloc::{Attach, Location, Settled};

use super::super::Store;
use super::super::slot::{Backed, Contents};
use super::super::stats::Share;
use super::super::writeback::log::Log;

/// Pages of the slot table that a thread takes at a time.
const UNIT_PAGES: usize = if cfg!(test) { 1 } else { 32 };
/// Such units that are gone through together. Their objects take 10 MiB while they are sorted.
const UNITS_AT_ONCE: usize = if cfg!(test) { 2 } else { 64 };
/// Handles, and objects, that are prefetched together, so that their cache misses overlap.
const AHEAD: usize = 48;

/// What [`Store::attach`](super::super::Store::attach) found in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attached {
    /// Pages that hold something, lost ones included.
    pub pages: u64,
    /// Pages found damaged, now or by an earlier attach: their reads fail until they are written.
    pub pages_lost: u64,
}

/// How far an attach is. Its other steps take about as long as this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttachProgress {
    /// Slots that were gone through so far. Starts anew if objects that were found have to be given up.
    pub slots: u64,
    /// Slots to go through: those in memory.
    pub of_slots: u64,
}

pub(in crate::store) type Progress = dyn Fn(AttachProgress) + Send + Sync;

#[derive(Default)]
struct Found {
    counts: Share,
    /// Pages with objects in memory: [last use, in seconds u32 | page u32].
    uses: Vec<u64>,
    huge: Vec<u32>,
    /// Pages that name an object which is not there.
    lost: Vec<u32>,
}

/// Returns whether an object belongs to its handle and page, and has its length.
type Keeps<'a> = dyn Fn(Location, u32, u32, usize) -> bool + Sync + 'a;

pub(in crate::store) fn attach(store: &Store, progress: &Progress) -> Result<()> {
    store.arena.find_resident()?;
    let claims = store.pool.attach()?;
    let ranges = store.slots.resident_ranges()?;
    let claim = |object: Location, handle, owner, len| store.pool.claim(&claims, object, handle, owner, len);
    let mut found = go_through(store, progress, &ranges, &claim)?;
    let settled = store.pool.settle(&claims)?;
    if settled.has_lost() {
        let keeps = |_: Location, handle, _, _| !store.pool.is_lost(&claims, &settled, handle);
        found = go_through(store, progress, &ranges, &keeps)?;
    }
    store.arena.end_adoption();
    grow(store)?;
    let uses: Vec<_> = found.iter_mut().map(|found| std::mem::take(&mut found.uses)).collect();
    let cpus = OtherCpus::new();
    std::thread::scope(|scope| {
        let lru = store.lru.as_ref().map(|lru| {
            let adopt = move || {
                cpus.iter().for_each(|cpus| cpus.move_to(0));
                lru.adopt(by_last_use(uses));
            };
            Builder::new().spawn_scoped(scope, adopt).map_err(|error| {
                Error::new(ErrorKind::NoMemory, format!("cannot start a thread to attach a store: {error}"))
            })
        });
        rebuild(store, &claims, &settled, &found)?;
        if let Some(lru) = lru {
            lru?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        Ok::<_, Error>(())
    })?;
    if let Some(backing) = &store.backing {
        backing.log.table.end_adoption();
        backing.allowance.restore();
    }
    found.iter().for_each(|found| store.counters.local().add_all(&found.counts));
    Ok(())
}

/// Refills the reserve of an arena that has one: rebuilding takes memory.
fn grow(store: &Store) -> Result<()> {
    if !store.arena.has_reserve() {
        return Ok(());
    }
    store.arena.refill(|pages| store.pool.populate_for(pages))
}

fn rebuild(store: &Store, claims: &Attach, settled: &Settled, found: &[Found]) -> Result<()> {
    store.pool.rebuild(claims, settled, &|| grow(store))?;
    found.iter().flat_map(|found| &found.huge).for_each(|handle| store.pool.name_huge(*handle));
    Ok(())
}

/// Adopts all slots in these ranges of pages of the slot table, with a thread per CPU: each time some slots,
/// then the objects that they name, by ranges of addresses.
fn go_through(
    store: &Store,
    progress: &Progress,
    ranges: &[Range<usize>],
    keeps: &Keeps<'_>,
) -> Result<Vec<Found>> {
    if let Some(backing) = &store.backing {
        backing.log.table.begin_adoption()?;
    }
    let units: Vec<Range<usize>> = ranges
        .iter()
        .flat_map(|range| {
            let starts = range.clone().step_by(UNIT_PAGES);
            starts.map(|start| start..range.end.min(start + UNIT_PAGES))
        })
        .collect();
    let slots_of = |table_page| {
        let slots = store.slots.of_table_page(table_page);
        slots.end - slots.start
    };
    let of_slots = units.iter().flat_map(Clone::clone).map(slots_of).sum();
    let (done, end) = (Counter::new(0), store.arena.used_end());
    let mut all = Vec::new();
    for units in units.chunks(UNITS_AT_ONCE) {
        let looked_at = share_out(units.len(), |next| {
            let (mut found, mut named) = (Found::default(), ByAddress::new(end));
            for unit in next {
                units[unit].clone().for_each(|page| look_at(store, page, &mut found, &mut named));
                let slots: u64 = units[unit].clone().map(slots_of).sum();
                progress(AttachProgress { slots: done.add(slots), of_slots });
            }
            found.uses.sort_unstable();
            (found, named)
        });
        let (mut found, named): (Vec<_>, Vec<_>) = looked_at.into_iter().unzip();
        let claimed = share_out(RANGES, |next| {
            let mut found = Found::default();
            for range in next {
                named.iter().for_each(|named| claim(store, named.of(range), keeps, &mut found));
            }
            found
        });
        let lost: HashSet<u32> = claimed.iter().flat_map(|found| &found.lost).copied().collect();
        if !lost.is_empty() {
            found.iter_mut().for_each(|found| found.uses.retain(|used| !lost.contains(&(*used as u32))));
        }
        all.extend(found);
        all.extend(claimed);
    }
    Ok(all)
}

/// Adopts the slots of a page of the slot table. Collects the objects that they name.
fn look_at(store: &Store, table_page: usize, found: &mut Found, named: &mut ByAddress) {
    let slots = store.slots.of_table_page(table_page);
    let mut holds_something = false;
    let mut group: [(PageNo, Contents); AHEAD] = [(PageNo(0), Contents::Empty); AHEAD];
    let mut pages = slots.map(PageNo::from_number).filter_map(|page| {
        let contents = store.slots.adopt(page);
        (contents != Contents::Empty).then_some((page, contents))
    });
    loop {
        let mut len = 0;
        for (place, (page, contents)) in group.iter_mut().zip(pages.by_ref()) {
            if let Contents::Stored { handle, .. } = contents {
                store.pool.prefetch_handle(handle);
            }
            *place = (page, contents);
            len += 1;
        }
        group[..len].iter().for_each(|(page, contents)| note(store, *page, contents, found, named));
        holds_something |= len > 0;
        if len < AHEAD {
            break;
        }
    }
    store.slots.end_adoption_of(table_page, holds_something);
}

/// Counts the contents of a slot, or collects the object that it names.
fn note(store: &Store, page: PageNo, contents: &Contents, found: &mut Found, named: &mut ByAddress) {
    let is_there = match *contents {
        Contents::Empty | Contents::Same(_) | Contents::Lost => true,
        Contents::Stored { handle, len, priority, .. } => {
            let object = store.pool.find(handle).filter(|_| store.codec_of(priority).is_some());
            if let Some(object) = object {
                named.push(Named { object, handle, owner: page, len });
                if store.lru.is_some() {
                    found.uses.push(u64::from(store.slots.used_s(page)) << u32::BITS | u64::from(page.0));
                }
                return;
            }
            false
        }
        Contents::Backed(Backed { place, len, priority }) => {
            let log = store.backing.as_ref().map(|backing| &backing.log);
            let fits = |log: &Log| log.table.adopt(place, log.footprint(usize::from(len)));
            store.codec_of(priority).is_some() && log.is_some_and(fits)
        }
    };
    if is_there {
        found.counts.replaced(&Contents::Empty, contents);
    } else {
        lose(store, page, found);
    }
}

/// Claims objects. The contents of pages whose object `keeps` does not know are lost.
fn claim(store: &Store, objects: &[Named], keeps: &Keeps<'_>, found: &mut Found) {
    for objects in objects.chunks(AHEAD) {
        objects.iter().for_each(|named| store.pool.prefetch_found(named.object));
        for &Named { object, handle, owner, len } in objects {
            if !keeps(object, handle, owner.0, usize::from(len)) {
                lose(store, owner, found);
                found.lost.push(owner.0);
                continue;
            }
            let contents = Contents::Stored { handle, len, checksum: 0, priority: 0 };
            found.counts.replaced(&Contents::Empty, &contents);
            if usize::from(len) == PAGE_SIZE {
                found.huge.push(handle);
            }
        }
    }
}

fn lose(store: &Store, page: PageNo, found: &Found) {
    store.slots.lose(page);
    found.counts.replaced(&Contents::Empty, &Contents::Lost);
}

/// Returns the pages of sorted lists, the least recently used first.
fn by_last_use(mut uses: Vec<Vec<u64>>) -> impl Iterator<Item = u32> {
    let mut all = uses.pop().unwrap_or_default();
    for more in uses {
        all.extend(more);
    }
    // The sort detects the sorted runs.
    all.sort();
    all.into_iter().map(|used| used as u32)
}

const RANGES: usize = 256;
/// The fewest pages of a range: their entries in the page tables take a page.
const LEAST_PAGES: u32 = 512;

#[derive(Clone, Copy)]
struct Named {
    object: Location,
    handle: u32,
    owner: PageNo,
    len: u16,
}

/// The objects that slots name, sorted by where they are: slots that follow each other can name objects
/// anywhere, and to look at these in the slots' order takes a miss of the TLB and several of the cache for
/// each.
struct ByAddress {
    ranges: [Vec<Named>; RANGES],
    /// Each range has two to the power of this pages.
    order: u32,
}

impl ByAddress {
    /// Makes ranges for the addresses of the arena's first pages.
    fn new(pages: u32) -> Self {
        let range_pages = pages.div_ceil(RANGES as u32).max(LEAST_PAGES).next_power_of_two();
        ByAddress { ranges: [const { Vec::new() }; RANGES], order: range_pages.trailing_zeros() }
    }

    fn push(&mut self, named: Named) {
        let range = (named.object.page >> self.order) as usize;
        // Objects beyond the pages are in the last range: they are not there.
        self.ranges[range.min(RANGES - 1)].push(named);
    }

    fn of(&self, range: usize) -> &[Named] {
        &self.ranges[range]
    }
}
