//! The tasks: each allocates pages one by one, as page faults do, and frees all of them at once, as munmap
//! does.

use std::sync::atomic::{AtomicBool, Ordering};

use uzram::lru::{Lru, LruLocks, LruStats};
use uzram::mem::{Account, Arena, Gfp, Run};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::experiment::Plan;
use crate::experiment::clock::{Done, RunWork};
use uzram_bench::harness::{Gate, run_together};

/// The pages that a task maps at a time: 128 MiB.
pub(super) const MAPPED_PAGES: u64 = 128 << 8;
/// Pages removed from the LRU at once: about as many as the kernel gathers when it unmaps.
const GATHERED_PAGES: usize = 512;
/// One page in this many is checked before it is freed.
const CHECKED: usize = 61;

pub(super) trait Faults {
    /// Runs `plan.jobs` tasks that do `plan.work` page faults or a few more, each run by `run_work`. Returns
    /// when each task ran and its number of pages, and the lock counters of that time.
    fn run(&self, arena: &Arena, plan: &Plan<'_>, run_work: RunWork) -> Result<(Vec<Done>, LruStats)>;
}

impl<D: LruLocks> Faults for Lru<D> {
    fn run(&self, arena: &Arena, plan: &Plan<'_>, run_work: RunWork) -> Result<(Vec<Done>, LruStats)> {
        let before = self.stats();
        let pages_each = plan.work.div_ceil(plan.jobs as u64);
        let ended = run_together((0..plan.jobs).map(|number| {
            move |gate: &Gate| {
                let mut task = Task { lru: self, arena, number: number as u64 + 1, mapped: Vec::new() };
                task.mapped.reserve_exact(pages_each.min(MAPPED_PAGES) as usize);
                gate.pass();
                run_work(&mut || task.run(pages_each, plan.stop))
            }
        }))?;
        self.drain_all();
        if !self.is_empty() {
            let what = format!("pages are left in the lists of '{}' after all were given back", D::NAME);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let counted = self.stats().since(&before);
        Ok((ended, counted))
    }
}

struct Task<'a, D: LruLocks> {
    lru: &'a Lru<D>,
    arena: &'a Arena,
    number: u64,
    mapped: Vec<(Run, u64)>,
}

impl<D: LruLocks> Task<'_, D> {
    /// Maps and unmaps `pages` pages; returns the number of pages done, fewer after a stop.
    fn run(&mut self, pages: u64, stop: &AtomicBool) -> Result<u64> {
        let mut done = 0;
        while done < pages && !stop.load(Ordering::Relaxed) {
            let wanted = (pages - done).min(MAPPED_PAGES);
            for _ in 0..wanted {
                self.fault()?;
            }
            self.unmap()?;
            done += wanted;
        }
        Ok(done)
    }

    /// A page fault: adds a cleared page to the LRU, and writes to it.
    #[inline]
    fn fault(&mut self) -> Result<()> {
        let run = self.arena.alloc_run(1, Account::Pool, Gfp::MayWait)?;
        self.arena.commit(Account::Pool, run.page, 1)?;
        let content = self.content(self.mapped.len());
        let page = self.arena.address(run.page);
        // SAFETY: the page was just taken, is committed, and is this task's alone until it gives it back.
        unsafe { page.write_bytes(0, PAGE_SIZE) };
        self.lru.add(run.page);
        // SAFETY: as above; a page is aligned for a word.
        unsafe { page.cast::<u64>().write(content) };
        self.lru.mark(run.page);
        self.mapped.push((run, 1));
        Ok(())
    }

    fn unmap(&mut self) -> Result<()> {
        let mut dead = [0; GATHERED_PAGES];
        for (gathered, runs) in self.mapped.chunks(GATHERED_PAGES).enumerate() {
            let mut count = 0;
            for (run, _) in runs {
                if self.lru.mark_dead(run.page) {
                    dead[count] = run.page;
                    count += 1;
                }
            }
            self.lru.remove_dead(&mut dead[..count]);
            for (at, (run, _)) in runs.iter().enumerate().step_by(CHECKED) {
                // SAFETY: the page is still this task's, which wrote a word to it.
                let found = unsafe { self.arena.address(run.page).cast::<u64>().read() };
                if found != self.content(gathered * GATHERED_PAGES + at) {
                    let what = format!("page {} of a task holds another task's content", run.page);
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            }
            self.arena.free_runs(Account::Pool, runs);
        }
        self.mapped.clear();
        Ok(())
    }

    /// Returns the content that the task writes to the nth page that it mapped.
    fn content(&self, nth: usize) -> u64 {
        self.number << u32::BITS | nth as u64
    }
}
