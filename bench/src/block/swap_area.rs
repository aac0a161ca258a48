//! Swap areas, uzram's and the kernel's, which are switched off when they are dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use uzram::{Error, ErrorKind, Result};

use super::PATIENCE;
use super::disk::named_device;
use crate::engine::KernelZram;
use crate::harness::io_error;
use crate::harness::process::{find, require, run_to_end, runtime_dir};

/// The highest priority: only this area is used, whatever others the machine has.
const PRIORITY: &str = "32767";

/// `Unsupported` says why there can be no swap area of the kernel's.
pub fn check() -> Result<()> {
    require(&["mkswap", "swapon", "swapoff"])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side<'a> {
    /// A daemon's with these options.
    Uzram(&'a [&'a str]),
    /// Kernel zram's with this algorithm.
    Kernel(&'a str),
}

pub(crate) enum SwapArea {
    Daemon(SwapDaemon),
    Kernel(KernelSwap),
}

impl SwapArea {
    pub(crate) fn on(uzram: &Path, side: Side<'_>, bytes: u64) -> Result<SwapArea> {
        match side {
            Side::Uzram(options) => SwapDaemon::on(uzram, bytes, options).map(SwapArea::Daemon),
            Side::Kernel(algorithm) => KernelSwap::on(algorithm, bytes).map(SwapArea::Kernel),
        }
    }

    /// Switches it off; returns how many writes have failed.
    pub(crate) fn off(self) -> Result<u64> {
        match self {
            SwapArea::Daemon(daemon) => {
                let failed_writes = daemon.failed_writes()?;
                daemon.off().map(|()| failed_writes)
            }
            SwapArea::Kernel(swap) => swap.off().map(|()| 0),
        }
    }
}

pub(crate) struct SwapDaemon {
    program: PathBuf,
    dir: TempDir,
    /// The block device, once the daemon has reported that swap is on.
    device: Option<PathBuf>,
    is_over: bool,
}

impl SwapDaemon {
    pub(crate) fn on(program: &Path, size_bytes: u64, options: &[&str]) -> Result<SwapDaemon> {
        let mut daemon =
            SwapDaemon { program: program.to_owned(), dir: runtime_dir()?, device: None, is_over: false };
        let mut command = daemon.command(&["swap", "on"]);
        command.args(options).args(["--priority", PRIORITY, "--size"]).arg(format!("{size_bytes}B"));
        let printed = run_to_end(&mut command, PATIENCE)?;
        daemon.device = named_device(&printed, "swap");
        Ok(daemon)
    }

    pub(crate) fn off(mut self) -> Result<()> {
        self.try_off()
    }

    fn try_off(&mut self) -> Result<()> {
        run_to_end(&mut self.command(&["swap", "off"]), PATIENCE)?;
        self.is_over = true;
        Ok(())
    }

    fn failed_writes(&self) -> Result<u64> {
        let printed = run_to_end(self.command(&["stat", "zram0"]).arg("--json"), PATIENCE)?;
        let json: Value = serde_json::from_str(&printed).unwrap_or_default();
        let failed_writes = json["stats"]["failed_writes"].as_u64();
        failed_writes.ok_or_else(|| Error::new(ErrorKind::Io, "the daemon does not say its failed_writes"))
    }

    pub(super) fn pid(&self) -> Result<u32> {
        let path = self.dir.path().join("uzram.lock");
        let text = fs::read_to_string(&path).map_err(|error| io_error(&path, error))?;
        text.trim().parse().map_err(|_| Error::new(ErrorKind::Io, format!("{}: '{text}'", path.display())))
    }

    fn command(&self, command: &[&str]) -> Command {
        let mut program = Command::new(&self.program);
        program.args(command).arg("--runtime-dir").arg(self.dir.path());
        program
    }
}

impl Drop for SwapDaemon {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // If swap on timed out without a report, swap may be on nevertheless.
        let outcome = self.try_off();
        if let (Err(error), Some(device)) = (outcome, &self.device) {
            eprintln!("swap on {} may stay on: {error}", device.display());
            // So that the daemon can still be asked to end.
            self.dir.disable_cleanup(true);
        }
    }
}

/// A swap area on a kernel zram device.
pub struct KernelSwap {
    zram: KernelZram,
    is_on: bool,
}

impl KernelSwap {
    /// Adds a kernel zram device with an algorithm by the kernel's name, and swaps to it before all other
    /// areas.
    pub fn on(algorithm: &str, size_bytes: u64) -> Result<KernelSwap> {
        let mut swap = KernelSwap { zram: KernelZram::add(algorithm, size_bytes)?, is_on: false };
        run_to_end(&mut swap.command("mkswap", &[]), PATIENCE)?;
        // With discard, as uzram's.
        run_to_end(&mut swap.command("swapon", &["--discard", "--priority", PRIORITY]), PATIENCE)?;
        swap.is_on = true;
        Ok(swap)
    }

    pub(crate) fn off(mut self) -> Result<()> {
        self.try_off()
    }

    pub(crate) fn pool_bytes(&self) -> Result<u64> {
        Ok(self.zram.memory()?[1])
    }

    fn try_off(&mut self) -> Result<()> {
        if self.is_on {
            run_to_end(&mut self.command("swapoff", &[]), PATIENCE)?;
            self.is_on = false;
        }
        Ok(())
    }

    /// Returns one of the programs, with the device as its last argument.
    fn command(&self, name: &str, args: &[&str]) -> Command {
        let mut command = Command::new(find(name).unwrap_or_else(|| name.into()));
        command.args(args).arg(self.zram.path());
        command
    }
}

impl Drop for KernelSwap {
    fn drop(&mut self) {
        if let Err(error) = self.try_off() {
            eprintln!("swap on {} stays on: {error}", self.zram.path().display());
        }
    }
}
