//! The counters of a cache, with the names of the kernel's SLUB_STATS.
//!
//! The fast paths are counted by the operation number in their words, which a slow path adds to the
//! counters when it closes the word. (The number is modulo 2^32: multiples of that between two slow paths
//! are lost.) Objects of slow paths are always counted, everything else only when [`set_counting`] is on,
//! which costs a branch, and for `list_lock`'s hold time two clock reads.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

static COUNTING: Counter = Counter::new(0);

/// Turns counting of slow path events, and measuring of `list_lock`'s hold time, on or off for all caches of
/// this process; off by default.
pub fn set_counting(on: bool) {
    COUNTING.set(on.into());
}

pub(super) struct Counters(PerCpu<[Counter; Stat::COUNT]>);

impl Counters {
    pub(super) fn new() -> Self {
        Counters(PerCpu::new(|_| std::array::from_fn(|_| Counter::default())))
    }

    /// Counts one, if counting is on.
    #[inline]
    pub(super) fn count(&self, stat: Stat) {
        if let Some(counter) = self.get(stat) {
            counter.add(1);
        }
    }

    /// Returns this CPU's counter, if counting is on.
    #[inline]
    pub(super) fn get(&self, stat: Stat) -> Option<&Counter> {
        (COUNTING.get() != 0).then(|| &self.0.local()[stat as usize])
    }

    /// Counts `n`, whether counting is on or not.
    pub(super) fn add(&self, stat: Stat, n: u64) {
        self.0.local()[stat as usize].add(n);
    }

    pub(super) fn add_all_for<const N: usize>(&self, cpu: usize, counters: [Stat; N], counts: [u64; N]) {
        counters.into_iter().zip(counts).for_each(|(stat, n)| self.add_for(cpu, stat, n));
    }

    pub(super) fn add_for(&self, cpu: usize, stat: Stat, n: u64) {
        self.0.of(cpu)[stat as usize].add(n);
    }

    /// Reads counters of one CPU into `stats` again, and adds `lacking`, which they do not contain yet.
    pub(super) fn read_with<const N: usize>(
        &self,
        cpu: usize,
        counters: [Stat; N],
        lacking: [u64; N],
        stats: &mut [u64; Stat::COUNT],
    ) {
        for (stat, lacking) in counters.into_iter().zip(lacking) {
            stats[stat as usize] = self.0.of(cpu)[stat as usize].get() + lacking;
        }
    }

    pub(super) fn read(&self) -> Vec<[u64; Stat::COUNT]> {
        self.0.iter().map(|counters| std::array::from_fn(|stat| counters[stat].get())).collect()
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $stat:ident $name:literal,)*) => {
        /// One counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Stat {
            $($(#[$doc])* $stat,)*
        }

        impl Stat {
            /// Every counter, each at its own index.
            pub const ALL: [Stat; Stat::COUNT] = [$(Stat::$stat),*];
            /// The number of counters.
            pub const COUNT: usize = [$(Stat::$stat),*].len();

            /// Returns its name: that of the kernel's file in `/sys/kernel/slab/CACHE/`, where there is one.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Stat::$stat => $name,)*
                }
            }
        }
    };
}

stats! {
    /// Objects taken from the CPU's free list.
    AllocFastpath "alloc_fastpath",
    /// Objects taken from slabs by slow paths, including those for sheaves.
    AllocSlowpath "alloc_slowpath",
    /// Objects put on the CPU's free list.
    FreeFastpath "free_fastpath",
    /// Objects put back into their slab, including those from sheaves.
    FreeSlowpath "free_slowpath",
    /// Times objects were put back into a frozen slab.
    FreeFrozen "free_frozen",
    /// Slabs that a free put on the node partial list.
    FreeAddPartial "free_add_partial",
    /// Slabs that a free took from the node partial list.
    FreeRemovePartial "free_remove_partial",
    /// Slabs taken from the node partial list to allocate from at once.
    AllocFromPartial "alloc_from_partial",
    /// Slabs made.
    AllocSlab "alloc_slab",
    /// Times the active slab was refilled with objects that other CPUs freed.
    AllocRefill "alloc_refill",
    /// Slabs given back to the arena.
    FreeSlab "free_slab",
    /// Active slabs that `shrink` took from their CPU.
    CpuslabFlush "cpuslab_flush",
    /// Slabs that were full when they were deactivated.
    DeactivateFull "deactivate_full",
    /// Slabs that were empty then.
    DeactivateEmpty "deactivate_empty",
    /// Slabs that went to the head of the node partial list.
    DeactivateToHead "deactivate_to_head",
    /// Slabs that went to its tail.
    DeactivateToTail "deactivate_to_tail",
    /// Active slabs that were given up because they had no free object.
    DeactivateBypass "deactivate_bypass",
    /// Compare-exchanges of slab words, for which the kernel uses a double-width one.
    CmpxchgDouble "cmpxchg_double",
    /// Of those, the ones that failed.
    CmpxchgDoubleFail "cmpxchg_double_fail",
    /// Slabs taken from the CPU partial list.
    CpuPartialAlloc "cpu_partial_alloc",
    /// Slabs that a free put on the CPU partial list.
    CpuPartialFree "cpu_partial_free",
    /// Slabs moved from the node partial list to the CPU partial list.
    CpuPartialNode "cpu_partial_node",
    /// CPU partial lists that were moved to the node partial list.
    CpuPartialDrain "cpu_partial_drain",
    /// Objects allocated from sheaves.
    AllocPcs "alloc_pcs",
    /// Objects freed to sheaves.
    FreePcs "free_pcs",
    /// Sheaves filled from slabs.
    SheafRefill "sheaf_refill",
    /// Sheaves emptied into slabs.
    SheafFlush "sheaf_flush",
    /// Sheaves taken from the barn.
    BarnGet "barn_get",
    /// Times the barn had no filled sheaf.
    BarnGetFail "barn_get_fail",
    /// Sheaves put into the barn.
    BarnPut "barn_put",
    /// Times the barn had no empty sheaf to exchange.
    BarnPutFail "barn_put_fail",
    /// Times the node's list_lock was taken.
    ListLockAcquired "list_lock_acquired",
    /// Of those, the times it was not free at once.
    ListLockContended "list_lock_contended",
    /// Nanoseconds for which list_lock was held.
    ListLockHoldNs "list_lock_hold_ns",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_stands_at_its_own_index_under_its_own_name() {
        for (index, stat) in Stat::ALL.into_iter().enumerate() {
            assert_eq!(stat as usize, index, "{}", stat.name());
            let written: String =
                stat.name().split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect();
            assert_eq!(written, format!("{stat:?}"));
        }
    }
}
