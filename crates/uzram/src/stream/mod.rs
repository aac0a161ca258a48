//! Compression streams: codec state and buffers, lent to one thread at a time.
//!
//! The kernel once kept a locked list of idle streams; since "zram: user per-cpu compression
//! streams" (S. Senozhatsky, 2016) it has one for each CPU. Both designs implement the trait [`Streams`]
//! for any type of stream: [`IdleList`] and [`PerCpu`]. [`AnyStreams`] is the one that a [`StreamDesign`]
//! selects at run time.
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

/// Streams of a design selected at run time.
pub enum AnyStreams<S> {
    /// See [`PerCpu`].
    PerCpu(PerCpu<S>),
    /// See [`IdleList`].
    IdleList(IdleList<S>),
}

/// A stream of either design, lent to one thread until this is dropped.
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
    /// Creates the streams of `design`; with per-CPU streams, up to [`SPARES_PER_CPU`] spare ones per CPU are created
    /// later when needed.
    ///
    /// # Errors
    /// The first error of `make`.
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

    /// Creates all spare streams now. Returns whether all could be created.
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
