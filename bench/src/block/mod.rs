//! Block devices and swap: file systems on a uzram loop device (`file_system`), pages swapped out to its swap
//! area and back in (`swap`), and the cost of an idle swap daemon (`idle`). The first two are measured beside
//! a kernel zram device with the same algorithm and size.
//!
//! uzram is measured as users run it: the program, as a daemon in its own process. The devices are measured
//! one after the other, never both at once; the order alternates from round to round.
//!
//! All of it needs root, FUSE and loop devices. If something is missing, that part is left out, and a note
//! says why. However it ends, mounts, swap areas, loop devices, daemons, cgroups and zram devices are removed
//! when their handles are dropped (`disk`, `swap_area`, `cgroup`).

pub mod cgroup;
pub mod disk;
pub mod file_system;
mod idle;
mod report;
pub(crate) mod swap;
pub mod swap_area;
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

/// The algorithm of both sides, as uzram and the kernel call it.
const ALGORITHM: &str = "lz4";
/// The size of disks made to find out whether there can be any.
const TRIED_BYTES: u64 = 4 << 20;
/// The time after which a program counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);

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
    /// The programs to run.
    pub programs: Programs,
    /// A file of pages.
    pub corpus: PathBuf,
    /// How many rounds.
    pub repeat: usize,
    /// The amounts to measure with.
    pub amounts: Amounts,
    /// Setting it ends the run with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// The amounts to measure with.
#[derive(Clone, Debug)]
pub struct Amounts {
    /// The disk on which ext4 is made.
    pub ext4_bytes: u64,
    /// The disk on which btrfs is made, which needs more for itself.
    pub btrfs_bytes: u64,
    /// Files that each of the threads of `fs_mark` makes.
    pub files_per_thread: u32,
    /// The file that is written and read in order.
    pub file_bytes: u64,
    /// The memory of the program that is swapped out.
    pub swapped_bytes: u64,
    /// The size of the swap area.
    pub swap_area_bytes: u64,
    /// The sizes of idle daemons' swap areas.
    pub idle_sizes_bytes: Vec<u64>,
    /// How long to rest before leftovers are checked, or idleness is measured.
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

/// Runs all measurements that are possible here.
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

/// Returns why there can be no block devices of uzram, if so.
///
/// # Errors
/// No temporary folder can be made.
pub fn disk_obstacle(program: &Path) -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("block devices are root's".into()));
    }
    if let Some(path) = ["/dev/fuse", "/dev/loop-control"].into_iter().find(|path| !Path::new(path).exists())
    {
        return Ok(Some(format!("there is no {path}")));
    }
    // Their presence does not mean that they may be used.
    let dir = runtime_dir()?;
    let mut command = Command::new(program);
    command.arg("up").arg("--runtime-dir").arg(dir.path()).args(["--log", "error"]);
    command.arg("--size").arg(format!("{TRIED_BYTES}B")).args(["--attach", "--exec", "true"]);
    Ok(run_to_end(&mut command, PATIENCE).err().map(|error| error.to_string()))
}

/// Returns why there can be no kernel zram device, if so.
pub fn kernel_obstacle() -> Option<String> {
    kernel_zram(TRIED_BYTES).err().map(|error| error.to_string())
}

/// Adds a kernel zram device.
fn kernel_zram(size_bytes: u64) -> Result<KernelZram> {
    KernelZram::add(&Algorithm::default(), size_bytes)
}

/// Returns an error about a file or a device.
pub(crate) fn io_error(path: &Path, error: impl Into<std::io::Error>) -> Error {
    let error = error.into();
    Error::new(uzram::ErrorKind::Io, format!("{}: {error}", path.display()))
}
