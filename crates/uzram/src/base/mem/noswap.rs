//! Memory files that are never swapped out, for a process that serves swap itself: bringing such a page back
//! could wait for the process that waits for it.
//!
//! The files are on a tmpfs mounted with `noswap` (Linux 6.4). It has no path, and exists as long as a
//! process has it open, or one of its files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use crate::base::error::{Error, ErrorKind, Result};

/// The root of the tmpfs. Children that are forked inherit it.
static DIRECTORY: OnceLock<OwnedFd> = OnceLock::new();

/// Has all [`MemoryFile`](super::MemoryFile)s that are created from now on, by this process and those that it
/// forks, be never swapped out. Those that exist are not affected. Fails with `Unsupported` before Linux 6.4,
/// or without the privilege to mount (`CAP_SYS_ADMIN` outside of user namespaces).
pub fn keep_memory_out_of_swap() -> Result<()> {
    if DIRECTORY.get().is_none() {
        let directory = mount().map_err(|(what, errno)| {
            let what = match errno {
                Errno::PERM | Errno::ACCESS => format!("{what}: {errno}; it needs root"),
                Errno::INVAL | Errno::NOSYS => format!("{what}: {errno}; it needs Linux 6.4"),
                _ => format!("{what}: {errno}"),
            };
            Error::new(ErrorKind::Unsupported, format!("memory cannot be kept out of swap: {what}"))
        })?;
        // If another thread was faster, its tmpfs is used, and this one ends.
        let _ = DIRECTORY.set(directory);
    }
    Ok(())
}

/// Returns the root of the tmpfs, which a confined process must be allowed to create files in; `None` unless
/// [`keep_memory_out_of_swap`] was called.
pub fn noswap_directory() -> Option<BorrowedFd<'static>> {
    DIRECTORY.get().map(AsFd::as_fd)
}

/// Creates a file that has no name, and with EXCL cannot be given one.
pub(super) fn create_file(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::openat(directory, c".", flags, Mode::RUSR | Mode::WUSR)
}

fn mount() -> Result<OwnedFd, (&'static str, Errno)> {
    let at = |what| move |errno| (what, errno);
    let options = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(at("fsopen of a tmpfs"))?;
    // No limits: like memfds, the files are limited by the memory cgroup. No huge pages: they would make
    // untouched pages resident.
    for (name, value) in [(c"size", c"0"), (c"nr_inodes", c"0"), (c"mode", c"0700"), (c"huge", c"never")] {
        fsconfig_set_string(&options, name, value).map_err(at("the options of a tmpfs"))?;
    }
    fsconfig_set_flag(&options, c"noswap").map_err(at("a tmpfs with noswap"))?;
    fsconfig_create(&options).map_err(at("a tmpfs with noswap"))?;
    let nothing_else = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&options, FsMountFlags::FSMOUNT_CLOEXEC, nothing_else).map_err(at("fsmount of a tmpfs"))
}
