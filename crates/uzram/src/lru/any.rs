//! An LRU of any lock design, chosen at run time.

use crate::base::error::Result;
use crate::base::named::named;

use super::{Batched, Lru, LruConfig, LruLocks, LruStats, SingleLock};

/// A lock design, chosen at run time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LruDesign {
    #[default]
    Batched,
    SingleLock,
}

impl LruDesign {
    /// All of them.
    pub const ALL: [LruDesign; 2] = [LruDesign::Batched, LruDesign::SingleLock];

    /// Returns its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            LruDesign::Batched => Batched::NAME,
            LruDesign::SingleLock => SingleLock::NAME,
        }
    }
}

named!(LruDesign, "no LRU lock design '{}'; there are: {}");

pub(crate) enum AnyLru {
    Batched(Lru<Batched>),
    SingleLock(Lru<SingleLock>),
}

impl AnyLru {
    /// As [`Lru::new`].
    pub fn new(design: LruDesign, config: &LruConfig) -> Result<Self> {
        match design {
            LruDesign::Batched => Lru::new(config).map(AnyLru::Batched),
            LruDesign::SingleLock => Lru::new(config).map(AnyLru::SingleLock),
        }
    }
}

/// Functions that call the function of the same name of the design's LRU.
macro_rules! forward {
    ($($(#[$attr:meta])* fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        impl AnyLru {
            $(
                $(#[$attr])*
                #[inline]
                pub fn $name(&self $(, $arg: $type)*) $(-> $out)? {
                    match self {
                        AnyLru::Batched(lru) => lru.$name($($arg),*),
                        AnyLru::SingleLock(lru) => lru.$name($($arg),*),
                    }
                }
            )*
        }
    };
}

forward! {
    fn arrive(&self, page: u32) -> bool;
    fn queue(&self, page: u32);
    fn mark(&self, page: u32);
    fn prefetch(&self, page: u32);
    fn mark_dead(&self, page: u32) -> bool;
    fn remove_dead(&self, pages: &mut [u32]);
    fn isolate(&self, most: usize, out: &mut Vec<u32>);
    fn is_isolated(&self, page: u32) -> bool;
    fn put_back(&self, pages: &[u32]);
    fn leave(&self, page: u32) -> bool;
    fn refault(&self, page: u32) -> bool;
    #[cfg(not(loom))]
    fn adopt(&self, pages: impl Iterator<Item = u32>);
    fn set_pagevec_pages(&self, pages: usize) -> Result<()>;
    fn stats(&self) -> LruStats;
    fn populate(&self) -> Result<()>;
    fn max_bytes(&self) -> usize;
    #[cfg(not(loom))]
    fn resident_bytes(&self) -> usize;
}
