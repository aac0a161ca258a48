//! Block devices attached to a daemon's files, and swap areas on them.
//!
//! Other processes attach and detach them: the daemon's [`Attendant`], or users' `uzram attach` and `uzram
//! detach` (`client::attach` says why). The daemon finds them by its record, even if its directories were
//! moved.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use uzram_serve::Exports;
use uzram_serve::own_devices::way_out;
use uzram_serve::record::{AttachedDevice, Recorder};

use crate::config::plan::{Attached, DevicePlan};
use crate::daemon::attendant::{Attendant, Request};
use crate::daemon::started::AttachedBlock;
use crate::failure::{Failure, Result};

/// How long a detached device may take to close its file.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often an ending daemon retries to detach devices.
pub const RETRY: Duration = Duration::from_secs(5);

/// The attached devices. Dropping this detaches them if possible, and waits until no swap area is left.
pub struct Attachments {
    exports: Exports,
    recorder: Arc<Recorder>,
    /// The process that attaches and detaches; `None` if the daemon is not root's or shows no files.
    attendant: Option<Attendant>,
    /// The devices whose swap areas this daemon has switched on.
    swapped_to: BTreeSet<String>,
}

impl Attachments {
    pub fn new(exports: Exports, recorder: Arc<Recorder>, attendant: Option<Attendant>) -> Self {
        Attachments { exports, recorder, attendant, swapped_to: BTreeSet::new() }
    }

    /// Takes what the process before had attached for these plans; if it had attached all, also what it had
    /// switched on and was detached since.
    pub fn adopt(&mut self, plans: &[DevicePlan], has_all: bool) {
        let attached: Vec<_> = self.recorder.attached().into_iter().map(|device| device.name).collect();
        let swaps = plans.iter().filter(|plan| plan.is_swap() && (has_all || attached.contains(&plan.name)));
        self.swapped_to.extend(swaps.map(|plan| plan.name.clone()));
    }

    /// Attaches a device if its plan says so, and it is not attached already.
    pub fn attach(&mut self, plan: &DevicePlan) -> Result<()> {
        if plan.attached == Attached::No || self.device(&plan.name).is_some() {
            return Ok(());
        }
        let swap = plan.swap();
        // The area may be active even if the process fails.
        self.swapped_to.extend(swap.map(|_| plan.name.clone()));
        let device = self.run(&Request::Attach { name: plan.name.clone(), swap })?;
        tracing::info!(device = plan.name, block_device = device, "attached");
        Ok(())
    }

    pub fn device(&self, name: &str) -> Option<PathBuf> {
        let attached = self.recorder.attached().into_iter().find(|device| device.name == name);
        attached.map(|device| device.attachment.path())
    }

    pub fn all(&self) -> Vec<AttachedBlock> {
        let block = |AttachedDevice { name, attachment }| AttachedBlock {
            is_swap: self.swapped_to.contains(&name),
            block_device: attachment.path(),
            name,
        };
        self.recorder.attached().into_iter().map(block).collect()
    }

    /// Returns whether a device is an active swap area; also true if that cannot be read.
    pub fn have_swap(&self) -> bool {
        let attached = self.recorder.attached();
        attached.iter().any(|device| device.attachment.swap_area().map_or(true, |area| area.is_some()))
    }

    /// Detaches all devices, the last first, and checks that no process has a device's file open.
    pub fn detach(&mut self) -> Result<()> {
        while let Some(AttachedDevice { name, attachment }) = self.recorder.attached().pop() {
            let mut swap_off = None;
            if self.swapped_to.contains(&name) {
                swap_off = Some(self.exports.named(&name)?.counts().kept_bytes());
            }
            self.run(&Request::Detach { name, attachment, swap_off }).map_err(|failure| {
                failure.map_line(|line| line + &way_out(&self.exports.devices(), attachment))
            })?;
        }
        let is_open = |name: &str| self.exports.other_files(name, 0, CLOSE_TIMEOUT) > 0;
        match self.exports.devices().iter().find(|device| is_open(device.name())) {
            None => Ok(()),
            Some(device) => Err(Failure::line(format!("the file of {} is open", device.name()))),
        }
    }

    fn run(&mut self, request: &Request) -> Result<String> {
        let why =
            "this daemon started no process to attach or detach with: it is not root's, or shows no files";
        self.attendant.as_mut().ok_or_else(|| Failure::line(why))?.run(request)
    }
}

impl Drop for Attachments {
    fn drop(&mut self) {
        while let Err(why) = self.detach().map_err(Failure::into_line) {
            if !self.have_swap() {
                tracing::warn!("{why}");
                return;
            }
            // To end now would lose swapped-out pages.
            tracing::error!("not ending yet: {why} (tried again every {} s)", RETRY.as_secs());
            thread::sleep(RETRY);
        }
    }
}
