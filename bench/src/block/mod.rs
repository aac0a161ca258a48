//! Block devices and swap: file systems on a loop device of uzram's (`file_system`), pages that leave memory for its
//! swap area and come back (`swap`), and what a daemon of swap costs that nobody swaps to (`idle`). Beside the first
//! two stands a zram device of the kernel's, with the same algorithm and of the same size.
//!
//! uzram is measured as users run it: the program, as a daemon in a process of its own. The devices are measured one
//! after the other, never both at once; rounds alternate, and which comes first turns.
//!
//! All of it takes root, FUSE and loop devices. Where something is missing, that part is left out, and a note says
//! why. Whatever ends it, mounts, swap areas, loop devices, daemons, cgroups and zram devices go with whoever holds
//! them (`disk`, `swap_area`, `cgroup`).

mod cgroup;
mod disk;
mod file_system;
mod idle;
mod report;
mod swap;
mod swap_area;
mod swap_user;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::codec::Algorithm;
use uzram::{Error, Result};

use crate::engine::KernelZram;
use crate::harness::go_on;
use crate::harness::process::{run_to_end, runtime_dir};
pub use file_system::FileSystem;
pub use idle::Idle;
pub use report::{BlockReport, Compared};
pub use swap::Swap;
pub use swap_user::{SwapTimes, SwapUser};

/// What both sides compress with, as uzram and the kernel call it.
const ALGORITHM: &str = "lz4";
/// Disks on which it is tried whether there can be any.
const TRIED_BYTES: u64 = 4 << 20;
/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The programs that are measured.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `uzram`.
    pub uzram: PathBuf,
    /// `uzram-bench`, whose `swap-user` is the program that is swapped out.
    pub bench: PathBuf,
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// What is run.
    pub programs: Programs,
    /// A file of pages.
    pub corpus: PathBuf,
    /// How many rounds.
    pub repeat: usize,
    /// How much of everything.
    pub amounts: Amounts,
    /// Set it and the run ends with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// How much is measured with.
#[derive(Clone, Debug)]
pub struct Amounts {
    /// The disk on which ext4 is made.
    pub ext4_bytes: u64,
    /// The disk on which btrfs is made, which keeps more of it for itself.
    pub btrfs_bytes: u64,
    /// Files that each of the threads of `fs_mark` makes.
    pub files_per_thread: u32,
    /// The file that is written and read in order.
    pub file_bytes: u64,
    /// What the program holds whose memory is swapped out.
    pub swapped_bytes: u64,
    /// The swap area.
    pub swap_area_bytes: u64,
    /// Swap areas of daemons that are idle.
    pub idle_sizes_bytes: Vec<u64>,
    /// How long nothing is done before what is left is looked at, or idleness is measured.
    pub rest: Duration,
    /// For how long idleness is measured.
    pub idle: Duration,
}

impl Default for Amounts {
    fn default() -> Self {
        Amounts {
            ext4_bytes: 560 << 20,
            btrfs_bytes: 1 << 30,
            files_per_thread: 500,
            file_bytes: 256 << 20,
            swapped_bytes: 256 << 20,
            swap_area_bytes: 1 << 30,
            idle_sizes_bytes: vec![1 << 30, 4 << 30],
            rest: Duration::from_secs(2),
            idle: Duration::from_secs(5),
        }
    }
}

/// Measures all of it that can be measured here.
///
/// # Errors
/// A corpus that cannot be read, a program that fails, contents that do not read back, a stop.
pub fn run(options: &BlockOptions) -> Result<BlockReport> {
    let mut notes = Vec::new();
    let mut report = BlockReport::default();
    go_on(&options.stop)?;
    if let Some(obstacle) = disk_obstacle(&options.programs.uzram)? {
        notes.push(format!("file systems, swap and idle daemons not measured: {obstacle}"));
        return Ok(BlockReport { notes, ..report });
    }
    match file_system::obstacle().map_or_else(kernel_obstacle, Some) {
        Some(obstacle) => notes.push(format!("file systems not measured: {obstacle}")),
        None => report.file_systems = file_system::measure(options, &mut notes)?,
    }
    match swap::obstacle().map_or_else(kernel_obstacle, Some) {
        Some(obstacle) => notes.push(format!("swap not measured: {obstacle}")),
        None => report.swap = Some(swap::measure(options)?),
    }
    report.idle = idle::measure(options)?;
    report::describe(options, &mut report, notes);
    Ok(report)
}

/// Why there can be no block devices of uzram's, if so.
fn disk_obstacle(program: &Path) -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("block devices are root's".into()));
    }
    if let Some(path) = ["/dev/fuse", "/dev/loop-control"].into_iter().find(|path| !Path::new(path).exists())
    {
        return Ok(Some(format!("there is no {path}")));
    }
    // That they are there does not mean that they may be used.
    let dir = runtime_dir()?;
    let mut command = Command::new(program);
    command.arg("up").arg("--runtime-dir").arg(dir.path()).args(["--log", "error"]);
    command.arg("--size").arg(TRIED_BYTES.to_string()).args(["--attach", "--exec", "true"]);
    Ok(run_to_end(&mut command, PATIENCE).err().map(|error| error.to_string()))
}

/// Why there can be no device of the kernel's, if so.
fn kernel_obstacle() -> Option<String> {
    kernel_zram(TRIED_BYTES).err().map(|error| error.to_string())
}

/// A device of the kernel's.
fn kernel_zram(size_bytes: u64) -> Result<KernelZram> {
    KernelZram::add(&Algorithm::default(), size_bytes)
}

/// An error about a file, or a device.
fn io_error(path: &Path, error: impl Into<std::io::Error>) -> Error {
    let error = error.into();
    Error::new(uzram::ErrorKind::Io, format!("{}: {error}", path.display()))
}
