//! S3, and stores that speak its protocol.
//!
//! An object's name is `PREFIX/uzram/DEVICE/EXTENT-GENERATION`. It is written by one PUT, and read by one GET
//! of a range.

mod address;
mod sweep;
mod transport;

use std::future::Future;
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::TryStreamExt;
use opendal::raw::Timestamp;
use opendal::services::S3;
use opendal::{HttpTransporter, OperationContext, Operator};
use uzram::{ErrorKind, Result};

use crate::objects::{DeviceId, Key, ObjectStore};
use crate::retry::{OPENED_WITHIN, opened, tried};
use crate::sweep::LEASE;
use crate::{Failure, error};

pub(crate) use address::SCHEME;
pub use address::{S3Address, S3Login};
pub(crate) use sweep::sweep;
use transport::Transport;

/// The bytes of an extent: each request costs money.
const OBJECT_BYTES: usize = 1 << 20;
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// What names in a bucket begin with, behind the prefix.
const DIRECTORY: &str = "uzram/";
/// The end of the name of an object that is written and read to find out whether the store can be used.
const PROBE: &str = "probe";
/// How long an answer may take, and how long a request of a sweep is tried again.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Objects in a bucket.
pub struct S3Store {
    address: S3Address,
    operator: Operator,
    leased: OnceLock<DeviceId>,
}

impl S3Store {
    /// Returns a store that is not asked for anything yet. Reads the system's certificates. Errors: `Invalid`
    /// if the login cannot be sent; `NotFound` without certificates.
    pub fn new(address: S3Address, login: &S3Login) -> Result<S3Store> {
        let login = login.clone().checked()?;
        let endpoint = login.endpoint.as_deref().map(|url| url.trim_end_matches('/'));
        let transport = Transport::new(endpoint.is_none_or(|url| url.starts_with("https://")))?;
        let mut builder = S3::default()
            // No files, no variables, and no services of a cloud are searched for a login.
            .disable_config_load()
            .disable_ec2_metadata()
            .root("/")
            .bucket(&address.bucket)
            .region(&login.region)
            .access_key_id(&login.access_key_id)
            .secret_access_key(&login.secret_access_key);
        if let Some(token) = &login.session_token {
            builder = builder.session_token(token);
        }
        if let Some(endpoint) = endpoint {
            builder = builder.endpoint(endpoint);
        }
        let operator =
            Operator::new(builder).map_err(|error| Failure::of_s3(&address.to_string(), &error))?;
        let context = OperationContext::new().with_http_transport(HttpTransporter::new(transport));
        Ok(S3Store { address, operator: operator.with_context(context), leased: OnceLock::new() })
    }

    /// Returns a store, and checks that it keeps what it is given: an object is written, read and removed.
    /// Errors: `Io` if it does not answer; `Permission` if it wants another login; `Invalid` if there is no
    /// such bucket; as [`S3Store::new`]. All within 5 s.
    pub async fn connect(address: S3Address, login: &S3Login) -> Result<S3Store> {
        let store = S3Store::new(address, login)?;
        let until = tokio::time::Instant::now() + OPENED_WITHIN;
        opened(&store.address, async { Ok(tried(until, || store.probe()).await?) }).await?;
        Ok(store)
    }

    async fn probe(&self) -> Result<(), Failure> {
        let device = DeviceId::new()?;
        let name = self.name(device, PROBE);
        self.write(&name, device.bytes()).await?;
        let read = self.read(&name, 4, 8).await;
        self.delete(vec![name]).await?;
        match read? == device.bytes()[4..12] {
            true => Ok(()),
            false => {
                let what = format!("{} does not return what it is given", self.address);
                Err(error(ErrorKind::Io, what).into())
            }
        }
    }

    /// Returns what the names of all devices' objects begin with.
    fn directory(&self) -> String {
        match self.address.prefix.as_str() {
            "" => DIRECTORY.to_owned(),
            prefix => format!("{prefix}/{DIRECTORY}"),
        }
    }

    fn name(&self, device: DeviceId, what: &str) -> String {
        format!("{}{device}/{what}", self.directory())
    }

    fn object(&self, key: Key) -> String {
        self.name(key.device, &format!("{}-{}", key.extent, key.filling.generation))
    }

    fn explain(&self, error: &opendal::Error) -> Failure {
        Failure::of_s3(&self.address.to_string(), error)
    }

    async fn answer<T>(&self, request: impl Future<Output = opendal::Result<T>>) -> Result<T, Failure> {
        match tokio::time::timeout(ANSWER_WITHIN, request).await {
            Ok(answer) => answer.map_err(|error| self.explain(&error)),
            Err(_) => Err(Failure::silent(&self.address)),
        }
    }

    async fn tried<T, F>(&self, request: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        tried(tokio::time::Instant::now() + ANSWER_WITHIN, request).await
    }

    async fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        self.answer(self.operator.write(name, bytes.to_vec())).await.map(drop)
    }

    /// Reads bytes of an object; fewer where it ends.
    async fn read(&self, name: &str, at: usize, len_bytes: usize) -> Result<Vec<u8>, Failure> {
        self.answer(get_range(&self.operator, name, at, len_bytes)).await
    }

    async fn delete(&self, names: Vec<String>) -> Result<(), Failure> {
        self.answer(self.operator.delete_iter(names)).await
    }

    async fn last_modified(&self, name: &str) -> Result<Timestamp, Failure> {
        let found = self.answer(self.operator.stat(name)).await?;
        found.last_modified().ok_or_else(|| {
            let what = format!("{} does not say when an object was written", self.address);
            error(ErrorKind::Unsupported, what).into()
        })
    }
}

/// Reads bytes of an object by one request; fewer where it ends.
async fn get_range(operator: &Operator, name: &str, at: usize, len_bytes: usize) -> opendal::Result<Vec<u8>> {
    let reader = operator.reader(name).await?;
    let mut parts = reader.into_stream(at as u64..(at + len_bytes) as u64).await?;
    // What the answer says about the object.
    let object_bytes = parts.metadata().await?.content_length();
    let there =
        usize::try_from(object_bytes).map_or(len_bytes, |bytes| bytes.saturating_sub(at).min(len_bytes));
    let mut read = Vec::with_capacity(there);
    while read.len() < there
        && let Some(part) = parts.try_next().await?
    {
        part.for_each(|bytes| read.extend_from_slice(&bytes));
    }
    Ok(read)
}

impl ObjectStore for S3Store {
    const OBJECT_BYTES: usize = OBJECT_BYTES;
    const CHECK_EVERY: Duration = CHECK_EVERY;

    async fn put(&self, key: Key, bytes: &[u8]) -> Result<(), Failure> {
        self.write(&self.object(key), bytes).await
    }

    async fn get(&self, key: Key, at: usize, len_bytes: usize) -> Result<Vec<u8>, Failure> {
        self.read(&self.object(key), at, len_bytes).await
    }

    /// A request that fails may have removed some.
    async fn remove(&self, keys: Vec<Key>) -> Vec<Key> {
        let names = keys.iter().map(|key| self.object(*key)).collect();
        match self.delete(names).await {
            Ok(()) => Vec::new(),
            Err(_) => keys,
        }
    }

    async fn renew_lease(&self, device: DeviceId) -> Result<(), Failure> {
        let host = rustix::system::uname();
        self.write(&self.name(device, LEASE), host.nodename().to_bytes()).await?;
        let _ = self.leased.set(device);
        Ok(())
    }

    async fn end_lease(&self, device: DeviceId) {
        // Over in some minutes otherwise.
        let _ = self.delete(vec![self.name(device, LEASE)]).await;
    }

    /// Reads a byte of the device's lease. That it can be written is found out when it is renewed.
    async fn check(&self) -> Result<Option<String>, Failure> {
        let Some(device) = self.leased.get() else { return Ok(None) };
        match self.read(&self.name(*device, LEASE), 0, 1).await {
            // It is written again.
            Err(failure) if !failure.is_lost() => Err(failure),
            _ => Ok(None),
        }
    }
}
