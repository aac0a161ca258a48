//! Which pages a pager manages: their numbers, by which all tables know them, and their addresses, which a
//! program may change (mremap(2)).
//!
//! Pages whose addresses and numbers follow each other are one part. What is new gets the numbers behind
//! its lower neighbour if these are free, and else the first that are: so that parts are few, and tables
//! with an entry for each number take memory for what was ever used.
//!
//! Threads change memory one after the other, and tell of it later, in any order: what has come to an address
//! may be told before what left it. So who is at an address is certain when all is told ([`Map::settled`]),
//! if nothing came to an address and left it again before those that were there had told.

use std::collections::BTreeMap;
use std::ops::Range;

use uzram::units::PAGE_SHIFT;

/// Pages next to each other, by the address and the number of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) address: usize,
    pub(crate) first: u64,
    pub(crate) pages: usize,
}

impl Part {
    pub(crate) fn bytes(self) -> usize {
        self.pages << PAGE_SHIFT
    }

    pub(crate) fn end(self) -> usize {
        self.address + self.bytes()
    }

    pub(crate) fn addresses(self) -> Range<usize> {
        self.address..self.end()
    }

    pub(crate) fn numbers(self) -> Range<u64> {
        self.first..self.first + self.pages as u64
    }

    /// Returns the pages from the `nth` on, at most so many.
    pub(crate) fn from(self, nth: usize, most: usize) -> Part {
        Part {
            address: self.address + (nth << PAGE_SHIFT),
            first: self.first + nth as u64,
            pages: most.min(self.pages - nth),
        }
    }

    /// Returns all pages, up to so many at a time.
    pub(crate) fn chunks(self, most: usize) -> impl Iterator<Item = Part> {
        (0..self.pages).step_by(most).map(move |nth| self.from(nth, most))
    }

    /// Returns what lies in a range of addresses.
    pub(crate) fn within(self, range: &Range<usize>) -> Option<Part> {
        let (from, to) = (self.address.max(range.start), self.end().min(range.end));
        (from < to).then(|| self.from((from - self.address) >> PAGE_SHIFT, (to - from) >> PAGE_SHIFT))
    }

    /// Returns what lies before a piece of this part, and what lies behind it.
    fn around(self, piece: Part) -> impl Iterator<Item = Part> {
        let before = (piece.address - self.address) >> PAGE_SHIFT;
        let behind = before + piece.pages;
        let rest = [self.from(0, before), self.from(behind, self.pages - behind)];
        rest.into_iter().filter(|rest| rest.pages > 0)
    }
}

#[derive(Default)]
pub(crate) struct Map {
    /// By the addresses of their first pages. No two overlap.
    parts: BTreeMap<usize, Part>,
    /// Which numbers are taken: how many from each on, and their address; `None` if they were removed.
    numbers: BTreeMap<u64, (usize, Option<usize>)>,
    /// What was removed as others have taken its place, before the kernel told; the oldest first.
    displaced: Vec<Part>,
    /// Where those are that came while the kernel had not told of all changes.
    arrived: Vec<Range<usize>>,
    /// Ranges that pages were moved away from: the kernel tells later that they are not mapped any more.
    vacated: Vec<Range<usize>>,
    /// Something in here may not be what is mapped. No page is taken until that was tried.
    pub(crate) is_doubtful: bool,
    pages: u64,
}

impl Map {
    /// Returns a map of nothing, for up to so many pages.
    pub(crate) fn new(pages: u64) -> Map {
        Map { pages, ..Map::default() }
    }

    /// Returns the pages from an address on, as far as they are one part, and at most so many.
    pub(crate) fn at(&self, address: usize, most: usize) -> Option<Part> {
        let (_, part) = self.parts.range(..=address).next_back()?;
        (address < part.end()).then(|| part.from((address - part.address) >> PAGE_SHIFT, most))
    }

    /// Returns the pages from a number on, as far as they are one part, and at most so many.
    pub(crate) fn of(&self, number: u64, most: usize) -> Option<Part> {
        let (first, (pages, address)) = self.numbers.range(..=number).next_back()?;
        let part = Part { address: (*address)?, first: *first, pages: *pages };
        part.numbers().contains(&number).then(|| part.from((number - part.first) as usize, most))
    }

    /// Returns what lies in a range of addresses, in ascending order.
    pub(crate) fn within(&self, range: Range<usize>) -> Vec<Part> {
        self.meeting(&range).into_iter().map(|(_, piece)| piece).collect()
    }

    /// Returns the parts of which something lies in a range of addresses, with that piece.
    fn meeting(&self, range: &Range<usize>) -> Vec<(Part, Part)> {
        let before = self.parts.range(..range.start).next_back();
        let parts = before.into_iter().chain(self.parts.range(range.clone()));
        parts.filter_map(|(_, part)| Some((*part, part.within(range)?))).collect()
    }

    /// Returns the ranges of addresses in a range that are not in here.
    pub(crate) fn gaps(&self, range: Range<usize>) -> Vec<Range<usize>> {
        without(&range, self.within(range.clone()).into_iter().map(Part::addresses).collect())
    }

    /// Returns all parts, in ascending order.
    pub(crate) fn all(&self) -> impl Iterator<Item = Part> {
        self.parts.values().copied()
    }

    /// Takes numbers for pages at an address where none are. `None`: there are not enough left.
    pub(crate) fn insert(&mut self, address: usize, pages: usize) -> Option<Part> {
        debug_assert!(pages > 0 && self.within(address..address + (pages << PAGE_SHIFT)).is_empty());
        let before = self.parts.range(..address).next_back().map(|(_, part)| *part);
        let before = before.filter(|part| part.end() == address);
        let next = before.map(|part| part.numbers().end).filter(|first| self.is_free(*first, pages));
        let first = next.or_else(|| self.find(pages))?;
        let part = Part { address, first, pages };
        self.put(part);
        Some(part)
    }

    fn is_free(&self, first: u64, pages: usize) -> bool {
        let end = first + pages as u64;
        let before = self.numbers.range(..end).next_back();
        end <= self.pages && before.is_none_or(|(from, (pages, _))| from + *pages as u64 <= first)
    }

    /// Finds the first free numbers for so many pages.
    fn find(&self, pages: usize) -> Option<u64> {
        let mut free = 0;
        for (first, (taken, _)) in &self.numbers {
            if first - free >= pages as u64 {
                break;
            }
            free = first + *taken as u64;
        }
        self.is_free(free, pages).then_some(free)
    }

    /// Enters a part, joined with its neighbours where these go on in addresses and numbers.
    fn put(&mut self, mut part: Part) {
        if let Some(before) = self.parts.range(..part.address).next_back().map(|(_, part)| *part)
            && before.end() == part.address
            && before.numbers().end == part.first
        {
            self.take(before);
            part = Part { pages: before.pages + part.pages, ..before };
        }
        if let Some(after) = self.parts.get(&part.end()).copied()
            && after.first == part.numbers().end
        {
            self.take(after);
            part.pages += after.pages;
        }
        self.enter(part);
    }

    fn enter(&mut self, part: Part) {
        self.parts.insert(part.address, part);
        self.numbers.insert(part.first, (part.pages, Some(part.address)));
    }

    fn take(&mut self, part: Part) {
        self.parts.remove(&part.address);
        self.numbers.remove(&part.first);
    }

    /// Removes what lies in a range of addresses, and returns it. Its numbers are taken until [`Map::free`].
    pub(crate) fn remove(&mut self, range: Range<usize>) -> Vec<Part> {
        let mut gone = Vec::new();
        for (whole, piece) in self.meeting(&range) {
            self.take(whole);
            whole.around(piece).for_each(|rest| self.enter(rest));
            self.close(piece);
            gone.push(piece);
        }
        gone
    }

    fn close(&mut self, part: Part) {
        self.numbers.insert(part.first, (part.pages, None));
    }

    /// Frees the numbers of a part that was removed.
    pub(crate) fn free(&mut self, part: Part) {
        let freed = self.numbers.remove(&part.first);
        debug_assert_eq!(freed, Some((part.pages, None)));
    }

    /// Removes what has left a range of addresses, and returns it, as [`Map::remove`]. What the range still
    /// has then may have left, too: whether it is mapped can be seen when all is told.
    pub(crate) fn unmapped(&mut self, range: Range<usize>) -> Vec<Part> {
        if let Some(at) = self.vacated.iter().position(|vacated| *vacated == range) {
            self.vacated.remove(at);
            return Vec::new();
        }
        self.depart(range)
    }

    /// Gives pages other addresses. What is there has left, and was not told of yet.
    pub(crate) fn rename(&mut self, range: Range<usize>, to: usize) {
        let moved = self.depart(range.clone());
        let target = to..to + range.len();
        let there = self.remove(target.clone());
        self.displaced.extend(there);
        // Those that have come there before, as far as they stay, are as all others.
        self.arrived.retain(|other| !meet(other, &target));
        self.arrived.push(target);
        for part in moved {
            self.numbers.remove(&part.first);
            self.put(Part { address: part.address - range.start + to, ..part });
        }
        self.vacated.push(range);
    }

    /// Returns whether all was told when [`Map::settled`] was called, and nothing has moved since.
    pub(crate) fn is_settled(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Notes that the kernel has told of all changes. Returns what has left, though it was not told.
    pub(crate) fn settled(&mut self) -> Vec<Part> {
        self.arrived.clear();
        self.vacated.clear();
        std::mem::take(&mut self.displaced)
    }

    /// Removes what has left a range of addresses, and returns it. Whose place is taken has left first. What
    /// has arrived lately stays if there is anything else: most likely it came where something was that is
    /// not in here, and that has left with the rest.
    fn depart(&mut self, range: Range<usize>) -> Vec<Part> {
        let mut gone = self.take_displaced(&range);
        let others = gone.iter().map(|part| part.addresses()).chain(self.arrived.iter().cloned());
        for rest in without(&range, others.filter(|other| meet(other, &range)).collect()) {
            gone.extend(self.remove(rest));
        }
        if gone.is_empty() { self.remove(range) } else { gone }
    }

    /// Takes those out that were displaced from a range of addresses; of several at one address the oldest.
    fn take_displaced(&mut self, range: &Range<usize>) -> Vec<Part> {
        let mut taken: Vec<Part> = Vec::new();
        for part in std::mem::take(&mut self.displaced) {
            let is_first =
                |piece: &Part| !taken.iter().any(|other| meet(&other.addresses(), &piece.addresses()));
            let Some(piece) = part.within(range).filter(is_first) else {
                self.displaced.push(part);
                continue;
            };
            self.numbers.remove(&part.first);
            self.displaced.extend(part.around(piece));
            part.around(piece).chain([piece]).for_each(|part| self.close(part));
            taken.push(piece);
        }
        taken
    }
}

/// Returns whether two ranges of addresses have any in common.
pub(crate) fn meet(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Returns what is left of a range of addresses without others.
fn without(range: &Range<usize>, mut others: Vec<Range<usize>>) -> Vec<Range<usize>> {
    others.sort_unstable_by_key(|other| other.start);
    let (mut rest, mut from) = (Vec::new(), range.start);
    for other in others {
        let to = other.start.min(range.end);
        rest.extend((from < to).then_some(from..to));
        from = from.max(other.end);
    }
    rest.extend((from < range.end).then_some(from..range.end));
    rest
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use uzram::random::Random;

    use super::*;

    /// How many addresses there are, in pages, how many numbers, and how many threads.
    const PLACES: usize = 64;
    const NUMBERS: u64 = 48;
    const THREADS: usize = 4;

    /// A page of the program, as the kernel has it, and the number that the map gave it.
    #[derive(Clone, Copy)]
    struct Page {
        thread: usize,
        mapping: u64,
        is_registered: bool,
        number: Option<u64>,
    }

    /// What a thread has done, and has not told yet. `Left` is the end of a move.
    #[derive(Clone, Copy, PartialEq)]
    enum What {
        Unmapped,
        Moved(usize),
        Left,
    }

    /// Threads that change their memory one after the other, and tell of it later.
    struct World {
        random: Random,
        /// What has come where others have left may leave before that was told.
        is_hasty: bool,
        kernel: Vec<Option<Page>>,
        /// What is untold of which range, and whether the map knows some of its pages.
        events: [VecDeque<(What, Range<usize>, bool)>; THREADS],
        map: Map,
        /// Numbers that are not free, and what the map has given back.
        taken: BTreeSet<u64>,
        gone: Vec<Part>,
        /// What is to be looked up when all is told, and whether it is new.
        unproven: Vec<(Part, bool)>,
    }

    impl World {
        fn pages(&mut self, range: &Range<usize>) -> &mut [Option<Page>] {
            &mut self.kernel[range.start >> PAGE_SHIFT..range.end >> PAGE_SHIFT]
        }

        fn any(&mut self, range: &Range<usize>, what: impl Fn(&Page) -> bool) -> bool {
            self.pages(range).iter().flatten().any(what)
        }

        /// Returns some pages of a mapping of a thread's.
        fn piece(&mut self, thread: usize) -> Option<Range<usize>> {
            let (from, most) = (self.random.below(PLACES), 1 + self.random.below(12));
            let first = self.kernel[from].filter(|page| page.thread == thread)?;
            let is_of = |page: &&Option<Page>| page.is_some_and(|page| page.mapping == first.mapping);
            let pages = self.kernel[from..].iter().take(most).take_while(is_of).count();
            Some(from << PAGE_SHIFT..(from + pages) << PAGE_SHIFT)
        }

        /// Returns addresses where nothing is: as in the kernel, often the first.
        fn gap(&mut self, len: usize) -> Option<Range<usize>> {
            let from = self.random.below(2) * self.random.below(PLACES);
            let mut gaps = (from << PAGE_SHIFT..PLACES << PAGE_SHIFT).step_by(1 << PAGE_SHIFT);
            gaps.find_map(|from| (!self.any(&(from..from + len), |_| true)).then_some(from..from + len))
        }

        /// Returns whether all is told of a range that `counts`, and is proven.
        fn is_clear(&self, range: &Range<usize>, counts: impl Fn(What, bool) -> bool) -> bool {
            let mut events = self.events.iter().flatten();
            let is_untold = events.any(|(what, at, is_known)| meet(at, range) && counts(*what, *is_known));
            let is_unproven = self.unproven.iter().any(|(part, _)| meet(&part.addresses(), range));
            self.is_hasty || !is_untold && !is_unproven
        }

        fn note(&mut self, thread: usize, range: &Range<usize>, what: What) {
            if self.any(range, |page| page.is_registered) {
                let is_known = self.any(range, |page| page.number.is_some());
                self.events[thread].push_back((what, range.clone(), is_known));
            }
        }

        fn unmap(&mut self, thread: usize, range: &Range<usize>, what: What) {
            self.note(thread, range, what);
            self.pages(range).fill(None);
        }

        /// Has a thread change its memory, if it may.
        fn act(&mut self, thread: usize) -> Option<()> {
            let (how, mapping) = (self.random.below(8), self.random.next());
            if how < 2 {
                let len = (1 + self.random.below(12)) << PAGE_SHIFT;
                let page = Page { thread, mapping, is_registered: false, number: None };
                return self.gap(len).map(|to| self.pages(&to).fill(Some(page)));
            }
            let from = self.piece(thread)?;
            let last = self.kernel[(from.end >> PAGE_SHIFT) - 1]?;
            if how < 4 {
                return self.is_clear(&from, |_, _| true).then(|| self.unmap(thread, &from, What::Unmapped));
            } else if how == 4 {
                let behind = self.kernel[from.end >> PAGE_SHIFT..].iter_mut().take(6);
                let free = behind.take_while(|page| page.is_none());
                free.for_each(|page| *page = Some(Page { number: None, ..last }));
                return None;
            }
            // It shrinks, or replaces what is there, or leaves empty pages behind (MREMAP_DONTUNMAP).
            let less = if how == 5 { self.random.below(from.len() >> PAGE_SHIFT) << PAGE_SHIFT } else { 0 };
            let (source, tail) = (from.start..from.end - less, from.end - less..from.end);
            let to = if how == 6 { self.piece(thread)? } else { self.gap(source.len())? };
            let is_other = |page: &Page| page.is_registered != last.is_registered;
            if to.len() < source.len() || meet(&to, &from) || self.any(&from, is_other) {
                return None;
            }
            let to = to.start..to.start + source.len();
            if self.is_clear(&to, |_, is_known| how == 6 || !is_known)
                && self.is_clear(&from, |what, _| how == 5 || what != What::Left)
            {
                self.unmap(thread, &to, What::Unmapped);
                self.note(thread, &source, What::Moved(to.start));
                let moved = self.pages(&source).to_vec();
                self.pages(&to).copy_from_slice(&moved);
                self.pages(&to).iter_mut().flatten().for_each(|page| page.mapping = mapping);
                self.unmap(thread, &tail, What::Unmapped);
                match how {
                    7 => self.pages(&source).fill(Some(Page { mapping: !mapping, number: None, ..last })),
                    _ => self.unmap(thread, &source, What::Left),
                }
            }
            None
        }

        /// Tells the map of a thread's first event.
        fn tell(&mut self, thread: usize) {
            let Some((what, range, _)) = self.events[thread].pop_front() else { return };
            match what {
                What::Moved(to) => self.map.rename(range.clone(), to),
                _ => self.gone.extend(self.map.unmapped(range.clone())),
            }
            self.unproven.extend(self.map.within(range).into_iter().map(|part| (part, false)));
        }

        /// Has the map know that all is told, and looks up what is not proven.
        fn settle(&mut self) {
            self.gone.extend(self.map.settled());
            for (part, is_new) in std::mem::take(&mut self.unproven) {
                for number in part.numbers() {
                    let Some(part) = self.map.of(number, 1) else { continue };
                    let page = self.pages(&part.addresses())[0].as_mut();
                    match page.filter(|page| page.is_registered) {
                        Some(page) => page.number = page.number.or(is_new.then_some(number)),
                        None => self.gone.extend(self.map.remove(part.addresses())),
                    }
                }
            }
        }

        /// Has some pages of a mapping managed. Rarely something is untold.
        fn manage(&mut self) -> Option<()> {
            let is_told = self.events.iter().all(VecDeque::is_empty);
            (is_told || self.random.below(16) == 0).then_some(())?;
            is_told.then(|| self.settle());
            let thread = self.random.below(THREADS);
            let range = self.piece(thread)?;
            self.pages(&range).iter_mut().flatten().for_each(|page| page.is_registered = true);
            for gap in self.map.gaps(range) {
                let pages = gap.len() >> PAGE_SHIFT;
                let Some(part) = self.map.insert(gap.start, pages) else {
                    assert!(self.taken.len() + pages > NUMBERS as usize / 4, "there is room");
                    continue;
                };
                assert!(part.addresses() == gap && part.numbers().end <= NUMBERS);
                assert!(part.numbers().all(|number| self.taken.insert(number)), "{part:?} is taken");
                self.unproven.push((part, true));
            }
            is_told.then(|| self.settle())
        }

        /// Tells all. Returns whether the map agrees with the kernel then.
        fn rest(&mut self) -> bool {
            while self.events.iter().any(|events| !events.is_empty()) {
                let thread = self.random.below(THREADS);
                self.tell(thread);
            }
            // The pager may notice it too late.
            if self.random.below(4) == 0 {
                return true;
            }
            self.settle();
            let parts: Vec<Part> = self.map.all().collect();
            let next = |part: Part| (part.end(), part.numbers().end);
            let joins = |pair: &[Part]| next(pair[0]) == (pair[1].address, pair[1].first);
            assert!(!parts.windows(2).any(joins), "neighbours are one part");
            let mut all: Vec<_> = parts.iter().chain(&self.gone).flat_map(|part| part.numbers()).collect();
            all.sort_unstable();
            assert!(all.iter().eq(&self.taken), "each is here, or was given back once");
            for part in self.gone.drain(..) {
                self.map.free(part);
                self.taken.retain(|number| !part.numbers().contains(number));
            }
            self.kernel.iter().enumerate().all(|(place, page)| {
                let found = self.map.at(place << PAGE_SHIFT, usize::MAX);
                assert_eq!(found, found.and_then(|part| self.map.of(part.first, usize::MAX)));
                found.map(|part| part.first) == page.and_then(|page| page.number)
            })
        }

        /// Has the map agree 100 times; in a hurry, until it does not.
        fn run(seed: u64, is_hasty: bool) {
            let mut world = World {
                random: Random::new(seed),
                is_hasty,
                kernel: vec![None; PLACES + 20],
                events: Default::default(),
                map: Map::new(NUMBERS),
                taken: BTreeSet::new(),
                gone: Vec::new(),
                unproven: Vec::new(),
            };
            for _ in 0..100 {
                for _ in 0..world.random.below(32) {
                    let thread = world.random.below(THREADS);
                    match world.random.below(3) {
                        _ if world.events[thread].is_empty() => _ = world.act(thread),
                        0 => world.tell(thread),
                        _ => {}
                    }
                    world.manage();
                }
                if !world.rest() {
                    assert!(is_hasty, "the map does not agree");
                    return;
                }
                (0..4).for_each(|_| _ = world.manage());
            }
        }
    }

    #[test]
    fn map_agrees_with_the_kernel_when_all_is_told() {
        for seed in 0..1100 {
            // Ambiguous events may have the map be wrong, and nothing worse.
            let ran = std::panic::catch_unwind(|| World::run(seed, seed >= 1000));
            assert!(ran.is_ok(), "seed {seed}");
        }
    }
}
