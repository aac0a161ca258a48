//! What is attached to a daemon's files: block devices, and swap areas on these.
//!
//! It is attached and detached by processes that the daemon has started for that, `uzram attach` and `uzram detach` (see
//! there for why), or that others have started. Either way the daemon's record has it, by which it is found when the daemon is
//! to end, whatever has become of the directories that it was started in.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use uzram_serve::Exports;
use uzram_serve::control::StatsJson;
use uzram_serve::record::{AttachedDevice, Recorder};

use crate::config::plan::{Attached, DevicePlan};
use crate::daemon::attendant::{Attendant, Request};
use crate::failure::{Failure, Result};

/// How long what was detached may take to close its file.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often it is tried again to bring back what was swapped out, by a daemon that is to end.
pub const RETRY: Duration = Duration::from_secs(5);

/// The devices that are attached. Dropped, they are detached if that can be done; swap areas are waited for.
pub struct Attachments {
    exports: Exports,
    recorder: Arc<Recorder>,
    /// Who attaches and detaches, where there can be something attached.
    attendant: Option<Attendant>,
    /// The devices whose swap areas this daemon has switched on.
    swapped_to: BTreeSet<String>,
}

impl Attachments {
    /// Those of the daemon that has these devices.
    pub fn new(exports: Exports, recorder: Arc<Recorder>, attendant: Option<Attendant>) -> Self {
        Attachments { exports, recorder, attendant, swapped_to: BTreeSet::new() }
    }

    /// Attaches a device, if it is to be.
    ///
    /// # Errors
    /// What `uzram attach` says.
    pub fn attach(&mut self, plan: &DevicePlan) -> Result<()> {
        let swap = match plan.attached {
            Attached::No => return Ok(()),
            Attached::Block => None,
            Attached::Swap(swap) => {
                // It may be switched on even if the process fails.
                self.swapped_to.insert(plan.name.clone());
                Some(swap)
            }
        };
        let device = self.run(&Request::Attach { name: plan.name.clone(), swap })?;
        tracing::info!(device = plan.name, block_device = device.trim_end(), "attached");
        Ok(())
    }

    /// The block device of a device.
    pub fn device(&self, name: &str) -> Option<PathBuf> {
        let attached = self.recorder.attached().into_iter().find(|device| device.name == name);
        attached.map(|device| device.attachment.path())
    }

    /// Names, whether they are swapped to, and block devices.
    pub fn all(&self) -> impl Iterator<Item = (String, bool, PathBuf)> {
        self.recorder.attached().into_iter().map(|AttachedDevice { name, attachment }| {
            let is_swap = self.swapped_to.contains(&name);
            (name, is_swap, attachment.path())
        })
    }

    /// Whether one of them is swapped to, for all that can be known.
    pub fn have_swap(&self) -> bool {
        let attached = self.recorder.attached();
        attached.iter().any(|device| device.attachment.swap_area().map_or(true, |area| area.is_some()))
    }

    /// Detaches all, the last first, and makes sure that nobody has a device's file open.
    ///
    /// # Errors
    /// What `uzram detach` says of one that stays, as those before it then do, too; whose file is open.
    pub fn detach(&mut self) -> Result<()> {
        while let Some(AttachedDevice { name, attachment }) = self.recorder.attached().pop() {
            let swap_off = if self.swapped_to.contains(&name) {
                Some(StatsJson::from(self.exports.named(&name)?.counts()).kept_bytes())
            } else {
                None
            };
            self.run(&Request::Detach { name, attachment, swap_off })?;
        }
        let is_open = |name: &str| self.exports.other_files(name, 0, CLOSE_TIMEOUT) > 0;
        match self.exports.devices().iter().find(|device| is_open(device.name())) {
            None => Ok(()),
            Some(device) => Err(Failure::Line(format!("the file of {} is open somewhere", device.name()))),
        }
    }

    fn run(&mut self, request: &Request) -> Result<String> {
        match &mut self.attendant {
            Some(attendant) => attendant.run(request),
            None => Err(Failure::line(
                "this daemon started no process to attach or detach with: it is not root's, or shows no files",
            )),
        }
    }
}

impl Drop for Attachments {
    fn drop(&mut self) {
        while let Err(Failure::Line(why)) = self.detach() {
            if !self.have_swap() {
                tracing::warn!("{why}");
                return;
            }
            // What is swapped out would be lost.
            tracing::error!("not ending yet: {why} (tried again every {} s)", RETRY.as_secs());
            thread::sleep(RETRY);
        }
    }
}
