//! Tests of hiding, evacuating and releasing chunks.

use super::*;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Moves the runs that lie in hidden chunks, as an evacuation does; returns how many.
pub(super) fn move_out(arena: &Arena, hidden: &HiddenChunks<'_>, live: &mut [Run]) -> usize {
    let inside = live.iter_mut().filter(|run| hidden.contains(run.page));
    let moved = inside.map(|run| {
        let to = filled(arena, usize::from(run.pages), Account::Pool);
        free(arena, std::mem::replace(run, to), Account::Pool);
    });
    moved.count()
}

/// Fills `chunks` chunks and frees the runs for which `keep` returns false, with one CPU's run cache.
fn scattered(arena: &Arena, chunks: u32, pages: usize, keep: impl Fn(Run) -> bool) -> Vec<Run> {
    pin_to_current_cpu();
    let runs = chunks as usize * CHUNK_PAGES as usize / pages;
    let runs: Vec<Run> = (0..runs).map(|_| filled(arena, pages, Account::Pool)).collect();
    let (kept, freed): (Vec<Run>, Vec<Run>) = runs.into_iter().partition(|run| keep(*run));
    freed.into_iter().for_each(|run| free(arena, run, Account::Pool));
    kept
}

#[test]
fn moving_leaves_about_the_ideal_number_of_chunks() {
    for seed in 0..6 {
        let mut random = Random::new(seed);
        let arena = arena(1 << 30, [0, 32][seed as usize % 2]);
        let (most_pages, runs) = ([1, 4, 8][seed as usize % 3], 4000);
        let mut live: Vec<Run> = Vec::new();
        let mut slabs: Vec<Run> = Vec::new();
        for _ in 0..3 {
            while live.len() < runs {
                live.push(filled(&arena, 1 + random.below(most_pages), Account::Pool));
                if live.len().is_multiple_of(100) {
                    slabs.push(filled(&arena, 1, Account::Slab));
                }
            }
            while live.len() > runs / 3 {
                free(&arena, live.swap_remove(random.below(live.len())), Account::Pool);
            }
        }
        arena.release_free();
        let before = arena.chunks_held();
        let mut rounds = 0;
        loop {
            let hidden = hide(&arena, Account::Pool);
            if hidden.is_empty() {
                break;
            }
            rounds += 1;
            assert!(move_out(&arena, &hidden, &mut live) > 0 && rounds < 20, "seed {seed}: {rounds} rounds");
        }
        recount(&arena);
        arena.release_free();
        recount(&arena);
        let chunk_pages = u64::from(CHUNK_PAGES);
        let ideal = arena.used_pages(Account::Pool).div_ceil(chunk_pages);
        let slab_chunks = (slabs.len() as u64).div_ceil(chunk_pages);
        let held = arena.chunks_held() - slab_chunks;
        assert!(before > ideal + ideal / 2, "seed {seed}: {before} chunks, {ideal} would do");
        assert!(held <= ideal + ideal / 10 + 1, "seed {seed}: {held} chunks, {ideal} would do");
    }
}

#[test]
fn no_run_of_a_hidden_chunk_is_taken() {
    for batch in [0, 32] {
        let arena = arena(64 << 20, batch);
        let chunk_pages = CHUNK_PAGES;
        // Half of the first chunk is taken, and an eighth of the second.
        let mut live = scattered(&arena, 2, 4, |run| {
            (run.page / 4).is_multiple_of(if run.page < chunk_pages { 2 } else { 8 })
        });
        let hidden = hide(&arena, Account::Pool);
        assert!(hidden.contains(chunk_pages) && hidden.contains(2 * chunk_pages - 1));
        assert!(![0, chunk_pages - 1, 2 * chunk_pages].iter().any(|page| hidden.contains(*page)));
        assert!(hide(&arena, Account::Pool).is_empty(), "one at a time");

        // Neither runs freed there nor runs free before are taken.
        let inside = live.iter().position(|run| hidden.contains(run.page)).expect("an eighth");
        free(&arena, live.swap_remove(inside), Account::Pool);
        let room = (chunk_pages / 2 / 4) as usize;
        for _ in 0..room {
            let run = arena.alloc_run(4, Account::Pool, Gfp::NoWait).expect("half of the other chunk");
            assert!(!hidden.contains(run.page));
            fill(&arena, run, Account::Pool);
            live.push(run);
        }
        assert_eq!(refused(&arena, 4, Gfp::NoWait).0, ErrorKind::NoMemory);
        let other = filled(&arena, 4, Account::Pool);
        assert!(!hidden.contains(other.page), "it grows instead");
        assert_eq!(arena.chunks_held(), 3);
        assert!(move_out(&arena, &hidden, &mut live) > 0);
        drop(hidden);
        recount(&arena);
        assert_eq!(arena.chunks_held(), 2, "an empty chunk goes back at once");
        let again = filled(&arena, 16, Account::Slab);
        assert_eq!(again.page, chunk_pages, "and can be used again, by others too");
        recount(&arena);
    }
}

/// Runs that stay in a hidden chunk keep their contents, and its free pages go back.
#[test]
fn a_chunk_that_is_not_emptied_is_shown_again() {
    let arena = Arena::new(64 << 20).expect("address space");
    let live = scattered(&arena, 2, 4, |run| (run.page / 4).is_multiple_of(4));
    let hidden = hide(&arena, Account::Pool);
    assert!(hidden.contains(CHUNK_PAGES));
    drop(hidden);
    recount(&arena);
    for run in &live {
        // SAFETY: the run is live.
        assert_eq!(unsafe { arena.address(run.page).read() }, run.page as u8 | 1);
    }
    let in_second = arena.mapping.resident_bytes_in(CHUNK_PAGES as usize * PAGE_SIZE, 2 << 20);
    assert_eq!(in_second, (2 << 20) / 4);
    let free_runs = 2 * CHUNK_PAGES / 4 * 3 / 4;
    for _ in 0..free_runs {
        arena.alloc_run(4, Account::Pool, Gfp::NoWait).expect("shown");
    }
}

#[test]
fn nothing_is_hidden_where_nothing_is_won() {
    let arena = Arena::new(64 << 20).expect("address space");
    assert!(hide(&arena, Account::Pool).is_empty());
    let slab = filled(&arena, 1, Account::Slab);
    let mut live = vec![filled(&arena, 1, Account::Pool)];
    assert!(hide(&arena, Account::Pool).is_empty(), "there is one chunk");
    live.extend((0..CHUNK_PAGES).map(|_| filled(&arena, 1, Account::Pool)));
    // The second chunk's only page finds no room in the first.
    assert!(hide(&arena, Account::Pool).is_empty());
    let hidden = hide(&arena, Account::Slab);
    assert!(hidden.is_empty() && !hidden.contains(slab.page));
    // Half of the pages are free, but no two in a row: no run of two finds room.
    let arena = Arena::new(64 << 20).expect("address space");
    scattered(&arena, 4, 1, |run| run.page.is_multiple_of(2));
    let pairs = 4 * CHUNK_PAGES / 2;
    (0..4 * pairs).for_each(|_| _ = filled(&arena, 2, Account::Pool));
    assert!(hide(&arena, Account::Pool).is_empty());
}

#[test]
fn hiding_refuses_nobody_who_may_wait() {
    let arena = Arena::new(4 << 20).expect("address space");
    scattered(&arena, 2, 4, |run| (run.page / 4).is_multiple_of(4));
    let hidden = hide(&arena, Account::Pool);
    assert!(!hidden.is_empty());
    for _ in 0..2 * CHUNK_PAGES / 4 * 3 / 4 {
        filled(&arena, 4, Account::Pool);
    }
    assert_eq!(refused(&arena, 1, Gfp::MayWait).0, ErrorKind::NoSpace);
    drop(hidden);
    recount(&arena);
    assert_eq!(arena.charged_pages(), 2 * u64::from(CHUNK_PAGES));
}

/// No page belongs to two runs, and at the end every count matches the system's.
#[test]
fn chunks_are_hidden_beside_takers() {
    for batch in [0, 32] {
        let arena = arena(512 << 20, batch);
        let (takers, hides) = (AtomicU64::new(3), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let releaser = scope.spawn(|| {
                while takers.load(Relaxed) > 0 {
                    std::thread::park_timeout(std::time::Duration::from_millis(10));
                    arena.release_surplus();
                }
            });
            arena.set_releaser(Some(releaser.thread().clone()));
            for thread in 0..3 {
                let (arena, takers, hides) = (&arena, &takers, &hides);
                scope.spawn(move || {
                    for round in 0..50 {
                        // Until chunks were hidden often enough.
                        if round < 6 || hides.load(Relaxed) < 10 {
                            Taker::new(arena, thread << 8 | round).run(5000);
                        }
                    }
                    takers.fetch_sub(1, Relaxed);
                });
            }
            scope.spawn(|| {
                while takers.load(Relaxed) > 0 {
                    let hidden = hide(&arena, Account::Pool);
                    hides.fetch_add(u64::from(!hidden.is_empty()), Relaxed);
                    for _ in 0..100 {
                        let run = taken(&arena, 2, Account::Pool);
                        assert!(!hidden.contains(run.page), "a hidden chunk's run was handed out");
                        arena.free_run(run, Account::Pool, 0);
                    }
                }
            });
        });
        assert!(hides.load(Relaxed) > 0);
        recount(&arena);
        assert_eq!(Account::ALL.map(|account| arena.used_pages(account)), [0, 0]);
        arena.release_free();
        assert_eq!((arena.charged_pages(), arena.chunks_held()), (0, 0));
    }
}
