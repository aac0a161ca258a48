//! Connecting to servers, and what a server must be like: reachable, a master, not full, and one that evicts nothing.

use std::time::Duration;

use redis::aio::{ConnectionLike, ConnectionManager, ConnectionManagerConfig, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_read_routing::RandomReplicaStrategy;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, Slot, SlotAddr};
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, RedisResult, Value,
};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use uzram::{Error, ErrorKind, Result};

use super::failures::explain;
use super::topology::Topology;
use crate::{Address, SETTING, Server};

/// How long connecting may take, with all checks.
pub(super) const WITHIN: Duration = Duration::from_secs(5);
/// How long the connection to one server may take.
const SERVER_WITHIN: Duration = Duration::from_secs(1);
/// How long an answer of one server may take, before the client may try again.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How often the client tries again, within the deadline of a request.
const TRIES: u32 = 8;
/// Milliseconds between tries, at first and at most.
const TRY_AFTER_MS: (u64, u64) = (20, 200);

/// A login. Not shown by `Debug`.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Credentials {
    /// The user; the server's default user without one.
    pub user: Option<String>,
    /// The password, if the server wants one.
    pub password: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

/// A connection to a server, or connections to all nodes of a cluster. A clone is a handle to the same ones.
#[derive(Clone)]
pub(super) enum Client {
    Single(ConnectionManager),
    Cluster(ClusterConnection),
}

/// What a server says about itself: the answer to `INFO`.
struct Info(String);

impl Info {
    fn parse(answer: &Value) -> Info {
        match answer {
            Value::BulkString(text) => Info(String::from_utf8_lossy(text).into_owned()),
            Value::VerbatimString { text, .. } => Info(text.clone()),
            _ => Info(String::new()),
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    }

    fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// Returns connections for reads, and others for writes.
pub(super) async fn connect(address: &Address, credentials: &Credentials) -> Result<(Client, Client)> {
    if address.tls {
        // Another library of the program may have chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let (first, info) = first_that_answers(address, credentials).await?;
    let is_cluster = info.get("cluster_enabled") == Some("1") || info.get("redis_mode") == Some("cluster");
    let failed = |error: RedisError| explain(address, &error);
    if !is_cluster {
        let of_server = |server| connection_info(address, server, credentials).map_err(failed);
        let (reads, writes) = (of_server(&first)?, of_server(&first)?);
        return Ok((single(reads).await.map_err(failed)?, single(writes).await.map_err(failed)?));
    }
    if address.database > 0 {
        let what = format!("{address} is a cluster, which has no database but 0");
        return Err(Error::new(ErrorKind::Unsupported, what).with_setting(SETTING));
    }
    let servers = || address.servers.iter().map(|server| connection_info(address, server, credentials));
    let mut clients = Vec::new();
    for _ in 0..2 {
        let servers = servers().collect::<RedisResult<Vec<_>>>().map_err(failed)?;
        clients.push(cluster(servers).await.map_err(failed)?);
    }
    match <[Client; 2]>::try_from(clients) {
        Ok([reads, writes]) => Ok((reads, writes)),
        Err(_) => Err(Error::new(ErrorKind::Io, "no connections")),
    }
}

fn connection_info(
    address: &Address,
    server: &Server,
    credentials: &Credentials,
) -> RedisResult<ConnectionInfo> {
    let (host, port) = (server.host.clone(), server.port);
    let at = match address.tls {
        true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
        false => ConnectionAddr::Tcp(host, port),
    };
    let mut login =
        RedisConnectionInfo::default().set_db(i64::from(address.database)).set_lib_name("uzram", "");
    if let Some(user) = &credentials.user {
        login = login.set_username(user);
    }
    if let Some(password) = &credentials.password {
        login = login.set_password(password);
    }
    let tcp = TcpSettings::default().set_nodelay(true);
    Ok(at.into_connection_info()?.set_tcp_settings(tcp).set_redis_settings(login))
}

/// Returns the first server that answers, and what it says about itself.
async fn first_that_answers(address: &Address, credentials: &Credentials) -> Result<(Server, Info)> {
    let mut failure = None;
    for server in &address.servers {
        match ask(address, server, credentials).await {
            Ok(info) => return Ok((server.clone(), info)),
            Err(error) => failure = Some(error),
        }
    }
    let none = || Error::invalid("no server is named").with_setting(SETTING);
    Err(failure.map_or_else(none, |error| explain(address, &error)))
}

async fn ask(address: &Address, server: &Server, credentials: &Credentials) -> RedisResult<Info> {
    // A cluster refuses to select another database.
    let address = Address { database: 0, ..address.clone() };
    let client = redis::Client::open(connection_info(&address, server, credentials)?)?;
    let limits = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(SERVER_WITHIN))
        .set_response_timeout(Some(ANSWER_WITHIN));
    let mut connection: MultiplexedConnection =
        client.get_multiplexed_async_connection_with_config(&limits).await?;
    Ok(Info::parse(&connection.req_packed_command(&redis::cmd("INFO")).await?.extract_error()?))
}

async fn single(info: ConnectionInfo) -> RedisResult<Client> {
    let config = ConnectionManagerConfig::new()
        .set_connection_timeout(Some(SERVER_WITHIN))
        .set_response_timeout(Some(ANSWER_WITHIN))
        .set_min_delay(Duration::from_millis(TRY_AFTER_MS.0))
        .set_max_delay(Duration::from_millis(TRY_AFTER_MS.1))
        .set_number_of_retries(TRIES as usize);
    Ok(Client::Single(ConnectionManager::new_with_config(redis::Client::open(info)?, config).await?))
}

async fn cluster(servers: Vec<ConnectionInfo>) -> RedisResult<Client> {
    let client = ClusterClient::builder(servers)
        .connection_timeout(SERVER_WITHIN)
        .response_timeout(ANSWER_WITHIN)
        // The caller has a deadline.
        .overall_response_timeout(None)
        .retries(TRIES)
        .min_retry_wait(TRY_AFTER_MS.0)
        .max_retry_wait(TRY_AFTER_MS.1)
        .tcp_settings(TcpSettings::default().set_nodelay(true))
        // Connections to replicas, too; each request says where it goes.
        .read_routing_strategy(RandomReplicaStrategy)
        .build()?;
    Ok(Client::Cluster(client.get_async_connection().await?))
}

impl Client {
    /// Sends a command that concerns one key, to the node that has its slot.
    pub(super) async fn send(&self, command: Cmd, key: &str, to: SlotAddr) -> RedisResult<Value> {
        match self {
            Client::Single(connection) => {
                connection.clone().req_packed_command(&command).await?.extract_error()
            }
            Client::Cluster(connection) => {
                let route = Route::with_slot(Slot::for_key(key), to);
                let routing = RoutingInfo::SingleNode(SingleNodeRoutingInfo::SpecificNode(route));
                connection.clone().route_command(command, routing).await?.extract_error()
            }
        }
    }

    /// Sends a command to any node.
    pub(super) async fn send_to_any(&self, command: Cmd) -> RedisResult<Value> {
        match self {
            Client::Single(connection) => {
                connection.clone().req_packed_command(&command).await?.extract_error()
            }
            Client::Cluster(connection) => {
                let routing = RoutingInfo::SingleNode(SingleNodeRoutingInfo::RandomPrimary);
                connection.clone().route_command(command, routing).await?.extract_error()
            }
        }
    }

    /// Sends a command to each of some nodes of a cluster, all at a time, and returns each one's answer.
    pub(super) async fn send_to_each(
        &self,
        address: &Address,
        command: &Cmd,
        nodes: Vec<Server>,
    ) -> Vec<(Server, Result<Value>)> {
        let Client::Cluster(connection) = self else { return Vec::new() };
        let mut asked = JoinSet::new();
        for node in nodes {
            let (mut connection, command, address) = (connection.clone(), command.clone(), address.clone());
            asked.spawn(async move {
                let (host, port) = (node.host.clone(), node.port);
                let routing = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress { host, port });
                let asking = connection.route_command(command, routing);
                let answer = match tokio::time::timeout(ANSWER_WITHIN, asking).await {
                    Ok(answer) => {
                        answer.and_then(Value::extract_error).map_err(|error| explain(&address, &error))
                    }
                    Err(_) => {
                        let what = format!("{node} of {address} does not answer");
                        Err(Error::new(ErrorKind::Io, what).with_setting(SETTING))
                    }
                };
                (node, answer)
            });
        }
        asked.join_all().await
    }

    /// Checks that a server, or the nodes of a cluster, keep what they are given. Returns the masters that are well, in a
    /// cluster; its replicas may be away.
    ///
    /// # Errors
    /// `Unsupported` if one of them may evict keys; if not all masters are well, or with `two` copies fewer than two, what is
    /// wrong with one.
    pub(super) async fn check(&self, address: &Address, two: bool) -> Result<Topology> {
        let command = redis::cmd("INFO");
        if let Client::Single(connection) = self {
            let answer = connection.clone().req_packed_command(&command).await.and_then(Value::extract_error);
            let answer = answer.map_err(|error| explain(address, &error))?;
            check_server(&address.to_string(), &Info::parse(&answer), false)?;
            return Ok(Topology::default());
        }
        let topology = Topology::read(self).await.map_err(|error| explain(address, &error))?;
        let (mut well, mut failure) = (Vec::new(), None);
        for (node, answer) in self.send_to_each(address, &command, topology.nodes.clone()).await {
            let of_node = format!("{node} of {address}");
            match answer.and_then(|answer| check_server(&of_node, &Info::parse(&answer), true)) {
                Ok(()) => well.push(node),
                Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
                Err(error) if topology.masters.iter().any(|master| master.server == node) => {
                    failure = Some(error)
                }
                Err(_) => {}
            }
        }
        let (masters, away): (Vec<_>, Vec<_>) =
            topology.masters.into_iter().partition(|master| well.contains(&master.server));
        let enough = if two { masters.len() >= 2 } else { away.is_empty() };
        match failure {
            Some(failure) if !enough => Err(failure),
            _ => Ok(Topology { masters, nodes: topology.nodes }),
        }
    }

    /// Checks that keys can be read and written while a master without replicas is down: each master's
    /// `cluster-require-full-coverage` is `no`.
    pub(super) async fn check_coverage(&self, address: &Address) -> Result<()> {
        const NAME: &str = "cluster-require-full-coverage";
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg(NAME);
        let topology = Topology::read(self).await.map_err(|error| explain(address, &error))?;
        let masters = topology.masters.into_iter().map(|master| master.server).collect();
        let answers = self.send_to_each(address, &command, masters).await;
        let why = answers.into_iter().find_map(|(node, answer)| match answer {
            Ok(answer) if text_values(&answer).iter().any(|value| value == "no") => None,
            Ok(_) => Some(format!("{node} has another one")),
            Err(error) => Some(format!("that of {node} cannot be read: {error}")),
        });
        let Some(why) = why else { return Ok(()) };
        let what = format!(
            "two copies need '{NAME} no' at each master, as otherwise no key can be read while one is down: {why}"
        );
        Err(Error::new(ErrorKind::Unsupported, what).with_setting("backing_copies"))
    }
}

/// Checks what a server says about itself.
pub(super) fn check_answer(answer: &Value) -> Result<()> {
    check_server("the server", &Info::parse(answer), false)
}

fn check_server(node: &str, info: &Info, is_in_cluster: bool) -> Result<()> {
    let refused = |kind, what: String| Err(Error::new(kind, format!("{node} {what}")).with_setting(SETTING));
    if info.get("loading") == Some("1") {
        return refused(ErrorKind::Busy, "is loading its data. Try again later".to_owned());
    }
    let is_replica = info.get("role") == Some("slave");
    if is_replica && !is_in_cluster {
        let master = info.get("master_host").unwrap_or_default();
        let port = info.number("master_port");
        return refused(ErrorKind::Unsupported, format!("is a replica of {master}:{port}. Name its master"));
    }
    match info.get("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            let what = format!(
                "may evict keys, and with them pages (maxmemory-policy {policy}): it needs maxmemory-policy noeviction"
            );
            return refused(ErrorKind::Unsupported, what);
        }
        None => return refused(ErrorKind::Unsupported, "does not say whether it evicts keys".to_owned()),
    }
    let (used, most) = (info.number("used_memory"), info.number("maxmemory"));
    if !is_replica && most > 0 && used >= most {
        return refused(ErrorKind::NoSpace, format!("is full: {used} bytes of maxmemory {most} are used"));
    }
    Ok(())
}

/// Returns a value that is a text, or an empty one.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::VerbatimString { text, .. } => text.clone(),
        _ => String::new(),
    }
}

/// Returns the texts in a list or a map.
fn text_values(value: &Value) -> Vec<String> {
    match value {
        Value::Array(values) => values.iter().map(text).collect(),
        Value::Map(pairs) => pairs.iter().map(|(_, value)| text(value)).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn servers_that_would_lose_pages_are_refused() {
        let check = |text: &str, is_in_cluster| {
            check_server("a", &Info(text.replace(' ', "\r\n")), is_in_cluster).map_err(|error| error.kind())
        };
        let good = "loading:0 role:master maxmemory:100 used_memory:99 maxmemory_policy:noeviction";
        assert_eq!(check(good, false), Ok(()));
        assert_eq!(check(&good.replace("noeviction", "allkeys-lru"), false), Err(ErrorKind::Unsupported));
        assert_eq!(check("role:master", false), Err(ErrorKind::Unsupported));
        assert_eq!(check(&good.replace("loading:0", "loading:1"), false), Err(ErrorKind::Busy));
        assert_eq!(check(&good.replace("role:master", "role:slave"), false), Err(ErrorKind::Unsupported));
        assert_eq!(check(&good.replace("role:master", "role:slave"), true), Ok(()));
        assert_eq!(check(&good.replace("used_memory:99", "used_memory:100"), false), Err(ErrorKind::NoSpace));
        assert_eq!(check(&good.replace("maxmemory:100", "maxmemory:0"), false), Ok(()));
    }
}
