//! Leases, and removing what devices have left that are no more.
//!
//! As long as a device's process is there, it renews the device's lease every few seconds: a key that expires otherwise. The
//! objects of a device without one, at two looks some seconds apart, belong to nobody: the key that they are sealed with
//! is gone, too.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::{Cmd, Value};
use uzram::Result;

use super::client::{Client, Role, Use};
use super::connect::{self, Credentials, text};
use super::failures::{explain, odd_answer};
use super::topology::slot_of;
use crate::{Address, Server};

/// How long a lease lasts without being renewed. A machine that sleeps for longer can lose its objects to a sweep.
pub(super) const LEASE_S: u64 = 600;
/// What a lease's key ends with.
pub(super) const LEASE: &str = "lease";
/// Between the two looks: longer than a device takes to renew its lease.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Keys that a server is asked to go through at a time, and that are removed at a time.
const KEYS_AT_ONCE: usize = 1000;
/// Hexadecimal digits of a device.
const DEVICE_DIGITS: usize = 32;

/// What a sweep found of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Keys with its objects; each copy counts.
    pub objects: u64,
    /// Whether it has a lease: then it was left alone.
    pub is_leased: bool,
}

/// Goes through the keys of a server, or of all masters of a cluster, and removes the objects of devices without a lease;
/// with `only_look`, none. Returns what it found, by device.
///
/// # Errors
/// `Io` if one of the masters cannot be asked: then nothing is removed. `Permission` for another login.
pub async fn sweep(address: Address, login: Credentials, only_look: bool) -> Result<BTreeMap<String, Swept>> {
    let client = connect::connect(&address, &login).await?;
    let sweeper = Sweeper { address, client };
    let mut found = sweeper.look(|_, _| ()).await?;
    if only_look || found.values().all(|swept| swept.is_leased) {
        return Ok(found);
    }
    tokio::time::sleep(LOOK_AGAIN_AFTER).await;
    let again = sweeper.look(|_, _| ()).await?;
    for (device, swept) in &mut found {
        // One that came in between has a lease, or will have one.
        swept.is_leased |= again.get(device).is_none_or(|again| again.is_leased);
    }
    let mut doomed = Vec::new();
    sweeper
        .look(|device, key| {
            if found.get(device).is_some_and(|swept| !swept.is_leased) {
                doomed.push(key.to_owned());
            }
        })
        .await?;
    for keys in doomed.chunks(KEYS_AT_ONCE) {
        sweeper.remove(keys).await?;
    }
    Ok(found)
}

/// Returns the device of one of uzram's keys, and whether it is a lease.
fn parse(key: &str) -> Option<(&str, bool)> {
    let rest = key.strip_prefix("uzram:")?;
    let (device, rest) = rest.split_at_checked(DEVICE_DIGITS)?;
    let is_device = device.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let of_device = rest.strip_prefix(':').filter(|_| is_device)?;
    let parts: Vec<_> = of_device.split(':').collect();
    let is_tag = |part: &str| part.starts_with('{') && part.ends_with('}');
    let is_number = |part: &str| part.parse::<u32>().is_ok();
    match &parts[..] {
        [LEASE] => Some((device, true)),
        [tag, LEASE] if is_tag(tag) => Some((device, true)),
        [extent, generation] if is_number(extent) && is_number(generation) => Some((device, false)),
        [tag, extent, generation] if is_tag(tag) && is_number(extent) && is_number(generation) => {
            Some((device, false))
        }
        _ => None,
    }
}

struct Sweeper {
    address: Address,
    client: Client,
}

impl Sweeper {
    /// Goes through all keys once; calls `each` with the device and the key of each object.
    async fn look(&self, mut each: impl FnMut(&str, &str)) -> Result<BTreeMap<String, Swept>> {
        let mut found: BTreeMap<String, Swept> = BTreeMap::new();
        let topology = self.client.read_topology().await.map_err(|error| explain(&self.address, &error))?;
        for master in topology.masters() {
            let mut cursor = "0".to_owned();
            loop {
                let mut command = redis::cmd("SCAN");
                command.arg(&cursor).arg("MATCH").arg("uzram:*").arg("COUNT").arg(KEYS_AT_ONCE);
                let Value::Array(answer) = self.ask(&command, &master).await? else {
                    return Err(odd_answer(&self.address));
                };
                let [next, Value::Array(keys)] = &answer[..] else { return Err(odd_answer(&self.address)) };
                for key in keys.iter().map(text) {
                    let Some((device, is_lease)) = parse(&key) else { continue };
                    let swept = found.entry(device.to_owned()).or_default();
                    swept.is_leased |= is_lease;
                    if !is_lease {
                        swept.objects += 1;
                        each(device, &key);
                    }
                }
                cursor = text(next);
                match cursor.as_str() {
                    "" => return Err(odd_answer(&self.address)),
                    "0" => break,
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    async fn ask(&self, command: &Cmd, master: &Server) -> Result<Value> {
        let mut answers = self.client.send_to_each(command, std::slice::from_ref(master)).await;
        answers.pop().map_or_else(|| Err(odd_answer(&self.address)), |(_, answer)| answer)
    }

    async fn remove(&self, keys: &[String]) -> Result<()> {
        for key in keys {
            let mut command = redis::cmd("UNLINK");
            command.arg(key);
            let removed = self.client.send(&command, slot_of(key), Role::Master, Use::Writes).await;
            removed.map_err(|error| explain(&self.address, &error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_others_are_left_alone() {
        let device = "0123456789abcdef0123456789abcdef";
        for (key, expected) in [
            (format!("uzram:{device}:7:1"), Some(false)),
            (format!("uzram:{device}:{{12}}:7:1"), Some(false)),
            (format!("uzram:{device}:lease"), Some(true)),
            (format!("uzram:{device}:{{12}}:lease"), Some(true)),
            (format!("uzram:{device}:settings"), None),
            (format!("uzram:{device}:7"), None),
            (format!("uzram:{device}"), None),
            (format!("uzram:{}:7:1", &device[1..]), None),
            (format!("uzram:{}:7:1", device.to_uppercase()), None),
            (format!("other:{device}:7:1"), None),
            ("uzram:".to_owned(), None),
            ("uzram:äöü".repeat(9), None),
        ] {
            let found = parse(&key);
            assert_eq!(found.map(|(_, is_lease)| is_lease), expected, "{key}");
            assert!(found.is_none_or(|(found, _)| found == device));
        }
    }
}
