//! [`Client`]: sends each command to the node that has its slot, over connections of its own to each node.
//!
//! A node that is away fails its own requests, and no others. Reads and writes have different connections, so
//! that a small read does not wait behind large writes. A single server is a master that has all slots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, ErrorKind as Kind, RedisError, RedisResult, ServerErrorKind, Value};
use uzram::sync::Mutex;

use super::direct::Direct;
use super::link::{Credentials, Link, connection_info};
use super::topology::{Topology, slot_of};
use crate::{Address, Failure, Server};

/// How long an answer that is not about objects may take.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How often a request is sent, within the caller's deadline.
const TRIES: u32 = 8;
/// The slots of a cluster are not asked for more often.
const REFRESH_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
pub(super) enum Use {
    Reads,
    Writes,
}

struct Node {
    server: Server,
    /// Its connections, by [`Use`].
    links: [Option<Arc<Link>>; 2],
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Role {
    Master,
    Replica,
}

pub(super) struct Client {
    address: Address,
    credentials: Credentials,
    pub(super) is_cluster: bool,
    topology: Mutex<Arc<Topology>>,
    refreshed: tokio::sync::Mutex<Option<Instant>>,
    nodes: Mutex<Vec<Node>>,
}

impl Client {
    /// Uses a single server; connects to it with the first request.
    pub(super) fn of_server(address: &Address, credentials: &Credentials, server: Server) -> Client {
        Client::new(address, credentials, Topology::of_server(server), false)
    }

    /// Uses a cluster, by the servers that the address names. Errors: none of them says which nodes it has.
    pub(super) async fn of_cluster(address: &Address, credentials: &Credentials) -> Result<Client, Failure> {
        let named = Topology { nodes: address.servers.clone(), ..Topology::default() };
        let client = Client::new(address, credentials, named, true);
        client.read_topology().await?;
        Ok(client)
    }

    fn new(address: &Address, credentials: &Credentials, topology: Topology, is_cluster: bool) -> Client {
        Client {
            address: address.clone(),
            credentials: credentials.clone(),
            is_cluster,
            topology: Mutex::unordered(Arc::new(topology)),
            refreshed: tokio::sync::Mutex::default(),
            nodes: Mutex::default(),
        }
    }

    /// Returns other connections to a single server without TLS; `None` for any other.
    pub(super) fn direct(&self) -> Option<Direct> {
        let is_direct = !self.is_cluster && !self.address.tls;
        let server = self.topology().nodes.first().filter(|_| is_direct).cloned()?;
        Some(Direct::new(&self.address, server, self.credentials.clone()))
    }

    /// Returns which node had which slots, when they were asked for last.
    pub(super) fn topology(&self) -> Arc<Topology> {
        Arc::clone(&self.topology.lock())
    }

    pub(super) fn name_of(&self, node: &Server) -> String {
        if self.is_cluster { format!("{node} of {}", self.address) } else { self.address.to_string() }
    }

    fn failed(&self, node: &Server, error: &RedisError) -> Failure {
        Failure::of_redis(&self.name_of(node), error)
    }

    pub(super) fn no_node(&self) -> Failure {
        Failure::of_redis(&self.address.to_string(), &no_node())
    }

    /// Sends a command that is not about objects to the master of a key, and waits for the answer not as long
    /// as for objects.
    pub(super) async fn ask(&self, command: &Cmd, key: &str) -> Result<Value, Failure> {
        let slot = slot_of(key);
        let asking = self.send(command, slot, Role::Master, Use::Writes);
        let answer = tokio::time::timeout(ANSWER_WITHIN, asking).await;
        answer.unwrap_or_else(|_| {
            let node = self.node_of(slot, Role::Master).map_err(|_| self.no_node())?;
            Err(Failure::silent(self.name_of(&node)))
        })
    }

    /// Sends a command that concerns a key of that slot to the node that has it: again where another node has
    /// it now, or the connection was closed. What a node answers is the caller's to try again.
    pub(super) async fn send(&self, command: &Cmd, slot: u16, role: Role, by: Use) -> Result<Value, Failure> {
        let mut node = self.node_of(slot, role).map_err(|_| self.no_node())?;
        let sent = self.send_from(&mut node, command, slot, role, by).await;
        sent.map_err(|error| self.failed(&node, &error))
    }

    /// The same, with `node` first; then that is the one that was asked last.
    async fn send_from(
        &self,
        node: &mut Server,
        command: &Cmd,
        slot: u16,
        role: Role,
        by: Use,
    ) -> RedisResult<Value> {
        let mut is_asking = false;
        for attempt in 1.. {
            let error = match self.link(node, by)?.send(command, is_asking).await {
                Ok(answer) => return Ok(answer),
                Err(error) if attempt == TRIES => return Err(error),
                Err(error) => error,
            };
            let redirected = redirected(&error, node).filter(|_| self.is_cluster);
            is_asking = redirected.is_some() && error.kind() == Kind::Server(ServerErrorKind::Ask);
            if !is_asking {
                self.refresh().await;
            }
            *node = match redirected {
                Some(node) => node,
                // It has answered with that error.
                None if error.code().is_some() => return Err(error),
                // The node may have closed the connection long ago; or the slot may have another one.
                None => match self.node_of(slot, role)? {
                    next if next != *node || attempt == 1 && self.is_back(&error, node, by) => next,
                    _ => return Err(error),
                },
            };
        }
        Err(no_node())
    }

    /// Sends a command to each of some nodes, all at a time, and returns each one's answer.
    pub(super) async fn send_to_each(
        &self,
        command: &Cmd,
        nodes: &[Server],
    ) -> Vec<(Server, Result<Value, Failure>)> {
        let ask = async |node: &Server| {
            let asking = async { self.link(node, Use::Reads)?.send(command, false).await };
            let answer = match tokio::time::timeout(ANSWER_WITHIN, asking).await {
                Ok(answer) => answer.map_err(|error| self.failed(node, &error)),
                Err(_) => Err(Failure::silent(self.name_of(node))),
            };
            (node.clone(), answer)
        };
        join_all(nodes.iter().map(ask)).await
    }

    /// Asks all nodes which of them have which slots; the first answer counts.
    pub(super) async fn read_topology(&self) -> Result<Arc<Topology>, Failure> {
        let known = self.topology();
        if !self.is_cluster {
            return Ok(known);
        }
        let command = std::mem::take(redis::cmd("CLUSTER").arg("SLOTS"));
        let ask = async |node| {
            let answer = async { self.link(node, Use::Reads)?.send(&command, false).await }.await;
            answer.map_err(|error| self.failed(node, &error))
        };
        let named = self.address.servers.iter().filter(|server| !known.nodes.contains(server));
        let mut asked: FuturesUnordered<_> = known.nodes.iter().chain(named).map(ask).collect();
        let mut failure = self.no_node();
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(answer) => {
                    let topology = Arc::new(Topology::parse(&answer));
                    self.keep(&topology);
                    return Ok(topology);
                }
                Err(of_node) => failure = of_node,
            }
        }
        Err(failure)
    }

    /// Gives up the connection for reads to the master of a slot: what it answered was damaged.
    pub(super) fn renew(&self, slot: u16, by: Use) {
        let link = self.node_of(slot, Role::Master).and_then(|node| self.link(&node, by));
        link.iter().for_each(|link| link.renew());
    }

    /// Routes by a topology from now on, and closes the connections to nodes that are gone.
    fn keep(&self, topology: &Arc<Topology>) {
        if topology.masters.is_empty() {
            return;
        }
        *self.topology.lock() = Arc::clone(topology);
        let is_used = |node: &Node| {
            topology.nodes.contains(&node.server) || self.address.servers.contains(&node.server)
        };
        self.nodes.lock().retain(is_used);
    }

    /// Asks for the slots again, unless somebody does so or has just done it.
    async fn refresh(&self) {
        let Ok(mut refreshed) = self.refreshed.try_lock() else { return };
        if refreshed.is_none_or(|at| at.elapsed() >= REFRESH_EVERY) {
            let _ = tokio::time::timeout(ANSWER_WITHIN, self.read_topology()).await;
            *refreshed = Some(Instant::now());
        }
    }

    /// Returns whether a connection that failed can be made anew soon.
    fn is_back(&self, error: &RedisError, node: &Server, by: Use) -> bool {
        let is_known_away = || self.link(node, by).is_ok_and(|link| link.is_down());
        !error.is_timeout() && !is_known_away()
    }

    fn node_of(&self, slot: u16, role: Role) -> RedisResult<Server> {
        let topology = self.topology();
        let master = topology.master_of(slot).ok_or_else(no_node)?;
        if role == Role::Master {
            return Ok(master.server.clone());
        }
        let is_well = |node: &&Server| self.link(node, Use::Reads).is_ok_and(|link| !link.is_down());
        let replicas = &master.replicas;
        replicas.iter().find(is_well).or(replicas.first()).cloned().ok_or_else(no_node)
    }

    fn link(&self, server: &Server, by: Use) -> RedisResult<Arc<Link>> {
        let mut nodes = self.nodes.lock();
        let at = nodes.iter().position(|node| node.server == *server).unwrap_or_else(|| {
            nodes.push(Node { server: server.clone(), links: [None, None] });
            nodes.len() - 1
        });
        let place = &mut nodes[at].links[by as usize];
        if let Some(link) = place {
            return Ok(Arc::clone(link));
        }
        let is_readonly = self.is_cluster && matches!(by, Use::Reads);
        let info = connection_info(&self.address, server, &self.credentials)?;
        Ok(Arc::clone(place.insert(Arc::new(Link::new(redis::Client::open(info)?, is_readonly)))))
    }
}

/// Returns the node that has a slot, or is being given it, if `node` said so.
fn redirected(error: &RedisError, node: &Server) -> Option<Server> {
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    let host = if host.is_empty() { &node.host } else { host };
    Some(Server { host: host.to_owned(), port: port.parse().ok()? })
}

fn no_node() -> RedisError {
    RedisError::from((Kind::Io, "no node of the cluster is known to have it"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::{Error, ErrorKind};

    use super::*;
    use crate::redis::fake::{Fake, address_of};
    use crate::redis::{connect, sweep};

    #[tokio::test]
    async fn a_single_server_sends_nobody_elsewhere() {
        let other = Fake::start("+OK\r\n").await;
        for kind in ["MOVED", "ASK"] {
            let fake = Fake::start(&format!("-{kind} 7 {}\r\n", other.server)).await;
            let client =
                Client::of_server(&address_of([&fake]), &Credentials::default(), fake.server.clone());
            let answer = client.send(&redis::cmd("GET"), 7, Role::Master, Use::Reads).await;
            let failure = answer.unwrap_err().to_string();
            assert!(failure.contains("sends requests elsewhere"), "{kind}: {failure}");
        }
        assert_eq!(other.connections(), 0);
    }

    #[tokio::test]
    async fn a_cluster_without_masters_is_refused() {
        let fake = Fake::start("*0\r\n").await;
        let address = address_of([&fake]);
        let client = Client::of_cluster(&address, &Credentials::default()).await.unwrap();
        let checked = connect::check(&client, &address, false).await;
        assert_eq!(Error::from(checked.unwrap_err()).kind(), ErrorKind::Io);
        let looked = sweep::tests::look_at(address, client).await;
        assert_eq!(looked.unwrap_err().kind(), ErrorKind::Io);
    }
}
