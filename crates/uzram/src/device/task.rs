//! Tasks over all pages of a device, started by an attribute such as `recompress`. A task is a user of the
//! device, but does not block `reset`, which interrupts it.

use std::ops::Deref;

use crate::base::error::{Error, Result};
use crate::base::sync::Arc;
use crate::base::work::{Progress, Unit, Work};
use crate::store::Store;

use super::Device;

/// A running task; it ends when this is dropped. Dereferences to the store that it works on.
pub(super) struct Task<'a> {
    // Dropped before `listed`, which counts as its user.
    store: Arc<Store>,
    pub(super) work: Work<'a>,
    listed: Listed<'a>,
}

/// An entry of `State::tasks` and a user of the device, which are added and removed together under its lock.
struct Listed<'a> {
    device: &'a Device,
    progress: Arc<Progress>,
}

#[derive(Clone, Debug)]
pub(super) struct TaskProgress {
    /// The attribute that started it.
    pub(super) name: &'static str,
    pub(super) progress: Arc<Progress>,
}

impl Device {
    /// Begins the task of the attribute `name`, which `is_wanted` or [`Device::interrupt`] can end.
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

    /// Returns the running tasks, oldest first.
    pub(super) fn tasks(&self) -> Vec<TaskProgress> {
        self.state.lock().tasks.clone()
    }

    /// Interrupts all running tasks; they end soon.
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
