//! Requests from memory instead of a kernel, for tests and fuzzers.

use std::sync::Arc;

use super::channel::Replies;
use super::connection::MountOptions;
use super::filesystem::Files;
use super::ledger::Ledger;
use crate::Exports;
use crate::device_pool::DevicePools;

/// The files of devices, without a mount.
#[doc(hidden)]
pub struct Loopback {
    files: Files,
    replies: Arc<Replies>,
}

impl Loopback {
    /// Serves the files of `exports` as [`super::Mount::serve`] does.
    pub fn new(exports: Exports, options: &MountOptions, ledger: &Arc<Ledger>) -> Self {
        Loopback {
            files: Files::new(exports, options, None, ledger, DevicePools::default()),
            replies: Arc::default(),
        }
    }

    /// Finishes a request that a dead process received; `outcome` is the errno of its reply if that may have been sent.
    /// Returns its replies.
    pub fn finish(&self, request: &[u8], outcome: Option<i32>) -> Vec<Vec<u8>> {
        self.files.finish(request, outcome, &self.replies);
        self.replies.take()
    }

    /// Carries out a request; returns its replies.
    pub fn carry_out(&self, request: &[u8]) -> Vec<Vec<u8>> {
        self.files.carry_out(request, &self.replies);
        self.replies.take()
    }
}
