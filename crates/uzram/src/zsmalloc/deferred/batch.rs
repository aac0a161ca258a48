//! Frees a batch of handles: sorted by class and zspage, so that a class's lists are locked once for many objects, and a
//! zspage changes its fullness group once for all of them.
//!
//! What the objects of one hold touch is prefetched before: their headers, the entries of the page table, and the
//! descriptors. A free that does it for one object waits for each of these lines in turn.

use crate::base::cpu::{prefetch, prefetch_write};
use crate::zsmalloc::design::PoolLocks;
use crate::zsmalloc::free::EmptiedList;
use crate::zsmalloc::raw::RawPool;
use crate::zsmalloc::word::{Cell, INDEX_BITS, Location};

use super::lists::MAX_BATCH;

/// The most objects that are released while a class's lists are locked: other threads wait as long.
const HOLD_OBJECTS: usize = EmptiedList::MOST;

/// What a batch is sorted by.
///
/// ```text
/// 63    56 55        24 23   12 11         0
/// [ class | page       | index | at         ]
/// ```
///
/// `at` is the handle's place in the batch; the others are its object's location.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64);

const AT_BITS: u32 = 12;
const PAGE_SHIFT: u32 = AT_BITS + INDEX_BITS;
const CLASS_SHIFT: u32 = PAGE_SHIFT + u32::BITS;

const _: () = assert!(CLASS_SHIFT + u8::BITS == u64::BITS && MAX_BATCH <= 1 << AT_BITS);

impl Key {
    fn new(object: Location, at: usize) -> Self {
        let Location { page, class, index } = object;
        let place = u64::from(class) << CLASS_SHIFT | u64::from(page) << PAGE_SHIFT;
        Key(place | u64::from(index) << AT_BITS | at as u64)
    }

    fn object(self) -> Location {
        let index = (self.0 >> AT_BITS) as u16 & ((1 << INDEX_BITS) - 1);
        Location { page: (self.0 >> PAGE_SHIFT) as u32, class: self.class(), index }
    }

    fn class(self) -> u8 {
        (self.0 >> CLASS_SHIFT) as u8
    }

    fn at(self) -> usize {
        self.0 as usize & ((1 << AT_BITS) - 1)
    }
}

impl<D: PoolLocks> RawPool<D> {
    /// Frees objects, at most [`MAX_BATCH`], each at once or when its last reader is done.
    ///
    /// # Safety
    /// As [`RawPool::free`], for each of the handles.
    pub(super) unsafe fn free_batch(&self, handles: &[u32]) {
        if let [handle] = handles {
            // SAFETY: the caller's promise.
            return unsafe { self.free_now(*handle) };
        }
        self.prefetch_cells(handles);
        let (mut keys, mut count) = ([Key::default(); MAX_BATCH], 0);
        let found = |at, object| {
            keys[count] = Key::new(object, at);
            count += 1;
        };
        // SAFETY: the caller's promise.
        unsafe { D::begin_free(self, handles, found) };
        let keys = &mut keys[..count];
        keys.sort_unstable();
        for of_class in keys.chunk_by(|one, other| one.class() == other.class()) {
            for some in of_class.chunks(HOLD_OBJECTS) {
                // SAFETY: `begin_free` left these handles to this thread.
                unsafe { self.release_all(handles, some) };
            }
        }
    }

    /// Releases objects of one class, at most [`HOLD_OBJECTS`], then their handles.
    ///
    /// # Safety
    /// `keys` is not empty; its handles are being freed, and left to this call.
    unsafe fn release_all(&self, handles: &[u32], keys: &[Key]) {
        self.prefetch_objects(keys);
        let mut objects = [Location { page: 0, class: 0, index: 0 }; HOLD_OBJECTS];
        let (mut released, mut count) = ([0; HOLD_OBJECTS], 0);
        let mut emptied = EmptiedList::new();
        let mut lists = self.lists(keys[0].class());
        for key in keys {
            let handle = handles[key.at()];
            // Read the word again: the object may have moved before the lists were locked.
            // SAFETY: the handle is not freed yet (the caller's promise).
            let object = unsafe { self.handles.get(handle) }.object();
            if self.is_sound(handle, object) {
                (objects[count], released[count]) = (object, handle);
                count += 1;
            }
        }
        for of_zspage in objects[..count].chunk_by(|one, other| one.page == other.page) {
            let put = self.put_all(&mut lists, of_zspage);
            put.into_iter().for_each(|zspage| emptied.push(zspage));
        }
        self.counts.add(|share| &share.frees, count as u64);
        if D::FREES_PAGES_LOCKED {
            self.counts.add(|share| &share.runs_freed_locked, u64::from(!emptied.is_empty()));
            self.give_back_all(&emptied);
            drop(lists);
        } else {
            drop(lists);
            self.give_back_all(&emptied);
        }
        for handle in &released[..count] {
            // SAFETY: the handle is freed, and its last reader is gone (the caller's promise).
            unsafe { self.free_handle(*handle) };
        }
    }

    /// Prefetches the words of handles.
    fn prefetch_cells(&self, handles: &[u32]) {
        // Models have no caches and need not explore hints.
        if cfg!(loom) {
            return;
        }
        handles.iter().filter_map(|handle| self.handles.hint(*handle)).for_each(prefetch_write);
    }

    /// Prefetches what releasing the objects touches.
    fn prefetch_objects(&self, keys: &[Key]) {
        if cfg!(loom) {
            return;
        }
        for object in keys.iter().map(|key| key.object()) {
            prefetch_write(self.place(object).0);
            prefetch(&raw const self.page_table[object.page as usize]);
        }
        for object in keys.iter().map(|key| key.object()) {
            // If the object has moved, this may be the entry of another zspage, or of none: a wrong hint.
            let descriptor = self.zspages.hint(self.zspage_id_at(object.page));
            descriptor.into_iter().for_each(prefetch_write);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use crate::zsmalloc::class::MAX_OBJECTS;

    #[test]
    fn keys_keep_what_they_encode_and_sort_by_class_and_zspage() {
        let mut random = Random::new(1);
        let mut keys: Vec<Key> = (0..MAX_BATCH)
            .map(|at| {
                let index = random.below(MAX_OBJECTS + 1) as u16;
                let object = Location { page: random.next() as u32, class: random.next() as u8, index };
                let key = Key::new(object, at);
                assert_eq!((key.object(), key.at()), (object, at));
                key
            })
            .collect();
        keys.sort_unstable();
        let place = |key: &Key| (key.object().class, key.object().page, key.object().index);
        assert!(keys.is_sorted_by_key(place));
    }
}
