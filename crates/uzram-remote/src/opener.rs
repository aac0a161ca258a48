//! [`RemoteOpener`]: opens the stores that a program's devices name, and goes on with those of a process that
//! has ended.
//!
//! What a process needs to go on, key and login included, is in a memory file, which whoever keeps the
//! device's memory keeps, too. The login comes from the environment (`login.rs`).

use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzram::backing::{MOST_WAIT, Seal};
use uzram::device::{Elsewhere, Opener};
use uzram::sync::Mutex;
use uzram::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::redis::{Credentials, RedisStore};
use crate::s3::{self, S3Address, S3Login, S3Store};
use crate::{Address, Identity, Limits, ObjectStore, RemoteBacking, Swept, error, login};

/// Many objects at a time on a slow line take longer than those of Redis.
const S3_LIMITS: Limits = Limits {
    in_flight_bytes: 8 << 20,
    read_deadline: Duration::from_secs(5),
    write_deadline: Duration::from_secs(10),
    gone_after: MOST_WAIT,
};
const MAX_KEPT_BYTES: usize = 64 << 10;

/// Opens `redis://`, `rediss://` and `s3://`.
pub struct RemoteOpener;

enum Place {
    Redis(Address),
    S3(S3Address),
}

impl Place {
    /// Errors: `Invalid`, as [`Address::parse`] and [`S3Address::parse`].
    fn parse(text: &str) -> Result<Place> {
        match text.starts_with(s3::SCHEME) {
            true => S3Address::parse(text).map(Place::S3),
            false => Address::parse(text).map(Place::Redis),
        }
    }
}

#[derive(Clone, Serialize, Deserialize)]
enum Login {
    Redis(Credentials),
    S3(S3Login),
}

#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    identity: Identity,
    name: String,
    /// The address with all nodes of a cluster: the one that was given may be away.
    address: String,
    copies: u8,
    login: Login,
}

impl Opener for RemoteOpener {
    fn check(&self, text: &str) -> Result<()> {
        Place::parse(text).map(drop)
    }

    fn open(&self, text: &str, copies: u8) -> Result<Elsewhere> {
        match Place::parse(text)? {
            Place::Redis(address) => open_redis(address, copies),
            Place::S3(address) => open_s3(address, copies),
        }
    }

    fn resume(&self, fd: OwnedFd, len_bytes: u64) -> Result<Elsewhere> {
        let kept: Kept = read(&fd)?;
        match (Place::parse(&kept.address)?, kept.login.clone()) {
            (Place::Redis(address), Login::Redis(login)) => {
                let copies = kept.copies;
                let connect = move || RedisStore::reconnect(address.clone(), login.clone(), copies);
                let backing = RemoteBacking::resume(&kept.identity, len_bytes, Limits::default(), connect)?;
                Ok(kept.with(backing, Some(fd)))
            }
            (Place::S3(address), Login::S3(login)) => {
                // Certificates are read now. Later, files cannot be.
                let store = Mutex::unordered(Some(S3Store::new(address, &login)?));
                let connect = move || {
                    let store = store.lock().take();
                    std::future::ready(store.ok_or_else(|| Error::new(ErrorKind::Busy, "connected already")))
                };
                let backing = RemoteBacking::resume(&kept.identity, len_bytes, S3_LIMITS, connect)?;
                Ok(kept.with(backing, Some(fd)))
            }
            _ => Err(not_kept()),
        }
    }

    fn seal(&self, kept: Option<OwnedFd>) -> Result<(Arc<dyn Seal>, Option<OwnedFd>)> {
        let identity = kept.as_ref().map_or_else(Identity::new, read)?;
        let kept = kept.or_else(|| write(&identity).ok());
        let sealer = identity.sealer()?;
        sealer.pin(kept.as_ref());
        Ok((Arc::new(sealer), kept))
    }
}

fn open_redis(address: Address, copies: u8) -> Result<Elsewhere> {
    let (identity, name, login) = (Identity::new()?, address.to_string(), login::redis()?);
    let size_bytes = address.size_bytes;
    let mut all = address.clone();
    let connect = async || {
        let store = RedisStore::connect(address, login.clone(), copies).await?;
        all = store.address_of_all().await?;
        Ok(store)
    };
    let backing = RemoteBacking::open(&identity, size_bytes, Limits::default(), connect)?;
    let kept = Kept { identity, name, address: all.to_string(), copies, login: Login::Redis(login) };
    Ok(kept.opened(backing))
}

fn open_s3(address: S3Address, copies: u8) -> Result<Elsewhere> {
    if copies != 1 {
        let what = "S3 keeps copies by itself: an object has one";
        return Err(Error::invalid(what).with_setting("backing_copies"));
    }
    let (identity, name, login) = (Identity::new()?, address.to_string(), login::s3()?);
    let size_bytes = address.size_bytes;
    let connect = || S3Store::connect(address, &login);
    let backing = RemoteBacking::open(&identity, size_bytes, S3_LIMITS, connect)?;
    let kept = Kept { identity, address: name.clone(), name, copies, login: Login::S3(login) };
    Ok(kept.opened(backing))
}

impl Kept {
    fn opened<O: ObjectStore>(self, backing: RemoteBacking<O>) -> Elsewhere {
        // Without it, the device ends with the process.
        let fd = write(&self).ok();
        self.with(backing, fd)
    }

    fn with<O: ObjectStore>(self, backing: RemoteBacking<O>, kept: Option<OwnedFd>) -> Elsewhere {
        backing.sealer().pin(kept.as_ref());
        let copies = match self.copies {
            1 => "one copy".to_owned(),
            copies => format!("{copies} copies"),
        };
        Elsewhere {
            how: format!("encrypted, {copies} of each object, device {}", self.identity.device),
            name: self.name,
            seal: backing.seal(),
            backing: Arc::new(backing),
            copies: self.copies,
            kept,
        }
    }
}

/// Writes what is kept to a memory file, which nobody can change.
fn write(kept: &impl Serialize) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("uzram-backing", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    // Leaves no copy of the key elsewhere.
    serde_json::to_writer(&file, kept)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

fn read<T: DeserializeOwned>(fd: &OwnedFd) -> Result<T> {
    let mut bytes = Zeroizing::new(vec![0; MAX_KEPT_BYTES]);
    let len = rustix::io::pread(fd, bytes.as_mut_slice(), 0).map_err(|_| not_kept())?;
    serde_json::from_slice(&bytes[..len]).map_err(|_| not_kept())
}

fn not_kept() -> Error {
    error(ErrorKind::Invalid, "the descriptor is not that of a store on other machines")
}

/// Removes what devices without a lease have left at an address, or with `only_look` looks for it; the login
/// is that of the environment. Returns what was found, by device. Errors: as [`RemoteOpener`]; `Io` if not
/// all of the store can be asked: then nothing is removed.
pub fn sweep(text: &str, only_look: bool) -> Result<BTreeMap<String, Swept>> {
    match Place::parse(text)? {
        Place::Redis(address) => block_on(crate::redis::sweep(address, login::redis()?, only_look)),
        Place::S3(address) => sweep_s3(&address, &login::s3()?, only_look),
    }
}

/// The same in S3, with a login. Errors: as [`sweep`].
pub fn sweep_s3(address: &S3Address, login: &S3Login, only_look: bool) -> Result<BTreeMap<String, Swept>> {
    block_on(s3::sweep(address.clone(), login, only_look))
}

fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?.block_on(future)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_is_kept_can_be_read_again_and_not_changed() {
        let login = Credentials { user: Some("u".to_owned()), password: Some("p".to_owned()) };
        let identity = Identity::new().unwrap();
        let device = identity.device;
        let kept = Kept {
            identity,
            name: "redis://a:1".to_owned(),
            address: "redis://a:1,b:2".to_owned(),
            copies: 2,
            login: Login::Redis(login),
        };
        let file = write(&kept).unwrap();
        let read: Kept = super::read(&file).unwrap();
        let file = File::from(file);
        assert_eq!((read.identity.device, read.address, read.copies), (device, kept.address, 2));
        let Login::Redis(login) = read.login else { panic!("another login") };
        assert_eq!((login.user.as_deref(), login.password.as_deref()), (Some("u"), Some("p")));
        assert!(file.write_at(b"x", 0).is_err());
        for bad in ["", "{}", "null"] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bad.as_bytes()).unwrap();
            assert!(super::read::<Kept>(&file.into()).is_err(), "{bad}");
        }
    }
}
