//! Where pages go that do not fit in memory compressed: files without names, which a child and its parent
//! share.
//!
//! A child (fork(2)) has its parent's store, which says what lies where in the file. So a file is *shared*
//! from the fork on: both write to files of their own, at the same offsets, and a table says which file has a
//! block. The parent goes back to an old file when all that shared it are gone, which a pipe tells: they hold
//! its end for as long as they live, and until they execute another program.
//!
//! The child's pager opens the files, and then the pipe's end, through the descriptors of its parent's in
//! `/proc`, and writes a byte to the pipe. Until that comes the parent keeps the end itself, and all files
//! open; but not for ever ([`PATIENCE`]): a child that comes later finds no pipe, and cannot go on.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use uzram::backing::{Blocks, Buffer, Direction, Transfer};
use uzram::mem::{Entry, Table};
use uzram::sync::Arc;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result, check_file_size};

use crate::system::{lock, read, spawn, write};

/// The most files. Of the last one the blocks of another become part.
const MOST_FILES: usize = 8;
const BLOCK: u64 = PAGE_SIZE as u64;
/// How long a child may take to open the files.
const PATIENCE: Duration = Duration::from_secs(30);

/// Which file has a block: 0 for none, otherwise its place in the list, plus one.
#[derive(Default)]
struct Holder(AtomicU8);

// SAFETY: a zeroed atomic integer is its default; dropping one does nothing.
unsafe impl Entry for Holder {}

pub(crate) struct Spill {
    dir: PathBuf,
    len_bytes: u64,
    holders: Table<Holder>,
    /// The blocks that each file has.
    blocks: [AtomicU64; MOST_FILES],
    files: RwLock<Files>,
    /// To the thread. Who starts a transfer waits for it, and has ended when that does.
    queue: Mutex<Option<Sender<Transfer>>>,
}

/// The thread that carries out transfers which nobody waits for. Dropping this ends it.
pub(crate) struct SpillThread {
    spill: Arc<Spill>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SpillThread {
    fn drop(&mut self) {
        *lock(&self.spill.queue) = None;
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

#[derive(Default)]
struct Files {
    files: [Option<File>; MOST_FILES],
    /// Which of them are the parent's: these are never written to.
    is_parents: [bool; MOST_FILES],
    /// The file that is written to. Nobody shares it.
    own: Option<usize>,
    sharers: Vec<Sharer>,
    /// Some child shares files of which it is not known when it is gone.
    is_shared_for_ever: bool,
}

/// A child that shares files.
struct Sharer {
    /// A pipe, which hangs up when the child is gone.
    pipe: OwnedFd,
    /// Its other end, until the child has opened that, and for how long at most.
    opens: Option<(OwnedFd, Instant)>,
}

/// What passes from before a fork until after it: a pipe, to read and to write.
pub(crate) type Sharing = (OwnedFd, OwnedFd);

impl Spill {
    /// Makes a file of up to so many bytes in a folder. Errors: `Io`: there can be no file; `NoMemory`.
    pub(crate) fn new(dir: &Path, len_bytes: u64) -> Result<Arc<Spill>> {
        let len_bytes = len_bytes.next_multiple_of(BLOCK);
        let holders = Table::new((len_bytes / BLOCK) as usize)?;
        // Now, so that what is wrong with the folder is said at once.
        let mut files = Files { own: Some(0), ..Files::default() };
        files.files[0] = Some(unnamed_file(dir)?);
        let (files, blocks, queue) = (RwLock::new(files), Default::default(), Mutex::default());
        Ok(Arc::new(Spill { dir: dir.to_owned(), len_bytes, holders, blocks, files, queue }))
    }

    /// Starts the thread. Errors: `NoMemory`.
    pub(crate) fn start_thread(self: &Arc<Self>) -> Result<SpillThread> {
        let (queue, transfers) = channel();
        let spill = Arc::clone(self);
        let thread =
            spawn("uzram-pager-spill", move || transfers.iter().for_each(|transfer| spill.finish(transfer)))?;
        *lock(&self.queue) = Some(queue);
        Ok(SpillThread { spill: Arc::clone(self), thread: Some(thread) })
    }

    fn finish(&self, transfer: Transfer) {
        let Transfer { direction, offset, len_bytes, buffer, token, completion, .. } = transfer;
        let (buffer, result) = self.carry_out(direction, offset, len_bytes, buffer);
        completion.done(token, buffer, result);
    }

    fn holder(&self, block: u64) -> usize {
        self.holders[block as usize].0.load(Ordering::Acquire).into()
    }

    fn count(&self, file: usize) -> u64 {
        self.blocks[file].load(Ordering::Acquire)
    }

    fn set_holder(&self, block: u64, holder: usize) {
        let before = usize::from(self.holders[block as usize].0.swap(holder as u8, Ordering::AcqRel));
        if before != holder {
            for (file, change) in [(before, u64::MAX), (holder, 1)] {
                if file > 0 {
                    self.blocks[file - 1].fetch_add(change, Ordering::AcqRel);
                }
            }
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let files = read(&self.files);
        let mut done = 0;
        while done < out.len() {
            let first = (offset + done as u64) / BLOCK;
            let holder = self.holder(first);
            let rest = (out.len() - done) as u64 / BLOCK;
            let blocks = (1..rest).take_while(|nth| self.holder(first + nth) == holder).count() + 1;
            let part = &mut out[done..][..blocks * PAGE_SIZE];
            match holder.checked_sub(1).and_then(|nth| files.files[nth].as_ref()) {
                Some(file) => file.read_exact_at(part, first * BLOCK).map_err(|error| failed(&error))?,
                None => part.fill(0),
            }
            done += part.len();
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // A write beyond RLIMIT_FSIZE, which may be lowered at any time, leaves a SIGXFSZ pending.
        check_file_size("a spill file", offset + bytes.len() as u64)?;
        loop {
            let files = read(&self.files);
            if let Some((nth, file)) = files.own.and_then(|nth| Some((nth, files.files[nth].as_ref()?))) {
                file.write_all_at(bytes, offset).map_err(|error| failed(&error))?;
                for block in offset / BLOCK..(offset + bytes.len() as u64) / BLOCK {
                    self.set_holder(block, nth + 1);
                }
                return Ok(());
            }
            drop(files);
            self.own_a_file()?;
        }
    }

    /// Finds a file to write to: one that nobody shares any more, or a new one.
    fn own_a_file(&self) -> Result<()> {
        let mut files = write(&self.files);
        if files.own.is_some() {
            return Ok(());
        }
        files.look_for_sharers();
        if !files.is_shared() {
            // All are this process's own again.
            let is_own = |nth: &usize| files.files[*nth].is_some() && !files.is_parents[*nth];
            files.own = (0..MOST_FILES).filter(is_own).max_by_key(|nth| self.count(*nth));
        }
        self.close_empty(&mut files);
        if files.own.is_some() {
            return Ok(());
        }
        let Some(free) = files.free() else {
            return Err(Error::new(ErrorKind::NoSpace, "too many children share the spill file")
                .with_setting("spill"));
        };
        files.files[free] = Some(unnamed_file(&self.dir)?);
        (files.is_parents[free], files.own) = (false, Some(free));
        if files.free().is_none() {
            self.empty_one(&mut files, free)?;
        }
        Ok(())
    }

    /// Makes room for another file: copies the blocks of the one that has the fewest to its own.
    fn empty_one(&self, files: &mut Files, own: usize) -> Result<()> {
        let others = (0..MOST_FILES).filter(|nth| *nth != own);
        let Some(fewest) = others.min_by_key(|nth| self.count(*nth)) else { return Ok(()) };
        if let (Some(from), Some(to)) = (&files.files[fewest], &files.files[own]) {
            let mut contents = [0; PAGE_SIZE];
            for block in (0..self.len_bytes / BLOCK).filter(|block| self.holder(*block) == fewest + 1) {
                let copied = from
                    .read_exact_at(&mut contents, block * BLOCK)
                    .and_then(|()| to.write_all_at(&contents, block * BLOCK));
                copied.map_err(|error| failed(&error))?;
                self.set_holder(block, own + 1);
            }
        }
        self.close_empty(files);
        Ok(())
    }

    /// Closes files that have nothing, but the one that is written to.
    fn close_empty(&self, files: &mut Files) {
        // A child finds them by their descriptors.
        if files.is_awaited() {
            return;
        }
        for nth in (0..MOST_FILES).filter(|nth| Some(*nth) != files.own && self.count(*nth) == 0) {
            files.files[nth] = None;
        }
    }

    /// Prepares for a fork. The thread has ended.
    pub(crate) fn before_fork(&self) -> Option<Sharing> {
        pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()
    }

    /// Goes on in the parent of a child.
    pub(crate) fn after_fork(&self, sharing: Option<Sharing>) {
        let mut files = write(&self.files);
        match sharing {
            Some((pipe, end)) => {
                files.sharers.push(Sharer { pipe, opens: Some((end, Instant::now() + PATIENCE)) });
            }
            None => files.is_shared_for_ever = true,
        }
        files.look_for_sharers();
        // A file that holds nothing is no loss to the child.
        if files.is_shared() && files.own.is_some_and(|own| self.count(own) > 0) {
            files.own = None;
        }
    }

    /// Returns whether a child has not opened the files yet.
    pub(crate) fn is_awaited(&self) -> bool {
        let mut files = write(&self.files);
        files.look_for_sharers();
        files.is_awaited()
    }

    /// Goes on in a child. Descriptors are the parent's, and keep their numbers. Errors: `Io`.
    #[cfg(feature = "image")]
    pub(crate) fn after_fork_in_child(&self, sharing: Option<Sharing>, parent: i32) -> Result<()> {
        use std::mem::ManuallyDrop;
        use std::os::fd::{AsRawFd, BorrowedFd};
        let renew = |fd: BorrowedFd<'_>, flags| {
            let path = format!("/proc/{parent}/fd/{}", fd.as_raw_fd());
            let new = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
            crate::system::renew(fd, new.map_err(|error| failed(&error.into()))?)
        };
        let mut files = write(&self.files);
        files.files.iter().flatten().try_for_each(|file| renew(file.as_fd(), OFlags::RDWR))?;
        if let Some((pipe, end)) = sharing {
            // One number is not in use here, and the other is for as long as this memory is.
            let (_, end) = (ManuallyDrop::new(pipe), ManuallyDrop::new(end));
            renew(end.as_fd(), OFlags::WRONLY)?;
            rustix::io::write(&*end, &[1]).map_err(|error| failed(&error.into()))?;
        }
        // The parent's other children do not matter here: nothing is written to what they share.
        std::mem::forget(std::mem::take(&mut files.sharers));
        (files.is_parents, files.own, files.is_shared_for_ever) = ([true; MOST_FILES], None, false);
        Ok(())
    }
}

impl Files {
    fn free(&self) -> Option<usize> {
        (0..MOST_FILES).find(|nth| self.files[*nth].is_none())
    }

    fn is_shared(&self) -> bool {
        self.is_shared_for_ever || !self.sharers.is_empty()
    }

    fn is_awaited(&self) -> bool {
        self.sharers.iter().any(|sharer| sharer.opens.is_some())
    }

    /// Forgets children that are gone.
    fn look_for_sharers(&mut self) {
        self.sharers.retain_mut(|sharer| {
            let has_opened = rustix::io::read(&sharer.pipe, &mut [0; 1]) == Ok(1);
            if sharer.opens.as_ref().is_some_and(|(_, until)| has_opened || Instant::now() > *until) {
                sharer.opens = None;
            }
            let mut fds = [PollFd::new(&sharer.pipe, PollFlags::empty())];
            let is_read = poll(&mut fds, Some(&Timespec::default())).is_ok();
            // All who hold the other end are gone.
            !is_read || !fds[0].revents().contains(PollFlags::HUP)
        });
    }
}

fn failed(error: &std::io::Error) -> Error {
    let kind = match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("the spill file: {error}")).with_setting("spill")
}

/// Makes a file without a name, which is gone when nobody has it open. Errors: `Io`.
fn unnamed_file(dir: &Path) -> Result<File> {
    let failed = |error: Errno| {
        let what = format!("no spill file in {}: {error}", dir.display());
        Error::new(ErrorKind::Io, what).with_setting("spill")
    };
    let mode = Mode::RUSR | Mode::WUSR;
    let fd = match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        // A file system without such files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => named_file(dir, mode).map_err(failed)?,
        fd => fd.map_err(failed)?,
    };
    Ok(File::from(fd))
}

/// Makes a file with a name that nobody knows, and removes the name at once.
fn named_file(dir: &Path, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let dir = rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let name = format!(".uzram-{:032x}", u128::from_ne_bytes(random));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(&dir, &name, flags, mode)?;
    rustix::fs::unlinkat(&dir, &name, rustix::fs::AtFlags::empty())?;
    Ok(file)
}

impl Blocks for Spill {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn block_bytes(&self) -> usize {
        PAGE_SIZE
    }

    fn start(&self, transfer: Transfer) {
        let queued = match &*lock(&self.queue) {
            Some(queue) => queue.send(transfer).map_err(|refused| refused.0),
            None => Err(transfer),
        };
        // Without the thread, which does not run while the process forks.
        let _ = queued.map_err(|transfer| self.finish(transfer));
    }

    fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        mut buffer: Buffer,
    ) -> (Buffer, Result<()>) {
        debug_assert!(offset.is_multiple_of(BLOCK) && len_bytes.is_multiple_of(PAGE_SIZE));
        let bytes = &mut buffer[..len_bytes];
        // In the image, system calls fail with EFAULT where no thread has touched (`image/own.rs`).
        bytes.iter().step_by(PAGE_SIZE).for_each(|byte| _ = std::hint::black_box(*byte));
        let result = match direction {
            Direction::Read => self.read(offset, bytes),
            Direction::Write => self.write(offset, bytes),
        };
        (buffer, result)
    }

    fn discard(&self, offset: u64, len_bytes: u64) {
        let files = read(&self.files);
        let (first, end) = (offset.div_ceil(BLOCK), (offset + len_bytes) / BLOCK);
        (first..end).for_each(|block| self.set_holder(block, 0));
        if let Some(file) = files.own.and_then(|own| files.files[own].as_ref()).filter(|_| first < end) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // A file system that cannot do it keeps the bytes.
            let _ = rustix::fs::fallocate(file.as_fd(), hole, first * BLOCK, (end - first) * BLOCK);
        }
    }
}

#[cfg(test)]
mod tests {
    use uzram::backing::Buffers;
    use uzram::random::Random;

    use super::*;

    const BLOCKS: u64 = 64;

    /// A child that has opened the files, and the end of a pipe with them.
    struct Child {
        files: [Option<File>; MOST_FILES],
        /// Of each block, who has it, and what it should be.
        blocks: Vec<(usize, Option<u8>)>,
        _pipe: OwnedFd,
    }

    impl Child {
        fn start(spill: &Spill, versions: &[Option<u8>]) -> Child {
            let sharing = spill.before_fork().unwrap();
            let pipe = rustix::io::dup(&sharing.1).unwrap();
            spill.after_fork(Some(sharing));
            assert_eq!(rustix::io::write(&pipe, &[1]), Ok(1));
            let files = &spill.files.read().unwrap().files;
            let files = files.each_ref().map(|file| file.as_ref().map(|file| file.try_clone().unwrap()));
            let holders = (0..BLOCKS).map(|block| spill.holder(block));
            Child { files, blocks: holders.zip(versions.iter().copied()).collect(), _pipe: pipe }
        }

        fn check(&self) {
            for (block, (holder, version)) in self.blocks.iter().enumerate() {
                let mut contents = [0; PAGE_SIZE];
                if *holder > 0 {
                    let file = self.files[holder - 1].as_ref().unwrap();
                    file.read_exact_at(&mut contents, block as u64 * BLOCK).unwrap();
                }
                expect(&contents, &[*version]);
            }
        }
    }

    /// Checks the versions of blocks; `None` if anything may be read.
    #[track_caller]
    fn expect(contents: &[u8], versions: &[Option<u8>]) {
        for (block, version) in contents.chunks(PAGE_SIZE).zip(versions) {
            let is_right = version.is_none_or(|version| block.iter().all(|byte| *byte == version));
            assert!(is_right, "{} instead of {version:?}", block[0]);
        }
    }

    #[test]
    fn random_transfers_and_children_agree_with_a_model() {
        let dir = tempfile::tempdir().unwrap();
        for seed in 0..20 {
            println!("seed {seed}");
            let mut random = Random::new(seed);
            let spill = Spill::new(dir.path(), BLOCKS * BLOCK).unwrap();
            let buffers = Buffers::new(2, 8 * PAGE_SIZE).unwrap();
            let (mut versions, mut children) = ([Some(0); BLOCKS as usize], Vec::new());
            for _ in 0..300 {
                let (first, count) = (random.below_u64(BLOCKS - 8), 1 + random.below(8));
                let (offset, len) = (first * BLOCK, count * PAGE_SIZE);
                let part = &mut versions[first as usize..][..count];
                let mut buffer = buffers.take().unwrap();
                match random.below(8) {
                    0 => {
                        spill.discard(offset, len as u64);
                        part.fill(None);
                    }
                    1 if children.len() < 4 => children.push(Child::start(&spill, &versions)),
                    2 if !children.is_empty() => {
                        children.swap_remove(random.below(children.len())).check();
                    }
                    3 | 4 => {
                        let version = random.next() as u8;
                        buffer[..len].fill(version);
                        spill.carry_out(Direction::Write, offset, len, buffer).1.unwrap();
                        part.fill(Some(version));
                    }
                    _ => {
                        let (buffer, result) = spill.carry_out(Direction::Read, offset, len, buffer);
                        result.unwrap();
                        expect(&buffer[..len], part);
                    }
                }
            }
            children.iter().for_each(Child::check);
            let all: u64 = spill.blocks.iter().map(|blocks| blocks.load(Ordering::Relaxed)).sum();
            let held = (0..BLOCKS).filter(|block| spill.holder(*block) > 0).count();
            assert_eq!(all, held as u64);
        }
    }

    #[test]
    fn files_have_no_names() {
        let dir = tempfile::tempdir().unwrap();
        let named = named_file(dir.path(), Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(rustix::fs::fstat(&named).unwrap().st_mode & 0o777, 0o600);
        assert!(Spill::new(&dir.path().join("none"), BLOCK).is_err());
    }
}
