//! Dispatch of the kernel's requests by file.
//!
//! Requests for names, sizes and permissions are answered here; `disk` and `attribute` read and write
//! devices.
//!
//! A request may come a second time, after a process that carried it out died before its reply was written.
//! Most may simply be carried out again; opening finds the handle that was opened, and closing a handle twice
//! is nothing.

use std::sync::Arc;

use rustix::io::Errno;
use uzram::device::Device;
use uzram::units::PAGE_SIZE;

use super::channel::{Channel, Reply};
use super::connection::MountOptions;
use super::cpu_latency::CpuLatency;
use super::disk::{self, Disk, OpenText, errno};
use super::handles::{Handles, Open};
use super::ledger::{Ledger, OpenFileRecord};
use super::proto::opcode::*;
use super::proto::*;
use super::thread_buffer::{self, WarmUp, reply_from_buffer};
use super::tree::{Node, Tree};
use crate::Exports;
use crate::device_pool::DevicePools;

/// The size that an attribute's file shows, as in sysfs: its text is generated when it is read.
const ATTRIBUTE_BYTES: u64 = PAGE_SIZE as u64;
const STAT_BLOCK_BYTES: u64 = 512;
const MAX_NAME_BYTES: u32 = 255;

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
    /// Creates the files of `exports`, with the numbers and open handles that they have in the ledger.
    pub fn new(
        exports: Exports,
        options: &MountOptions,
        cpu_latency: Option<CpuLatency>,
        ledger: &Arc<Ledger>,
        pools: DevicePools,
    ) -> Self {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let tree = Tree::new(exports, Arc::clone(ledger));
        let handles = Handles::restore(Arc::clone(ledger), |file| {
            open_node(&tree, &pools, tree.node(file.ino)?, file.mode).ok()
        });
        let warm_up = WarmUp::new(options.threads);
        Files { tree, handles, pools, warm_up, max_io_bytes: options.max_io_bytes, cpu_latency, owner }
    }

    /// Finishes a request that a dead process received; `outcome` is the errno of its reply if that may have
    /// been sent. What changed something is only answered then, as that may have been changed again since;
    /// the rest may be carried out again.
    pub fn finish(&self, bytes: &[u8], outcome: Option<i32>, channel: &Arc<Channel>) {
        let Some(request) = Request::parse(bytes) else { return };
        let (opcode, unique) = (request.header.opcode, request.header.unique);
        let Some(errno) = outcome.filter(|_| matches!(opcode, FUSE_WRITE | FUSE_FALLOCATE | FUSE_OPEN))
        else {
            return self.carry_out(bytes, channel);
        };
        let reply = Reply::new(channel, unique);
        match opcode {
            FUSE_WRITE => {
                let size = request.write().map_or(0, |(write, _)| self.written_bytes(&write));
                reply.outcome(errno, bytes_of(&fuse_write_out { size, padding: 0 }));
            }
            FUSE_OPEN => match self.opened_before(unique) {
                // If the kernel refuses the reply, it had one, and the file is in use.
                Some(fh) => reply.message(&opened(fh)),
                // Opening failed, or the file was closed since: then nobody waits.
                None => reply.error(Errno::from_raw_os_error(errno.max(libc::EPERM))),
            },
            _ => reply.outcome(errno, &[]),
        }
    }

    /// Carries out a request, and replies to it if it is of a kind that waits for a reply. Ignores bytes that
    /// are no request.
    #[inline]
    pub fn carry_out(&self, bytes: &[u8], channel: &Arc<Channel>) {
        let Some(request) = Request::parse(bytes) else { return };
        let opcode = request.header.opcode;
        // Nothing waits for a reply to these.
        if matches!(opcode, FUSE_FORGET | FUSE_BATCH_FORGET | FUSE_INTERRUPT) {
            return;
        }
        let reply = Reply::new(channel, request.header.unique);
        match opcode {
            FUSE_READ => with(&request, reply, |read, reply| self.read(request.header.nodeid, read, reply)),
            FUSE_WRITE => match request.write() {
                Some((write, data)) => self.write(request.header.nodeid, &write, data, reply),
                None => reply.error(Errno::INVAL),
            },
            FUSE_FALLOCATE => with(&request, reply, |zero, reply| self.fallocate(zero, reply)),
            FUSE_LSEEK => with(&request, reply, |seek, reply| self.lseek(request.header.nodeid, seek, reply)),
            FUSE_LOOKUP => self.lookup(&request, reply),
            FUSE_GETATTR => self.getattr(request.header.nodeid, reply),
            FUSE_SETATTR => with(&request, reply, |set, reply| self.setattr(&request, set, reply)),
            FUSE_OPEN => with(&request, reply, |open, reply| self.open(&request, open, reply)),
            FUSE_RELEASE => with(&request, reply, |release: fuse_release_in, reply| {
                self.handles.close(release.fh);
                reply.ok();
            }),
            FUSE_OPENDIR => reply.message(&fuse_open_out::default()),
            FUSE_READDIR => with(&request, reply, |read, reply| self.readdir(&request, read, reply)),
            FUSE_RELEASEDIR | FUSE_DESTROY => reply.ok(),
            FUSE_STATFS => self.statfs(reply),
            // Files are created and removed only with devices. The errors are those of sysfs.
            FUSE_CREATE | FUSE_MKNOD => reply.error(Errno::ACCESS),
            FUSE_SYMLINK | FUSE_MKDIR | FUSE_UNLINK | FUSE_RMDIR | FUSE_RENAME | FUSE_LINK | FUSE_RENAME2 => {
                reply.error(Errno::PERM);
            }
            // Of a connection's first request there is no second.
            FUSE_INIT => reply.error(Errno::IO),
            // After this error the kernel does not send most of these again: it answers programs itself. A
            // write is stored and visible to every reader before its reply, so there is nothing to flush, and
            // nothing becomes durable: contents are memory. There are no extended attributes.
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn attr(&self, ino: u64, node: &Node) -> fuse_attr {
        let (size, allocated_bytes, mode) = match node {
            Node::Root | Node::Directory => (0, 0, 0o500),
            Node::Disk(device) => {
                let stats = device.counts();
                (stats.disksize_bytes, stats.orig_data_bytes, 0o600)
            }
            Node::Attribute(_, attribute) => {
                let mode = if attribute.readable() { 0o400 } else { 0 };
                // 0 as in debugfs, so that programs read to the end.
                let size = if attribute.is_long() { 0 } else { ATTRIBUTE_BYTES };
                (size, 0, if attribute.writable() { mode | 0o200 } else { mode })
            }
            Node::WarmUp => (self.max_io_bytes.into(), 0, 0o200),
        };
        let is_directory = matches!(node, Node::Root | Node::Directory);
        fuse_attr {
            ino,
            size,
            blocks: allocated_bytes / STAT_BLOCK_BYTES,
            mode: mode | if is_directory { libc::S_IFDIR } else { libc::S_IFREG },
            nlink: if is_directory { 2 } else { 1 },
            uid: self.owner.0,
            gid: self.owner.1,
            blksize: PAGE_SIZE as u32,
            ..fuse_attr::default()
        }
    }

    #[inline]
    fn request_came(&self) {
        if let Some(cpu_latency) = &self.cpu_latency {
            cpu_latency.request();
        }
    }

    /// The kernel may cache names and file attributes for no time at all: a device's size changes when it is
    /// reset, and a loop device would take the cached size.
    fn lookup(&self, request: &Request<'_>, reply: Reply) {
        let Some(name) = request.name() else { return reply.error(Errno::INVAL) };
        match self.tree.lookup(request.header.nodeid, name) {
            Some((nodeid, node)) => {
                let attr = self.attr(nodeid, &node);
                reply.message(&fuse_entry_out { nodeid, attr, ..fuse_entry_out::default() });
            }
            None => reply.error(Errno::NOENT),
        }
    }

    fn getattr(&self, ino: u64, reply: Reply) {
        match self.tree.node(ino) {
            Some(node) => {
                reply.message(&fuse_attr_out { attr: self.attr(ino, &node), ..fuse_attr_out::default() });
            }
            None => reply.error(Errno::STALE),
        }
    }

    /// Refuses to change anything: a disk's size is its device's. `O_TRUNC` is ignored, as for block devices
    /// and in sysfs.
    fn setattr(&self, request: &Request<'_>, set: fuse_setattr_in, reply: Reply) {
        let ino = request.header.nodeid;
        let Some(node) = self.tree.node(ino) else { return reply.error(Errno::STALE) };
        if set.valid & (FATTR_MODE | FATTR_UID | FATTR_GID) != 0 {
            return reply.error(Errno::PERM);
        }
        let attr = self.attr(ino, &node);
        let size = (set.valid & FATTR_SIZE != 0).then_some(set.size);
        // ftruncate(2) passes the handle, `O_TRUNC` of open(2) does not.
        let opens = size == Some(0) && set.valid & FATTR_FH == 0;
        match size {
            Some(size) if size != attr.size && !opens && matches!(node, Node::Disk(_)) => {
                reply.error(Errno::INVAL);
            }
            _ => reply.message(&fuse_attr_out { attr, ..fuse_attr_out::default() }),
        }
    }

    fn open(&self, request: &Request<'_>, open: fuse_open_in, reply: Reply) {
        let (ino, unique) = (request.header.nodeid, request.header.unique);
        let handle = match self.opened_before(unique) {
            Some(handle) => Ok(handle),
            None => self.open_new(ino, open.flags as i32 & libc::O_ACCMODE, unique),
        };
        match handle {
            Ok(fh) => {
                if !reply.message_taken(&opened(fh)) {
                    // Nobody will close it.
                    self.handles.close(fh);
                }
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// Returns the handle that the request opened in an earlier life, if it did and it was opened again in
    /// this one.
    fn opened_before(&self, unique: u64) -> Option<u64> {
        let handle = self.handles.opened_by(unique)?;
        if matches!(self.handles.get(handle)?.open, Some(Open::Lost)) {
            self.handles.close(handle);
            return None;
        }
        Some(handle)
    }

    fn open_new(&self, ino: u64, mode: i32, unique: u64) -> Result<u64, Errno> {
        let node = self.tree.node(ino).ok_or(Errno::STALE)?;
        let open = open_node(&self.tree, &self.pools, node, mode)?;
        self.handles.open(open, OpenFileRecord { ino, mode, unique }).ok_or(Errno::NFILE)
    }

    fn read(&self, ino: u64, read: fuse_read_in, reply: Reply) {
        self.request_came();
        // The kernel asks for no more.
        let len = read.size.min(self.max_io_bytes) as usize;
        match self.handles.get(read.fh).as_ref().and_then(|handle| handle.open.as_ref()) {
            Some(Open::Disk(disk)) => disk.read(read.offset, len, reply),
            Some(Open::Attribute(text, _)) => match self.tree.node(ino) {
                Some(Node::Attribute(device, attribute)) => reply_from_buffer(len, reply, |out, reply| {
                    match disk::read_attribute(&device, attribute, text, read.offset, out) {
                        Ok(len) => reply.data(&out[..len]),
                        Err(errno) => reply.error(errno),
                    }
                }),
                _ => reply.error(Errno::STALE),
            },
            _ => reply.error(Errno::BADF),
        }
    }

    fn write(&self, ino: u64, write: &fuse_write_in, data: &[u8], reply: Reply) {
        self.request_came();
        match self.handles.get(write.fh).as_ref().and_then(|handle| handle.open.as_ref()) {
            Some(Open::Disk(disk)) => disk.write(write.offset, data, reply),
            Some(Open::Attribute(_, pool)) => match self.tree.node(ino) {
                Some(Node::Attribute(device, attribute)) => {
                    disk::write_attribute(self.tree.exports(), device, attribute, pool, data, reply)
                }
                _ => reply.error(Errno::STALE),
            },
            Some(Open::WarmUp) => {
                let touched = thread_buffer::touch(data.len());
                // Arrive even if this thread got no buffer: the other threads wait for it.
                match (self.warm_up.arrive(), touched) {
                    (true, Ok(())) => reply.message(&fuse_write_out { size: write.size, padding: 0 }),
                    (true, Err(errno)) => reply.error(errno),
                    (false, _) => reply.error(Errno::TIMEDOUT),
                }
            }
            _ => reply.error(Errno::BADF),
        }
    }

    /// Returns how many bytes a write has written that did not fail.
    fn written_bytes(&self, write: &fuse_write_in) -> u32 {
        match self.handles.get(write.fh).as_ref().and_then(|handle| handle.open.as_ref()) {
            Some(Open::Disk(disk)) => disk.before_end(write.offset, write.size.into()) as u32,
            _ => write.size,
        }
    }

    fn fallocate(&self, zero: fuse_fallocate_in, reply: Reply) {
        let keeps_size = zero.mode as i32 & libc::FALLOC_FL_KEEP_SIZE != 0;
        let allocated = match zero.mode as i32 & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => false,
            libc::FALLOC_FL_ZERO_RANGE => true,
            // Space cannot be preallocated: it depends on the contents.
            _ => return reply.error(Errno::OPNOTSUPP),
        };
        match self.handles.get(zero.fh).as_ref().and_then(|handle| handle.open.as_ref()) {
            // The file would grow.
            Some(Open::Disk(disk))
                if !keeps_size && disk.before_end(zero.offset, zero.length) < zero.length =>
            {
                reply.error(Errno::INVAL);
            }
            Some(Open::Disk(disk)) => disk.zero(zero.offset, zero.length, allocated, reply),
            Some(_) => reply.error(Errno::OPNOTSUPP),
            None => reply.error(Errno::BADF),
        }
    }

    fn lseek(&self, ino: u64, seek: fuse_lseek_in, reply: Reply) {
        let for_data = match seek.whence as i32 {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return reply.error(Errno::INVAL),
        };
        let found = match self.handles.get(seek.fh).as_ref().and_then(|handle| handle.open.as_ref()) {
            Some(Open::Disk(disk)) => disk.seek(seek.offset, for_data),
            // Other files are all data, up to the size that they show.
            Some(_) => match self.tree.node(ino).map(|node| self.attr(ino, &node).size) {
                Some(size) if seek.offset >= size => Err(Errno::NXIO),
                Some(size) => Ok(if for_data { seek.offset } else { size }),
                None => Err(Errno::STALE),
            },
            None => Err(Errno::BADF),
        };
        match found {
            Ok(offset) => reply.message(&fuse_lseek_out { offset }),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, request: &Request<'_>, read: fuse_read_in, reply: Reply) {
        let entries = self.tree.entries(request.header.nodeid);
        let from = usize::try_from(read.offset).unwrap_or(usize::MAX);
        let mut listed = Entries::new(read.size.min(self.max_io_bytes) as usize);
        for (at, entry) in entries.iter().enumerate().skip(from) {
            let kind = if entry.is_directory { libc::DT_DIR } else { libc::DT_REG };
            if !listed.add(entry.ino, at as u64 + 1, kind, &entry.name) {
                break;
            }
        }
        reply.data(listed.as_bytes());
    }

    fn statfs(&self, reply: Reply) {
        let devices = self.tree.exports().devices();
        let pages = |bytes: fn(&Device) -> u64| {
            devices.iter().map(|device| bytes(device)).sum::<u64>() / PAGE_SIZE as u64
        };
        let blocks = pages(|device| device.size_bytes());
        let free = blocks.saturating_sub(pages(|device| device.counts().orig_data_bytes));
        reply.message(&fuse_statfs_out {
            blocks,
            bfree: free,
            bavail: free,
            files: devices.len() as u64,
            bsize: PAGE_SIZE as u32,
            namelen: MAX_NAME_BYTES,
            frsize: PAGE_SIZE as u32,
            ..fuse_statfs_out::default()
        });
    }
}

/// Carries out a request by its message, or refuses one that is too short.
#[inline]
fn with<T: Message>(request: &Request<'_>, reply: Reply, carry_out: impl FnOnce(T, Reply)) {
    match request.message() {
        Some(message) => carry_out(message, reply),
        None => reply.error(Errno::INVAL),
    }
}

/// Returns the reply to opening a file, which has the handle `fh`.
fn opened(fh: u64) -> fuse_open_out {
    // Bypass the page cache, which would hold a second copy, and need memory when there is none.
    fuse_open_out { fh, open_flags: FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES, backing_id: 0 }
}

/// Opens a file; `mode` is `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
fn open_node(tree: &Tree, pools: &DevicePools, node: Node, mode: i32) -> Result<Open, Errno> {
    let (is_read, is_written) = (mode != libc::O_WRONLY, mode != libc::O_RDONLY);
    match node {
        // O_ACCMODE itself is a mode of Linux, for ioctl(2) only.
        _ if mode == libc::O_ACCMODE => Err(Errno::INVAL),
        Node::Disk(device) => {
            let file = tree.exports().open_file(&device, is_written).map_err(|error| errno(&error))?;
            Ok(Open::Disk(Disk { file, pool: pools.pool(&device) }))
        }
        // As in sysfs, the attribute's permissions also apply to root.
        Node::Attribute(_, attribute)
            if is_read && !attribute.readable() || is_written && !attribute.writable() =>
        {
            Err(Errno::ACCESS)
        }
        Node::Attribute(device, _) => Ok(Open::Attribute(OpenText::default(), pools.pool(&device))),
        Node::WarmUp => Ok(Open::WarmUp),
        Node::Root | Node::Directory => Err(Errno::ISDIR),
    }
}
