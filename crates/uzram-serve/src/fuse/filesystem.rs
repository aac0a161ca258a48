//! Dispatch of the kernel's requests by file.
//!
//! Requests for names, sizes and permissions are answered here; `disk` and `attribute` read and write devices.

use std::ffi::OsStr;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use uzram::device::Device;
use uzram::units::PAGE_SIZE;

use super::cpu_latency::CpuLatency;
use super::disk::{Disk, errno};
use super::handles::{Handles, Open};
use super::thread_buffer::{self, keep_secret, reply_from_buffer};
use super::tree::{Node, Tree};
use super::warm_up::WarmUp;
use super::{MAX_BACKGROUND, MountOptions, attribute};
use crate::Exports;
use crate::device_pool::DevicePools;

/// How long the kernel may cache names and file attributes: not at all. A device's size changes when it is reset, and a
/// loop device would take the cached size.
const TTL: Duration = Duration::ZERO;
/// The size that an attribute's file shows, as in sysfs: its text is generated when it is opened.
const ATTRIBUTE_BYTES: u64 = PAGE_SIZE as u64;
/// The unit of `st_blocks`, stat(2).
const STAT_BLOCK_BYTES: u64 = 512;

/// The files of a daemon's devices.
pub(super) struct Files {
    tree: Tree,
    handles: Handles,
    pools: DevicePools,
    warm_up: WarmUp,
    max_io_bytes: u32,
    cpu_latency: Option<CpuLatency>,
    owner: (u32, u32),
}

impl Files {
    /// Creates the files of `exports`.
    pub fn new(exports: Exports, options: &MountOptions, cpu_latency: Option<CpuLatency>) -> Self {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Files {
            tree: Tree::new(exports),
            handles: Handles::new(),
            pools: DevicePools::default(),
            warm_up: WarmUp::new(options.threads),
            max_io_bytes: options.max_io_bytes,
            cpu_latency,
            owner,
        }
    }

    fn attr(&self, ino: u64, node: &Node) -> FileAttr {
        let (size, allocated_bytes, mode) = match node {
            Node::Root | Node::Directory => (0, 0, 0o500),
            Node::Disk(device) => {
                let stats = device.counts();
                (stats.disksize_bytes, stats.orig_data_bytes, 0o600)
            }
            Node::Attribute(_, attribute) => {
                let mode = if attribute.readable() { 0o400 } else { 0 };
                (ATTRIBUTE_BYTES, 0, if attribute.writable() { mode | 0o200 } else { mode })
            }
            Node::WarmUp => (self.max_io_bytes.into(), 0, 0o200),
        };
        let is_directory = matches!(node, Node::Root | Node::Directory);
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: allocated_bytes / STAT_BLOCK_BYTES,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if is_directory { FileType::Directory } else { FileType::RegularFile },
            perm: mode,
            nlink: if is_directory { 2 } else { 1 },
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: PAGE_SIZE as u32,
            flags: 0,
        }
    }

    fn open_node(&self, node: Node, mode: OpenAccMode) -> Result<Open, Errno> {
        match node {
            Node::Disk(device) => {
                let file = self.tree.exports().open_file(&device, mode != OpenAccMode::O_RDONLY);
                let file = file.map_err(|error| errno(&error))?;
                Ok(Open::Disk(Disk { file, pool: self.pools.pool(&device) }))
            }
            // As in sysfs, the attribute's permissions also apply to root.
            Node::Attribute(_, attribute)
                if mode != OpenAccMode::O_WRONLY && !attribute.readable()
                    || mode != OpenAccMode::O_RDONLY && !attribute.writable() =>
            {
                Err(Errno::EACCES)
            }
            Node::Attribute(device, attribute) => {
                let is_read = mode != OpenAccMode::O_WRONLY;
                let text = is_read.then(|| device.text(attribute.name)).transpose();
                let text = text.map_err(|error| errno(&error))?.map(Mutex::new);
                Ok(Open::Attribute(text, self.pools.pool(&device)))
            }
            Node::WarmUp => Ok(Open::WarmUp),
            Node::Root | Node::Directory => Err(Errno::EISDIR),
        }
    }

    #[inline]
    fn request_came(&self) {
        if let Some(cpu_latency) = &self.cpu_latency {
            cpu_latency.request();
        }
    }
}

impl Filesystem for Files {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // If a value is out of the kernel's range, its nearest limit applies.
        let _ = config.set_max_write(self.max_io_bytes);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        for capability in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // Allows shared mappings of a file. They use the page cache, which the kernel keeps coherent with direct
            // reads and writes (Linux 6.6; before that such a mapping is refused).
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            let _ = config.add_capabilities(capability);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.tree.lookup(parent.0, name) {
            Some((ino, node)) => reply.entry(&TTL, &self.attr(ino, &node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.tree.node(ino.0) {
            Some(node) => reply.attr(&TTL, &self.attr(ino.0, &node)),
            None => reply.error(Errno::ESTALE),
        }
    }

    /// Refuses to change anything: a disk's size is its device's. `O_TRUNC` is ignored, as for block devices and in
    /// sysfs.
    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let Some(node) = self.tree.node(ino.0) else { return reply.error(Errno::ESTALE) };
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        let attr = self.attr(ino.0, &node);
        // ftruncate(2) passes the handle, `O_TRUNC` of open(2) does not.
        let opens = size == Some(0) && fh.is_none();
        match size {
            Some(size) if size != attr.size && !opens && matches!(node, Node::Disk(_)) => {
                reply.error(Errno::EINVAL);
            }
            _ => reply.attr(&TTL, &attr),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(node) = self.tree.node(ino.0) else { return reply.error(Errno::ESTALE) };
        let opened = self.open_node(node, flags.acc_mode());
        match opened.and_then(|open| self.handles.open(open).ok_or(Errno::ENFILE)) {
            // Bypass the page cache, which would hold a second copy, and need memory when there is none.
            Ok(handle) => reply.opened(
                FileHandle(handle),
                FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.handles.close(fh.0);
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.request_came();
        match self.handles.get(fh.0).as_deref() {
            Some(Some(Open::Disk(disk))) => disk.read(offset, size as usize, reply),
            Some(Some(Open::Attribute(Some(text), _))) => {
                reply_from_buffer(size as usize, reply, |out, reply| {
                    let len = text.lock().unwrap_or_else(PoisonError::into_inner).read_at(offset, out);
                    reply.data(&out[..len]);
                })
            }
            _ => reply.error(Errno::EBADF),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.request_came();
        keep_secret(data);
        match self.handles.get(fh.0).as_deref() {
            Some(Some(Open::Disk(disk))) => disk.write(offset, data, reply),
            Some(Some(Open::Attribute(_, pool))) => match self.tree.node(ino.0) {
                Some(Node::Attribute(device, attribute)) => {
                    attribute::write(device, attribute, pool, offset, data, reply)
                }
                _ => reply.error(Errno::ESTALE),
            },
            Some(Some(Open::WarmUp)) => {
                let touched = thread_buffer::touch(data.len());
                // Arrive even if this thread got no buffer: the other threads wait for it.
                match (self.warm_up.arrive(), touched) {
                    (true, Ok(())) => reply.written(data.len() as u32),
                    (true, Err(errno)) => reply.error(errno),
                    (false, _) => reply.error(Errno::ETIMEDOUT),
                }
            }
            _ => reply.error(Errno::EBADF),
        }
    }

    /// A write is stored and visible to every reader before its reply, so there is nothing to flush. After `ENOSYS` the
    /// kernel does not send this request again. Nothing becomes durable: contents are memory.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    /// As `flush`.
    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let allocated = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => false,
            libc::FALLOC_FL_ZERO_RANGE => true,
            // Space cannot be preallocated: it depends on the contents.
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        match self.handles.get(fh.0).as_deref() {
            Some(Some(Open::Disk(disk))) => disk.zero(offset, length, allocated, reply),
            _ => reply.error(Errno::EBADF),
        }
    }

    fn lseek(&self, _: &Request, _: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let for_data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let found = match self.handles.get(fh.0).as_deref() {
            Some(Some(Open::Disk(disk))) => disk.seek(offset, for_data),
            _ => Err(Errno::EBADF),
        };
        match found {
            // It fits: a disk has at most 16 TiB.
            Ok(at) => reply.offset(at as i64),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = self.tree.entries(ino.0);
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, entry) in entries.iter().enumerate().skip(from) {
            let kind = if entry.is_directory { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(entry.ino), at as u64 + 1, kind, &entry.name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let devices = self.tree.exports().devices();
        let pages = |bytes: fn(&Device) -> u64| {
            devices.iter().map(|device| bytes(device)).sum::<u64>() / PAGE_SIZE as u64
        };
        let all = pages(|device| device.size_bytes());
        let free = all.saturating_sub(pages(|device| device.counts().orig_data_bytes));
        let page = PAGE_SIZE as u32;
        reply.statfs(all, free, free, devices.len() as u64, 0, page, 255, page);
    }

    /// Files are created and removed only with devices.
    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _mode: u32,
        _umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EACCES);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _mode: u32, _umask: u32, reply: ReplyEntry) {
        reply.error(Errno::EACCES);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EACCES);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EACCES);
    }

    /// There are no extended attributes; after `ENOSYS` the kernel does not send this request again.
    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
