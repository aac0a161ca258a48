//! The thread that seals extents which are to be written, and starts to write them, while the next ones are filled.
//!
//! Loom models seal nothing.

#[cfg(loom)]
pub(super) use never::Sealer;
#[cfg(not(loom))]
pub(super) use threads::Sealer;

#[cfg(not(loom))]
mod threads {
    use super::super::log::Log;
    use super::super::sealed;
    use crate::backing::{Started, Threads, Transfer};
    use crate::base::error::Result;
    use crate::base::sync::Arc;

    /// One is faster than the thread that fills extents.
    const THREADS: usize = 1;

    /// Seals the extents of a log.
    pub(in crate::store::writeback) struct Sealer(Threads);

    impl Sealer {
        /// Starts it, if what is written is sealed. There may be so many transfers at a time.
        ///
        /// # Errors
        /// `NoMemory` when the system gives no thread.
        pub(in crate::store::writeback) fn new(log: &Log, transfers: usize) -> Result<Option<Self>> {
            let Some(seal) = log.seal.clone() else { return Ok(None) };
            let (backing, extent_bytes) = (Arc::clone(&log.backing), log.extent_bytes as u64);
            let carry_out = move |mut started: Started, usable: Result<()>| {
                if usable.is_err() {
                    return started.finish(usable);
                }
                let Transfer { offset, len_bytes, filling, buffer, .. } = &mut *started;
                let extent = (*offset / extent_bytes) as u32;
                sealed::seal_all(&*seal, &mut buffer[..*len_bytes], extent, filling.generation);
                backing.start(started.into_transfer());
            };
            Threads::new("uzram-seal", THREADS, transfers, Box::new(carry_out))
                .map(|threads| Some(Sealer(threads)))
        }

        /// Seals what an extent is filled with, and starts to write it.
        pub(in crate::store::writeback) fn start(&self, transfer: Transfer) {
            self.0.start(transfer);
        }
    }
}

#[cfg(loom)]
mod never {
    use super::super::log::Log;
    use crate::backing::Transfer;
    use crate::base::error::Result;

    /// There is none.
    pub(in crate::store::writeback) enum Sealer {}

    impl Sealer {
        pub(in crate::store::writeback) fn new(_: &Log, _: usize) -> Result<Option<Self>> {
            Ok(None)
        }

        pub(in crate::store::writeback) fn start(&self, _: Transfer) {
            match *self {}
        }
    }
}
