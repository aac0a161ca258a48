//! Loop devices: files as block devices, loop(4).
//!
//! An attachment of a file to a loop device is identified by the device's number and its disk sequence number
//! (`diskseq`, Linux 5.15), which grows whenever a loop device gets another file and is not reused before the
//! next boot. Both are recorded when the file is attached. The kernel's information about the file is not
//! used: `LOOP_GET_STATUS64` queries the file system of the file, which may hang, and its path may be the
//! same in two containers, changes when a parent directory is renamed, and is meaningless after unmounting.
//!
//! While a device is held open, it can be detached, but gets no other file. So every operation on an
//! attachment is done with its device held ([`LoopAttachment::hold`]).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use linux_raw_sys::{ioctl as opcodes, loop_device as sys};
use rustix::fs::{major, minor};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::mounts::{self, MountInfo};
use crate::swap_area::{self, ActiveArea};

/// The most free devices to try when other processes take them first.
const MAX_TRIES: usize = 64;
/// How long a device may take to release its file.
const PATIENCE: Duration = Duration::from_secs(5);
/// `LOOP_MAJOR`, `<linux/major.h>`.
const LOOP_MAJOR: u32 = 7;

/// An attachment of any file to a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LoopAttachment {
    /// The device is `/dev/loopNUMBER`.
    pub number: u32,
    /// The disk sequence number of this attachment.
    pub diskseq: u64,
}

/// The use of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// Its file system is mounted here.
    Mounted(MountInfo),
    /// It is an active swap area.
    Swap,
    /// Something else has claimed it: another device, or a mount in a container.
    Claimed,
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Use::Mounted(mount) => write!(f, "mounted on '{}'", mount.dir.display()),
            Use::Swap => f.write_str("swapped to"),
            Use::Claimed => f.write_str("used by something else"),
        }
    }
}

fn device_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

fn fact(number: u32, name: &str) -> Option<Vec<u8>> {
    read_fact(&PathBuf::from(format!("/sys/block/loop{number}/{name}")))
}

fn read_fact(path: &Path) -> Option<Vec<u8>> {
    let text = std::fs::read(path).ok()?;
    Some(text.strip_suffix(b"\n").unwrap_or(&text).to_vec())
}

/// Returns the name of the file of a loop device, by the device's directory in sysfs; `None` for other
/// devices.
pub(crate) fn backing_file(device: &Path) -> Option<PathBuf> {
    let name = read_fact(&device.join("loop/backing_file"))?;
    // The kernel adds this to the name of a removed file, as after unmounting.
    let name = name.strip_suffix(b" (deleted)").unwrap_or(&name);
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name)))
}

impl LoopAttachment {
    /// Attaches `file`, which is open for reading and writing, to a free loop device, with direct I/O and
    /// blocks of 4096 bytes. Errors: `Permission`; `Unsupported` when the kernel has no loop devices, no
    /// direct I/O on that file, or no disk sequence numbers; `Io`.
    pub fn attach(file: &OwnedFd) -> Result<LoopAttachment> {
        let control = open(Path::new("/dev/loop-control"), 0).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Error::new(
                ErrorKind::Unsupported,
                "there is no /dev/loop-control: the kernel has no loop devices, or this container was not given them",
            ),
            _ => refused("cannot open /dev/loop-control", &error),
        })?;
        for _ in 0..MAX_TRIES {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), request(sys::LOOP_CTL_GET_FREE)) };
            let number = u32::try_from(number)
                .map_err(|_| refused("no loop device is free", &io::Error::last_os_error()))?;
            let path = device_path(number);
            let failed = |error: &io::Error| refused(&format!("cannot set up {}", path.display()), error);
            let device = open(&path, 0).map_err(|error| failed(&error))?;
            match configure(&device, file) {
                Ok(()) => return LoopAttachment::checked(number, &device),
                // Another process was faster.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Err(Error::new(ErrorKind::Busy, "other processes took all free loop devices"))
    }

    /// Returns the new attachment of `device` if it uses direct I/O; the page cache would hold a second copy,
    /// and need memory to free memory.
    fn checked(number: u32, device: &OwnedFd) -> Result<LoopAttachment> {
        let is_direct = fact(number, "loop/dio").as_deref() == Some(b"1");
        let diskseq = diskseq(device);
        if let (true, Ok(diskseq)) = (is_direct, &diskseq) {
            // No throttling of writeback, which favours reads on slow disks; and no flushes, as there is no
            // volatile cache (`Documentation/ABI/stable/sysfs-block`). A kernel without a setting does not
            // need it.
            for (setting, value) in [("wbt_lat_usec", "0"), ("write_cache", "write through")] {
                let _ = std::fs::write(format!("/sys/block/loop{number}/queue/{setting}"), value);
            }
            return Ok(LoopAttachment { number, diskseq: *diskseq });
        }
        // The device is still ours, as it is held open, and no other process knows of it.
        let _ = clear(device);
        let what = if diskseq.is_err() {
            "this kernel has no disk sequence numbers for loop devices (Linux 5.15 has)"
        } else {
            "this kernel's loop devices have no direct I/O on FUSE files (Linux 4.10 has it)"
        };
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    /// Returns the device's path; valid as long as this is attached.
    pub fn path(self) -> PathBuf {
        device_path(self.number)
    }

    /// Returns whether it is still attached.
    pub fn is_current(self) -> bool {
        let diskseq = fact(self.number, "diskseq").and_then(|text| str::from_utf8(&text).ok()?.parse().ok());
        diskseq == Some(self.diskseq) && fact(self.number, "loop/backing_file").is_some()
    }

    /// Opens the device, if this is still attached to it. While it is held, it gets no other file. Errors:
    /// `Permission`, `Io`.
    pub fn hold(self) -> Result<Option<HeldDevice>> {
        let failed = |error: &io::Error| refused(&format!("cannot open {}", self.path().display()), error);
        let device = match open(&self.path(), 0) {
            // The device was removed.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) => {
                return Ok(None);
            }
            device => device.map_err(|error| failed(&error))?,
        };
        let is_loop = rustix::fs::fstat(&device).is_ok_and(|stat| self.has_number(stat.st_rdev));
        let seen = diskseq(&device).map_err(|error| failed(&error))?;
        Ok((is_loop && seen == self.diskseq && self.is_current())
            .then_some(HeldDevice { attachment: self, device }))
    }

    /// Returns the use of the device, if it is in use and this is still attached to it. Errors: as
    /// [`LoopAttachment::hold`]; the kernel's lists cannot be read.
    pub fn in_use(self) -> Result<Option<Use>> {
        self.hold()?.map_or(Ok(None), |held| held.in_use())
    }

    /// Returns the active swap area on the device, if any. Errors: the kernel's list cannot be read.
    pub fn swap_area(self) -> io::Result<Option<ActiveArea>> {
        if !self.is_current() {
            return Ok(None);
        }
        Ok(swap_area::active()?.into_iter().find(|area| self.is_device(&area.path)))
    }

    /// Returns whether a path in the kernel's lists means this device; the path may be from another mount
    /// namespace.
    fn is_device(self, path: &Path) -> bool {
        path == self.path() || std::fs::metadata(path).is_ok_and(|file| self.has_number(file.rdev()))
    }

    pub(crate) fn device_number(self) -> (u32, u32) {
        (LOOP_MAJOR, self.number)
    }

    fn has_number(self, device: u64) -> bool {
        (major(device), minor(device)) == self.device_number()
    }

    /// Returns whether a mount is of a file system on this device. Some file systems have anonymous device
    /// numbers: for these the source is compared, which only root can choose for a file system that needs a
    /// device.
    fn is_mounted_as(self, mount: &MountInfo) -> bool {
        mount.device == self.device_number()
            || self.is_device(&mount.source) && needs_device(&mount.file_system)
    }

    /// Detaches the file, and waits until that is done. Returns at once if it is no longer attached. Errors:
    /// `Busy` while it is in use; `Io`, `Permission`.
    pub fn detach(self) -> Result<()> {
        let path = self.path();
        let busy = |by: &str| Error::new(ErrorKind::Busy, format!("{} is {by}", path.display()));
        let Some(held) = self.hold()? else { return Ok(()) };
        let claimed = held.claim()?.map_err(|by| busy(&by.to_string()))?;
        clear(&claimed).map_err(|error| refused(&format!("cannot free {}", path.display()), &error))?;
        drop((held, claimed));
        let deadline = Instant::now() + PATIENCE;
        // Other processes may have it open for a moment, udev for example.
        while self.is_current() {
            if Instant::now() >= deadline {
                return Err(busy("still open: it is freed when its last user closes it"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// A loop device that is held open, so that it gets no other file.
pub struct HeldDevice {
    attachment: LoopAttachment,
    device: OwnedFd,
}

impl HeldDevice {
    /// Returns the attachment.
    pub fn attachment(&self) -> LoopAttachment {
        self.attachment
    }

    /// Returns a path to the held device.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.device.as_raw_fd()))
    }

    /// Returns the device's size. Errors: the system's.
    pub fn size_bytes(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.device, rustix::fs::SeekFrom::End(0))?)
    }

    /// Switches the swap area on it off, if one is active. If another process is doing so, waits for that.
    /// Errors: swapoff(2)'s. It stays active then.
    pub fn switch_swap_off(&self) -> io::Result<()> {
        while let Err(error) = swap_area::switch_off(&self.path()) {
            if self.attachment.swap_area()?.is_none() {
                break;
            }
            // The kernel returns EINVAL while another process switches the area off.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns the use of the device, if it is in use. Errors: the kernel's lists cannot be read, or the
    /// device cannot be opened.
    pub fn in_use(&self) -> Result<Option<Use>> {
        self.claim().map(std::result::Result::err)
    }

    /// Opens the device exclusively, so that no other use begins meanwhile; returns its use if it is in use.
    /// This open decides whether the device is in use; the kernel's lists may only say by what.
    fn claim(&self) -> Result<std::result::Result<OwnedFd, Use>> {
        match open(&self.path(), libc::O_EXCL) {
            Ok(claimed) => Ok(Ok(claimed)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => self.user().map(Err),
            Err(error) => Err(refused(&format!("cannot open {}", self.attachment.path().display()), &error)),
        }
    }

    fn user(&self) -> Result<Use> {
        let failed =
            |error: io::Error| Error::new(ErrorKind::Io, format!("cannot read what is in use: {error}"));
        if self.attachment.swap_area().map_err(failed)?.is_some() {
            return Ok(Use::Swap);
        }
        let mounts = mounts::all().map_err(failed)?;
        let mount = mounts.into_iter().rev().find(|mount| self.attachment.is_mounted_as(mount));
        Ok(mount.map_or(Use::Claimed, Use::Mounted))
    }
}

/// Returns the loop devices whose backing file's name satisfies `wanted`. Only for messages: a name proves
/// nothing.
pub fn named(wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let number = |name: &[u8]| str::from_utf8(name.strip_prefix(b"loop")?).ok()?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.file_name().as_bytes())).collect();
    numbers.sort_unstable();
    let is_wanted = |number: &u32| {
        backing_file(&PathBuf::from(format!("/sys/block/loop{number}"))).is_some_and(|name| wanted(&name))
    };
    numbers.into_iter().filter(is_wanted).map(device_path).collect()
}

/// Returns whether a file system type is mounted only from block devices.
pub(crate) fn needs_device(file_system: &str) -> bool {
    let Ok(known) = std::fs::read_to_string("/proc/filesystems") else { return false };
    known.lines().any(|line| line.strip_prefix('\t') == Some(file_system))
}

/// Converts an ioctl(2) number, which is an `unsigned long` with glibc and an `int` with musl, and always has
/// 32 bits.
const fn request(number: u32) -> libc::Ioctl {
    number as _
}

fn configure(device: &OwnedFd, file: &OwnedFd) -> io::Result<()> {
    // SAFETY: all fields of the structure are integers: zeros are valid, and mean the defaults.
    let mut config: sys::loop_config = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.block_size = PAGE_SIZE as u32;
    config.info.lo_flags = sys::LO_FLAGS_DIRECT_IO as u32;
    // SAFETY: the request reads such a structure, which outlives the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), request(sys::LOOP_CONFIGURE), &raw const config) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn clear(device: &OwnedFd) -> io::Result<()> {
    // SAFETY: the request takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), request(sys::LOOP_CLR_FD)) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENXIO) { Ok(()) } else { Err(error) }
}

fn diskseq(device: &OwnedFd) -> io::Result<u64> {
    const BLKGETDISKSEQ: rustix::ioctl::Opcode = opcodes::BLKGETDISKSEQ;
    // SAFETY: BLKGETDISKSEQ writes a u64.
    let asked = unsafe { rustix::ioctl::ioctl(device, rustix::ioctl::Getter::<BLKGETDISKSEQ, u64>::new()) };
    Ok(asked?)
}

fn open(path: &Path, flags: i32) -> io::Result<OwnedFd> {
    let file: File = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    Ok(file.into())
}

fn refused(what: &str, error: &io::Error) -> Error {
    let kind = match Errno::from_io_error(error) {
        Some(Errno::PERM | Errno::ACCESS) => ErrorKind::Permission,
        Some(Errno::NOENT) => ErrorKind::NotFound,
        Some(Errno::INVAL) => ErrorKind::Invalid,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("{what}: {error}"))
}
