//! Requests from memory instead of a kernel, for tests and fuzzers.

use std::sync::Arc;
use std::thread;

use super::channel::{Channel, Sink};
use super::connection::MountOptions;
use super::filesystem::Files;
use super::ledger::Ledger;
use crate::Exports;
use crate::device_pool::{Budget, DevicePools, MAX_TASKS, TASK_BYTES};

/// The files of devices, without a mount.
#[doc(hidden)]
pub struct Loopback {
    files: Files,
    channel: Arc<Channel>,
}

impl Loopback {
    /// Serves the files of `exports` as [`super::Mount::serve`] does.
    pub fn new(exports: Exports, options: &MountOptions, ledger: &Arc<Ledger>) -> Self {
        let sink = Sink::Memory(uzram::sync::Mutex::default());
        let channel = Channel { sink, ledger: Arc::clone(ledger), outcomes: None, thread: 0 };
        let pools = DevicePools::new(MAX_TASKS, Budget::new(TASK_BYTES));
        let files = Files::new(exports, options, None, ledger, pools);
        Loopback { files, channel: Arc::new(channel) }
    }

    /// Finishes a request that a dead process received; `outcome` is the errno of its reply if that may have
    /// been sent. Returns its replies.
    pub fn finish(&self, request: &[u8], outcome: Option<i32>) -> Vec<Vec<u8>> {
        self.files.finish(request, outcome, &self.channel);
        self.replies()
    }

    /// Carries out a request; returns its replies.
    pub fn carry_out(&self, request: &[u8]) -> Vec<Vec<u8>> {
        self.files.carry_out(request, &self.channel);
        self.replies()
    }

    /// Waits until no request is under way; takes all replies.
    fn replies(&self) -> Vec<Vec<u8>> {
        while Arc::strong_count(&self.channel) > 1 {
            thread::yield_now();
        }
        match &self.channel.sink {
            Sink::Memory(replies) => std::mem::take(&mut replies.lock()),
            Sink::Kernel(_) => Vec::new(),
        }
    }
}
