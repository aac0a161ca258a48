//! What a daemon has attached itself: block devices on its own files, and swap areas on these.
//!
//! It is done by processes that it starts for that: `uzram attach` and `uzram detach`. See there for why.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use uzram_serve::control::FilesJson;
use uzram_serve::loop_device::LoopDevice;

use crate::failure::{Context, Failure, Result};
use crate::plan::{Attached, DevicePlan};
use crate::runtime_dir::RUNTIME_DIR_VARIABLE;
use crate::swap::own_program;

/// How long what a command has used may take to be let go of.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(5);

/// How often it is tried again to bring back what was swapped out, by a daemon that is to end.
pub const RETRY: Duration = Duration::from_secs(5);

/// The devices that are attached. Dropped, they are detached if that can be done; swap areas are waited for.
pub struct Attachments {
    runtime_dir: PathBuf,
    files: Option<FilesJson>,
    attached: Vec<Attachment>,
}

struct Attachment {
    name: String,
    kind: Attached,
    device: PathBuf,
}

impl Attachments {
    /// None yet, of the daemon in `runtime_dir`, which shows these files.
    pub fn new(runtime_dir: &Path, files: Option<FilesJson>) -> Self {
        Attachments { runtime_dir: runtime_dir.to_owned(), files, attached: Vec::new() }
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
            }
        }
        let device = PathBuf::from(self.run(&args)?.trim_end());
        tracing::info!(device = plan.name, block_device = %device.display(), "attached");
        self.attached.push(Attachment { name: plan.name.clone(), kind: plan.attached, device });
        Ok(())
    }

    /// The block device of a device.
    pub fn device(&self, name: &str) -> Option<PathBuf> {
        self.attached.iter().find(|attached| attached.name == name).map(|attached| attached.device.clone())
    }

    /// Names, what they are, and their block devices.
    pub fn all(&self) -> impl Iterator<Item = (&str, Attached, &Path)> {
        self.attached.iter().map(|attached| (&*attached.name, attached.kind, &*attached.device))
    }

    /// Whether one of them is swapped to.
    pub fn have_swap(&self) -> bool {
        self.attached.iter().any(|attached| matches!(attached.kind, Attached::Swap(_)))
    }

    /// Detaches all, the last first.
    ///
    /// # Errors
    /// What `uzram detach` says of one that stays, which those before it then do, too.
    pub fn detach(&mut self) -> Result<()> {
        while let Some(Attachment { name, kind, device }) = self.attached.last() {
            let file = self.files.as_ref().map(|files| files.disk(name)).unwrap_or_default();
            // Somebody else may have done it.
            if LoopDevice::on(&file)?.iter().any(|other| other.path() == *device) {
                let mut args = vec!["detach".to_owned(), name.clone()];
                args.extend(matches!(kind, Attached::Swap(_)).then(|| "--swap-off".to_owned()));
                self.run(&args)?;
            }
            self.attached.pop();
        }
        Ok(())
    }

    /// As [`Attachments::detach`], but gives what was used a moment to be let go of.
    ///
    /// # Errors
    /// As [`Attachments::detach`].
    pub fn detach_soon(&mut self) -> Result<()> {
        let deadline = Instant::now() + LET_GO_TIMEOUT;
        loop {
            match self.detach() {
                Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(100)),
                done => return done,
            }
        }
    }

    /// Runs a command of this program, and answers what it prints.
    fn run(&self, args: &[String]) -> Result<String> {
        let mut command = own_program()?;
        command.args(args).env(RUNTIME_DIR_VARIABLE, &self.runtime_dir).stdin(Stdio::null());
        // What is typed at the terminal is for the daemon, which waits for this.
        command.process_group(0);
        let ended = command.output().context(|| format!("cannot run `uzram {}`", args.join(" ")))?;
        if ended.status.success() {
            return String::from_utf8(ended.stdout)
                .map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error))
                .context(|| format!("`uzram {}`", args.join(" ")));
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        let ended = || Failure::Line(format!("`uzram {}` ended with {}", args.join(" "), ended.status));
        Err(Failure::printed_in(&said).unwrap_or_else(ended))
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
