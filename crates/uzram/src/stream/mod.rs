//! Compression streams: codec state and buffers, lent to one thread at a time.
//!
//! The kernel once kept a locked list of idle streams; since "zram: user per-cpu compression
//! streams" (S. Senozhatsky, 2016) it has one for each CPU. Both are designs of one trait,
//! [`Streams`], over whatever a stream is: [`IdleList`] and [`PerCpu`]. [`AnyStreams`] is whichever
//! of them a [`StreamDesign`] names.
//!
//! Locks: a stream is held while a page is compressed and stored, so it comes before everything
//! of zsmalloc. A thread holds one stream at a time.

mod design;
mod idle_list;
mod per_cpu;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

pub use design::{StreamCount, StreamDesign};
pub use idle_list::IdleList;
pub use per_cpu::PerCpu;

use std::ops::{Deref, DerefMut};

use crate::base::cpu;

/// A way to share streams among threads.
pub trait Streams<S> {
    /// A stream that one thread has, until it is dropped.
    type Lent<'a>: DerefMut<Target = S>
    where
        Self: 'a;

    /// Lends a stream, waiting for one only while all are lent. A thread has one at a time.
    fn lend(&self) -> Self::Lent<'_>;

    /// How often a thread found all streams lent and waited, so far.
    fn sleeps(&self) -> u64;
}

/// Spare streams that one CPU's threads can make necessary: five threads a CPU, all stopped while they
/// compress, still leave nobody waiting.
pub const SPARES_PER_CPU: usize = 4;

/// Streams of the design that was asked for.
pub enum AnyStreams<S> {
    /// See [`PerCpu`].
    PerCpu(PerCpu<S>),
    /// See [`IdleList`].
    IdleList(IdleList<S>),
}

/// A stream of either design that a thread has, until it is dropped.
pub enum AnyLent<'a, S> {
    PerCpu(per_cpu::Lent<'a, S>),
    IdleList(idle_list::Lent<'a, S>),
}

impl<S> Deref for AnyLent<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        match self {
            AnyLent::PerCpu(stream) => stream,
            AnyLent::IdleList(stream) => stream,
        }
    }
}

impl<S> DerefMut for AnyLent<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        match self {
            AnyLent::PerCpu(stream) => stream,
            AnyLent::IdleList(stream) => stream,
        }
    }
}

impl<S> AnyStreams<S> {
    /// Makes the streams of `design`; per-CPU ones get [`SPARES_PER_CPU`] more when needed.
    ///
    /// # Errors
    /// What `make` returns for the first that cannot be made.
    pub fn new<E>(
        design: StreamDesign,
        make: impl Fn() -> Result<S, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        match design {
            StreamDesign::PerCpu => {
                PerCpu::new(SPARES_PER_CPU * cpu::possible(), make).map(AnyStreams::PerCpu)
            }
            StreamDesign::IdleList(count) => IdleList::new(count, make).map(AnyStreams::IdleList),
        }
    }

    /// Makes all streams now that may be needed, and returns whether that could be done.
    pub fn make_spares(&self) -> bool {
        match self {
            AnyStreams::PerCpu(streams) => streams.make_spares(),
            AnyStreams::IdleList(_) => true,
        }
    }
}

impl<S> Streams<S> for AnyStreams<S> {
    type Lent<'a>
        = AnyLent<'a, S>
    where
        S: 'a;

    #[inline]
    fn lend(&self) -> AnyLent<'_, S> {
        match self {
            AnyStreams::PerCpu(streams) => AnyLent::PerCpu(streams.lend()),
            AnyStreams::IdleList(streams) => AnyLent::IdleList(streams.lend()),
        }
    }

    fn sleeps(&self) -> u64 {
        match self {
            AnyStreams::PerCpu(streams) => streams.sleeps(),
            AnyStreams::IdleList(streams) => streams.sleeps(),
        }
    }
}
