//! `uzram check`: what works on this machine, how that was checked, and what follows; or whether a
//! configuration file is valid here.
//!
//! Each probe tries the feature itself if that leaves nothing behind, and otherwise reads what the kernel
//! says about it. A configuration file is checked by the code with which `uzram up` begins.

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
use rustix::thread::{CapabilitySet, UnshareFlags};
use serde::Serialize;
use uzram::cpu::Restartable;
use uzram::sync::stores_16_bytes;
use uzram::units::{format_size, parse_size};
use uzram_pager::Trap;
use uzram_serve::fuse;

use crate::config::plan::{Attached, DaemonPlan, DevicePlan};
use crate::daemon::start;
use crate::failure::{Failure, Result};
use crate::output::report;
use crate::system::run_files;

/// Show what works on this machine, how that was checked, and what follows; or check a configuration file.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram check --json
          uzram check --for swap --for run
          uzram check --config /etc/uzram.toml")]
pub struct CheckArgs {
    /// Fail unless this works here, and say why it does not; can be given several times
    #[arg(long = "for", value_name = "PURPOSE")]
    purposes: Vec<Purpose>,
    /// Instead, check a file as `uzram up --config` does, without starting a daemon: prints ok and the
    /// devices for this machine, or fails with the first error. Reads the policy, dictionary and TLS files
    /// that it names. Backing files, listening, memory and privileges are checked only when the daemon starts
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
            Purpose::Run => &["pager: message", "run library"],
        }
    }
}

/// The output of `uzram check --json`.
#[derive(Serialize)]
struct Checked {
    checks: Vec<Finding>,
    purposes: Vec<PurposeJson>,
}

/// Whether something works that was asked for.
#[derive(Serialize)]
struct PurposeJson {
    purpose: Purpose,
    works: bool,
    missing: Vec<&'static str>,
}

#[derive(Serialize)]
struct Finding {
    name: &'static str,
    works: Works,
    /// What was tried, and its outcome.
    checked_by: String,
    /// What that means for the user.
    follows: &'static str,
}

pub fn run(args: &CheckArgs) -> Result<()> {
    if let Some(path) = &args.config {
        return report(&ConfigJson::new(path, &start::plan_file(path)?), ConfigJson::text);
    }
    let held = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    let [messages, signals] = pagers();
    let checks = vec![
        files(),
        loop_devices(),
        swap(),
        messages,
        signals,
        run_library(),
        io_uring(),
        restartable_sequences(),
        locked_memory(held),
        capabilities(held),
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
        refused.reduce(|all, one| format!("{all}; {one}"))
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
            text += &format!("{}: {size}{attached}\n", device.name);
        }
        self.left_out.iter().for_each(|line| text += &format!("{line}\n"));
        text
    }
}

type Tried = std::result::Result<String, String>;

impl Finding {
    /// Creates that of a feature which works or not, by what was tried, and what follows either way.
    fn of(name: &'static str, tried: Tried, [yes, no]: [&'static str; 2]) -> Finding {
        match tried {
            Ok(checked_by) => Finding { name, works: Works::Yes, checked_by, follows: yes },
            Err(checked_by) => Finding { name, works: Works::No, checked_by, follows: no },
        }
    }
}

fn tried(works: bool, yes: &str, no: &str) -> Tried {
    if works { Ok(yes.to_owned()) } else { Err(no.to_owned()) }
}

fn files() -> Finding {
    let yes = "a device can be shown as a file: uzram up --mount";
    let no = "a device cannot be shown as a file; NBD needs none of this";
    Finding::of("FUSE", try_mount(), [yes, no])
}

/// Mounts files and unmounts them, in a mount namespace of this process alone if it may have one: a security
/// policy does not tell otherwise what it forbids. Returns how.
fn try_mount() -> Tried {
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
    let tried = tried(stores_16_bytes(), "cmpxchg16b is there", "cmpxchg16b is missing");
    let yes = "kill -9 of the process that serves costs no byte and no request";
    Finding::of("survival", tried, [yes, "contents are lost with the process that serves them"])
}

fn loop_devices() -> Finding {
    let path = "/dev/loop-control";
    // Opening has no side effects; only the node's ioctls do.
    let tried = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(format!("{path} opens")),
        Err(error) => Err(format!("{path}: {error}")),
    };
    let yes = "that file can be a block device, or swap: uzram attach, uzram swap on";
    Finding::of("loop", tried, [yes, "no block device from a file here; use NBD"])
}

fn swap() -> Finding {
    let tried = match fs::read("/proc/swaps") {
        Ok(_) => Ok("/proc/swaps is readable".to_owned()),
        Err(error) => Err(format!("/proc/swaps: {error}")),
    };
    Finding::of("swap", tried, ["this kernel can swap", "no swap area can be switched on"])
}

fn run_library() -> Finding {
    let built = run_files::built();
    let tried = built.map(|_| "it is in this program".to_owned()).map_err(Failure::into_line);
    let follows = ["uzram run can load it into programs", "uzram run cannot manage a program's memory"];
    Finding::of("run library", tried, follows)
}

/// Whether touches of a process's own memory can be trapped, in either way.
fn pagers() -> [Finding; 2] {
    let pager = |trap: Trap, name, follows| {
        let tried = trap.check().map(|()| "userfaultfd(2) succeeds, and moves pages".to_owned());
        Finding::of(name, tried.map_err(|error| error.to_string()), follows)
    };
    let messages = [
        "a process's own memory can be compressed, and system calls may touch it",
        "uzram run sets no limit; a pager needs signals: pin what system calls touch",
    ];
    let signals = [
        "the same without privileges, but memory that system calls touch must be pinned",
        "a process's own memory can be compressed with messages only",
    ];
    let mut signal = pager(Trap::Signal, "pager: signal", signals);
    if signal.works == Works::Yes {
        signal.works = Works::Partly;
    }
    [pager(Trap::Message, "pager: message", messages), signal]
}

fn restartable_sequences() -> Finding {
    let tried = tried(
        Restartable::get().is_some_and(Restartable::works_here),
        "glibc registers threads, and membarrier(2) interrupts them",
        "glibc before 2.35 or its tunable, a kernel before 5.10, or a sandbox",
    );
    let follows = ["caches of CPUs take no lock", "caches of CPUs take a lock each, which is slower"];
    Finding::of("rseq", tried, follows)
}

fn io_uring() -> Finding {
    let mut params = io_uring_params::default();
    // SAFETY: `params` is zeroed, so no flag makes the kernel use an address or a descriptor in it;
    // the ring is closed at once, unused.
    let tried = match unsafe { io_uring_setup(2, &mut params) } {
        Ok(_) => Ok("io_uring_setup(2) succeeds".to_owned()),
        Err(errno) => {
            let hint = match errno {
                Errno::PERM => " (sysctl kernel.io_uring_disabled, or a seccomp filter)",
                Errno::NOSYS => " (not in this kernel)",
                _ => "",
            };
            Err(format!("io_uring_setup(2): {errno}{hint}"))
        }
    };
    let follows = ["many requests can go in one system call", "plain reads and writes are used"];
    Finding::of("io_uring", tried, follows)
}

fn locked_memory(held: CapabilitySet) -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let tried = match limit {
        _ if held.contains(CapabilitySet::IPC_LOCK) => Ok("CAP_IPC_LOCK is held".to_owned()),
        None => Ok("RLIMIT_MEMLOCK is unlimited".to_owned()),
        Some(bytes) => Err(format!("RLIMIT_MEMLOCK is {}, and CAP_IPC_LOCK is not held", format_size(bytes))),
    };
    let yes = "the daemon can keep all of its memory out of swap";
    let no = "a device used as swap could wait for itself; raise `ulimit -l` first";
    let finding = Finding::of("locked memory", tried, [yes, no]);
    let is_partly = finding.works == Works::No && limit.is_some_and(|bytes| bytes > 0);
    Finding { works: if is_partly { Works::Partly } else { finding.works }, ..finding }
}

fn kernel_zram() -> Finding {
    let control = Path::new("/sys/class/zram-control");
    let shown = control.display();
    let is_zram = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("zram");
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten().filter(is_zram).count();
    let is_ours = rustix::fs::access(control.join("hot_add"), rustix::fs::Access::READ_OK).is_ok();
    let (works, checked_by, follows) = match (control.exists(), is_ours) {
        (false, _) => {
            let why = "bench --against kernel cannot run; try modprobe zram";
            (Works::No, format!("{shown} does not exist"), why)
        }
        (true, true) => {
            let how = format!("{shown}/hot_add is readable, zram devices: {devices}");
            (Works::Yes, how, "bench --against kernel can run")
        }
        (true, false) => {
            let how = format!("{shown} exists, but hot_add is not ours to read");
            (Works::Partly, how, "bench --against kernel needs root")
        }
    };
    Finding { name: "kernel zram", works, checked_by, follows }
}

/// Whether this process has the capabilities that features depend on.
fn capabilities(held: CapabilitySet) -> Finding {
    let known = [
        ("CAP_SYS_ADMIN", CapabilitySet::SYS_ADMIN),
        ("CAP_SYS_PTRACE", CapabilitySet::SYS_PTRACE),
        ("CAP_IPC_LOCK", CapabilitySet::IPC_LOCK),
        ("CAP_SYS_NICE", CapabilitySet::SYS_NICE),
    ];
    let list = |is_held: bool| {
        let names = known.iter().filter(|(_, capability)| held.contains(*capability) == is_held);
        let names: Vec<&str> = names.map(|(name, _)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(" ") }
    };
    let checked_by = format!("capget(2): effective {}, missing {}", list(true), list(false));
    let is_admin = held.contains(CapabilitySet::SYS_ADMIN);
    let yes = "mounts, loop devices and swap can be set up from here";
    let no = "mounts, loop devices and swap need root; NBD and the library do not";
    Finding::of("capabilities", tried(is_admin, &checked_by, &checked_by), [yes, no])
}
