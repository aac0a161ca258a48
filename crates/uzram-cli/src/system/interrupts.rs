//! ^C during an operation that needs an orderly end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::failure::{Context, Result};

/// While this exists, the first SIGINT is only recorded, for [`Interrupts::came`]. It interrupts only system calls that
/// are never restarted (swapoff(2), or a read with a time-out: `SA_RESTART`, signal(7)). A second one kills the
/// process.
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Installs the signal handler, unless SIGINT is ignored.
    ///
    /// # Errors
    /// The handler cannot be installed.
    pub fn catch() -> Result<Interrupts> {
        let interrupts = Interrupts(Arc::default());
        if !is_ignored(SIGINT) {
            // In this order: handlers run in order of registration, so the first takes the default action only from the
            // second signal on.
            flag::register_conditional_default(SIGINT, Arc::clone(&interrupts.0))
                .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupts.0)))
                .context(|| "cannot handle signals".to_owned())?;
        }
        Ok(interrupts)
    }

    /// Returns one that handles no signal, for tests.
    #[cfg(test)]
    pub fn pretend(came: bool) -> Interrupts {
        Interrupts(Arc::new(AtomicBool::new(came)))
    }

    /// Returns whether a SIGINT was received.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns whether this process ignores a signal.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: all fields of the structure are integers, a bit set and a nullable pointer: zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: with a null new action, the call only writes the current one to `action`, which is valid for that.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}
