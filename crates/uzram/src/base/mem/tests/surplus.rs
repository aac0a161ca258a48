//! Tests of the releaser and of freeing several runs in one call.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

fn filled_runs(arena: &Arena, runs: usize) -> Vec<Run> {
    (0..runs).map(|_| filled(arena, 16, Account::Pool)).collect()
}

fn fill_and_free(arena: &Arena, runs: usize) {
    filled_runs(arena, runs).into_iter().for_each(|run| free(arena, run, Account::Pool));
}

#[test]
fn frees_leave_surplus_to_the_releaser() {
    let arena = Arena::new(256 << 20).expect("address space");
    arena.set_releaser(Some(std::thread::current()));
    let is_told = || arena.inner.lock().releaser.is_told;
    let kept_runs = KEPT_FREE_PAGES as usize / 16;
    let mut live = filled_runs(&arena, 8 * kept_runs);
    for run in live.drain(..kept_runs) {
        free(&arena, run, Account::Pool);
        assert!(!is_told());
    }
    live.drain(..).for_each(|run| free(&arena, run, Account::Pool));
    assert!(is_told());
    assert_eq!(arena.charged_pages(), 8 * KEPT_FREE_PAGES, "no free gave anything back");
    // Parking a thread that was unparked before returns at once.
    let start = Instant::now();
    std::thread::park_timeout(Duration::from_secs(60));
    assert!(start.elapsed() < Duration::from_secs(30), "nobody unparked the releaser");

    arena.release_surplus();
    assert!(!is_told());
    assert!(arena.charged_pages() <= KEPT_FREE_PAGES / 2, "{}", arena.charged_pages());
    let charged = arena.charged_pages();
    arena.release_surplus();
    assert_eq!(arena.charged_pages(), charged, "there is none any more");
    recount(&arena);

    // The releaser does not run: frees release what must be released.
    fill_and_free(&arena, 1000);
    assert!(is_told());
    assert!(arena.charged_pages() <= 8 * KEPT_FREE_PAGES, "{}", arena.charged_pages());
    // There is no releaser: frees release all surplus.
    arena.set_releaser(None);
    fill_and_free(&arena, 1);
    assert!(!is_told());
    fill_and_free(&arena, 1000);
    assert!(arena.charged_pages() <= KEPT_FREE_PAGES, "{}", arena.charged_pages());
    recount(&arena);
}

#[test]
fn runs_freed_together_are_freed_like_others() {
    // On another CPU the thread would use another run cache, and the two arenas would differ.
    pin_to_current_cpu();
    for batch in [0, 32] {
        let arenas = [(); 2].map(|()| arena(256 << 20, batch));
        let mut random = Random::new(batch as u64);
        let lengths: Vec<usize> = (0..500).map(|_| 1 + random.below(16)).collect();
        let runs = arenas.each_ref().map(|arena| {
            lengths.iter().map(|pages| filled(arena, *pages, Account::Pool)).collect::<Vec<_>>()
        });
        assert_eq!(runs[0], runs[1]);
        arenas[0].free_runs(Account::Pool, &[]);
        for some in runs[0].chunks(37) {
            let committed: Vec<(Run, u64)> = some.iter().map(|run| (*run, u64::from(run.pages))).collect();
            arenas[0].free_runs(Account::Pool, &committed);
            some.iter().for_each(|run| free(&arenas[1], *run, Account::Pool));
            assert_eq!(arenas[0].used_pages(Account::Pool), arenas[1].used_pages(Account::Pool));
        }
        let taken = arenas.each_ref().map(|arena| {
            recount(arena);
            let inner = arena.inner.lock();
            (0..inner.runs.groups()).map(|group| inner.runs.taken(group)).collect::<Vec<_>>()
        });
        assert_eq!(taken[0], taken[1]);
        for arena in &arenas {
            arena.release_free();
            assert_eq!((arena.charged_pages(), arena.used_pages(Account::Pool)), (0, 0));
            assert!(arena.inner.lock().runs.taken(0) == 0);
        }
    }
}

/// Memory stays bounded, and the surplus is released when the threads stop.
#[test]
fn a_releaser_keeps_up_with_takers() {
    let arena = arena(512 << 20, 32);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let releaser = scope.spawn(|| {
            while !stop.load(Relaxed) {
                std::thread::park();
                arena.release_surplus();
            }
        });
        arena.set_releaser(Some(releaser.thread().clone()));
        let takers = [0, 1].map(|thread| {
            let arena = &arena;
            scope.spawn(move || _ = Taker::new(arena, thread).run(20_000))
        });
        let outcome = takers.map(|taker| taker.join());
        // The last surplus has woken the releaser: wait for it.
        let deadline = Instant::now() + Duration::from_secs(30);
        let surplus = || arena.inner.lock().free_resident_pages > KEPT_FREE_PAGES;
        while surplus() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_left = surplus();
        arena.set_releaser(None);
        stop.store(true, Relaxed);
        releaser.thread().unpark();
        outcome.into_iter().for_each(|taker| taker.expect("no panic"));
        assert!(!is_left, "the releaser was not told, or did not come");
    });
    recount(&arena);
}
