//! Opens the file of a backing: finds or makes it, takes it for this process alone, gives it its size and
//! reserves its space, and finds out how it can be read and written.
//!
//! When something fails, a file that was made is removed again, and one that could not be extended as far as it
//! should be is as long as before.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::FileOptions;
use super::engine::Target;
use crate::backing::SETTING;
use crate::backing::buffers::Buffers;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{PAGE_SIZE, format_size};

/// Blocks of O_DIRECT that are smaller are not believed, those that are larger not used: the page cache is.
const BLOCK_BYTES: std::ops::RangeInclusive<usize> = 512..=64 << 10;

/// What was found out.
pub(super) struct Opened {
    pub(super) is_block_device: bool,
    pub(super) is_direct: bool,
    pub(super) is_reserved: bool,
    made: bool,
}

impl Opened {
    /// Removes the file if it was made just now.
    pub(super) fn undo(&self, options: &FileOptions) {
        if self.made {
            // There is an error to report already.
            let _ = rustix::fs::unlink(&options.path);
        }
    }
}

/// Opens it as `options` say.
pub(super) fn open(options: &FileOptions) -> Result<(Target, Opened)> {
    if options.size_bytes.is_some_and(|size| size > i64::MAX as u64) {
        return Err(failure(&options.path, ErrorKind::Invalid, "no file can be that large"));
    }
    let (fd, is_block_device, made) = open_file(options)?;
    let mut opened = Opened { is_block_device, made, is_direct: false, is_reserved: is_block_device };
    match prepare(fd, options, &mut opened) {
        Ok(target) => Ok((target, opened)),
        Err(error) => {
            opened.undo(options);
            Err(error)
        }
    }
}

/// Takes the open file for this process, and gives it its size.
fn prepare(fd: OwnedFd, options: &FileOptions, opened: &mut Opened) -> Result<Target> {
    let path = &options.path;
    let len_bytes = if opened.is_block_device {
        let device_bytes = device_bytes(&fd).map_err(|errno| from_errno(path, errno))?;
        match options.size_bytes {
            Some(size) if size > device_bytes => {
                let what = format!("has only {}, not {}", format_size(device_bytes), format_size(size));
                return Err(failure(path, ErrorKind::Invalid, &what));
            }
            size => size.unwrap_or(device_bytes),
        }
    } else {
        rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => failure(path, ErrorKind::Busy, "is in use by another process or device"),
            errno => from_errno(path, errno),
        })?;
        let file_bytes = rustix::fs::fstat(&fd).map_err(|errno| from_errno(path, errno))?.st_size as u64;
        let len_bytes = options.size_bytes.unwrap_or(file_bytes);
        if len_bytes > 0 {
            opened.is_reserved = reserve(&fd, path, file_bytes, len_bytes)?;
        }
        len_bytes
    };
    let direct_block_bytes = if options.direct { direct_block_bytes(&fd) } else { None };
    opened.is_direct = direct_block_bytes.is_some();
    let block_bytes = direct_block_bytes.unwrap_or(PAGE_SIZE);
    let len_bytes = len_bytes - len_bytes % block_bytes as u64;
    if len_bytes == 0 {
        let what = format!("has no room for a block of {block_bytes} bytes: give it a size");
        return Err(failure(path, ErrorKind::Invalid, &what));
    }
    Ok(Target { fd, len_bytes, block_bytes })
}

/// The file, whether it is a block device, and whether it was made.
fn open_file(options: &FileOptions) -> Result<(OwnedFd, bool, bool)> {
    let path = &options.path;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    // Looked at before it is opened: to open a pipe or a terminal does something to it.
    let is_block_device = match rustix::fs::stat(path) {
        Ok(stat) => is_block_device(path, FileType::from_raw_mode(stat.st_mode))?,
        Err(Errno::NOENT) if options.size_bytes.is_some_and(|size| size > 0) => {
            // What leaves memory is nobody else's to read.
            let mode = Mode::RUSR | Mode::WUSR;
            match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
                Ok(fd) => return Ok((fd, false, true)),
                Err(errno) => return Err(from_errno(path, errno)),
            }
        }
        Err(Errno::NOENT) => {
            return Err(failure(path, ErrorKind::NotFound, "does not exist; with a size it would be made"));
        }
        Err(errno) => return Err(from_errno(path, errno)),
    };
    // A block device that is mounted, swapped to or otherwise claimed is refused.
    let exclusive = if is_block_device { OFlags::EXCL } else { OFlags::empty() };
    let fd = rustix::fs::open(path, flags | exclusive | OFlags::NONBLOCK, Mode::empty())
        .map_err(|errno| from_errno(path, errno))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| from_errno(path, errno))?;
    if self::is_block_device(path, FileType::from_raw_mode(stat.st_mode))? != is_block_device {
        return Err(failure(path, ErrorKind::Busy, "was replaced just now"));
    }
    set_flags(&fd, OFlags::NONBLOCK, false).map_err(|errno| from_errno(path, errno))?;
    Ok((fd, is_block_device, false))
}

fn is_block_device(path: &Path, kind: FileType) -> Result<bool> {
    let what = match kind {
        FileType::BlockDevice => return Ok(true),
        FileType::RegularFile => return Ok(false),
        FileType::Directory => "is a directory; name a file in it",
        FileType::CharacterDevice => "is a character device",
        FileType::Socket => "is a socket",
        FileType::Fifo => "is a pipe",
        _ => "is no file and no block device",
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

/// Extends a file to `len_bytes` and takes all space up to there. False when the file system can only extend it.
fn reserve(fd: &OwnedFd, path: &Path, file_bytes: u64, len_bytes: u64) -> Result<bool> {
    let reserved = match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len_bytes) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) if len_bytes <= file_bytes => Ok(false),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(fd, len_bytes).map(|()| false),
        Err(errno) => Err(errno),
    };
    reserved.map_err(|errno| {
        // What was taken before the space ran out.
        let _ = rustix::fs::ftruncate(fd, file_bytes);
        match errno {
            Errno::NOSPC | Errno::DQUOT => {
                let what = format!("can not have {}: the file system is full", format_size(len_bytes));
                failure(path, ErrorKind::NoSpace, &what)
            }
            Errno::FBIG => {
                let what =
                    format!("can not have {}: files may not be that large here", format_size(len_bytes));
                failure(path, ErrorKind::Invalid, &what)
            }
            errno => from_errno(path, errno),
        }
    })
}

/// Switches to O_DIRECT, and answers its block size; none if the page cache has to be used.
fn direct_block_bytes(fd: &OwnedFd) -> Option<usize> {
    let block_bytes = declared_block_bytes(fd)?;
    set_flags(fd, OFlags::DIRECT, true).ok()?;
    // Some file systems refuse only the transfer. An empty read, at the end of a file, is fine.
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

/// What STATX_DIOALIGN (Linux 6.1) says, else a page; none if it says that there is no O_DIRECT.
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
        errno => format!("can not be used: {errno}"),
    };
    failure(path, kind, &what)
}
