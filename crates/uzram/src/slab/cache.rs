//! The public interface of a cache.

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Arc, Counter};

#[cfg(all(debug_assertions, not(loom)))]
use super::checked::Checked;
use super::core::Core;
use super::policy::FastPath;
use super::registry::Described;
use super::{CacheConfig, CacheInfo, Policy, Sheaves};

/// [`Cache::free_bulk`] passes up to this many objects to the slow path together.
const BULK_OBJECTS: usize = 64;

/// A cache of objects of one size.
///
/// An object is named by a number; [`Cache::address`] returns its address. A new object's bytes are
/// arbitrary. The [module's documentation](super) lists the checks.
pub struct Cache<P: Policy = Sheaves>(Arc<Inner<P>>);

struct Inner<P: Policy> {
    core: Core<P::Freeze>,
    fast: P::FastPath,
    /// Not 0 once leaked objects were reported.
    reported: Counter,
    #[cfg(all(debug_assertions, not(loom)))]
    checked: Checked,
}

impl<P: Policy> Cache<P> {
    /// Makes an empty cache in the memory of `arena`.
    ///
    /// # Errors
    /// `Invalid` for an invalid option; `NoMemory` when there is no address space for its tables.
    pub fn new(arena: Arc<Arena>, options: CacheConfig) -> Result<Self> {
        let core = Core::new(arena, options, P::HARDENED)?;
        let inner = Arc::new(Inner {
            fast: P::FastPath::new(&core)?,
            reported: Counter::default(),
            #[cfg(all(debug_assertions, not(loom)))]
            checked: Checked::new(&core)?,
            core,
        });
        #[cfg(not(loom))]
        super::registry::add(Arc::downgrade(&inner));
        Ok(Cache(inner))
    }

    /// Makes the cache's own tables resident, so that allocations and frees take no page faults on them.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        let Inner { core, fast, .. } = &*self.0;
        core.slabs.populate()?;
        #[cfg(all(debug_assertions, not(loom)))]
        self.0.checked.populate()?;
        fast.populate()
    }

    /// Returns the address of an object of another process's cache, if `object` can be one. The cache is new, made with
    /// that cache's [`slab_table`](CacheConfig::slab_table); call this before [`Cache::adopt`].
    #[cfg(not(loom))]
    pub(crate) fn find(&self, object: u32) -> Option<*mut u8> {
        self.0.core.slabs.find(object)
    }

    /// Returns an upper bound of the names of objects of another process's cache.
    ///
    /// # Errors
    /// `Io` if the system does not report which pages of the slab table are in memory.
    #[cfg(not(loom))]
    pub(crate) fn found_names(&self) -> Result<u64> {
        let slabs = &self.0.core.slabs;
        Ok(u64::from(slabs.found_slabs()?) << slabs.layout.place_bits)
    }

    /// Takes the runs of those slabs of another process's cache that have an object for whose name `is_used` returns
    /// true. Returns these slabs, and whether the run of another such slab could not be taken because it overlaps a taken
    /// one. Removes all other slabs from the slab table. Writes to no slab yet.
    ///
    /// # Errors
    /// `Io` if the system does not report which pages of the slab table are in memory.
    #[cfg(not(loom))]
    pub(crate) fn claim_slabs(&self, is_used: impl Fn(u32) -> bool) -> Result<(Vec<u32>, bool)> {
        let slabs = &self.0.core.slabs;
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
    #[cfg(not(loom))]
    pub(crate) fn is_of(&self, object: u32, slabs: &[u32]) -> bool {
        slabs.binary_search(&self.0.core.slabs.split(object).0).is_ok()
    }

    /// Adds slabs that [`Cache::claim_slabs`] returned to this cache. `is_used` returns whether an object is in use.
    #[cfg(not(loom))]
    pub(crate) fn adopt(&self, claimed: &[u32], is_used: impl Fn(u32) -> bool) {
        let core = &self.0.core;
        let name = |slab, index| core.slabs.name(slab, index * core.slabs.layout.stride());
        core.adopt(claimed, |slab, index| is_used(name(slab, index)));
        #[cfg(debug_assertions)]
        for slab in claimed {
            let names = (0..core.slabs.layout.objects).map(|index| name(*slab, index));
            names.filter(|name| is_used(*name)).for_each(|name| self.0.checked.adopt(name));
        }
    }

    /// Allocates an object.
    ///
    /// # Errors
    /// `NoSpace` when the limit of the arena or of the cache is reached, `NoMemory` when the system
    /// gives no more or `gfp` does not allow asking it. `Corrupt` when a free object is found
    /// damaged: that object and those linked after it are lost, and the next call goes on without
    /// them.
    #[inline]
    pub fn alloc(&self, gfp: Gfp) -> Result<u32> {
        let Inner { core, fast, .. } = &*self.0;
        let object = match fast.pop(core) {
            Some(object) => object,
            None => fast.alloc_slow(core, gfp)?,
        };
        #[cfg(all(debug_assertions, not(loom)))]
        self.0.checked.take(core, object)?;
        Ok(object)
    }

    /// Fills `objects` with new objects; on an error allocates none.
    ///
    /// # Errors
    /// As [`Cache::alloc`].
    pub fn alloc_bulk(&self, objects: &mut [u32], gfp: Gfp) -> Result<()> {
        for i in 0..objects.len() {
            match self.alloc(gfp) {
                Ok(object) => objects[i] = object,
                Err(error) => {
                    let freed = self.free_bulk(&objects[..i]);
                    return freed.and(Err(error));
                }
            }
        }
        Ok(())
    }

    /// Frees an object that [`Cache::alloc`] returned. No thread uses its bytes any more.
    ///
    /// # Errors
    /// `Corrupt` when it is found to be no object of this cache, or free already (always found in debug
    /// builds); the cache is unchanged then. What a release build misses here may be reported later, by
    /// a free of another object that flushes a sheaf.
    #[inline]
    pub fn free(&self, object: u32) -> Result<()> {
        let Inner { core, fast, .. } = &*self.0;
        if self.0.push(object)? { Ok(()) } else { fast.free_slow(core, object) }
    }

    /// Frees objects, in any order.
    ///
    /// # Errors
    /// As [`Cache::free`] for one of them; the others are freed.
    pub fn free_bulk(&self, objects: &[u32]) -> Result<()> {
        let Inner { core, fast, .. } = &*self.0;
        let mut result = Ok(());
        for objects in objects.chunks(BULK_OBJECTS) {
            let mut refused = [0; BULK_OBJECTS];
            let mut count = 0;
            for &object in objects {
                match self.0.push(object) {
                    Ok(true) => {}
                    Ok(false) => {
                        refused[count] = object;
                        count += 1;
                    }
                    Err(error) => result = Err(error),
                }
            }
            result = fast.free_many(core, &mut refused[..count]).and(result);
        }
        result
    }

    /// Frees objects directly to their slabs, past every CPU's list and sheaves.
    #[cfg(all(test, loom))]
    pub(super) fn free_to_slabs(&self, objects: &mut [u32]) -> Result<()> {
        self.0.core.free_many(objects)
    }

    /// Takes all free objects back from the CPUs, and gives every empty slab back to the arena; returns the
    /// number of pages that went back meanwhile. Other threads may allocate and free concurrently.
    ///
    /// # Errors
    /// `Corrupt` when free objects were found damaged; the rest is done all the same.
    pub fn shrink(&self) -> Result<u64> {
        let Inner { core, fast, .. } = &*self.0;
        let gone_before = core.slabs.pages_gone();
        let drained = core.free_many(&mut fast.drain(core));
        drained.and(core.shrink()).map(|()| core.slabs.pages_gone() - gone_before)
    }

    /// Returns the address of an object: valid for `size_bytes`, aligned, and not shared with other objects, as
    /// long as the object is in use.
    #[inline]
    pub fn address(&self, object: u32) -> *mut u8 {
        self.0.core.slabs.address(object)
    }

    /// Returns the address of an object, if `object` may be one: a hint for prefetching. The memory stays
    /// mapped.
    #[inline]
    pub fn hint(&self, object: u32) -> Option<*const u8> {
        self.0.core.slabs.hint(object)
    }

    /// Returns the state and the counters. Objects that other threads are allocating or freeing may be
    /// counted or not.
    pub fn info(&self) -> CacheInfo {
        self.0.info()
    }

    /// Returns the resident bytes of the cache's own tables; they grow with the cache.
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        self.0.core.slabs.table_resident_bytes()
    }

    /// Closes the cache. All of its memory goes back; if another thread is reading its state
    /// ([`caches`](super::caches)), as soon as that is done.
    ///
    /// # Errors
    /// `Busy` when objects are still in use, unless `free_objects_on_drop` is set.
    pub fn close(self) -> Result<()> {
        let leaked = self.0.leaked();
        // The error is the report.
        self.0.reported.set(1);
        leaked.map_or(Ok(()), |what| Err(crate::Error::new(crate::ErrorKind::Busy, what)))
    }
}

impl<P: Policy> Inner<P> {
    /// Frees an object on the fast path; returns false if that has to be left to the slow path.
    ///
    /// # Errors
    /// In debug builds as [`Cache::free`]; otherwise none.
    #[inline]
    fn push(&self, object: u32) -> Result<bool> {
        let Inner { core, fast, .. } = self;
        #[cfg(all(debug_assertions, not(loom)))]
        self.checked.put(core, object)?;
        let passes = !P::HARDENED || core.slabs.may_be_object(object);
        Ok(passes && fast.push(core, object, P::HARDENED))
    }

    /// Returns a message about leaked objects, if there are any.
    fn leaked(&self) -> Option<String> {
        let options = &self.core.options;
        let in_use = if options.free_objects_on_drop { 0 } else { self.info().active_objs };
        if in_use == 0 {
            return None;
        }
        let what = format!("slab cache '{}' ends with {in_use} objects in use", options.name);
        #[cfg(all(debug_assertions, not(loom)))]
        let what = match self.checked.first_in_use() {
            Some(first) => format!("{what}, the first is {first}"),
            None => what,
        };
        Some(what)
    }
}

impl<P: Policy> Described for Inner<P> {
    fn info(&self) -> CacheInfo {
        let Inner { core, fast, .. } = self;
        let (mut in_use, mut active_slabs) = (0, 0);
        for slab in core.slabs.iter() {
            let inuse = u64::from(core.slabs.get(slab).word.load().inuse);
            in_use += inuse;
            active_slabs += u64::from(inuse > 0);
        }
        let mut stats = core.counters.read();
        let kept = fast.cached(core, &mut stats) + core.in_lists(&mut stats) + core.lost.get();
        let (layout, num_slabs) = (core.slabs.layout, core.slabs.live());
        CacheInfo {
            name: core.options.name.clone(),
            policy: P::NAME,
            active_objs: in_use.saturating_sub(kept),
            num_objs: num_slabs * u64::from(layout.objects),
            objsize_bytes: layout.stride_bytes as u32,
            objperslab: layout.objects.into(),
            pagesperslab: layout.pages as u32,
            cpu_partial_objs: core.options.cpu_partial_objects as u32,
            sheaf_objs: fast.capacity(),
            active_slabs,
            num_slabs,
            corrupted: core.corrupted.get(),
            stats,
        }
    }
}

impl<P: Policy> Drop for Inner<P> {
    fn drop(&mut self) {
        if self.reported.get() == 0
            && let Some(what) = self.leaked()
        {
            // A drop cannot return the error.
            eprintln!("{what}");
        }
        self.core.slabs.discard_all();
    }
}
