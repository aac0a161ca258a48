//! Path resolution that no other user can redirect: paths are walked component by component, and the last one
//! is opened relative to the descriptor of its directory.
//!
//! The rule: a symbolic link is followed only in a directory that only root and the user of this process may
//! write to: it belongs to one of them, and neither its group nor others have write permission
//! ([`only_we_may_write`]). Anywhere else, in `/tmp` say, another user may have made the link, and would
//! choose which file this process reads or overwrites. Such a link is an error that names it.
//!
//! The last component is never followed when it is opened: [`Place::open`] refuses a link that was put there
//! after the walk. Callers check the owner and mode of the file by `fstat` of the open descriptor.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// The most symbolic links followed in one path: the kernel's limit.
const MAX_LINKS: usize = 40;

/// The flags with which directories and links on the way are opened.
const ON_THE_WAY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A name in an open directory: the result of resolving a path. The name need not exist, and was no symbolic
/// link when the path was resolved.
#[derive(Debug)]
pub struct Place {
    dir: OwnedFd,
    name: OsString,
}

/// Why a path was not resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A symbolic link lies in a directory that other users may write to.
    Link {
        /// The link.
        link: PathBuf,
        /// Its directory.
        dir: PathBuf,
    },
    /// A system call failed.
    System(Errno),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Link { link, dir } => write!(
                f,
                "'{}' is a symbolic link that is not followed, as other users may write to its directory '{}': \
                 name its target instead",
                link.display(),
                dir.display()
            ),
            Refused::System(errno) => write!(f, "{errno}"),
        }
    }
}

impl std::error::Error for Refused {}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Refused::System(errno)
    }
}

/// Returns whether only root and the user of this process may write to the file or directory of this status.
pub fn only_we_may_write(stat: &Stat) -> bool {
    let is_ours = stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw();
    is_ours && !Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH)
}

impl Place {
    /// Resolves `path`; all components but the last must exist. Fails with [`Refused::Link`] for a link that
    /// the rule does not follow; `ENOENT`, `ENOTDIR`, `ELOOP` for more than 40 links, and other errors of the
    /// system.
    pub fn resolve(path: &Path) -> Result<Place, Refused> {
        Walk::new(path)?.run()
    }

    /// Returns the status of the file. Fails with `ENOENT` if it does not exist; other errors of the system.
    pub fn status(&self) -> Result<Stat, Errno> {
        rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Opens the file, or creates it with `O_CREAT`. Fails with `ELOOP` for a symbolic link (`ENOTDIR` with
    /// `O_DIRECTORY`); other errors of the system.
    pub fn open(&self, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(&self.dir, &self.name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode)
    }

    /// Makes a directory of this name. Fails with `EEXIST` if the name exists; other errors of the system.
    pub fn make_dir(&self, mode: Mode) -> Result<(), Errno> {
        rustix::fs::mkdirat(&self.dir, &self.name, mode)
    }

    /// Removes the file. Fails with those of the system.
    pub fn remove_file(&self) -> Result<(), Errno> {
        rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty())
    }
}

struct Walk {
    dir: OwnedFd,
    /// The path of `dir`, for messages.
    at: PathBuf,
    /// The remaining components, the next one last.
    rest: Vec<OsString>,
    links: usize,
}

impl Walk {
    fn new(path: &Path) -> Result<Walk, Refused> {
        let (at, is_absolute) = if path.has_root() { ("/", true) } else { ("", false) };
        let dir = open_dir(if is_absolute { "/" } else { "." })?;
        let mut walk = Walk { dir, at: PathBuf::from(at), rest: Vec::new(), links: 0 };
        walk.push(path.as_os_str())?;
        Ok(walk)
    }

    /// Pushes the components of `path`. One that ends in `/` is walked as if it ended in `/.`.
    fn push(&mut self, path: &OsStr) -> Result<(), Errno> {
        let bytes = path.as_bytes();
        if bytes.is_empty() {
            return Err(Errno::NOENT);
        }
        if bytes.ends_with(b"/") {
            self.rest.push(".".into());
        }
        let components = bytes.split(|byte| *byte == b'/').filter(|component| !component.is_empty());
        self.rest.extend(components.rev().map(|component| OsStr::from_bytes(component).to_owned()));
        Ok(())
    }

    fn run(mut self) -> Result<Place, Refused> {
        while let Some(name) = self.rest.pop() {
            match name.as_bytes() {
                b"." => {}
                b".." => self.leave()?,
                _ => {
                    if let Some(last) = self.step(name)? {
                        return Ok(Place { dir: self.dir, name: last });
                    }
                }
            }
        }
        Ok(Place { dir: self.dir, name: ".".into() })
    }

    fn leave(&mut self) -> Result<(), Errno> {
        self.dir = rustix::fs::openat(&self.dir, "..", ON_THE_WAY | OFlags::DIRECTORY, Mode::empty())?;
        // A relative path may leave the directory that it starts in.
        if self.at.file_name().is_some() {
            self.at.pop();
        } else if !self.at.has_root() {
            self.at.push("..");
        }
        Ok(())
    }

    /// Enters a directory or follows a link; returns the name if it is the last component and no link.
    fn step(&mut self, name: OsString) -> Result<Option<OsString>, Refused> {
        let is_last = self.rest.is_empty();
        let found = match rustix::fs::openat(&self.dir, &name, ON_THE_WAY, Mode::empty()) {
            Ok(found) => found,
            Err(Errno::NOENT) if is_last => return Ok(Some(name)),
            Err(errno) => return Err(errno.into()),
        };
        match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
            FileType::Symlink => self.follow(found, &name).map(|()| None),
            _ if is_last => Ok(Some(name)),
            FileType::Directory => {
                self.dir = found;
                self.at.push(name);
                Ok(None)
            }
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    fn follow(&mut self, link: OwnedFd, name: &OsStr) -> Result<(), Refused> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        if !only_we_may_write(&rustix::fs::fstat(&self.dir)?) {
            let dir = if self.at.as_os_str().is_empty() { PathBuf::from(".") } else { self.at.clone() };
            return Err(Refused::Link { link: self.at.join(name), dir });
        }
        let target = OsString::from_vec(rustix::fs::readlinkat(link.as_fd(), "", Vec::new())?.into_bytes());
        if Path::new(&target).has_root() {
            self.dir = open_dir("/")?;
            self.at = PathBuf::from("/");
        }
        self.push(&target)?;
        Ok(())
    }
}

fn open_dir(path: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, ON_THE_WAY | OFlags::DIRECTORY, Mode::empty())
}

#[cfg(all(test, not(loom)))]
mod tests;
