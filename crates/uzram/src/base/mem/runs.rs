//! The run allocator: tracks taken pages and their accounts, and finds free runs, by bitmaps and
//! tournament trees. It never touches the pages. Protected by the arena's lock.
//!
//! Pages are taken in runs of 1..=16 within a *group* of 64, one word of the bitmap: a run never crosses a
//! group's border, so a search is a few shifts. The leftover at the borders is address space, not memory.
//!
//! Groups form *chunks*. A chunk belongs to the account that took its first run until it is free again:
//! movable and unmovable pages never share a chunk, as the kernel groups pages by mobility. Each account has
//! a tree of the longest free run (at most 16) of each of its chunks, which finds the lowest chunk with room
//! in log2(chunks) steps. Free chunks have a tree of their own, and are taken last.

use super::tree::Tree;
use crate::base::error::{Error, ErrorKind, Result};

/// The account that a page is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// Pages of zspages, which can move.
    Pool,
    /// Pages of slab caches (handles, descriptors), which cannot.
    Slab,
}

impl Account {
    pub(super) const ALL: [Account; 2] = [Account::Pool, Account::Slab];
}

/// Touches the whole capacity of an empty vector; returns its bytes.
pub(super) fn touch<T: Copy + Default>(empty: &mut Vec<T>) -> usize {
    empty.resize(empty.capacity(), T::default());
    // Keeps the compiler from removing the writes.
    std::hint::black_box(&mut *empty);
    empty.clear();
    empty.capacity() * size_of::<T>()
}

/// Pages of the longest run.
pub const MAX_RUN_PAGES: usize = 16;
/// Pages of a chunk, the unit in which an arena grows: 2 MiB, the huge page of x86-64.
pub const CHUNK_PAGES: u32 = if cfg!(loom) { 64 } else { 512 };
pub(super) const GROUP_PAGES: u32 = u64::BITS;
pub(super) const CHUNK_GROUPS: usize = (CHUNK_PAGES / GROUP_PAGES) as usize;

/// The taken pages, a bit each, and indexes derived from them.
#[derive(Default)]
pub(super) struct Runs {
    /// A bit per page, set if it is taken; a word per group.
    taken: Vec<u64>,
    /// The longest free run of each group, at most 16.
    longest: Vec<u8>,
    chunks: Vec<Chunk>,
    live: [Live; Account::ALL.len()],
    /// For each account the longest free run of each chunk; 0 for chunks of other accounts, and for
    /// hidden ones.
    room: [Tree; Account::ALL.len()],
    /// 1 for each free chunk that is neither hidden nor absent.
    free_chunks: Tree,
    free_count: usize,
    /// 1 for each absent chunk that no thread is filling or emptying. Without a reserve there are none.
    absent_chunks: Tree,
}

#[derive(Clone, Copy, Default)]
struct Chunk {
    /// `Some` while a page of the chunk is taken.
    owner: Option<Account>,
    taken_pages: u16,
    hidden: bool,
    absent: bool,
}

#[derive(Clone, Copy, Default)]
struct Live {
    runs: u64,
    pages: u64,
}

/// The figures of a chunk for choosing chunks to evacuate.
pub(super) struct Survey {
    pub(super) chunk: u32,
    pub(super) taken_pages: u16,
    /// Pages that can move into the chunk if it stays.
    pub(super) room_pages: u16,
}

/// Returns the bits of `pages` pages from `page` on, within their group.
#[inline]
pub(super) fn mask(page: u32, pages: u32) -> u64 {
    debug_assert!(pages >= 1 && page % GROUP_PAGES + pages <= GROUP_PAGES, "runs stay in their group");
    (u64::MAX >> (u64::BITS - pages)) << (page % GROUP_PAGES)
}

#[inline]
pub(super) fn group_of(page: u32) -> usize {
    (page / GROUP_PAGES) as usize
}

#[inline]
pub(super) fn groups_of(chunk: usize) -> std::ops::Range<usize> {
    chunk * CHUNK_GROUPS..(chunk + 1) * CHUNK_GROUPS
}

/// Returns a bit for each page at which `pages` free pages in a row start.
fn starts(taken: u64, pages: u32) -> u64 {
    let (mut free, mut have) = (!taken, 1);
    while have < pages {
        let step = have.min(pages - have);
        free &= free >> step;
        have += step;
    }
    free
}

/// Returns the number of pages that lie in free runs of at least `pages` pages.
fn room(taken: u64, pages: u32) -> u32 {
    let (mut room, mut have) = (starts(taken, pages), 1);
    while have < pages {
        let step = have.min(pages - have);
        room |= room << step;
        have += step;
    }
    room.count_ones()
}

fn longest_run(taken: u64) -> u8 {
    if starts(taken, MAX_RUN_PAGES as u32) != 0 {
        return MAX_RUN_PAGES as u8;
    }
    let mut free = !taken;
    let mut longest = 0;
    while free != 0 {
        free &= free >> 1;
        longest += 1;
    }
    longest
}

impl Runs {
    pub(super) fn groups(&self) -> usize {
        self.taken.len()
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn is_free(&self, chunk: usize) -> bool {
        self.chunks[chunk].taken_pages == 0
    }

    pub(super) fn taken(&self, group: usize) -> u64 {
        self.taken[group]
    }

    /// Adds a free chunk after the last one. Fails with `NoMemory` when the tables cannot grow.
    pub(super) fn add_chunk(&mut self) -> Result<()> {
        self.make_room(1)?;
        let chunk = self.push(Chunk::default());
        self.refresh(chunk);
        Ok(())
    }

    /// Makes room for `chunks` chunks, so that adding them allocates nothing; returns the bytes that the
    /// tables take. Fails with `NoMemory` when the tables cannot grow.
    pub(super) fn reserve(&mut self, chunks: usize) -> Result<usize> {
        debug_assert!(self.chunks.is_empty());
        self.make_room(chunks)?;
        let trees = self.room.iter().chain([&self.free_chunks, &self.absent_chunks]);
        let trees: usize = trees.map(Tree::bytes).sum();
        Ok(trees + touch(&mut self.taken) + touch(&mut self.longest) + touch(&mut self.chunks))
    }

    fn make_room(&mut self, chunks: usize) -> Result<()> {
        let no_memory = |_| Error::new(ErrorKind::NoMemory, "no memory for the arena's bitmap");
        self.taken.try_reserve(chunks * CHUNK_GROUPS).map_err(no_memory)?;
        self.longest.try_reserve(chunks * CHUNK_GROUPS).map_err(no_memory)?;
        self.chunks.try_reserve(chunks).map_err(no_memory)?;
        let all = self.chunks.len() + chunks;
        let mut trees = self.room.iter_mut().chain([&mut self.free_chunks, &mut self.absent_chunks]);
        trees.try_for_each(|tree| tree.grow(all))
    }

    fn push(&mut self, chunk: Chunk) -> usize {
        let groups = self.groups() + CHUNK_GROUPS;
        self.taken.resize(groups, 0);
        self.longest.resize(groups, MAX_RUN_PAGES as u8);
        self.chunks.push(chunk);
        self.chunks.len() - 1
    }

    /// Adds an absent chunk after the last one, which belongs to the caller; returns its number.
    /// [`Runs::reserve`] has made room for it.
    pub(super) fn add_absent_chunk(&mut self) -> usize {
        self.push(Chunk { absent: true, ..Chunk::default() })
    }

    /// Returns the number of free chunks of which runs can be taken.
    pub(super) fn free_chunks(&self) -> usize {
        self.free_count
    }

    pub(super) fn can_be_taken(&self, chunk: usize) -> bool {
        self.free_chunks.get(chunk) > 0
    }

    /// Returns whether there is an absent chunk that no thread is filling or emptying.
    pub(super) fn has_absent(&self) -> bool {
        self.absent_chunks.first(1).is_some()
    }

    pub(super) fn last_free_chunk(&self) -> Option<usize> {
        self.free_chunks.last(1)
    }

    /// Makes a free chunk absent; it then belongs to the caller.
    pub(super) fn take_away(&mut self, chunk: usize) {
        debug_assert!(self.is_free(chunk) && !self.chunks[chunk].hidden);
        self.chunks[chunk].absent = true;
        self.refresh(chunk);
    }

    /// Gives up an absent chunk that belongs to the caller: the refiller may fill it.
    pub(super) fn leave_absent(&mut self, chunk: usize) {
        debug_assert!(self.chunks[chunk].absent);
        self.absent_chunks.set(chunk, 1);
    }

    /// Takes the lowest absent chunk; it then belongs to the caller.
    pub(super) fn take_absent(&mut self) -> Option<usize> {
        let chunk = self.absent_chunks.first(1)?;
        self.absent_chunks.set(chunk, 0);
        Some(chunk)
    }

    /// Makes an absent chunk that belongs to the caller present. It is a free one, unless runs of it were
    /// adopted.
    pub(super) fn bring(&mut self, chunk: usize) {
        debug_assert!(self.chunks[chunk].absent);
        self.chunks[chunk].absent = false;
        self.refresh(chunk);
    }

    /// Takes a run of `pages` pages for `account` and returns its first page: the lowest run of
    /// the account's chunks, else the first of the lowest free chunk.
    pub(super) fn take(&mut self, account: Account, pages: usize) -> Option<u32> {
        self.take_own(account, pages).or_else(|| {
            let chunk = self.free_chunks.first(1)?;
            self.take_in(chunk, account, pages)
        })
    }

    pub(super) fn take_own(&mut self, account: Account, pages: usize) -> Option<u32> {
        let chunk = self.room[account as usize].first(pages as u8)?;
        self.take_in(chunk, account, pages)
    }

    fn take_in(&mut self, chunk: usize, account: Account, pages: usize) -> Option<u32> {
        debug_assert!((1..=MAX_RUN_PAGES).contains(&pages));
        let group = groups_of(chunk).find(|group| usize::from(self.longest[*group]) >= pages)?;
        let page = group as u32 * GROUP_PAGES + starts(self.taken[group], pages as u32).trailing_zeros();
        self.take_pages(page, pages, account);
        Some(page)
    }

    fn take_pages(&mut self, page: u32, pages: usize, account: Account) {
        self.chunks[(page / CHUNK_PAGES) as usize].owner = Some(account);
        self.mark(page, mask(page, pages as u32), true);
        let live = &mut self.live[account as usize];
        (live.runs, live.pages) = (live.runs + 1, live.pages + pages as u64);
    }

    /// Takes these pages of a chunk for `account`; returns false if one of them is taken, or if the chunk
    /// belongs to another account.
    pub(super) fn take_at(&mut self, account: Account, page: u32, pages: usize) -> bool {
        let (chunk, bits) = ((page / CHUNK_PAGES) as usize, mask(page, pages as u32));
        let is_free = self.taken.get(group_of(page)).is_some_and(|taken| taken & bits == 0);
        if !is_free || self.chunks[chunk].owner.is_some_and(|owner| owner != account) {
            return false;
        }
        self.take_pages(page, pages, account);
        true
    }

    pub(super) fn put(&mut self, page: u32, pages: usize) {
        if let Some(owner) = self.chunks[(page / CHUNK_PAGES) as usize].owner {
            let live = &mut self.live[owner as usize];
            (live.runs, live.pages) = (live.runs - 1, live.pages - pages as u64);
        }
        self.mark(page, mask(page, pages as u32), false);
    }

    /// Surveys a chunk, if it is `account`'s. Free runs that are shorter than the account's average run
    /// do not count as room.
    pub(super) fn survey(&self, account: Account, chunk: usize) -> Option<Survey> {
        let Chunk { owner, taken_pages, .. } = self.chunks[chunk];
        let live = self.live[account as usize];
        let run_pages = live.pages.div_ceil(live.runs.max(1)).max(1) as u32;
        let room_pages = |group: usize| room(self.taken[group], run_pages) as u16;
        (owner == Some(account)).then(|| Survey {
            chunk: chunk as u32,
            taken_pages,
            room_pages: groups_of(chunk).map(room_pages).sum(),
        })
    }

    /// Hides a chunk if it is `account`'s, so that no run of it is taken; returns whether it is.
    pub(super) fn hide(&mut self, chunk: usize, account: Account) -> bool {
        if self.chunks[chunk].owner != Some(account) {
            return false;
        }
        self.chunks[chunk].hidden = true;
        self.refresh(chunk);
        true
    }

    pub(super) fn show(&mut self, chunk: usize) {
        self.chunks[chunk].hidden = false;
        self.refresh(chunk);
    }

    pub(super) fn show_all(&mut self) -> bool {
        let mut any = false;
        for chunk in 0..self.chunks.len() {
            if self.chunks[chunk].hidden {
                any = true;
                self.show(chunk);
            }
        }
        any
    }

    /// Marks the pages of `mask`, in the group of `page`, as taken or free. Called directly only while
    /// their memory goes back to the system; [`Runs::take`] and [`Runs::put`] call it for runs.
    pub(super) fn mark(&mut self, page: u32, mask: u64, taken: bool) {
        let group = group_of(page);
        debug_assert_eq!(self.taken[group] & mask, if taken { 0 } else { mask }, "pages {page}+: {mask:#x}");
        self.taken[group] ^= mask;
        let longest = longest_run(self.taken[group]);
        let longest_before = std::mem::replace(&mut self.longest[group], longest);
        let chunk = group / CHUNK_GROUPS;
        let pages = mask.count_ones() as u16;
        let taken_pages = &mut self.chunks[chunk].taken_pages;
        let before = *taken_pages;
        *taken_pages = if taken { before + pages } else { before - pages };
        if longest != longest_before || before == 0 || *taken_pages == 0 {
            self.refresh(chunk);
        }
    }

    fn refresh(&mut self, chunk: usize) {
        let Chunk { owner, taken_pages, hidden, absent } = self.chunks[chunk];
        let free = taken_pages == 0 && !hidden && !absent;
        self.free_count = self.free_count + usize::from(free) - usize::from(self.free_chunks.get(chunk));
        self.free_chunks.set(chunk, u8::from(free));
        if let Some(owner) = owner {
            let longest = self.longest[groups_of(chunk)].iter().copied().max().unwrap_or(0);
            self.room[owner as usize].set(chunk, if free || hidden { 0 } else { longest });
        }
        if free {
            self.chunks[chunk].owner = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn runs_of_every_length_start_where_a_scan_finds_them() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let taken = random.next() & random.next();
            for pages in 1..=MAX_RUN_PAGES as u32 {
                let scan = (0..=64 - pages).find(|at| taken & mask(*at, pages) == 0);
                let found = starts(taken, pages);
                assert_eq!((found != 0).then(|| found.trailing_zeros()), scan, "seed {seed} pages {pages}");
                assert_eq!(u32::from(longest_run(taken)) >= pages, scan.is_some(), "seed {seed}");
                let at_all = (0..=64 - pages).filter(|at| taken & mask(*at, pages) == 0);
                let naive = at_all.fold(0, |room, at| room | mask(at, pages)).count_ones();
                assert_eq!(room(taken, pages), naive, "seed {seed} pages {pages}");
            }
        }
    }

    #[test]
    fn agrees_with_a_naive_model() {
        const CHUNK: usize = CHUNK_PAGES as usize;
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (mut runs, mut model) = (Runs::default(), Vec::<Option<Account>>::new());
            let mut live: Vec<(u32, usize)> = Vec::new();
            let mut hidden = Vec::<usize>::new();
            for step in 0..6000 {
                // Grows, shrinks, and grows again.
                let takes = if step / 2000 == 1 { 3 } else { 7 };
                if random.below(50) == 0 && !model.is_empty() {
                    let (chunk, account) = (random.below(model.len() / CHUNK), Account::ALL[random.below(2)]);
                    let owner = model[chunk * CHUNK..][..CHUNK].iter().find_map(|taken| *taken);
                    if hidden.len() > 3 {
                        assert!(runs.show_all());
                        hidden.clear();
                    } else if let Some(at) = hidden.iter().position(|hidden| *hidden == chunk) {
                        runs.show(hidden.swap_remove(at));
                    } else {
                        assert_eq!(runs.hide(chunk, account), owner == Some(account), "seed {seed}");
                        hidden.extend((owner == Some(account)).then_some(chunk));
                    }
                } else if random.below(10) < takes {
                    let (pages, account) = (1 + random.below(16), Account::ALL[random.below(2)]);
                    let owners: Vec<Option<Account>> =
                        model.chunks(CHUNK).map(|chunk| chunk.iter().find_map(|taken| *taken)).collect();
                    let fits = |at: usize, owner| {
                        at % 64 + pages <= 64
                            && owners[at / CHUNK] == owner
                            && model[at..at + pages].iter().all(Option::is_none)
                            && !hidden.contains(&(at / CHUNK))
                    };
                    let lowest = |owner| (0..model.len()).find(|at| fits(*at, owner));
                    let naive = lowest(Some(account)).or_else(|| lowest(None));
                    assert_eq!(runs.take(account, pages), naive.map(|at| at as u32), "seed {seed}");
                    match naive {
                        Some(page) => {
                            model[page..page + pages].fill(Some(account));
                            live.push((page as u32, pages));
                        }
                        None => {
                            runs.add_chunk().expect("memory");
                            model.resize(model.len() + CHUNK, None);
                        }
                    }
                } else if !live.is_empty() {
                    let (page, pages) = live.swap_remove(random.below(live.len()));
                    runs.put(page, pages);
                    model[page as usize..page as usize + pages].fill(None);
                }
            }
        }
    }
}
