//! Transfers for a thread that waits for them.
//!
//! Lock: `backing queue`, a leaf.

use super::{Backing, Buffer, Completion, Direction, Transfer};
use crate::base::error::Result;
use crate::base::sync::{Arc, Condvar, Mutex, classes};

/// Reads and writes, one at a time, waiting for each. Made once, it allocates no more.
pub struct Waiter {
    answer: Arc<Answer>,
}

struct Answer {
    told: Mutex<Option<(Buffer, Result<()>)>>,
    arrived: Condvar,
}

impl Waiter {
    /// One that waits for nothing yet.
    pub fn new() -> Self {
        let told = Mutex::new(&classes::BACKING_QUEUE, None);
        Waiter { answer: Arc::new(Answer { told, arrived: Condvar::new() }) }
    }

    /// Fills the first `len_bytes` of `buffer` from `offset` on. Not to be called by a completion, which would
    /// wait for itself.
    ///
    /// # Errors
    /// Those of the backing.
    pub fn read(
        &mut self,
        backing: &dyn Backing,
        offset: u64,
        buffer: Buffer,
        len_bytes: usize,
    ) -> (Buffer, Result<()>) {
        self.wait_for(backing, Direction::Read, offset, buffer, len_bytes)
    }

    /// Writes the first `len_bytes` of `buffer` from `offset` on. Not to be called by a completion either.
    ///
    /// # Errors
    /// Those of the backing.
    pub fn write(
        &mut self,
        backing: &dyn Backing,
        offset: u64,
        buffer: Buffer,
        len_bytes: usize,
    ) -> (Buffer, Result<()>) {
        self.wait_for(backing, Direction::Write, offset, buffer, len_bytes)
    }

    fn wait_for(
        &mut self,
        backing: &dyn Backing,
        direction: Direction,
        offset: u64,
        buffer: Buffer,
        len_bytes: usize,
    ) -> (Buffer, Result<()>) {
        let completion: Arc<dyn Completion> = Arc::<Answer>::clone(&self.answer);
        backing.start(Transfer { direction, offset, len_bytes, buffer, token: 0, completion });
        let mut told = self.answer.told.lock();
        loop {
            match told.take() {
                Some(answer) => return answer,
                None => told = told.wait(&self.answer.arrived),
            }
        }
    }
}

impl Default for Waiter {
    fn default() -> Self {
        Waiter::new()
    }
}

impl Completion for Answer {
    fn done(&self, _token: u64, buffer: Buffer, result: Result<()>) {
        *self.told.lock() = Some((buffer, result));
        self.arrived.notify_one();
    }
}
