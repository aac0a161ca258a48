//! Models of what loom has no models of: futexes.

use std::time::Duration;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Condvar, Mutex};

/// A number that threads wait for. No time passes: who is not woken sleeps for ever.
#[derive(Default)]
pub(crate) struct Futex {
    pub(crate) number: AtomicU32,
    /// Held while the number is compared, as in the kernel.
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    pub(crate) fn wait(&self, number: u32, _: Option<Duration>) {
        let guard = self.lock.lock().expect("no panic");
        if self.number.load(Ordering::SeqCst) == number {
            drop(self.woken.wait(guard));
        }
    }

    pub(crate) fn wake_all(&self) {
        let _guard = self.lock.lock().expect("no panic");
        self.woken.notify_all();
    }
}
