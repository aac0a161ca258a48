//! What is told of a program's memory: lines on its standard error, and figures for other processes.

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags};
use uzram::store::BackingState;
use uzram::units::{format_size, pages_to_bytes};
use uzram_run::sys;

use super::{PUBLISH, Process, say};
use crate::core::Core;
use crate::figures::Figures;

impl Process {
    /// Says once that the limit cannot be kept, or ends the program.
    pub(super) fn exceeded(&mut self, core: &Core) {
        if std::mem::replace(&mut self.has_exceeded, true) {
            return;
        }
        let why = match core.store.backing_state() {
            None => "there is no spill file: give --spill, or raise --limit",
            Some(BackingState::Full) => "the spill file has no room: raise --limit, or the size of --spill",
            Some(BackingState::Failing(trouble)) => {
                let why = trouble.why;
                &format!("the spill file fails ({why}): raise --limit, or give another folder to --spill")
            }
            Some(_) => "what it has is locked, or used by the system: raise --limit",
        };
        let (id, limit) = (self.id(), format_size(self.asked.limit_bytes));
        if self.asked.hard {
            say(&format!("uzram: process {id} ends, as it needs more than {limit}, and {why}\n"));
            self.has_told = true;
            if rustix::process::pidfd_send_signal(&self.program, rustix::process::Signal::ABORT).is_err() {
                // It has another user by now. It ends with this process.
                sys::exit_group(0);
            }
        } else {
            say(&format!("uzram: process {id} uses more than {limit}: {why}\n"));
        }
    }

    fn figures(&self) -> Figures {
        let (process, limit_bytes) = (self.id() as u64, self.asked.limit_bytes);
        let none = Figures { limit_now_bytes: limit_bytes, ..Figures::default() };
        Figures { process, limit_bytes, ..self.core().map_or(none, |core| core.figures()) }
    }

    /// Prints what the memory was like, once.
    pub(super) fn tell_end(&mut self) {
        let id = self.id();
        if std::mem::replace(&mut self.has_told, true) || !self.asked.tells(id) {
            return;
        }
        let figures = self.figures();
        if self.asked.json {
            return say(&(figures.to_json(id.cast_unsigned()) + "\n"));
        }
        let mut text = end_line(&figures, pages_to_bytes(self.besides_pages()));
        if self.asked.stats {
            let counts = self.core().map(|core| core.stats());
            let _ = writeln!(text, "uzram: process {id}: {figures:?} {counts:?}");
        }
        say(&text);
    }

    /// Makes the file of figures. Without it the process is not listed.
    pub(super) fn begin_figures(&mut self) {
        let file = || -> rustix::io::Result<OwnedFd> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create(Figures::FILE_NAME, flags)?;
            rustix::fs::ftruncate(&file, Figures::TEXT_BYTES as u64)?;
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(file)
        };
        // In a child the number of the old one is another file's, or none.
        std::mem::forget(std::mem::replace(&mut self.figures_file, file().ok().map(File::from)));
        self.write_figures(&self.figures());
    }

    fn write_figures(&self, figures: &Figures) {
        self.figures_file.iter().for_each(|file| _ = file.write_all_at(&figures.to_text(), 0));
    }

    /// Publishes figures if they have changed, and not too often.
    pub(super) fn publish(&mut self) {
        if self.published.is_some_and(|(_, at)| at.elapsed() < PUBLISH) {
            return;
        }
        let figures = self.figures();
        if self.published.is_none_or(|(last, _)| last != figures) {
            self.write_figures(&figures);
        }
        self.published = Some((figures, Instant::now()));
    }
}

/// Returns the text of what a program's memory was like, with what else it has.
fn end_line(figures: &Figures, besides_bytes: u64) -> String {
    let limit = format_size(figures.limit_bytes);
    if figures.runs == 0 {
        return format!("uzram: the program never used enough memory to compress any (limit {limit})\n");
    }
    let mut text = format!(
        "uzram: at most {} of {limit} in memory, with {} compressed to {}",
        format_size(figures.used_max_bytes),
        format_size(figures.stored_max_bytes),
        format_size(figures.compressed_max_bytes),
    );
    if figures.compressed_max_bytes > 0 {
        let ratio = figures.stored_max_bytes as f64 / figures.compressed_max_bytes as f64;
        let _ = write!(text, " (ratio {ratio:.2})");
    }
    let _ = writeln!(
        text,
        " and {} spilled; {} faults took {:.2} s; {} besides",
        format_size(figures.spilled_max_bytes),
        figures.faults,
        figures.fault_us as f64 / 1e6,
        format_size(besides_bytes),
    );
    text
}
