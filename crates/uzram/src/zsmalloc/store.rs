//! Stores an object: allocates a handle and an object, writes the bytes, publishes the handle.

use crate::base::cpu::prefetch_write;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::sync::Access;
use crate::base::units::PAGE_SIZE;

use super::design::PoolLocks;
use super::raw::{LINE_BYTES, RawPool};
use super::word::Cell;

impl<D: PoolLocks> RawPool<D> {
    /// Stores a copy of `bytes` (1..=4096) for `owner`, and returns its handle. Fails with `Invalid` for
    /// another length, `NoSpace` when the arena's limit is reached, `NoMemory` when the system gives no more.
    /// If `gfp` forbids waiting, the latter two only mean that the allocation would have to wait. On an error
    /// nothing is stored.
    #[inline]
    pub fn store(&self, bytes: &[u8], owner: u32, gfp: Gfp) -> Result<u32> {
        if bytes.is_empty() || bytes.len() > PAGE_SIZE {
            return Err(Error::invalid("an object has 1 to 4096 bytes"));
        }
        let handle = self.with_memory(gfp, || self.handles.insert(D::Cell::default(), gfp))?;
        let class = self.classes.index_for(bytes.len());
        let (id, object) = self.with_memory(gfp, || self.alloc(class, gfp)).inspect_err(|_| {
            // SAFETY: the handle is new and known only here.
            unsafe { self.free_handle(handle) };
        })?;
        self.counts.count(|share| &share.allocs);
        let (start, header_bytes) = self.place(object);
        self.note_access(object, Access::write);
        // A new object is not in the CPU's cache: fetch its lines in parallel.
        (0..header_bytes + bytes.len())
            .step_by(LINE_BYTES)
            .for_each(|at| prefetch_write(start.wrapping_add(at)));
        // SAFETY: the new object keeps the zspage in use.
        let zspage = unsafe { self.zspages.get(id) };
        if header_bytes == 0 {
            self.set_huge_owner(object.page, owner, id);
            zspage.set_huge_handle(handle);
        } else {
            // SAFETY: the object is new and known only here, its pages are committed, objects are 16-aligned
            // and at least 32 bytes, so there is room for the header.
            unsafe { start.cast::<[u32; 2]>().write([handle, owner]) };
        }
        // SAFETY: as above; the class is the one for this length, so the object has room for header and
        // contents, and no reference to its memory exists that `bytes` could overlap.
        unsafe { start.add(header_bytes).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        // SAFETY: the handle is new and known only here.
        unsafe { self.handles.get(handle) }.publish(object);
        // It was held until now: without a header an object cannot be moved.
        zspage.let_go();
        Ok(handle)
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
        // If used memory alone reaches the limit, giving free memory back does not help.
        let may_help = match error.kind() {
            ErrorKind::NoMemory => true,
            ErrorKind::NoSpace => error.setting() != Some("mem_limit") || self.arena.keeps_free(),
            _ => false,
        };
        if !may_help {
            return Err(error);
        }
        self.arena.release_free();
        f()
    }
}
