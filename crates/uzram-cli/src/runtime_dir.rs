//! The runtime directory: where a daemon and its clients meet.
//!
//! It belongs to one user (mode 0700) and to one daemon at a time: whoever holds the lock on
//! `uzram.lock` owns the sockets in it. A lock goes away with its process, so sockets found while
//! holding it were left by a crash and may be removed. The lock file itself stays: removing it would
//! let two daemons lock two different files of that name.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::failure::{Context, Failure, Result};

/// Where NBD clients connect.
pub const NBD_SOCKET: &str = "nbd.sock";
/// Where control clients connect.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Names the runtime directory where `--runtime-dir` does not.
pub const RUNTIME_DIR_VARIABLE: &str = "UZRAM_RUNTIME_DIR";
const LOCK_FILE: &str = "uzram.lock";

/// The longest path a Unix socket can have: `sun_path` less its final zero, unix(7).
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The option that every command with a daemon at the other end takes.
#[derive(clap::Args)]
pub struct RuntimeArgs {
    /// Where the daemon's sockets are [default: $UZRAM_RUNTIME_DIR, else $XDG_RUNTIME_DIR/uzram,
    /// else /run/uzram for root]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl RuntimeArgs {
    /// The runtime directory, as an absolute path. It need not exist.
    ///
    /// # Errors
    /// Neither the option nor the environment names one.
    pub fn path(&self) -> Result<PathBuf> {
        let env = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = choose(
            self.runtime_dir.clone(),
            env(RUNTIME_DIR_VARIABLE),
            env("XDG_RUNTIME_DIR"),
            rustix::process::geteuid().is_root(),
        )?;
        std::path::absolute(&path).context(|| format!("runtime directory '{}'", path.display()))
    }
}

fn choose(
    option: Option<PathBuf>,
    own: Option<PathBuf>,
    xdg: Option<PathBuf>,
    root: bool,
) -> Result<PathBuf> {
    option
        .or(own)
        // Relative ones are to be ignored, says the XDG base directory specification.
        .or_else(|| xdg.filter(|path| path.is_absolute()).map(|path| path.join("uzram")))
        .or_else(|| root.then(|| PathBuf::from("/run/uzram")))
        .ok_or_else(|| {
            Failure::line(
                "no runtime directory: give --runtime-dir or set UZRAM_RUNTIME_DIR or XDG_RUNTIME_DIR",
            )
        })
}

/// The path of a socket in `dir`.
///
/// # Errors
/// It is longer than a socket's path can be.
pub fn socket_path(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    let len_bytes = path.as_os_str().as_bytes().len();
    if len_bytes > MAX_SOCKET_PATH_BYTES {
        return Err(Failure::Line(format!(
            "'{}' is too long for a socket ({len_bytes} bytes, at most {MAX_SOCKET_PATH_BYTES}); choose a shorter --runtime-dir",
            path.display()
        )));
    }
    Ok(path)
}

/// A runtime directory that this process serves; dropping it removes the sockets.
pub struct RuntimeDir {
    path: PathBuf,
    lock: File,
    sockets: Vec<PathBuf>,
}

impl RuntimeDir {
    /// Creates the directory if need be, and checks that it is private.
    ///
    /// # Errors
    /// It cannot be created or used, or others may enter it.
    pub fn make(path: &Path) -> Result<()> {
        // Before anything is created: these must fit.
        socket_path(path, CONTROL_SOCKET)?;
        make_private(path)
    }

    /// Makes the directory as [`RuntimeDir::make`] does, and locks it.
    ///
    /// # Errors
    /// It cannot be created or used, others may enter it, or a daemon serves it already.
    pub fn claim(path: PathBuf) -> Result<RuntimeDir> {
        RuntimeDir::make(&path)?;
        let lock_path = path.join(LOCK_FILE);
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .context(|| format!("cannot open '{}'", lock_path.display()))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(in_use(&path, &mut lock)),
            Err(error) => {
                return Err(Failure::Line(format!("cannot lock '{}': {error}", lock_path.display())));
            }
        }
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .context(|| format!("cannot write '{}'", lock_path.display()))?;
        Ok(RuntimeDir { path, lock, sockets: Vec::new() })
    }

    /// Listens on the socket `name`, mode 0600, in place of one that a crash has left.
    ///
    /// # Errors
    /// The path is too long, taken by something else, or the system refuses.
    pub fn bind(&mut self, name: &str) -> Result<UnixListener> {
        let path = socket_path(&self.path, name)?;
        remove_stale(&path)?;
        let listener =
            UnixListener::bind(&path).context(|| format!("cannot listen on '{}'", path.display()))?;
        self.sockets.push(path.clone());
        fs::set_permissions(&path, Permissions::from_mode(0o600))
            .context(|| format!("cannot protect '{}'", path.display()))?;
        Ok(listener)
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        for path in &self.sockets {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "cannot remove a socket");
            }
        }
        // The process id in it is ours no longer; a failure leaves a file that nobody believes.
        let _ = self.lock.set_len(0);
    }
}

/// Makes sure that `path` is a directory of ours with mode 0700.
fn make_private(path: &Path) -> Result<()> {
    let shown = path.display();
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .context(|| format!("cannot create the runtime directory '{shown}'"))?;
            fs::metadata(path)
        }
        other => other,
    }
    .context(|| format!("runtime directory '{shown}'"))?;
    let uid = rustix::process::geteuid().as_raw();
    let mode = metadata.mode() & 0o777;
    if !metadata.is_dir() {
        Err(Failure::Line(format!(
            "runtime directory '{shown}' is not a directory; choose another --runtime-dir"
        )))
    } else if metadata.uid() != uid {
        Err(Failure::Line(format!(
            "runtime directory '{shown}' belongs to user {}, not to user {uid}; choose another --runtime-dir",
            metadata.uid()
        )))
    } else if mode != 0o700 {
        Err(Failure::Line(format!(
            "runtime directory '{shown}' has mode {mode:04o}, not 0700; run: chmod 700 '{shown}'"
        )))
    } else {
        Ok(())
    }
}

/// Waits until no daemon holds `dir`, so that another can follow at once. False if `timeout` passes
/// first.
///
/// # Errors
/// The lock file cannot be opened.
pub fn wait_until_free(dir: &Path, timeout: Duration) -> Result<bool> {
    let lock_path = dir.join(LOCK_FILE);
    let lock = match File::open(&lock_path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        other => other.context(|| format!("cannot open '{}'", lock_path.display()))?,
    };
    let deadline = Instant::now() + timeout;
    // A shared lock for a moment disturbs nobody but a daemon that starts just then; a process id
    // instead would mean nothing to a client in another container.
    while flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(true)
}

fn in_use(path: &Path, lock: &mut File) -> Failure {
    let mut text = String::new();
    // It is ten digits; an unreadable or empty file only costs the message a number.
    let _ = lock.take(32).read_to_string(&mut text);
    let process = match text.trim().parse::<u32>() {
        Ok(pid) => format!("process {pid}"),
        Err(_) => "another process".to_owned(),
    };
    Failure::Line(format!(
        "a daemon already serves '{}' ({process}); stop it with `uzram down`, or choose another --runtime-dir",
        path.display()
    ))
}

fn remove_stale(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(metadata) if metadata.file_type().is_socket() => {
            fs::remove_file(path)
                .context(|| format!("cannot remove the stale socket '{}'", path.display()))?;
            tracing::info!(path = %path.display(), "removed a socket that an earlier daemon left");
            Ok(())
        }
        Ok(_) => Err(Failure::Line(format!(
            "'{}' is in the way and not a socket; move it, or choose another --runtime-dir",
            path.display()
        ))),
        Err(error) => Err(Failure::Line(format!("'{}': {error}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_option_comes_first_then_the_environment_then_root() {
        let path = |text: &str| Some(PathBuf::from(text));
        for (option, own, xdg, root, chosen) in [
            (path("/a"), path("/b"), path("/c"), true, Some("/a")),
            (None, path("/b"), path("/c"), true, Some("/b")),
            (None, None, path("/c"), true, Some("/c/uzram")),
            (None, None, path("c"), true, Some("/run/uzram")),
            (None, None, None, true, Some("/run/uzram")),
            (None, None, path("c"), false, None),
        ] {
            assert_eq!(choose(option, own, xdg, root).ok(), chosen.map(PathBuf::from));
        }
    }

    #[test]
    fn a_socket_path_has_107_bytes_at_most() {
        let fits = format!("/{}", "d".repeat(107 - 1 - 1 - CONTROL_SOCKET.len()));
        assert_eq!(socket_path(Path::new(&fits), CONTROL_SOCKET).unwrap().as_os_str().len(), 107);
        assert!(socket_path(Path::new(&format!("{fits}d")), CONTROL_SOCKET).is_err());
    }
}
