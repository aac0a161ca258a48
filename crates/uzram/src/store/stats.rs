//! What the store counts, on each CPU for itself.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

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

    pub(super) fn sum(&self, field: impl Fn(&Share) -> &Counter) -> u64 {
        self.0.iter().fold(0, |sum, share| sum.wrapping_add(field(share).get()))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl Share {
    /// Books that a page now holds `new` instead of `old`.
    #[inline]
    pub(super) fn switched(&self, old: &Contents, new: &Contents) {
        match *new {
            Contents::Empty => {}
            Contents::Same(_) => {
                self.same_pages.add(1);
            }
            Contents::Stored { len, huge, .. } => {
                self.compr_data_bytes.add(u64::from(len));
                if huge {
                    self.huge_pages.add(1);
                    self.huge_pages_since.add(1);
                }
            }
        }
        match *old {
            Contents::Empty => {}
            Contents::Same(_) => self.same_pages.sub(1),
            Contents::Stored { len, huge, .. } => {
                self.compr_data_bytes.sub(u64::from(len));
                if huge {
                    self.huge_pages.sub(1);
                }
            }
        }
        match (old, new) {
            (Contents::Empty, Contents::Empty) => {}
            (Contents::Empty, _) => {
                self.pages_stored.add(1);
            }
            (_, Contents::Empty) => self.pages_stored.sub(1),
            _ => {}
        }
    }
}
