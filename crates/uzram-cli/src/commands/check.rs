//! `uzram check`: what works on this machine, how that was checked, and what follows; or whether a configuration file
//! is valid here.
//!
//! Each probe tries the feature itself if that leaves nothing behind, and otherwise reads what the kernel says about
//! it. A probe never fails: it reports "no" with a reason. A configuration file is checked by the code with which
//! `uzram up` begins.

use std::fmt::Write;
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use clap::builder::PossibleValue;
use rustix::io::Errno;
use rustix::io_uring::{io_uring_params, io_uring_setup};
use rustix::mount::MountPropagationFlags;
use rustix::process::{Resource, getrlimit};
use rustix::thread::UnshareFlags;
use serde::Serialize;
use uzram::cpu::Restartable;
use uzram::sync::stores_16_bytes;
use uzram::units::{format_size, parse_size};
use uzram_pager::TrapKind;
use uzram_serve::fuse;

use crate::commands::run;
use crate::config::plan::{Attached, DaemonPlan, DevicePlan};
use crate::daemon::start;
use crate::failure::{Failure, Result};
use crate::output::report;
use crate::system::process_status::status_field;

/// Show what works on this machine, how that was checked, and what follows; or check a configuration file.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram check --json
          uzram check --for swap --for run
          uzram check --config /etc/uzram.toml")]
pub struct CheckArgs {
    /// Fail unless this works here, and say why it does not; can be given several times
    #[arg(long = "for", value_name = "PURPOSE")]
    purposes: Vec<Purpose>,
    /// Instead, check a file as `uzram up --config` does, without starting a daemon: prints ok and the devices for this
    /// machine, or fails with the first error. Reads the policy, dictionary and TLS files that it names. Backing files,
    /// listening, memory and privileges are checked only when the daemon starts
    #[arg(long, value_name = "FILE.toml", conflicts_with = "purposes")]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Works {
    Yes,
    Partly,
    No,
}

/// What a machine is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Purpose {
    /// Swap to compressed memory (`uzram swap on`).
    Swap,
    /// A block device (`uzram up --attach`).
    Disk,
    /// A program in less memory (`uzram run`).
    Run,
}

impl Purpose {
    /// Returns the features that it takes.
    const fn needs(self) -> &'static [&'static str] {
        match self {
            Purpose::Swap => &["FUSE", "loop", "capabilities", "swap"],
            Purpose::Disk => &["FUSE", "loop", "capabilities"],
            Purpose::Run => &["pager: uffd", "run library"],
        }
    }
}

/// The output of `uzram check --json`.
#[derive(Serialize)]
struct Checked {
    checks: Vec<Finding>,
    /// What was asked for.
    purposes: Vec<PurposeJson>,
}

/// Whether something works that was asked for.
#[derive(Serialize)]
struct PurposeJson {
    purpose: Purpose,
    works: bool,
    /// The features that it lacks.
    missing: Vec<&'static str>,
}

/// The result of one probe.
#[derive(Serialize)]
struct Finding {
    /// The feature.
    name: &'static str,
    works: Works,
    /// What was tried, and its outcome.
    checked_by: String,
    /// What that means for the user.
    follows: &'static str,
}

/// Runs all probes and prints the results, or checks the file of `--config`.
///
/// # Errors
/// Standard output is closed or full; the file cannot be read or is invalid; what was asked for does not work.
pub fn run(args: &CheckArgs) -> Result<()> {
    if let Some(path) = &args.config {
        return report(&ConfigJson::new(path, &start::plan_file(path)?), ConfigJson::text);
    }
    let capabilities = Capabilities::read();
    let checks = vec![
        files(),
        loop_devices(),
        swap(),
        pager_with_userfaultfd(),
        pager_with_guard_pages(),
        run_library(),
        io_uring(),
        restartable_sequences(),
        locked_memory(&capabilities),
        capabilities.finding(),
        survival(),
        kernel_zram(),
    ];
    let works = |need: &str| checks.iter().any(|check| check.name == need && check.works == Works::Yes);
    let purposes = args.purposes.iter().map(|purpose| {
        let missing: Vec<_> = purpose.needs().iter().filter(|need| !works(need)).copied().collect();
        PurposeJson { purpose: *purpose, works: missing.is_empty(), missing }
    });
    let checked = Checked { purposes: purposes.collect(), checks };
    report(&checked, Checked::text)?;
    checked.refused().map_or(Ok(()), |why| Err(Failure::line(why)))
}

impl Checked {
    fn text(&self) -> String {
        let line = |Finding { name, works, checked_by, follows }: &Finding| {
            let works = match works {
                Works::Yes => "yes",
                Works::Partly => "partly",
                Works::No => "no",
            };
            format!("{name:<14} {works:<6} {checked_by}; {follows}\n")
        };
        self.checks.iter().map(line).collect()
    }

    /// Returns why something does not work that was asked for.
    fn refused(&self) -> Option<String> {
        let because = |name: &&str| {
            let check = self.checks.iter().find(|check| check.name == *name)?;
            Some(format!("{name} ({})", check.checked_by))
        };
        let refused = self.purposes.iter().filter(|purpose| !purpose.works).map(|lacking| {
            let why: Vec<_> = lacking.missing.iter().filter_map(because).collect();
            let purpose = lacking.purpose.to_possible_value();
            let purpose = purpose.as_ref().map_or("", PossibleValue::get_name);
            format!("{purpose} does not work here: it needs {}", why.join(", "))
        });
        let refused: Vec<_> = refused.collect();
        (!refused.is_empty()).then(|| refused.join("; "))
    }
}

/// The output of `uzram check --config --json`.
#[derive(Serialize)]
struct ConfigJson {
    config: PathBuf,
    devices: Vec<PlannedJson>,
    /// A line for each device that is not for this machine.
    left_out: Vec<String>,
}

/// A device of a configuration file.
#[derive(Serialize)]
struct PlannedJson {
    name: String,
    size_bytes: Option<u64>,
    is_block_device: bool,
    is_swap: bool,
}

impl ConfigJson {
    fn new(path: &Path, plan: &DaemonPlan) -> ConfigJson {
        let device = |device: &DevicePlan| PlannedJson {
            name: device.name.clone(),
            size_bytes: device.settings.get("disksize").and_then(|size| parse_size(&size.value).ok()),
            is_block_device: device.attached != Attached::No,
            is_swap: device.is_swap(),
        };
        let devices = plan.devices.iter().map(device).collect();
        ConfigJson { config: path.to_owned(), devices, left_out: plan.left_out.clone() }
    }

    /// Returns a line for each device, and for each that is not for this machine.
    fn text(&self) -> String {
        let mut text = format!("ok: {}\n", self.config.display());
        for device in &self.devices {
            let size = device.size_bytes.map_or_else(String::new, format_size);
            let attached = match (device.is_swap, device.is_block_device) {
                (true, _) => ", swap",
                (false, true) => ", block device",
                (false, false) => "",
            };
            let _ = writeln!(text, "{}: {size}{attached}", device.name);
        }
        self.left_out.iter().for_each(|line| text += &format!("{line}\n"));
        text
    }
}

/// Tries to open a device node for reading and writing; returns whether it opened, and a note for `checked_by`.
fn try_open(path: &str) -> (bool, String) {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => (true, format!("{path} opens")),
        Err(error) => (false, format!("{path}: {error}")),
    }
}

fn files() -> Finding {
    let (works, checked_by, follows) = match try_mount() {
        Ok(how) => (Works::Yes, how, "a device can be shown as a file: uzram up --mount"),
        Err(why) => (Works::No, why, "a device cannot be shown as a file; NBD needs none of this"),
    };
    Finding { name: "FUSE", works, checked_by, follows }
}

/// Mounts files and unmounts them, in a mount namespace of this process alone if it may have one: a security policy does
/// not tell otherwise what it forbids. Returns how.
fn try_mount() -> std::result::Result<String, String> {
    let is_private = make_private_mounts().is_ok();
    let number = RandomState::new().hash_one(std::process::id());
    let name = format!("uzram-check-{number:016x}");
    let make = |parent: PathBuf| {
        let dir = parent.join(&name);
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map(|()| dir)
            .map_err(|error| format!("no directory to mount on can be made in {}: {error}", parent.display()))
    };
    // Where there is one program and nothing else, there is no /tmp.
    let dir = make(std::env::temp_dir()).or_else(|why| make(PathBuf::from("/run")).map_err(|_| why))?;
    let options = fuse::MountOptions { threads: 1, ..fuse::MountOptions::default() };
    let mounted = fuse::Connection::mount(&dir, &dir, options).and_then(|connection| connection.unmount());
    // Fails only if it could not be unmounted.
    let _ = fs::remove_dir(&dir);
    let how = if is_private { "a mount in a namespace of its own" } else { "a mount by fusermount3" };
    mounted.map(|()| format!("{how} succeeds")).map_err(|error| error.to_string().replace('\n', " "))
}

/// Gives this process a mount namespace of its own, of which others see nothing.
fn make_private_mounts() -> rustix::io::Result<()> {
    // SAFETY: file descriptors stay shared: no `CLONE_FILES`.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

fn survival() -> Finding {
    let (works, checked_by, follows) = if stores_16_bytes() {
        let follows = "kill -9 of the process that serves costs no byte and no request";
        (Works::Yes, "cmpxchg16b is there", follows)
    } else {
        (Works::No, "cmpxchg16b is missing", "contents are lost with the process that serves them")
    };
    Finding { name: "survival", works, checked_by: checked_by.to_owned(), follows }
}

fn loop_devices() -> Finding {
    // Opening has no side effects; only the node's ioctls do.
    let (opens, checked_by) = try_open("/dev/loop-control");
    let (works, follows) = if opens {
        (Works::Yes, "that file can be a block device, or swap: uzram attach, uzram swap on")
    } else {
        (Works::No, "no block device from a file here; use NBD")
    };
    Finding { name: "loop", works, checked_by, follows }
}

fn swap() -> Finding {
    let (works, checked_by, follows) = match fs::read("/proc/swaps") {
        Ok(_) => (Works::Yes, "/proc/swaps is readable".to_owned(), "this kernel can swap"),
        Err(error) => (Works::No, format!("/proc/swaps: {error}"), "no swap area can be switched on"),
    };
    Finding { name: "swap", works, checked_by, follows }
}

fn run_library() -> Finding {
    let (works, checked_by, follows) = match run::library() {
        Ok(path) => (Works::Yes, path.display().to_string(), "uzram run can load it into programs"),
        Err(failure) => (Works::No, failure.into_line(), "uzram run cannot manage a program's memory"),
    };
    Finding { name: "run library", works, checked_by, follows }
}

/// Whether touches of a process's own memory can be trapped in a way. `works`: how well, how that was checked, and what
/// follows; `otherwise`: what follows if not.
fn pager(
    trap: TrapKind,
    name: &'static str,
    works: (Works, &str, &'static str),
    otherwise: &'static str,
) -> Finding {
    let (works, checked_by, follows) = match trap.check() {
        Ok(()) => (works.0, works.1.to_owned(), works.2),
        Err(error) => (Works::No, error.to_string(), otherwise),
    };
    Finding { name, works, checked_by, follows }
}

fn pager_with_userfaultfd() -> Finding {
    let works = (
        Works::Yes,
        "userfaultfd(2) succeeds, and moves pages",
        "a process's own memory can be compressed, and system calls may touch it",
    );
    let otherwise = "uzram run refuses; a pager needs guard pages: pin what system calls touch";
    pager(TrapKind::Uffd, "pager: uffd", works, otherwise)
}

fn pager_with_guard_pages() -> Finding {
    let works = (
        Works::Partly,
        "madvise(2) installs a guard page",
        "the same without privileges, but memory that system calls touch must be pinned",
    );
    pager(TrapKind::Guard, "pager: guard", works, "a process's own memory can be compressed with uffd only")
}

fn restartable_sequences() -> Finding {
    let (works, checked_by, follows) = if Restartable::get().is_some_and(Restartable::works_here) {
        (
            Works::Yes,
            "glibc registers threads, and membarrier(2) interrupts them",
            "caches of CPUs take no lock",
        )
    } else {
        let why = "glibc before 2.35 or its tunable, a kernel before 5.10, or a sandbox";
        (Works::No, why, "caches of CPUs take a lock each, which is slower")
    };
    Finding { name: "rseq", works, checked_by: checked_by.to_owned(), follows }
}

fn io_uring() -> Finding {
    let mut params = io_uring_params::default();
    // SAFETY: `params` is zeroed, so no flag makes the kernel use an address or a descriptor in it;
    // the ring is closed at once, unused.
    let result = unsafe { io_uring_setup(2, &mut params) };
    let (works, checked_by, follows) = match result {
        Ok(_) => {
            (Works::Yes, "io_uring_setup(2) succeeds".to_owned(), "many requests can go in one system call")
        }
        Err(errno) => {
            let hint = match errno {
                Errno::PERM => " (sysctl kernel.io_uring_disabled, or a seccomp filter)",
                Errno::NOSYS => " (not in this kernel)",
                _ => "",
            };
            (Works::No, format!("io_uring_setup(2): {errno}{hint}"), "plain reads and writes are used")
        }
    };
    Finding { name: "io_uring", works, checked_by, follows }
}

fn locked_memory(capabilities: &Capabilities) -> Finding {
    let name = "locked memory";
    if capabilities.has(Capability::IpcLock) {
        return Finding {
            name,
            works: Works::Yes,
            checked_by: "CAP_IPC_LOCK is held".to_owned(),
            follows: "the daemon can keep all of its memory out of swap",
        };
    }
    match getrlimit(Resource::Memlock).current {
        None => Finding {
            name,
            works: Works::Yes,
            checked_by: "RLIMIT_MEMLOCK is unlimited".to_owned(),
            follows: "the daemon can keep all of its memory out of swap",
        },
        Some(bytes) => Finding {
            name,
            works: if bytes > 0 { Works::Partly } else { Works::No },
            checked_by: format!("RLIMIT_MEMLOCK is {}, and CAP_IPC_LOCK is not held", format_size(bytes)),
            follows: "a device used as swap could wait for itself; raise `ulimit -l` first",
        },
    }
}

fn kernel_zram() -> Finding {
    let control = Path::new("/sys/class/zram-control");
    let devices = fs::read_dir("/sys/block")
        .map(|entries| {
            let is_zram = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("zram");
            entries.flatten().filter(|entry| is_zram(&entry.file_name())).count()
        })
        .unwrap_or(0);
    let (works, checked_by, follows) = if !control.exists() {
        (
            Works::No,
            format!("{} does not exist", control.display()),
            "bench --against kernel cannot run; try modprobe zram",
        )
    } else if rustix::fs::access(control.join("hot_add"), rustix::fs::Access::READ_OK).is_ok() {
        (
            Works::Yes,
            format!("{}/hot_add is readable, zram devices: {devices}", control.display()),
            "bench --against kernel can run",
        )
    } else {
        (
            Works::Partly,
            format!("{} exists, but hot_add is not ours to read", control.display()),
            "bench --against kernel needs root",
        )
    };
    Finding { name: "kernel zram", works, checked_by, follows }
}

/// The capabilities that features depend on; the values are bit numbers, linux/capability.h.
#[derive(Clone, Copy)]
enum Capability {
    IpcLock = 14,
    SysPtrace = 19,
    SysAdmin = 21,
    SysNice = 23,
}

/// The effective capabilities of this process.
struct Capabilities {
    bits: u64,
}

impl Capabilities {
    /// Reads the capabilities; assumes none if they cannot be read.
    fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Capabilities { bits: effective_bits(&status).unwrap_or(0) }
    }

    const fn has(&self, capability: Capability) -> bool {
        self.bits >> capability as u32 & 1 == 1
    }

    fn finding(&self) -> Finding {
        let known = [
            ("CAP_SYS_ADMIN", Capability::SysAdmin),
            ("CAP_SYS_PTRACE", Capability::SysPtrace),
            ("CAP_IPC_LOCK", Capability::IpcLock),
            ("CAP_SYS_NICE", Capability::SysNice),
        ];
        let list = |held: bool| {
            let names: Vec<&str> =
                known.iter().filter(|(_, bit)| self.has(*bit) == held).map(|(name, _)| *name).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(" ") }
        };
        let (works, follows) = if self.has(Capability::SysAdmin) {
            (Works::Yes, "mounts, loop devices and swap can be set up from here")
        } else {
            (Works::No, "mounts, loop devices and swap need root; NBD and the library do not")
        };
        let checked_by = format!("/proc/self/status: effective {}, missing {}", list(true), list(false));
        Finding { name: "capabilities", works, checked_by, follows }
    }
}

fn effective_bits(status: &str) -> Option<u64> {
    u64::from_str_radix(status_field(status, "CapEff")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_their_line() {
        let status = "Name:\tx\nCapPrm:\tffff\nCapEff:\t0000000000204000\n";
        let capabilities = Capabilities { bits: effective_bits(status).unwrap_or(0) };
        assert!(capabilities.has(Capability::SysAdmin) && capabilities.has(Capability::IpcLock));
        assert!(!capabilities.has(Capability::SysPtrace));
        assert_eq!(effective_bits("CapEff:\tzz\n"), None);
    }
}
