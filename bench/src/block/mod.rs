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
pub(crate) mod limited;
mod obstacles;
pub(crate) mod swap;
pub mod swap_area;
pub(crate) mod swap_user;

use uzram::Result;

use crate::harness::corpus::Saved;
use crate::harness::{Options, Report, unsupported};
pub(crate) use obstacles::PATIENCE;
pub use obstacles::{disk_obstacle, kernel_obstacle};

/// Runs all measurements that are possible here.
pub fn run(options: &Options) -> Result<Report> {
    options.go_on()?;
    if let Some(obstacle) = disk_obstacle(options.uzram()?)? {
        return Err(unsupported(obstacle));
    }
    let saved = Saved::of(&options.corpus, &options.stop)?;
    let mut report = Report::default();
    match file_system::obstacle().or_else(kernel_obstacle) {
        Some(obstacle) => report.note(format!("file systems not measured: {obstacle}")),
        None => file_system::measure(options, saved.path(), &mut report)?,
    }
    match swap::obstacle().or_else(kernel_obstacle) {
        Some(obstacle) => report.note(format!("swap not measured: {obstacle}")),
        None => swap::measure(options, saved.path(), &mut report)?,
    }
    idle::measure(options, &mut report)?;
    Ok(report)
}
