//! A device's backing device: a [`Backing`] with a name and a description for users.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::backing::{Backing, Engine, FileBacking, FileOptions};
use crate::base::error::{Error, Result};
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
}

impl NamedBacking {
    /// Names any backing. The attribute `backing_dev` shows `name`; messages also show `how` it is accessed.
    pub fn new(name: impl Into<String>, how: impl Into<String>, backing: Arc<dyn Backing>) -> Self {
        NamedBacking { name: name.into(), how: how.into(), backing, file: None }
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

    fn open_with(text: &str, force: bool, engine: Engine) -> Result<Self> {
        Self::check(text)?;
        let (path, size_bytes) = split(text);
        let file = FileBacking::open(&FileOptions { size_bytes, force, engine, ..FileOptions::new(path) })?;
        Ok(Self::of(path, file))
    }

    /// Goes on with the file or block device of another, in this process or one that has ended: `fd` is a duplicate of its
    /// [`descriptor`](NamedBacking::descriptor), `name` is its [`name`](NamedBacking::name), which is not looked up, and
    /// `len_bytes` is its [`len_bytes`](NamedBacking::len_bytes). The descriptor has the lock already.
    ///
    /// # Errors
    /// As [`FileBacking::from_descriptor`].
    pub fn from_descriptor(name: &str, fd: OwnedFd, len_bytes: u64) -> Result<Self> {
        Ok(Self::of(name, FileBacking::from_descriptor(name, fd, len_bytes)?))
    }

    fn of(name: &str, file: FileBacking) -> Self {
        let (how, file) = (how(&file), Arc::new(file));
        let backing: Arc<dyn Backing> = Arc::<FileBacking>::clone(&file);
        NamedBacking { file: Some(file), ..NamedBacking::new(name, how, backing) }
    }

    /// Returns the descriptor of the file or block device, if it is one that a process can go on with
    /// ([`NamedBacking::from_descriptor`]).
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.descriptor())
    }

    /// Returns the length of the backing.
    pub fn len_bytes(&self) -> u64 {
        self.backing.len_bytes()
    }

    /// Has the lock of a file given up when it is closed, whoever else has its descriptor.
    pub(super) fn unlock_when_dropped(&self) {
        self.file.iter().for_each(|file| file.unlock_when_dropped());
    }

    /// Checks that a text can name a file or block device.
    ///
    /// # Errors
    /// `Invalid` unless the path is absolute.
    pub(super) fn check(text: &str) -> Result<()> {
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
