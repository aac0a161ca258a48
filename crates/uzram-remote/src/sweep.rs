//! Leases, and removing what devices have left that are no more.
//!
//! As long as a device's process is there, it renews the device's lease
//! ([`ObjectStore::CHECK_EVERY`](crate::ObjectStore)); a lease that is not renewed is over after [`LEASE_S`].
//! The objects of a device without one, at two looks some seconds apart, belong to nobody: the key that they
//! are sealed with is gone, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use uzram::Result;

/// How long a lease lasts without being renewed. A machine that sleeps for longer can lose its objects to a
/// sweep.
pub(crate) const LEASE_S: u64 = 600;
/// What a lease's name ends with.
pub(crate) const LEASE: &str = "lease";
/// Between the two looks: longer than a process takes to renew a lease that it has just taken over.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(5);
const OBJECTS_AT_ONCE: usize = 1000;
const DEVICE_DIGITS: usize = 32;

/// What a sweep found of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Its objects; each copy counts.
    pub objects: u64,
    /// Whether it has a lease: then it was left alone.
    pub is_leased: bool,
}

/// Something of a device that a look has found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) device: &'a str,
    /// What the store calls it.
    pub(crate) name: &'a str,
    /// Whether it is a lease that is not over.
    pub(crate) is_lease: bool,
}

pub(crate) trait Sweepable {
    /// Goes through everything of devices once. Errors: if not all of the store can be asked.
    async fn look(&self, each: &mut dyn FnMut(Seen<'_>)) -> Result<()>;

    /// Removes objects, at most [`OBJECTS_AT_ONCE`].
    async fn remove(&self, names: &[String]) -> Result<()>;
}

/// Goes through a store and removes the objects of devices without a lease; with `only_look`, none. Returns
/// what it found, by device. Errors: those of the store: if a look fails, nothing is removed.
pub(crate) async fn sweep(store: &impl Sweepable, only_look: bool) -> Result<BTreeMap<String, Swept>> {
    let mut found: BTreeMap<String, Swept> = BTreeMap::new();
    store
        .look(&mut |seen| {
            let swept = found.entry(seen.device.to_owned()).or_default();
            swept.is_leased |= seen.is_lease;
            swept.objects += u64::from(!seen.is_lease);
        })
        .await?;
    if only_look || found.values().all(|swept| swept.is_leased) {
        return Ok(found);
    }
    tokio::time::sleep(LOOK_AGAIN_AFTER).await;
    let (mut leased, mut again, mut doomed) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    store
        .look(&mut |seen| {
            again.insert(seen.device.to_owned());
            if seen.is_lease {
                leased.insert(seen.device.to_owned());
            } else if found.get(seen.device).is_some_and(|swept| !swept.is_leased) {
                doomed.push((seen.device.to_owned(), seen.name.to_owned()));
            }
        })
        .await?;
    for (device, swept) in &mut found {
        // One that has ended meanwhile has removed its objects by itself.
        swept.is_leased |= leased.contains(device) || !again.contains(device);
    }
    doomed.retain(|(device, _)| !leased.contains(device));
    let doomed: Vec<String> = doomed.into_iter().map(|(_, name)| name).collect();
    for names in doomed.chunks(OBJECTS_AT_ONCE) {
        store.remove(names).await?;
    }
    Ok(found)
}

pub(crate) fn split_device(name: &str) -> Option<(&str, &str)> {
    let (device, rest) = name.split_at_checked(DEVICE_DIGITS)?;
    let is_device = device.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_device.then_some((device, rest))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::cell::RefCell;

    use super::*;

    /// What each look finds, device by device, and what was removed.
    struct Looks(RefCell<Vec<Vec<(&'static str, bool)>>>, RefCell<Vec<String>>);

    impl Sweepable for Looks {
        async fn look(&self, each: &mut dyn FnMut(Seen<'_>)) -> Result<()> {
            for (device, is_lease) in self.0.borrow_mut().remove(0) {
                each(Seen { device, name: device, is_lease });
            }
            Ok(())
        }

        async fn remove(&self, names: &[String]) -> Result<()> {
            self.1.borrow_mut().extend_from_slice(names);
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_has_no_lease_twice_is_removed() {
        let first =
            vec![("dead", false), ("ended", false), ("late", false), ("leased", false), ("leased", true)];
        let second =
            vec![("dead", false), ("late", false), ("late", true), ("leased", false), ("new", false)];
        let looks = Looks(RefCell::new(vec![first, second]), RefCell::default());
        let found = sweep(&looks, false).await.unwrap();
        assert_eq!(*looks.1.borrow(), ["dead"]);
        let alone: Vec<&str> =
            found.iter().filter(|(_, swept)| !swept.is_leased).map(|(name, _)| name.as_str()).collect();
        assert_eq!((alone, found.len()), (vec!["dead"], 4));
        let looks = Looks(RefCell::new(vec![vec![("dead", false)]]), RefCell::default());
        let dead = Swept { objects: 1, is_leased: false };
        assert_eq!(sweep(&looks, true).await.unwrap(), BTreeMap::from([("dead".to_owned(), dead)]));
        assert!(looks.1.borrow().is_empty());
    }
}
