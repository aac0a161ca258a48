//! Waiting for a transfer.
//!
//! Lock: `backing queue`, a leaf.

use super::{Buffer, Completion};
use crate::base::error::Result;
use crate::base::sync::{Arc, Condvar, Mutex, classes};

/// The result of one transfer, once it has ended.
struct Waiter {
    told: Mutex<Option<(Buffer, Result<()>)>>,
    arrived: Condvar,
}

/// Calls `start` to start a transfer with the completion that it is given, and waits for the transfer.
pub fn wait_for(start: impl FnOnce(Arc<dyn Completion>)) -> (Buffer, Result<()>) {
    let waiter =
        Arc::new(Waiter { told: Mutex::new(&classes::BACKING_QUEUE, None), arrived: Condvar::new() });
    let completion: Arc<dyn Completion> = Arc::<Waiter>::clone(&waiter);
    start(completion);
    let mut told = waiter.told.lock();
    loop {
        match told.take() {
            Some(answer) => return answer,
            None => told = told.wait(&waiter.arrived),
        }
    }
}

impl Completion for Waiter {
    fn done(&self, _token: u64, buffer: Buffer, result: Result<()>) {
        *self.told.lock() = Some((buffer, result));
        self.arrived.notify_one();
    }
}
