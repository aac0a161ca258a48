//! Long work over many pages: its progress and its cancellation.
//!
//! The worker reports each page ([`Work::step`]); an observer reads the [`Progress`], which can also cancel
//! the work. What was done until then stays done.

use super::error::{Error, ErrorKind, Result};
use super::sync::{Arc, Counter};

/// `is_wanted` is called once per this many pages, as it may make a system call.
const ASK_EVERY: u64 = 16;
/// The same where pages are only examined.
const ASK_EVERY_LOOKS: usize = 4096;

/// The unit in which work is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Pages done.
    Pages,
    /// Objects moved.
    Objects,
}

/// The progress of work. The counts only inform: no other memory depends on them.
#[derive(Debug, Default)]
pub struct Progress {
    done: Counter,
    all: Counter,
    /// Not 0 once the work is cancelled.
    ends: Counter,
}

impl Progress {
    /// Returns how much is done, in the work's [`Unit`].
    pub fn done(&self) -> u64 {
        self.done.get()
    }

    /// Returns the total, including what is done; 0 if it is not known.
    pub fn all(&self) -> u64 {
        self.all.get()
    }

    /// Cancels the work; the worker ends it soon after.
    pub fn end(&self) {
        self.ends.set(1);
    }

    fn is_ended(&self) -> bool {
        self.ends.get() != 0
    }
}

/// The worker's view of work.
pub struct Work<'a> {
    progress: Arc<Progress>,
    unit: Unit,
    is_wanted: &'a dyn Fn() -> bool,
}

impl<'a> Work<'a> {
    /// Makes work that goes on as long as `is_wanted` returns true.
    pub fn new(unit: Unit, is_wanted: &'a dyn Fn() -> bool) -> Self {
        Work { progress: Arc::default(), unit, is_wanted }
    }

    /// Makes work that only [`Progress::end`] cancels.
    pub fn uninterruptible(unit: Unit) -> Work<'static> {
        Work::new(unit, &|| true)
    }

    /// Returns the progress.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Adds `pages` to what is done already as the new total.
    pub fn expect(&self, pages: u64) {
        self.progress.all.set(self.progress.done().saturating_add(pages));
    }

    /// Counts one as done. Fails with `Interrupted` if the work is cancelled.
    pub fn step(&self) -> Result<()> {
        if self.progress.done.add(1).is_multiple_of(ASK_EVERY) {
            self.still_wanted();
        }
        self.check()
    }

    /// Counts `count` as done, without checking for cancellation.
    pub(crate) fn note(&self, count: u64) {
        self.progress.done.add(count);
    }

    /// Returns the items until the work is cancelled ([`Work::check`] tells), which is checked every
    /// [`ASK_EVERY_LOOKS`] items: for scans in which most pages need no work.
    pub(crate) fn while_wanted<I: Iterator>(&self, items: I) -> impl Iterator<Item = I::Item> {
        let mut looks = 0usize;
        items.take_while(move |_| {
            looks += 1;
            !looks.is_multiple_of(ASK_EVERY_LOOKS) || self.still_wanted()
        })
    }

    /// Returns whether the work is still wanted. May make a system call: do not call it under a contended
    /// lock.
    pub(crate) fn still_wanted(&self) -> bool {
        if !self.progress.is_ended() && !(self.is_wanted)() {
            self.progress.end();
        }
        !self.progress.is_ended()
    }

    /// Fails with `Interrupted` once the work is cancelled.
    pub fn check(&self) -> Result<()> {
        if self.progress.is_ended() {
            let unit = if self.unit == Unit::Pages { "pages done" } else { "objects moved" };
            let what = format!("interrupted: {} {unit}", self.progress.done());
            return Err(Error::new(ErrorKind::Interrupted, what));
        }
        Ok(())
    }
}
