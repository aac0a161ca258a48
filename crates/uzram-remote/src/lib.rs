//! Backings in stores that others run: cold pages in a Redis or Valkey server or cluster.
//!
//! A store of objects keeps each extent of a device as one object, under a key that names the device, the extent and its
//! generation. An object is written once, read in part, and removed; it is never changed. What an index says is in the
//! device's memory: which extent a page is in, and the extent's generation. The store is never searched.
//!
//! - `address.rs`: texts that name servers
//! - `backing.rs`: [`RemoteBacking`], which carries out a device's transfers
//! - `breaker.rs`: whether the store is written to
//! - `objects.rs`: what a store of objects can do
//! - `opener.rs`: [`RemoteOpener`], by which a program's devices get such backings
//! - `redis/`: Redis and Valkey, single servers and clusters
//! - `secret.rs`: the key that a device's objects are sealed with
//!
//! The threads of a client allocate memory from the system while pages are written back and read: nothing that the
//! machine's memory depends on, such as its swap, may have such a backing.

mod address;
mod backing;
mod breaker;
mod objects;
mod opener;
mod redis;
mod secret;

pub use crate::redis::{Credentials, RedisStore, Swept, read_answer};
pub use address::{Address, Server};
pub use backing::{Identity, Limits, RemoteBacking};
pub use objects::{DeviceId, Key, Objects};
pub use opener::{RemoteOpener, sweep};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The attribute that errors of this crate name.
const SETTING: &str = "backing_dev";

/// Locks a mutex. A panic under one leaves what it protects whole: numbers, lists and keys.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
