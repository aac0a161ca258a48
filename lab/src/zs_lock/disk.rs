//! The table `zs-lock-disk`: the same change as in `zs-lock`, as its author measured it: `fs_mark` on ext4
//! and btrfs, on an attached block device.
//!
//! Each design is a `uzram up --attach` of its own, and the kernel's zram is measured beside them where there
//! is one. `fs_mark` makes files of 100 000 bytes on a new file system, which also discards what the disk
//! held, until the disk is seven tenths full, syncs each, and keeps them; a job is a thread.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use uzram::{Error, ErrorKind, Result};

use super::{AFTER, BEFORE, PUBLISHED_THREADS};
use crate::experiment::{
    Bound, Designs, Expect, Experiment, Figure, Jobs, Length, Plan, Sample, Series, Unit,
};
use uzram_bench::block::disk::{Attached, Mounted};
use uzram_bench::block::file_system::{self, SMALL_FILE_BYTES, fs_mark};
use uzram_bench::block::{check_disk, check_kernel};
use uzram_bench::engine::KernelZram;
use uzram_bench::harness::command::uzram_program;
use uzram_bench::harness::process::runtime_dir;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source, unsupported};

const KERNEL: &str = "kernel-zram";
const ALGORITHM: &str = "lz4";
/// The file systems, each a case.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "btrfs"];
const DISK_BYTES: u64 = 640 << 20;
/// The share of the disk that its files fill: btrfs keeps its metadata twice, and found no room for 80 % now
/// and then.
const FULL: f64 = 0.7;
const THREADS: [usize; 1] = [PUBLISHED_THREADS];
const FS_MARK_S: f64 = 1.5;
/// The largest distance of the speed's interval from 1.
const WANTED: f64 = 0.03;

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "zs-lock-disk",
    about: "the same as zs-lock: files on ext4 and btrfs, on a block device",
    published: "zs-lock",
    cases: &[(FILE_SYSTEMS[0], &THREADS), (FILE_SYSTEMS[1], &THREADS)],
    slow_cases: &[FILE_SYSTEMS[1]],
    unit: Unit::Page,
    designs,
    columns: &[("elapsed_s", "elapsed", 1.0, 2), ("files_per_s", "files/s", 1.0, 0)],
    legend,
    length: Length::Fixed { seconds: |_, _| FS_MARK_S, is_of_corpus: false },
    open,
    expectations: &[Expect {
        case: Some(FILE_SYSTEMS[0]),
        jobs: Jobs::Exactly(PUBLISHED_THREADS),
        before: Some(BEFORE),
        ..Expect::of(Figure::Speed, Bound::Within(1.0 - WANTED, 1.0 + WANTED))
    }],
    ..Series::NEW
};

fn designs() -> Designs {
    let kernel = check_kernel().is_ok().then(|| KERNEL.to_owned());
    Designs { before: vec![BEFORE.to_owned()], after: AFTER.to_owned(), beyond: kernel.into_iter().collect() }
}

fn legend() -> Vec<String> {
    let mut legend = vec![
        format!(
            "{BEFORE}, {AFTER}: a daemon `uzram up --attach` with these locks; {KERNEL}: the kernel's own zram; all with {ALGORITHM}"
        ),
        format!(
            "{}: fs_mark makes files of {SMALL_FILE_BYTES} bytes, syncs each and fills {:.0} % of a disk of {} MiB, a job is a thread; elapsed: seconds, files/s: files made in one",
            FILE_SYSTEMS.join(", "),
            100.0 * FULL,
            DISK_BYTES >> 20
        ),
    ];
    if let Err(error) = check_kernel() {
        legend.push(format!("{KERNEL} left out: {error}"));
    }
    legend
}

fn open(source: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let program = uzram_program().ok_or_else(|| unsupported("the program uzram is missing"))?;
    check_disk(&program)?;
    let dir = runtime_dir()?;
    let share = (source.load()?.page_count() as f64 / DEFAULT_CORPUS_PAGES as f64).min(1.0);
    let designs = designs.to_vec();
    let disks = Disks { program, designs, share, file_system: "", disks: Vec::new(), dir };
    Ok(Box::new(disks))
}

struct Disks {
    program: PathBuf,
    designs: Vec<String>,
    /// The share of the disk's files that are made: a corpus smaller than usual asks for a short run.
    share: f64,
    /// That of the case begun last.
    file_system: &'static str,
    disks: Vec<Disk>,
    dir: TempDir,
}

enum Disk {
    Uzram(Attached),
    Kernel(KernelZram),
}

impl Disk {
    fn new(program: &Path, design: &str) -> Result<Disk> {
        match design {
            KERNEL => KernelZram::add(ALGORITHM, DISK_BYTES).map(Disk::Kernel),
            _ => {
                let options = ["--pool-design", design];
                Attached::new(program, ALGORITHM, DISK_BYTES, &options).map(Disk::Uzram)
            }
        }
    }

    fn path(&self) -> PathBuf {
        match self {
            Disk::Uzram(attached) => attached.path().to_owned(),
            Disk::Kernel(zram) => zram.path(),
        }
    }
}

impl Disks {
    fn mount(&self, design: usize) -> Result<Mounted> {
        let dir = self.dir.path().join(format!("mnt-{design}"));
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::new(ErrorKind::Io, format!("{}: {error}", dir.display())));
            }
            _ => {}
        }
        let device = self.disks[design].path();
        file_system::make(self.file_system, &device)?;
        Mounted::new(&device, self.file_system, &dir)
    }
}

impl Experiment for Disks {
    /// Attaches empty disks that can have the case's file system.
    fn begin(&mut self, case: &str) -> Result<()> {
        let file_system = FILE_SYSTEMS.into_iter().find(|name| *name == case);
        self.file_system = file_system.ok_or_else(|| Error::invalid(format!("there is no case '{case}'")))?;
        file_system::check(case)?;
        self.disks.clear();
        for design in &self.designs {
            self.disks.push(Disk::new(&self.program, design)?);
        }
        self.mount(0)
            .and_then(Mounted::unmount)
            .map_err(|error| unsupported(format!("{case} cannot be mounted: {error}")))
    }

    fn fixed_work(&self, _: usize) -> Option<u64> {
        Some(1)
    }

    /// A share of the files that fill the disk is made, by one thread for each job.
    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let files = self.share * FULL * DISK_BYTES as f64 / f64::from(SMALL_FILE_BYTES);
        let threads = plan.jobs as u32;
        let files_per_thread = (files as u32).max(1).div_ceil(threads);
        let mounted = self.mount(plan.design)?;
        let log_dir = self.dir.path();
        let files_per_s = fs_mark(mounted.dir(), log_dir, 1, threads, files_per_thread, plan.stop)?;
        mounted.unmount()?;
        let made = f64::from(threads) * f64::from(files_per_thread);
        let elapsed = Duration::from_secs_f64(made / files_per_s);
        Ok(Sample { elapsed, values: vec![("files_per_s", files_per_s)] })
    }
}
