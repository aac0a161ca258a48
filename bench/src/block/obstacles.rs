//! Why there can be no block devices here.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use uzram::Result;
use uzram::codec::Algorithm;

use crate::engine::KernelZram;
use crate::harness::process::{run_to_end, runtime_dir};

/// The algorithm of both sides, as uzram and the kernel call it.
pub(crate) const ALGORITHM: &str = "lz4";
/// The size of disks made to find out whether there can be any.
const TRIED_BYTES: u64 = 4 << 20;
/// The time after which a program counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Returns why there can be no block devices of uzram, if so.
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

pub(crate) fn kernel_zram(size_bytes: u64) -> Result<KernelZram> {
    KernelZram::add(&Algorithm::default(), size_bytes)
}
