//! The runtime directory: where a daemon and its clients meet.
//!
//! Its path is `--runtime-dir`, else `$UZRAM_RUNTIME_DIR`, else `/run/uzram` for root and
//! `$XDG_RUNTIME_DIR/uzram` for other users. Root's `$XDG_RUNTIME_DIR` is unmounted when its session ends,
//! and after `su` it is another user's. The path is UTF-8, as the control API has paths in JSON.
//!
//! It belongs to one user (mode 0700) and to one daemon at a time: the process that holds the lock on
//! `uzram.lock` owns the sockets in it, and may remove those that a crash left. The lock file stays: without
//! it, two daemons could lock two files of that name.
//!
//! The daemon resolves the path by [`Place`], which follows no symbolic link of another user, and then works
//! on the directory's descriptor: a directory that replaces it in the path is not touched.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use uzram::trusted_path::{Place, Refused, only_we_may_write};

use crate::failure::{Context, Failure, Result};

pub const NBD_SOCKET: &str = "nbd.sock";
pub const CONTROL_SOCKET: &str = "control.sock";
/// The environment variable that names the runtime directory if `--runtime-dir` does not.
pub const RUNTIME_DIR_VARIABLE: &str = "UZRAM_RUNTIME_DIR";
const LOCK_FILE: &str = "uzram.lock";

/// How long the processes of a killed daemon may take to end.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// The default runtime directory of root.
pub const OF_ROOT: &str = "/run/uzram";

/// The longest path of a Unix socket: `sun_path` without its final zero, unix(7).
const MAX_SOCKET_PATH_BYTES: usize = 107;

// The option of every command that talks to a daemon or starts one.
#[derive(clap::Args)]
pub struct RuntimeArgs {
    /// The directory of the daemon's sockets [default: $UZRAM_RUNTIME_DIR, else /run/uzram for root and
    /// $XDG_RUNTIME_DIR/uzram for other users]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl RuntimeArgs {
    /// Returns the runtime directory as an absolute path. It need not exist.
    pub fn path(&self) -> Result<PathBuf> {
        let env = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = choose(
            self.runtime_dir.clone(),
            env(RUNTIME_DIR_VARIABLE),
            env("XDG_RUNTIME_DIR"),
            rustix::process::geteuid().is_root(),
        )?;
        let path =
            std::path::absolute(&path).context(|| format!("runtime directory '{}'", path.display()))?;
        if path.to_str().is_some() {
            return Ok(path);
        }
        let shown = path.display();
        Err(Failure::line(format!(
            "the path of the runtime directory '{shown}' is not UTF-8; choose another --runtime-dir"
        )))
    }
}

fn choose(
    option: Option<PathBuf>,
    own: Option<PathBuf>,
    xdg: Option<PathBuf>,
    root: bool,
) -> Result<PathBuf> {
    let default = || {
        if root {
            return Some(PathBuf::from(OF_ROOT));
        }
        // The XDG Base Directory Specification says to ignore relative paths.
        xdg.filter(|path| path.is_absolute()).map(|path| path.join("uzram"))
    };
    option.or(own).or_else(default).ok_or_else(|| {
        Failure::line(
            "no runtime directory: give --runtime-dir or set UZRAM_RUNTIME_DIR or XDG_RUNTIME_DIR; for root's daemon use sudo",
        )
    })
}

pub fn socket_path(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    let len_bytes = path.as_os_str().as_bytes().len();
    if len_bytes > MAX_SOCKET_PATH_BYTES {
        return Err(Failure::line(format!(
            "'{}' is too long for a socket ({len_bytes} bytes, at most {MAX_SOCKET_PATH_BYTES}); choose a shorter --runtime-dir",
            path.display()
        )));
    }
    Ok(path)
}

/// A runtime directory that this process serves; dropping it removes the control socket.
pub struct RuntimeDir {
    path: PathBuf,
    dir: OwnedFd,
    lock: File,
    /// Whether the control socket is this process's.
    is_bound: bool,
}

impl RuntimeDir {
    /// Creates the directory if necessary, and checks that it is private.
    pub fn make(path: &Path) -> Result<()> {
        open_private(path).map(drop)
    }

    /// Creates the directory as [`RuntimeDir::make`] does, and locks it.
    pub fn claim(path: PathBuf) -> Result<RuntimeDir> {
        let dir = open_private(&path)?;
        let lock_path = path.join(LOCK_FILE);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&dir, LOCK_FILE, flags, Mode::RUSR | Mode::WUSR);
        let mut lock = File::from(lock.context(|| format!("cannot open '{}'", lock_path.display()))?);
        let deadline = Instant::now() + DEATH_TIMEOUT;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                // Its other processes die after it.
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline && is_owner_dead(&path) => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(Errno::WOULDBLOCK) => return Err(in_use(&path, &mut lock)),
                Err(error) => {
                    return Err(Failure::line(format!("cannot lock '{}': {error}", lock_path.display())));
                }
            }
        }
        let claimed = RuntimeDir { path, dir, lock, is_bound: false };
        claimed.sign().context(|| format!("cannot write '{}'", lock_path.display()))?;
        Ok(claimed)
    }

    pub fn sign(&self) -> std::io::Result<()> {
        self.lock.set_len(0)?;
        let mut lock = &self.lock;
        lock.rewind()?;
        writeln!(lock, "{}", std::process::id())
    }

    /// Takes a directory that another program of this process claimed, and bound the socket in: its
    /// descriptor and its lock's.
    pub fn adopt(path: PathBuf, dir: OwnedFd, lock: OwnedFd) -> RuntimeDir {
        RuntimeDir { path, dir, lock: File::from(lock), is_bound: true }
    }

    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.dir.as_fd(), self.lock.as_fd()]
    }

    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.dir.try_clone().context(|| format!("runtime directory '{}'", self.path.display()))
    }

    /// Listens on the control socket, mode 0600; removes a stale one first.
    pub fn bind(&mut self) -> Result<UnixListener> {
        let path = socket_path(&self.path, CONTROL_SOCKET)?;
        let shown = path.display();
        match rustix::fs::statat(&self.dir, CONTROL_SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => {}
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
                self.remove_socket().context(|| format!("cannot remove the stale socket '{shown}'"))?;
                tracing::info!(path = %shown, "removed a socket that an earlier daemon left");
            }
            Ok(_) => {
                let why = "is in the way and not a socket; move it, or choose another --runtime-dir";
                return Err(Failure::line(format!("'{shown}' {why}")));
            }
            Err(error) => return Err(Failure::line(format!("'{shown}': {error}"))),
        }
        let listener = UnixListener::bind(&path).context(|| format!("cannot listen on '{shown}'"))?;
        self.is_bound = true;
        // No other user can have put a link into this directory.
        rustix::fs::chmodat(&self.dir, CONTROL_SOCKET, Mode::RUSR | Mode::WUSR, AtFlags::empty())
            .context(|| format!("cannot protect '{shown}'"))?;
        Ok(listener)
    }

    fn remove_socket(&self) -> rustix::io::Result<()> {
        rustix::fs::unlinkat(&self.dir, CONTROL_SOCKET, AtFlags::empty())
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        if self.is_bound
            && let Err(error) = self.remove_socket()
        {
            let path = self.path.join(CONTROL_SOCKET);
            tracing::warn!(%error, path = %path.display(), "cannot remove a socket");
        }
        // Remove our process ID. A failure is harmless: readers rely only on the lock.
        let _ = self.lock.set_len(0);
    }
}

/// Opens the directory, creating it if necessary, and checks that it is ours with mode 0700.
fn open_private(path: &Path) -> Result<OwnedFd> {
    // Check the length before creating anything.
    socket_path(path, CONTROL_SOCKET)?;
    let shown = path.display();
    let what = |refused: &Refused| match refused {
        Refused::Link { .. } => "runtime directory",
        Refused::System(_) => "cannot create the runtime directory",
    };
    let failed = |refused| Failure::line(format!("{} '{shown}': {refused}", what(&refused)));
    open_own_at(&make_all(path).map_err(failed)?, path)
}

/// Opens a runtime directory, and checks that it is ours with mode 0700, so that its files can be trusted.
/// Returns `None` if it does not exist.
pub fn open_own(path: &Path) -> Result<Option<OwnedFd>> {
    let place = match Place::resolve(path) {
        Err(Refused::System(Errno::NOENT)) => return Ok(None),
        place => place.context(|| format!("runtime directory '{}'", path.display()))?,
    };
    match place.status() {
        Err(Errno::NOENT) => Ok(None),
        _ => open_own_at(&place, path).map(Some),
    }
}

fn open_own_at(place: &Place, path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    let what = || format!("runtime directory '{shown}'");
    let dir = place.open(OFlags::PATH, Mode::empty()).context(what)?;
    let stat = rustix::fs::fstat(&dir).context(what)?;
    let uid = rustix::process::geteuid().as_raw();
    let mode = stat.st_mode & 0o777;
    let why = if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        "is not a directory; choose another --runtime-dir".to_owned()
    } else if stat.st_uid == 0 && uid != 0 {
        "is root's: use sudo for root's daemon, or choose another --runtime-dir".to_owned()
    } else if stat.st_uid != uid {
        format!("belongs to user {}, not to user {uid}; choose another --runtime-dir", stat.st_uid)
    } else if mode != 0o700 {
        format!("has mode {mode:04o}, not 0700; run: chmod 700 '{shown}'")
    } else {
        return Ok(dir);
    };
    Err(Failure::line(format!("{} {why}", what())))
}

/// Creates a directory, mode 0700, and its parents, unless something of that name exists. Returns its place.
fn make_all(path: &Path) -> std::result::Result<Place, Refused> {
    let place = match (Place::resolve(path), path.parent()) {
        (Err(Refused::System(Errno::NOENT)), Some(parent)) => {
            make_all(parent)?;
            Place::resolve(path)?
        }
        (place, _) => place?,
    };
    match place.status() {
        Ok(_) => Ok(place),
        Err(Errno::NOENT) => match place.make_dir(Mode::RWXU) {
            // Another process may just have created it.
            Ok(()) | Err(Errno::EXIST) => Ok(place),
            Err(errno) => Err(errno.into()),
        },
        Err(errno) => Err(errno.into()),
    }
}

/// For clients: checks that only root and this user can have created sockets in `dir`, so that the process
/// listening there can be trusted. Accepts a directory that does not exist.
pub fn check_trusted(dir: &Path) -> Result<()> {
    let why = match Place::resolve(dir).and_then(|place| Ok(place.status()?)) {
        Ok(stat) if only_we_may_write(&stat) => return Ok(()),
        Ok(stat) => format!("it belongs to user {} and has mode {:04o}", stat.st_uid, stat.st_mode & 0o777),
        // Connecting will report the error.
        Err(Refused::System(_)) => return Ok(()),
        Err(link @ Refused::Link { .. }) => link.to_string(),
    };
    let shown = dir.display();
    Err(Failure::line(format!(
        "the runtime directory '{shown}' is not trusted: {why}; choose another --runtime-dir"
    )))
}

/// Returns whether a directory is root's, and this user is another one.
pub fn is_of_root(dir: &Path) -> bool {
    !rustix::process::geteuid().is_root() && std::fs::metadata(dir).is_ok_and(|meta| meta.uid() == 0)
}

/// Returns the failure of a client that cannot use what is in a directory: of root's, it says so.
pub fn denied(dir: &Path, what: &str, error: &std::io::Error) -> Failure {
    match error.kind() == ErrorKind::PermissionDenied && is_of_root(dir) {
        true => Failure::line(format!("the daemon in '{}' is root's: use sudo", dir.display())),
        false => Failure::line(format!("{what}: {error}")),
    }
}

/// Waits until no daemon holds `dir`, so that another can start. Returns false if `timeout` passes first.
pub fn wait_until_free(dir: &Path, timeout: Duration) -> Result<bool> {
    let lock_path = dir.join(LOCK_FILE);
    let lock = match File::open(&lock_path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(denied(dir, &format!("cannot open '{}'", lock_path.display()), &error)),
        Ok(lock) => lock,
    };
    let deadline = Instant::now() + timeout;
    // A short shared lock disturbs only a daemon that starts at that moment.
    while flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(true)
}

/// Returns whether the process that claimed a directory is dead, as far as this PID namespace shows it. Its
/// lock is free only when the processes that it started are dead, too.
pub fn is_owner_dead(dir: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(dir.join(LOCK_FILE)) else { return false };
    let Ok(pid) = text.trim().parse::<u32>() else { return false };
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The state follows the name, in parentheses; Z is that of a process that its parent has not reaped.
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

fn in_use(path: &Path, lock: &mut File) -> Failure {
    let mut text = String::new();
    // At most ten digits; if the file is unreadable or empty, the message only lacks the number.
    let _ = lock.take(32).read_to_string(&mut text);
    let process = match text.trim().parse::<u32>() {
        Ok(pid) => format!("process {pid}"),
        Err(_) => "another process".to_owned(),
    };
    Failure::line(format!(
        "a daemon already serves '{}' ({process}); stop it with `uzram down`, or choose another --runtime-dir",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_comes_first_and_root_has_a_directory_of_its_own() {
        let path = |text: &str| Some(PathBuf::from(text));
        for (option, own, xdg, root, chosen) in [
            (path("/a"), path("/b"), path("/c"), true, Some("/a")),
            (None, path("/b"), path("/c"), true, Some("/b")),
            (None, None, path("/c"), true, Some("/run/uzram")),
            (None, None, path("/c"), false, Some("/c/uzram")),
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
