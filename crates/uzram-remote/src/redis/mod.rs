//! Redis and Valkey: a single server, or a cluster.
//!
//! - `client.rs`: sending each command to the node that has its slot
//! - `connect.rs`: connecting, and what a server must be like
//! - `direct.rs`: reads from a single server, on the thread that wants the bytes
//! - `failures.rs`: what the client's errors mean
//! - `hedge.rs`: when a read that takes long is asked for elsewhere, too
//! - `link.rs`: a connection to one node, made anew when it fails
//! - `placement.rs`: where copies are put, and which are in danger
//! - `sweep.rs`: going through the keys for a sweep
//! - `topology.rs`: which master has which slots, and the two slots of an object that has two copies
//!
//! An object is the value of a key, `uzram:DEVICE[:{TAG}]:EXTENT:GENERATION`. Any part of it can
//! be read.

mod client;
mod connect;
mod direct;
#[cfg(test)]
mod fake;
mod failures;
mod hedge;
mod link;
mod placement;
mod sweep;
mod topology;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::task::JoinSet;
use uzram::{Error, ErrorKind, Result};

use crate::address::MAX_SERVERS;
use crate::objects::{DeviceId, Key, Objects, take};
use crate::sweep::{LEASE, LEASE_S};
use crate::{Address, SETTING, Server, lock};

use client::{Client, Role, Use};
pub use connect::Credentials;
use direct::Direct;
use failures::{explain, odd_answer};
use hedge::Latencies;
use placement::Placement;
pub(crate) use sweep::sweep;
use topology::{Topology, slot_of};

/// The bytes of an extent: client and server copy an object as a whole, and other requests wait meanwhile.
const OBJECT_BYTES: usize = 256 << 10;
/// How long a read is tried again while nodes cannot be reached: a little less than its deadline, which would not tell why…
const READ_AGAIN_FOR: Duration = Duration::from_millis(2800);
/// …and how often.
const READ_EVERY: Duration = Duration::from_millis(50);

/// Objects in a Redis or Valkey server, or in a cluster.
pub struct RedisStore {
    address: Address,
    /// Where the copies are, if there are two of each object.
    placement: Option<Placement>,
    client: Arc<Client>,
    /// If it is a single server.
    direct: Option<Direct>,
    latencies: Latencies,
    /// The leases that were written, and when: with two copies, their keys depend on which masters are well.
    leases: Mutex<HashMap<String, Instant>>,
}

impl RedisStore {
    /// Connects to a server, or to the cluster that it belongs to, and checks that it keeps what it is given. Of each
    /// object there are 1 or 2 `copies`.
    ///
    /// # Errors
    /// `Io` if no server answers; `Permission` if it wants another login; `Busy` while it loads its data; `NoSpace` if it
    /// is full; `Unsupported` if it is a replica, or may evict keys, or cannot have so many copies. All within 5 s.
    pub async fn connect(address: Address, credentials: Credentials, copies: u8) -> Result<RedisStore> {
        let connecting = Self::connect_and_check(address.clone(), credentials, copies);
        tokio::time::timeout(connect::WITHIN, connecting).await.unwrap_or_else(|_| {
            let what = format!("{address} did not answer within {} s", connect::WITHIN.as_secs());
            Err(Error::new(ErrorKind::Io, what).with_setting(SETTING))
        })
    }

    /// Connects again to servers that were used before, without the checks of [`RedisStore::connect`]: some may be away.
    ///
    /// # Errors
    /// `Io` if no server answers; `Permission` if it wants another login.
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
        let client = Arc::new(client);
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

    /// Returns the address, with all nodes of the cluster, or the single server that is used, instead of those that were named:
    /// a text of it parses again.
    ///
    /// # Errors
    /// `Io` if they cannot be asked for.
    pub async fn address_of_all(&self) -> Result<Address> {
        let topology = self.client.read_topology().await.map_err(|error| explain(&self.address, &error))?;
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

    /// Returns the keys of a device's lease: with two copies, two, at different masters.
    fn lease_names(&self, device: DeviceId) -> impl Iterator<Item = String> {
        let (first, second) = names(device, self.home(0), LEASE);
        std::iter::once(first).chain(second)
    }

    /// Returns the last epoch of the process before, which it wrote to the lease; 0 if that is gone.
    ///
    /// # Errors
    /// `Io` if one of the leases cannot be read, and the other one is not there.
    async fn read_epoch(&self, device: DeviceId) -> Result<u32> {
        let (mut epoch, mut failure) = (None, None);
        for name in self.lease_names(device) {
            let mut command = redis::cmd("GET");
            command.arg(&name);
            match self.client.send(&command, slot_of(&name), Role::Master, Use::Reads).await {
                // One of them may be of a time before.
                Ok(value) => epoch = epoch.max(epoch_of_lease(&connect::text(&value))),
                Err(error) => failure = Some(error),
            }
        }
        match (epoch, failure) {
            (None, Some(error)) => Err(explain(&self.address, &error)),
            (epoch, _) => Ok(epoch.unwrap_or_default()),
        }
    }

    async fn set(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut command = Cmd::with_capacity(3, "SET".len() + name.len() + bytes.len());
        command.arg("SET").arg(name).arg(bytes);
        self.set_by(&command, name).await
    }

    async fn set_by(&self, command: &Cmd, name: &str) -> Result<()> {
        let slot = slot_of(name);
        match self.client.send(command, slot, Role::Master, Use::Writes).await {
            Ok(Value::Okay) => Ok(()),
            Ok(_) => {
                self.client.renew(slot, Use::Writes);
                Err(odd_answer(&self.address))
            }
            Err(error) => Err(explain(&self.address, &error)),
        }
    }

    /// Reads from one node.
    async fn get_range(&self, name: &str, at: usize, len_bytes: usize, from: Role) -> Result<Vec<u8>> {
        let slot = slot_of(name);
        match self.client.send(&get_range(name, at, len_bytes), slot, from, Use::Reads).await {
            // An object has bytes wherever something is read that was written.
            Ok(Value::BulkString(bytes)) if bytes.is_empty() => Err(self.lost()),
            Ok(Value::BulkString(bytes)) if bytes.len() <= len_bytes => Ok(bytes),
            Ok(_) => {
                self.client.renew(slot, Use::Reads);
                Err(odd_answer(&self.address))
            }
            Err(error) => Err(explain(&self.address, &error)),
        }
    }

    fn lost(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("{} has lost an object", self.address))
    }

    /// Has the leases that are there last longer: a server that is full does that, too.
    async fn prolong_leases(&self) {
        let names: Vec<String> = lock(&self.leases).keys().cloned().collect();
        for name in names {
            let mut command = redis::cmd("EXPIRE");
            command.arg(&name).arg(LEASE_S);
            let asking = self.client.send(&command, slot_of(&name), Role::Master, Use::Writes);
            if matches!(tokio::time::timeout(client::ANSWER_WITHIN, asking).await, Ok(Ok(Value::Int(1)))) {
                lock(&self.leases).insert(name, Instant::now());
            }
        }
    }

    /// Reads the first copy; the second, or a replica's, if that fails or takes longer than most reads.
    async fn get_either(&self, key: Key, at: usize, len_bytes: usize) -> Result<Vec<u8>> {
        let (name, second) = self.names(key);
        let started = Instant::now();
        let first = self.get_range(&name, at, len_bytes, Role::Master);
        let other = async {
            match &second {
                Some(second) => self.get_range(second, at, len_bytes, Role::Master).await,
                // Only the master knows whether it is lost.
                None => self.get_range(&name, at, len_bytes, Role::Replica).await.map_err(|_| self.lost()),
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

    /// Removes a key; returns whether it is gone.
    async fn unlink(client: &Client, name: &str) -> bool {
        let mut command = redis::cmd("UNLINK");
        command.arg(name);
        let asking = client.send(&command, slot_of(name), Role::Master, Use::Writes);
        matches!(tokio::time::timeout(client::ANSWER_WITHIN, asking).await, Ok(Ok(Value::Int(_))))
    }
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
            let [first, second] = tags.map(|tag| format!("uzram:{device}:{{{tag}}}:{what}"));
            (first, Some(second))
        }
        // The whole key decides about the slot, so that objects are spread evenly.
        None => (format!("uzram:{device}:{what}"), None),
    }
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
    let refused = connect::check_answer(&answer).err();
    assert!(refused.is_none_or(|error| !error.to_string().is_empty()));
}

impl Objects for RedisStore {
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

    /// Stores both copies, or fails.
    async fn put(&self, key: Key, bytes: &[u8]) -> Result<()> {
        if let Some(placement) = &self.placement {
            placement.check(key.filling.home)?;
        }
        let (first, second) = self.names(key);
        let Some(second) = second else { return self.set(&first, bytes).await };
        let (one, other) = tokio::join!(self.set(&first, bytes), self.set(&second, bytes));
        one.and(other)
    }

    /// Tries again, for a while, if neither copy can be reached, or a server loads its data.
    async fn get(&self, key: Key, at: usize, out: &mut [u8]) -> Result<()> {
        let started = Instant::now();
        loop {
            match self.get_either(key, at, out.len()).await {
                Err(error)
                    if matches!(error.kind(), ErrorKind::Io | ErrorKind::Busy)
                        && started.elapsed() < READ_AGAIN_FOR =>
                {
                    tokio::time::sleep(READ_EVERY).await;
                }
                read => return take(&read?, out),
            }
        }
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
            is_whole(&whole).then_some(whole).ok_or_else(|| odd_answer(&self.address))
        };
        let (one, other) = (read(&first, Role::Master), read(second, role));
        if let Ok(whole) = hedge::either(one, other, self.latencies.hedge_after()).await {
            out.copy_from_slice(&whole);
        }
    }

    /// Does not wait for masters that are known to be away.
    async fn remove(&self, keys: Vec<Key>) -> Vec<Key> {
        let mut asked = JoinSet::new();
        for key in keys {
            let (first, second) = self.names(key);
            let client = Arc::clone(&self.client);
            asked.spawn(async move {
                let unlink = async |name: Option<String>| match name {
                    Some(name) => Self::unlink(&client, &name).await,
                    None => true,
                };
                let gone = tokio::join!(unlink(Some(first)), unlink(second));
                (gone != (true, true)).then_some(key)
            });
        }
        asked.join_all().await.into_iter().flatten().collect()
    }

    async fn renew_lease(&self, device: DeviceId) -> Result<()> {
        let mut value = rustix::system::uname().nodename().to_bytes().to_vec();
        if let Some(placement) = &self.placement {
            if placement.home(0) == 0 {
                // No check has told the masters yet.
                return Ok(());
            }
            let epoch = match placement.epoch() {
                Some(epoch) => epoch,
                None => {
                    placement.continue_from(self.read_epoch(device).await?);
                    placement.epoch().unwrap_or_default()
                }
            };
            value.extend_from_slice(format!(" {epoch}").as_bytes());
        }
        // One that is not renewed any more ends by itself.
        lock(&self.leases).retain(|_, written| written.elapsed() < Duration::from_secs(LEASE_S));
        let mut renewed = Ok(());
        for name in self.lease_names(device) {
            let mut command = redis::cmd("SET");
            command.arg(&name).arg(&value).arg("EX").arg(LEASE_S);
            // Before: it may be written even if that fails.
            lock(&self.leases).insert(name.clone(), Instant::now());
            renewed = renewed.and(self.set_by(&command, &name).await);
        }
        if renewed.is_err() {
            self.prolong_leases().await;
        }
        renewed
    }

    async fn end_lease(&self, device: DeviceId) {
        let mut names: HashSet<String> = lock(&self.leases).drain().map(|(name, _)| name).collect();
        names.extend(self.lease_names(device));
        let mut asked = JoinSet::new();
        for name in names {
            let client = Arc::clone(&self.client);
            // A master may be away: none waits for another one.
            asked.spawn(async move { Self::unlink(&client, &name).await });
        }
        asked.join_all().await;
    }

    /// With two copies, some masters may be away: objects go to the others.
    async fn check(&self) -> Result<()> {
        let Some(placement) = &self.placement else {
            return connect::check(&self.client, &self.address, false).await.map(drop);
        };
        let now = connect::check(&self.client, &self.address, true).await?;
        let enough = now.check_masters();
        // Those that are full have copies, too.
        if now.masters.len() >= 2 {
            placement.note(now);
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

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
