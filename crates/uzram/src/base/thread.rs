//! Threads of the engine's own. Models start none.

use std::panic::{AssertUnwindSafe, catch_unwind};
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

/// Starts a thread that others rely on. If a panic ends what it does with `state`, `died` is told why, so that they need
/// not wait for what never comes; the panic itself has been reported, as every one is.
///
/// # Errors
/// As [`spawn`].
pub(crate) fn spawn_relied_on<S: Send + 'static>(
    name: &str,
    mut state: S,
    run: impl FnOnce(&mut S) + Send + 'static,
    died: impl FnOnce(&mut S, &str) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let named = name.to_owned();
    spawn(name, move || {
        // What it leaves behind is not used any more, protected by locks of its own, or what `died` expects.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut state))) {
            let what = panic.downcast_ref::<String>().map(String::as_str);
            let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            died(&mut state, &format!("the thread '{named}' has ended, by a defect of uzram: {what}"));
        }
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
