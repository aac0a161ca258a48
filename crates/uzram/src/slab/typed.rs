//! Caches of values of one type.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::Arc;

use super::{Cache, CacheConfig, CacheInfo, Policy, Sheaves};

/// A cache of values of type `T`, each in an object of its own.
pub struct TypedCache<T, P: Policy = Sheaves> {
    cache: Cache<P>,
    /// loom's values cannot lie in an arena: they are in an array, by object number.
    #[cfg(loom)]
    values: Box<[std::cell::UnsafeCell<std::mem::MaybeUninit<T>>]>,
    _values: PhantomData<fn(T) -> T>,
}

// SAFETY: values are accessed only by object number: `get` shares them, `insert` and `remove` move them
// between threads; `T: Send + Sync` allows both.
unsafe impl<T: Send + Sync, P: Policy> Sync for TypedCache<T, P> {}

impl<T: Send + Sync, P: Policy> TypedCache<T, P> {
    /// Returns [`CacheConfig::new`] for the size and the alignment of `T`.
    pub fn options(name: impl Into<String>, max_objects: u64) -> CacheConfig {
        let (size, align) = if cfg!(loom) { (8, 8) } else { (size_of::<T>(), align_of::<T>()) };
        CacheConfig::new(name, size, align, max_objects)
    }

    /// Makes an empty cache. `options` come from [`TypedCache::options`].
    ///
    /// # Errors
    /// As [`Cache::new`].
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

    /// As [`Cache::populate`].
    ///
    /// # Errors
    /// As [`Cache::populate`].
    pub fn populate(&self) -> Result<()> {
        self.cache.populate()
    }

    /// Returns the address of the value of an object of another process's cache: [`Cache::find`].
    #[cfg(not(loom))]
    pub(crate) fn find(&self, object: u32) -> Option<*const T> {
        self.cache.find(object).map(|value| value.cast_const().cast())
    }

    /// Returns the cache, for the other steps of an adoption.
    #[cfg(not(loom))]
    pub(crate) fn cache(&self) -> &Cache<P> {
        &self.cache
    }

    /// Puts a value into a new object; returns the object's number.
    ///
    /// # Errors
    /// As [`Cache::alloc`]; the value is dropped.
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
    /// `object` is in use: [`TypedCache::insert`] returned it, and it is not removed while the reference
    /// lives.
    #[inline]
    pub unsafe fn get(&self, object: u32) -> &T {
        // SAFETY: the object holds a value, which stays while the reference lives (the caller's promise).
        unsafe { &*self.at(object) }
    }

    /// Drops the value of an object and frees the object.
    ///
    /// # Errors
    /// As [`Cache::free`].
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

    /// As [`TypedCache::insert`], but returns a guard that frees the object when it is dropped.
    ///
    /// # Errors
    /// As [`Cache::alloc`]; the value is dropped.
    pub fn own(&self, value: T, gfp: Gfp) -> Result<Owned<'_, T, P>> {
        Ok(Owned { object: self.insert(value, gfp)?, cache: self })
    }

    /// Returns the address of an object's value, if `object` may be one: a hint for prefetching.
    #[inline]
    pub fn hint(&self, object: u32) -> Option<*const T> {
        self.cache.hint(object).map(<*const u8>::cast)
    }

    /// As [`Cache::shrink`].
    ///
    /// # Errors
    /// As [`Cache::shrink`].
    pub fn shrink(&self) -> Result<u64> {
        self.cache.shrink()
    }

    /// As [`Cache::info`].
    pub fn info(&self) -> CacheInfo {
        self.cache.info()
    }

    /// As [`Cache::table_resident_bytes`].
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        self.cache.table_resident_bytes()
    }

    #[cfg(not(loom))]
    #[inline]
    fn at(&self, object: u32) -> *mut T {
        self.cache.address(object).cast()
    }

    #[cfg(loom)]
    fn at(&self, object: u32) -> *mut T {
        self.values[object as usize].get().cast()
    }
}

/// A value in an object, which is freed when this is dropped.
pub struct Owned<'a, T: Send + Sync, P: Policy = Sheaves> {
    cache: &'a TypedCache<T, P>,
    object: u32,
}

impl<T: Send + Sync, P: Policy> Deref for Owned<'_, T, P> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the object is in use until this is dropped.
        unsafe { self.cache.get(self.object) }
    }
}

impl<T: Send + Sync, P: Policy> DerefMut for Owned<'_, T, P> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; only this value knows the object's number, so there is no other reference.
        unsafe { &mut *self.cache.at(self.object) }
    }
}

impl<T: Send + Sync, P: Policy> Drop for Owned<'_, T, P> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the object is in use, and this value was its only user. `remove` counts an error.
        let _ = unsafe { self.cache.remove(self.object) };
    }
}
