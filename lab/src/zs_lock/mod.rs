//! The table `zs-lock`: a pool with a lock for each size class and one to look up objects, against a single
//! lock.
//!
//! The series is Nhat Pham's "zsmalloc: Consolidate zs_pool's migrate_lock and size_class's locks" of 2022,
//! whose cover letter shows with fs_mark that it costs next to nothing: 32 threads write files of 100 000
//! bytes to btrfs or ext4 on zram, which is 80 % full. Here threads keep files of as many pages on a
//! [device](uzram::device) for each design, each in its own part of the disk, which stays 80 % full: for each
//! file written, one is read and one deleted. Pages are compressed with lz4, so the pool's share of the work
//! is realistic. A job is a thread; work is counted in pages written.

pub mod disk;
mod files;

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::zsmalloc::PoolDesign;

use crate::experiment::clock::Total;
use crate::experiment::{
    Bound, Column, Designs, Expect, Experiment, Figure, Jobs, Plan, Sample, Series, Unit,
};
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
    designs,
    columns: &[
        Column::new("files_per_s", "files/s", 1.0, 0),
        Column::new("elapsed_s", "elapsed", 1.0, 3),
        Column::new("user_s", "user", 1.0, 3),
        Column::new("system_s", "system", 1.0, 3),
        Column::new("voluntary_switches_per_page", "sleeps", 1000.0, 2),
        Column::new("involuntary_switches_per_page", "preempt", 1000.0, 2),
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

fn designs() -> Designs {
    Designs {
        before: vec![BEFORE.to_owned()],
        after: AFTER.to_owned(),
        beyond: BEYOND.map(str::to_owned).to_vec(),
    }
}

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
        let attributes = [("pool_design", design.clone())];
        Ok(Disk {
            device: UzramDevice::with_attributes(&attributes, files::DISK_BYTES)?,
            files: Files::default(),
        })
    };
    let disks = designs.iter().map(disk).collect::<Result<_>>()?;
    Ok(Box::new(Disks { corpus, disks }))
}

struct Disks {
    corpus: Corpus,
    disks: Vec<Disk>,
}

struct Disk {
    device: UzramDevice,
    files: Files,
}

impl Experiment for Disks {
    fn begin(&mut self, _: &str) -> Result<()> {
        self.disks.iter_mut().try_for_each(|disk| disk.files.fill(disk.device.disk(), &self.corpus))
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let Disk { device, files } = &mut self.disks[plan.design];
        let ended = files.use_by_threads(device.disk(), &self.corpus, plan)?;
        let total = Total::of(&ended);
        let Total { elapsed, usage, units: pages } = total;
        let values = vec![
            ("files_per_s", pages as f64 / FILE_PAGES as f64 / elapsed.as_secs_f64()),
            ("user_s", usage.user.as_secs_f64()),
            ("system_s", usage.system.as_secs_f64()),
            ("voluntary_switches_per_page", total.per_unit(usage.voluntary_switches as f64)),
            ("involuntary_switches_per_page", total.per_unit(usage.involuntary_switches as f64)),
        ];
        Ok(Sample { elapsed, values })
    }
}
