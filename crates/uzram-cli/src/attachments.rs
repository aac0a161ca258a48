//! What is attached to a daemon's files: block devices, and swap areas on these.
//!
//! It is attached and detached by processes that the daemon has started for that, `uzram attach` and `uzram detach` (see
//! there for why), or that others have started. Either way the daemon's record has it, by which it is found when the daemon is
//! to end, whatever has become of the directories that it was started in.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use uzram_serve::Exports;
use uzram_serve::control::StatsJson;
use uzram_serve::record::{AttachedDevice, Recorder};

use crate::attach::attachment_text;
use crate::attendant::Attendant;
use crate::failure::{Failure, Result};
use crate::plan::{Attached, DevicePlan};

/// How long what was detached may take to close its file.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often it is tried again to bring back what was swapped out, by a daemon that is to end.
pub const RETRY: Duration = Duration::from_secs(5);

/// The devices that are attached. Dropped, they are detached if that can be done; swap areas are waited for.
pub struct Attachments {
    runtime_dir: PathBuf,
    exports: Exports,
    recorder: Arc<Recorder>,
    /// Who attaches and detaches, where there can be something attached.
    attendant: Option<Attendant>,
    /// The devices whose swap areas this daemon has switched on.
    swapped_to: BTreeSet<String>,
}

impl Attachments {
    /// Those of the daemon in `runtime_dir`, which has these devices.
    pub fn new(
        runtime_dir: &Path,
        exports: Exports,
        recorder: Arc<Recorder>,
        attendant: Option<Attendant>,
    ) -> Self {
        let runtime_dir = runtime_dir.to_owned();
        Attachments { runtime_dir, exports, recorder, attendant, swapped_to: BTreeSet::new() }
    }

    /// Attaches a device, if it is to be.
    ///
    /// # Errors
    /// What `uzram attach` says.
    pub fn attach(&mut self, plan: &DevicePlan) -> Result<()> {
        let mut args = vec!["attach".to_owned(), plan.name.clone()];
        match plan.attached {
            Attached::No => return Ok(()),
            Attached::Block => {}
            Attached::Swap(swap) => {
                args.push("--swap".to_owned());
                args.extend(swap.priority.map(|priority| priority.to_string()));
                args.extend((!swap.discard).then(|| "--no-discard".to_owned()));
                // It may be switched on even if the process fails.
                self.swapped_to.insert(plan.name.clone());
            }
        }
        let device = self.run(&args)?;
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
            let mut args = vec!["detach".to_owned(), name.clone()];
            args.extend(["--attachment".to_owned(), attachment_text(attachment)]);
            if self.swapped_to.contains(&name) {
                let device = self.exports.named(&name)?;
                let kept_bytes = StatsJson::from(device.counts()).kept_bytes();
                args.extend(["--swap-off".to_owned(), kept_bytes.to_string()]);
            }
            self.run(&args)?;
        }
        let is_open = |name: &str| self.exports.other_files(name, 0, CLOSE_TIMEOUT) > 0;
        match self.exports.devices().iter().find(|device| is_open(device.name())) {
            None => Ok(()),
            Some(device) => Err(Failure::Line(format!("the file of {} is open somewhere", device.name()))),
        }
    }

    /// Runs a command of this program, and answers what it prints.
    fn run(&mut self, args: &[String]) -> Result<String> {
        match &mut self.attendant {
            Some(attendant) => attendant.run(&self.runtime_dir, args),
            None => Err(Failure::line(
                "block devices are root's, and lie on files, which this daemon does not show",
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
