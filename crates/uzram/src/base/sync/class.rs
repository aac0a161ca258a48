//! Lock classes: the lock order of the engine, and its check in debug builds.

use super::stats::{LastCpu, LockMode, Recorded};

/// A class of locks: its name and its place in the lock order.
#[derive(Debug)]
pub struct LockClass {
    /// The name in statistics and in lock order messages.
    pub name: &'static str,
    // Used only by the check in debug builds, and by statistics.
    #[cfg_attr(not(debug_assertions), allow(dead_code))]
    rank: u32,
    /// Whether a thread may wait for a lock of the class while it holds others of it: all threads take them
    /// in one order.
    #[cfg_attr(not(debug_assertions), allow(dead_code))]
    several: bool,
}

impl LockClass {
    const fn new(rank: u32, name: &'static str) -> Self {
        LockClass { name, rank, several: false }
    }

    /// Returns its index in [`classes::ALL`].
    #[cfg(feature = "lock-stats")]
    pub(super) fn rank(&self) -> usize {
        self.rank as usize
    }
}

/// The lock classes, in lock order: a thread that holds one may only wait for a later one.
pub mod classes {
    use super::LockClass;

    /// A device's life cycle.
    pub static DEVICE: LockClass = LockClass::new(0, "device");
    /// Writeback: the extents being filled and the transfers in flight.
    pub static WRITEBACK: LockClass = LockClass::new(1, "writeback");
    /// One page's slot.
    pub static SLOT: LockClass = LockClass::new(2, "slot");
    /// The list of idle streams.
    pub static STREAM_LIST: LockClass = LockClass::new(3, "stream_list");
    /// A compression stream.
    pub static STREAM: LockClass = LockClass::new(4, "stream");
    /// Compaction of a zsmalloc pool.
    pub static COMPACTION: LockClass = LockClass::new(5, "compaction");
    /// A zsmalloc pool: the kernel's `pool->lock`.
    pub static ZS_POOL: LockClass = LockClass::new(6, "zs_pool");
    /// A size class of zsmalloc.
    pub static SIZE_CLASS: LockClass = LockClass::new(7, "size_class");
    /// The LRU of a zsmalloc pool's zspages.
    pub static ZS_LRU: LockClass = LockClass::new(8, "zs_lru");
    /// Giving free memory of an arena back to the system.
    pub static RECLAIM: LockClass = LockClass::new(9, "reclaim");
    /// A CPU's cache of free runs.
    pub static RUN_CACHE: LockClass = LockClass::new(10, "run_cache");
    /// The arena's chunks.
    pub static ARENA: LockClass = LockClass::new(11, "arena");
    /// A CPU's sheaves in a slab cache.
    pub static SLAB_SHEAF: LockClass = LockClass::new(12, "slab_sheaf");
    /// A slab cache's barn: the sheaves that no CPU holds.
    pub static SLAB_BARN: LockClass = LockClass::new(13, "slab_barn");
    /// A CPU's slabs in a slab cache.
    pub static SLAB_CPU: LockClass = LockClass::new(14, "slab_cpu");
    /// A slab cache's node partial list: the kernel's `list_lock`.
    pub static SLAB_LIST: LockClass = LockClass::new(15, "slab_list");
    /// A slab cache's free slab numbers.
    pub static SLAB_TABLE: LockClass = LockClass::new(16, "slab_table");
    /// The list of slab caches.
    pub static SLAB_CACHES: LockClass = LockClass::new(17, "slab_caches");
    /// A CPU's pagevec of an LRU.
    pub static LRU_PAGEVEC: LockClass = LockClass::new(18, "lru_pagevec");
    /// The batches of one tag in an LRU. Several are taken in ascending order of tag.
    pub static LRU_BATCH: LockClass = LockClass { several: true, ..LockClass::new(19, "lru_batch") };
    /// The edges of batches in an LRU: the kernel's `lru_lock`.
    pub static LRU_LOCK: LockClass = LockClass::new(20, "lru_lock");
    /// The free extents of a backing device.
    pub static BACKING_EXTENTS: LockClass = LockClass::new(21, "backing_extents");
    /// What a store's policy thread waits for, and the writers that wait for it.
    pub static POLICY: LockClass = LockClass::new(22, "policy");
    /// Transfers to and from a backing: those queued for a thread, and those that a thread waits for.
    pub static BACKING_QUEUE: LockClass = LockClass::new(23, "backing_queue");
    /// The free transfer buffers.
    pub static BACKING_BUFFERS: LockClass = LockClass::new(24, "backing_buffers");
    /// Giving a page of the slot table back to the system.
    pub static SLOT_TABLE: LockClass = LockClass::new(25, "slot_table");
    /// Threads that wait for a bit lock.
    pub static WAIT_TABLE: LockClass = LockClass::new(26, "wait_table");
    /// Settings of a store that outlives the process.
    pub static LIVE_SETTINGS: LockClass = LockClass::new(27, "live_settings");
    /// A CPU's list of handles whose frees are deferred.
    pub static ZS_DEFERRED: LockClass = LockClass::new(28, "zs_deferred");
    /// The batches of such handles that no list holds.
    pub static ZS_DEFERRED_QUEUE: LockClass = LockClass::new(29, "zs_deferred_queue");

    /// All classes.
    pub static ALL: [&LockClass; 30] = [
        &DEVICE,
        &WRITEBACK,
        &SLOT,
        &STREAM_LIST,
        &STREAM,
        &COMPACTION,
        &ZS_POOL,
        &SIZE_CLASS,
        &ZS_LRU,
        &RECLAIM,
        &RUN_CACHE,
        &ARENA,
        &SLAB_SHEAF,
        &SLAB_BARN,
        &SLAB_CPU,
        &SLAB_LIST,
        &SLAB_TABLE,
        &SLAB_CACHES,
        &LRU_PAGEVEC,
        &LRU_BATCH,
        &LRU_LOCK,
        &BACKING_EXTENTS,
        &POLICY,
        &BACKING_QUEUE,
        &BACKING_BUFFERS,
        &SLOT_TABLE,
        &WAIT_TABLE,
        &LIVE_SETTINGS,
        &ZS_DEFERRED,
        &ZS_DEFERRED_QUEUE,
    ];
}

/// Exists while a lock of its class is held: checks the lock order (debug builds) and records the hold
/// (feature `lock-stats`); otherwise empty.
pub(super) struct Hold {
    #[cfg(any(debug_assertions, feature = "lock-stats"))]
    class: &'static LockClass,
    recorded: Recorded,
}

#[cfg(not(any(debug_assertions, feature = "lock-stats")))]
const _: () = assert!(size_of::<Hold>() == 0);

impl Hold {
    /// Panics in debug builds if the thread may not wait for a lock of `class` now.
    #[inline]
    pub(super) fn check_order(class: &'static LockClass) {
        order::check(class);
    }

    /// Takes the lock: by `try_take` if that succeeds at once, else by `wait`. The class must come
    /// after all classes that the thread holds already.
    pub(super) fn take<G>(
        class: &'static LockClass,
        last: &LastCpu,
        mode: LockMode,
        try_take: impl FnOnce() -> Option<G>,
        wait: impl FnOnce() -> G,
    ) -> (G, Hold) {
        order::check(class);
        #[cfg(feature = "lock-stats")]
        let guard = try_take().unwrap_or_else(|| super::stats::wait_for(class, last, mode, wait));
        #[cfg(not(feature = "lock-stats"))]
        let guard = {
            let _ = try_take;
            wait()
        };
        (guard, Hold::new(class, last, mode))
    }

    /// For a lock that was taken without waiting: the lock order does not apply.
    pub(super) fn new(class: &'static LockClass, last: &LastCpu, mode: LockMode) -> Self {
        order::push(class);
        #[cfg(not(any(debug_assertions, feature = "lock-stats")))]
        let _ = class;
        Hold {
            #[cfg(any(debug_assertions, feature = "lock-stats"))]
            class,
            recorded: Recorded::start(last, mode),
        }
    }

    /// For a lock that is released while its holder waits for a condition.
    #[inline]
    pub(super) fn pause(&mut self) {
        #[cfg(feature = "lock-stats")]
        self.recorded.end(self.class);
    }

    /// For a lock that its holder has taken again after [`Hold::pause`].
    #[inline]
    pub(super) fn resume(&mut self, last: &LastCpu) {
        self.recorded.restart(last);
    }
}

#[cfg(any(debug_assertions, feature = "lock-stats"))]
impl Drop for Hold {
    fn drop(&mut self) {
        order::pop(self.class);
        self.recorded.end(self.class);
    }
}

// loom runs its threads as coroutines of one thread, so a thread-local list would mix them up.
#[cfg(all(debug_assertions, not(loom)))]
mod order {
    use super::LockClass;
    use std::cell::Cell;

    thread_local! {
        // How many locks of each rank this thread holds.
        static HELD: Cell<[u8; super::classes::ALL.len()]> =
            const { Cell::new([0; super::classes::ALL.len()]) };
    }

    fn change(class: &LockClass, by: i8) {
        HELD.with(|cell| {
            let mut held = cell.get();
            held[class.rank as usize] = held[class.rank as usize].wrapping_add_signed(by);
            cell.set(held);
        });
    }

    pub(super) fn push(class: &LockClass) {
        change(class, 1);
    }

    pub(super) fn pop(class: &LockClass) {
        change(class, -1);
    }

    pub(super) fn check(class: &LockClass) {
        HELD.with(|cell| {
            let first = class.rank as usize + usize::from(class.several);
            if let Some(rank) = cell.get()[first..].iter().position(|held| *held > 0) {
                let holder = super::classes::ALL[first + rank].name;
                panic!("lock order: waiting for '{}' while holding '{holder}'", class.name);
            }
        });
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod order {
    use super::LockClass;
    pub(super) fn check(_: &LockClass) {}
    pub(super) fn push(_: &LockClass) {}
    #[cfg(any(debug_assertions, feature = "lock-stats"))]
    pub(super) fn pop(_: &LockClass) {}
}

#[cfg(test)]
mod tests {
    use super::classes;

    #[test]
    fn the_list_is_in_lock_order() {
        for (rank, class) in classes::ALL.iter().enumerate() {
            assert_eq!(class.rank as usize, rank, "{}", class.name);
        }
    }
}
