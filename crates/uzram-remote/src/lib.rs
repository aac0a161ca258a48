//! Backings in stores that others run: cold pages in a Redis or Valkey server or cluster, or in an S3-like
//! store.
//!
//! A store of objects keeps each extent of a device as one object, under a key that names the device, the
//! extent and its generation. An object is written once, read in part, and removed; it is never changed. What
//! an index says is in the device's memory: which extent a page is in, and the extent's generation. The store
//! is searched for leftovers only.
//!
//! The threads of a client allocate memory from the system while pages are written back and read: nothing
//! that the machine's memory depends on, such as its swap, may have such a backing.

mod address;
mod answers;
mod backing;
mod breaker;
mod login;
mod objects;
mod opener;
mod redis;
mod retry;
mod s3;
mod secret;
mod sweep;

pub use crate::redis::{Credentials, RedisStore, read_answer};
pub use crate::s3::{S3Address, S3Login, S3Store};
pub use crate::sweep::Swept;
pub use address::{Address, Server};
pub use answers::{Failure, Meaning};
pub use backing::{Identity, Limits, RemoteBacking};
pub use objects::{DeviceId, Key, ObjectStore};
pub use opener::{RemoteOpener, sweep, sweep_s3};

use std::borrow::Cow;

use uzram::{Error, ErrorKind};

/// The attribute that errors of this crate name.
const SETTING: &str = "backing_dev";

/// Returns an error that names the attribute.
fn error(kind: ErrorKind, what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(kind, what).with_setting(SETTING)
}
