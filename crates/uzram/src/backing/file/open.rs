//! Opens the file of a backing: opens or creates it, locks it, sets its size, reserves its space, and finds
//! out how it can be read and written.
//!
//! [`Place`] resolves the path and follows no link of other users. The backing's bytes lie after a header of
//! one O_DIRECT block and at least [`MARK_BYTES`], which begins with the [`Mark`].
//!
//! What may be used is checked on the open descriptor, because the path may lead elsewhere by now:
//! - A regular file belongs to the user of this process, gives other users no permission, and has one name: a
//!   file that another user created, or may read or write, would expose this user's memory.
//! - A block device's node belongs to root and gives no permission to all users. Its group may have some:
//!   systems use `root:disk` with mode 0660.
//! - It has uzram's mark, or is empty: a file of 0 bytes, or a device with zeros at its beginning and end,
//!   where file systems, partition tables and the like have their signatures. Anything else is used only with
//!   [`FileOptions::force`], because its contents are lost.
//!
//! On failure, a file that was created is removed, and a file that could not be extended gets its old length
//! back.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::engine::Target;
use super::mark::{MARK_BYTES, Mark};
use crate::backing::buffers::Buffers;
use crate::backing::{FORCE_SETTING, SETTING};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::file_size::check_file_size;
use crate::base::trusted_path::{Place, Refused};
use crate::base::units::{PAGE_SIZE, format_size};

/// The engine that carries out transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// [`Engine::Uring`] where the system permits it, else [`Engine::Threads`].
    #[default]
    Auto,
    /// io_uring, from Linux 5.10 on. Containers often forbid it.
    Uring,
    /// A few threads that read and write.
    Threads,
}

/// Which file to open, and how.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// A regular file, which may be created, or a block device.
    pub path: PathBuf,
    /// How many bytes to use after the header; `None` for all that exist. With a size, a missing file is
    /// created, a shorter file is extended, and a longer file keeps its length.
    pub size_bytes: Option<u64>,
    /// The engine.
    pub engine: Engine,
    /// Whether to overwrite a file or device that holds other data.
    pub force: bool,
    /// Whether to go through the page cache, as where the file system does not support O_DIRECT.
    #[cfg(test)]
    pub(crate) through_page_cache: bool,
}

impl FileOptions {
    /// Creates options to use all of the file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileOptions {
            path: path.into(),
            size_bytes: None,
            engine: Engine::Auto,
            force: false,
            #[cfg(test)]
            through_page_cache: false,
        }
    }
}

/// The bytes that must be zeros at the beginning and at the end of an empty device. Of the known signatures,
/// those of ZFS reach farthest from the ends: 512 KiB.
const SIGNATURE_BYTES: usize = 1 << 20;
/// The permissions of a file for users other than its owner.
const OF_OTHERS: Mode = Mode::RWXG.union(Mode::RWXO);
/// The range of O_DIRECT block sizes that are used; with any other the page cache is used.
const BLOCK_BYTES: std::ops::RangeInclusive<usize> = 512..=64 << 10;
/// The maximum size: that of a file less the largest header.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64 - *BLOCK_BYTES.end() as u64;

pub(super) struct Opened {
    pub(super) is_block_device: bool,
    pub(super) is_direct: bool,
    pub(super) is_reserved: bool,
    /// The place of the file, if it was created.
    made: Option<Place>,
}

impl Opened {
    pub(super) fn undo(&self) {
        if let Some(place) = &self.made {
            // The first error is reported instead.
            let _ = place.remove_file();
        }
    }
}

pub(super) fn open(options: &FileOptions) -> Result<(Target, Opened)> {
    if options.size_bytes.is_some_and(|size| size > MAX_SIZE_BYTES) {
        let what = "cannot have that size: no file can be that large";
        return Err(failure(&options.path, ErrorKind::Invalid, what));
    }
    let (fd, mut opened) = open_file(options)?;
    let target = prepare(fd, options, &mut opened).inspect_err(|_| opened.undo())?;
    Ok((target, opened))
}

/// Locks the open file, if it may be used, and sets its size and its mark.
fn prepare(fd: OwnedFd, options: &FileOptions, opened: &mut Opened) -> Result<Target> {
    let path = &options.path;
    check_owner(&fd, path, opened.is_block_device)?;
    let there_bytes = claim_alone(&fd, path, opened.is_block_device)?;
    let mut target = Target::new(fd, [0; 2], PAGE_SIZE);
    // Also after an error: a process that was forked meanwhile may have the descriptor for a moment.
    target.unlocks.set(1);
    let fd = &target.fd;
    let is_marked = check_contents(fd, options, opened.is_block_device, there_bytes)?;
    #[cfg(test)]
    let tries_direct = !options.through_page_cache;
    #[cfg(not(test))]
    let tries_direct = true;
    let direct_block_bytes = if tries_direct { direct_block_bytes(fd) } else { None };
    opened.is_direct = direct_block_bytes.is_some();
    let block_bytes = direct_block_bytes.unwrap_or(PAGE_SIZE);
    let start_bytes = block_bytes.max(MARK_BYTES) as u64;
    let room_bytes = there_bytes.saturating_sub(start_bytes);
    let len_bytes = match options.size_bytes {
        Some(size) if opened.is_block_device && size > room_bytes => {
            let has = format_size(there_bytes);
            let header = format!("{start_bytes} bytes of them for uzram's header");
            let what = format!("has only {has}, {header}: less than requested");
            return Err(failure(path, ErrorKind::Invalid, &what));
        }
        size => size.unwrap_or(room_bytes),
    };
    let len_bytes = len_bytes - len_bytes % block_bytes as u64;
    if len_bytes == 0 {
        let what = format!("has no room for a block of {block_bytes} bytes: give it a size");
        return Err(failure(path, ErrorKind::Invalid, &what));
    }
    if !opened.is_block_device {
        opened.is_reserved = reserve(fd, path, there_bytes, start_bytes + len_bytes)?;
    }
    if !is_marked {
        write_mark(fd, start_bytes as usize, path).inspect_err(|_| {
            if !opened.is_block_device {
                // The first error is reported instead.
                let _ = rustix::fs::ftruncate(fd, there_bytes);
            }
        })?;
    }
    (target.start_bytes, target.len_bytes, target.block_bytes) = (start_bytes, len_bytes, block_bytes);
    Ok(target)
}

/// Goes on with the open file of a backing of `len_bytes`, whose flags and lock the descriptor has. Reads
/// nothing of it: a device that is slow now must not hold up everything else.
pub(super) fn reopen(fd: OwnedFd, name: &Path, len_bytes: u64) -> Result<(Target, Opened)> {
    let failed = |errno| from_errno(name, errno);
    let stat = rustix::fs::fstat(&fd).map_err(failed)?;
    let is_block_device = is_block_device(name, FileType::from_raw_mode(stat.st_mode))?;
    let there_bytes = if is_block_device { device_bytes(&fd).map_err(failed)? } else { stat.st_size as u64 };
    let is_direct = rustix::fs::fcntl_getfl(&fd).map_err(failed)?.contains(OFlags::DIRECT);
    let block_bytes = if is_direct { declared_block_bytes(&fd) } else { None }.unwrap_or(PAGE_SIZE);
    let start_bytes = block_bytes.max(MARK_BYTES) as u64;
    let fits = start_bytes.checked_add(len_bytes).is_some_and(|end| end <= there_bytes);
    if len_bytes == 0 || !len_bytes.is_multiple_of(block_bytes as u64) || !fits {
        let has = format!("it has {there_bytes}, in blocks of {block_bytes}");
        let what = format!("cannot have been one of {len_bytes} bytes: {has}");
        return Err(failure(name, ErrorKind::Invalid, &what));
    }
    // If the lock is held, which it should be, this has no effect.
    claim_alone(&fd, name, is_block_device)?;
    // In units of 512 bytes, stat(2).
    let allocated_bytes = (stat.st_blocks as u64).saturating_mul(512);
    let is_reserved = is_block_device || allocated_bytes >= start_bytes + len_bytes;
    let target = Target::new(fd, [start_bytes, len_bytes], block_bytes);
    Ok((target, Opened { is_block_device, is_direct, is_reserved, made: None }))
}

/// Locks the file, and returns its size. A block device was opened exclusively.
fn claim_alone(fd: &OwnedFd, path: &Path, is_block_device: bool) -> Result<u64> {
    let failed = |errno| from_errno(path, errno);
    if is_block_device {
        return device_bytes(fd).map_err(failed);
    }
    rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
        Errno::WOULDBLOCK => failure(path, ErrorKind::Busy, "is in use by another process or device"),
        errno => from_errno(path, errno),
    })?;
    Ok(rustix::fs::fstat(fd).map_err(failed)?.st_size as u64)
}

/// Returns whether the file or device has uzram's mark. Fails if it holds other data, unless `options.force`
/// is set.
fn check_contents(
    fd: &OwnedFd,
    options: &FileOptions,
    is_block_device: bool,
    there_bytes: u64,
) -> Result<bool> {
    let path = &options.path;
    let read = |offset, len_bytes| read_at(fd, offset, len_bytes).map_err(|errno| from_errno(path, errno));
    let is_marked = Mark::parse(&read(0, MARK_BYTES)?).is_some();
    let is_zeros =
        |offset| -> Result<bool> { Ok(read(offset, SIGNATURE_BYTES)?.iter().all(|byte| *byte == 0)) };
    let last = there_bytes.saturating_sub(SIGNATURE_BYTES as u64);
    let is_empty = || -> Result<bool> {
        Ok(if is_block_device { is_zeros(0)? && is_zeros(last)? } else { there_bytes == 0 })
    };
    if is_marked || is_empty()? || options.force {
        return Ok(is_marked);
    }
    let holds = format!("holds data that is not uzram's ({})", format_size(there_bytes));
    let what = format!("{holds}: use --force to overwrite it, and its contents are lost");
    Err(failure(path, ErrorKind::Busy, &what).with_setting(FORCE_SETTING))
}

/// Returns up to `len_bytes` bytes: less where the file ends.
fn read_at(fd: &OwnedFd, offset: u64, len_bytes: usize) -> Result<Vec<u8>, Errno> {
    let (mut bytes, mut done) = (vec![0; len_bytes], 0);
    while done < len_bytes {
        let at = offset + done as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes[done..], at))? {
            0 => break,
            count => done += count,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

fn check_owner(fd: &OwnedFd, path: &Path, is_block_device: bool) -> Result<()> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| from_errno(path, errno))?;
    let (uid, owner, shown) = (rustix::process::geteuid().as_raw(), stat.st_uid, path.display());
    let (open_to, mode) = (Mode::from_raw_mode(stat.st_mode), stat.st_mode & 0o7777);
    let what = match is_block_device {
        true if owner != 0 => format!("is a block device of user {owner}, not of root: name another path"),
        true if open_to.intersects(Mode::RWXO) => {
            format!("is a block device that is open to all users (mode {mode:04o}): run: chmod o= '{shown}'")
        }
        false if owner != uid => format!("belongs to user {owner}, not to user {uid}: name another path"),
        false if open_to.intersects(OF_OTHERS) => {
            format!(
                "is open to other users (mode {mode:04o}): run: chmod 600 '{shown}', or name another path"
            )
        }
        false if stat.st_nlink != 1 => {
            format!("has {} names (hard links), and must have one: name another path", stat.st_nlink)
        }
        _ => return Ok(()),
    };
    Err(failure(path, ErrorKind::Permission, &what))
}

fn write_mark(fd: &OwnedFd, header_bytes: usize, path: &Path) -> Result<()> {
    let buffers = Buffers::new(1, header_bytes.next_multiple_of(PAGE_SIZE))?;
    let mut buffer = buffers.take_waiting();
    buffer[..MARK_BYTES].copy_from_slice(&Mark::random().to_bytes());
    let written =
        rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, &buffer[..header_bytes], 0)).and_then(|bytes| {
            // Without a durable mark, the file would be refused after a power failure.
            rustix::fs::fdatasync(fd).map(|()| bytes)
        });
    match written.map_err(|errno| from_errno(path, errno))? {
        bytes if bytes == header_bytes => Ok(()),
        _ => Err(failure(path, ErrorKind::NoSpace, "has no room for uzram's mark")),
    }
}

fn open_file(options: &FileOptions) -> Result<(OwnedFd, Opened)> {
    let path = &options.path;
    let failed = |errno| from_errno(path, errno);
    let place = Place::resolve(path).map_err(|refused| match refused {
        Refused::System(errno) => from_errno(path, errno),
        link @ Refused::Link { .. } => {
            failure(path, ErrorKind::Permission, &format!("cannot be used: {link}"))
        }
    })?;
    let opened = |is_block_device, made| {
        let (is_direct, is_reserved) = (false, is_block_device);
        Opened { is_block_device, is_direct, is_reserved, made }
    };
    // Check the type before opening: opening a pipe or a terminal has side effects.
    let is_block_device = match place.status() {
        Ok(stat) => is_block_device(path, FileType::from_raw_mode(stat.st_mode))?,
        Err(Errno::NOENT) if options.size_bytes.is_some_and(|size| size > 0) => {
            // Other users must not read pages that leave memory.
            let mode = Mode::RUSR | Mode::WUSR;
            let fd = place.open(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode).map_err(failed)?;
            return Ok((fd, opened(false, Some(place))));
        }
        Err(Errno::NOENT) => {
            return Err(failure(path, ErrorKind::NotFound, "does not exist; with a size it would be made"));
        }
        Err(errno) => return Err(failed(errno)),
    };
    // With O_EXCL the kernel refuses a block device that is mounted, used as swap or otherwise claimed.
    let exclusive = if is_block_device { OFlags::EXCL } else { OFlags::empty() };
    let fd = place
        .open(OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | exclusive, Mode::empty())
        .map_err(failed)?;
    let stat = rustix::fs::fstat(&fd).map_err(failed)?;
    if self::is_block_device(path, FileType::from_raw_mode(stat.st_mode))? != is_block_device {
        return Err(failure(path, ErrorKind::Busy, "was replaced just now"));
    }
    set_flags(&fd, OFlags::NONBLOCK, false).map_err(failed)?;
    Ok((fd, opened(is_block_device, None)))
}

fn is_block_device(path: &Path, kind: FileType) -> Result<bool> {
    let what = match kind {
        FileType::BlockDevice => return Ok(true),
        FileType::RegularFile => return Ok(false),
        FileType::Directory => "is a directory; name a file in it",
        FileType::CharacterDevice => "is a character device",
        FileType::Socket => "is a socket",
        FileType::Fifo => "is a pipe",
        _ => "is neither a file nor a block device",
    };
    Err(failure(path, ErrorKind::Invalid, what))
}

fn set_flags(fd: &OwnedFd, flags: OFlags, on: bool) -> Result<(), Errno> {
    let mut all = rustix::fs::fcntl_getfl(fd)?;
    all.set(flags, on);
    rustix::fs::fcntl_setfl(fd, all)
}

fn device_bytes(fd: &OwnedFd) -> Result<u64, Errno> {
    // The kernel declares the argument of BLKGETSIZE64 as size_t, and writes 64 bits.
    const BLKGETSIZE64: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<usize>(0x12, 114);
    // SAFETY: BLKGETSIZE64 writes a u64.
    unsafe { rustix::ioctl::ioctl(fd, rustix::ioctl::Getter::<BLKGETSIZE64, u64>::new()) }
}

/// Extends a file to `len_bytes` and reserves its space. Returns false if the file system can only extend it.
fn reserve(fd: &OwnedFd, path: &Path, file_bytes: u64, len_bytes: u64) -> Result<bool> {
    // A file that is long enough is written to up to its end, too.
    check_file_size(&format!("'{}': a file", path.display()), len_bytes)?;
    let reserved = match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len_bytes) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) if len_bytes <= file_bytes => Ok(false),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(fd, len_bytes).map(|()| false),
        Err(errno) => Err(errno),
    };
    reserved.map_err(|errno| {
        // Free the space that was reserved before it ran out.
        let _ = rustix::fs::ftruncate(fd, file_bytes);
        let (kind, why) = match errno {
            Errno::NOSPC | Errno::DQUOT => (ErrorKind::NoSpace, "the file system is full"),
            Errno::FBIG => (ErrorKind::Invalid, "it exceeds the maximum file size"),
            errno => return from_errno(path, errno),
        };
        failure(path, kind, &format!("cannot be extended to the requested size: {why}"))
    })
}

/// Switches to O_DIRECT, and returns its block size; `None` if the page cache has to be used.
fn direct_block_bytes(fd: &OwnedFd) -> Option<usize> {
    let block_bytes = declared_block_bytes(fd)?;
    set_flags(fd, OFlags::DIRECT, true).ok()?;
    // Some file systems refuse only the transfer, so try one: a read, perhaps at the end of the file.
    let tried = Buffers::new(1, block_bytes.next_multiple_of(PAGE_SIZE)).ok().and_then(|buffers| {
        let mut buffer = buffers.take()?;
        rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut buffer[..block_bytes], 0)).ok()
    });
    if tried.is_none() {
        set_flags(fd, OFlags::DIRECT, false).ok()?;
        return None;
    }
    Some(block_bytes)
}

/// Returns the alignment that STATX_DIOALIGN (Linux 6.1) reports, a page if it is not known, and `None` if
/// O_DIRECT is not supported or the alignment not usable.
fn declared_block_bytes(fd: &OwnedFd) -> Option<usize> {
    let Ok(statx) = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Some(PAGE_SIZE);
    };
    if statx.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(PAGE_SIZE);
    }
    let (memory, offset) = (statx.stx_dio_mem_align as usize, statx.stx_dio_offset_align as usize);
    let usable = memory <= PAGE_SIZE && BLOCK_BYTES.contains(&offset) && offset.is_power_of_two();
    usable.then_some(offset)
}

fn failure(path: &Path, kind: ErrorKind, what: &str) -> Error {
    Error::new(kind, format!("the backing device '{}' {what}", path.display())).with_setting(SETTING)
}

fn from_errno(path: &Path, errno: Errno) -> Error {
    let kind = match errno {
        Errno::NOENT | Errno::NOTDIR => ErrorKind::NotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorKind::Permission,
        Errno::BUSY | Errno::TXTBSY => ErrorKind::Busy,
        Errno::NOSPC | Errno::DQUOT => ErrorKind::NoSpace,
        Errno::NOMEM => ErrorKind::NoMemory,
        _ => ErrorKind::Io,
    };
    let what = match errno {
        Errno::BUSY => "is mounted, used for swapping, or otherwise in use".into(),
        errno => format!("cannot be used: {errno}"),
    };
    failure(path, kind, &what)
}
