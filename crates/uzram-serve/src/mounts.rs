//! What is mounted, by `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Where it is mounted.
    pub dir: PathBuf,
    /// The file system's type, with its subtype, as in `fuse.sshfs`.
    pub file_system: String,
    /// What is mounted: a block device, or what a file system says instead.
    pub source: PathBuf,
}

impl MountInfo {
    /// Whether whoever served it is gone.
    pub fn is_dead(&self) -> bool {
        // The kernel asks whoever serves it, and is told at once when nobody is there.
        rustix::fs::statfs(&self.dir).err() == Some(Errno::NOTCONN)
    }
}

/// All mounts that this process sees, in the order in which they were mounted.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn all() -> io::Result<Vec<MountInfo>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// What is mounted on a directory, if anything is.
///
/// # Errors
/// As [`all`].
pub fn at(dir: &Path) -> io::Result<Option<MountInfo>> {
    // The path as it is in the list: resolved as far as that goes, as a dead mount itself cannot be asked.
    let link = dir.read_link().ok().and_then(|_| dir.canonicalize().ok());
    let resolved = match (link, dir.parent().map(Path::canonicalize), dir.file_name()) {
        (Some(resolved), ..) => resolved,
        (None, Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => dir.to_owned(),
    };
    Ok(all()?.into_iter().rev().find(|mount| mount.dir == resolved))
}

/// One line: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn parse(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|byte| *byte == b' ');
    let dir = unescape(fields.nth(4)?);
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    Some(MountInfo { dir, file_system, source })
}

/// A path in which space, tab, newline and backslash are written as three octal digits after a backslash.
fn unescape(text: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *byte == b'\\').and_then(|digits| {
            let digits = str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let plain =
            parse(b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - fuse.sshfs /run/u rw").unwrap();
        assert_eq!(plain.dir, Path::new("/mnt2"));
        assert_eq!((plain.file_system.as_str(), plain.source.as_path()), ("fuse.sshfs", Path::new("/run/u")));
        let escaped = parse(b"1 2 0:3 / /a\\040b\\134c rw - ext4 /dev/loop0 rw").unwrap();
        assert_eq!(escaped.dir, Path::new("/a b\\c"));
        for cut in ["", "36 35 98:0 /mnt1", "36 35 98:0 / /mnt2 rw", "36 35 98:0 / /mnt2 rw - ext3"] {
            assert_eq!(parse(cut.as_bytes()), None, "{cut}");
        }
        assert_eq!(unescape(b"\\04"), Path::new("\\04"));
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(all().unwrap().iter().any(|mount| mount.dir == Path::new("/")));
        assert_eq!(at(Path::new("/proc")).unwrap().unwrap().file_system, "proc");
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        assert_eq!(at(&link).unwrap(), None);
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert_eq!(at(&link).unwrap(), at(Path::new("/proc")).unwrap());
    }
}
