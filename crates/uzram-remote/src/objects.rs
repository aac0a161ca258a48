//! What a store of objects can do.

use std::future::Future;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzram::backing::Filling;
use uzram::{Error, ErrorKind, Result};

use crate::Failure;

/// Names a device among all that ever had objects in a store: 128 bits at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceId([u8; 16]);

impl DeviceId {
    /// Returns a new one. Errors: `Io` if the system gives no random bytes.
    pub fn new() -> Result<DeviceId> {
        let mut bytes = [0; 16];
        match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(16) => Ok(DeviceId(bytes)),
            _ => Err(Error::new(ErrorKind::Io, "the system gave no random bytes")),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Names an object: one filling of an extent of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The device.
    pub device: DeviceId,
    /// The extent's number.
    pub extent: u32,
    /// The filling.
    pub filling: Filling,
}

/// A store of objects, each of which is written once.
///
/// The caller sets deadlines: it drops the futures that it no longer waits for, and tries again what failed
/// for a reason that may pass ([`Meaning::Again`](crate::Meaning)). What a request does that was given up is
/// unknown; the caller removes the object then.
pub trait ObjectStore: Send + Sync + 'static {
    /// The most bytes of an object, a power of two.
    const OBJECT_BYTES: usize;

    /// How often a store that seems well is checked, and leases are renewed: somebody may have changed what
    /// it keeps.
    const CHECK_EVERY: Duration = Duration::from_secs(2);

    /// Returns what the store wants to know again about an object of that extent ([`Filling::home`]).
    fn home(&self, _extent: u32) -> u32 {
        0
    }

    /// Returns a number that changes when objects may be in danger; 0 at first.
    fn placement_generation(&self) -> u64 {
        0
    }

    /// Returns whether copies of the objects with a home have been lost for good, or would be lost together.
    fn is_at_risk(&self, _home: u32) -> bool {
        false
    }

    /// Stores an object.
    fn put(&self, key: Key, bytes: &[u8]) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Returns up to `len_bytes` bytes of an object from `at` on; fewer where it ends, and none if it has
    /// none there.
    fn get(
        &self,
        key: Key,
        at: usize,
        len_bytes: usize,
    ) -> impl Future<Output = Result<Vec<u8>, Failure>> + Send;

    /// Reads as [`ObjectStore::get`] does, on the calling thread, if that is faster, and returns what
    /// `is_whole` returns of what was read. Returns false if it has to be done otherwise.
    fn get_here(&self, _key: Key, _at: usize, _out: &mut [u8], _is_whole: &dyn Fn(&[u8]) -> bool) -> bool {
        false
    }

    /// Called when what [`ObjectStore::get`] read is damaged: reads the same from each copy, one after the
    /// other, until `is_whole` returns that it is not. Whether there is one that is not damaged is up to the
    /// caller to find out.
    fn get_whole(
        &self,
        _key: Key,
        _at: usize,
        _out: &mut [u8],
        _is_whole: &(dyn Fn(&[u8]) -> bool + Sync),
    ) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Removes objects, and returns those of which it is not known that they are gone.
    fn remove(&self, keys: Vec<Key>) -> impl Future<Output = Vec<Key>> + Send;

    /// Says in the store that a device is there, for some minutes: its objects belong to somebody.
    fn renew_lease(&self, device: DeviceId) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Takes that back, at the device's end.
    fn end_lease(&self, device: DeviceId) -> impl Future<Output = ()> + Send;

    /// Checks that the store is there and keeps what it is given. Returns what is wrong with a part of it, if
    /// the rest is used as before.
    fn check(&self) -> impl Future<Output = Result<Option<String>, Failure>> + Send;
}

/// Copies what was read from an object's `range` into `out`, of the length of the range; what the object does
/// not have becomes zeros. Errors: if nothing was read, or more than what was asked for.
pub(crate) fn take(read: &[u8], out: &mut [u8]) -> Result<(), Failure> {
    if read.is_empty() {
        return Err(Failure::lost("the store"));
    }
    let Some((there, rest)) = out.split_at_mut_checked(read.len()) else {
        return Err(Failure::odd_answer("the store"));
    };
    there.copy_from_slice(read);
    rest.fill(0);
    Ok(())
}
