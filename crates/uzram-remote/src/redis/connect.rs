//! Connecting to servers, and what a server must be like: reachable, a master, not full, and one that evicts
//! nothing.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{AsyncConnectionConfig, RedisResult, Value};
use uzram::{Error, ErrorKind, Result};

use super::client::{ANSWER_WITHIN, Client};
use super::link::{CONNECTED_WITHIN, Credentials, connection_info};
use super::topology::{Master, Topology, text};
use crate::{Address, Failure, Server, error};

/// What a server says about itself: the answer to `INFO`.
struct Info(String);

impl Info {
    fn get(&self, name: &str) -> Option<&str> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    }

    fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    fn is_of_cluster(&self) -> bool {
        self.get("cluster_enabled") == Some("1") || self.get("redis_mode") == Some("cluster")
    }
}

/// Connects to a server, or to the cluster that it belongs to.
pub(super) async fn connect(address: &Address, credentials: &Credentials) -> Result<Client, Failure> {
    if address.tls {
        // Another library of the program may have chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let (first, info) = first_that_answers(address, credentials).await?;
    if !info.is_of_cluster() {
        return Ok(Client::of_server(address, credentials, first));
    }
    if address.database > 0 {
        let what = format!("{address} is a cluster, which has no database but 0");
        return Err(error(ErrorKind::Unsupported, what).into());
    }
    Client::of_cluster(address, credentials).await
}

/// Asks all servers at a time. Returns the first one that answers, and what it says about itself; of single
/// servers, which have different objects, the first one in the address that answers.
async fn first_that_answers(address: &Address, credentials: &Credentials) -> Result<(Server, Info), Failure> {
    let ask_one = async |(number, server)| (number, ask(address, server, credentials).await);
    let mut asked: FuturesUnordered<_> = address.servers.iter().enumerate().map(ask_one).collect();
    let mut answers: Vec<Option<RedisResult<Info>>> = address.servers.iter().map(|_| None).collect();
    while let Some((number, answer)) = asked.next().await {
        match answer {
            Ok(info) if info.is_of_cluster() => return Ok((address.servers[number].clone(), info)),
            answer => answers[number] = Some(answer),
        }
        // Those before it have failed.
        let next = answers.iter().position(|answer| !matches!(answer, Some(Err(_))));
        if let Some(number) = next
            && let Some(Ok(info)) = answers[number].take()
        {
            return Ok((address.servers[number].clone(), info));
        }
    }
    match answers.into_iter().next().flatten() {
        Some(Err(error)) => Err(Failure::of_redis(&address.to_string(), &error)),
        _ => Err(error(ErrorKind::Invalid, "no server is named").into()),
    }
}

async fn ask(address: &Address, server: &Server, credentials: &Credentials) -> RedisResult<Info> {
    // A cluster refuses to select another database.
    let address = Address { database: 0, ..address.clone() };
    let client = redis::Client::open(connection_info(&address, server, credentials)?)?;
    let limits = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECTED_WITHIN))
        .set_response_timeout(Some(ANSWER_WITHIN));
    let mut connection = client.get_multiplexed_async_connection_with_config(&limits).await?;
    Ok(Info(text(&connection.send_packed_command(&redis::cmd("INFO")).await?.extract_error()?)))
}

/// Checks that a server, or the nodes of a cluster, keep what they are given. Returns the masters that are
/// well, in a cluster, with `two` copies also those that are full; its replicas may be away. With `two`
/// copies also returns what is wrong with one of the other masters, or that one is full. Errors:
/// `Unsupported` if one of them may evict keys; if not all masters are well, or with `two` copies fewer than
/// two, what is wrong with one; `Io` if there is no master at all.
pub(super) async fn check(
    client: &Client,
    address: &Address,
    two: bool,
) -> Result<(Topology, Option<Failure>), Failure> {
    let topology = client.read_topology().await?;
    let (mut well, mut full, mut failure, mut is_full) = (Vec::new(), Vec::new(), None, None);
    for (node, answer) in client.send_to_each(&redis::cmd("INFO"), &topology.nodes).await {
        let info = answer.map(|answer| Info(text(&answer)));
        let run_id = info.as_ref().map_or("", |info| info.get("run_id").unwrap_or_default()).to_owned();
        let checked =
            info.and_then(|info| Ok(check_server(&client.name_of(&node), &info, client.is_cluster)?));
        match checked {
            Ok(()) => well.push((node, run_id)),
            Err(failure) if failure.is_unsupported() => return Err(failure),
            Err(failure) if two && failure.is_full() => {
                full.push(node.clone());
                well.push((node, run_id));
                is_full = Some(failure);
            }
            Err(of_master) if topology.masters.iter().any(|master| master.server == node) => {
                failure = Some(of_master);
            }
            Err(_) => {}
        }
    }
    let is_well = |master: &Master| {
        let (_, run_id) = well.iter().find(|(node, _)| *node == master.server)?;
        Some(Master { run_id: run_id.clone(), ..master.clone() })
    };
    let masters: Vec<_> = topology.masters.iter().filter_map(is_well).collect();
    let full = masters.iter().filter(|master| full.contains(&master.server));
    let full = full.map(|master| master.id.clone()).collect();
    let are_all = !masters.is_empty() && masters.len() == topology.masters.len();
    let enough = if two { masters.len() >= 2 } else { are_all };
    match failure {
        Some(failure) if !enough => Err(failure),
        // The caller says what two copies need.
        None if !enough && !two => {
            let what = format!("{address} names no master with slots that can be asked");
            Err(error(ErrorKind::Io, what).into())
        }
        failure => Ok((Topology { masters, nodes: topology.nodes.clone(), full }, failure.or(is_full))),
    }
}

/// Checks that keys can be read and written while a master without replicas is down: each master's
/// `cluster-require-full-coverage` is `no`.
pub(super) async fn check_coverage(client: &Client) -> Result<()> {
    const NAME: &str = "cluster-require-full-coverage";
    let command = std::mem::take(redis::cmd("CONFIG").arg("GET").arg(NAME));
    let answers = client.send_to_each(&command, &client.topology().masters()).await;
    let why = answers.into_iter().find_map(|(node, answer)| match answer {
        Ok(answer) if text_values(&answer).iter().any(|value| value == "no") => None,
        Ok(_) => Some(format!("{node} has another one")),
        Err(failure) => Some(format!("that of {node} cannot be read: {failure}")),
    });
    let Some(why) = why else { return Ok(()) };
    let what = format!(
        "two copies need '{NAME} no' at each master, as otherwise no key can be read while one is down: {why}"
    );
    Err(Error::new(ErrorKind::Unsupported, what).with_setting("backing_copies"))
}

pub(super) fn check_answer(answer: &Value) -> Result<()> {
    check_server("the server", &Info(text(answer)), false)
}

fn check_server(node: &str, info: &Info, is_in_cluster: bool) -> Result<()> {
    let refused = |kind, what: &str| Err(error(kind, format!("{node} {what}")));
    if info.get("loading") == Some("1") {
        return refused(ErrorKind::Busy, "is loading its data. Try again later");
    }
    let is_replica = info.get("role") == Some("slave");
    if is_replica && !is_in_cluster {
        let master = info.get("master_host").unwrap_or_default();
        let port = info.number("master_port");
        return refused(ErrorKind::Unsupported, &format!("is a replica of {master}:{port}. Name its master"));
    }
    match info.get("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => {
            let what = format!(
                "may evict keys, and with them pages (maxmemory-policy {policy}): it needs maxmemory-policy noeviction"
            );
            return refused(ErrorKind::Unsupported, &what);
        }
        None => return refused(ErrorKind::Unsupported, "does not say whether it evicts keys"),
    }
    let (used, most) = (info.number("used_memory"), info.number("maxmemory"));
    if !is_replica && most > 0 && used >= most {
        return refused(ErrorKind::NoSpace, &format!("is full: {used} bytes of maxmemory {most} are used"));
    }
    Ok(())
}

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

    use std::time::{Duration, Instant};

    use super::*;
    use crate::redis::fake::{Fake, address_of};
    use crate::retry::OPENED_WITHIN;

    async fn first_of(fakes: &[&Fake]) -> Result<usize> {
        let address = address_of(fakes.iter().copied());
        let (first, _) = first_that_answers(&address, &Credentials::default()).await?;
        Ok(address.servers.iter().position(|server| *server == first).unwrap())
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_delays_no_other_node() {
        let answer = |text: &str| format!("${}\r\n{text}\r\n", text.len());
        let node = Fake::start(&answer("cluster_enabled:1")).await;
        let single = Fake::start(&answer("cluster_enabled:0")).await;
        let silent = Fake::start(&answer("cluster_enabled:1")).await;
        silent.answers_after(Duration::from_secs(60));
        let started = Instant::now();
        assert_eq!(first_of(&[&silent, &silent, &node]).await, Ok(2));
        assert!(started.elapsed() < OPENED_WITHIN, "{:?}", started.elapsed());
        // Another single server has other objects.
        let late = Fake::start(&answer("cluster_enabled:0")).await;
        late.answers_after(Duration::from_millis(100));
        assert_eq!(first_of(&[&late, &single]).await, Ok(0));
        assert_eq!(first_of(&[&silent, &single]).await, Ok(1));
        assert_eq!(first_of(&[&silent]).await.map_err(|error| error.kind()), Err(ErrorKind::Io));
    }

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
