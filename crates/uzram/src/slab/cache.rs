//! The public interface of a cache: of objects, and of values of one type.

use std::marker::PhantomData;

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::Arc;

use super::checked::Checked;
use super::core::Core;
use super::policy::CpuLayer;
use super::{CacheConfig, CacheInfo, Policy, Sheaves};

/// A cache of objects of one size. The bytes of a new object are arbitrary.
pub struct Cache<P: Policy = Sheaves> {
    core: Core,
    layer: P::Layer,
    checked: Checked,
}

impl<P: Policy> Cache<P> {
    /// Makes an empty cache in the memory of `arena`. Fails with `Invalid` for an invalid option; `NoMemory`
    /// when there is no address space for its tables.
    pub fn new(arena: Arc<Arena>, options: CacheConfig) -> Result<Self> {
        let core = Core::new(arena, options, P::HARDENED)?;
        Ok(Cache { layer: P::Layer::new(&core)?, checked: Checked::new(&core)?, core })
    }

    /// Makes the cache's own tables resident, so that allocations and frees take no page faults on them.
    /// Fails with `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.core.slabs.populate()?;
        self.checked.populate()?;
        self.layer.populate()
    }

    /// Returns the address of an object of another process's cache, if `object` can be one. The cache is new,
    /// made with that cache's [`slab_table`](CacheConfig::slab_table); call this before [`Cache::adopt`].
    pub(crate) fn find(&self, object: u32) -> Option<*mut u8> {
        self.core.slabs.find(object)
    }

    /// Returns an upper bound of the names of objects of another process's cache. Fails with `Io` if the
    /// system does not report which pages of the slab table are in memory.
    pub(crate) fn found_names(&self) -> Result<u64> {
        let slabs = &self.core.slabs;
        Ok(u64::from(slabs.found_slabs()?) << slabs.layout.place_bits)
    }

    /// Takes the runs of those slabs of another process's cache that have an object in use, and removes all
    /// others from the slab table; writes to no slab. Returns them, and whether one could not be taken
    /// because its run overlaps a taken one. Fails with `Io` if the system does not report the table's
    /// resident pages.
    pub(crate) fn claim_slabs(&self, is_used: impl Fn(u32) -> bool) -> Result<(Vec<u32>, bool)> {
        let slabs = &self.core.slabs;
        let (objects, stride) = (slabs.layout.objects, slabs.layout.stride());
        let has_objects = |slab| (0..objects).any(|index| is_used(slabs.name(slab, index * stride)));
        let (mut claimed, mut lacks_some) = (Vec::new(), false);
        for slab in 0..slabs.found_slabs()? {
            let has_objects = has_objects(slab);
            if slabs.claim(slab, has_objects) {
                claimed.push(slab);
            } else {
                lacks_some |= has_objects;
            }
        }
        Ok((claimed, lacks_some))
    }

    /// Returns whether an object belongs to one of these slabs, which are in ascending order.
    pub(crate) fn is_of(&self, object: u32, slabs: &[u32]) -> bool {
        slabs.binary_search(&self.core.slabs.split(object).0).is_ok()
    }

    /// Adds slabs that [`Cache::claim_slabs`] returned to this cache, which no other thread uses yet.
    pub(crate) fn adopt(&self, claimed: &[u32], is_used: impl Fn(u32) -> bool) {
        let core = &self.core;
        for &slab in claimed {
            let is_used = |index| {
                let object = core.slabs.name(slab, index * core.slabs.layout.stride());
                let is_used = is_used(object);
                if is_used {
                    self.checked.adopt(object);
                }
                is_used
            };
            if core.slabs.adopt(slab, is_used) {
                core.node.lock(&core.counters).add(&core.slabs, slab, false);
            }
        }
        core.slabs.end_adoption(claimed.iter().max().map_or(0, |last| last + 1));
    }

    /// Allocates an object. Fails with `NoSpace` at the limit of the arena or the cache; `NoMemory` when the
    /// system gives no more or `gfp` does not allow asking it; `Corrupt` when a free object is damaged: it
    /// and those linked after it are lost, and the next call goes on without them.
    #[inline]
    pub fn alloc(&self, gfp: Gfp) -> Result<u32> {
        let Cache { core, layer, .. } = self;
        let object = match layer.pop(core) {
            Some(object) => object,
            None => layer.alloc_slow(core, gfp)?,
        };
        self.checked.take(core, object)?;
        Ok(object)
    }

    /// Frees an object that [`Cache::alloc`] returned, and whose bytes no thread uses any more. Fails with
    /// `Corrupt` if it is no object of this cache, or free already, and changes nothing then. Debug builds
    /// find every such misuse; release builds may report it later, by a free that flushes a sheaf.
    #[inline]
    pub fn free(&self, object: u32) -> Result<()> {
        let Cache { core, layer, .. } = self;
        if self.push(object)? { Ok(()) } else { layer.free_slow(core, object) }
    }

    #[cfg(all(test, loom))]
    pub(super) fn free_to_slabs(&self, objects: &mut [u32]) -> Result<()> {
        self.core.free_many(objects)
    }

    /// Takes all free objects back from the CPUs, and gives every empty slab back to the arena; returns the
    /// number of pages that went back meanwhile. Other threads may allocate and free concurrently. Fails with
    /// `Corrupt` when free objects were found damaged; the rest is done all the same.
    pub fn shrink(&self) -> Result<u64> {
        let Cache { core, layer, .. } = self;
        let gone_before = core.slabs.pages_gone();
        let drained = layer.drain(core);
        core.shrink();
        drained.map(|()| core.slabs.pages_gone() - gone_before)
    }

    /// Returns the address of an object: valid for `size_bytes`, aligned, and not shared with other objects,
    /// as long as the object is in use.
    #[inline]
    pub fn address(&self, object: u32) -> *mut u8 {
        self.core.slabs.address(object)
    }

    /// Returns the address that `object` has if it is an object, for prefetching. The memory stays mapped.
    pub fn hint(&self, object: u32) -> Option<*const u8> {
        self.core.slabs.hint(object)
    }

    /// Returns the state and the counters. Concurrent allocations and frees may be counted or not.
    pub fn info(&self) -> CacheInfo {
        let Cache { core, layer, .. } = self;
        let (mut in_use, mut active_slabs) = (0, 0);
        for slab in core.slabs.iter() {
            let inuse = u64::from(core.slabs.get(slab).word.load().inuse);
            in_use += inuse;
            active_slabs += u64::from(inuse > 0);
        }
        let mut stats = core.counters.read();
        let kept = layer.cached(core, &mut stats) + core.lost.get();
        let (layout, num_slabs) = (core.slabs.layout, core.slabs.live.get());
        CacheInfo {
            name: core.options.name.clone(),
            policy: P::NAME,
            active_objs: in_use.saturating_sub(kept),
            num_objs: num_slabs * u64::from(layout.objects),
            objsize_bytes: layout.stride_bytes as u32,
            objperslab: layout.objects.into(),
            pagesperslab: layout.pages as u32,
            active_slabs,
            num_slabs,
            corrupted: core.corrupted.get(),
            stats,
        }
    }

    /// Returns the resident bytes of the cache's own tables; they grow with the cache.
    pub fn table_resident_bytes(&self) -> usize {
        self.core.slabs.table_resident_bytes()
    }

    /// Frees an object on the fast path; returns false if the slow path has to. Fails as [`Cache::free`].
    #[inline]
    fn push(&self, object: u32) -> Result<bool> {
        let Cache { core, layer, .. } = self;
        self.checked.put(core, object)?;
        let passes = !P::HARDENED || core.slabs.may_be_object(object);
        Ok(passes && layer.push(core, object, P::HARDENED))
    }
}

impl<P: Policy> Drop for Cache<P> {
    fn drop(&mut self) {
        self.core.slabs.discard_all();
    }
}

/// A cache of values of type `T`, each in an object of its own.
pub struct TypedCache<T> {
    cache: Cache,
    /// loom's values cannot lie in an arena: they are in an array, by object number.
    #[cfg(loom)]
    values: Box<[std::cell::UnsafeCell<std::mem::MaybeUninit<T>>]>,
    _values: PhantomData<fn(T) -> T>,
}

// SAFETY: values are accessed only by object number: `get` shares them, `insert` and `remove` move them
// between threads; `T: Send + Sync` allows both.
unsafe impl<T: Send + Sync> Sync for TypedCache<T> {}

impl<T: Send + Sync> TypedCache<T> {
    /// Returns [`CacheConfig::new`] for the size and the alignment of `T`.
    pub fn options(name: impl Into<String>, max_objects: u64) -> CacheConfig {
        let (size, align) = if cfg!(loom) { (8, 8) } else { (size_of::<T>(), align_of::<T>()) };
        CacheConfig::new(name, size, align, max_objects)
    }

    /// Makes an empty cache. `options` come from [`TypedCache::options`]. Fails as [`Cache::new`].
    pub fn new(arena: Arc<Arena>, options: CacheConfig) -> Result<Self> {
        let fits = options.size_bytes >= size_of::<T>() && options.align_bytes >= align_of::<T>();
        assert!(fits || cfg!(loom), "the objects have room for a value");
        #[cfg(loom)]
        let names = (options.max_objects.div_ceil(2) as usize) << 9;
        Ok(TypedCache {
            cache: Cache::new(arena, options)?,
            #[cfg(loom)]
            values: (0..names).map(|_| std::cell::UnsafeCell::new(std::mem::MaybeUninit::uninit())).collect(),
            _values: PhantomData,
        })
    }

    pub(crate) fn find(&self, object: u32) -> Option<*const T> {
        self.cache.find(object).map(|value| value.cast_const().cast())
    }

    /// Returns the cache of the values' objects.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Puts a value into a new object; returns its number. Fails as [`Cache::alloc`], dropping the value.
    #[inline]
    pub fn insert(&self, value: T, gfp: Gfp) -> Result<u32> {
        let object = self.cache.alloc(gfp)?;
        // SAFETY: the object is new, has room for a `T` and is aligned for it (`TypedCache::new`).
        unsafe { self.at(object).write(value) };
        Ok(object)
    }

    /// Returns the value of an object.
    ///
    /// # Safety
    /// `object` is in use ([`TypedCache::insert`] returned it), and stays so while the reference lives.
    #[inline]
    pub unsafe fn get(&self, object: u32) -> &T {
        // SAFETY: the object holds a value, which stays while the reference lives (the caller's promise).
        unsafe { &*self.at(object) }
    }

    /// Drops the value of an object and frees the object. Fails as [`Cache::free`].
    ///
    /// # Safety
    /// `object` is allocated, and no thread uses it any more.
    #[inline]
    pub unsafe fn remove(&self, object: u32) -> Result<()> {
        // SAFETY: the object holds a value that belongs to the caller (the caller's promise). If it is found
        // to be free, `free` fails, and the bytes read are not dropped.
        let value = std::mem::ManuallyDrop::new(unsafe { self.at(object).read() });
        self.cache.free(object)?;
        drop(std::mem::ManuallyDrop::into_inner(value));
        Ok(())
    }

    /// Returns the address of an object's value, if `object` may be one: a hint for prefetching.
    pub fn hint(&self, object: u32) -> Option<*const T> {
        self.cache.hint(object).map(<*const u8>::cast)
    }

    #[cfg(not(loom))]
    fn at(&self, object: u32) -> *mut T {
        self.cache.address(object).cast()
    }

    #[cfg(loom)]
    fn at(&self, object: u32) -> *mut T {
        self.values[object as usize].get().cast()
    }
}
