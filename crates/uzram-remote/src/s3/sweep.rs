//! Going through the objects in a bucket for a sweep.
//!
//! A lease is an object that is written again and again. It is over when it is older than [`LEASE_S`], by the
//! store's clock: that of an object which the sweep writes.

use std::collections::BTreeMap;

use futures_util::TryStreamExt;
use opendal::raw::Timestamp;
use uzram::Result;

use super::{PROBE, S3Store};
use crate::objects::DeviceId;
use crate::sweep::{self, LEASE, LEASE_S, Seen, Sweepable, Swept, split_device};
use crate::{Failure, S3Address, S3Login};

/// Goes through the objects at an address, and removes those of devices without a lease; with `only_look`,
/// none. Returns what it found, by device. Errors: `Io` if the store cannot be asked: then nothing is
/// removed. `Permission` for another login.
pub(crate) async fn sweep(
    address: S3Address,
    login: &S3Login,
    only_look: bool,
) -> Result<BTreeMap<String, Swept>> {
    sweep::sweep(&S3Store::new(address, login)?, only_look).await
}

/// Returns the device of a name behind the prefix, and whether it is a lease.
fn parse(name: &str) -> Option<(&str, bool)> {
    let (device, rest) = split_device(name)?;
    let rest = rest.strip_prefix('/')?;
    let is_object = || {
        let numbers = rest.split_once('-');
        numbers.is_some_and(|(extent, generation)| {
            [extent, generation].iter().all(|number| number.parse::<u32>().is_ok())
        })
    };
    match rest {
        LEASE => Some((device, true)),
        // One that a process left which was killed meanwhile.
        PROBE => Some((device, false)),
        _ if is_object() => Some((device, false)),
        _ => None,
    }
}

impl S3Store {
    async fn now(&self) -> Result<Timestamp, Failure> {
        let probe = self.name(DeviceId::new()?, PROBE);
        let now = async {
            self.write(&probe, PROBE.as_bytes()).await?;
            self.last_modified(&probe).await
        };
        let now = now.await;
        // In any case.
        self.delete(vec![probe]).await?;
        now
    }
}

impl Sweepable for S3Store {
    async fn look(&self, each: &mut dyn FnMut(Seen<'_>)) -> Result<()> {
        let now = self.tried(|| self.now()).await?;
        let directory = self.directory();
        let mut entries =
            self.answer(self.operator.lister_with(&directory).recursive(true).into_future()).await?;
        while let Some(entry) = self.answer(entries.try_next()).await? {
            let Some((device, is_lease)) = entry.path().strip_prefix(&directory).and_then(parse) else {
                continue;
            };
            let is_lease = is_lease && is_valid(entry.metadata().last_modified(), now);
            each(Seen { device, name: entry.path(), is_lease });
        }
        Ok(())
    }

    async fn remove(&self, names: &[String]) -> Result<()> {
        Ok(self.tried(|| self.delete(names.to_vec())).await?)
    }
}

/// Returns whether a lease is not over. One of unknown age is not.
fn is_valid(modified: Option<Timestamp>, now: Timestamp) -> bool {
    modified.is_none_or(|modified| {
        now.into_inner().duration_since(modified.into_inner()).as_secs() < LEASE_S as i64
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn objects_of_others_are_left_alone() {
        let device = "0123456789abcdef0123456789abcdef";
        for (name, expected) in [
            (format!("{device}/7-1"), Some(false)),
            (format!("{device}/probe"), Some(false)),
            (format!("{device}/lease"), Some(true)),
            (format!("{device}/leases"), None),
            (format!("{device}/7"), None),
            (format!("{device}/7-1-1"), None),
            (format!("{device}/a/7-1"), None),
            (format!("{device}/"), None),
            (device.to_owned(), None),
            (format!("{}/7-1", &device[1..]), None),
            (format!("{}/7-1", device.to_uppercase()), None),
            ("äöü".repeat(9), None),
        ] {
            assert_eq!(parse(&name).map(|(_, is_lease)| is_lease), expected, "{name}");
        }
    }

    #[test]
    fn a_lease_is_over_after_some_minutes() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let now = at("2026-01-01T00:10:00Z");
        assert!(is_valid(Some(at("2026-01-01T00:00:01Z")), now) && is_valid(None, now));
        // The clock of a store may go backwards.
        assert!(is_valid(Some(at("2026-01-01T00:20:00Z")), now));
        assert!(!is_valid(Some(at("2026-01-01T00:00:00Z")), now));
    }
}
