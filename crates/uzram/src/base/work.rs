//! Work that goes through many pages: how far it has come, and whether it is still wanted.
//!
//! Whoever works tells of each page ([`Work::step`]); whoever looks on has the [`Progress`], by which the work can also be
//! ended. What was done until then stays done.

use super::error::{Error, ErrorKind, Result};
use super::sync::{Arc, Counter};

/// After so many pages whoever wants the work is asked whether that is still so: it may be a system call.
const ASK_EVERY: u64 = 16;

/// How far work has come. Of what is being done, it only informs.
#[derive(Debug, Default)]
pub struct Progress {
    done: Counter,
    all: Counter,
    /// Not 0 when the work is to end.
    ends: Counter,
}

impl Progress {
    /// Pages that are done; of compaction, objects that were moved.
    pub fn done(&self) -> u64 {
        self.done.get()
    }

    /// How many there are, with those that are done; 0 if that is not known.
    pub fn all(&self) -> u64 {
        self.all.get()
    }

    /// Has the work end soon.
    pub fn end(&self) {
        self.ends.set(1);
    }

    fn is_ended(&self) -> bool {
        self.ends.get() != 0
    }
}

/// Work, as seen by whoever does it.
pub struct Work<'a> {
    progress: Arc<Progress>,
    is_wanted: &'a dyn Fn() -> bool,
}

impl<'a> Work<'a> {
    /// Work that goes on as long as `is_wanted` answers so.
    pub fn new(is_wanted: &'a dyn Fn() -> bool) -> Self {
        Work { progress: Arc::default(), is_wanted }
    }

    /// Work that nobody gives up.
    pub fn of_nobody() -> Work<'static> {
        Work::new(&|| true)
    }

    /// How far it has come.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// So many pages are to come.
    pub fn expect(&self, pages: u64) {
        self.progress.all.set(self.progress.done().saturating_add(pages));
    }

    /// One more is done.
    ///
    /// # Errors
    /// `Interrupted`: it is to end.
    pub fn step(&self) -> Result<()> {
        if self.progress.done.add(1).is_multiple_of(ASK_EVERY) {
            self.ask();
        }
        self.check()
    }

    /// Notes that so many more are done, and nothing else.
    pub(crate) fn note(&self, count: u64) {
        self.progress.done.add(count);
    }

    /// Asks whether it is still wanted, which may take a system call: not under a lock of many.
    pub(crate) fn ask(&self) -> bool {
        if !self.progress.is_ended() && !(self.is_wanted)() {
            self.progress.end();
        }
        !self.progress.is_ended()
    }

    /// Fails once it is to end.
    ///
    /// # Errors
    /// `Interrupted`.
    pub fn check(&self) -> Result<()> {
        if self.progress.is_ended() {
            let what = format!("interrupted: {} pages done", self.progress.done());
            return Err(Error::new(ErrorKind::Interrupted, what));
        }
        Ok(())
    }
}
