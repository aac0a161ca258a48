//! [`RemoteOpener`]: opens the stores that a program's devices name, and goes on with those of a process that has ended.
//!
//! What a process needs to go on, key and login included, is in a memory file, which whoever keeps the device's memory
//! keeps, too. The login comes from the environment:
//!
//! - `UZRAM_REDIS_USER`: the user
//! - `UZRAM_REDIS_PASSWORD_FILE`: a file that has the password in its first line, and that no other user can read
//! - `UZRAM_REDIS_PASSWORD`: the password

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzram::backing::{Backing, Seal};
use uzram::device::{Elsewhere, Opener};
use uzram::{Error, ErrorKind, Result};

use crate::redis::{Credentials, RedisStore, Swept};
use crate::{Address, Identity, Limits, RemoteBacking, SETTING};

/// The most bytes of a user's name, a password, and of what is kept.
const MAX_LOGIN_BYTES: u64 = 4096;
const MAX_KEPT_BYTES: u64 = 64 << 10;

/// Opens `redis://` and `rediss://`.
pub struct RemoteOpener;

/// What a process needs to go on.
#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    identity: Identity,
    /// The address that was given.
    name: String,
    /// The address with all nodes of a cluster: the one that was given may be away.
    address: String,
    copies: u8,
    login: Credentials,
}

impl Opener for RemoteOpener {
    fn check(&self, text: &str) -> Result<()> {
        Address::parse(text).map(drop)
    }

    fn open(&self, text: &str, copies: u8) -> Result<Elsewhere> {
        let address = Address::parse(text)?;
        let (identity, name, login) = (Identity::new()?, address.to_string(), login()?);
        let size_bytes = address.size_bytes;
        let mut all = address.clone();
        let connect = async || {
            let store = RedisStore::connect(address, login.clone(), copies).await?;
            all = store.address_of_all().await?;
            Ok(store)
        };
        let backing = RemoteBacking::open(&identity, size_bytes, Limits::default(), connect)?;
        let kept = Kept { identity, name, address: all.to_string(), copies, login };
        Ok(kept.with(Arc::new(backing)))
    }

    fn resume(&self, fd: OwnedFd, len_bytes: u64) -> Result<Elsewhere> {
        let kept: Kept = read(&File::from(fd))?;
        let address = Address::parse(&kept.address)?;
        let of_connect = kept.clone();
        let connect =
            move || RedisStore::reconnect(address.clone(), of_connect.login.clone(), of_connect.copies);
        let backing = RemoteBacking::resume(&kept.identity, len_bytes, Limits::default(), connect)?;
        Ok(kept.with(Arc::new(backing)))
    }

    fn seal(&self, kept: Option<OwnedFd>) -> Result<(Arc<dyn Seal>, OwnedFd)> {
        let identity: Identity = match kept {
            Some(fd) => read(&File::from(fd))?,
            None => Identity::new()?,
        };
        let keep = write(&identity).map_err(|error| {
            let what = format!("no memory for the key of an encrypted backing device: {error}");
            Error::new(ErrorKind::NoMemory, what).with_setting("backing_encrypted")
        })?;
        Ok((Arc::new(identity.sealer()?), keep))
    }
}

impl Kept {
    fn with(self, backing: Arc<dyn Backing>) -> Elsewhere {
        let copies = match self.copies {
            1 => "one copy".to_owned(),
            copies => format!("{copies} copies"),
        };
        Elsewhere {
            name: self.name.clone(),
            how: format!("encrypted, {copies} of each object, device {}", self.identity.device),
            backing,
            copies: self.copies,
            // Without it, the device ends with the process.
            kept: write(&self).ok(),
        }
    }
}

/// Writes what is kept to a memory file, which nobody can change.
fn write(kept: &impl Serialize) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("uzram-backing", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(kept)?)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Reads what another process wrote.
fn read<T: DeserializeOwned>(file: &File) -> Result<T> {
    let bad =
        || Error::invalid("the descriptor is not that of a store on other machines").with_setting(SETTING);
    let len = file.metadata().map_err(|_| bad())?.len();
    if len > MAX_KEPT_BYTES {
        return Err(bad());
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|_| bad())?;
    serde_json::from_slice(&bytes).map_err(|_| bad())
}

/// Removes what devices without a lease have left at an address, or with `only_look` looks for it; the login is that of the
/// environment. Returns what was found, by device.
///
/// # Errors
/// As [`RemoteOpener`]; `Io` if one of the masters cannot be asked: then nothing is removed.
pub fn sweep(text: &str, only_look: bool) -> Result<BTreeMap<String, Swept>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
    runtime.block_on(crate::redis::sweep(Address::parse(text)?, login()?, only_look))
}

/// Returns the login that the environment names.
fn login() -> Result<Credentials> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let password = match variable("UZRAM_REDIS_PASSWORD_FILE") {
        Some(path) => Some(password_in(&path)?),
        None => variable("UZRAM_REDIS_PASSWORD"),
    };
    let login = Credentials { user: variable("UZRAM_REDIS_USER"), password };
    let is_long =
        |text: &Option<String>| text.as_ref().is_some_and(|text| text.len() as u64 > MAX_LOGIN_BYTES);
    match is_long(&login.user) || is_long(&login.password) {
        true => Err(Error::invalid("the user's name or the password is too long").with_setting(SETTING)),
        false => Ok(login),
    }
}

/// Reads the first line of a file, which only this user and root may read.
fn password_in(path: &str) -> Result<String> {
    let refused = |kind, why: &str| Err(Error::new(kind, format!("{path}: {why}")).with_setting(SETTING));
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (metadata, file) = match opened {
        Ok(opened) => opened,
        Err(error) => return refused(ErrorKind::NotFound, &format!("the password cannot be read: {error}")),
    };
    let own = rustix::process::geteuid().as_raw();
    if metadata.mode() & 0o077 != 0 || ![0, own].contains(&metadata.uid()) {
        return refused(ErrorKind::Permission, "other users may read or change the password: chmod 600 it");
    }
    let mut text = String::new();
    match file.take(MAX_LOGIN_BYTES).read_to_string(&mut text) {
        Ok(_) => Ok(text.lines().next().unwrap_or_default().to_owned()),
        Err(error) => refused(ErrorKind::Io, &format!("the password cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

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
            login,
        };
        let file = File::from(write(&kept).unwrap());
        let read: Kept = super::read(&file).unwrap();
        assert_eq!((read.identity.device, read.address, read.copies), (device, kept.address, 2));
        assert_eq!((read.login.user.as_deref(), read.login.password.as_deref()), (Some("u"), Some("p")));
        assert!(file.write_at(b"x", 0).is_err());
        for bad in ["", "{}", "null"] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bad.as_bytes()).unwrap();
            assert!(super::read::<Kept>(&file).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_password_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        std::fs::write(&path, "secret\n").unwrap();
        let read = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            password_in(path.to_str().unwrap()).map_err(|error| error.kind())
        };
        assert_eq!(read(0o600), Ok("secret".to_owned()));
        assert_eq!(read(0o400), Ok("secret".to_owned()));
        for mode in [0o644, 0o660, 0o604, 0o620] {
            assert_eq!(read(mode), Err(ErrorKind::Permission), "{mode:o}");
        }
        assert_eq!(password_in("/nowhere").map_err(|error| error.kind()), Err(ErrorKind::NotFound));
    }
}
