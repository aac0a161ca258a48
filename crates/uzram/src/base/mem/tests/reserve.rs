//! Tests of arenas with a reserve: a chunk is resident as a whole or not at all.

use super::*;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const CHUNK: u64 = CHUNK_PAGES as u64;

fn refill(arena: &Arena) -> Result<()> {
    arena.refill(|_| Ok(()))
}

fn reserved(address_bytes: u64, chunks: u64, batch: usize) -> Arena {
    let arena = Arena::with_reserve_in(None, address_bytes, chunks * CHUNK).expect("memory");
    arena.set_run_cache_batch_pages(batch).expect("batch");
    refill(&arena).expect("memory");
    arena
}

/// Asserts that every count is right, and that each chunk is resident as a whole or not at all.
pub(super) fn recount_chunks(arena: &Arena) {
    recount(arena);
    let chunk_bytes = CHUNK_PAGES as usize * PAGE_SIZE;
    let inner = arena.inner.lock();
    let mut free = 0;
    for chunk in 0..inner.runs.chunks() {
        let in_memory = arena.mapping.resident_bytes_in(chunk * chunk_bytes, chunk_bytes);
        assert!(in_memory == 0 || in_memory == chunk_bytes, "chunk {chunk}: {in_memory} bytes");
        assert!(in_memory > 0 || inner.runs.is_free(chunk), "pages of chunk {chunk} are taken");
        free += usize::from(inner.runs.is_free(chunk) && in_memory > 0);
    }
    if arena.hiding.get() == 0 {
        assert_eq!(inner.runs.free_chunks(), free);
    }
}

fn take_all(arena: &Arena) -> Vec<Run> {
    std::iter::from_fn(|| arena.alloc_run(16, Account::Pool, Gfp::MayWait).ok()).collect()
}

/// Releases all free memory, which must be all there is.
fn give_all_back(arena: &Arena) {
    arena.set_limit_pages(1);
    assert_eq!((arena.charged_pages(), arena.resident_bytes(), arena.reserve_free_pages()), (0, 0, 0));
}

#[test]
fn counts_agree_with_a_model_and_with_the_system_in_whole_chunks() {
    let (mut drained, mut hides) = (0, 0);
    for seed in 0..6 {
        println!("seed {seed}");
        let arena = reserved(64 << 20, 2 + seed % 3, [0, 8, 32][seed as usize % 3]);
        assert_eq!(arena.charged_pages(), (2 + seed % 3) * CHUNK);
        let mut model = Model::new(&arena, seed);
        model.run(6000);
        (drained, hides) = (drained + model.drained, hides + model.hides);
        model.end();
        arena.release_kept();
        refill(&arena).expect("memory");
        recount_chunks(&arena);
        assert_eq!(arena.charged_pages(), arena.reserve_pages());
        give_all_back(&arena);
        recount_chunks(&arena);
    }
    assert!(drained > 1 && hides > 3, "{drained} {hides}");
}

#[test]
fn a_reserve_has_two_chunks_at_least_and_no_more_than_there_can_be() {
    let arena = Arena::with_reserve_in(None, 64 << 20, 1).expect("memory");
    assert_eq!((arena.reserve_pages(), arena.reserve_free_pages()), (2 * CHUNK, 0));
    let arena = Arena::with_reserve_in(None, 64 << 20, 2 * CHUNK + 1).expect("memory");
    assert_eq!(arena.reserve_pages(), 3 * CHUNK);
    let error = Arena::with_reserve_in(None, 4 << 20, 3 * CHUNK).err().expect("there is no address space");
    assert_eq!(why(&error), (ErrorKind::Invalid, Some("reserve")));
    let without = Arena::new(64 << 20).expect("address space");
    let of_reserve = (without.reserve_pages(), without.reserve_free_pages(), without.reserve_table_bytes());
    assert_eq!((without.has_reserve(), of_reserve), (false, (0, 0, 0)));
}

#[test]
fn a_drained_reserve_fails_until_it_is_filled() {
    pin_to_current_cpu();
    let arena = reserved(64 << 20, 2, 32);
    arena.set_refiller(Some(std::thread::current()));
    arena.hold_refills(true);
    assert_eq!(take_all(&arena).len() as u64, 2 * CHUNK / 16);
    assert_eq!(refused(&arena, 16, Gfp::MayWait), (ErrorKind::NoMemory, Some("reserve")));
    assert!(arena.inner.lock().refiller.is_told);
    assert_eq!(refill(&arena).expect_err("held").kind(), ErrorKind::NoMemory);
    recount_chunks(&arena);
    assert!(arena.inner.lock().refiller.is_told, "it has not done it");
    arena.hold_refills(false);
    refill(&arena).expect("memory");
    assert!(!arena.inner.lock().refiller.is_told);
    assert_eq!(arena.reserve_free_pages(), 2 * CHUNK);
    taken(&arena, 16, Account::Slab);
    assert!(arena.inner.lock().refiller.is_told);
    recount_chunks(&arena);
    // The entries of a chunk in other tables are prepared before the chunk is present.
    let refused = arena.refill(|pages| {
        assert_eq!((pages.start % CHUNK_PAGES, pages.len()), (0, CHUNK_PAGES as usize));
        Err(Error::new(ErrorKind::NoMemory, "none"))
    });
    assert_eq!(refused.expect_err("refused").kind(), ErrorKind::NoMemory);
    assert_eq!(arena.reserve_free_pages(), CHUNK);
    recount_chunks(&arena);
}

#[test]
fn the_limit_bounds_chunks() {
    let arena = reserved(64 << 20, 2, 0);
    arena.set_limit_pages(4 * CHUNK - 1);
    let first = filled(&arena, 16, Account::Pool);
    refill(&arena).expect("one more is allowed");
    filled(&arena, 16, Account::Slab);
    let at_limit = (ErrorKind::NoSpace, Some("mem_limit"));
    assert_eq!(why(&refill(&arena).expect_err("the limit")), at_limit);
    assert_eq!((arena.charged_pages(), arena.reserve_free_pages()), (3 * CHUNK, CHUNK));
    let taken = take_all(&arena);
    assert_eq!(taken.len() as u64, 2 * CHUNK / 16 - 1);
    assert_eq!(refused(&arena, 16, Gfp::MayWait), at_limit, "drained, and the limit is why");
    recount_chunks(&arena);
    arena.set_limit_pages(4 * CHUNK);
    assert!(refill(&arena).is_err());
    assert_eq!(arena.charged_pages(), 4 * CHUNK);
    taken.into_iter().for_each(|run| arena.free_run(run, Account::Pool, 0));
    // Free chunks go back, even those of the reserve; used ones stay.
    arena.set_limit_pages(1);
    assert_eq!((arena.charged_pages(), arena.used_pages(Account::Pool)), (2 * CHUNK, 16));
    recount_chunks(&arena);
    arena.set_limit_pages(0);
    refill(&arena).expect("no limit");
    free(&arena, first, Account::Pool);
    recount_chunks(&arena);
    // The end of the address space names another setting.
    let arena = reserved(4 << 20, 2, 0);
    take_all(&arena);
    assert_eq!(refused(&arena, 16, Gfp::MayWait), (ErrorKind::NoSpace, Some("disksize")));
    assert_eq!(refill(&arena).expect_err("used up").kind(), ErrorKind::NoSpace);
}

/// Memory in use when the limit was lowered goes back once it is free, even if the reserve is not full.
#[test]
fn a_limit_that_was_lowered_is_kept_in_the_end() {
    let arena = reserved(64 << 20, 8, 0);
    let mut held: Vec<Run> = Vec::new();
    for _ in 0..10 * CHUNK / 16 {
        held.push(filled(&arena, 16, Account::Pool));
        refill(&arena).expect("memory");
    }
    arena.set_limit_pages(4 * CHUNK);
    assert!(arena.charged_pages() >= 10 * CHUNK);
    held.into_iter().for_each(|run| free(&arena, run, Account::Pool));
    arena.release_surplus();
    assert_eq!(arena.charged_pages(), 4 * CHUNK);
    recount_chunks(&arena);
}

/// Frees wake the releaser when free chunks are surplus, and release nothing; it keeps the reserve.
#[test]
fn surplus_goes_back_by_whole_chunks() {
    for batch in [0, 32] {
        let arena = reserved(64 << 20, 2, batch);
        arena.set_releaser(Some(std::thread::current()));
        let is_told = || arena.inner.lock().releaser.is_told;
        let mut live = Vec::new();
        for _ in 0..10 * CHUNK / 16 {
            live.push(taken(&arena, 16, Account::Pool));
            refill(&arena).expect("memory");
        }
        live.iter().for_each(|run| arena.commit(Account::Pool, run.page, 16).expect("it is charged"));
        let charged = arena.charged_pages();
        // The CPUs' run caches may hold further chunks.
        assert!(charged == 12 * CHUNK || batch > 0 && charged > 12 * CHUNK, "{charged}");
        // One run of each chunk stays.
        let (kept, freed): (Vec<Run>, Vec<Run>) =
            live.into_iter().partition(|run| run.page.is_multiple_of(CHUNK_PAGES));
        freed.into_iter().for_each(|run| free(&arena, run, Account::Pool));
        arena.release_surplus();
        arena.release_kept();
        let left = arena.charged_pages();
        assert!(!is_told() && (left == 12 * CHUNK || batch > 0 && left <= charged), "{left}");
        recount_chunks(&arena);
        kept.into_iter().for_each(|run| free(&arena, run, Account::Pool));
        assert!(is_told() || batch > 0);
        assert_eq!(arena.charged_pages(), left, "no free gives anything back");
        arena.release_surplus();
        assert_eq!((arena.charged_pages(), is_told()), (2 * CHUNK, false));
        recount_chunks(&arena);
        // The lowest chunks stay, and the lowest are filled first.
        let run = filled(&arena, 1, Account::Pool);
        assert!(run.page < CHUNK_PAGES);
        refill(&arena).expect("memory");
        recount_chunks(&arena);
        assert_eq!(arena.inner.lock().runs.chunks() as u64, charged / CHUNK, "no new one was needed");
    }
}

/// An evacuated chunk goes back if the reserve is full; pages of a chunk that is not empty stay.
#[test]
fn moving_empties_whole_chunks() {
    let arena = reserved(64 << 20, 2, 0);
    let mut live = Vec::new();
    for _ in 0..3 * CHUNK / 4 {
        refill(&arena).expect("memory");
        live.push(filled(&arena, 4, Account::Pool));
    }
    let freed = live.extract_if(.., |run| !(run.page / 4).is_multiple_of(4));
    freed.for_each(|run| free(&arena, run, Account::Pool));
    assert_eq!((arena.charged_pages(), arena.chunks_in_use()), (5 * CHUNK, 3));
    let hidden = hide(&arena, Account::Pool);
    let chunks = hidden.chunks().len();
    assert!(chunks > 1);
    // Leave one run in one of the chunks.
    let stays = live.iter().position(|run| hidden.contains(run.page)).expect("some");
    live.swap_remove(stays);
    chunks::move_out(&arena, &hidden, &mut live);
    drop(hidden);
    recount_chunks(&arena);
    assert_eq!((arena.charged_pages(), arena.chunks_in_use()), (4 * CHUNK, 2));
}

#[test]
fn locked_chunks_go_back() {
    let arena = reserved(64 << 20, 2, 0);
    let run = filled(&arena, 16, Account::Pool);
    if !locks(&arena, 0, 4 * CHUNK_PAGES as usize) {
        return;
    }
    recount_chunks(&arena);
    refill(&arena).expect("memory");
    recount_chunks(&arena);
    assert_eq!(arena.charged_pages(), 3 * CHUNK);
    free(&arena, run, Account::Pool);
    arena.release_kept();
    recount_chunks(&arena);
    assert_eq!(arena.charged_pages(), 2 * CHUNK);
    give_all_back(&arena);
    arena.set_limit_pages(0);
    refill(&arena).expect("memory");
    recount_chunks(&arena);
}

/// A taken run is resident and belongs to one thread, and at the end every count is right.
#[test]
fn chunks_are_filled_and_given_back_beside_takers() {
    for batch in [0, 32] {
        let arena = reserved(512 << 20, 3, batch);
        let (takers, drained) = (AtomicU64::new(3), AtomicU64::new(0));
        let goes_on = || takers.load(Relaxed) > 0;
        std::thread::scope(|scope| {
            let refiller = scope.spawn(|| {
                while goes_on() {
                    std::thread::park_timeout(std::time::Duration::from_millis(50));
                    refill(&arena).expect("memory");
                }
            });
            let releaser = scope.spawn(|| {
                while goes_on() {
                    std::thread::park_timeout(std::time::Duration::from_millis(10));
                    arena.release_surplus();
                    drop(hide(&arena, Account::Pool));
                }
            });
            arena.set_refiller(Some(refiller.thread().clone()));
            arena.set_releaser(Some(releaser.thread().clone()));
            for thread in 0..3 {
                let (arena, takers, drained) = (&arena, &takers, &drained);
                scope.spawn(move || {
                    drained.fetch_add(Taker::new(arena, thread + 1).run(60_000), Relaxed);
                    takers.fetch_sub(1, Relaxed);
                });
            }
        });
        println!("batch {batch}: {} allocations found the reserve drained", drained.load(Relaxed));
        recount_chunks(&arena);
        arena.release_kept();
        refill(&arena).expect("memory");
        assert_eq!(arena.charged_pages(), 3 * CHUNK);
        recount_chunks(&arena);
    }
}
