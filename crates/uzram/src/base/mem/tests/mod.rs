//! Tests of the arena against models, the system's counts and concurrent threads.

mod chunks;
mod reserve;
mod surplus;

use super::map::{HOST_PAGE_BYTES, with_host_pages_of};
use super::release::{KEPT_FREE_PAGES, units_to_release};
use super::*;
use crate::base::random::Random;
use crate::base::thread::pin_to_current_cpu;
use std::collections::HashMap;

fn arena_on_pages_of(host_page_bytes: usize, reserve_bytes: u64) -> Arena {
    with_host_pages_of(host_page_bytes, || Arena::new(reserve_bytes)).expect("address space")
}

fn arena(reserve_bytes: u64, batch_pages: usize) -> Arena {
    let arena = Arena::new(reserve_bytes).expect("address space");
    arena.set_run_cache_batch_pages(batch_pages).expect("batch");
    arena
}

#[track_caller]
fn taken(arena: &Arena, pages: usize, account: Account) -> Run {
    arena.alloc_run(pages, account, Gfp::MayWait).expect("memory")
}

#[track_caller]
fn refused(arena: &Arena, pages: usize, gfp: Gfp) -> (ErrorKind, Option<&'static str>) {
    why(&arena.alloc_run(pages, Account::Pool, gfp).expect_err("there is no run"))
}

fn why(error: &Error) -> (ErrorKind, Option<&'static str>) {
    (error.kind(), error.setting())
}

fn touch(arena: &Arena, page: u32, pages: u32) {
    for page in page..page + pages {
        // SAFETY: the caller committed the page and is its only user.
        unsafe { arena.address(page).write(page as u8 | 1) };
    }
}

#[track_caller]
fn assert_touched(arena: &Arena, page: u32, pages: u32) {
    for page in page..page + pages {
        // SAFETY: as in `touch`, which was called for the page.
        assert_eq!(unsafe { arena.address(page).read() }, page as u8 | 1, "page {page}");
    }
}

#[track_caller]
fn fill(arena: &Arena, run: Run, account: Account) {
    arena.commit(account, run.page, u32::from(run.pages)).expect("no limit");
    touch(arena, run.page, u32::from(run.pages));
}

#[track_caller]
fn filled(arena: &Arena, pages: usize, account: Account) -> Run {
    let run = taken(arena, pages, account);
    fill(arena, run, account);
    run
}

fn free(arena: &Arena, run: Run, account: Account) {
    arena.free_run(run, account, u64::from(run.pages));
}

fn hide(arena: &Arena, account: Account) -> HiddenChunks<'_> {
    arena.hide_sparse_chunks(account, usize::MAX, &[])
}

fn recount(arena: &Arena) {
    assert_eq!(arena.resident_bytes() as u64, arena.charged_pages() * PAGE_SIZE as u64);
    let chunk_bytes = CHUNK_PAGES as usize * PAGE_SIZE;
    let in_chunk = |offset| arena.mapping.resident_bytes_in(offset, chunk_bytes);
    let offsets = (0..arena.mapping.len_bytes()).step_by(chunk_bytes);
    assert_eq!(arena.chunks_held(), offsets.filter(|offset| in_chunk(*offset) > 0).count() as u64);
    let inner = arena.inner.lock();
    let free = |group| arena.resident_of(group, !inner.runs.taken(group));
    assert_eq!(inner.free_resident_pages, (0..inner.runs.groups()).map(free).sum::<u64>());
}

/// The runs that a test has taken of an arena, with the pages that are committed of each, and hidden chunks.
struct Model<'a> {
    arena: &'a Arena,
    random: Random,
    live: Vec<(Run, Account, u32)>,
    hidden: Option<HiddenChunks<'a>>,
    hides: u64,
    /// Runs that a reserve did not have.
    drained: u64,
}

impl<'a> Model<'a> {
    fn new(arena: &'a Arena, seed: u64) -> Self {
        arena.set_releaser(seed.is_multiple_of(2).then(std::thread::current));
        Model { arena, random: Random::new(seed), live: Vec::new(), hidden: None, hides: 0, drained: 0 }
    }

    /// Does `steps` things at random: grows, shrinks, and grows again.
    fn run(&mut self, steps: usize) {
        for step in 0..steps {
            let takes_of_10 = [7, 4, 6][step * 3 / steps];
            match self.random.below(240) {
                0..160 if self.random.below(10) < takes_of_10 => self.take(),
                0..160 if !self.live.is_empty() => {
                    let (run, account, committed) = self.live.swap_remove(self.random.below(self.live.len()));
                    assert_touched(self.arena, run.page, committed);
                    self.arena.free_run(run, account, committed.into());
                }
                160..238 if !self.live.is_empty() => self.commit_more(),
                238 if self.random.below(4) == 0 => self.free_a_third(),
                239 => self.manage(),
                _ => {}
            }
        }
    }

    fn take(&mut self) {
        let (account, pages) = (Account::ALL[self.random.below(2)], 1 + self.random.below(16));
        match self.arena.alloc_run(pages, account, Gfp::MayWait) {
            Ok(run) => {
                let in_memory = self.arena.resident_in(run.page, pages);
                assert!(!self.arena.has_reserve() || in_memory == pages as u64, "{run:?} is not there");
                assert!(self.hidden.as_ref().is_none_or(|hidden| !hidden.contains(run.page)), "{run:?}");
                self.live.push((run, account, 0));
            }
            Err(error) => {
                assert_eq!(why(&error), (ErrorKind::NoMemory, Some("reserve")));
                assert_eq!(self.arena.reserve_free_pages(), 0);
                self.drained += 1;
                // The failed allocation has shown all hidden chunks.
                self.hidden = None;
                self.arena.refill(|_| Ok(())).expect("memory");
            }
        }
    }

    fn commit_more(&mut self) {
        let index = self.random.below(self.live.len());
        let (run, account, committed) = &mut self.live[index];
        let room = u32::from(run.pages) - *committed;
        if room > 0 {
            let (more, before) = (1 + self.random.below(room as usize) as u32, self.arena.charged_pages());
            self.arena.commit(*account, run.page + *committed, more).expect("no limit");
            assert!(!self.arena.has_reserve() || self.arena.charged_pages() == before);
            touch(self.arena, run.page + *committed, more);
            *committed += more;
        }
    }

    fn free_a_third(&mut self) {
        let account = Account::ALL[self.random.below(2)];
        let is_freed = |(run, of, _): &mut (Run, Account, u32)| *of == account && run.page.is_multiple_of(3);
        let freed: Vec<_> = self.live.extract_if(.., is_freed).map(|(run, _, of)| (run, of.into())).collect();
        self.arena.free_runs(account, &freed);
    }

    fn manage(&mut self) {
        match self.random.below(6) {
            0 => self.arena.release_free(),
            1 => self.arena.release_surplus(),
            2 => self.arena.release_kept(),
            3 if self.arena.has_reserve() => self.arena.refill(|_| Ok(())).expect("memory"),
            4 => self.hidden = None,
            _ if self.hidden.is_none() => {
                let chunks = hide(self.arena, Account::ALL[self.random.below(2)]);
                self.hides += u64::from(!chunks.is_empty());
                self.hidden = Some(chunks);
            }
            _ if self.arena.has_reserve() => reserve::recount_chunks(self.arena),
            _ => recount(self.arena),
        }
    }

    fn end(mut self) {
        self.hidden = None;
        let mut owners = HashMap::new();
        for (run, account, _) in &self.live {
            let owner = *owners.entry(run.page / CHUNK_PAGES).or_insert(*account);
            assert_eq!(owner, *account, "two accounts in the chunk of {run:?}");
        }
        for account in Account::ALL {
            let used = self.live.iter().filter(|(_, of, _)| *of == account);
            let used = used.map(|(_, _, committed)| u64::from(*committed)).sum::<u64>();
            assert_eq!(self.arena.used_pages(account), used);
        }
        recount(self.arena);
        for (run, account, committed) in self.live {
            assert_touched(self.arena, run.page, committed);
            self.arena.free_run(run, account, committed.into());
        }
        assert_eq!(Account::ALL.map(|account| self.arena.used_pages(account)), [0, 0]);
    }
}

/// Seeded events take, grow and free runs of two accounts, which share pages of the host; the counts agree
/// with a list of live runs and with the system's, and live runs keep their contents.
#[test]
fn counts_agree_with_a_model_and_with_the_system() {
    let mut hides = 0;
    for seed in 0..9 {
        println!("seed {seed}");
        let arena = arena_on_pages_of(HOST_PAGE_BYTES[seed as usize / 3], 64 << 20);
        arena.set_run_cache_batch_pages([0, 8, 32][seed as usize % 3]).expect("batch");
        let mut model = Model::new(&arena, seed);
        model.run(6000);
        hides += model.hides;
        model.end();
        arena.release_free();
        assert_eq!((arena.charged_pages(), arena.resident_bytes()), (0, 0));
    }
    assert!(hides > 3, "{hides}");
}

#[test]
fn a_free_chunk_is_anybodys() {
    pin_to_current_cpu();
    let arena = arena(3 * u64::from(CHUNK_PAGES) * PAGE_SIZE as u64 + 1, 32);
    let runs = 4 * CHUNK_PAGES as usize / MAX_RUN_PAGES;
    for account in [Account::Pool, Account::Slab, Account::Pool] {
        let runs: Vec<Run> = (0..runs).map(|_| taken(&arena, MAX_RUN_PAGES, account)).collect();
        assert_eq!(refused(&arena, 1, Gfp::MayWait).0, ErrorKind::NoSpace);
        runs.into_iter().for_each(|run| arena.free_run(run, account, 0));
        arena.release_free();
    }
    assert_eq!(arena.set_run_cache_batch_pages(MAX_BATCH_PAGES + 1).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn the_limit_bounds_what_is_in_memory() {
    let arena = Arena::new(64 << 20).expect("address space");
    arena.set_limit_pages(10);
    let run = taken(&arena, 16, Account::Pool);
    arena.commit(Account::Pool, run.page, 10).expect("within the limit");
    assert_eq!(arena.commit(Account::Slab, run.page + 10, 1), Err(Full));
    assert_eq!(Error::from(Full).setting(), Some("mem_limit"));
    assert_eq!((arena.charged_pages(), arena.used_pages_max(Account::Pool)), (10, 10));
    arena.free_run(run, Account::Pool, 10);
    assert_eq!(arena.charged_pages(), 10, "kept for reuse");
    assert_eq!(taken(&arena, 16, Account::Pool), run);
    arena.commit(Account::Pool, run.page, 10).expect("what is in memory already costs nothing");
    assert_eq!(arena.charged_pages(), 10);
    arena.free_run(run, Account::Pool, 10);
    arena.release_free();
    assert_eq!(arena.charged_pages(), 0);
}

#[test]
fn freed_memory_goes_back_by_itself() {
    for (batch, host_page_bytes) in
        [0, 32].into_iter().flat_map(|batch| HOST_PAGE_BYTES.map(|of| (batch, of)))
    {
        let arena = arena_on_pages_of(host_page_bytes, 256 << 20);
        arena.set_run_cache_batch_pages(batch).expect("batch");
        let runs: Vec<Run> = (0..1000).map(|_| filled(&arena, 16, Account::Pool)).collect();
        assert!(arena.charged_pages() >= 16_000);
        runs.into_iter().for_each(|run| free(&arena, run, Account::Pool));
        assert!(arena.charged_pages() <= KEPT_FREE_PAGES + 16 * 64, "{}", arena.charged_pages());
        assert_eq!(arena.resident_bytes() as u64, arena.charged_pages() * PAGE_SIZE as u64);
    }
}

#[test]
fn only_whole_pages_of_the_host_go_back() {
    let all = u64::MAX;
    assert_eq!(units_to_release(all, !0b1011_0111, 1), 0b1011_0111);
    assert_eq!(units_to_release(0b0010, all << 4, 1), 0b0010);
    assert_eq!(units_to_release(all, !0b1011_0111, 2), 0b0011_0011);
    // A host page goes back as a whole, whichever of its pages were in memory.
    assert_eq!(units_to_release(0b0100_0010, 0b1_0000_0000, 4), 0b1111_1111);
    assert_eq!(units_to_release(0b0100_0010, 0b0000_0001, 4), 0b1111_0000);
    assert_eq!(units_to_release(all, 0x0000_000f_0000_8000, 16), 0xffff_0000_ffff_0000);
    assert_eq!((units_to_release(1, 0, 64), units_to_release(all, 1 << 63, 64)), (all, 0));
}

/// Locks these pages as they become resident, and keeps them so, like mlockall(2) with MCL_ONFAULT; returns
/// false where that cannot be done.
fn locks(arena: &Arena, page: u32, pages: usize) -> bool {
    let (start, len) = (arena.address(page).cast(), pages * PAGE_SIZE);
    // SAFETY: advice for no bytes does nothing, and an unknown advice is refused.
    if unsafe { rustix::mm::madvise(start, 0, rustix::mm::Advice::LinuxDontneedLocked) }.is_err() {
        println!("skipped: locked memory goes back since Linux 5.18");
        return false;
    }
    // SAFETY: the pages are the test's, and locking changes no contents.
    let locked = unsafe { rustix::mm::mlock_with(start, len, rustix::mm::MlockFlags::ONFAULT) };
    locked.inspect_err(|error| println!("skipped: no memory can be locked here ({error})")).is_ok()
}

#[test]
fn locked_memory_goes_back() {
    let arena = Arena::new(64 << 20).expect("address space");
    let runs: Vec<Run> = (0..4).map(|_| filled(&arena, 4, Account::Pool)).collect();
    if !locks(&arena, runs[1].page, 8) {
        return;
    }
    runs.into_iter().for_each(|run| free(&arena, run, Account::Pool));
    arena.release_free();
    recount(&arena);
    assert_eq!(arena.charged_pages(), 0);
    let again = filled(&arena, 16, Account::Pool);
    // SAFETY: `filled` wrote to the first byte only.
    assert_eq!(unsafe { arena.address(again.page + 5).add(1).read() }, 0);
    recount(&arena);
}

/// The limit never refuses what fits, and at the end every count is exact.
#[test]
fn memory_goes_back_beside_takers() {
    const LIMIT_PAGES: u64 = 4 * 16 * 20;
    for batch in [0, 32] {
        let arena = arena(256 << 20, batch);
        arena.set_limit_pages(LIMIT_PAGES);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let arena = &arena;
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    let mut live: Vec<Run> = Vec::new();
                    for _ in 0..4000 {
                        if live.len() < 20 && random.below(5) < 3 {
                            let run = taken(arena, 1 + random.below(16), Account::Pool);
                            if arena.commit(Account::Pool, run.page, run.pages.into()).is_err() {
                                // All four together stay within the limit.
                                arena.release_free();
                                fill(arena, run, Account::Pool);
                            }
                            touch(arena, run.page, run.pages.into());
                            live.push(run);
                        } else if !live.is_empty() {
                            free(arena, live.swap_remove(random.below(live.len())), Account::Pool);
                        }
                        assert!(arena.charged_pages() <= LIMIT_PAGES);
                    }
                    live.into_iter().for_each(|run| free(arena, run, Account::Pool));
                });
            }
        });
        assert_eq!(arena.resident_bytes() as u64, arena.charged_pages() * PAGE_SIZE as u64);
        arena.release_free();
        assert_eq!((arena.charged_pages(), arena.used_pages(Account::Pool)), (0, 0));
    }
}

/// A thread that takes runs, writes a mark into every page, and checks it before it frees them.
struct Taker<'a> {
    arena: &'a Arena,
    random: Random,
    live: Vec<(Run, Account, u64)>,
    next_mark: u64,
    drained: u64,
}

impl<'a> Taker<'a> {
    fn new(arena: &'a Arena, thread: u64) -> Self {
        Taker { arena, random: Random::new(thread), live: Vec::new(), next_mark: thread << 32, drained: 0 }
    }

    /// Runs `events` events, then frees everything; returns how often there was no run.
    fn run(mut self, events: usize) -> u64 {
        for event in 0..events {
            let wanted = [400, 40][event * 8 / events % 2];
            let takes_of_4 = if self.live.len() < wanted { 3 } else { 1 };
            if self.random.below(4) < takes_of_4 {
                self.take();
            } else if !self.live.is_empty() {
                let runs = 1 + self.random.below(2);
                self.free(runs);
            }
        }
        self.free(usize::MAX);
        self.drained
    }

    fn take(&mut self) {
        let account = Account::ALL[usize::from(self.random.below(8) == 0)];
        let Ok(run) = self.arena.alloc_run(1 + self.random.below(16), account, Gfp::MayWait) else {
            assert!(self.arena.has_reserve());
            self.drained += 1;
            return std::thread::yield_now();
        };
        fill(self.arena, run, account);
        self.next_mark += 1;
        for page in run.page..run.page + u32::from(run.pages) {
            // SAFETY: the run is this thread's, and its pages are committed.
            unsafe { self.arena.address(page).cast::<u64>().write(self.next_mark) };
        }
        self.live.push((run, account, self.next_mark));
    }

    fn free(&mut self, most: usize) {
        let mut freed = [Vec::new(), Vec::new()];
        for _ in 0..most.min(self.live.len()) {
            let (run, account, mark) = self.live.swap_remove(self.random.below(self.live.len()));
            for page in run.page..run.page + u32::from(run.pages) {
                // SAFETY: as above.
                let found = unsafe { self.arena.address(page).cast::<u64>().read() };
                assert_eq!(found, mark, "page {page} belongs to two runs");
            }
            freed[account as usize].push((run, u64::from(run.pages)));
        }
        for (account, runs) in Account::ALL.into_iter().zip(freed) {
            self.arena.free_runs(account, &runs);
        }
    }
}
