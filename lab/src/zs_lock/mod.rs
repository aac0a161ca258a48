//! The table `zs-lock` (docs/lab/zs-lock.md): a pool with a lock for each size class and one to look up
//! objects, against a single lock.
//!
//! Threads keep files on a [device](uzram::device) for each design, each in its own part of the disk, which
//! stays 80 % full. A job is a thread; work is counted in pages written.

pub mod disk;
mod files;

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::zsmalloc::PoolDesign;

use crate::experiment::clock::Total;
use crate::experiment::{Bound, Designs, Expect, Experiment, Figure, Jobs, Plan, Sample, Series, Unit};
use files::{FILE_PAGES, Files};
use uzram_bench::engine::UzramDevice;
use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::Corpus;

const CASE: &str = "files";
/// The largest distance of the speed's interval from 1.
const WANTED: f64 = 0.03;
/// Threads of the author's fs_mark.
const PUBLISHED_THREADS: usize = 32;
const JOBS: [usize; 4] = [1, 2, 8, PUBLISHED_THREADS];

const BEFORE: &str = PoolDesign::Split.name();
const AFTER: &str = PoolDesign::Consolidated.name();
const BEYOND: [&str; 2] = [PoolDesign::ClassIndexed.name(), PoolDesign::Pinned.name()];

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "zs-lock",
    about: "a zsmalloc pool's locks: one for each class and one to find objects, against a single one",
    published: "zs-lock",
    cases: &[(CASE, &JOBS)],
    unit: Unit::Page,
    designs: || Designs::of(&[(BEFORE, ()), (AFTER, ()), (BEYOND[0], ()), (BEYOND[1], ())], AFTER),
    columns: &[
        ("files_per_s", "files/s", 1.0, 0),
        ("elapsed_s", "elapsed", 1.0, 3),
        ("user_s", "user", 1.0, 3),
        ("system_s", "system", 1.0, 3),
        ("voluntary_switches_per_page", "sleeps", 1000.0, 2),
        ("involuntary_switches_per_page", "preempt", 1000.0, 2),
    ],
    legend,
    open,
    expectations: &[Expect {
        case: Some(CASE),
        jobs: Jobs::Exactly(PUBLISHED_THREADS),
        before: Some(BEFORE),
        ..Expect::of(Figure::Speed, Bound::Within(1.0 - WANTED, 1.0 + WANTED))
    }],
    ..Series::NEW
};

fn legend() -> Vec<String> {
    vec![
        format!(
            "{BEFORE}: a lock for each class, and a read-write lock to find objects; {AFTER}: one lock for both; {}: a free takes its class's lock only (the table zs-free); {}: nor does finding an object take one",
            BEYOND[0], BEYOND[1]
        ),
        format!(
            "files/s: files of {FILE_PAGES} pages, each written while another is read and a third deleted; elapsed, user, system: seconds; for 1000 pages written: sleeps, times a thread waited for a lock or the system, preempt, times it was preempted"
        ),
        "published: those of btrfs".to_owned(),
    ]
}

fn open(corpus: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let corpus = corpus.load()?;
    let disk = |design: &String| {
        let device = UzramDevice::with_attributes(&[("pool_design", design.clone())], files::DISK_BYTES)?;
        Ok((device, Files::default()))
    };
    let disks = designs.iter().map(disk).collect::<Result<_>>()?;
    Ok(Box::new(Disks { corpus, disks }))
}

struct Disks {
    corpus: Corpus,
    disks: Vec<(UzramDevice, Files)>,
}

impl Experiment for Disks {
    fn begin(&mut self, _: &str) -> Result<()> {
        self.disks.iter_mut().try_for_each(|(device, files)| files.fill(&device.open, &self.corpus))
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let (device, files) = &mut self.disks[plan.design];
        let ended = files.use_by_threads(&device.open, &self.corpus, plan)?;
        let total = Total::of(&ended);
        let mut values = total.values(Unit::Page.costs());
        let files = total.units as f64 / FILE_PAGES as f64;
        values.push(("files_per_s", files / total.elapsed.as_secs_f64()));
        Ok(Sample { elapsed: total.elapsed, values })
    }
}
