//! Whether an open file or block device may be used as a backing: its owner, and its contents.
//!
//! The rules, checked on the open descriptor, because the path may lead elsewhere by now:
//! - A regular file belongs to the user of this process, gives other users no permission, and has one name: a
//!   file that another user created, or may read or write, would expose this user's memory.
//! - A block device's node belongs to root and gives no permission to all users. Its group may have some:
//!   systems use `root:disk` with mode 0660.
//! - It has uzram's mark ([`Mark`]), or is empty: a file of 0 bytes, or a device with zeros at its beginning
//!   and end, where file systems, partition tables and the like have their signatures. Anything else is used
//!   only with [`super::FileOptions::force`], because its contents are lost.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, Stat};
use rustix::io::Errno;

use super::mark::{MARK_BYTES, Mark};
use crate::base::units::format_size;

/// The bytes that must be zeros at the beginning and at the end of an empty device. Of the known signatures,
/// those of ZFS reach farthest from the ends: 512 KiB.
const SIGNATURE_BYTES: usize = 1 << 20;

/// The permissions of a file for users other than its owner.
const OF_OTHERS: Mode = Mode::RWXG.union(Mode::RWXO);

/// Returns why a file or block device may not be used, by its status; `None` if it may.
pub(super) fn objection(path: &str, stat: &Stat, is_block_device: bool) -> Option<String> {
    let (uid, owner) = (rustix::process::geteuid().as_raw(), stat.st_uid);
    let (open_to, mode) = (Mode::from_raw_mode(stat.st_mode), stat.st_mode & 0o7777);
    Some(match is_block_device {
        true if owner != 0 => format!("is a block device of user {owner}, not of root: name another path"),
        true if open_to.intersects(Mode::RWXO) => {
            format!("is a block device that is open to all users (mode {mode:04o}): run: chmod o= '{path}'")
        }
        false if owner != uid => format!("belongs to user {owner}, not to user {uid}: name another path"),
        false if open_to.intersects(OF_OTHERS) => {
            format!("is open to other users (mode {mode:04o}): run: chmod 600 '{path}', or name another path")
        }
        false if stat.st_nlink != 1 => {
            format!("has {} names (hard links), and must have one: name another path", stat.st_nlink)
        }
        _ => return None,
    })
}

/// Returns whether an open file or block device of `there_bytes` is empty.
pub(super) fn is_empty(fd: &OwnedFd, there_bytes: u64, is_block_device: bool) -> Result<bool, Errno> {
    let last = there_bytes.saturating_sub(SIGNATURE_BYTES as u64);
    Ok(if is_block_device { is_zeros(fd, 0)? && is_zeros(fd, last)? } else { there_bytes == 0 })
}

/// Returns why a file or device of `there_bytes` is refused that is neither empty nor marked.
pub(super) fn refusal(there_bytes: u64) -> String {
    format!(
        "holds data that is not uzram's ({}): use --force to overwrite it, and its contents are lost",
        format_size(there_bytes)
    )
}

/// Returns whether an open file or block device has uzram's mark.
pub(super) fn is_marked(fd: &OwnedFd) -> Result<bool, Errno> {
    let mut bytes = [0; MARK_BYTES];
    let len_bytes = read_at(fd, &mut bytes, 0)?;
    Ok(Mark::parse(&bytes[..len_bytes]).is_some())
}

fn is_zeros(fd: &OwnedFd, offset: u64) -> Result<bool, Errno> {
    let mut bytes = vec![0; SIGNATURE_BYTES];
    let len_bytes = read_at(fd, &mut bytes, offset)?;
    Ok(bytes[..len_bytes].iter().all(|byte| *byte == 0))
}

/// Reads until `bytes` is full or the file ends. Returns the number of bytes read.
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
