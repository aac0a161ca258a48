//! What becomes of a writer's stream while memory for its page is waited for.
//!
//! The product's writers hold it. Releasing it is the kernel's way from 4.7 to 6.14, which a [`StoreBuilder`] offers for
//! comparisons at a memory limit.
//!
//! Lock order: a stream is held for one attempt at a time, and never while memory is waited for.
//!
//! [`StoreBuilder`]: super::StoreBuilder

use crate::base::error::Result;
use crate::base::mem::Gfp;
use crate::base::units::{PAGE_SIZE, Page, PageNo};
use crate::stream::Streams;

use super::Store;

/// What becomes of a writer's stream when memory for its page takes waiting: the pool must grow by a system call, or free
/// memory must go back first because of the limit. (The kernel faults in a page that is touched the first time in either
/// case; that counts as no waiting.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamAlloc {
    /// The writer holds it: others find one stream less meanwhile.
    #[default]
    Held,
    /// The writer releases it, waits, takes a stream again and compresses the page anew, and counts a
    /// [`writestall`](super::StoreStats::writestall). The kernel did so from 4.7 on, where nobody may sleep who holds the
    /// stream of a CPU, until streams could be slept with in 6.15.
    Released,
}

impl Store {
    /// Stores a page without holding a stream while memory is waited for: see [`StreamAlloc::Released`].
    pub(super) fn store_released(&self, page: PageNo, contents: &Page) -> Result<(u32, usize)> {
        let owner = page.0;
        let len = {
            let mut stream = self.codec.streams.lend();
            let bytes = self.compress(&mut stream, page, contents);
            if let Ok(handle) = self.pool.store(bytes, owner, Gfp::NoWait) {
                return Ok((handle, bytes.len()));
            }
            bytes.len()
        };
        self.counters.local().writestall.add(1);
        let reserved = self.pool.reserve(len, Gfp::MayWait)?;
        if len == PAGE_SIZE {
            return reserved.write(contents, owner).map(|handle| (handle, len));
        }
        let mut stream = self.codec.streams.lend();
        // As long as before; were it not, the pool would find another object for it.
        let bytes = self.compress(&mut stream, page, contents);
        reserved.write(bytes, owner).map(|handle| (handle, bytes.len()))
    }
}
