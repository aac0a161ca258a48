//! An LRU of any lock design, chosen at run time.

use crate::base::error::Result;
use crate::base::named::any_design;

use super::{Batched, Lru, LruConfig, LruLocks, LruStats, SingleLock};

any_design! {
    [Batched, SingleLock] LruDesign, "no LRU lock design '{}'; there are: {}", AnyLru of Lru;
    fn new(config: &LruConfig);
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
    fn adopt(&self, pages: impl Iterator<Item = u32>);
    fn set_pagevec_pages(&self, pages: usize) -> Result<()>;
    fn stats(&self) -> LruStats;
    fn populate(&self) -> Result<()>;
    fn max_bytes(&self) -> usize;
    fn resident_bytes(&self) -> usize;
}
