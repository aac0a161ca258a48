//! What each request of the kernel means.
//!
//! Requests are carried out in the thread that received them, but for what would wait for a backing device or for
//! memory, and for long discards: that goes to the device's [`Crew`](crate::waiters::Crew), so that a thread is free for
//! the others. On the way of a read or write nothing is allocated: a thread has its buffer for life.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use uzram::Error;
use uzram::device::{Attribute, Device, OpenDevice, PageState, Wait};
use uzram::mem::{ZeroedPages, leave_out_of_cores};
use uzram::units::PAGE_SIZE;

use super::cpu_latency::CpuLatency;
use super::handles::{Disk, Handles, Open};
use super::tree::{Node, Tree};
use super::warm_up::WarmUp;
use super::{MAX_BACKGROUND, MAX_IO_BYTES};
use crate::Exports;
use crate::waiters::{Crew, Waiters};

/// How long the kernel may believe what it was told of a name or file: not at all, as a device's size changes when it is
/// reset, and a loop device on its file takes the size that the kernel believes.
const TTL: Duration = Duration::ZERO;
/// The longest text that an attribute takes.
const MAX_TEXT_BYTES: usize = 64 << 10;
/// What an attribute's file seems to have: its text is made when it is opened. As in sysfs.
const ATTRIBUTE_BYTES: u64 = PAGE_SIZE as u64;
/// So much of a disk is made zeros by the thread that received the request: what takes no longer than the longest read.
const ZERO_AT_ONCE_BYTES: u64 = 16 << 20;
/// The unit of `st_blocks`, stat(2).
const STAT_BLOCK_BYTES: u64 = 512;

thread_local! {
    /// Where this thread puts what it reads.
    static BUFFER: RefCell<Option<ZeroedPages>> = const { RefCell::new(None) };
    /// Where the pages begin and end in which this thread's requests have their data.
    static RECEIVED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The files of a daemon's devices.
pub(super) struct Files {
    tree: Tree,
    handles: Handles,
    waiters: Waiters,
    warm_up: WarmUp,
    cpu_latency: Option<CpuLatency>,
    owner: (u32, u32),
}

impl Files {
    /// Those of `exports`, served by so many threads, for which CPUs wake so fast.
    pub fn new(exports: Exports, threads: usize, cpu_latency: Option<CpuLatency>) -> Self {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Files {
            tree: Tree::new(exports),
            handles: Handles::new(),
            waiters: Waiters::default(),
            warm_up: WarmUp::new(threads),
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
            Node::WarmUp => (MAX_IO_BYTES as u64, 0, 0o200),
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
                Ok(Open::Disk(Disk { file, crew: self.waiters.crew(&device) }))
            }
            // As in sysfs, not even root may do what the attribute cannot.
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
                Ok(Open::Attribute(text, self.waiters.crew(&device)))
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

/// What a program is told of a failure.
fn errno(error: &Error) -> Errno {
    Errno::from_i32(error.errno())
}

/// Room for so many bytes in a thread's buffer, which is made if it is missing or too small.
fn room_in(buffer: &mut Option<ZeroedPages>, len: usize) -> Result<&mut [u8], Errno> {
    if buffer.as_ref().is_none_or(|buffer| buffer.len() < len) {
        *buffer = Some(allocate(MAX_IO_BYTES.max(len))?);
    }
    buffer.as_mut().map(|buffer| &mut buffer[..len]).ok_or(Errno::ENOMEM)
}

/// Has a read answered out of this thread's buffer, or answers that there is no memory for it.
fn reply_from_buffer(len: usize, reply: ReplyData, answer: impl FnOnce(&mut [u8], ReplyData)) {
    BUFFER.with_borrow_mut(|buffer| match room_in(buffer, len) {
        Ok(room) => answer(room, reply),
        Err(errno) => reply.error(errno),
    });
}

/// Keeps what this thread receives out of core files: it has one buffer for that, which is not ours.
fn keep_secret(data: &[u8]) {
    let (start, end) = (data.as_ptr().addr(), data.as_ptr().addr() + data.len());
    let (known_start, known_end) = RECEIVED.get();
    if start < known_start || known_end < end {
        leave_out_of_cores(data);
        RECEIVED.set((start, end));
    }
}

/// How much of a request lies before the end of the disk.
fn clamp(device: &OpenDevice, offset: u64, len: usize) -> usize {
    let left = device.size_bytes().saturating_sub(offset);
    usize::try_from(left).map_or(len, |left| left.min(len))
}

/// Memory for what is handed over.
fn allocate(len: usize) -> Result<ZeroedPages, Errno> {
    ZeroedPages::new(len).map_err(|_| Errno::ENOMEM)
}

fn reply_data(reply: ReplyData, read: uzram::Result<usize>, bytes: &[u8]) {
    match read {
        Ok(_) => reply.data(bytes),
        Err(error) => reply.error(errno(&error)),
    }
}

fn read_disk(disk: &Disk, offset: u64, len: usize, reply: ReplyData) {
    let len = clamp(&disk.file.device, offset, len);
    if len == 0 {
        return reply.data(&[]);
    }
    reply_from_buffer(len, reply, |out, reply| {
        let done = match disk.file.device.read_some(offset, out, Wait::No) {
            Ok(done) if done < len => done,
            read => return reply_data(reply, read, out),
        };
        let Some(room) = disk.crew.room(0) else {
            let rest = offset + done as u64;
            let read = disk.file.device.read_some(rest, &mut out[done..], Wait::Yes);
            return reply_data(reply, read, out);
        };
        let device = Arc::clone(&disk.file.device);
        disk.crew.start(Box::new(move || {
            reply_from_buffer(len, reply, |out, reply| {
                // From the start: to take along what was read would take memory.
                let read = device.read_some(offset, out, Wait::Yes);
                drop(device);
                reply_data(reply, read, out);
            });
            drop(room);
        }));
    });
}

fn write_disk(disk: &Disk, offset: u64, data: &[u8], reply: ReplyWrite) {
    let answer = move |written: uzram::Result<()>, reply: ReplyWrite, len: usize| match written {
        // The protocol's lengths have 32 bits, and so have those of requests.
        Ok(()) => reply.written(len as u32),
        Err(error) => reply.error(errno(&error)),
    };
    let len = data.len();
    let done = match disk.file.device.write_some(offset, data, Wait::No) {
        Ok(done) if done < len => done,
        written => return answer(written.map(drop), reply, len),
    };
    let (rest, offset) = (&data[done..], offset + done as u64);
    let (Some(room), Ok(mut copy)) = (disk.crew.room(rest.len()), allocate(rest.len())) else {
        return answer(disk.file.device.write(offset, rest), reply, len);
    };
    copy.copy_from_slice(rest);
    let device = Arc::clone(&disk.file.device);
    disk.crew.start(Box::new(move || {
        let written = device.write(offset, &copy);
        drop((device, copy));
        answer(written, reply, len);
        drop(room);
    }));
}

/// Makes a range read as zeros, as a hole or not: all of it, or nothing if it goes past the end of the disk.
fn zero_disk(disk: &Disk, offset: u64, len: u64, allocate: bool, reply: ReplyEmpty) {
    if offset.checked_add(len).is_none_or(|end| end > disk.file.device.size_bytes()) {
        return reply.error(Errno::EINVAL);
    }
    let answer = move |zeroed: uzram::Result<u64>, reply: ReplyEmpty| match zeroed {
        Ok(_) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    };
    // No page is cut in two, of which neither part would be freed.
    let at_once = len.min(ZERO_AT_ONCE_BYTES - offset % PAGE_SIZE as u64);
    let done = match disk.file.device.zero_some(offset, at_once, allocate, Wait::No) {
        Ok(done) if done < len => done,
        zeroed => return answer(zeroed, reply),
    };
    let (offset, len) = (offset + done, len - done);
    let Some(room) = disk.crew.room(0) else {
        return answer(disk.file.device.zero_some(offset, len, allocate, Wait::Yes), reply);
    };
    let device = Arc::clone(&disk.file.device);
    disk.crew.start(Box::new(move || {
        let zeroed = device.zero_some(offset, len, allocate, Wait::Yes);
        drop(device);
        answer(zeroed, reply);
        drop(room);
    }));
}

/// Where the next data or hole begins, lseek(2).
fn seek(device: &OpenDevice, offset: u64, for_data: bool) -> Result<u64, Errno> {
    let (mut at, end) = (offset, device.size_bytes());
    if at >= end {
        return Err(Errno::ENXIO);
    }
    while at < end {
        let extent = device.extent(at, end - at).map_err(|error| errno(&error))?;
        if (extent.state != PageState::Hole) == for_data {
            return Ok(at);
        }
        at += extent.len_bytes;
    }
    // There is a hole behind the end of every file.
    if for_data { Err(Errno::ENXIO) } else { Ok(end) }
}

impl Filesystem for Files {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Where the kernel has less to offer, it takes the nearest it has.
        let _ = config.set_max_write(MAX_IO_BYTES as u32);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        for capability in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // A file that is mapped shared has pages in the cache after all, which the kernel keeps the same as what
            // is read and written beside them (Linux 6.6; before that such a mapping is refused).
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

    /// A disk's size is its device's, and is changed there. As with a block device, opening it with `O_TRUNC` leaves
    /// it as it is; so does opening an attribute.
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
        // The kernel names the handle with ftruncate(2), not with open(2).
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
            // The page cache would hold everything twice, and need memory when there is none.
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
            Some(Some(Open::Disk(disk))) => read_disk(disk, offset, size as usize, reply),
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
            Some(Some(Open::Disk(disk))) => write_disk(disk, offset, data, reply),
            Some(Some(Open::Attribute(_, crew))) => self.write_attribute(ino.0, crew, offset, data, reply),
            Some(Some(Open::WarmUp)) => {
                let touched =
                    BUFFER.with_borrow_mut(|buffer| room_in(buffer, MAX_IO_BYTES).map(|room| room.fill(0)));
                // The other threads wait for this one, whatever became of its buffer.
                match (self.warm_up.arrive(), touched) {
                    (true, Ok(())) => reply.written(data.len() as u32),
                    (true, Err(errno)) => reply.error(errno),
                    (false, _) => reply.error(Errno::ETIMEDOUT),
                }
            }
            _ => reply.error(Errno::EBADF),
        }
    }

    /// Writes are stored, and seen by every reader, when they are answered. So there is nothing left to do and no order
    /// to keep, and with this answer the kernel does all of it without asking. It makes nothing last: contents are memory.
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
        let allocate = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => false,
            libc::FALLOC_FL_ZERO_RANGE => true,
            // Nothing can be promised about room for what is not known yet.
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        match self.handles.get(fh.0).as_deref() {
            Some(Some(Open::Disk(disk))) => zero_disk(disk, offset, length, allocate, reply),
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
            Some(Some(Open::Disk(disk))) => seek(&disk.file.device, offset, for_data),
            _ => Err(Errno::EBADF),
        };
        match found {
            // A disk has 16 TiB at most.
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

    /// Files come and go with devices, and not otherwise.
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

    /// None: the kernel asks no more after this answer.
    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}

impl Files {
    /// Sets an attribute to what is written to its file. Some take their time over it.
    fn write_attribute(&self, ino: u64, crew: &Crew, offset: u64, data: &[u8], reply: ReplyWrite) {
        let Some(Node::Attribute(device, attribute)) = self.tree.node(ino) else {
            return reply.error(Errno::ESTALE);
        };
        let text = str::from_utf8(data).ok().filter(|_| offset == 0 && data.len() <= MAX_TEXT_BYTES);
        let Some(value) = text.map(str::to_owned) else { return reply.error(Errno::EINVAL) };
        let len = data.len() as u32;
        let room = crew.room(value.len());
        let set = move || match set_attribute(&device, attribute, &value) {
            Ok(()) => reply.written(len),
            Err(errno) => reply.error(errno),
        };
        match room {
            Some(room) => crew.start(Box::new(move || {
                set();
                drop(room);
            })),
            None => set(),
        }
    }
}

fn set_attribute(device: &Device, attribute: &Attribute, value: &str) -> Result<(), Errno> {
    let (name, value) = (attribute.name, value.trim_end());
    match device.set(name, value) {
        Ok(()) => {
            tracing::info!(device = device.name(), attribute = name, value, "attribute set");
            Ok(())
        }
        Err(error) => {
            // A number is all that its writer is told.
            tracing::warn!(device = device.name(), attribute = name, value, %error, "attribute not set");
            Err(errno(&error))
        }
    }
}
