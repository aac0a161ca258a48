//! Object caches for metadata: handles and zspage descriptors.
//!
//! An object is named by a number (u32), so that it costs its holders four bytes and could be
//! mapped at another address. Slabs are runs of 16 arena pages, charged page by page as the cache
//! reaches them, and stay charged. A freed object holds the number of the next free one.
//!
//! One free list under one lock serves the whole cache. Locks: the free list's is a leaf; the
//! arena's slow path is called without it.

use crate::base::cpu::Padded;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, Arena, Entry, Gfp, MAX_RUN_PAGES, Objects};
use crate::base::sync::{Arc, Mutex, classes};

/// What a cache may hold.
///
/// # Safety
/// As for [`Entry`], and the size is a power of two of at most a page.
pub unsafe trait Object: Entry {
    /// The number kept by [`Object::set_link`]. Only called while the object is free.
    fn link(&self) -> u32;
    /// Keeps a number in the free object.
    fn set_link(&self, link: u32);
}

/// A cache of objects of one type. Objects keep their contents from one use to the next.
pub struct Cache<T> {
    /// What to say when it is.
    full: &'static str,
    objects: Objects<T>,
    free: Padded<Mutex<FreeList>>,
}

/// Protected by the cache's lock.
struct FreeList {
    /// The freed object to use next, or `NONE`.
    head: u32,
    /// Objects from here on were never used.
    fresh: u32,
    /// Slabs there are.
    slabs: u32,
    in_use: u32,
}

/// No object.
const NONE: u32 = u32::MAX;

impl<T: Object> Cache<T> {
    /// A cache of at most `max_objects` objects (rounded up to whole slabs), with the memory of
    /// `arena`; `full` is the error's text beyond that.
    ///
    /// # Errors
    /// `NoMemory` when there is no address space for the list of slabs.
    pub fn new(full: &'static str, arena: Arc<Arena>, max_objects: u64) -> Result<Self> {
        let objects = Objects::new(arena, max_objects)?;
        let free = FreeList { head: NONE, fresh: 0, slabs: 0, in_use: 0 };
        Ok(Cache { full, objects, free: Padded(Mutex::new(&classes::SLAB, free)) })
    }

    /// Takes an object.
    ///
    /// # Errors
    /// `NoSpace` when the limit of the arena or of the cache is met, `NoMemory` when the system
    /// gives no more or `gfp` does not allow asking it.
    pub fn alloc(&self, gfp: Gfp) -> Result<u32> {
        loop {
            let mut free = self.free.lock();
            if free.head != NONE {
                let object = free.head;
                free.head = self.get(object).link();
                free.in_use += 1;
                return Ok(object);
            }
            if free.fresh < free.slabs * Objects::<T>::PER_RUN {
                self.objects.commit(free.fresh)?;
                free.fresh += 1;
                free.in_use += 1;
                return Ok(free.fresh - 1);
            }
            drop(free);
            self.grow(gfp)?;
        }
    }

    /// Gives an object back that [`Cache::alloc`] answered.
    pub fn free(&self, object: u32) {
        let mut free = self.free.lock();
        self.get(object).set_link(free.head);
        free.head = object;
        free.in_use -= 1;
    }

    /// The object of a number that [`Cache::alloc`] answered.
    #[inline]
    pub fn get(&self, object: u32) -> &T {
        self.objects.get(object)
    }

    /// The object of any number at all, if there ever was one: for hints.
    #[inline]
    pub fn try_get(&self, object: u32) -> Option<&T> {
        self.objects.try_get(object)
    }

    /// Objects in use.
    #[cfg(test)]
    pub fn in_use(&self) -> u64 {
        u64::from(self.free.lock().in_use)
    }

    /// What the cache's own table can take at most.
    pub fn table_bytes(&self) -> usize {
        self.objects.table_bytes()
    }

    #[cold]
    fn grow(&self, gfp: Gfp) -> Result<()> {
        let run = self.objects.arena().alloc_run(MAX_RUN_PAGES, gfp)?;
        let mut free = self.free.lock();
        if free.slabs == self.objects.max_runs() {
            drop(free);
            self.objects.arena().free_run(run, Account::Slab, 0);
            return Err(Error::new(ErrorKind::NoSpace, self.full).with_setting("disksize"));
        }
        self.objects.set_run(free.slabs, run);
        free.slabs += 1;
        Ok(())
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use crate::base::sync::{AtomicU64, Ordering};

    #[derive(Default)]
    struct Cell(AtomicU64);
    // SAFETY: zeros are an atomic 0; 8 bytes.
    unsafe impl Entry for Cell {}
    // SAFETY: as above.
    unsafe impl Object for Cell {
        fn link(&self) -> u32 {
            self.0.load(Ordering::Relaxed) as u32
        }
        fn set_link(&self, link: u32) {
            self.0.store(u64::from(link), Ordering::Relaxed);
        }
    }

    fn cache(max_objects: u64) -> Cache<Cell> {
        Cache::new("no more cells", Arc::new(Arena::new(64 << 20).expect("arena")), max_objects)
            .expect("cache")
    }

    #[test]
    fn live_objects_are_distinct_and_keep_their_contents() {
        for seed in 0..5 {
            let (cache, mut random) = (cache(100_000), Random::new(seed));
            let mut live = std::collections::HashMap::new();
            for step in 0..60_000u64 {
                if random.below(5) < 3 {
                    let object = cache.alloc(Gfp::MayWait).expect("memory");
                    cache.get(object).0.store(step, Ordering::Relaxed);
                    assert_eq!(live.insert(object, step), None, "seed {seed}: handed out twice");
                } else if let Some((&object, &value)) = live.iter().next() {
                    assert_eq!(cache.get(object).0.load(Ordering::Relaxed), value, "seed {seed}");
                    live.remove(&object);
                    cache.free(object);
                }
                assert_eq!(cache.in_use(), live.len() as u64);
            }
        }
    }

    #[test]
    fn memory_is_charged_by_the_page() {
        let cache = cache(100_000);
        for _ in 0..512 {
            cache.alloc(Gfp::MayWait).expect("memory");
        }
        assert_eq!(cache.objects.arena().used_pages(Account::Slab), 1);
        cache.alloc(Gfp::MayWait).expect("memory");
        assert_eq!(cache.objects.arena().used_pages(Account::Slab), 2);
    }

    #[test]
    fn limits_and_failures_are_errors_and_pass() {
        let cache = cache(1);
        cache.objects.arena().set_limit_pages(1);
        for _ in 0..512 {
            cache.alloc(Gfp::MayWait).expect("one page");
        }
        assert_eq!(cache.alloc(Gfp::MayWait).unwrap_err().setting(), Some("mem_limit"));
        cache.objects.arena().set_limit_pages(0);
        for _ in 512..8192 {
            cache.alloc(Gfp::MayWait).expect("the rest of a slab");
        }
        assert_eq!(cache.alloc(Gfp::MayWait).unwrap_err().to_string(), "no more cells (setting: disksize)");
        cache.free(77);
        assert_eq!(cache.alloc(Gfp::MayWait), Ok(77));
        let cache = self::cache(100_000);
        cache.objects.arena().inject_faults(1, 2);
        let made = (0..2000).filter(|_| cache.alloc(Gfp::MayWait).is_ok()).count();
        assert!((1..2000).contains(&made), "{made}");
        assert_eq!(cache.in_use(), made as u64);
    }
}
