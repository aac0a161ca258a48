//! `uzram attach` and `uzram detach`: a device as a block device, `/dev/loopN` on its file.
//!
//! This is done by a process of its own, never by the daemon: a daemon that waits in a system call for its own answer
//! cannot be ended, not even by SIGKILL. What is attached is found in the kernel's lists, which a dead daemon leaves
//! true.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::mount::UnmountFlags;
use uzram_serve::control::FilesJson;
use uzram_serve::fuse::{self, MAX_IO_BYTES};
use uzram_serve::loop_device::{LoopDevice, Use};
use uzram_serve::mounts::{self, MountInfo};
use uzram_serve::swap_area;

use crate::daemon_client::Daemon;
use crate::device_args::parse_name;
use crate::failure::{Context, Failure, Result, print};
use crate::protect::unprotect;
use crate::runtime_dir::RuntimeArgs;

/// How long a file system may take to let go of its device.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(5);

/// Make a device of a running daemon a block device, and print which.
///
/// The daemon shows its devices as files (`uzram up --mount`); a loop device is put on the device's. As root.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram attach zram0     then: mkfs.ext4 /dev/loop0 && mount /dev/loop0 /mnt")]
pub struct AttachArgs {
    /// The device, as in zram0
    #[arg(value_parser = parse_name)]
    name: String,
    /// Make it a swap area and switch it on, with this priority: for daemons that are protected for it
    #[arg(long, hide = true, value_name = "PRIORITY", num_args = 0..=1)]
    swap: Option<Option<u16>>,
    /// Do not tell the daemon what is freed in the swap area
    #[arg(long, hide = true, requires = "swap")]
    no_discard: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Undo `uzram attach`. Refused while the block device is in use.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram detach zram0
         uzram detach --force     clears what a daemon left that was killed")]
pub struct DetachArgs {
    /// The device, as in zram0
    #[arg(value_parser = parse_name, required_unless_present = "force")]
    name: Option<String>,
    /// Clear what a dead daemon has left (swap, mounted file systems, loop devices, its own mount), and say what
    #[arg(long, conflicts_with = "name")]
    force: bool,
    /// Switch a swap area off first
    #[arg(long, hide = true, conflicts_with = "force")]
    swap_off: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// `uzram attach`; prints the block device.
pub fn attach(args: &AttachArgs) -> Result<()> {
    require_root()?;
    let daemon = Daemon::at(&args.runtime)?;
    let files = files_of(&daemon)?;
    let file = disk_of(&daemon, &files, &args.name)?;
    if let Some(device) = LoopDevice::on(&file)?.first() {
        let device = device.path();
        return Err(Failure::Line(format!("{} is attached already, as {}", args.name, device.display())));
    }
    let attached = || format!("cannot attach {}", args.name);
    let Some(priority) = args.swap else {
        let device = LoopDevice::attach(&file).context(attached)?;
        return print(&format!("{}\n", device.path().display()));
    };
    warm_up(&files).context(|| "cannot prepare the daemon's threads".to_owned())?;
    let size_bytes = size_bytes(&file)?;
    let device = LoopDevice::attach(&file).context(attached)?;
    let path = device.path();
    let switched_on = swap_area::make(&path, size_bytes, &args.name)
        .and_then(|()| swap_area::switch_on(&path, priority, !args.no_discard));
    if let Err(error) = switched_on {
        // The first failure is the one to report.
        let _ = device.detach();
        return Err(Failure::Line(format!("cannot swap to {}: {error}", path.display())));
    }
    print(&format!("{}\n", path.display()))
}

/// `uzram detach`
pub fn detach(args: &DetachArgs) -> Result<()> {
    require_root()?;
    let Some(name) = &args.name else { return clear_dead(&args.runtime.path()?) };
    let daemon = Daemon::at(&args.runtime)?;
    let devices = LoopDevice::on(&disk_of(&daemon, &files_of(&daemon)?, name)?)?;
    if devices.is_empty() {
        return Err(Failure::Line(format!("{name} is not attached")));
    }
    for device in devices {
        if args.swap_off && device.in_use()? == Some(Use::Swap) {
            unprotect();
            crate::swap::switch_off(&device.path(), name, &daemon)?;
        }
        device.detach().context(|| format!("cannot detach {name}"))?;
    }
    Ok(())
}

/// Fails unless this process may do what only root may.
///
/// # Errors
/// It is another user's.
pub fn require_root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        Err(Failure::line("block devices and swap are root's: run this as root"))
    }
}

/// Where a daemon's devices are files.
///
/// # Errors
/// There is no daemon, or it shows no files.
pub fn files_of(daemon: &Daemon) -> Result<FilesJson> {
    daemon.about()?.files.ok_or_else(|| {
        Failure::line("the daemon shows its devices as no files: start it with --mount DIR, or with --attach")
    })
}

/// The file of a device that there is.
fn disk_of(daemon: &Daemon, files: &FilesJson, name: &str) -> Result<PathBuf> {
    daemon.attribute(name, "initstate")?;
    Ok(files.disk(name))
}

fn size_bytes(file: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(file).context(|| format!("cannot look at '{}'", file.display()))?;
    Ok(metadata.len())
}

/// Has each of the daemon's threads touch what it needs.
fn warm_up(files: &FilesJson) -> std::io::Result<()> {
    let bytes = vec![0u8; MAX_IO_BYTES];
    let write = |number| {
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(fuse::warm_up_file(&files.dir, number))?;
        file.write_all_at(&bytes, 0)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..files.threads).map(|number| scope.spawn(move || write(number))).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")))
        })
    })
}

/// The loop devices on the files of a daemon, and the device that each shows.
///
/// # Errors
/// The kernel's lists cannot be read.
pub fn attached_to(files: &FilesJson) -> Result<Vec<(LoopDevice, String)>> {
    let devices = LoopDevice::all(|file| files.device(file).is_some())?;
    let named = |device: LoopDevice| {
        let file = device.backing_file()?;
        Some((device, files.device(&file)?.to_owned()))
    };
    Ok(devices.into_iter().filter_map(named).collect())
}

/// What the daemon of a runtime directory has mounted, alive or dead.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn mounts_of(dir: &Path) -> Result<Vec<MountInfo>> {
    fuse::mounts_of(dir).context(|| "cannot read what is mounted".to_owned())
}

/// Clears what the dead daemon of a runtime directory has left, and says what.
fn clear_dead(dir: &Path) -> Result<()> {
    let done = clear(dir)?;
    if done.is_empty() {
        return print("nothing was left\n");
    }
    print(&done.concat())
}

/// Clears what the dead daemon of a runtime directory has left; a line for each thing that was done.
///
/// # Errors
/// The daemon lives; something cannot be cleared.
pub fn clear(dir: &Path) -> Result<Vec<String>> {
    let mounts = mounts_of(dir)?;
    if mounts.iter().any(|mount| !mount.is_dead()) {
        return Err(Failure::Line(format!(
            "the daemon in '{}' lives: name the device to detach, or end the daemon first",
            dir.display()
        )));
    }
    let mut done = Vec::new();
    for mount in mounts {
        let files = FilesJson { dir: mount.dir.clone(), ..FilesJson::default() };
        for (device, name) in attached_to(&files)? {
            clear_device(device, &name, &mut done)?;
        }
        let shown = mount.dir.display();
        rustix::mount::unmount(&mount.dir, UnmountFlags::DETACH)
            .context(|| format!("cannot unmount '{shown}'"))?;
        done.push(format!("unmounted {shown}\n"));
    }
    Ok(done)
}

/// Ends every use of a device that answers no more, and frees it.
fn clear_device(device: LoopDevice, name: &str, done: &mut Vec<String>) -> Result<()> {
    let path = device.path();
    let shown = path.display();
    let deadline = Instant::now() + LET_GO_TIMEOUT;
    loop {
        match device.in_use()? {
            None => break,
            Some(Use::Swap) => {
                swap_area::switch_off(&path).context(|| format!("cannot switch swap on {shown} off"))?;
                done.push(format!(
                    "switched swap on {shown} ({name}) off: what was swapped out is lost, and programs that need it are \
                     killed\n"
                ));
            }
            Some(Use::Mounted(dir)) => {
                let top = mounts::at(&dir).context(|| "cannot read what is mounted".to_owned())?;
                // Unless somebody else has just unmounted it.
                if top.is_some_and(|mount| mount.source == path) {
                    rustix::mount::unmount(&dir, UnmountFlags::DETACH)
                        .context(|| format!("cannot unmount '{}'", dir.display()))?;
                    done.push(format!("unmounted {}: what {name} held of it is lost\n", dir.display()));
                } else if Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(20));
                } else {
                    return Err(Failure::Line(format!(
                        "{shown} ({name}) is mounted on '{}', below something else: unmount that first",
                        dir.display()
                    )));
                }
            }
            // A file system lets go a moment after it was unmounted.
            Some(Use::Claimed) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Some(Use::Claimed) => {
                return Err(Failure::Line(format!(
                    "{shown} ({name}) is used by something else, a file system that is still open, say: end that first"
                )));
            }
        }
    }
    device.detach().context(|| format!("cannot free {shown}"))?;
    done.push(format!("freed {shown}\n"));
    Ok(())
}
