//! Loop devices: files as block devices, loop(4).
//!
//! What is attached to what is the kernel's knowledge alone: nothing about it is kept here.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use linux_raw_sys::loop_device as sys;
use rustix::io::Errno;
use uzram::base::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::{mounts, swap_area};

/// Devices that are tried when others are faster to take those that are free.
const MAX_TRIES: usize = 64;
/// How long a device may take to let go of its file.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a queue is told (`Documentation/ABI/stable/sysfs-block`): not to hold writes back so that reads of a slow disk
/// need not wait for them; and that what was written needs no flush, as there is nothing to flush it from.
const TUNING: [(&str, &str); 2] = [("wbt_lat_usec", "0"), ("write_cache", "write through")];

/// `/dev/loopN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoopDevice {
    number: u32,
}

/// For what a device is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// A file system of it is mounted here.
    Mounted(PathBuf),
    /// It is an active swap area.
    Swap,
    /// Something else has claimed it: another device, say.
    Claimed,
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Use::Mounted(dir) => write!(f, "mounted on '{}'", dir.display()),
            Use::Swap => f.write_str("swapped to"),
            Use::Claimed => f.write_str("used by something else"),
        }
    }
}

impl LoopDevice {
    /// The device's file.
    pub fn path(self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.number))
    }

    /// Makes a free loop device show `file`, with direct I/O and blocks of 4096 bytes.
    ///
    /// # Errors
    /// `Permission`; `Unsupported` when the kernel has no loop devices, or none with direct I/O on that file; `Io`.
    pub fn attach(file: &Path) -> Result<LoopDevice> {
        let control = open(Path::new("/dev/loop-control"), 0).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Error::new(
                ErrorKind::Unsupported,
                "there is no /dev/loop-control: the kernel has no loop devices, or this container was not given them",
            ),
            _ => refused("cannot open /dev/loop-control", &error),
        })?;
        let backing = open(file, libc::O_DIRECT)
            .map_err(|error| refused(&format!("cannot open '{}'", file.display()), &error))?;
        for _ in 0..MAX_TRIES {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), sys::LOOP_CTL_GET_FREE.into()) };
            let number = u32::try_from(number)
                .map_err(|_| refused("no loop device is free", &io::Error::last_os_error()))?;
            let device = LoopDevice { number };
            match device.configure(&backing) {
                Ok(()) => {
                    device.tune();
                    return device.checked();
                }
                // Somebody else was faster.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => {
                    return Err(refused(&format!("cannot set up {}", device.path().display()), &error));
                }
            }
        }
        Err(Error::new(ErrorKind::Busy, "others take all free loop devices"))
    }

    fn configure(self, backing: &OwnedFd) -> io::Result<()> {
        let device = open(&self.path(), 0)?;
        // SAFETY: a structure of integers alone, for which zeros mean the defaults.
        let mut config: sys::loop_config = unsafe { std::mem::zeroed() };
        config.fd = backing.as_raw_fd() as u32;
        config.block_size = PAGE_SIZE as u32;
        config.info.lo_flags = sys::LO_FLAGS_DIRECT_IO as u32;
        // SAFETY: the request takes such a structure, which lives through the call.
        match unsafe { libc::ioctl(device.as_raw_fd(), sys::LOOP_CONFIGURE.into(), &raw const config) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// This device, if it reads and writes without the page cache, which would hold everything twice, and need
    /// memory to free memory.
    fn checked(self) -> Result<LoopDevice> {
        if self.fact("loop/dio").as_deref() == Some(b"1") {
            return Ok(self);
        }
        // It is ours and nobody has heard of it.
        let _ = self.detach();
        let what = "this kernel's loop devices have no direct I/O on FUSE files (Linux 4.10 has it)";
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    /// Spares the device what is meant for disks that are slow. Kernels that do not know it have nothing to be spared.
    fn tune(self) {
        for (setting, value) in TUNING {
            let _ = std::fs::write(format!("/sys/block/loop{}/queue/{setting}", self.number), value);
        }
    }

    /// What the kernel says of the device.
    fn fact(self, name: &str) -> Option<Vec<u8>> {
        let text = std::fs::read(format!("/sys/block/loop{}/{name}", self.number)).ok()?;
        Some(text.strip_suffix(b"\n").unwrap_or(&text).to_vec())
    }

    /// The file it shows, if it shows one, by the name that it had.
    pub fn backing_file(self) -> Option<PathBuf> {
        let mut path = self.fact("loop/backing_file")?;
        // What the kernel adds when a name is gone, as those of dead mounts can be.
        if let Some(before) = path.strip_suffix(b" (deleted)") {
            path.truncate(before.len());
        }
        Some(PathBuf::from(std::ffi::OsString::from_vec(path)))
    }

    /// All that show a file for which `wanted` holds.
    ///
    /// # Errors
    /// `Io` when the kernel's list cannot be read.
    pub fn all(wanted: impl Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
        let failed = |error: io::Error| Error::new(ErrorKind::Io, format!("cannot list /sys/block: {error}"));
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/sys/block").map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let number = name.as_bytes().strip_prefix(b"loop").and_then(|number| str::from_utf8(number).ok());
            let Some(number) = number.and_then(|number| number.parse().ok()) else { continue };
            let device = LoopDevice { number };
            if device.backing_file().is_some_and(|file| wanted(&file)) {
                found.push(device);
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Those that show `file`.
    ///
    /// # Errors
    /// As [`LoopDevice::all`].
    pub fn on(file: &Path) -> Result<Vec<LoopDevice>> {
        LoopDevice::all(|other| other == file)
    }

    /// For what it is in use, if it is.
    ///
    /// # Errors
    /// `Io` when the kernel's lists cannot be read, `Permission`.
    pub fn in_use(self) -> Result<Option<Use>> {
        let path = self.path();
        let failed =
            |error: io::Error| Error::new(ErrorKind::Io, format!("cannot read what is in use: {error}"));
        if let Some(mount) = mounts::all().map_err(failed)?.into_iter().find(|mount| mount.source == path) {
            return Ok(Some(Use::Mounted(mount.dir)));
        }
        if swap_area::active().map_err(failed)?.iter().any(|area| area.path == path) {
            return Ok(Some(Use::Swap));
        }
        match open(&path, libc::O_EXCL) {
            Ok(_) => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(Some(Use::Claimed)),
            Err(error) => Err(refused(&format!("cannot open {}", path.display()), &error)),
        }
    }

    /// Lets go of its file, and waits until that has happened.
    ///
    /// # Errors
    /// `Busy` while it is in use; `Io`, `Permission`.
    pub fn detach(self) -> Result<()> {
        let path = self.path();
        let Some(file) = self.backing_file() else { return Ok(()) };
        let busy = |by: &str| Error::new(ErrorKind::Busy, format!("{} is {by}", path.display()));
        if let Some(by) = self.in_use()? {
            return Err(busy(&by.to_string()));
        }
        // Who has it for himself: nobody else begins to use it until it is free.
        let device = match open(&path, libc::O_EXCL) {
            Ok(device) => device,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(busy("used by something else"));
            }
            Err(error) => return Err(refused(&format!("cannot open {}", path.display()), &error)),
        };
        if self.backing_file().as_ref() != Some(&file) {
            return Ok(());
        }
        // SAFETY: the request takes no argument.
        if unsafe { libc::ioctl(device.as_raw_fd(), sys::LOOP_CLR_FD.into()) } != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ENXIO) {
                return Err(refused(&format!("cannot free {}", path.display()), &error));
            }
        }
        drop(device);
        let deadline = Instant::now() + PATIENCE;
        // Others may have it open for a moment: who looks for file systems on new devices, say.
        while self.backing_file().as_ref() == Some(&file) {
            if Instant::now() >= deadline {
                return Err(busy("still open somewhere: it is freed when it is closed"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
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
