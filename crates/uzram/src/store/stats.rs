//! What the store counts, on each CPU for itself.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;
use crate::base::units::PAGE_SIZE;

use super::slot::Contents;

/// One CPU's share. A page may be stored on one CPU and freed on another, so a single share may
/// wrap below zero; only the sums mean anything.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) pages_stored: Counter,
    pub(super) compr_data_bytes: Counter,
    pub(super) same_pages: Counter,
    pub(super) huge_pages: Counter,
    pub(super) huge_pages_since: Counter,
    pub(super) pages_read: Counter,
    pub(super) pages_written: Counter,
    pub(super) failed_reads: Counter,
    pub(super) failed_writes: Counter,
    pub(super) notify_free: Counter,
    pub(super) writestall: Counter,
    pub(super) pages_recompressed: Counter,
}

/// The counters of a store.
#[derive(Debug)]
pub(super) struct Counters(PerCpu<Share>);

impl Counters {
    pub(super) fn new() -> Self {
        Counters(PerCpu::new(|_| Share::default()))
    }

    /// This CPU's share.
    #[inline]
    pub(super) fn local(&self) -> &Share {
        self.0.local()
    }

    /// The sum of all shares. They are read one after another: a page that moves from one to
    /// another meanwhile may be missing, so that the sum comes out below zero.
    pub(super) fn sum(&self, field: impl Fn(&Share) -> &Counter) -> u64 {
        let sum = self.0.iter().fold(0u64, |sum, share| sum.wrapping_add(field(share).get()));
        u64::try_from(sum.cast_signed()).unwrap_or(0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl Share {
    /// Books that a page now holds `new` instead of `old`.
    #[inline]
    pub(super) fn switched(&self, old: &Contents, new: &Contents) {
        change(&self.pages_stored, stored(old), stored(new));
        change(&self.same_pages, same(old), same(new));
        change(&self.compr_data_bytes, len(old), len(new));
        change(&self.huge_pages, huge(old), huge(new));
        if huge(new) > 0 {
            self.huge_pages_since.add(1);
        }
    }
}

/// Counts `new` instead of `old`.
#[inline]
fn change(counter: &Counter, old: u64, new: u64) {
    if old != new {
        counter.add(new.wrapping_sub(old));
    }
}

fn stored(contents: &Contents) -> u64 {
    u64::from(*contents != Contents::Empty)
}

fn same(contents: &Contents) -> u64 {
    u64::from(matches!(contents, Contents::Same(_)))
}

fn len(contents: &Contents) -> u64 {
    if let Contents::Stored { len, .. } = contents { u64::from(*len) } else { 0 }
}

fn huge(contents: &Contents) -> u64 {
    u64::from(len(contents) == PAGE_SIZE as u64)
}
