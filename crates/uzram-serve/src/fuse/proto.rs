//! The messages of the FUSE protocol, `<linux/fuse.h>`: the types and fields have the kernel's names.
//!
//! All numbers have the machine's byte order. Requests are read with a bound on each length and without
//! assumptions about alignment.

#![allow(non_camel_case_types)]

use std::ffi::OsStr;
use std::mem::size_of;
use std::os::unix::ffi::OsStrExt;

/// The version of the protocol that is spoken, and the oldest minor version of a kernel (Linux 5.4).
pub(super) const FUSE_KERNEL_VERSION: u32 = 7;
pub(super) const FUSE_KERNEL_MINOR_VERSION: u32 = 40;
pub(super) const OLDEST_MINOR_VERSION: u32 = 31;

/// The shortest buffer with which a kernel lets a request be read.
pub(super) const FUSE_MIN_READ_BUFFER: usize = 8192;
/// The bit of a request's `unique` that says that the request is sent again.
pub(super) const FUSE_UNIQUE_RESEND: u64 = 1 << 63;
/// The notification that has the kernel send all unanswered requests again (Linux 6.9).
pub(super) const FUSE_NOTIFY_RESEND: i32 = 7;

pub(super) const FUSE_ASYNC_READ: u64 = 1 << 0;
pub(super) const FUSE_BIG_WRITES: u64 = 1 << 5;
pub(super) const FUSE_ASYNC_DIO: u64 = 1 << 15;
pub(super) const FUSE_PARALLEL_DIROPS: u64 = 1 << 18;
pub(super) const FUSE_MAX_PAGES: u64 = 1 << 22;
pub(super) const FUSE_INIT_EXT: u64 = 1 << 30;
pub(super) const FUSE_DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
pub(super) const FUSE_HAS_RESEND: u64 = 1 << 39;

pub(super) const FOPEN_DIRECT_IO: u32 = 1 << 0;
pub(super) const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

pub(super) const FATTR_MODE: u32 = 1 << 0;
pub(super) const FATTR_UID: u32 = 1 << 1;
pub(super) const FATTR_GID: u32 = 1 << 2;
pub(super) const FATTR_SIZE: u32 = 1 << 3;
pub(super) const FATTR_FH: u32 = 1 << 6;

macro_rules! opcodes {
    ($($name:ident = $number:literal,)*) => {
        pub(super) mod opcode {
            $(pub const $name: u32 = $number;)*
        }
    };
}

opcodes! {
    FUSE_LOOKUP = 1, FUSE_FORGET = 2, FUSE_GETATTR = 3, FUSE_SETATTR = 4, FUSE_SYMLINK = 6,
    FUSE_MKNOD = 8, FUSE_MKDIR = 9, FUSE_UNLINK = 10, FUSE_RMDIR = 11, FUSE_RENAME = 12,
    FUSE_LINK = 13, FUSE_OPEN = 14, FUSE_READ = 15, FUSE_WRITE = 16, FUSE_STATFS = 17,
    FUSE_RELEASE = 18, FUSE_INIT = 26, FUSE_OPENDIR = 27, FUSE_READDIR = 28, FUSE_RELEASEDIR = 29,
    FUSE_CREATE = 35, FUSE_INTERRUPT = 36, FUSE_DESTROY = 38, FUSE_BATCH_FORGET = 42,
    FUSE_FALLOCATE = 43, FUSE_RENAME2 = 45, FUSE_LSEEK = 46,
}

/// A message or a part of one.
///
/// # Safety
/// The type is `repr(C)` and consists of integers, without padding between or after them, so that any bytes
/// are a valid value and all bytes of a value are initialised.
pub(super) unsafe trait Message: Copy {}

macro_rules! messages {
    ($($(#[$doc:meta])* struct $name:ident: $bytes:literal { $($field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[allow(dead_code, reason = "the layout needs all fields")]
        pub(super) struct $name { $(pub $field: $kind,)* }

        const _: () = assert!(size_of::<$name>() == $bytes, "the kernel's has another size");
        const _: () = assert!($bytes == 0 $(+ size_of::<$kind>())*, "it has no padding");
        // SAFETY: `repr(C)`; the fields are integers, arrays of them, or messages; the sum of their sizes is
        // the size.
        unsafe impl Message for $name {}
    )*};
}

// Each with its number of bytes.
messages! {
    struct fuse_in_header: 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16,
        padding: u16,
    }
    /// The start of a reply; of a notification if `unique` is 0.
    struct fuse_out_header: 16 { len: u32, error: i32, unique: u64, }
    /// The first part of `FUSE_INIT`, which every kernel sends.
    struct fuse_init_in: 16 { major: u32, minor: u32, max_readahead: u32, flags: u32, }
    struct fuse_init_out: 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16,
        congestion_threshold: u16, max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16,
        flags2: u32, max_stack_depth: u32, unused: [u16; 12],
    }
    struct fuse_attr: 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32,
        flags: u32,
    }
    struct fuse_entry_out: 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: fuse_attr,
    }
    struct fuse_attr_out: 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: fuse_attr, }
    struct fuse_setattr_in: 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32,
        unused5: u32,
    }
    struct fuse_open_in: 8 { flags: u32, open_flags: u32, }
    struct fuse_open_out: 16 { fh: u64, open_flags: u32, backing_id: i32, }
    struct fuse_release_in: 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    struct fuse_read_in: 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    struct fuse_write_in: 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    struct fuse_write_out: 8 { size: u32, padding: u32, }
    struct fuse_fallocate_in: 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }
    struct fuse_lseek_in: 24 { fh: u64, offset: u64, whence: u32, padding: u32, }
    struct fuse_lseek_out: 8 { offset: u64, }
    struct fuse_statfs_out: 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32, padding: u32, spare: [u32; 6],
    }
    /// The start of a directory's entry; its name follows, and zeros up to a multiple of
    /// [`FUSE_DIRENT_ALIGN`].
    struct fuse_dirent: 24 { ino: u64, off: u64, namelen: u32, r#type: u32, }
}

const FUSE_DIRENT_ALIGN: usize = size_of::<u64>();
/// What comes before the data of a write.
pub(super) const WRITE_HEADERS_BYTES: usize = size_of::<fuse_in_header>() + size_of::<fuse_write_in>();

pub(super) fn bytes_of<T: Message>(message: &T) -> &[u8] {
    // SAFETY: all bytes of a message are initialised (`Message`), and it is borrowed as long as they are.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(message).cast(), size_of::<T>()) }
}

/// Takes a message from the start of `bytes`; `None` if they are too few.
pub(super) fn take<T: Message>(bytes: &mut &[u8]) -> Option<T> {
    let (head, rest) = bytes.split_at_checked(size_of::<T>())?;
    *bytes = rest;
    // SAFETY: `head` has the type's size, and any bytes are a valid value (`Message`).
    Some(unsafe { head.as_ptr().cast::<T>().read_unaligned() })
}

pub(super) struct Request<'a> {
    pub header: fuse_in_header,
    pub body: &'a [u8],
}

impl<'a> Request<'a> {
    /// Parses a request's header; `None` if there is none, or its length is not that of `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut body = bytes;
        let header: fuse_in_header = take(&mut body)?;
        (header.len as usize == bytes.len()).then_some(Request { header, body })
    }

    /// Returns the message of the request's kind; `None` if the body is too short.
    pub fn message<T: Message>(&self) -> Option<T> {
        take(&mut { self.body })
    }

    /// Returns the name that is all of the body, up to a zero; `None` without a zero.
    pub fn name(&self) -> Option<&'a OsStr> {
        let len = self.body.iter().position(|byte| *byte == 0)?;
        Some(OsStr::from_bytes(&self.body[..len]))
    }

    /// Returns the parts of a write; `None` if it is shorter than its headers say.
    pub fn write(&self) -> Option<(fuse_write_in, &'a [u8])> {
        let mut rest = self.body;
        let write: fuse_write_in = take(&mut rest)?;
        Some((write, rest.get(..write.size as usize)?))
    }
}

/// The entries of a directory, as many as a reply may have.
pub(super) struct Entries {
    bytes: Vec<u8>,
    most_bytes: usize,
}

impl Entries {
    /// Creates an empty list of at most `most_bytes` bytes.
    pub fn new(most_bytes: usize) -> Self {
        Entries { bytes: Vec::new(), most_bytes }
    }

    /// Adds an entry, if there is room for it. `off` is the position of the next entry; `kind` is `DT_DIR` or
    /// `DT_REG`.
    pub fn add(&mut self, ino: u64, off: u64, kind: u8, name: &str) -> bool {
        let entry = fuse_dirent { ino, off, namelen: name.len() as u32, r#type: kind.into() };
        let end =
            (self.bytes.len() + size_of::<fuse_dirent>() + name.len()).next_multiple_of(FUSE_DIRENT_ALIGN);
        if end > self.most_bytes {
            return false;
        }
        self.bytes.extend_from_slice(bytes_of(&entry));
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.resize(end, 0);
        true
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn entries_are_padded_and_bounded() {
        let mut entries = Entries::new(64 + 32);
        assert!(entries.add(7, 1, libc::DT_DIR, "a") && entries.add(8, 2, libc::DT_REG, "nine_char"));
        assert_eq!(entries.as_bytes().len(), 32 + 40);
        assert!(!entries.add(9, 3, libc::DT_REG, "b"));
        let mut rest = entries.as_bytes();
        let first: fuse_dirent = take(&mut rest).unwrap();
        assert_eq!((first.ino, first.off, first.namelen, first.r#type), (7, 1, 1, 4));
    }
}
