//! Memory that is filled, paged out, faulted in, and at last unmapped while it is paged out: a pager's beside
//! the kernel's on a swap area of zram.
//!
//! The test is that of a patch series, "mm/zsmalloc: reduce lock contention in zs_free()" by Wenchao Hao
//! (2026): processes that map 256 MiB each, write them, page them out by `MADV_PAGEOUT`, and unmap them at
//! the same time. What they share is the kernel's zram. What the users of a pager share is the pager: its
//! jobs are threads of one process with a region each.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use uzram::units::pages_to_bytes;
use uzram::{Error, Result};
use uzram_pager::Trap;

use super::memory::{Mapping, Memory, touch};
use super::settings::PagerSettings;
use crate::block::swap_area::{self, KernelSwap};
use crate::harness::steps::{Steps, User};
use crate::harness::{run_together, unsupported};

/// What is measured, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Every page is written.
    Fill,
    /// All of it is paged out.
    PageOut,
    /// Every page is touched, in order.
    Sequential,
    /// All of it is paged out again, after it was only read.
    PageOutAgain,
    /// Every page is touched, in random order.
    Random,
    /// As before.
    PageOutLast,
    /// It is unmapped while it is paged out.
    Unmap,
}

impl Phase {
    /// All of them.
    pub const ALL: [Phase; 7] = [
        Phase::Fill,
        Phase::PageOut,
        Phase::Sequential,
        Phase::PageOutAgain,
        Phase::Random,
        Phase::PageOutLast,
        Phase::Unmap,
    ];
    /// Those of a short run, whose memory does not come back before it is unmapped.
    pub const SHORT: [Phase; 3] = [Phase::Fill, Phase::PageOut, Phase::Unmap];

    /// Returns its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Fill => "fill",
            Phase::PageOut => "page out",
            Phase::Sequential => "in, sequential",
            Phase::PageOutAgain => "page out again",
            Phase::Random => "in, random",
            Phase::PageOutLast => "page out, last",
            Phase::Unmap => "unmap",
        }
    }
}

/// Whose memory it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The kernel's, on a swap area of zram with this algorithm.
    Kernel(&'static str),
    /// A pager's; the design of the pool's locks, if not the default.
    Pager(Trap, Option<&'static str>),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Kernel(algorithm) => write!(f, "the kernel's zram with {algorithm}"),
            Owner::Pager(trap, None) => write!(f, "a pager with {}", trap.name()),
            Owner::Pager(trap, Some(design)) => write!(f, "a pager with {} and {design}", trap.name()),
        }
    }
}

/// `Unsupported` says why the kernel's side cannot be measured, as far as that can be told without a trial.
pub fn check_kernel() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(unsupported("swap areas are root's"));
    }
    let control = Path::new("/sys/class/zram-control/hot_remove");
    match rustix::fs::access(control, rustix::fs::Access::WRITE_OK) {
        Ok(()) => swap_area::check(),
        Err(error) => {
            Err(unsupported(format!("no zram device can be added: {}: {error}", control.display())))
        }
    }
}

/// How to measure.
pub struct UnmapOptions<'a> {
    /// A program with the subcommand [`SUBCOMMAND`](crate::user::SUBCOMMAND).
    pub program: &'a Path,
    /// A file of pages.
    pub corpus: &'a Path,
    /// Pages of each job's memory, which those of the corpus fill again and again.
    pub pages: usize,
    /// Processes of the kernel's side, threads of a pager's.
    pub jobs: usize,
    /// What is measured.
    pub phases: &'a [Phase],
    /// Setting it ends the run with an error.
    pub stop: &'a AtomicBool,
}

/// Measures one side once; returns for each phase the time from the start of its first job to the end of its
/// last one.
pub fn measure(owner: &Owner, options: &UnmapOptions<'_>) -> Result<Vec<(Phase, Duration)>> {
    let total_bytes = pages_to_bytes((options.jobs * options.pages) as u64);
    match owner {
        Owner::Kernel(algorithm) => {
            let area = KernelSwap::on(algorithm, total_bytes + total_bytes / 4 + (16 << 20))?;
            let jobs = (0..options.jobs).map(|nth| Job::new(options, None, nth, 1));
            let times = run(owner, options, jobs)?;
            area.off().map(|()| times)
        }
        Owner::Pager(trap, design) => {
            // So much that it evicts nothing by itself.
            let mut pager = PagerSettings::new(*trap, 2 * total_bytes + (64 << 20));
            pager.pool_design = design.map(str::to_owned);
            run(owner, options, std::iter::once(Job::new(options, Some(pager), 0, options.jobs)))
        }
    }
}

fn run(
    owner: &Owner,
    options: &UnmapOptions<'_>,
    jobs: impl Iterator<Item = Job>,
) -> Result<Vec<(Phase, Duration)>> {
    let start = |job: Job| User::start(options.program, "Unmap", &job);
    let mut users = jobs.map(start).collect::<Result<Vec<User>>>()?;
    let mut all = |step: &Step| -> Result<Ran> {
        let step = serde_json::to_string(step).unwrap_or_default();
        users.iter_mut().try_for_each(|user| user.tell(&step))?;
        let mut together = Ran { start_ns: u64::MAX, end_ns: 0, resident_pages: 0 };
        for user in &mut users {
            let ran: Ran = user.hear(options.stop)?;
            together.start_ns = together.start_ns.min(ran.start_ns);
            together.end_ns = together.end_ns.max(ran.end_ns);
            together.resident_pages += ran.resident_pages;
        }
        Ok(together)
    };
    all(&Step::Ready)?;
    let mut times = Vec::new();
    for phase in options.phases {
        let ran = all(&Step::Time(*phase))?;
        times.push((*phase, Duration::from_nanos(ran.end_ns - ran.start_ns)));
        match phase {
            Phase::Sequential | Phase::Random => drop(all(&Step::Check)?),
            Phase::PageOut | Phase::PageOutAgain | Phase::PageOutLast => {
                let left = all(&Step::CountResident)?.resident_pages;
                let of = options.jobs * options.pages;
                // The kernel keeps some in the lists of each CPU.
                if left > 256 + of / 10 {
                    let phase = phase.name();
                    let question = match owner {
                        Owner::Kernel(_) => ": was another swap area switched off meanwhile?",
                        Owner::Pager(..) => "",
                    };
                    let what = format!("{owner}, {phase}: {left} of {of} pages stay in memory{question}");
                    return Err(unsupported(what));
                }
            }
            Phase::Fill | Phase::Unmap => {}
        }
    }
    Ok(times)
}

/// A process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pager: Option<PagerSettings>,
    corpus: PathBuf,
    pages: usize,
    /// The number of its first thread among all processes' threads.
    first: usize,
    threads: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Step {
    Ready,
    Time(Phase),
    Check,
    CountResident,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Ran {
    start_ns: u64,
    end_ns: u64,
    resident_pages: usize,
}

impl Job {
    fn new(options: &UnmapOptions<'_>, pager: Option<PagerSettings>, first: usize, threads: usize) -> Job {
        Job { pager, corpus: options.corpus.to_owned(), pages: options.pages, first, threads }
    }

    pub(crate) fn run(&self, steps: &mut Steps) -> Result<()> {
        let corpus = Mapping::file(&self.corpus)?;
        // The corpus is in memory before the first phase.
        corpus.pages().iter().for_each(touch);
        let pager = self.pager.as_ref().map(PagerSettings::build).transpose()?;
        let memories = (0..self.threads)
            .map(|_| Memory::map(pager.as_ref(), self.pages).map(|memory| Mutex::new(Some(memory))))
            .collect::<Result<Vec<_>>>()?;
        let mut order: Vec<u32> = (0..self.pages as u32).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut order);
        while let Some(step) = steps.next() {
            let step: Step =
                serde_json::from_str(&step).map_err(|error| Error::invalid(error.to_string()))?;
            let threads = memories.iter().enumerate().map(|(nth, memory)| {
                let (corpus, order, first) = (corpus.pages(), &order, (self.first + nth) * 7);
                move |gate: &crate::harness::Gate| {
                    let mut memory = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    gate.pass();
                    carry_out(step, &mut memory, corpus, first, order)
                }
            });
            let ran = run_together(threads)?;
            steps.answer(&Ran {
                start_ns: ran.iter().map(|ran| ran.start_ns).min().unwrap_or_default(),
                end_ns: ran.iter().map(|ran| ran.end_ns).max().unwrap_or_default(),
                resident_pages: ran.iter().map(|ran| ran.resident_pages).sum(),
            })?;
        }
        Ok(())
    }
}

/// Does a step with the memory of one thread, whose first page holds the corpus's page `first`.
fn carry_out(
    step: Step,
    memory: &mut Option<Memory>,
    corpus: &[uzram::units::Page],
    first: usize,
    order: &[u32],
) -> Result<Ran> {
    let mut resident_pages = 0;
    let start_ns = now_ns();
    match (step, memory.as_mut()) {
        (Step::Time(Phase::Unmap), _) => drop(memory.take()),
        (Step::Ready, _) => {}
        (_, None) => return Err(Error::invalid("the memory is unmapped")),
        (Step::Time(Phase::Fill), Some(memory)) => memory.fill(corpus, first),
        (Step::Time(Phase::PageOut | Phase::PageOutAgain | Phase::PageOutLast), Some(memory)) => {
            memory.page_out()?;
        }
        (Step::Time(Phase::Sequential), Some(memory)) => memory.pages().iter().for_each(touch),
        (Step::Time(Phase::Random), Some(memory)) => {
            let pages = memory.pages();
            order.iter().for_each(|page| touch(&pages[*page as usize]));
        }
        (Step::Check, Some(memory)) => memory.check(corpus, first)?,
        (Step::CountResident, Some(memory)) => resident_pages = memory.resident_pages()?,
    }
    Ok(Ran { start_ns, end_ns: now_ns(), resident_pages })
}

/// Returns the time of a clock that all processes have in common.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
