//! What the lists hold, and what was done with them.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

use super::node::List;

/// A CPU's share of the counts.
#[derive(Debug, Default)]
pub(super) struct Share {
    lens: [Counter; 2],
    pub(super) added: Counter,
    pub(super) activated: Counter,
    pub(super) demoted: Counter,
    pub(super) removed: Counter,
    pub(super) isolated: Counter,
    pub(super) put_back: Counter,
    pub(super) evicted: Counter,
    pub(super) refaulted: Counter,
    pub(super) scanned: Counter,
    pub(super) lru_locks: Counter,
    pub(super) lru_locks_contended: Counter,
    pub(super) batch_locks: Counter,
    pub(super) batch_locks_contended: Counter,
}

/// The counts, each CPU's for itself.
#[derive(Debug)]
pub struct Counts(PerCpu<Share>);

impl Counts {
    pub(super) fn new() -> Self {
        Counts(PerCpu::new(|_| Share::default()))
    }

    #[inline]
    pub(super) fn local(&self) -> &Share {
        self.0.local()
    }

    #[inline]
    pub(super) fn len(&self, list: List) -> &Counter {
        &self.local().lens[list as usize]
    }

    /// Pages of a list. Others change it meanwhile.
    pub(super) fn total_len(&self, list: List) -> u64 {
        // One CPU may have taken out what another put in, and may have done so after it was looked at.
        let sum = self.sum(|share| &share.lens[list as usize]);
        if sum > u64::MAX / 2 { 0 } else { sum }
    }

    pub(super) fn sum(&self, which: impl Fn(&Share) -> &Counter) -> u64 {
        self.0.iter().fold(0, |sum: u64, share| sum.wrapping_add(which(share).get()))
    }
}
