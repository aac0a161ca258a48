//! Chunks that are filled, taken and released concurrently, under loom: a taken run is resident.

use super::*;
use crate::base::sync::Arc;
use crate::base::sync::models::{beside, model};

/// Pages of a run: four runs fill a model's chunk.
const PAGES: usize = 16;
const CHUNK: u64 = CHUNK_PAGES as u64;

fn refill(arena: &Arena) {
    arena.refill(|_| Ok(())).expect("memory");
}

fn reserved() -> Arc<Arena> {
    let arena = Arena::with_reserve_in(None, 6 * CHUNK * PAGE_SIZE as u64, 2 * CHUNK).expect("memory");
    refill(&arena);
    Arc::new(arena)
}

fn take(arena: &Arena, account: Account, mark: u64) -> Option<Run> {
    let run = arena.alloc_run(PAGES, account, Gfp::MayWait).ok()?;
    assert_eq!(arena.resident_in(run.page, PAGES), PAGES as u64, "{run:?} is not there");
    arena.commit(account, run.page, PAGES as u32).expect("it is charged");
    // SAFETY: the run is the caller's, and its pages are committed.
    unsafe { arena.address(run.page).cast::<u64>().write(mark) };
    Some(run)
}

fn give(arena: &Arena, account: Account, mark: u64, run: Run) {
    // SAFETY: as above.
    assert_eq!(unsafe { arena.address(run.page).cast::<u64>().read() }, mark, "{run:?} was given back");
    arena.free_run(run, account, PAGES as u64);
}

fn end(arena: &Arena) {
    assert_eq!(arena.charged_pages() * PAGE_SIZE as u64, arena.resident_bytes() as u64);
    arena.release_kept();
    refill(arena);
    assert_eq!((arena.charged_pages(), arena.reserve_free_pages()), (2 * CHUNK, 2 * CHUNK));
    assert_eq!(arena.resident_bytes() as u64, 2 * CHUNK * PAGE_SIZE as u64);
}

/// Two threads, each with its own account, take and free a run while a third runs `other`.
fn takers(before: fn(&Arena) -> Vec<Run>, other: fn(&Arena)) {
    model(2, move || {
        let arena = reserved();
        let taken = before(&arena);
        let other = beside(&arena, other);
        let taker = beside(&arena, |arena| use_run(arena, Account::Slab));
        taken.into_iter().for_each(|run| give(&arena, Account::Pool, 7, run));
        use_run(&arena, Account::Pool);
        taker.join().expect("no panic");
        other.join().expect("no panic");
        end(&arena);
    });
}

fn use_run(arena: &Arena, account: Account) {
    let mark = 1 + account as u64;
    if let Some(run) = take(arena, account, mark) {
        give(arena, account, mark, run);
    }
}

fn take_none(_: &Arena) -> Vec<Run> {
    Vec::new()
}

/// Takes all of three chunks; two more are free.
fn take_three_chunks(arena: &Arena) -> Vec<Run> {
    let taken = (0..12).map(|_| {
        refill(arena);
        take(arena, Account::Pool, 7).expect("filled")
    });
    let taken = taken.collect();
    refill(arena);
    taken
}

/// Takes all of one chunk; four are free.
fn take_one_of_five(arena: &Arena) -> Vec<Run> {
    let mut taken = take_three_chunks(arena);
    taken.drain(..8).for_each(|run| give(arena, Account::Pool, 7, run));
    taken
}

/// Each taker starts a chunk, which leaves only chunks that are filled meanwhile.
#[test]
fn loom_reserve_takers_beside_a_refiller() {
    takers(take_none, refill);
}

#[test]
fn loom_reserve_takers_beside_a_releaser() {
    takers(take_one_of_five, |arena| arena.release_kept());
}

#[test]
fn loom_reserve_takers_beside_one_who_does_both() {
    takers(take_one_of_five, |arena| {
        arena.release_kept();
        refill(arena);
    });
}

#[test]
fn loom_reserve_takers_beside_a_limit() {
    takers(take_none, |arena| {
        arena.set_limit_pages(1);
        arena.set_limit_pages(0);
        refill(arena);
    });
}

#[test]
fn loom_reserve_refiller_beside_a_releaser() {
    model(2, || {
        let arena = reserved();
        let mut taken = take_three_chunks(&arena);
        let refiller = beside(&arena, refill);
        let releaser = beside(&arena, Arena::release_kept);
        let last = taken.split_off(8);
        last.into_iter().for_each(|run| give(&arena, Account::Pool, 7, run));
        let run = take(&arena, Account::Slab, 3).expect("two were free");
        give(&arena, Account::Slab, 3, run);
        refiller.join().expect("no panic");
        releaser.join().expect("no panic");
        taken.into_iter().for_each(|run| give(&arena, Account::Pool, 7, run));
        end(&arena);
    });
}
