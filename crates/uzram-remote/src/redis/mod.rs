//! Redis and Valkey: a single server, or a cluster. An object is the value of a key,
//! `uzram:DEVICE[:{TAG}]:EXTENT:GENERATION`. Any part of it can be read.

mod client;
mod connect;
mod direct;
#[cfg(test)]
mod fake;
mod hedge;
mod link;
mod placement;
mod sweep;
mod topology;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Cmd, Value};
use uzram::sync::Mutex;
use uzram::{Error, Result};

use crate::address::MAX_SERVERS;
use crate::objects::{DeviceId, Key, ObjectStore, take};
use crate::retry::opened;
use crate::sweep::{LEASE, LEASE_S};
use crate::{Address, Failure, Server};

use client::{Client, Role, Use};
use direct::Direct;
use hedge::Latencies;
pub use link::Credentials;
use placement::Placement;
pub(crate) use sweep::sweep;
use topology::{Topology, slot_of};

/// The bytes of an extent: client and server copy an object as a whole, and other requests wait meanwhile.
const OBJECT_BYTES: usize = 256 << 10;

/// Objects in a Redis or Valkey server, or in a cluster.
pub struct RedisStore {
    address: Address,
    /// Where the copies are, if there are two of each object.
    placement: Option<Placement>,
    client: Client,
    direct: Option<Direct>,
    latencies: Latencies,
    /// The keys of leases that were written: they change when slots move.
    leases: Mutex<HashSet<String>>,
}

impl RedisStore {
    /// Connects to a server, or to the cluster that it belongs to, and checks that it keeps what it is given.
    /// Of each object there are 1 or 2 `copies`. Errors: `Io` if no server answers; `Permission` if it wants
    /// another login; `Busy` while it loads its data; `NoSpace` if it is full; `Unsupported` if it is a
    /// replica, or may evict keys, or cannot have so many copies. All within 5 s.
    pub async fn connect(address: Address, credentials: Credentials, copies: u8) -> Result<RedisStore> {
        opened(&address, Self::connect_and_check(address.clone(), credentials, copies)).await
    }

    /// Connects again to servers that were used before, without the checks of [`RedisStore::connect`]: some
    /// may be away. Errors: `Io` if no server answers; `Permission` if it wants another login.
    pub async fn reconnect(address: Address, credentials: Credentials, copies: u8) -> Result<RedisStore> {
        let client = connect::connect(&address, &credentials).await?;
        let placement = match copies {
            // Until the next check, nothing is written.
            2 => Some(Placement::new(1)),
            _ => None,
        };
        let store = RedisStore::new(address, placement, client);
        // If that fails, it is tried again.
        let _ = store.check().await;
        Ok(store)
    }

    fn new(address: Address, placement: Option<Placement>, client: Client) -> RedisStore {
        let direct = client.direct();
        let (latencies, leases) = (Latencies::default(), Mutex::default());
        RedisStore { address, placement, client, direct, latencies, leases }
    }

    async fn connect_and_check(address: Address, credentials: Credentials, copies: u8) -> Result<RedisStore> {
        let refused = |what: &'static str| Err(Error::invalid(what).with_setting("backing_copies"));
        let client = connect::connect(&address, &credentials).await?;
        let placement = match copies {
            1 => None,
            2 if !client.is_cluster => return refused("two copies need a cluster; this is a single server"),
            2 => {
                connect::check_coverage(&client).await?;
                Some(Placement::new(0))
            }
            _ => return refused("an object has one copy, or two"),
        };
        let store = RedisStore::new(address, placement, client);
        store.check().await?;
        Ok(store)
    }

    /// Sets how long masters are away, or have moved slots, before copies are moved; 30 s by default.
    pub fn set_settled_after(&self, time: Duration) {
        if let Some(placement) = &self.placement {
            placement.set_settled_after(time);
        }
    }

    /// Returns the address, with all nodes of the cluster, or the single server that is used, instead of
    /// those that were named: a text of it parses again. Errors: `Io` if they cannot be asked for.
    pub async fn address_of_all(&self) -> Result<Address> {
        let topology = self.client.read_topology().await?;
        if !self.client.is_cluster {
            // The other ones that were named do not have its objects.
            return Ok(Address { servers: topology.nodes.clone(), ..self.address.clone() });
        }
        Ok(with_all(&self.address, &topology.nodes))
    }

    /// Returns the keys of an object's copies, one or two.
    fn names(&self, key: Key) -> (String, Option<String>) {
        let Key { device, extent, filling } = key;
        names(device, filling.home, &format!("{extent}:{}", filling.generation))
    }

    /// Returns the keys of a device's lease: one at each master. A sweep asks all masters, and finds one of
    /// them even if its device is cut off from the others for long. Errors: no master is known.
    fn lease_names(&self, device: DeviceId) -> Result<Vec<String>, Failure> {
        if !self.client.is_cluster {
            return Ok(vec![names(device, 0, LEASE).0]);
        }
        let topology = self.client.topology();
        let names: Vec<_> = topology.first_tags().map(|tag| tagged(device, tag, LEASE)).collect();
        if names.is_empty() { Err(self.client.no_node()) } else { Ok(names) }
    }

    async fn ask_each(
        &self,
        names: impl IntoIterator<Item = String>,
        command: impl Fn(&str) -> Cmd,
    ) -> Vec<(String, Result<Value, Failure>)> {
        let ask = async |name: String| {
            let answer = self.client.ask(&command(&name), &name).await;
            (name, answer)
        };
        join_all(names.into_iter().map(ask)).await
    }

    /// Returns the last epoch of the process before, which it wrote to the lease; 0 if that is gone. Errors:
    /// if no master is known, or one of the leases cannot be read and none of the others is there.
    async fn read_epoch(&self, device: DeviceId) -> Result<u32, Failure> {
        let get = |name: &str| std::mem::take(redis::cmd("GET").arg(name));
        let (mut epoch, mut failure) = (None, None);
        for (_, answer) in self.ask_each(self.lease_names(device)?, get).await {
            match answer {
                // One of them may be of a time before.
                Ok(value) => epoch = epoch.max(epoch_of_lease(&topology::text(&value))),
                Err(of_lease) => failure = Some(of_lease),
            }
        }
        match (epoch, failure) {
            (None, Some(failure)) => Err(failure),
            (epoch, _) => Ok(epoch.unwrap_or_default()),
        }
    }

    async fn set(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        let mut command = Cmd::with_capacity(3, "SET".len() + name.len() + bytes.len());
        command.arg("SET").arg(name).arg(bytes);
        let slot = slot_of(name);
        match self.client.send(&command, slot, Role::Master, Use::Writes).await? {
            Value::Okay => Ok(()),
            _ => {
                self.client.renew(slot, Use::Writes);
                Err(Failure::odd_answer(&self.address))
            }
        }
    }

    async fn get_range(
        &self,
        name: &str,
        at: usize,
        len_bytes: usize,
        from: Role,
    ) -> Result<Vec<u8>, Failure> {
        let slot = slot_of(name);
        match self.client.send(&get_range(name, at, len_bytes), slot, from, Use::Reads).await? {
            // An object has bytes wherever something is read that was written.
            Value::BulkString(bytes) if bytes.is_empty() => Err(Failure::lost(&self.address)),
            Value::BulkString(bytes) if bytes.len() <= len_bytes => Ok(bytes),
            _ => {
                self.client.renew(slot, Use::Reads);
                Err(Failure::odd_answer(&self.address))
            }
        }
    }
}

fn unlink(name: &str) -> Cmd {
    std::mem::take(redis::cmd("UNLINK").arg(name))
}

fn get_range(name: &str, at: usize, len_bytes: usize) -> Cmd {
    let mut command = redis::cmd("GETRANGE");
    command.arg(name).arg(at).arg(at + len_bytes.max(1) - 1);
    command
}

/// Returns the epoch in a lease's value, which is behind the host's name.
fn epoch_of_lease(value: &str) -> Option<u32> {
    value.rsplit_once(' ')?.1.parse().ok()
}

/// Returns an address with those nodes, too, if its text parses again; otherwise the address.
fn with_all(address: &Address, nodes: &[Server]) -> Address {
    let parses = |server: &&Server| Server::parse(&server.to_string()).as_ref() == Some(server);
    let named = address.servers.iter().filter(|server| !nodes.contains(server));
    let servers = nodes.iter().filter(parses).chain(named).take(MAX_SERVERS).cloned().collect();
    let all = Address { servers, ..address.clone() };
    let parsed = Address::parse(&all.to_string());
    if parsed.is_ok_and(|parsed| parsed.servers == all.servers) { all } else { address.clone() }
}

/// Returns the keys of something of a device: one, or with a home two, in its slots.
fn names(device: DeviceId, home: u32, what: &str) -> (String, Option<String>) {
    match topology::tags(home) {
        Some(tags) => {
            let [first, second] = tags.map(|tag| tagged(device, tag, what));
            (first, Some(second))
        }
        // The whole key decides about the slot, so that objects are spread evenly.
        None => (format!("uzram:{device}:{what}"), None),
    }
}

/// Returns the key of something of a device, in the slot of a tag.
fn tagged(device: DeviceId, tag: u32, what: &str) -> String {
    format!("uzram:{device}:{{{tag}}}:{what}")
}

/// For the fuzzers: reads bytes as a server's answer to each question that is asked at the start.
///
/// # Panics
/// A promise is broken.
#[doc(hidden)]
pub fn read_answer(bytes: &[u8]) {
    let Ok(answer) = redis::parse_redis_value(bytes) else { return };
    let topology = Topology::parse(&answer);
    for extent in (0..64).chain([u32::MAX]) {
        let home = topology.home(extent);
        assert_eq!(home != 0, topology.check(home).is_ok(), "extent {extent}");
        assert_eq!(home != 0, topology::tags(home).is_some());
    }
    assert!(topology.first_tags().count() <= topology.masters.len());
    let refused = connect::check_answer(&answer).err();
    assert!(refused.is_none_or(|error| !error.to_string().is_empty()));
}

impl ObjectStore for RedisStore {
    const OBJECT_BYTES: usize = OBJECT_BYTES;

    fn home(&self, extent: u32) -> u32 {
        self.placement.as_ref().map_or(0, |placement| placement.home(extent))
    }

    fn placement_generation(&self) -> u64 {
        self.placement.as_ref().map_or(0, Placement::generation)
    }

    fn is_at_risk(&self, home: u32) -> bool {
        self.placement.as_ref().is_some_and(|placement| placement.is_at_risk(home))
    }

    async fn put(&self, key: Key, bytes: &[u8]) -> Result<(), Failure> {
        if let Some(placement) = &self.placement {
            placement.check(key.filling.home)?;
        }
        let (first, second) = self.names(key);
        let Some(second) = second else { return self.set(&first, bytes).await };
        let (one, other) = tokio::join!(self.set(&first, bytes), self.set(&second, bytes));
        one.and(other)
    }

    /// Reads the first copy; the second, or a replica's, if that fails or takes longer than most reads.
    async fn get(&self, key: Key, at: usize, len_bytes: usize) -> Result<Vec<u8>, Failure> {
        let (name, second) = self.names(key);
        let started = Instant::now();
        let first = self.get_range(&name, at, len_bytes, Role::Master);
        let other = async {
            match &second {
                Some(second) => self.get_range(second, at, len_bytes, Role::Master).await,
                // Only the master knows whether it is lost.
                None => {
                    let read = self.get_range(&name, at, len_bytes, Role::Replica).await;
                    read.map_err(|_| Failure::lost(&self.address))
                }
            }
        };
        let read = match self.client.is_cluster {
            true => hedge::either(first, other, self.latencies.hedge_after()).await,
            false => first.await,
        };
        // What fails at once says nothing about how long reads take.
        if read.is_ok() {
            self.latencies.note(started.elapsed());
        }
        read
    }

    fn get_here(&self, key: Key, at: usize, out: &mut [u8], is_whole: &dyn Fn(&[u8]) -> bool) -> bool {
        let Some(direct) = &self.direct else { return false };
        let command = get_range(&self.names(key).0, at, out.len());
        direct.ask(&command, out.len(), |read| take(read, out).is_ok() && is_whole(out))
    }

    async fn get_whole(
        &self,
        key: Key,
        at: usize,
        out: &mut [u8],
        is_whole: &(dyn Fn(&[u8]) -> bool + Sync),
    ) {
        let (first, second) = self.names(key);
        let (second, role) = match &second {
            Some(second) => (second, Role::Master),
            None => (&first, Role::Replica),
        };
        // Other answers may be damaged, or belong to other requests.
        [&first, second].iter().for_each(|name| self.client.renew(slot_of(name), Use::Reads));
        let len_bytes = out.len();
        let read = async |name: &str, role| {
            let (read, mut whole) = (self.get_range(name, at, len_bytes, role).await?, vec![0; len_bytes]);
            take(&read, &mut whole)?;
            is_whole(&whole).then_some(whole).ok_or_else(|| Failure::odd_answer(&self.address))
        };
        let (one, other) = (read(&first, Role::Master), read(second, role));
        if let Ok(whole) = hedge::either(one, other, self.latencies.hedge_after()).await {
            out.copy_from_slice(&whole);
        }
    }

    /// Does not wait for masters that are known to be away.
    async fn remove(&self, keys: Vec<Key>) -> Vec<Key> {
        let named = |key| {
            let (first, second) = self.names(key);
            std::iter::once(first).chain(second).map(move |name| (name, key))
        };
        let named: HashMap<String, Key> = keys.into_iter().flat_map(named).collect();
        let asked = self.ask_each(named.keys().cloned(), unlink).await;
        let left = asked.into_iter().filter(|(_, answer)| !matches!(answer, Ok(Value::Int(_))));
        let left: HashSet<Key> = left.map(|(name, _)| named[&name]).collect();
        left.into_iter().collect()
    }

    /// A server that is full has the lease that is there last longer.
    async fn renew_lease(&self, device: DeviceId) -> Result<(), Failure> {
        let mut value = rustix::system::uname().nodename().to_bytes().to_vec();
        if let Some(placement) = &self.placement {
            let epoch = match placement.epoch() {
                Some(epoch) => epoch,
                None => placement.continue_from(self.read_epoch(device).await?),
            };
            value.extend_from_slice(format!(" {epoch}").as_bytes());
        }
        let names = self.lease_names(device)?;
        // Before: one may be written even if that fails.
        self.leases.lock().extend(names.iter().cloned());
        let set = |name: &str| std::mem::take(redis::cmd("SET").arg(name).arg(&value).arg("EX").arg(LEASE_S));
        let expire = |name: &str| std::mem::take(redis::cmd("EXPIRE").arg(name).arg(LEASE_S));
        let (mut is_renewed, mut full, mut failure) = (false, Vec::new(), None);
        for (name, answer) in self.ask_each(names, set).await {
            match answer {
                Ok(Value::Okay) => is_renewed = true,
                Ok(_) => failure = Some(Failure::odd_answer(&self.address)),
                Err(of_master) => {
                    full.extend(of_master.is_full().then_some(name));
                    failure = Some(of_master);
                }
            }
        }
        let prolonged = self.ask_each(full, expire).await;
        is_renewed |= prolonged.iter().any(|(_, answer)| matches!(answer, Ok(Value::Int(1))));
        // One is enough.
        match failure {
            Some(failure) if !is_renewed => Err(failure),
            _ => Ok(()),
        }
    }

    async fn end_lease(&self, device: DeviceId) {
        let mut names: HashSet<String> = std::mem::take(&mut self.leases.lock());
        names.extend(self.lease_names(device).into_iter().flatten());
        self.ask_each(names, unlink).await;
    }

    /// With two copies, some masters may be away: objects go to the others.
    async fn check(&self) -> Result<Option<String>, Failure> {
        let (now, degraded) = connect::check(&self.client, &self.address, self.placement.is_some()).await?;
        if let Some(placement) = &self.placement {
            let enough = now.check_masters();
            // Those that are full have copies, too.
            if now.masters.len() >= 2 {
                placement.note(now);
            }
            enough?;
        }
        Ok(degraded.map(|failure| failure.to_string()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::redis::fake::{Fake, address_of};

    /// The nodes that were named when it was opened, without any slots.
    #[tokio::test]
    async fn a_cluster_without_masters_renews_no_lease_and_has_no_epoch() {
        let fake = Fake::start("*0\r\n").await;
        let address = address_of([&fake]);
        let client = Client::of_cluster(&address, &Credentials::default()).await.unwrap();
        let store = RedisStore::new(address, Some(Placement::new(1)), client);
        let device = DeviceId::new().unwrap();
        assert!(store.read_epoch(device).await.is_err());
        assert!(store.renew_lease(device).await.is_err());
        assert_eq!(store.placement.unwrap().epoch(), None, "it is still to be read");
    }

    #[test]
    fn a_lease_has_an_epoch_behind_the_host() {
        for (value, epoch) in [
            ("host 7", Some(7)),
            ("a b 4294967295", Some(u32::MAX)),
            ("host", None),
            ("", None),
            ("host -1", None),
        ] {
            assert_eq!(epoch_of_lease(value), epoch, "{value}");
        }
    }

    #[test]
    fn the_address_with_all_nodes_parses_again() {
        let server = |host: &str, port| Server { host: host.to_owned(), port };
        let address = Address::parse("rediss://a:1,b:2/0").unwrap();
        let nodes = [
            server("10.0.0.1", 7001),
            server("?", 7002),
            server("a@b", 7003),
            server("fe80::1%eth0", 7004),
            server("c", 0),
            server("::1", 7005),
            server("b", 2),
            server("x,y", 7006),
        ];
        let all = with_all(&address, &nodes);
        assert_eq!(all.to_string(), "rediss://10.0.0.1:7001,[::1]:7005,b:2,a:1");
        assert_eq!(Address::parse(&all.to_string()).unwrap(), all);
        // More than a text can have.
        let long: Vec<_> = (0..64).map(|number| server(&"n".repeat(200), 1 + number)).collect();
        assert_eq!(with_all(&address, &long), address);
    }
}
