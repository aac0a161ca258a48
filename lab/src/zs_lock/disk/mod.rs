//! The table `zs-lock-disk`: the same change as in `zs-lock`, as its author measured it: `fs_mark` on ext4
//! and btrfs, and a build of a C project, on an attached block device.
//!
//! Each design is a `uzram up --attach` of its own, and the kernel's zram is measured beside them where there
//! is one. `fs_mark` makes files of 100 000 bytes on a new file system, which also discards what the disk
//! held, until the disk is seven tenths full, syncs each, and keeps them; a job is a thread. For a build the
//! project lies on the disk already, and is compiled by as many jobs of make into a new folder, and synced
//! ([`project`]).

pub mod project;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use uzram::codec::Algorithm;
use uzram::{Error, ErrorKind, Result};

use super::{AFTER, BEFORE, PUBLISHED_THREADS};
use crate::experiment::{
    Bound, Column, Designs, Expect, Experiment, Figure, Jobs, Length, Plan, Sample, Series, Unit,
};
use project::{LINUX, LUA, Project, unsupported};
use uzram_bench::block::disk::{Attached, Mounted};
use uzram_bench::block::file_system::{self, FsMark, SMALL_FILE_BYTES};
use uzram_bench::block::{disk_obstacle, kernel_obstacle};
use uzram_bench::engine::KernelZram;
use uzram_bench::harness::command::uzram_program;
use uzram_bench::harness::process::{find, runtime_dir};
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

/// The side of the kernel's own zram.
const KERNEL: &str = "kernel-zram";
/// The algorithm of all sides.
const ALGORITHM: &str = "lz4";
/// The file systems, each a case.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "btrfs"];
/// The projects, each a case.
const PROJECTS: [&Project; 2] = [&LUA, &LINUX];
/// The file system on which projects are built.
const BUILT_ON: &str = "ext4";
/// The size of the disk on which `fs_mark` runs.
const DISK_BYTES: u64 = 640 << 20;
/// The share of the disk that its files fill: btrfs keeps its metadata twice, and found no room for 80 % now
/// and then.
const FULL: f64 = 0.7;
/// Threads of `fs_mark`.
const THREADS: [usize; 1] = [PUBLISHED_THREADS];
/// Jobs of make.
const MAKE_JOBS: [usize; 1] = [2];
/// About how many seconds a measurement with `fs_mark` takes.
const FS_MARK_S: f64 = 1.5;
/// The largest distance of the speed's interval from 1.
const WANTED: f64 = 0.03;

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "zs-lock-disk",
    about: "the same as zs-lock: files on ext4 and btrfs, and a build, on a block device",
    published: "zs-lock",
    cases: &[
        (FILE_SYSTEMS[0], &THREADS),
        (FILE_SYSTEMS[1], &THREADS),
        (LUA.name, &MAKE_JOBS),
        (LINUX.name, &MAKE_JOBS),
    ],
    slow_cases: &[FILE_SYSTEMS[1], LINUX.name],
    unit: Unit::Page,
    designs,
    columns: &[Column::new("elapsed_s", "elapsed", 1.0, 2), Column::new("files_per_s", "files/s", 1.0, 0)],
    legend,
    counted_function: "",
    length: Length::Fixed {
        seconds: |case, _| {
            let project = PROJECTS.into_iter().find(|project| project.name == case);
            project.map_or(FS_MARK_S, |project| project.build_s)
        },
        is_of_corpus: false,
    },
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
    let kernel = kernel_obstacle().is_none().then(|| KERNEL.to_owned());
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
    let of = |project: &Project| {
        format!(
            "{}: {} is built on {BUILT_ON}, a job is one of make; files/s: files that the build leaves",
            project.name, project.about
        )
    };
    legend.extend(PROJECTS.map(of));
    if let Some(obstacle) = kernel_obstacle() {
        legend.push(format!("{KERNEL} left out: {obstacle}"));
    }
    legend
}

fn open(source: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let program = uzram_program().ok_or_else(|| unsupported("the program uzram is missing"))?;
    if let Some(obstacle) = disk_obstacle(&program)? {
        return Err(unsupported(obstacle));
    }
    let dir = runtime_dir()?;
    let share = (source.load()?.page_count() as f64 / DEFAULT_CORPUS_PAGES as f64).min(1.0);
    let designs = designs.to_vec();
    let disks = Disks { program, designs, share, case: Case::Files("", 0), disks: Vec::new(), dir };
    Ok(Box::new(disks))
}

/// What is measured.
enum Case {
    /// `fs_mark` with so many files on a file system.
    Files(&'static str, u32),
    /// A project that lies on each disk.
    Build(&'static Project, Vec<Mounted>),
}

/// A disk for each design.
struct Disks {
    program: PathBuf,
    designs: Vec<String>,
    /// The share of the disk's files that are made: a corpus smaller than usual asks for a short run.
    share: f64,
    /// Before the disks: what is mounted ends before its device.
    case: Case,
    disks: Vec<Disk>,
    dir: TempDir,
}

enum Disk {
    Uzram(Attached),
    Kernel(KernelZram),
}

impl Disk {
    fn new(program: &Path, design: &str, size_bytes: u64) -> Result<Disk> {
        match design {
            KERNEL => KernelZram::add(&Algorithm::default(), size_bytes).map(Disk::Kernel),
            _ => {
                let options = ["--pool-design", design];
                Attached::new(program, ALGORITHM, size_bytes, &options).map(Disk::Uzram)
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
    /// Replaces the disks by empty ones.
    fn attach(&mut self, size_bytes: u64) -> Result<()> {
        self.case = Case::Files("", 0);
        self.disks.clear();
        for design in &self.designs {
            self.disks.push(Disk::new(&self.program, design, size_bytes)?);
        }
        Ok(())
    }

    /// Makes a file system on a disk and mounts it in a folder.
    fn mount(&self, design: usize, file_system: &str) -> Result<Mounted> {
        let dir = self.dir.path().join(format!("mnt-{design}"));
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::new(ErrorKind::Io, format!("{}: {error}", dir.display())));
            }
            _ => {}
        }
        let device = self.disks[design].path();
        file_system::make(file_system, &device)?;
        Mounted::new(&device, file_system, &dir)
    }

    /// Attaches empty disks that can have this file system.
    ///
    /// # Errors
    /// `Unsupported` says what is missing.
    fn attach_for(&mut self, file_system: &str, size_bytes: u64) -> Result<()> {
        let mkfs = format!("mkfs.{file_system}");
        if find(&mkfs).is_none() {
            return Err(unsupported(format!("the program {mkfs} is missing")));
        }
        self.attach(size_bytes)?;
        self.mount(0, file_system)
            .and_then(Mounted::unmount)
            .map_err(|error| unsupported(format!("{file_system} cannot be mounted: {error}")))
    }

    fn begin_files(&mut self, file_system: &'static str) -> Result<()> {
        if let Some(obstacle) = file_system::obstacle() {
            return Err(unsupported(obstacle));
        }
        self.attach_for(file_system, DISK_BYTES)?;
        let files = self.share * FULL * DISK_BYTES as f64 / f64::from(SMALL_FILE_BYTES);
        self.case = Case::Files(file_system, (files as u32).max(1));
        Ok(())
    }

    fn begin_build(&mut self, project: &'static Project) -> Result<()> {
        let tree = TempDir::new_in(self.dir.path())
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot make a temporary folder: {error}")))?;
        project.unpack(tree.path())?;
        self.attach_for(BUILT_ON, project.disk_bytes)?;
        let mut mounted = Vec::new();
        for design in 0..self.disks.len() {
            let there = self.mount(design, BUILT_ON)?;
            project::copy(tree.path(), there.dir())?;
            mounted.push(there);
        }
        self.case = Case::Build(project, mounted);
        Ok(())
    }

    /// Returns how long `fs_mark` took, and how many files it made.
    fn make_files(
        &self,
        design: usize,
        file_system: &str,
        files: u32,
        threads: u32,
    ) -> Result<(Duration, u64)> {
        let mounted = self.mount(design, file_system)?;
        let fs_mark = FsMark { threads, folders: 1, files_per_thread: files.div_ceil(threads) };
        let files_per_s = fs_mark.run(mounted.dir(), self.dir.path())?;
        mounted.unmount()?;
        let made = u64::from(threads) * u64::from(fs_mark.files_per_thread);
        Ok((Duration::from_secs_f64(made as f64 / files_per_s), made))
    }
}

impl Experiment for Disks {
    fn begin(&mut self, case: &str) -> Result<()> {
        if let Some(file_system) = FILE_SYSTEMS.into_iter().find(|name| *name == case) {
            return self.begin_files(file_system);
        }
        let project = PROJECTS.into_iter().find(|project| project.name == case);
        self.begin_build(project.ok_or_else(|| Error::invalid(format!("there is no case '{case}'")))?)
    }

    fn fixed_work(&self, _: usize) -> Option<u64> {
        Some(1)
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let (elapsed, files) = match &self.case {
            Case::Files(file_system, files) => {
                self.make_files(plan.design, file_system, *files, plan.jobs as u32)?
            }
            Case::Build(project, mounted) => project.build(mounted[plan.design].dir(), plan.jobs)?,
        };
        let files_per_s = files as f64 / elapsed.as_secs_f64();
        Ok(Sample { elapsed, values: vec![("files_per_s", files_per_s)] })
    }
}
