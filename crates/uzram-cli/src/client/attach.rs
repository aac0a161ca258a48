//! `uzram attach` and `uzram detach`: a device as a block device, `/dev/loopN` on its file.
//!
//! The daemon never does this itself: a process that waits in a system call for its own FUSE reply cannot be
//! killed, not even by SIGKILL. Attached devices are found only by the daemon's record
//! ([`uzram_serve::record`]): through the daemon while it runs, in its runtime directory when it is dead.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde_json::json;
use uzram_serve::control::FilesJson;
use uzram_serve::fuse::{self, DISK, MAX_IO_BYTES};
use uzram_serve::loop_device::{self, LoopAttachment, Use};
use uzram_serve::mounts;
use uzram_serve::record::{AttachedDevice, Record};
use uzram_serve::swap_area;

use crate::client::daemon_client::{Daemon, device_path, understand};
use crate::config::plan::SwapPlan;
use crate::config::settings::parse_name;
use crate::failure::{Context, Failure, Result};
use crate::output::report;
use crate::swap::page_cluster;
use crate::swap::switch_off::switch_off;
use crate::system::protect::unprotect;
use crate::system::runtime_dir::{self, RuntimeArgs};

/// How long an unmounted file system may take to release its device.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client that has left may count as one.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a killed process may take to end; it may have gigabytes to free.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// Make a device of a running daemon a block device, and print its path.
///
/// Sets up a loop device on the device's file, so the daemon must show its devices as files (`uzram up
/// --mount`). Needs root. While attached, NBD clients cannot write to the device, and can read it only if it
/// is always exported.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram attach zram0     then: mkfs.ext4 /dev/loop0 && mount /dev/loop0 /mnt")]
pub struct AttachArgs {
    /// The device, as in zram0
    #[arg(value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Undo `uzram attach`. Refused while the block device is in use.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram detach zram0
         uzram detach --force     cleans up after a daemon that was killed")]
pub struct DetachArgs {
    /// The device, as in zram0
    #[arg(value_parser = parse_name, required_unless_present = "force")]
    name: Option<String>,
    /// Clean up after a dead daemon (swap, mounted file systems, loop devices, its own mount), and print what
    /// was done
    #[arg(long, conflicts_with = "name")]
    force: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

pub fn attach(args: &AttachArgs) -> Result<()> {
    require_root()?;
    let block_device = attach_device(&Daemon::at(&args.runtime)?, &args.name, None)?;
    report(&json!({ "name": args.name, "block_device": block_device }), |_| {
        format!("{}\n", block_device.display())
    })
}

/// Makes a device of a daemon a block device, and a swap area if there is a plan of one. Returns its path.
pub fn attach_device(daemon: &Daemon, name: &str, swap: Option<SwapPlan>) -> Result<PathBuf> {
    let files = files_of(daemon)?;
    daemon.attribute(name, "initstate")?;
    if let Some(device) = attached(daemon)?.into_iter().find(|device| device.name == *name) {
        let path = device.attachment.path();
        return Err(Failure::line(format!("{name} is attached already, as {}", path.display())));
    }
    let failed = || format!("cannot attach {name}");
    // The daemon's own swap areas may be attached all the same.
    if let Some(why) = daemon.about()?.attach_refused.filter(|_| swap.is_none()) {
        return Err(Failure::line(format!("{}: {why}", failed())));
    }
    let root = open_root(&files)?;
    let disk = open_disk(daemon, &root, name)?;
    if swap.is_some() {
        warm_up(&root, files.threads).context(|| "cannot prepare the daemon's threads")?;
    }
    let attachment = LoopAttachment::attach(&disk).context(failed)?;
    let used = record(daemon, name, attachment).and_then(|()| match swap {
        Some(swap) => {
            swap.page_cluster.map_or(Ok(()), |value| page_cluster::set(&daemon.dir, value))?;
            swap_on(attachment, name, swap)
        }
        None => Ok(()),
    });
    if used.is_err() {
        // The first failure is the one to report.
        let _ = attachment.detach();
        let _ = swap.and_then(|swap| swap.page_cluster).map(|_| page_cluster::restore(&daemon.dir));
    }
    used.map(|()| attachment.path())
}

fn record(daemon: &Daemon, name: &str, attachment: LoopAttachment) -> Result<()> {
    let path = format!("{}/attachment", device_path(name));
    let Err(failure) = daemon.ask("PUT", &path, Some(&json!(attachment))) else { return Ok(()) };
    // Asked again, the daemon refuses what it recorded before its worker died.
    match attached(daemon) {
        Ok(devices) if devices.contains(&AttachedDevice { name: name.to_owned(), attachment }) => Ok(()),
        _ => Err(failure),
    }
}

fn swap_on(attachment: LoopAttachment, name: &str, swap: SwapPlan) -> Result<()> {
    let path = attachment.path();
    let failed = || format!("cannot swap to {}", path.display());
    let Some(held) = attachment.hold().context(failed)? else {
        return Err(Failure::line(format!("{}: it is gone", failed())));
    };
    let size_bytes = held.size_bytes().context(failed)?;
    // Use the device's own path, for /proc/swaps; it names the same device as long as that is held.
    swap_area::make(&held.path(), size_bytes, name)
        .and_then(|()| swap_area::switch_on(&path, swap.priority, swap.discard))
        .context(failed)
}

pub fn detach(args: &DetachArgs) -> Result<()> {
    require_root()?;
    let Some(name) = &args.name else { return clear_dead(&args.runtime.path()?) };
    let mut devices = attached(&Daemon::at(&args.runtime)?)?;
    devices.retain(|device| device.name == *name);
    if devices.is_empty() {
        return Err(Failure::line(format!("{name} is not attached")));
    }
    let detach = |device: AttachedDevice| device.attachment.detach();
    devices.into_iter().try_for_each(detach).context(|| format!("cannot detach {name}"))
}

/// Detaches a block device of the daemon in `dir` without asking it. First switches the swap area on it off,
/// if there is one, of whose contents the daemon keeps `swap_off` bytes in memory.
pub fn detach_device(
    dir: &Path,
    name: &str,
    attachment: LoopAttachment,
    swap_off: Option<u64>,
) -> Result<()> {
    if let Some(kept_bytes) = swap_off {
        unprotect();
        switch_off(attachment, kept_bytes)?;
        // Swap is off: nothing may keep the daemon from ending. The note of the setting stays, for `uzram
        // swap off`.
        let _ = page_cluster::restore(dir);
    }
    attachment.detach().context(|| format!("cannot detach {name}"))
}

pub fn require_root() -> Result<()> {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Failure::line("block devices and swap need root: run this as root")),
    }
}

pub fn files_of(daemon: &Daemon) -> Result<FilesJson> {
    let why = "the daemon does not show its devices as files: start it with --mount DIR, or with --attach";
    daemon.about()?.files.ok_or_else(|| Failure::line(why))
}

pub fn attached(daemon: &Daemon) -> Result<Vec<AttachedDevice>> {
    let answer = daemon.ask("GET", "/v1/attachments", None)?;
    understand(answer["attachments"].clone())
}

/// Opens the root of a daemon's mount, and verifies that its path still leads to that mount.
fn open_root(files: &FilesJson) -> Result<OwnedFd> {
    let shown = files.dir.display();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, &files.dir, flags, Mode::empty())
        .context(|| format!("cannot open the daemon's files in '{shown}'"))?;
    let mount = mounts::of(&root).context(|| format!("cannot find out what is mounted on '{shown}'"))?;
    if mount.device == files.device && mount.is_fuse_of(rustix::process::geteuid().as_raw()) {
        return Ok(root);
    }
    Err(Failure::line(format!(
        "'{shown}' is not where the daemon's files are mounted: its mount was moved, unmounted or covered"
    )))
}

fn open_disk(daemon: &Daemon, root: &OwnedFd, name: &str) -> Result<OwnedFd> {
    let deadline = Instant::now() + LEAVE_TIMEOUT;
    loop {
        let flags = OFlags::RDWR | OFlags::DIRECT;
        match mounts::open_below(root, OsStr::new(name), OsStr::new(DISK), flags) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => {}
            opened => return opened.context(|| format!("cannot open the file of {name}")),
        }
        let why = match obstacle(daemon, name)? {
            // It was there a moment ago: a client that has just left, or a reset.
            None if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
            why => why.unwrap_or_else(|| "its file is busy".to_owned()),
        };
        return Err(Failure::line(format!("cannot attach {name}: {why}")));
    }
}

/// Returns why the file of a device cannot be opened for writing now, if the daemon knows a reason.
fn obstacle(daemon: &Daemon, name: &str) -> Result<Option<String>> {
    if daemon.attribute(name, "initstate")? == "0" {
        return Ok(Some(format!(
            "it has no size, as after a reset: `uzram set {name} disksize=SIZE` gives it one"
        )));
    }
    let clients = daemon.ask("GET", &format!("{}/clients", device_path(name)), None)?;
    let has_clients = clients["clients"].as_array().is_some_and(|clients| !clients.is_empty());
    Ok(has_clients
        .then(|| "NBD clients have it open: disconnect them (`uzram clients`, `uzram kick`)".to_owned()))
}

/// Makes each of the daemon's threads touch the memory that it needs.
fn warm_up(root: &OwnedFd, threads: usize) -> io::Result<()> {
    let bytes = vec![0u8; MAX_IO_BYTES];
    let write = |number| {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(root, fuse::warm_up_file(number), flags, Mode::empty())?;
        // The file is as long as the longest request.
        let len = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(MAX_IO_BYTES);
        rustix::io::pwrite(&file, &bytes[..len.min(MAX_IO_BYTES)], 0)?;
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || write(number))).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        })
    })
}

/// Returns what the dead daemon of a runtime directory left; `None` while one runs, or if nothing is left.
pub fn left_by_dead(dir: &Path) -> Result<Option<Record>> {
    Ok(record_of_dead(dir)?.filter(|record| !record.is_empty()))
}

/// Returns the record of the dead daemon of a runtime directory; `None` while the daemon runs. A directory of
/// another user is not trusted.
fn record_of_dead(dir: &Path) -> Result<Option<Record>> {
    let Some(open) = runtime_dir::open_own(dir)? else { return Ok(Some(Record::default())) };
    // If no process listens, or only those of a daemon whose holder was killed, it is ending: wait for it.
    let is_there = Daemon::in_dir(dir.to_owned())?.is_there() && !runtime_dir::is_owner_dead(dir);
    let patience = if is_there { Duration::ZERO } else { DEATH_TIMEOUT };
    if runtime_dir::wait_until_free(dir, patience)? { Ok(Some(Record::read(&open, dir)?)) } else { Ok(None) }
}

fn clear_dead(dir: &Path) -> Result<()> {
    let done = clear(dir)?;
    if done.is_empty() {
        refuse_unrecorded(dir)?;
    }
    report_cleared(&done)
}

pub fn report_cleared(done: &[String]) -> Result<()> {
    report(&json!({ "done": done }), |_| match done {
        [] => "nothing was left\n".to_owned(),
        done => done.iter().map(|step| format!("{step}\n")).collect(),
    })
}

/// Cleans up after the dead daemon of a runtime directory, by its record; returns what was done.
pub fn clear(dir: &Path) -> Result<Vec<String>> {
    let record = record_of_dead(dir)?.ok_or_else(|| {
        Failure::line(format!(
            "the daemon in '{}' lives: name the device to detach, or end the daemon first",
            dir.display()
        ))
    })?;
    let mut done = Vec::new();
    for device in &record.attached {
        clear_device(device.attachment, &device.name, &mut done)?;
    }
    if let Some(left) = &record.mount {
        let uid = rustix::process::geteuid().as_raw();
        if let Some(mount) = left.identity.find(uid).context(|| "cannot read what is mounted")? {
            let shown = mount.dir.display();
            mounts::unmount(&mount, UnmountFlags::DETACH).context(|| format!("cannot unmount '{shown}'"))?;
            done.push(format!("unmounted {shown}"));
        }
    }
    page_cluster::restore(dir)?;
    Ok(done)
}

/// Fails if there are block devices that look like those of a daemon in `dir`, but that no record lists.
pub fn refuse_unrecorded(dir: &Path) -> Result<()> {
    // After its mount was detached, a file's path begins at that mount's root.
    let is_disk_of_none = |file: &Path| file.components().count() == 3 && file.ends_with(DISK);
    // If the directory no longer exists, the file may have been in it.
    let may_be_here = |file: &Path| file.starts_with(dir) || !dir.exists();
    let looks_ours = |file: &Path| is_disk_of_none(file) || file.ends_with(DISK) && may_be_here(file);
    let found = loop_device::named(looks_ours);
    if found.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = found.iter().map(|path| path.display().to_string()).collect();
    Err(Failure::line(format!(
        "there is no record in '{}' of a daemon that uses {}, and it is left alone: if it is not another daemon's, end its \
         use (swapoff, umount) and free it (losetup -d)",
        dir.display(),
        names.join(", ")
    )))
}

fn clear_device(attachment: LoopAttachment, name: &str, done: &mut Vec<String>) -> Result<()> {
    let path = attachment.path();
    let shown = path.display();
    let deadline = Instant::now() + LET_GO_TIMEOUT;
    // Held, so that its number is not reused meanwhile.
    let Some(held) = attachment.hold()? else { return Ok(()) };
    loop {
        match held.in_use()? {
            None => break,
            Some(Use::Swap) => {
                held.switch_swap_off().context(|| format!("cannot switch swap on {shown} off"))?;
                done.push(format!(
                    "switched swap on {shown} ({name}) off: what was swapped out is lost, and programs that need it are \
                     killed"
                ));
            }
            Some(Use::Mounted(mount)) => {
                let dir = mount.dir.display();
                match mounts::unmount(&mount, UnmountFlags::DETACH) {
                    Ok(()) => done.push(format!("unmounted {dir}: what {name} held of it is lost")),
                    // Another process has just unmounted it, or another mount covers it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
                        thread::sleep(Duration::from_millis(20));
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        return Err(Failure::line(format!(
                            "{shown} ({name}) is mounted on '{dir}', below something else: unmount that first"
                        )));
                    }
                    Err(error) => return Err(Failure::line(format!("cannot unmount '{dir}': {error}"))),
                }
            }
            // A file system releases its device a moment after it was unmounted.
            Some(Use::Claimed) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Some(Use::Claimed) => {
                return Err(Failure::line(format!(
                    "{shown} ({name}) is used by something else, a file system that is still open, say: end that first"
                )));
            }
        }
    }
    drop(held);
    attachment.detach().context(|| format!("cannot free {shown}"))?;
    done.push(format!("freed {shown}"));
    Ok(())
}
