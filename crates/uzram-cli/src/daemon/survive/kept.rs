//! The devices that the holder keeps, with their memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::link::{KeptDevice, Order};

/// A device, with the descriptors of its memory and its backing device.
#[derive(Debug)]
pub struct Kept {
    /// The device.
    pub device: KeptDevice,
    /// The memory of its store, if it has one.
    pub memory: Option<OwnedFd>,
    /// The parts of its backing device, if it has one.
    pub backing: Vec<OwnedFd>,
}

impl Kept {
    /// Puts together what a message brought.
    ///
    /// # Errors
    /// The message had another number of descriptors.
    pub fn received(device: KeptDevice, descriptors: Vec<OwnedFd>) -> io::Result<Kept> {
        let mut descriptors = descriptors.into_iter();
        let memory = if device.has_memory { descriptors.next() } else { None };
        let backing: Vec<_> = descriptors.collect();
        match memory.is_some() == device.has_memory && backing.len() == device.backing.len() {
            true => Ok(Kept { device, memory, backing }),
            false => Err(io::Error::other("a message about a device has the wrong descriptors")),
        }
    }

    /// Returns the order that tells a stand-by of it, and its descriptors.
    pub fn order(&self) -> (Order, Vec<BorrowedFd<'_>>) {
        let descriptors = self.memory.iter().chain(&self.backing).map(AsFd::as_fd);
        (Order::Device(self.device.clone()), descriptors.collect())
    }
}

/// Puts a device into a list, in the place of the one of its name if there is one.
pub fn put(list: &mut Vec<Kept>, kept: Kept) {
    match list.iter_mut().find(|other| other.device.name == kept.device.name) {
        Some(place) => *place = kept,
        None => list.push(kept),
    }
}
