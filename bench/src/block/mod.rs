//! Block devices and swap: a file system on a uzram loop device (`file_system`), pages swapped out to its
//! swap area and back in (`swap`), and the cost of an idle swap daemon (`idle`). The first two are measured
//! beside a kernel zram device with the same algorithm and size.
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
pub(crate) mod swap;
pub mod swap_area;
pub(crate) mod swap_user;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use uzram::Result;

use crate::engine::KernelZram;
use crate::harness::corpus::Saved;
use crate::harness::process::{run_to_end, runtime_dir};
use crate::harness::{Options, Report, unsupported};

/// The algorithm of both sides, as uzram and the kernel call it.
pub(crate) const ALGORITHM: &str = "lz4";
/// The size of disks made to find out whether there can be any.
const TRIED_BYTES: u64 = 4 << 20;
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Runs all measurements that are possible here.
pub fn run(options: &Options) -> Result<Report> {
    options.go_on()?;
    check_disk(options.uzram()?)?;
    let saved = Saved::of(&options.corpus, &options.stop)?;
    let mut report = Report::default();
    report.part("file systems", file_system::measure(options, saved.path()))?;
    report.part("swap", swap::measure(options, saved.path()))?;
    report.append(idle::measure(options)?);
    Ok(report)
}

/// `Unsupported` says why there can be no block devices of uzram.
pub fn check_disk(program: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(unsupported("block devices are root's"));
    }
    if let Some(path) = ["/dev/fuse", "/dev/loop-control"].into_iter().find(|path| !Path::new(path).exists())
    {
        return Err(unsupported(format!("there is no {path}")));
    }
    // Their presence does not mean that they may be used.
    let dir = runtime_dir()?;
    let mut command = Command::new(program);
    command.arg("up").arg("--runtime-dir").arg(dir.path()).args(["--log", "error"]);
    command.arg("--size").arg(format!("{TRIED_BYTES}B")).args(["--attach", "--exec", "true"]);
    run_to_end(&mut command, PATIENCE).map(drop).map_err(|error| unsupported(error.to_string()))
}

/// `Unsupported` says why there can be no kernel zram device.
pub fn check_kernel() -> Result<()> {
    KernelZram::add(ALGORITHM, TRIED_BYTES).map(drop).map_err(|error| unsupported(error.to_string()))
}
