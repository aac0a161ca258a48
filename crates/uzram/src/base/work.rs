//! Work that goes through many pages: how far it has come, and whether it is still wanted.
//!
//! Whoever works tells of each page ([`Work::step`]); whoever looks on has the [`Progress`], by which the work can also be
//! ended. What was done until then stays done.

use super::error::{Error, ErrorKind, Result};
use super::sync::{Arc, Counter};

/// After so many pages whoever wants the work is asked whether that is still so: it may be a system call.
const ASK_EVERY: u64 = 16;
/// The same where pages are only looked at.
const ASK_EVERY_LOOKS: usize = 4096;

/// What is counted of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Pages that are done.
    Pages,
    /// Objects that were moved.
    Objects,
}

impl Unit {
    const fn done(self) -> &'static str {
        match self {
            Unit::Pages => "pages done",
            Unit::Objects => "objects moved",
        }
    }
}

/// How far work has come. Of what is being done, it only informs.
#[derive(Debug, Default)]
pub struct Progress {
    done: Counter,
    all: Counter,
    /// Not 0 when the work is to end.
    ends: Counter,
}

impl Progress {
    /// How much is done, in the work's [`Unit`].
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
    unit: Unit,
    is_wanted: &'a dyn Fn() -> bool,
}

impl<'a> Work<'a> {
    /// Work that goes on as long as `is_wanted` returns true.
    pub fn new(unit: Unit, is_wanted: &'a dyn Fn() -> bool) -> Self {
        Work { progress: Arc::default(), unit, is_wanted }
    }

    /// Work that is always wanted.
    pub fn uninterruptible(unit: Unit) -> Work<'static> {
        Work::new(unit, &|| true)
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
            self.still_wanted();
        }
        self.check()
    }

    /// Notes that so many more are done, and nothing else.
    pub(crate) fn note(&self, count: u64) {
        self.progress.done.add(count);
    }

    /// The same items, until the work is to end, which is asked after every so many of them: for what goes through pages
    /// of which most may not need to be done. [`Work::check`] says afterwards whether these were all.
    pub(crate) fn while_wanted<I: Iterator>(&self, items: I) -> impl Iterator<Item = I::Item> {
        let mut looks = 0usize;
        items.take_while(move |_| {
            looks += 1;
            !looks.is_multiple_of(ASK_EVERY_LOOKS) || self.still_wanted()
        })
    }

    /// Asks whether it is still wanted, which may take a system call: not under a lock of many.
    pub(crate) fn still_wanted(&self) -> bool {
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
            let what = format!("interrupted: {} {}", self.progress.done(), self.unit.done());
            return Err(Error::new(ErrorKind::Interrupted, what));
        }
        Ok(())
    }
}
