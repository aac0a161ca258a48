//! Compression streams: codec state and buffers, lent to one thread at a time.
//!
//! The kernel has one for each CPU, as here: [`PerCpu`]. With the feature `designs` there is the locked list
//! of idle streams that it had before, too.
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

use std::ops::{Deref, DerefMut};

use crate::base::sync::MutexGuard;

/// A design for sharing streams among threads.
pub trait Streams<S> {
    /// Lends a stream; waits only while all are lent. A thread must hold at most one.
    fn lend(&self) -> Lent<'_, S>;

    /// Returns how often a thread has waited because all streams were lent.
    fn sleeps(&self) -> u64;
}

/// The maximum number of spare streams per CPU: up to five threads per CPU can be preempted while they
/// compress before a thread has to wait.
pub const SPARES_PER_CPU: usize = 4;

/// A stream lent to one thread until this is dropped.
pub struct Lent<'a, S> {
    place: Place<'a, S>,
}

enum Place<'a, S> {
    Cpu(MutexGuard<'a, S>),
    /// Always `Some`.
    Spare(MutexGuard<'a, Option<S>>),
    /// Unlocked before `_taken` returns it to the list.
    #[cfg(feature = "designs")]
    Listed {
        stream: MutexGuard<'a, S>,
        _taken: idle_list::Taken<'a, S>,
    },
}

/// The panic message for a spare place without a stream, which is never lent.
const NOT_MADE: &str = "a spare stream was lent that was not made";

impl<S> Deref for Lent<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        match &self.place {
            Place::Cpu(stream) => stream,
            Place::Spare(stream) => stream.as_ref().expect(NOT_MADE),
            #[cfg(feature = "designs")]
            Place::Listed { stream, .. } => stream,
        }
    }
}

impl<S> DerefMut for Lent<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        match &mut self.place {
            Place::Cpu(stream) => stream,
            Place::Spare(stream) => stream.as_mut().expect(NOT_MADE),
            #[cfg(feature = "designs")]
            Place::Listed { stream, .. } => stream,
        }
    }
}
