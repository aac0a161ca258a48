//! Zipf access to four times the memory that there is: a pager's region, beside plain memory in a cgroup of
//! the memory controller with the same limit, which swaps to the kernel's zram.
//!
//! The limit of a pager counts compressed memory, and that of a cgroup does not: zram's pool is the kernel's.
//! So a pager is measured twice: with the cgroup's limit and a spill file, and with the memory that cgroup
//! and pool have together.
//!
//! All of them are processes, which fill their memory, serve a number of accesses, and then take turns.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzram::units::{Page, page_of, pages_to_bytes};
use uzram::{Error, Result};
use uzram_pager::Trap;

use super::memory::{Mapping, Memory, changed, corpus_page};
use super::settings::PagerSettings;
use crate::block::cgroup::LimitedCgroup;
use crate::block::swap_area::KernelSwap;
use crate::engine::zipf::{Access, PAGES_PER_LIMIT, WARM_UP_PER_PAGE, accesses};
use crate::harness::report::{Figure, each, mib};
use crate::harness::rounds::in_turn_by_jobs;
use crate::harness::steps::{Steps, User};
use crate::harness::{Options, Report, SEED, io_error, proc_bytes};

/// Accesses between two looks at the clock.
const LOOK_EVERY: usize = 64;
const SAMPLE_EVERY: Duration = Duration::from_millis(10);

pub(super) fn measure(
    options: &Options,
    rounds: usize,
    corpus: &Path,
    traps: &[Trap],
    kernel: bool,
    report: &mut Report,
) -> Result<()> {
    const TABLE: &str = "Zipf access in less memory";
    let limit_bytes = options.amount(64 << 20, 4 << 20);
    let pages = (PAGES_PER_LIMIT * page_of(limit_bytes)) as usize;
    let size_bytes = pages_to_bytes(pages as u64);
    let start = |pager, cgroup| -> Result<User> {
        let job = Job { pager, cgroup, corpus: corpus.to_owned(), pages };
        let mut user = User::start(&options.bench, "Zipf", &job)?;
        user.ask::<Slice>("fill", &options.stop)?;
        user.ask::<Slice>(&format!("0 {}", WARM_UP_PER_PAGE * pages), &options.stop)?;
        Ok(user)
    };

    // Dropped after the processes that use them.
    let mut area = None;
    let mut cgroup = None;
    let mut users = Vec::new();
    if kernel {
        area = Some(KernelSwap::on("lz4", size_bytes + size_bytes / 4)?);
        let cgroup = cgroup.insert(LimitedCgroup::new(limit_bytes)?);
        users.push(("kernel".to_owned(), limit_bytes, start(None, Some(cgroup.dir().to_owned()))?));
    }
    // Without a kernel to compare with, what mixed pages take.
    let pool_bytes = area.as_ref().map(KernelSwap::pool_bytes).transpose()?;
    let more_bytes = limit_bytes + pool_bytes.unwrap_or(size_bytes / 2);
    for trap in traps {
        let spill = Some((options.dir.clone(), size_bytes));
        let spilling = PagerSettings { spill, ..PagerSettings::new(*trap, limit_bytes) };
        users.push((
            format!("{}, with a spill file", trap.name()),
            limit_bytes,
            start(Some(spilling), None)?,
        ));
        let plain = PagerSettings::new(*trap, more_bytes);
        users.push((format!("{}, as much memory", trap.name()), more_bytes, start(Some(plain), None)?));
    }

    let step = format!("{} 0", options.duration.as_millis());
    let slices = in_turn_by_jobs(rounds, &[1], users.len(), &options.stop, |turn| {
        users[turn.variant].2.ask::<Slice>(&step, &options.stop)
    })?;
    let speeds: Vec<Vec<f64>> = slices[0].iter().map(|rounds| each(rounds, Slice::per_s)).collect();
    for (nth, (row, limit_bytes, user)) in users.iter_mut().enumerate() {
        report.row(TABLE, row, &[("limit MiB", mib(*limit_bytes))]);
        report.rounds(TABLE, row, "accesses/s", &speeds[nth]);
        if row == "kernel" {
            continue;
        }
        if kernel {
            report.ratio(TABLE, row, "/ kernel zram", [&speeds[nth], &speeds[0]]);
        }
        let peak_bytes = user.ask::<u64>("memory", &options.stop)?;
        let beyond = mib(peak_bytes) - mib(*limit_bytes);
        report.row(TABLE, row, &[("peak MiB", mib(peak_bytes)), ("beyond limit MiB", beyond)]);
    }
    drop(users);
    if let Some(raised) = cgroup.as_ref().map(LimitedCgroup::raised).filter(|raised| *raised > 0) {
        report.note(format!(
            "the cgroup's limit was raised for a moment, as the kernel found nothing to reclaim: {raised} times"
        ));
    }
    drop(cgroup);
    area.map_or(Ok(()), KernelSwap::off)?;
    for trap in traps.iter().map(|trap| trap.name()) {
        let of_trap = |figure: &&Figure| figure.column == "beyond limit MiB" && figure.row.starts_with(trap);
        let most = report.figures.iter().filter(of_trap).map(|figure| figure.value).fold(f64::NAN, f64::max);
        report.row("Zipf access, most memory", trap, &[("beyond limit MiB", most)]);
    }
    let pool = pool_bytes.map(|bytes| format!(", {:.1} MiB of kernel zram's pool", mib(bytes)));
    report.note(format!("Zipf access to {:.0} MiB{}", mib(size_bytes), pool.unwrap_or_default()));
    Ok(())
}

/// A process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// `None`: plain memory.
    pager: Option<PagerSettings>,
    /// The cgroup that it enters.
    cgroup: Option<PathBuf>,
    corpus: PathBuf,
    pages: usize,
}

/// Accesses that were served.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Slice {
    accesses: usize,
    elapsed_ns: u64,
}

impl Slice {
    fn per_s(&self) -> f64 {
        self.accesses as f64 / (self.elapsed_ns.max(1) as f64 / 1e9)
    }
}

impl Job {
    /// Is the process. The steps: `fill`; `MS COUNT`, accesses for so long, at least so many; `memory`, the
    /// peak.
    pub(crate) fn run(&self, steps: &mut Steps) -> Result<()> {
        // In memory before the cgroup is entered, so that they are not counted there.
        let (corpus, accesses) = (Mapping::file(&self.corpus)?, accesses(self.pages, SEED));
        corpus.pages().iter().for_each(super::memory::touch);
        if let Some(cgroup) = &self.cgroup {
            let path = cgroup.join("cgroup.procs");
            fs::write(&path, std::process::id().to_string()).map_err(|error| io_error(&path, error))?;
        }
        let before_bytes = own_bytes();
        let (peak_bytes, ends) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while self.pager.is_some() && !ends.load(Ordering::Relaxed) {
                    peak_bytes.fetch_max(own_bytes(), Ordering::Relaxed);
                    std::thread::sleep(SAMPLE_EVERY);
                }
            });
            let peak = || peak_bytes.load(Ordering::Relaxed).saturating_sub(before_bytes);
            let outcome = self.serve(steps, corpus.pages(), &accesses, peak);
            ends.store(true, Ordering::Relaxed);
            outcome
        })
    }

    fn serve(
        &self,
        steps: &mut Steps,
        corpus: &[Page],
        accesses: &[Access],
        peak_bytes: impl Fn() -> u64,
    ) -> Result<()> {
        let pager = self.pager.as_ref().map(PagerSettings::build).transpose()?;
        let mut accessed = Accessed {
            memory: Memory::map(pager.as_ref(), self.pages)?,
            corpus,
            holds: (0..self.pages as u32).collect(),
            accesses,
            done: 0,
        };
        while let Some(step) = steps.next() {
            if step == "memory" {
                steps.answer(&peak_bytes())?;
                continue;
            }
            let start = Instant::now();
            let accesses = match step.split_once(' ') {
                None => {
                    accessed.memory.fill(corpus, 0);
                    self.pages
                }
                Some((ms, least)) => {
                    let number = |text: &str| text.parse().map_err(|_| Error::invalid(text.to_owned()));
                    accessed.go(Duration::from_millis(number(ms)?), number(least)? as usize)?
                }
            };
            let elapsed_ns = start.elapsed().as_nanos() as u64;
            steps.answer(&Slice { accesses, elapsed_ns })?;
        }
        Ok(())
    }
}

struct Accessed<'a> {
    memory: Memory,
    corpus: &'a [Page],
    /// The corpus's page that each page holds.
    holds: Vec<u32>,
    accesses: &'a [Access],
    done: usize,
}

impl Accessed<'_> {
    /// Serves accesses for so long, and at least `least`.
    fn go(&mut self, duration: Duration, least: usize) -> Result<usize> {
        let start = Instant::now();
        let first = self.done;
        while self.done - first < least || start.elapsed() < duration {
            for _ in 0..LOOK_EVERY {
                self.next()?;
            }
        }
        Ok(self.done - first)
    }

    fn next(&mut self) -> Result<()> {
        let Access { page, written } = self.accesses[self.done % self.accesses.len()];
        self.done += 1;
        let page = page as usize;
        if let Some(corpus_page_number) = written {
            self.holds[page] = corpus_page_number;
            self.memory.pages_mut()[page] = *corpus_page(self.corpus, corpus_page_number as usize);
        } else if self.memory.pages()[page] != *corpus_page(self.corpus, self.holds[page] as usize) {
            return Err(changed(page));
        }
        Ok(())
    }
}

/// Returns the private and shared memory of this process.
fn own_bytes() -> u64 {
    proc_bytes("self", "status", &["RssAnon", "RssShmem"]).unwrap_or(0)
}
