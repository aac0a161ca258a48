//! The table `streams-nbd`: the same change as in `streams`, seen by a client: fio reads and writes an NBD server's disk.
//!
//! Each design is a `uzram up` of its own; where nbdkit is installed its memory plugin is measured beside them, without
//! compression and with zstd. Every disk is filled with the corpus. A job is a job of fio, with its own connection; fio
//! runs for a fixed time, and the designs are compared by the time that as many bytes as the disk has would take.
//!
//! The case [`LOW_MEMORY`] writes while each server's memory is limited, so that the kernel swaps about half of its contents
//! out, to its own zram: whoever compresses a page may have to wait for memory, and keeps a stream for so long. The author's test under low memory is linked from his message, and not part of it.

use std::path::PathBuf;
use std::time::Duration;

use uzram::units::{PAGE_SIZE, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::published;
use crate::experiment::{
    Bound, Column, Designs, Expect, Experiment, Figure, Jobs, Length, Plan, Row, Sample, Series, Unit, spoken,
};
use uzram_bench::block::cgroup::Cgroup;
use uzram_bench::block::swap_area::KernelSwap;
use uzram_bench::harness::Source;
use uzram_bench::harness::command::uzram_program;
use uzram_bench::harness::corpus::{Corpus, Saved};
use uzram_bench::harness::process::is_missing;
use uzram_bench::nbd::{Fio, Server, fill, missing_client};
use uzram_bench::pager::limited::LimitWatch;
use uzram_bench::pager::unmap::kernel_obstacle;

/// Numbers of fio jobs.
const JOBS: [usize; 2] = [2, MOST_JOBS];
const MOST_JOBS: usize = published::JOBS;
/// The case in which servers have less memory than their contents take.
pub const LOW_MEMORY: &str = "low-memory";
/// What fio does in it.
const LOW_MEMORY_PATTERN: &str = "randwrite";
/// The share of its contents' memory that a server loses there, and what it gets back: without any, the kernel may find
/// nothing to swap out, and the server waits.
const LOST_MEMORY: f64 = 0.5;
const SLACK_BYTES: u64 = 4 << 20;
/// The kernel's algorithm for what is swapped out, and the size of its swap area.
const SWAP_ALGORITHM: &str = "lz4";
const SWAP_BYTES: u64 = 1 << 30;
/// How long fio runs, and how long it takes to start and end.
const RUNTIME: Duration = Duration::from_millis(300);
const FIO_S: f64 = 0.25;
/// nbdkit's sides, each with its allocator.
const NBDKIT: [(&str, &str); 2] = [("nbdkit-malloc", UNCOMPRESSED), ("nbdkit-zstd", "zstd")];
const UNCOMPRESSED: &str = "malloc";
/// The column of the share of its contents' memory that a server keeps.
const KEPT: &str = "kept_share";
/// uzram's algorithm.
const ALGORITHM: &str = "lz4";

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "streams-nbd",
    about: "the same as streams, through an NBD server and fio, and with little memory",
    title: super::SERIES.title,
    author: super::SERIES.author,
    date: super::SERIES.date,
    cases: &[
        ("read", &JOBS),
        ("randread", &JOBS),
        ("write", &JOBS),
        ("randwrite", &JOBS),
        ("rw", &JOBS),
        ("randrw", &JOBS),
        (LOW_MEMORY, &JOBS),
    ],
    slow_cases: &["read", "randread", "write", "rw", "randrw"],
    unit: Unit::Page,
    designs,
    columns: &[
        Column::new("mb_per_s", "MB/s", 1.0, 0),
        Column::new("memory_mib", "memory", 1.0, 0),
        Column::new(KEPT, "kept", 100.0, 0),
        Column::new("limit_raised", "raised", 1.0, 0),
    ],
    legend,
    total: None,
    counted_function: "",
    length: Length::Fixed { seconds: |_, _| RUNTIME.as_secs_f64() + FIO_S, is_of_corpus: false },
    open,
    published: |case, jobs, before| published::of_pattern(case.parse().ok()?, jobs, before),
    expectations: &[Expect {
        case: None,
        jobs: Jobs::AtLeast(1),
        before: None,
        figure: Figure::Speed,
        bound: Bound::NotBelow(1.0),
    }],
    findings,
};

/// The designs of the table `streams`, and nbdkit where it is installed.
fn designs() -> Designs {
    let nbdkit = if is_missing("nbdkit") { &[][..] } else { &NBDKIT[..] };
    Designs { beyond: nbdkit.iter().map(|(name, _)| (*name).to_owned()).collect(), ..super::designs() }
}

fn legend() -> Vec<String> {
    let mut legend = vec![
        format!(
            "designs: servers `uzram up` with --streams as in the table {}, with {ALGORITHM}; nbdkit-…: nbdkit's memory plugin with that allocator, of which malloc compresses nothing",
            super::SERIES.name
        ),
        format!(
            "MB/s: 10^6 bytes a second, read and written together; memory: MiB that the server's cgroup has; {LOW_MEMORY}: {LOW_MEMORY_PATTERN} while the server's memory is limited to what it took, less {:.0} % of its contents, and {} MiB, and the kernel swaps the rest out to its zram; kept: the share of the contents that may stay, in %; raised: how often the limit was raised for a moment, as the kernel found nothing to swap out",
            100.0 * LOST_MEMORY,
            SLACK_BYTES >> 20
        ),
    ];
    if is_missing("nbdkit") {
        legend.push("nbdkit left out: the program is missing".to_owned());
    }
    legend
}

fn open(source: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let missing = |what: String| Error::new(ErrorKind::Unsupported, what);
    if let Some(program) = missing_client() {
        return Err(missing(format!("the program {program} is missing: install it")));
    }
    let program = uzram_program().ok_or_else(|| missing("the program uzram is missing".to_owned()))?;
    let corpus = source.load()?;
    let saved = Saved::new(source, &corpus)?;
    let designs = designs.to_vec();
    Ok(Box::new(Servers {
        program,
        corpus,
        saved,
        designs,
        pattern: "read",
        servers: Vec::new(),
        swap: None,
    }))
}

/// A server for each design.
struct Servers {
    program: PathBuf,
    corpus: Corpus,
    saved: Saved,
    designs: Vec<String>,
    pattern: &'static str,
    servers: Vec<Limited>,
    /// What the servers' memory is swapped out to; after them, because it must be in use no more when it ends.
    swap: Option<KernelSwap>,
}

/// A server in a cgroup, where there are some.
struct Limited {
    server: Server,
    cgroup: Option<Cgroup>,
    /// Has the server wait where it would be killed for its limit.
    watch: Option<LimitWatch>,
    /// The memory that its contents took, and all that it took before it was limited, when it had had clients.
    contents_bytes: u64,
    used_bytes: u64,
}

impl Limited {
    /// Limits its memory.
    ///
    /// # Errors
    /// `Unsupported` if the kernel finds too little to swap out.
    fn limit(&mut self) -> Result<()> {
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        self.used_bytes = cgroup.used_bytes()?;
        let lost_bytes = (LOST_MEMORY * self.contents_bytes as f64) as u64;
        let limit_bytes = (self.used_bytes + SLACK_BYTES).saturating_sub(lost_bytes);
        let watch = LimitWatch::start(cgroup, limit_bytes)?;
        if watch.limit_bytes() > limit_bytes {
            let what = format!(
                "the kernel left {} bytes of a server in memory, {limit_bytes} were to stay",
                watch.limit_bytes()
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        self.watch = Some(watch);
        Ok(())
    }

    /// Returns the share of its contents' memory that it keeps under its limit, if it has one.
    fn kept(&self) -> Option<f64> {
        let lost_bytes = self.used_bytes as f64 - self.watch.as_ref()?.limit_bytes() as f64;
        // Small contents lose nothing.
        Some((1.0 - lost_bytes / self.contents_bytes as f64).min(1.0))
    }

    /// Returns how often its limit was raised.
    fn raised(&self) -> usize {
        self.watch.as_ref().map_or(0, LimitWatch::raised)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        self.watch = None;
        // What is swapped out comes back when the swap area is switched off, into the same cgroup, if the server's processes
        // still end then.
        if let Some(Err(error)) = self.cgroup.as_ref().map(Cgroup::unlimit) {
            eprintln!("the limit of a cgroup stays: {error}");
        }
    }
}

impl Servers {
    fn start(&self, design: &str, cgroup: Option<Cgroup>) -> Result<Limited> {
        let size_bytes = pages_to_bytes(self.corpus.page_count() as u64);
        let nbdkit = NBDKIT.into_iter().find(|(name, _)| *name == design);
        let server = match nbdkit {
            Some((_, allocator)) => Server::nbdkit(allocator, size_bytes, cgroup.as_ref())?,
            None => {
                let options = ["--streams", design];
                Server::uzram(&self.program, ALGORITHM, size_bytes, &options, cgroup.as_ref())?
            }
        };
        let used_bytes = || cgroup.as_ref().map_or(Ok(0), Cgroup::used_bytes);
        let empty_bytes = used_bytes()?;
        fill(&server, self.saved.path())?;
        let contents_bytes = match nbdkit {
            // It takes the memory of the whole disk when it starts.
            Some((_, UNCOMPRESSED)) => size_bytes,
            _ => used_bytes()?.saturating_sub(empty_bytes),
        };
        Ok(Limited { server, cgroup, watch: None, contents_bytes, used_bytes: 0 })
    }

    /// Limits the memory of all servers; that of uzram's, which are compared, to as much.
    fn limit(&mut self) -> Result<()> {
        let is_uzrams = |design: &String| NBDKIT.iter().all(|(name, _)| name != design);
        for nth in 0..self.servers.len() {
            self.use_by(MOST_JOBS, &self.servers[nth], 0)?;
            self.servers[nth].limit()?;
        }
        let servers = self.designs.iter().zip(&self.servers);
        let mut of_uzram =
            servers.filter(|(design, _)| is_uzrams(design)).filter_map(|(_, server)| server.watch.as_ref());
        let most_bytes = of_uzram.clone().map(LimitWatch::limit_bytes).max().unwrap_or_default();
        of_uzram.try_for_each(|watch| watch.raise(most_bytes))
    }

    /// Runs fio; returns 10^6 bytes a second.
    fn use_by(&self, jobs: usize, server: &Limited, seed: u64) -> Result<f64> {
        let fio = Fio { rw: self.pattern, jobs, duration: RUNTIME, seed };
        fio.run(server.server.uri(), &self.corpus)
    }
}

impl Experiment for Servers {
    fn begin(&mut self, case: &str) -> Result<()> {
        let is_limited = case == LOW_MEMORY;
        let pattern = if is_limited { LOW_MEMORY_PATTERN } else { case };
        let known = SERIES.cases.iter().map(|(case, _)| *case).find(|case| *case == pattern);
        self.pattern = known.ok_or_else(|| Error::invalid(format!("there is no case '{case}'")))?;
        let no_cgroup = Cgroup::obstacle();
        if let Some(obstacle) = no_cgroup.clone().or_else(kernel_obstacle).filter(|_| is_limited) {
            return Err(Error::new(ErrorKind::Unsupported, obstacle));
        }
        self.servers.clear();
        for design in &self.designs {
            let cgroup = if no_cgroup.is_some() { None } else { Some(Cgroup::new()?) };
            self.servers.push(self.start(design, cgroup)?);
        }
        self.swap = None;
        if is_limited {
            self.swap = Some(KernelSwap::on_named(SWAP_ALGORITHM, SWAP_BYTES)?);
            self.limit()?;
        }
        Ok(())
    }

    fn fixed_work(&self, _: usize) -> Option<u64> {
        Some(self.corpus.page_count() as u64)
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let server = &self.servers[plan.design];
        let raised_before = server.raised();
        let mb_per_s = self.use_by(plan.jobs, server, plan.seed + 1)?;
        let work_bytes = plan.work as f64 * PAGE_SIZE as f64;
        let mut values = vec![("mb_per_s", mb_per_s)];
        if let Some(cgroup) = &server.cgroup {
            values.push(("memory_mib", cgroup.used_bytes()? as f64 / f64::from(1 << 20)));
        }
        if let Some(kept) = server.kept() {
            values.push((KEPT, kept));
            values.push(("limit_raised", (server.raised() - raised_before) as f64));
        }
        Ok(Sample { elapsed: Duration::from_secs_f64(work_bytes / (mb_per_s * 1e6)), values })
    }
}

/// Returns what little memory costs each design.
fn findings(rows: &[Row], _: usize) -> Vec<String> {
    let median = |case: &str, jobs: usize, design: &str, figure: &str| {
        let rows = rows.iter().filter(|row| row.case == case);
        crate::experiment::side(rows, jobs, design)?.median(figure)
    };
    let mut jobs: Vec<usize> = rows.iter().filter(|row| row.case == LOW_MEMORY).map(|row| row.jobs).collect();
    jobs.dedup();
    let of_jobs = |jobs: usize| {
        let kept = designs().all().into_iter().filter_map(|design| {
            let speed = |case: &str| median(case, jobs, &design, "mb_per_s");
            let speed = speed(LOW_MEMORY)? / speed(LOW_MEMORY_PATTERN)?;
            let memory = median(LOW_MEMORY, jobs, &design, KEPT)?;
            Some(format!("{} {:.0} and {:.0} %", spoken(&design), 100.0 * speed, 100.0 * memory))
        });
        let kept: Vec<String> = kept.collect();
        let of_all = format!(
            "With {jobs} jobs and little memory, servers keep of their speed, and of their contents' memory: {}.",
            kept.join(", ")
        );
        (!kept.is_empty()).then_some(of_all)
    };
    jobs.into_iter().filter_map(of_jobs).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::experiment::testing::{row, side};

    #[test]
    fn what_little_memory_costs_is_told_by_design() {
        let designs = designs();
        let at = |case, before: f64, after: f64| {
            let values = |speed: f64| [("elapsed_s", 1.0), ("mb_per_s", speed), (KEPT, 0.6)];
            let of = |design: &str, speed: f64| side(design, &values(speed));
            row(&SERIES, case, 2, of(&designs.before[0], before), of(&designs.after, after))
        };
        let said = findings(&[at("randwrite", 100.0, 200.0), at(LOW_MEMORY, 25.0, 100.0)], 2);
        let all = format!("a list of {} 25 and 60 %, percpu 50 and 60 %.", designs.before[0]);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("With 2 jobs and little memory") && said[0].ends_with(&all), "{said:?}");
        assert_eq!(findings(&[at("randwrite", 100.0, 200.0)], 2), Vec::<String>::new());
    }

    #[test]
    fn published_rates_stand_beside_the_same_patterns() {
        let published = |case| (SERIES.published)(case, 10, 0);
        assert!(published("randwrite").is_some() && published(LOW_MEMORY).is_none());
        assert_eq!((published("rw").unwrap().ratio * 100.0).round(), 110.0);
    }
}
