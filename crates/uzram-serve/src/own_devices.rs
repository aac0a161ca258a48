//! Backing files on a daemon's own devices: on a file system of a block device that is attached to one of its files, or
//! among these files. Pages would leave memory for memory, and neither device could be freed before the other.

use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use uzram::device::{Device, NamedBacking};
use uzram::{Error, ErrorKind, Result};

use crate::block_stack;
use crate::loop_device::LoopAttachment;
use crate::record::Recorder;

/// Checks that no file of a value of `backing_dev` lies on a device of the daemon that `recorder` records, as far as the
/// kernel tells. Files that do not exist yet are looked for by their directory.
///
/// # Errors
/// `Invalid` if one does.
pub(crate) fn check_backing(recorder: &Recorder, backing: &str) -> Result<()> {
    for path in NamedBacking::paths(backing) {
        let open = |path: &Path| rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let opened = match (open(path), path.parent()) {
            (Err(Errno::NOENT), Some(dir)) => open(dir),
            (opened, _) => opened,
        };
        // If it cannot be opened, using it fails with the reason.
        let below = opened.ok().and_then(|file| block_stack::below(file).ok());
        if let Some(own) = below.and_then(|below| recorder.own_of(&below)) {
            let what = format!(
                "the backing device '{}' lies on {own}, of this daemon: pages would leave memory for memory, and neither \
                 device could be freed before the other; choose another place",
                path.display()
            );
            return Err(Error::new(ErrorKind::Invalid, what).with_setting("backing_dev"));
        }
    }
    Ok(())
}

/// Returns what has to end before a block device is free, for the end of a message: the devices whose backing files lie on
/// it.
pub fn way_out(devices: &[Arc<Device>], attachment: LoopAttachment) -> String {
    let on_it = |device: &Arc<Device>| {
        let (name, backing) = (device.name(), device.backing()?);
        let is_on = |(_, file): &(&str, _)| {
            block_stack::below(file).is_ok_and(|below| below.contains(&attachment.device_number()))
        };
        let (path, _) = backing.files().find(is_on)?;
        Some(format!(
            "; the backing file of {name}, '{path}', lies there: end the use of {name}, then `uzram remove {name}`, then \
             unmount"
        ))
    };
    devices.iter().filter_map(on_it).collect()
}
