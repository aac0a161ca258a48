//! Stores an object: allocates a handle and an object, writes the bytes, publishes the handle.
//!
//! A [`Reserved`] separates allocation from writing: its holder has its memory and may wait for other things.

use crate::base::cpu::prefetch_write;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::units::PAGE_SIZE;

use super::design::PoolLocks;
use super::raw::{LINE_BYTES, RawPool};
use super::word::{Cell, Location};

impl<D: PoolLocks> RawPool<D> {
    /// Stores a copy of `bytes` (1..=4096) for `owner`, and returns its handle. Fails as
    /// [`RawPool::reserve`]. On an error nothing is stored.
    #[inline]
    pub fn store(&self, bytes: &[u8], owner: u32, gfp: Gfp) -> Result<u32> {
        self.reserve(bytes.len(), gfp)?.write(bytes, owner)
    }

    /// Allocates an object with room for `len` bytes (1..=4096), to be written later. Fails with `Invalid`
    /// for another length, `NoSpace` when the arena's limit is reached, `NoMemory` when the system gives no
    /// more. If `gfp` forbids waiting, the latter two only mean that the allocation would have to wait.
    #[inline]
    pub fn reserve(&self, len: usize, gfp: Gfp) -> Result<Reserved<'_, D>> {
        if len == 0 || len > PAGE_SIZE {
            return Err(Error::invalid("an object has 1 to 4096 bytes"));
        }
        let handle = self.with_memory(gfp, || self.handles.insert(D::Cell::default(), gfp))?;
        match self.with_memory(gfp, || self.alloc(self.classes.index_for(len), gfp)) {
            Ok((zspage, object)) => {
                self.counts.count(|share| &share.allocs);
                Ok(Reserved { pool: self, handle, zspage, object })
            }
            Err(error) => {
                // SAFETY: the handle is new and known only here.
                unsafe { self.free_handle(handle) };
                Err(error)
            }
        }
    }

    /// Runs `f`; if it lacks memory and `gfp` allows waiting, gives free memory back and runs it again.
    #[inline]
    fn with_memory<R>(&self, gfp: Gfp, f: impl Fn() -> Result<R>) -> Result<R> {
        match f() {
            Err(error) if gfp == Gfp::MayWait => self.with_room_made(error, f),
            done => done,
        }
    }

    #[cold]
    fn with_room_made<R>(&self, error: Error, f: impl Fn() -> Result<R>) -> Result<R> {
        if !self.may_help(&error) {
            return Err(error);
        }
        self.arena.release_free();
        f()
    }

    /// Returns whether giving free memory back may help against `error`: not if used memory alone reaches the
    /// limit.
    fn may_help(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::NoMemory => true,
            ErrorKind::NoSpace => error.setting() != Some("mem_limit") || self.arena.keeps_free(),
            _ => false,
        }
    }
}

/// An allocated object that is not written yet. Dropping it frees it.
pub struct Reserved<'a, D: PoolLocks> {
    pool: &'a RawPool<D>,
    handle: u32,
    /// Held until the object is written: without a header it cannot be moved.
    zspage: u32,
    object: Location,
}

impl<'a, D: PoolLocks> Reserved<'a, D> {
    /// Stores a copy of `bytes` for `owner`. If the bytes need an object of another class, frees the reserved
    /// one and allocates theirs, which fails as [`RawPool::store`] with [`Gfp::MayWait`].
    #[inline]
    pub fn write(self, bytes: &[u8], owner: u32) -> Result<u32> {
        let pool = self.pool;
        let len_fits = (1..=PAGE_SIZE).contains(&bytes.len());
        if !len_fits || pool.classes.index_for(bytes.len()) != self.object.class {
            drop(self);
            return pool.store(bytes, owner, Gfp::MayWait);
        }
        let (start, header_bytes) = pool.place(self.object);
        pool.contents.write(self.object);
        // A new object is not in the CPU's cache: fetch its lines in parallel.
        (0..header_bytes + bytes.len())
            .step_by(LINE_BYTES)
            .for_each(|at| prefetch_write(start.wrapping_add(at)));
        // SAFETY: the object of this reservation keeps the zspage in use.
        let zspage = unsafe { pool.zspages.get(self.zspage) };
        if header_bytes == 0 {
            pool.set_huge_owner(self.object.page, owner, self.zspage);
            zspage.set_huge_handle(self.handle);
        } else {
            // SAFETY: the object belongs to this reservation alone, its pages are committed, objects are
            // 16-aligned and at least 32 bytes, so there is room for the header.
            unsafe { start.cast::<[u32; 2]>().write([self.handle, owner]) };
        }
        // SAFETY: as above; the class is the one for this length, so the object has room for
        // header and contents, and no reference to its memory exists that `bytes` could overlap.
        unsafe { start.add(header_bytes).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        // SAFETY: the handle is this reservation's.
        unsafe { pool.handles.get(self.handle) }.publish(self.object);
        zspage.let_go();
        let handle = self.handle;
        // The handle owns the object now.
        std::mem::forget(self);
        Ok(handle)
    }
}

impl<D: PoolLocks> Drop for Reserved<'_, D> {
    fn drop(&mut self) {
        let pool = self.pool;
        let mut lists = pool.lists(self.object.class);
        // SAFETY: the object of this reservation keeps the zspage in use.
        unsafe { pool.zspages.get(self.zspage) }.let_go();
        let emptied = pool.put(&mut lists, self.object);
        drop(lists);
        emptied.into_iter().for_each(|emptied| pool.give_back(emptied));
        // SAFETY: the handle is this reservation's and known only here.
        unsafe { pool.free_handle(self.handle) };
    }
}
