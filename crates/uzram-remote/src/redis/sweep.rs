//! Going through the keys of a server, or of all masters of a cluster, for a sweep.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;
use uzram::{ErrorKind, Result};

use super::client::Client;
use super::connect;
use super::link::Credentials;
use super::topology::text;
use super::unlink;
use crate::retry::tried;
use crate::sweep::{self, LEASE, Seen, Sweepable, Swept, split_device};
use crate::{Address, Failure, Server, error};

/// Keys that a server is asked to go through at a time.
const KEYS_AT_ONCE: usize = 1000;
/// How long a request is tried again.
const TRIED_FOR: Duration = Duration::from_secs(1);

/// Goes through the keys of a server, or of all masters of a cluster, and removes the objects of devices
/// without a lease; with `only_look`, none. Returns what it found, by device. Errors: `Io` if one of the
/// masters cannot be asked: then nothing is removed. `Permission` for another login.
pub(crate) async fn sweep(
    address: Address,
    login: Credentials,
    only_look: bool,
) -> Result<BTreeMap<String, Swept>> {
    let client = connect::connect(&address, &login).await?;
    sweep::sweep(&Sweeper { address, client }, only_look).await
}

/// Returns the device of one of uzram's keys, and whether it is a lease.
fn parse(key: &str) -> Option<(&str, bool)> {
    let (device, rest) = split_device(key.strip_prefix("uzram:")?)?;
    let parts: Vec<_> = rest.strip_prefix(':')?.split(':').collect();
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

impl Sweepable for Sweeper {
    async fn look(&self, each: &mut dyn FnMut(Seen<'_>)) -> Result<()> {
        let topology = self.client.read_topology().await?;
        if self.client.is_cluster && !topology.has_all_slots() {
            // Where leases may be.
            let what = format!("{}: not all slots have a master that can be asked", self.address);
            return Err(error(ErrorKind::Io, what));
        }
        for master in topology.masters() {
            let mut cursor = "0".to_owned();
            loop {
                let mut command = redis::cmd("SCAN");
                command.arg(&cursor).arg("MATCH").arg("uzram:*").arg("COUNT").arg(KEYS_AT_ONCE);
                let odd_answer = || Failure::odd_answer(self.client.name_of(&master));
                let Value::Array(answer) = self.ask(&command, &master).await? else {
                    return Err(odd_answer().into());
                };
                let [next, Value::Array(keys)] = &answer[..] else { return Err(odd_answer().into()) };
                for key in keys.iter().map(text) {
                    let Some((device, is_lease)) = parse(&key) else { continue };
                    each(Seen { device, name: &key, is_lease });
                }
                cursor = text(next);
                match cursor.as_str() {
                    "" => return Err(odd_answer().into()),
                    "0" => break,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    async fn remove(&self, names: &[String]) -> Result<()> {
        for key in names {
            let (until, command) = (Instant::now() + TRIED_FOR, unlink(key));
            tried(until, || self.client.ask(&command, key)).await?;
        }
        Ok(())
    }
}

impl Sweeper {
    async fn ask(&self, command: &Cmd, master: &Server) -> Result<Value, Failure> {
        let mut answers = self.client.send_to_each(command, std::slice::from_ref(master)).await;
        answers.pop().map_or_else(|| Err(Failure::odd_answer(&self.address)), |(_, answer)| answer)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::redis) async fn look_at(address: Address, client: Client) -> Result<()> {
        Sweeper { address, client }.look(&mut |_| {}).await
    }

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
