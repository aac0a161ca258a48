//! The threads of backings. Models start none.

use std::thread::JoinHandle;

use crate::base::error::{Error, ErrorKind, Result};

/// Starts a thread of a backing.
pub(super) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(|error| {
        Error::new(ErrorKind::NoMemory, format!("the system gives no thread for the backing: {error}"))
    })
}

/// Waits for a thread of a backing that was told to end, unless it is the caller, who will get there.
pub(super) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        // A panic there has been reported already.
        let _ = thread.join();
    }
}
