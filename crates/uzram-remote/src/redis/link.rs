//! A connection to one node, which is made anew when it fails.
//!
//! A task of its own connects. Requests wait while it does so for the first time, or after the node closed the connection;
//! they fail at once while the node is known to be away, and concern no other node.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, RedisError, RedisResult, Value};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// How long the connection to a node may take, with the login.
pub(super) const CONNECTED_WITHIN: Duration = Duration::from_secs(1);
/// How long a node may be silent while requests wait for it, before its connection is given up.
const SILENT_FOR: Duration = Duration::from_millis(1500);
/// Between two tries to connect.
const TRY_EVERY: Duration = Duration::from_millis(200);

/// A connection to a node.
pub(super) struct Link {
    state: watch::Sender<State>,
    opened: Instant,
    /// Milliseconds after `opened` when the first request was sent since the last answer, and 1; 0 for none.
    silent_since: AtomicU64,
    keeper: AbortHandle,
}

#[derive(Clone)]
enum State {
    /// Requests wait.
    Connecting,
    /// The connection, and its number among those of this link.
    Up(MultiplexedConnection, u64),
    /// Requests fail until there is a connection.
    Down(RedisError),
}

impl Link {
    /// Begins to connect, on the runtime of the caller. With `is_readonly`, a replica answers itself, instead of naming its
    /// master.
    pub(super) fn new(client: redis::Client, is_readonly: bool) -> Link {
        let state = watch::Sender::new(State::Connecting);
        let keeper = tokio::spawn(keep_connected(client, is_readonly, state.clone())).abort_handle();
        Link { state, opened: Instant::now(), silent_since: AtomicU64::new(0), keeper }
    }

    /// Sends a command, after `ASKING` if that is so, and returns the answer, which can be an error of the server's.
    pub(super) async fn send(&self, command: &Cmd, is_asking: bool) -> RedisResult<Value> {
        let (mut connection, number) = self.connection().await?;
        let now = self.opened.elapsed().as_millis() as u64 + 1;
        if let Err(since) = self.silent_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed)
            && now.saturating_sub(since) > SILENT_FOR.as_millis() as u64
        {
            let silent = RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
            self.give_up(number, State::Down(silent.clone()));
            return Err(silent);
        }
        let answer = match is_asking {
            true => {
                let (mut before, asking) = (connection.clone(), redis::cmd("ASKING"));
                let asking = before.send_packed_command(&asking);
                // It concerns what is sent next.
                tokio::join!(biased; asking, connection.send_packed_command(command)).1
            }
            false => connection.send_packed_command(command).await,
        };
        match &answer {
            Err(error) if error.is_timeout() => self.give_up(number, State::Down(error.clone())),
            Err(_) => self.give_up(number, State::Connecting),
            Ok(_) => self.silent_since.store(0, Ordering::Relaxed),
        }
        answer.and_then(Value::extract_error)
    }

    /// Gives the connection up: its answers may belong to other requests.
    pub(super) fn renew(&self) {
        let number = match &*self.state.borrow() {
            State::Up(_, number) => *number,
            _ => return,
        };
        self.give_up(number, State::Connecting);
    }

    /// Returns whether the node is known to be away.
    pub(super) fn is_down(&self) -> bool {
        matches!(*self.state.borrow(), State::Down(_))
    }

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
