//! Whether an open file or block device may be taken as a backing: whose it is, and what it holds.
//!
//! The rules, judged by the open descriptor, as the path may lead elsewhere by now:
//! - A regular file belongs to the user of this process, gives others no permission, and has one name: what another
//!   user made beforehand, or may read or write, would get this user's memory.
//! - A block device's node belongs to root and gives no permission to all users. Its group may have some: `root:disk`
//!   with mode 0660 is what systems use.
//! - It bears uzram's mark ([`Mark`]), or is empty: a file without a byte, a device with zeros at its beginning and
//!   end, where file systems, partition tables and their like have their signatures. Anything else is taken only with
//!   [`super::FileOptions::force`], as what it holds is lost.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, Stat};
use rustix::io::Errno;

use super::mark::{MARK_BYTES, Mark};
use crate::base::units::format_size;

/// What must be zeros at the beginning and at the end of an empty device. Of the known signatures, those of ZFS reach
/// farthest from the ends: 512 KiB.
const SIGNATURE_BYTES: usize = 1 << 20;

/// The permissions of a file for anyone but its owner.
const OF_OTHERS: Mode = Mode::RWXG.union(Mode::RWXO);

/// What a file or device holds that may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// Our own mark.
    Marked,
    /// Nothing, or nothing that is to be kept.
    Unmarked,
}

/// Why a file may not be taken, by its status; none if it may.
pub(super) fn objection_to_file(path: &str, stat: &Stat) -> Option<String> {
    let uid = rustix::process::geteuid().as_raw();
    let mode = Mode::from_raw_mode(stat.st_mode);
    if stat.st_uid != uid {
        return Some(format!("belongs to user {}, not to user {uid}: name another path", stat.st_uid));
    }
    if mode.intersects(OF_OTHERS) {
        let mode = stat.st_mode & 0o7777;
        return Some(format!(
            "is open to other users (mode {mode:04o}): run: chmod 600 '{path}', or name another path"
        ));
    }
    (stat.st_nlink != 1)
        .then(|| format!("has {} names (hard links), and must have one: name another path", stat.st_nlink))
}

/// The same of a block device's node.
pub(super) fn objection_to_device(path: &str, stat: &Stat) -> Option<String> {
    if stat.st_uid != 0 {
        return Some(format!("is a block device of user {}, not of root: name another path", stat.st_uid));
    }
    Mode::from_raw_mode(stat.st_mode).intersects(Mode::RWXO).then(|| {
        let mode = stat.st_mode & 0o7777;
        format!("is a block device that is open to all users (mode {mode:04o}): run: chmod o= '{path}'")
    })
}

/// What an open file of so many bytes holds; none if it is neither empty nor ours.
pub(super) fn file_contents(fd: &OwnedFd, file_bytes: u64) -> Result<Option<Contents>, Errno> {
    if file_bytes == 0 {
        return Ok(Some(Contents::Unmarked));
    }
    Ok(is_marked(fd)?.then_some(Contents::Marked))
}

/// The same of a block device.
pub(super) fn device_contents(fd: &OwnedFd, device_bytes: u64) -> Result<Option<Contents>, Errno> {
    if is_marked(fd)? {
        return Ok(Some(Contents::Marked));
    }
    let last = device_bytes.saturating_sub(SIGNATURE_BYTES as u64);
    let is_empty = is_zeros(fd, 0)? && is_zeros(fd, last)?;
    Ok(is_empty.then_some(Contents::Unmarked))
}

/// Why a file or device of so many bytes is refused that is neither.
pub(super) fn refusal(there_bytes: u64) -> String {
    format!(
        "holds something else than a backing of uzram ({}): --force takes it, and what it holds is lost",
        format_size(there_bytes)
    )
}

fn is_marked(fd: &OwnedFd) -> Result<bool, Errno> {
    let mut bytes = [0; MARK_BYTES];
    let len_bytes = read_at(fd, &mut bytes, 0)?;
    Ok(Mark::parse(&bytes[..len_bytes]).is_some())
}

fn is_zeros(fd: &OwnedFd, offset: u64) -> Result<bool, Errno> {
    let mut bytes = vec![0; SIGNATURE_BYTES];
    let len_bytes = read_at(fd, &mut bytes, offset)?;
    Ok(bytes[..len_bytes].iter().all(|byte| *byte == 0))
}

/// Reads as much as there is, and returns how much that was.
fn read_at(fd: &OwnedFd, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes[done..], at))? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}
