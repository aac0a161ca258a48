//! Lock classes: the lock order of the engine.

/// A class of locks: its name and its place in the lock order.
#[derive(Debug)]
pub struct LockClass {
    /// The name in statistics and in lock order messages.
    pub name: &'static str,
    // Used only by the check in debug builds, and by statistics.
    #[cfg_attr(not(debug_assertions), allow(dead_code))]
    pub(super) rank: usize,
    /// Whether a thread may wait for a lock of the class while it holds others of it: all threads take them
    /// in one order.
    #[cfg_attr(not(debug_assertions), allow(dead_code))]
    pub(super) several: bool,
}

/// Declares the classes and the list of them. `several` marks those of which a thread may hold one and wait
/// for another.
macro_rules! classes {
    ($($(#[$doc:meta])* $class:ident $name:literal $($several:ident)?,)*) => {
        /// The lock classes, in lock order: a thread that holds one may only wait for a later one.
        pub mod classes {
            use super::LockClass;

            #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
            enum Rank { $($class,)* }

            $(
                $(#[$doc])*
                pub static $class: LockClass = LockClass {
                    name: $name,
                    rank: Rank::$class as usize,
                    several: {
                        const SEVERAL: &[&str] = &[$(stringify!($several))?];
                        !SEVERAL.is_empty()
                    },
                };
            )*

            /// All classes.
            pub static ALL: [&LockClass; [$($name),*].len()] = [$(&$class),*];
        }
    };
}

classes! {
    /// A device's life cycle.
    DEVICE "device",
    /// Writeback: the extents being filled and the transfers in flight.
    WRITEBACK "writeback",
    /// One page's slot.
    SLOT "slot",
    /// The list of idle streams.
    STREAM_LIST "stream_list",
    /// A compression stream.
    STREAM "stream",
    /// Freeing what was deferred.
    ZS_FREEING "zs_freeing",
    /// Compaction of a zsmalloc pool.
    COMPACTION "compaction",
    /// A zsmalloc pool: the kernel's `pool->lock`.
    ZS_POOL "zs_pool",
    /// A size class of zsmalloc.
    SIZE_CLASS "size_class",
    /// The LRU of a zsmalloc pool's zspages.
    ZS_LRU "zs_lru",
    /// Giving free memory of an arena back to the system.
    RECLAIM "reclaim",
    /// A CPU's cache of free runs.
    RUN_CACHE "run_cache",
    /// The arena's chunks.
    ARENA "arena",
    /// A CPU's sheaves in a slab cache.
    SLAB_SHEAF "slab_sheaf",
    /// A slab cache's barn: the sheaves that no CPU holds.
    SLAB_BARN "slab_barn",
    /// A CPU's slabs in a slab cache.
    SLAB_CPU "slab_cpu",
    /// A slab cache's node partial list: the kernel's `list_lock`.
    SLAB_LIST "slab_list",
    /// A slab cache's free slab numbers.
    SLAB_TABLE "slab_table",
    /// A CPU's pagevec of an LRU.
    LRU_PAGEVEC "lru_pagevec",
    /// The batches of one tag in an LRU. Several are taken in ascending order of tag.
    LRU_BATCH "lru_batch" several,
    /// The edges of batches in an LRU: the kernel's `lru_lock`.
    LRU_LOCK "lru_lock",
    /// The free extents of a backing device.
    BACKING_EXTENTS "backing_extents",
    /// What a store's policy thread waits for, and the writers that wait for it.
    POLICY "policy",
    /// Transfers to and from a backing: those queued for a thread, and those that a thread waits for.
    BACKING_QUEUE "backing_queue",
    /// The free transfer buffers.
    BACKING_BUFFERS "backing_buffers",
    /// Giving a page of the slot table back to the system.
    SLOT_TABLE "slot_table",
    /// Threads that wait for a bit lock.
    WAIT_TABLE "wait_table",
    /// Settings of a store that outlives the process.
    LIVE_SETTINGS "live_settings",
    /// A CPU's page of values whose frees are deferred.
    ZS_DEFERRED "zs_deferred",
    /// The full and the spare ones of these pages.
    ZS_DEFERRED_FULL "zs_deferred_full",
    /// Locks of programs over the engine. The order does not cover them: a thread may hold and wait for any.
    PROGRAM "program" several,
}
