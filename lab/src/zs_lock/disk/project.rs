//! Projects in C that are built: a small interpreter, and the kernel.
//!
//! Their sources are Debian's, as archives. They are unpacked once, and copied to every disk.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};
use uzram_bench::block::PATIENCE;
use uzram_bench::harness::process::{find, run_unless_stopped};

/// A project.
#[derive(Debug)]
pub struct Project {
    /// The name of its case.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// About how many seconds a build takes.
    pub build_s: f64,
    /// The size of the disk that it is built on.
    pub disk_bytes: u64,
    /// How the name of its archive begins, which is in [`ARCHIVES`].
    archive: &'static str,
    /// How that comes there, on Debian.
    sources: &'static str,
    /// Programs that it takes besides a compiler and make.
    programs: &'static [&'static str],
    /// Commands of a shell that build it into the folder `$OUT`, with `$JOBS` jobs.
    build: &'static str,
}

/// The interpreter of a language: some thirty files.
pub const LUA: Project = Project {
    name: "build",
    about: "Lua's interpreter",
    build_s: 2.5,
    disk_bytes: 128 << 20,
    archive: "lua5.4_",
    sources: "cd /usr/src && apt-get source --download-only lua5.4",
    programs: &[],
    build: "cp -a tree \"$OUT\" && make -s -C \"$OUT\" -j \"$JOBS\" posix",
};

/// The kernel with as little as it can have.
pub const LINUX: Project = Project {
    name: "build-linux",
    about: "the Linux kernel's tinyconfig",
    build_s: 60.0,
    disk_bytes: 3 << 30,
    archive: "linux-source-",
    sources: "apt-get install linux-source",
    programs: &["bc", "bison", "flex"],
    build: "mkdir \"$OUT\" && make -s -C tree O=\"$OUT\" tinyconfig && make -s -C tree O=\"$OUT\" -j \"$JOBS\"",
};

/// Where archives are.
const ARCHIVES: &str = "/usr/src";
/// The time after which a build counts as hung.
const BUILD_PATIENCE: Duration = Duration::from_secs(1200);
/// The folder of the sources on a disk, and that of a build.
const TREE: &str = "tree";
const OUT: &str = "out";

/// Returns the error of something that the system lacks.
pub(super) fn unsupported(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Unsupported, what)
}

fn io_error(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io, format!("{}: {error}", path.display()))
}

fn shell(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-e", "-c", script]).current_dir(dir);
    command
}

/// Copies a project's folder to a disk.
pub(super) fn copy(tree: &Path, disk: &Path) -> Result<()> {
    let mut command = Command::new("cp");
    command.arg("-a").arg(tree).arg(disk.join(TREE));
    run_unless_stopped(&mut command, PATIENCE).map(drop)
}

/// Returns the number of files in a folder and those below it.
fn files_in(dir: &Path) -> Result<u64> {
    let mut files = 0;
    for entry in fs::read_dir(dir).map_err(|error| io_error(dir, error))? {
        let entry = entry.map_err(|error| io_error(dir, error))?;
        let kind = entry.file_type().map_err(|error| io_error(&entry.path(), error))?;
        files += if kind.is_dir() { files_in(&entry.path())? } else { 1 };
    }
    Ok(files)
}

impl Project {
    /// Unpacks its sources in an empty folder.
    ///
    /// # Errors
    /// `Unsupported` says what is missing.
    pub(super) fn unpack(&self, dir: &Path) -> Result<()> {
        let missing = ["cc", "make", "tar"].iter().chain(self.programs).find(|name| find(name).is_none());
        if let Some(program) = missing {
            return Err(unsupported(format!("the program {program} is missing")));
        }
        let archive = self.find_archive().ok_or_else(|| {
            unsupported(format!("the sources of {} are missing: {}", self.about, self.sources))
        })?;
        let mut unpack = Command::new("tar");
        unpack.arg("--extract").arg("--file").arg(archive).arg("--directory").arg(dir);
        let unpacked = run_unless_stopped(unpack.arg("--strip-components=1"), PATIENCE);
        unpacked.map(drop).map_err(|error| match error.kind() {
            ErrorKind::Busy => error,
            _ => unsupported(format!("{} cannot be unpacked: {error}", self.about)),
        })
    }

    /// Returns the last archive by name.
    fn find_archive(&self) -> Option<PathBuf> {
        let names =
            fs::read_dir(ARCHIVES).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_archive = |name: &String| name.starts_with(self.archive) && name.contains(".tar");
        // Debian's changes and signatures are no sources.
        let is_other = |name: &String| name.contains(".debian.") || name.ends_with(".asc");
        let names = names.filter(|name| is_archive(name) && !is_other(name));
        names.max().map(|name| Path::new(ARCHIVES).join(name))
    }

    /// Builds it on a disk, which has its sources, and syncs the disk; returns how long that took, and the
    /// number of files of the build, which is then removed.
    pub(super) fn build(&self, disk: &Path, jobs: usize) -> Result<(Duration, u64)> {
        let out = disk.join(OUT);
        let mut command = shell(self.build, disk);
        command.env("OUT", &out).env("JOBS", jobs.to_string());
        let start = Instant::now();
        run_unless_stopped(&mut command, BUILD_PATIENCE)?;
        let synced = fs::File::open(disk).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
        synced.map_err(|error| io_error(disk, error))?;
        let elapsed = start.elapsed();
        let files = files_in(&out)?;
        fs::remove_dir_all(&out).map_err(|error| io_error(&out, error))?;
        Ok((elapsed, files))
    }
}
