//! Whether a writer holds its stream while it waits for memory.
//!
//! By default it does. The kernel released it from 4.7 to 6.14; [`StoreBuilder`] offers that for comparisons at a
//! memory limit.
//!
//! Lock order: with [`StreamAlloc::Released`], no stream is held while a writer waits for memory.
//!
//! [`StoreBuilder`]: super::StoreBuilder

use crate::base::error::Result;
use crate::base::mem::Gfp;
use crate::base::units::{PAGE_SIZE, Page, PageNo};
use crate::stream::Streams;

use super::Store;

/// What a writer does with its stream when it must wait for memory: the pool must grow by a system call, or free memory
/// must first go back to the system because of the limit. (A page fault at the first touch of a page does not count as
/// waiting.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamAlloc {
    /// The writer holds it; other threads have one stream less meanwhile.
    #[default]
    Held,
    /// The writer releases it, waits, takes a stream again and compresses the page again, and counts a
    /// [`writestall`](super::StoreStats::writestall). The kernel did so from 4.7 on, where a thread that holds a CPU's
    /// stream may not sleep, until 6.15 made streams sleepable.
    Released,
}

impl Store {
    /// Stores a page without holding a stream while it waits for memory: see [`StreamAlloc::Released`].
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
        // The length is normally the same as before; if not, the pool allocates another object.
        let bytes = self.compress(&mut stream, page, contents);
        reserved.write(bytes, owner).map(|handle| (handle, bytes.len()))
    }
}
