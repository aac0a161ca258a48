//! What somebody has a device do with all its pages: `recompress`, say. It uses the device, but `reset` does not wait for
//! its end: it is told to end, and soon does.

use std::ops::Deref;

use crate::base::error::{Error, Result};
use crate::base::sync::Arc;
use crate::base::work::{Progress, Unit, Work};
use crate::store::Store;

use super::Device;

/// What is being done, until it is dropped. It is the store that it is done to.
pub(super) struct Task<'a> {
    // Let go before its user is.
    store: Arc<Store>,
    pub(super) work: Work<'a>,
    listed: Listed<'a>,
}

/// An entry of `State::tasks`, and a user of the device: the two come and go under one hold of its lock.
struct Listed<'a> {
    device: &'a Device,
    progress: Arc<Progress>,
}

/// What a device is doing with all its pages.
#[derive(Clone, Debug)]
pub(super) struct TaskProgress {
    /// The attribute that was set for it.
    pub(super) name: &'static str,
    /// How far it has come.
    pub(super) progress: Arc<Progress>,
}

impl Device {
    /// Begins what the attribute `name` is to do, which ends when it is done or no longer wanted.
    ///
    /// # Errors
    /// `Invalid` while the device is uninitialised.
    pub(super) fn begin<'a>(
        &'a self,
        name: &'static str,
        unit: Unit,
        is_wanted: &'a dyn Fn() -> bool,
    ) -> Result<Task<'a>> {
        let work = Work::new(unit, is_wanted);
        let mut state = self.state.lock();
        let Some(store) = state.store.clone() else {
            let what = format!("'{}' has no size yet, and holds nothing", self.name);
            return Err(Error::invalid(what).with_setting("disksize"));
        };
        let progress = Arc::clone(work.progress());
        self.users.add(1);
        state.tasks.push(TaskProgress { name, progress: Arc::clone(&progress) });
        drop(state);
        Ok(Task { store, work, listed: Listed { device: self, progress } })
    }

    /// What it is doing with all its pages, the oldest first.
    pub(super) fn tasks(&self) -> Vec<TaskProgress> {
        self.state.lock().tasks.clone()
    }

    /// Has all of that end soon.
    pub fn interrupt(&self) {
        self.state.lock().tasks.iter().for_each(|task| task.progress.end());
    }
}

impl<'a> Task<'a> {
    pub(super) fn device(&self) -> &'a Device {
        self.listed.device
    }
}

impl Deref for Task<'_> {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut state = self.device.state.lock();
        state.tasks.retain(|task| !Arc::ptr_eq(&task.progress, &self.progress));
        self.device.users.sub(1);
    }
}
