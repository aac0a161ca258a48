//! Compression streams: codec state and buffers, lent to one thread at a time.
//!
//! The kernel once kept a locked list of idle streams; since "zram: user per-cpu compression streams" (S.
//! Senozhatsky, 2016) it has one for each CPU, as here: [`PerCpu`]. With the feature `designs` there is the
//! list, too.
//!
//! Locks: a stream is held while a page is compressed and stored, so it comes before everything
//! of zsmalloc. A thread holds one stream at a time.

#[cfg(feature = "designs")]
mod any;
#[cfg(feature = "designs")]
mod idle_list;
mod per_cpu;

#[cfg(all(test, loom, feature = "designs"))]
mod loom_tests;
#[cfg(all(test, not(loom), feature = "designs"))]
mod tests;

#[cfg(feature = "designs")]
pub use any::{AnyStreams, StreamDesign};
#[cfg(feature = "designs")]
pub use idle_list::IdleList;
pub use per_cpu::PerCpu;

use std::ops::DerefMut;

/// A design for sharing streams among threads.
pub trait Streams<S> {
    /// A stream lent to one thread until this is dropped.
    type Lent<'a>: DerefMut<Target = S>
    where
        Self: 'a;

    /// Lends a stream; waits only while all are lent. A thread must hold at most one.
    fn lend(&self) -> Self::Lent<'_>;

    /// Returns how often a thread has waited because all streams were lent.
    fn sleeps(&self) -> u64;
}

/// The maximum number of spare streams per CPU: up to five threads per CPU can be preempted while they
/// compress before a thread has to wait.
pub const SPARES_PER_CPU: usize = 4;
