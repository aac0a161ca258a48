//! Devices whose memory outlives the process: a [`Keeper`] has the descriptors, and [`Device::attach`]
//! restores a device from them.
//!
//! Lock order: a keeper is called with the device's lock held, and takes no lock of the engine.

use std::os::fd::BorrowedFd;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::pages_to_bytes;
use crate::store::{AttachProgress, Attached, KeptMemory, Store, StoreBuilder, check_machine};

use super::{Device, HowToOpen, NamedBacking, Params, State};

/// Keeps the memory of devices beyond this process, and the descriptors of their backing devices.
///
/// It is called with the device's lock held, and must not use the device.
pub trait Keeper: Send + Sync {
    /// Called when a device got its store, before it can be used. Duplicates of the descriptors of `memory`
    /// and of the backing device, if there is one ([`NamedBacking::parts`]), must be kept until
    /// [`Keeper::give_up`]; with the latter their names and lengths, which [`NamedBacking::from_parts`]
    /// needs.
    fn keep(&self, device: &str, memory: BorrowedFd<'_>, backing: Option<&NamedBacking>) -> Result<()>;

    /// Called when the device gives its store up, by a reset or a removal, before the call that does it
    /// returns. When this returns, the duplicates must be closed: a block device cannot be opened again
    /// before.
    fn give_up(&self, device: &str);
}

impl Device {
    /// Sets who keeps the stores that the device gets from now on: they outlive this process. It stays set
    /// when the device is reset. Set it before `backing_dev`, which is then accessed so that a dead process
    /// writes no more to it. Fails with `Busy` once the device is initialised.
    pub fn set_keeper(&self, keeper: Arc<dyn Keeper>) -> Result<()> {
        let mut state = self.state.lock();
        state.uninitialised("the keeper")?;
        state.keeper = Some(keeper);
        Ok(())
    }

    /// Checks, before the device is initialised, that its store can outlive the process. All attributes
    /// survive but for `backing_force`. Fails with `Unsupported` on a machine that can't publish 16 bytes at
    /// once, or with a backing device that is no file and no block device.
    pub fn can_survive(&self) -> Result<()> {
        self.state.lock().can_survive()
    }

    /// Restores an initialised device, with the attributes that it had, from the memory that it had in this
    /// process or another. `backing` is its backing device, if it had one ([`NamedBacking::from_parts`]).
    /// `keeper` keeps all of that already. Many threads call `progress` as they go through the pages.
    ///
    /// Counts of work done, such as `io_stat`, and `mem_used_max` start anew.
    ///
    /// # Errors
    /// `Invalid` for memory of another device, or another backing device; otherwise as [`Store::attach`].
    ///
    /// # Safety
    /// As [`Store::attach`]: as long as the device has its store, nothing else changes the memory. No other
    /// device or store uses it, in this process or another, and every thread of a process that did has ended.
    pub unsafe fn attach(
        name: &str,
        memory: impl Into<KeptMemory>,
        backing: Option<NamedBacking>,
        keeper: Arc<dyn Keeper>,
        progress: impl Fn(AttachProgress) + Send + Sync + 'static,
    ) -> Result<(Arc<Device>, Attached)> {
        Device::check_name(name)?;
        let of_backing = backing.as_ref().map(|backing| Arc::clone(backing.backing()));
        // SAFETY: the caller's promise.
        let (store, attached, builder) = unsafe { Store::restore(memory.into(), of_backing, progress) }?;
        if builder.name != name {
            let what = format!("the memory is that of device '{}', not of '{name}'", builder.name);
            return Err(Error::invalid(what));
        }
        let disksize_bytes = pages_to_bytes(builder.pages);
        let (copies, encrypted) =
            backing.as_ref().map_or((1, false), |backing| (backing.copies(), backing.is_encrypted()));
        let how_to_open = HowToOpen { copies, encrypted, ..HowToOpen::default() };
        let mut params = Params { backing, how_to_open, ..Params::default() };
        if let Some(options) = &builder.backing {
            (params.writeback_layout, params.compressed_writeback) = (options.layout, options.compressed);
        }
        params.store = StoreBuilder { backing: None, ..builder };
        let store = Arc::new(store);
        let policy = params.start_policy(name, &store)?;
        let state = State {
            params,
            keeper: Some(keeper),
            policy,
            store: Some(store),
            disksize_bytes,
            ..State::default()
        };
        Ok((Arc::new(Device::with(name, state)), attached))
    }
}

impl State {
    pub(super) fn can_survive(&self) -> Result<()> {
        check_machine()?;
        match &self.params.backing {
            Some(backing) if backing.parts().is_none() => {
                let name = backing.name();
                let what = format!("the backing device '{name}' is none that another process can go on with");
                Err(Error::new(ErrorKind::Unsupported, what).with_setting("backing_dev"))
            }
            _ => Ok(()),
        }
    }
}
