//! Reads the list of mounts, `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
//!
//! No call here accesses a mounted file system: it would hang on one whose server is stopped.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// The mount's number; another mount may reuse it after an unmount.
    pub id: u64,
    /// The device number of its file system, as in `st_dev`: major, minor.
    pub device: (u32, u32),
    /// The directory of the file system that is the root of the mount.
    pub root: PathBuf,
    /// The mount point.
    pub dir: PathBuf,
    /// The file system's type, with its subtype, as in `fuse.sshfs`.
    pub file_system: String,
    /// What is mounted: a block device, or a string that the file system chose.
    pub source: PathBuf,
    /// The file system's options, each with its value, if it has one.
    pub options: Vec<String>,
    /// The user who mounted it, if it is a FUSE file system.
    pub user_id: Option<u32>,
}

impl MountInfo {
    /// Returns whether it is a FUSE file system that `uid` mounted.
    pub fn is_fuse_of(&self, uid: u32) -> bool {
        let is_fuse = self.file_system == "fuse" || self.file_system.starts_with("fuse.");
        is_fuse && self.user_id == Some(uid)
    }
}

/// Returns all mounts that this process sees, in the order in which they were mounted. Fails if the kernel's
/// list cannot be read.
pub fn all() -> io::Result<Vec<MountInfo>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// Parses the kernel's list. Skips lines that it cannot parse.
pub(super) fn parse(text: &[u8]) -> Vec<MountInfo> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// Parses a line: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,user_id=0`.
fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let mut numbers = fields.nth(1)?.split(|byte| *byte == b':').map(number);
    let device = (numbers.next()??, numbers.next()??);
    let (root, dir) = (unescape(fields.next()?), unescape(fields.next()?));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    // Options come from the kernel. A source cannot forge one: it is a field of its own, its spaces escaped.
    let options = fields.next().unwrap_or_default().split(|byte| *byte == b',');
    let options: Vec<_> = options.map(|option| String::from_utf8_lossy(option).into_owned()).collect();
    let user_id = options.iter().find_map(|option| number(option.strip_prefix("user_id=")?.as_bytes()));
    Some(MountInfo { id, device, root, dir, file_system, source, options, user_id })
}

fn number<N: std::str::FromStr>(text: &[u8]) -> Option<N> {
    str::from_utf8(text).ok()?.parse().ok()
}

/// Decodes a path in which space, tab, newline and backslash are a backslash and three octal digits.
pub fn unescape(text: &[u8]) -> PathBuf {
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
    use std::path::Path;

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = b"36 35 98:7 /mnt1 /mnt2 rw,noatime master:1 shared:2 - fuse.sshfs /run/u rw,user_id=1000,group_id=1";
        let plain = parse_line(line).unwrap();
        assert_eq!((plain.id, plain.device, plain.dir.as_path()), (36, (98, 7), Path::new("/mnt2")));
        assert_eq!((plain.root.as_path(), plain.options.len()), (Path::new("/mnt1"), 3));
        assert_eq!((plain.file_system.as_str(), plain.source.as_path()), ("fuse.sshfs", Path::new("/run/u")));
        assert_eq!(plain.user_id, Some(1000));
        assert!(plain.is_fuse_of(1000) && !plain.is_fuse_of(0));
        let escaped = parse_line(b"1 2 0:3 /\\134 /a\\040b\\134c rw - ext4 /dev/loop0 rw").unwrap();
        assert_eq!((escaped.dir.as_path(), escaped.user_id), (Path::new("/a b\\c"), None));
        assert_eq!(escaped.root, Path::new("/\\"));
        // A source that looks like options is still a source.
        let lies = parse_line(b"1 2 0:3 / /a rw - fuse x,user_id=0 rw,user_id=65534").unwrap();
        assert_eq!(lies.user_id, Some(65534));
        for cut in [
            "",
            "36 35 98:0 /mnt1",
            "36 35 98:0 / /mnt2 rw",
            "36 35 98:0 / /mnt2 rw - ext3",
            "x 1 0:1 / / rw - a b",
        ] {
            assert_eq!(parse_line(cut.as_bytes()), None, "{cut}");
        }
        assert_eq!(unescape(b"\\04"), Path::new("\\04"));
        assert!(all().unwrap().iter().any(|mount| mount.dir == Path::new("/")));
    }
}
