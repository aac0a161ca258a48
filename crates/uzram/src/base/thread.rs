//! Threads of the engine's own. Models start none.

use std::thread::{Builder, JoinHandle};

use super::error::{Error, ErrorKind, Result};

/// Starts a thread.
///
/// # Errors
/// `NoMemory` when the system gives none.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    Builder::new().name(name.into()).spawn(run).map_err(|error| {
        Error::new(ErrorKind::NoMemory, format!("the system gives no thread for '{name}': {error}"))
    })
}

/// Has so much of this thread's stack in memory that it takes no page fault where others wait for it.
#[inline(never)]
pub(crate) fn touch_stack() {
    std::hint::black_box(&mut [0u8; 128 << 10]);
}

/// Waits for a thread that was told to end, unless it is the caller, who will get there.
pub(crate) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        thread.thread().unpark();
        // A panic there has been reported already.
        let _ = thread.join();
    }
}
