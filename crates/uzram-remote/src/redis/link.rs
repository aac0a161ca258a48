//! A connection to one node, which is made anew when it fails.
//!
//! A task of its own connects. Requests wait while it does so for the first time, or after the node closed
//! the connection; they fail at once while the node is known to be away, and concern no other node.
//!
//! A node is away if it is silent for [`SILENT_FOR`] while something waits for it. Behind a request that its
//! caller has dropped a `PING` is sent: its answer ends the silence, which would otherwise seem to last until
//! the next request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, RedisResult, Value,
};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::{Address, Server};

/// How long the connection to a node may take, with the login.
pub(super) const CONNECTED_WITHIN: Duration = Duration::from_secs(1);
/// How long a node may be silent while requests wait for it, before its connection is given up.
const SILENT_FOR: Duration = Duration::from_millis(1500);
const TRY_EVERY: Duration = Duration::from_millis(200);

/// A login. Without `Debug`, so that it is shown nowhere.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Credentials {
    /// The user; the server's default user without one.
    pub user: Option<String>,
    /// The password, if the server wants one.
    pub password: Option<String>,
}

pub(super) fn connection_info(
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

pub(super) struct Link {
    shared: Arc<Shared>,
    keeper: AbortHandle,
}

struct Shared {
    state: watch::Sender<State>,
    opened: Instant,
    /// Milliseconds after `opened` when the first request was sent since the last answer, and 1; 0 for none.
    silent_since: AtomicU64,
    /// The number of the connection over which a `PING` is under way, and 1; 0 for none.
    pinged: AtomicU64,
}

/// A request without an answer yet. When it is dropped, something else waits for the node's next answer.
struct Unanswered<'a> {
    shared: &'a Arc<Shared>,
    /// The connection and its number; `None` once there is an answer.
    connection: Option<(MultiplexedConnection, u64)>,
}

#[derive(Clone)]
enum State {
    Connecting,
    /// The connection, and its number among those of this link.
    Up(MultiplexedConnection, u64),
    /// Requests fail until there is a connection.
    Down(RedisError),
}

impl Link {
    /// Begins to connect, on the runtime of the caller. With `is_readonly`, a replica answers itself, instead
    /// of naming its master.
    pub(super) fn new(client: redis::Client, is_readonly: bool) -> Link {
        let state = watch::Sender::new(State::Connecting);
        let keeper = tokio::spawn(keep_connected(client, is_readonly, state.clone())).abort_handle();
        let shared = Shared {
            state,
            opened: Instant::now(),
            silent_since: AtomicU64::new(0),
            pinged: AtomicU64::new(0),
        };
        Link { shared: Arc::new(shared), keeper }
    }

    /// Sends a command, after `ASKING` if that is so, and returns the answer, which can be an error of the
    /// server's.
    pub(super) async fn send(&self, command: &Cmd, is_asking: bool) -> RedisResult<Value> {
        let (mut connection, number) = self.shared.connection().await?;
        let shared = &self.shared;
        let now = shared.opened.elapsed().as_millis() as u64 + 1;
        if let Err(since) = shared.silent_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed)
            && now.saturating_sub(since) > SILENT_FOR.as_millis() as u64
        {
            let silent = RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
            shared.give_up(number, State::Down(silent.clone()));
            return Err(silent);
        }
        let mut unanswered = Unanswered { shared, connection: Some((connection.clone(), number)) };
        let answer = match is_asking {
            true => {
                let (mut before, asking) = (connection.clone(), redis::cmd("ASKING"));
                let asking = before.send_packed_command(&asking);
                // It concerns what is sent next.
                tokio::join!(biased; asking, connection.send_packed_command(command)).1
            }
            false => connection.send_packed_command(command).await,
        };
        unanswered.connection = None;
        shared.note(&answer, number);
        answer.and_then(Value::extract_error)
    }

    /// Gives the connection up: its answers may belong to other requests.
    pub(super) fn renew(&self) {
        let State::Up(_, number) = *self.shared.state.borrow() else { return };
        self.shared.give_up(number, State::Connecting);
    }

    /// Returns whether the node is known to be away.
    pub(super) fn is_down(&self) -> bool {
        matches!(*self.shared.state.borrow(), State::Down(_))
    }
}

impl Shared {
    async fn connection(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        if let State::Up(connection, number) = &*self.state.borrow() {
            return Ok((connection.clone(), *number));
        }
        let mut state = self.state.subscribe();
        // Its sender is in this link.
        let state = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match state.as_deref() {
            Ok(State::Up(connection, number)) => Ok((connection.clone(), *number)),
            Ok(State::Down(error)) => Err(error.clone()),
            Ok(State::Connecting) | Err(_) => {
                Err(std::io::Error::from(std::io::ErrorKind::NotConnected).into())
            }
        }
    }

    /// Notes what a request to the connection of that number has brought.
    fn note(&self, answer: &RedisResult<Value>, number: u64) {
        match answer {
            Err(error) if error.is_timeout() => self.give_up(number, State::Down(error.clone())),
            Err(_) => self.give_up(number, State::Connecting),
            Ok(_) => self.silent_since.store(0, Ordering::Relaxed),
        }
    }

    /// Gives up the connection of that number, if it is not given up yet.
    fn give_up(&self, given_up: u64, next: State) {
        self.state.send_if_modified(|state| {
            let is_it = matches!(state, State::Up(_, number) if *number == given_up);
            if is_it {
                *state = next;
                self.silent_since.store(0, Ordering::Relaxed);
            }
            is_it
        });
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let Some((mut connection, number)) = self.connection.take() else { return };
        // Without a runtime, the program ends.
        let Ok(runtime) = Handle::try_current() else { return };
        // One at a time: it ends the silence of all that are dropped before its answer.
        if self.shared.pinged.swap(number + 1, Ordering::SeqCst) == number + 1 {
            return;
        }
        let shared = Arc::clone(self.shared);
        runtime.spawn(async move {
            let answer = connection.send_packed_command(&redis::cmd("PING")).await;
            // First: a request that is dropped from here on sends another one.
            let _ = shared.pinged.compare_exchange(number + 1, 0, Ordering::SeqCst, Ordering::SeqCst);
            shared.note(&answer, number);
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

async fn keep_connected(client: redis::Client, is_readonly: bool, state: watch::Sender<State>) {
    let mut watched = state.subscribe();
    for number in 0.. {
        match connect(&client, is_readonly).await {
            Ok(connection) => {
                state.send_replace(State::Up(connection, number));
                let _ = watched.wait_for(|state| !matches!(state, State::Up(..))).await;
            }
            Err(error) => {
                state.send_replace(State::Down(error));
                tokio::time::sleep(TRY_EVERY).await;
            }
        }
    }
}

async fn connect(client: &redis::Client, is_readonly: bool) -> RedisResult<MultiplexedConnection> {
    let limits = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECTED_WITHIN))
        .set_response_timeout(Some(SILENT_FOR));
    let mut connection = client.get_multiplexed_async_connection_with_config(&limits).await?;
    if is_readonly {
        connection.send_packed_command(&redis::cmd("READONLY")).await?.extract_error()?;
    }
    Ok(connection)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::redis::fake::Fake;

    /// On a busy machine, too.
    const NOTICED_WITHIN: Duration = Duration::from_secs(30);

    /// Returns a server that has answered once, and a link to it.
    async fn linked() -> (Fake, Link) {
        let fake = Fake::start("+OK\r\n").await;
        let link = Link::new(redis::Client::open(format!("redis://{}", fake.server)).unwrap(), false);
        assert_eq!(link.send(&redis::cmd("GET"), false).await, Ok(Value::Okay));
        (fake, link)
    }

    async fn send_and_drop(link: &Link) {
        let command = redis::cmd("GET");
        let sent = tokio::time::timeout(Duration::from_millis(10), link.send(&command, false)).await;
        assert!(!matches!(sent, Ok(Ok(_))), "{sent:?}");
    }

    #[tokio::test]
    async fn a_request_that_was_dropped_makes_no_node_silent() {
        let (fake, link) = linked().await;
        fake.answers_after(Duration::from_millis(50));
        send_and_drop(&link).await;
        tokio::time::sleep(SILENT_FOR + Duration::from_millis(200)).await;
        assert_eq!(link.send(&redis::cmd("GET"), false).await, Ok(Value::Okay));
        assert_eq!(fake.connections(), 1);
    }

    /// Also if nothing is sent after the one that was dropped.
    #[tokio::test]
    async fn a_node_that_hangs_is_noticed_even_if_each_request_is_dropped() {
        for sends_more in [true, false] {
            let (fake, link) = linked().await;
            fake.answers_after(Duration::from_secs(60));
            send_and_drop(&link).await;
            let started = Instant::now();
            while !link.is_down() {
                assert!(started.elapsed() < NOTICED_WITHIN, "it is not noticed, sends_more: {sends_more}");
                match sends_more {
                    true => send_and_drop(&link).await,
                    false => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        }
    }
}
