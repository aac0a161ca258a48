//! Where pages go that do not fit in memory compressed: files without names, which a child and its parent
//! share.
//!
//! A child (fork(2)) has its parent's store, which says what lies where in the file. Neither may write there
//! any more what the other still reads. So a file is *shared* from the fork on: both write to files of their
//! own, at the same offsets, and a table says which file has a block. The parent goes back to an old file
//! when all that shared it are gone, which a pipe tells: they hold its end for as long as they live, and
//! until they execute another program.
//!
//! Files are sparse: their size is only a bound. A child that executes another program at once, as most do,
//! costs a pipe.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, RwLock};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use uzram::backing::{Blocks, Buffer, Direction, Transfer};
use uzram::mem::{Entry, Table};
use uzram::sync::Arc;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result, check_file_size};

use crate::core::{lock, spawn};
use crate::high;

/// The most files. Of the last one the blocks of another become part.
const MOST_FILES: usize = 8;
const BLOCK: u64 = PAGE_SIZE as u64;

/// Which file has a block: 0 for none, otherwise its place in the list, plus one.
#[derive(Default)]
struct Holder(AtomicU8);

// SAFETY: a zeroed atomic integer is its default; dropping one does nothing.
unsafe impl Entry for Holder {}

/// See the [module's documentation](self).
pub(crate) struct Spill {
    dir: PathBuf,
    len_bytes: u64,
    holders: Table<Holder>,
    /// The blocks that each file has.
    blocks: [AtomicU64; MOST_FILES],
    files: RwLock<Files>,
    queue: Mutex<VecDeque<Transfer>>,
    queued: Condvar,
    ends: AtomicBool,
}

/// The thread that carries out transfers which nobody waits for. Dropping this ends it.
pub(crate) struct SpillThread {
    spill: Arc<Spill>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SpillThread {
    fn drop(&mut self) {
        self.spill.ends.store(true, Ordering::Relaxed);
        // Under the lock, so that the thread sees it before it waits.
        drop(lock(&self.spill.queue));
        self.spill.queued.notify_all();
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
    /// A pipe's end for each child that shares files: it hangs up when the child is gone.
    sharers: Vec<OwnedFd>,
    /// Some child shares files of which it is not known when it is gone.
    is_shared_for_ever: bool,
}

/// What passes from before a fork until after it.
pub(crate) struct Sharing {
    parent_end: OwnedFd,
    child_end: OwnedFd,
}

impl Spill {
    /// Makes a file of up to so many bytes in a folder. Errors: `Io`: there can be no file; `NoMemory`.
    pub(crate) fn new(dir: &Path, len_bytes: u64) -> Result<Arc<Spill>> {
        let len_bytes = len_bytes.next_multiple_of(BLOCK);
        let spill = Arc::new(Spill {
            dir: dir.to_owned(),
            len_bytes,
            holders: Table::new((len_bytes / BLOCK) as usize)?,
            blocks: Default::default(),
            files: RwLock::default(),
            queue: Mutex::default(),
            queued: Condvar::new(),
            ends: AtomicBool::new(false),
        });
        // Now, so that what is wrong with the folder is said at once.
        let mut files = spill.files.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        files.files[0] = Some(unnamed_file(dir)?);
        files.own = Some(0);
        drop(files);
        Ok(spill)
    }

    /// Starts the thread. Errors: `NoMemory`.
    pub(crate) fn start_thread(self: &Arc<Self>) -> Result<SpillThread> {
        let spill = Arc::clone(self);
        self.ends.store(false, Ordering::Relaxed);
        let thread = spawn("uzram-pager-spill", move || spill.work())?;
        Ok(SpillThread { spill: Arc::clone(self), thread: Some(thread) })
    }

    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let Some(transfer) = queue.pop_front() else {
                if self.ends.load(Ordering::Relaxed) {
                    return;
                }
                queue = self.queued.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let Transfer { direction, offset, len_bytes, buffer, token, completion, .. } = transfer;
            let (buffer, result) = self.carry_out(direction, offset, len_bytes, buffer);
            completion.done(token, buffer, result);
            queue = lock(&self.queue);
        }
    }

    fn holder(&self, block: u64) -> usize {
        self.holders[block as usize].0.load(Ordering::Acquire).into()
    }

    /// Notes that a file has a block, or none, and returns the one that had it.
    fn set_holder(&self, block: u64, holder: usize) -> usize {
        let before = usize::from(self.holders[block as usize].0.swap(holder as u8, Ordering::AcqRel));
        if before != holder {
            for (file, change) in [(before, u64::MAX), (holder, 1)] {
                if file > 0 {
                    self.blocks[file - 1].fetch_add(change, Ordering::AcqRel);
                }
            }
        }
        before
    }

    fn check(&self, offset: u64, len_bytes: usize, room: usize) -> Result<()> {
        let is_whole = offset.is_multiple_of(BLOCK) && (len_bytes as u64).is_multiple_of(BLOCK);
        if len_bytes == 0 || len_bytes > room || !is_whole {
            return Err(Error::invalid("a transfer of parts of blocks, or of more bytes than there are"));
        }
        if offset.checked_add(len_bytes as u64).is_none_or(|end| end > self.len_bytes) {
            return Err(Error::new(ErrorKind::OutOfRange, "a transfer beyond the end of the spill file"));
        }
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let files = self.files.read().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        // A write beyond RLIMIT_FSIZE leaves a SIGXFSZ pending for this thread. The program may lower that
        // limit at any time.
        check_file_size("a spill file", offset + bytes.len() as u64)?;
        loop {
            let files = self.files.read().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        let mut files = self.files.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if files.own.is_some() {
            return Ok(());
        }
        files.look_for_sharers();
        if !files.is_shared() {
            // All are this process's own again. Those that have nothing left are closed.
            let most = |nth: &usize| self.blocks[*nth].load(Ordering::Acquire);
            let is_own = |nth: &usize| files.files[*nth].is_some() && !files.is_parents[*nth];
            let kept = (0..MOST_FILES).filter(is_own).max_by_key(most);
            self.close_empty(&mut files, kept);
            files.own = kept;
        }
        if files.own.is_some() {
            return Ok(());
        }
        self.close_empty(&mut files, None);
        let Some(free) = files.free() else {
            return Err(Error::new(ErrorKind::NoSpace, "too many children share the spill file")
                .with_setting("spill"));
        };
        files.files[free] = Some(unnamed_file(&self.dir)?);
        (files.is_parents[free], files.own) = (false, Some(free));
        if files.free().is_none() {
            self.empty_one(&mut files)?;
        }
        Ok(())
    }

    /// Copies the blocks of the file that has the fewest to the one that is written to, so that there is room
    /// for another file.
    fn empty_one(&self, files: &mut Files) -> Result<()> {
        let Some(own) = files.own else { return Ok(()) };
        let has = |nth: &usize| self.blocks[*nth].load(Ordering::Acquire);
        let Some(fewest) = (0..MOST_FILES).filter(|nth| *nth != own).min_by_key(has) else { return Ok(()) };
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
        self.close_empty(files, Some(own));
        Ok(())
    }

    fn close_empty(&self, files: &mut Files, but: Option<usize>) {
        for nth in (0..MOST_FILES).filter(|nth| Some(*nth) != but) {
            if self.blocks[nth].load(Ordering::Acquire) == 0
                && let Some(file) = files.files[nth].take()
            {
                high::close(file.into());
            }
        }
    }

    /// Prepares for a fork. The thread has ended.
    pub(crate) fn before_fork(&self) -> Option<Sharing> {
        let (parent_end, child_end) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        Some(Sharing { parent_end: high::keep(parent_end), child_end: high::keep(child_end) })
    }

    /// Goes on in the parent, of a child if there is one.
    pub(crate) fn after_fork(&self, sharing: Option<Sharing>) {
        let mut files = self.files.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        match sharing {
            Some(Sharing { parent_end, child_end }) => {
                high::close(child_end);
                files.sharers.push(parent_end);
            }
            None => files.is_shared_for_ever = true,
        }
        files.look_for_sharers();
        // A file that holds nothing is no loss to the child.
        if files.is_shared() && files.own.is_some_and(|own| self.blocks[own].load(Ordering::Acquire) > 0) {
            files.own = None;
        }
    }

    /// Goes on in the child: all files are its parent's, too. Its thread must be started again.
    pub(crate) fn after_fork_in_child(&self, sharing: Option<Sharing>) {
        let mut files = self.files.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(Sharing { parent_end, child_end }) = sharing {
            high::close(parent_end);
            // Open until this process ends, or executes another program.
            std::mem::forget(child_end);
        }
        // The parent's other children do not matter here: nothing is written to what they share.
        std::mem::take(&mut files.sharers).into_iter().for_each(high::close);
        (files.is_parents, files.own, files.is_shared_for_ever) = ([true; MOST_FILES], None, false);
    }
}

impl Files {
    /// Returns a place for another file.
    fn free(&self) -> Option<usize> {
        (0..MOST_FILES).find(|nth| self.files[*nth].is_none())
    }

    fn is_shared(&self) -> bool {
        self.is_shared_for_ever || !self.sharers.is_empty()
    }

    /// Forgets children that are gone.
    fn look_for_sharers(&mut self) {
        for pipe in std::mem::take(&mut self.sharers) {
            if is_hung_up(&pipe) {
                high::close(pipe);
            } else {
                self.sharers.push(pipe);
            }
        }
    }
}

/// Returns whether all who hold the other end of a pipe are gone.
fn is_hung_up(pipe: &OwnedFd) -> bool {
    let mut poll_fd = [PollFd::new(pipe, PollFlags::empty())];
    poll(&mut poll_fd, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|count| count > 0)
        && poll_fd[0].revents().contains(PollFlags::HUP)
}

fn failed(error: &std::io::Error) -> Error {
    let kind = match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("the spill file: {error}")).with_setting("spill")
}

/// Makes a file without a name, which is gone when nobody has it open. Errors: `Io`.
pub(crate) fn unnamed_file(dir: &Path) -> Result<File> {
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
    Ok(File::from(high::keep(fd)))
}

/// Makes a file with a name that nobody knows, and removes the name at once.
fn named_file(dir: &Path, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let dir = rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    loop {
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!(".uzram-{:032x}", u128::from_ne_bytes(random));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(&dir, &name, flags, mode) {
            Err(Errno::EXIST) => {}
            fd => {
                let fd = fd?;
                rustix::fs::unlinkat(&dir, &name, rustix::fs::AtFlags::empty())?;
                return Ok(fd);
            }
        }
    }
}

impl Blocks for Spill {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn block_bytes(&self) -> usize {
        PAGE_SIZE
    }

    fn start(&self, transfer: Transfer) {
        lock(&self.queue).push_back(transfer);
        self.queued.notify_one();
    }

    fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        mut buffer: Buffer,
    ) -> (Buffer, Result<()>) {
        let result = self.check(offset, len_bytes, buffer.len()).and_then(|()| match direction {
            Direction::Read => self.read(offset, &mut buffer[..len_bytes]),
            Direction::Write => self.write(offset, &buffer[..len_bytes]),
        });
        (buffer, result)
    }

    fn discard(&self, offset: u64, len_bytes: u64) {
        let Some(end) = offset.checked_add(len_bytes).filter(|end| *end <= self.len_bytes) else { return };
        let files = self.files.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (first, end) = (offset.div_ceil(BLOCK), end / BLOCK);
        for block in first..end {
            self.set_holder(block, 0);
        }
        if let Some(file) = files.own.and_then(|own| files.files[own].as_ref()).filter(|_| first < end) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // A file system that cannot do it keeps the bytes.
            let _ = rustix::fs::fallocate(file.as_fd(), hole, first * BLOCK, (end - first) * BLOCK);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::backing::Buffers;
    use uzram::random::Random;

    use super::*;

    const BLOCKS: u64 = 64;

    struct Model {
        spill: Arc<Spill>,
        buffers: Buffers,
        /// The version of each block; `None` if anything may be read.
        blocks: Vec<Option<u8>>,
    }

    impl Model {
        fn transfer(&self, direction: Direction, first: u64, contents: &mut [u8]) {
            let mut buffer = self.buffers.take().unwrap();
            buffer[..contents.len()].copy_from_slice(contents);
            let (buffer, result) = self.spill.carry_out(direction, first * BLOCK, contents.len(), buffer);
            result.unwrap();
            contents.copy_from_slice(&buffer[..contents.len()]);
        }
    }

    #[test]
    fn random_transfers_and_children_agree_with_a_model() {
        let dir = tempfile::tempdir().unwrap();
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let spill = Spill::new(dir.path(), BLOCKS * BLOCK).unwrap();
            let buffers = Buffers::new(2, 8 * PAGE_SIZE).unwrap();
            let mut model = Model { spill, buffers, blocks: vec![Some(0); BLOCKS as usize] };
            // Ends of pipes, as children hold them.
            let mut children = Vec::new();
            for step in 0..300 {
                let first = random.next() % (BLOCKS - 8);
                let count = random.next() % 8 + 1;
                let part = first as usize..(first + count) as usize;
                let mut contents = vec![0; count as usize * PAGE_SIZE];
                match random.next() % 8 {
                    0 => {
                        model.spill.discard(first * BLOCK, count * BLOCK);
                        model.blocks[part].fill(None);
                    }
                    1 if children.len() < 4 => {
                        let sharing = model.spill.before_fork().unwrap();
                        children.push(rustix::io::dup(&sharing.child_end).unwrap());
                        model.spill.after_fork(Some(sharing));
                    }
                    2 if !children.is_empty() => {
                        children.swap_remove(random.next() as usize % children.len());
                    }
                    3 | 4 => {
                        let version = random.next() as u8;
                        contents.fill(version);
                        model.transfer(Direction::Write, first, &mut contents);
                        model.blocks[part].fill(Some(version));
                    }
                    _ => {
                        model.transfer(Direction::Read, first, &mut contents);
                        for (block, version) in contents.chunks(PAGE_SIZE).zip(&model.blocks[part]) {
                            let is_right =
                                version.is_none_or(|version| block.iter().all(|byte| *byte == version));
                            assert!(
                                is_right,
                                "seed {seed}, step {step}: {} instead of {version:?}",
                                block[0]
                            );
                        }
                    }
                }
            }
            let all: u64 = model.spill.blocks.iter().map(|blocks| blocks.load(Ordering::Relaxed)).sum();
            let held = (0..BLOCKS).filter(|block| model.spill.holder(*block) > 0).count();
            assert_eq!(all, held as u64, "seed {seed}");
        }
    }

    #[test]
    fn what_a_child_reads_stays_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let spill = Spill::new(dir.path(), BLOCKS * BLOCK).unwrap();
        let model = Model { spill, buffers: Buffers::new(2, PAGE_SIZE).unwrap(), blocks: Vec::new() };
        model.transfer(Direction::Write, 3, &mut [1; PAGE_SIZE]);
        let files = |model: &Model| {
            let files = model.spill.files.read().unwrap();
            files.files.iter().flatten().map(|file| file.try_clone().unwrap()).collect::<Vec<_>>()
        };
        let childs = files(&model);
        let sharing = model.spill.before_fork().unwrap();
        let child = rustix::io::dup(&sharing.child_end).unwrap();
        model.spill.after_fork(Some(sharing));
        model.transfer(Direction::Write, 3, &mut [2; PAGE_SIZE]);
        model.spill.discard(3 * BLOCK, BLOCK);
        let mut seen = [0; PAGE_SIZE];
        childs[0].read_exact_at(&mut seen, 3 * BLOCK).unwrap();
        assert_eq!(seen, [1; PAGE_SIZE]);
        assert_eq!(files(&model).len(), 2);
        drop(child);
        for _ in 0..2 {
            model.transfer(Direction::Write, 3, &mut [3; PAGE_SIZE]);
            model.transfer(Direction::Read, 3, &mut seen);
            assert_eq!(seen, [3; PAGE_SIZE]);
        }
    }

    #[test]
    fn transfers_out_of_range_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let spill = Spill::new(dir.path(), BLOCKS * BLOCK).unwrap();
        let buffers = Buffers::new(1, 2 * PAGE_SIZE).unwrap();
        for (offset, len) in
            [(BLOCKS * BLOCK, PAGE_SIZE), (u64::MAX - 4095, PAGE_SIZE), (1, PAGE_SIZE), (0, 0), (0, 3)]
        {
            let (_, result) = spill.carry_out(Direction::Read, offset, len, buffers.take().unwrap());
            assert!(result.is_err(), "{offset} {len}");
        }
        assert!(Spill::new(&dir.path().join("none"), BLOCK).is_err());
    }

    #[test]
    fn a_file_that_had_a_name_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let fd = named_file(dir.path(), Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o600);
    }
}
