//! The table `unmap` (docs/lab/unmap.md): memory that is filled, paged out, faulted in and unmapped, a
//! pager's beside the kernel's on a swap area of zram.
//!
//! A job maps as much memory as four times the corpus, 256 MiB with the default one; the time by which
//! designs are compared is that to unmap it while it is paged out. The other phases are columns.

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use uzram::Result;
use uzram::codec::Kind;
use uzram::designs::PoolDesign;
use uzram::units::pages_to_bytes;
use uzram_bench::harness::corpus::{Corpus, Saved};
use uzram_bench::harness::report::mib;
use uzram_bench::harness::{Source, command, go_on};
use uzram_bench::pager::unmap::{Owner, Phase, UnmapOptions, check_kernel, measure};
use uzram_pager::Trap;

use crate::experiment::{
    Bound, Designs, Expect, Experiment, Figure, Jobs, Length, Plan, Sample, Series, Unit, cpus,
};

/// Numbers of jobs that the author measured.
const JOBS: [usize; 3] = [1, 2, 4];
const CASE: &str = "paged-out";
/// Each job's memory, in times of the corpus.
const CORPORA: usize = 4;

const JOB_MIB: &str = "job_mib";

const KERNEL_LZ4: &str = "kernel-lz4";
const KERNEL_LZO: &str = "kernel-lzo-rle";

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "unmap",
    about: "paging out, faulting in and unmapping: a pager against the kernel's swap on zram",
    published: "zs-free",
    cases: &[(CASE, &JOBS)],
    unit: Unit::Page,
    designs,
    columns: &[
        (JOB_MIB, "MiB", 1.0, 0),
        (phase_name(Phase::Fill), "fill", 1000.0, 0),
        (phase_name(Phase::PageOut), "out", 1000.0, 0),
        (phase_name(Phase::Sequential), "seq", 1000.0, 0),
        (phase_name(Phase::PageOutAgain), "again", 1000.0, 0),
        (phase_name(Phase::Random), "random", 1000.0, 0),
        (phase_name(Phase::PageOutLast), "last", 1000.0, 0),
        (phase_name(Phase::Unmap), "unmap", 1000.0, 1),
    ],
    legend,
    length: Length::Fixed {
        // Of the slowest side. More jobs than CPUs take turns.
        seconds: |_, jobs| 4.0 * jobs.div_ceil(cpus()) as f64,
        is_of_corpus: true,
    },
    open,
    expectations: &[Expect {
        jobs: Jobs::Exactly(1),
        before: Some(KERNEL_LZ4),
        ..Expect::of(Figure::Speed, Bound::AtLeast(2.5))
    }],
    ..Series::NEW
};

const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Fill => "fill_s",
        Phase::PageOut => "page_out_s",
        Phase::Sequential => "sequential_s",
        Phase::PageOutAgain => "page_out_again_s",
        Phase::Random => "random_s",
        Phase::PageOutLast => "page_out_last_s",
        Phase::Unmap => "unmap_s",
    }
}

/// Returns the pager's ways to trap touches that this system has, the best first; where it has none, the
/// last, whose measurement says why.
fn traps() -> Vec<Trap> {
    let all: Vec<_> = Trap::ALL.into_iter().filter(|trap| trap.check().is_ok()).collect();
    if all.is_empty() { vec![Trap::Signal] } else { all }
}

/// Returns the name of the pager by its best trap with a design of the pool's locks.
fn pool(design: PoolDesign) -> String {
    format!("{}-{}", traps()[0].name(), design.name())
}

/// The sides that this system has. The author's figures are those of the first one.
fn designs() -> Designs {
    let mut before = vec![pool(PoolDesign::Split)];
    if check_kernel().is_ok() {
        before.extend([KERNEL_LZ4, KERNEL_LZO].map(str::to_owned));
    }
    let beyond = traps().into_iter().map(|trap| trap.name().to_owned()).collect();
    Designs { before, after: pool(PoolDesign::ClassIndexed), beyond }
}

fn legend() -> Vec<String> {
    let mut legend = vec![
        format!(
            "kernel-…: processes on a swap area of the kernel's zram with that algorithm; the others: threads with a region each of one pager, compressed with {}, with the pool's locks as before the series ({}), as after it ({}), and as they are now, by each way to trap touches",
            Kind::for_memory().name(),
            pool(PoolDesign::Split),
            pool(PoolDesign::ClassIndexed)
        ),
        format!("MiB: each job's memory, {CORPORA} times the corpus"),
        "ms of each phase, from the start of the first job to the end of the last one: fill, every page is written; out, all of it is paged out (kernel: MADV_PAGEOUT); seq, every page is touched in order; again, it is paged out after it was read; random, every page is touched in random order; last, as again; unmap, it is unmapped while it is paged out. The gain is that of unmap".to_owned(),
    ];
    if let Err(error) = check_kernel() {
        legend.push(format!("the kernel's swap on zram left out: {error}"));
    }
    for trap in Trap::ALL {
        if let Err(error) = trap.check() {
            legend.push(format!("the pager with {} left out: {error}", trap.name()));
        }
    }
    legend
}

/// Returns whose memory a design is, and the phases that are measured of it.
fn owner(name: &str) -> Result<(Owner, &'static [Phase])> {
    let kernel = [(KERNEL_LZ4, "lz4"), (KERNEL_LZO, "lzo-rle")];
    if let Some((_, algorithm)) = kernel.into_iter().find(|(kernel, _)| *kernel == name) {
        return Ok((Owner::Kernel(algorithm), &Phase::ALL));
    }
    if let Some(trap) = Trap::ALL.into_iter().find(|trap| trap.name() == name) {
        return Ok((Owner::Pager(trap, None), &Phase::ALL));
    }
    let design = PoolDesign::ALL.into_iter().find(|design| pool(*design) == name);
    let design = design.ok_or_else(|| uzram::Error::invalid(format!("there is no side '{name}'")))?;
    // Only unmapping depends on the pool's locks.
    Ok((Owner::Pager(traps()[0], Some(design.name())), &Phase::SHORT))
}

struct Sides {
    owners: Vec<(Owner, &'static [Phase])>,
    program: PathBuf,
    corpus: Saved,
    pages: usize,
}

fn open(source: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let corpus: Corpus = source.load()?;
    Ok(Box::new(Sides {
        owners: designs.iter().map(|name| owner(name)).collect::<Result<_>>()?,
        program: command::this_program()?,
        pages: CORPORA * corpus.page_count(),
        corpus: Saved::new(source, &corpus)?,
    }))
}

impl Experiment for Sides {
    fn fixed_work(&self, jobs: usize) -> Option<u64> {
        Some((jobs * self.pages) as u64)
    }

    fn begin(&mut self, _: &str) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        if go_on(plan.stop).is_err() {
            // It does not count.
            return Ok(Sample { elapsed: Duration::ZERO, values: Vec::new() });
        }
        let (owner, phases) = &self.owners[plan.design];
        let times = measure(
            owner,
            &UnmapOptions {
                program: &self.program,
                corpus: self.corpus.path(),
                pages: self.pages,
                jobs: plan.jobs,
                phases,
                stop: plan.stop,
            },
        )?;
        let unmap = times.iter().find(|(phase, _)| *phase == Phase::Unmap).map(|(_, time)| *time);
        let mut values: Vec<_> =
            times.iter().map(|(phase, time)| (phase_name(*phase), time.as_secs_f64())).collect();
        values.push((JOB_MIB, mib(pages_to_bytes(self.pages as u64))));
        Ok(Sample { elapsed: unmap.unwrap_or_default(), values })
    }
}
