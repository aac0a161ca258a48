//! ^C in the midst of what has to end in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::failure::{Context, Result};

/// As long as it lives, the first SIGINT is only noted, for [`Interrupts::came`]; it interrupts such system calls alone as
/// never start again by themselves (swapoff(2), or a read with a time-out: `SA_RESTART`, signal(7)). A second one ends the
/// process.
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// From now on.
    ///
    /// # Errors
    /// The system gives no handler.
    pub fn catch() -> Result<Interrupts> {
        let interrupts = Interrupts(Arc::default());
        if !is_ignored(SIGINT) {
            // In this order: the first one does what is done by default once the second was called.
            flag::register_conditional_default(SIGINT, Arc::clone(&interrupts.0))
                .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupts.0)))
                .context(|| "cannot handle signals".to_owned())?;
        }
        Ok(interrupts)
    }

    /// Whether there was one.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether this process was started to ignore a signal.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: a structure of numbers, a set of bits and an address that may be null.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action, the one that there is goes where the last argument says, which is `action`.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}
