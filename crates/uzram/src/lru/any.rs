//! An LRU of any lock design, chosen at run time.

use crate::base::error::Result;
use crate::base::named::named;

use super::{Batched, Lru, LruConfig, LruLocks, LruStats, SingleLock};

/// A lock design, chosen at run time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LruDesign {
    /// [`Batched`].
    #[default]
    Batched,
    /// [`SingleLock`].
    SingleLock,
    /// No LRU.
    None,
}

impl LruDesign {
    /// All of them.
    pub const ALL: [LruDesign; 3] = [LruDesign::Batched, LruDesign::SingleLock, LruDesign::None];

    /// Returns its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            LruDesign::Batched => Batched::NAME,
            LruDesign::SingleLock => SingleLock::NAME,
            LruDesign::None => "none",
        }
    }
}

named!(LruDesign, "no LRU lock design '{}'; there are: {}");

/// An [`Lru`] of one of the designs.
pub(crate) enum AnyLru {
    Batched(Lru<Batched>),
    SingleLock(Lru<SingleLock>),
}

/// Evaluates `$then` with `$lru` bound to the variant's value.
macro_rules! each {
    ($any:expr, $lru:ident => $then:expr) => {
        match $any {
            AnyLru::Batched($lru) => $then,
            AnyLru::SingleLock($lru) => $then,
        }
    };
}

impl AnyLru {
    /// As [`Lru::new`]; `None` for [`LruDesign::None`].
    pub fn new(design: LruDesign, options: &LruConfig) -> Result<Option<Self>> {
        Ok(match design {
            LruDesign::Batched => Some(AnyLru::Batched(Lru::new(options)?)),
            LruDesign::SingleLock => Some(AnyLru::SingleLock(Lru::new(options)?)),
            LruDesign::None => None,
        })
    }

    /// As [`Lru::arrive`].
    #[inline]
    pub fn arrive(&self, page: u32) -> bool {
        each!(self, lru => lru.arrive(page))
    }

    /// As [`Lru::queue`].
    pub fn queue(&self, page: u32) {
        each!(self, lru => lru.queue(page));
    }

    /// As [`Lru::mark`].
    #[inline]
    pub fn mark(&self, page: u32) {
        each!(self, lru => lru.mark(page));
    }

    /// As [`Lru::is_active`].
    pub fn is_active(&self, page: u32) -> bool {
        each!(self, lru => lru.is_active(page))
    }

    /// As [`Lru::prefetch`].
    #[inline]
    pub fn prefetch(&self, page: u32) {
        each!(self, lru => lru.prefetch(page));
    }

    /// As [`Lru::mark_dead`].
    #[inline]
    pub fn mark_dead(&self, page: u32) -> bool {
        each!(self, lru => lru.mark_dead(page))
    }

    /// As [`Lru::remove_dead`].
    pub fn remove_dead(&self, pages: &mut [u32]) {
        each!(self, lru => lru.remove_dead(pages));
    }

    /// As [`Lru::isolate`].
    pub fn isolate(&self, most: usize, out: &mut Vec<u32>) {
        each!(self, lru => lru.isolate(most, out));
    }

    /// As [`Lru::is_isolated`].
    pub fn is_isolated(&self, page: u32) -> bool {
        each!(self, lru => lru.is_isolated(page))
    }

    /// As [`Lru::put_back`].
    pub fn put_back(&self, pages: &[u32]) {
        each!(self, lru => lru.put_back(pages));
    }

    /// As [`Lru::leave`].
    pub fn leave(&self, page: u32) -> bool {
        each!(self, lru => lru.leave(page))
    }

    /// As [`Lru::refault`].
    pub fn refault(&self, page: u32) -> bool {
        each!(self, lru => lru.refault(page))
    }

    /// As [`Lru::adopt`].
    #[cfg(not(loom))]
    pub fn adopt(&self, pages: impl Iterator<Item = u32>) {
        each!(self, lru => lru.adopt(pages));
    }

    /// As [`Lru::set_pagevec_pages`].
    pub fn set_pagevec_pages(&self, pages: usize) -> Result<()> {
        each!(self, lru => lru.set_pagevec_pages(pages))
    }

    /// As [`Lru::stats`].
    pub fn stats(&self) -> LruStats {
        each!(self, lru => lru.stats())
    }

    /// As [`Lru::populate`].
    pub fn populate(&self) -> Result<()> {
        each!(self, lru => lru.populate())
    }

    /// As [`Lru::max_bytes`].
    pub fn max_bytes(&self) -> usize {
        each!(self, lru => lru.max_bytes())
    }

    /// As [`Lru::resident_bytes`].
    #[cfg(not(loom))]
    pub fn resident_bytes(&self) -> usize {
        each!(self, lru => lru.resident_bytes())
    }
}
