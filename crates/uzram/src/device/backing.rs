//! A device's backing device: a [`Backing`] with a name and a description for users.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use crate::backing::{Backing, Engine, FileBacking, FileOptions};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::{format_size, parse_size};

/// A backing with a name and a description.
#[derive(Clone)]
pub struct NamedBacking {
    name: String,
    how: String,
    backing: Arc<dyn Backing>,
    /// The same, if it is a file.
    file: Option<Arc<FileBacking>>,
    /// With which another process can go on, if it is elsewhere.
    kept: Option<Arc<OwnedFd>>,
    copies: u8,
}

/// Opens backing devices that are no files: in stores on other machines. What names one begins with `SCHEME://`.
pub trait Opener: Send + Sync {
    /// Checks that a text can name a store, without connecting.
    ///
    /// # Errors
    /// `Invalid` if it cannot.
    fn check(&self, text: &str) -> Result<()>;

    /// Opens a store that keeps so many copies of each object, 1 or 2.
    ///
    /// # Errors
    /// If it cannot be reached, or does not keep what it is given.
    fn open(&self, text: &str, copies: u8) -> Result<Elsewhere>;

    /// Goes on where another process was, by a duplicate of [`Elsewhere::kept`]. Does not wait for the store, which may
    /// be away.
    ///
    /// # Errors
    /// `Invalid` for any other descriptor; `NoMemory`.
    fn resume(&self, kept: OwnedFd, len_bytes: u64) -> Result<Elsewhere>;
}

/// A backing in a store on other machines.
pub struct Elsewhere {
    /// The name, without passwords.
    pub name: String,
    /// How it is accessed.
    pub how: String,
    /// The backing.
    pub backing: Arc<dyn Backing>,
    /// How many copies it keeps of each object.
    pub copies: u8,
    /// What another process needs to go on ([`Opener::resume`]); `None` if the system refused it.
    pub kept: Option<OwnedFd>,
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Has backing devices elsewhere opened by `opener`, in the whole process. Only the first one counts.
pub fn set_opener(opener: Box<dyn Opener>) {
    let _ = OPENER.set(opener);
}

fn opener() -> Result<&'static dyn Opener> {
    OPENER.get().map(AsRef::as_ref).ok_or_else(|| {
        let what = "this program was built without stores on other machines (the feature 'remote')";
        Error::new(ErrorKind::Unsupported, what).with_setting("backing_dev")
    })
}

impl NamedBacking {
    /// Names any backing. The attribute `backing_dev` shows `name`; messages also show `how` it is accessed.
    pub fn new(name: impl Into<String>, how: impl Into<String>, backing: Arc<dyn Backing>) -> Self {
        NamedBacking { name: name.into(), how: how.into(), backing, file: None, kept: None, copies: 1 }
    }

    /// Opens a file or block device given as `PATH` or `PATH:SIZE`: the text after the last colon is a size if it
    /// parses as one, else part of the path. With a size, a missing file is created. With `force`, a file or device
    /// that holds other data is overwritten.
    ///
    /// # Errors
    /// `Invalid` unless the path is absolute; as [`FileBacking::open`].
    pub fn open(text: &str, force: bool) -> Result<Self> {
        Self::open_with(text, force, Engine::Auto)
    }

    /// As [`NamedBacking::open`], for a device that outlives the process: no transfer goes on once the process has ended
    /// and was waited for.
    ///
    /// # Errors
    /// As [`NamedBacking::open`].
    pub fn open_to_keep(text: &str, force: bool) -> Result<Self> {
        let opened = Self::open_with(text, force, Engine::Threads)?;
        opened.file.iter().for_each(|file| file.keep_lock());
        Ok(opened)
    }

    /// Opens a store on other machines, which keeps so many copies of each object.
    ///
    /// # Errors
    /// As [`Opener::open`]; `Unsupported` if the program has no opener.
    pub(super) fn open_elsewhere(text: &str, copies: u8) -> Result<Self> {
        opener()?.open(text, copies).map(Self::from)
    }

    /// Returns whether a text names a store on other machines.
    pub fn is_elsewhere(text: &str) -> bool {
        text.contains("://") && !text.starts_with('/')
    }

    fn open_with(text: &str, force: bool, engine: Engine) -> Result<Self> {
        Self::check(text)?;
        let (path, size_bytes) = split(text);
        let file = FileBacking::open(&FileOptions { size_bytes, force, engine, ..FileOptions::new(path) })?;
        Ok(Self::of(path, file))
    }

    /// Goes on with the file, block device or store of another, in this process or one that has ended: `fd` is a duplicate
    /// of its [`descriptor`](NamedBacking::descriptor), `name` is its [`name`](NamedBacking::name), which is not looked up, and
    /// `len_bytes` is its [`len_bytes`](NamedBacking::len_bytes). The descriptor has the lock already.
    ///
    /// # Errors
    /// As [`FileBacking::from_descriptor`], or [`Opener::resume`].
    pub fn from_descriptor(name: &str, fd: OwnedFd, len_bytes: u64) -> Result<Self> {
        if Self::is_elsewhere(name) {
            return opener()?.resume(fd, len_bytes).map(Self::from);
        }
        Ok(Self::of(name, FileBacking::from_descriptor(name, fd, len_bytes)?))
    }

    fn of(name: &str, file: FileBacking) -> Self {
        let (how, file) = (how(&file), Arc::new(file));
        let backing: Arc<dyn Backing> = Arc::<FileBacking>::clone(&file);
        NamedBacking { file: Some(file), ..NamedBacking::new(name, how, backing) }
    }

    /// Returns the descriptor of the file or block device, or another one, if a process can go on with it
    /// ([`NamedBacking::from_descriptor`]).
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let kept = self.kept.as_ref().map(|kept| kept.as_fd());
        self.file.as_ref().map(|file| file.descriptor()).or(kept)
    }

    /// Returns how many copies it keeps of each object.
    pub(super) fn copies(&self) -> u8 {
        self.copies
    }

    /// Returns the length of the backing.
    pub fn len_bytes(&self) -> u64 {
        self.backing.len_bytes()
    }

    /// Has the lock of a file given up when it is closed, whoever else has its descriptor.
    pub(super) fn unlock_when_dropped(&self) {
        self.file.iter().for_each(|file| file.unlock_when_dropped());
    }

    /// Checks that a text can name a file, a block device or a store.
    ///
    /// # Errors
    /// `Invalid` unless the path is absolute; as [`Opener::check`].
    pub(super) fn check(text: &str) -> Result<()> {
        if Self::is_elsewhere(text) {
            return opener()?.check(text);
        }
        let (path, _) = split(text);
        // The process that opens it may have another working directory than the user who wrote it.
        if path.starts_with('/') && !path.contains(char::is_control) {
            return Ok(());
        }
        let what =
            format!("'{path}' cannot be a backing device: write the whole path, beginning with '/', or none");
        Err(Error::invalid(what).with_setting("backing_dev"))
    }

    /// Returns whether [`NamedBacking::open`] would open the same file, perhaps with another size.
    pub(super) fn is_at(&self, text: &str) -> bool {
        split(text).0 == self.name
    }

    /// Returns the name: a file's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the backing.
    pub fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }
}

impl From<Elsewhere> for NamedBacking {
    fn from(Elsewhere { name, how, backing, copies, kept }: Elsewhere) -> Self {
        NamedBacking { kept: kept.map(Arc::new), copies, ..NamedBacking::new(name, how, backing) }
    }
}

impl fmt::Display for NamedBacking {
    /// Shows the name, the size, and how it is accessed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.name, format_size(self.backing.len_bytes()), self.how)
    }
}

/// Splits a text into a path and its size, if it has one.
fn split(text: &str) -> (&str, Option<u64>) {
    let sized = text.rsplit_once(':').and_then(|(path, size)| Some((path, parse_size(size).ok()?)));
    sized.map_or((text, None), |(path, size_bytes)| (path, Some(size_bytes)))
}

fn how(file: &FileBacking) -> String {
    let engine = match (file.engine(), file.fallback()) {
        (Engine::Uring, _) => "io_uring".to_owned(),
        (_, Some(refusal)) => format!("threads ({refusal})"),
        (_, None) => "threads".to_owned(),
    };
    let direct = if file.is_direct() { "direct" } else { "through the page cache" };
    let space = if file.is_reserved() { "" } else { ", space not reserved" };
    format!("{engine}, {direct}{space}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_last_colon_may_be_a_size() {
        for (text, path, size_bytes) in [
            ("/b.img", "/b.img", None),
            ("/b.img:2G", "/b.img", Some(2 << 30)),
            ("/b.img:0", "/b.img", Some(0)),
            ("/dev/disk/by-path/pci-0000:00:1f.2", "/dev/disk/by-path/pci-0000:00:1f.2", None),
            ("/dev/disk/by-path/pci-0000:00:4096", "/dev/disk/by-path/pci-0000:00", Some(4096)),
            ("/b.img:", "/b.img:", None),
            ("/b.img:-1", "/b.img:-1", None),
            ("/b:1G:1M", "/b:1G", Some(1 << 20)),
            ("", "", None),
        ] {
            assert_eq!(split(text), (path, size_bytes), "{text}");
        }
    }
}
