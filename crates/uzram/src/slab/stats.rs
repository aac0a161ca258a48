//! What a cache counts, by the names of the kernel's SLUB_STATS.
//!
//! The fast paths count by the number of operations that their words carry anyway, folded in when a
//! slow path closes the word. (That number is one modulo 2^32 in a free list's word: as many operations
//! without a slow path are lost.) The objects of slow paths are counted always, and everything else only
//! when [`set_counting`] is on, so that it costs a branch there. Times are measured only when
//! [`set_timing`] is on.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

/// Whether slow paths count.
static COUNTING: Counter = Counter::new(0);
/// Whether times are measured.
static TIMING: Counter = Counter::new(0);

/// From now on every cache of this process counts what its slow paths do, or no longer does. Off at
/// first.
pub fn set_counting(on: bool) {
    COUNTING.set(on.into());
}

/// From now on every cache of this process measures for how long `list_lock` is held, at the price
/// of reading the clock twice each time, or no longer does. Off at first.
pub fn set_timing(on: bool) {
    TIMING.set(on.into());
}

/// Whether times are measured.
#[inline]
pub(super) fn timing() -> bool {
    TIMING.get() != 0
}

/// The counters of a cache.
pub(super) struct Counters(PerCpu<[Counter; Stat::COUNT]>);

impl Counters {
    pub(super) fn new() -> Self {
        Counters(PerCpu::new(|_| std::array::from_fn(|_| Counter::default())))
    }

    /// Counts one, if counting is on.
    #[inline]
    pub(super) fn count(&self, stat: Stat) {
        if COUNTING.get() != 0 {
            self.add(stat, 1);
        }
    }

    /// Counts `n`, whether counting is on or not.
    pub(super) fn add(&self, stat: Stat, n: u64) {
        self.0.local()[stat as usize].add(n);
    }

    /// [`Counters::add_for`] for several counters.
    pub(super) fn add_all_for<const N: usize>(&self, cpu: usize, counters: [Stat; N], counts: [u64; N]) {
        counters.into_iter().zip(counts).for_each(|(stat, n)| self.add_for(cpu, stat, n));
    }

    /// Counts `n` for one CPU, whether counting is on or not.
    pub(super) fn add_for(&self, cpu: usize, stat: Stat, n: u64) {
        self.0.of(cpu)[stat as usize].add(n);
    }

    /// Reads counters of one CPU anew into `stats`, and adds what they lack.
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

    /// Each CPU's counters, by `Stat as usize`.
    pub(super) fn read(&self) -> Vec<[u64; Stat::COUNT]> {
        self.0.iter().map(|counters| std::array::from_fn(|stat| counters[stat].get())).collect()
    }
}

/// One counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stat {
    /// Objects taken from the CPU's free list.
    AllocFastpath,
    /// Objects taken from slabs otherwise, those for sheaves among them.
    AllocSlowpath,
    /// Objects put on the CPU's free list.
    FreeFastpath,
    /// Objects put back into their slab, those from sheaves among them.
    FreeSlowpath,
    /// Times objects were put back into a frozen slab.
    FreeFrozen,
    /// Slabs that a free put on the node partial list.
    FreeAddPartial,
    /// Slabs that a free took from the node partial list.
    FreeRemovePartial,
    /// Slabs taken from the node partial list to allocate from at once.
    AllocFromPartial,
    /// Slabs made.
    AllocSlab,
    /// Times the active slab had objects again that others freed.
    AllocRefill,
    /// Slabs given back to the arena.
    FreeSlab,
    /// CPUs whose slab was taken away, by `shrink` for one.
    CpuslabFlush,
    /// Slabs that were full when a CPU let go of them.
    DeactivateFull,
    /// Slabs that were empty then.
    DeactivateEmpty,
    /// Slabs that went to the head of the node partial list.
    DeactivateToHead,
    /// Slabs that went to its tail.
    DeactivateToTail,
    /// Slabs into which others had freed objects meanwhile.
    DeactivateRemoteFrees,
    /// Active slabs that were let go because they had no free object.
    DeactivateBypass,
    /// Exchanges of slab words: what stands for the kernel's double-width compare-exchange.
    CmpxchgDouble,
    /// Of those, the ones that failed.
    CmpxchgDoubleFail,
    /// Slabs taken from the CPU partial list.
    CpuPartialAlloc,
    /// Slabs that a free put on the CPU partial list.
    CpuPartialFree,
    /// Slabs moved from the node partial list to the CPU partial list.
    CpuPartialNode,
    /// CPU partial lists that were moved to the node partial list.
    CpuPartialDrain,
    /// Objects allocated in front of the slabs, with sheaves.
    AllocPcs,
    /// Objects freed there.
    FreePcs,
    /// Sheaves filled from slabs.
    SheafRefill,
    /// Sheaves emptied into slabs.
    SheafFlush,
    /// Sheaves taken from the barn.
    BarnGet,
    /// Times the barn had none.
    BarnGetFail,
    /// Sheaves put into the barn.
    BarnPut,
    /// Times the barn had no room.
    BarnPutFail,
    /// Times the node's list_lock was taken.
    ListLockAcquired,
    /// Of those, the times it was not free at once.
    ListLockContended,
    /// Nanoseconds for which it was held; 0 unless times are measured.
    ListLockHoldNs,
}

impl Stat {
    /// How many there are.
    pub const COUNT: usize = Stat::ListLockHoldNs as usize + 1;
}

/// The list of counters once more, with their names, in the order of the enum.
macro_rules! named {
    ($($stat:ident $name:literal,)*) => {
        impl Stat {
            /// Every counter, each at its own index.
            pub const ALL: [Stat; Stat::COUNT] = [$(Stat::$stat),*];

            /// Its name: that of the kernel's file in `/sys/kernel/slab/CACHE/`, where there is one.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Stat::$stat => $name,)*
                }
            }
        }
    };
}

named! {
    AllocFastpath "alloc_fastpath",
    AllocSlowpath "alloc_slowpath",
    FreeFastpath "free_fastpath",
    FreeSlowpath "free_slowpath",
    FreeFrozen "free_frozen",
    FreeAddPartial "free_add_partial",
    FreeRemovePartial "free_remove_partial",
    AllocFromPartial "alloc_from_partial",
    AllocSlab "alloc_slab",
    AllocRefill "alloc_refill",
    FreeSlab "free_slab",
    CpuslabFlush "cpuslab_flush",
    DeactivateFull "deactivate_full",
    DeactivateEmpty "deactivate_empty",
    DeactivateToHead "deactivate_to_head",
    DeactivateToTail "deactivate_to_tail",
    DeactivateRemoteFrees "deactivate_remote_frees",
    DeactivateBypass "deactivate_bypass",
    CmpxchgDouble "cmpxchg_double",
    CmpxchgDoubleFail "cmpxchg_double_fail",
    CpuPartialAlloc "cpu_partial_alloc",
    CpuPartialFree "cpu_partial_free",
    CpuPartialNode "cpu_partial_node",
    CpuPartialDrain "cpu_partial_drain",
    AllocPcs "alloc_pcs",
    FreePcs "free_pcs",
    SheafRefill "sheaf_refill",
    SheafFlush "sheaf_flush",
    BarnGet "barn_get",
    BarnGetFail "barn_get_fail",
    BarnPut "barn_put",
    BarnPutFail "barn_put_fail",
    ListLockAcquired "list_lock_acquired",
    ListLockContended "list_lock_contended",
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
