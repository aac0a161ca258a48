//! Reads from a single server on the thread that wants the bytes: its answer wakes this thread, and no other one before, which
//! halves the time of a read. Whatever is not answered at once is left to [`Client`](super::client::Client). The runtime
//! connects: a name, TLS and a login can take long.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::{Cmd, Connection, ConnectionLike, RedisResult, Value};
use tokio::runtime::Handle;

use super::link::CONNECTED_WITHIN;
use crate::lock;

/// How long an answer may take.
const WITHIN: Duration = Duration::from_millis(100);
/// After a failure, nothing is tried for so long.
const PAUSE: Duration = Duration::from_secs(1);
/// Connections at a time: one for each thread that reads.
const MAX_CONNECTIONS: usize = 16;

/// Connections to a server, each used by one thread at a time.
pub(super) struct Direct {
    shared: Arc<Shared>,
    runtime: Handle,
}

struct Shared {
    client: redis::Client,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    idle: Vec<Connection>,
    in_use: usize,
    is_connecting: bool,
    failed: Option<Instant>,
}

impl Direct {
    /// Connects later, on the runtime of the caller.
    pub(super) fn new(client: redis::Client) -> Direct {
        let shared = Shared { client, state: Mutex::default() };
        Direct { shared: Arc::new(shared), runtime: Handle::current() }
    }

    /// Sends a command, and returns whether `accept` takes the bytes that are its answer; false if there is no connection yet,
    /// or that fails, or takes long.
    pub(super) fn ask(&self, command: &Cmd, accept: impl FnOnce(&[u8]) -> bool) -> bool {
        let Some(mut connection) = self.connection() else { return false };
        let asked = Instant::now();
        let answer = connection.req_command(command);
        let is_timely = asked.elapsed() <= WITHIN;
        let has_failed = !matches!(answer, Ok(Value::BulkString(_)));
        let is_accepted = matches!(answer, Ok(Value::BulkString(bytes)) if accept(&bytes));
        let mut state = lock(&self.shared.state);
        state.in_use -= 1;
        if has_failed {
            state.idle.clear();
            state.failed = Some(Instant::now());
        } else if is_accepted && is_timely {
            // The answers of any other may belong to other commands.
            state.idle.push(connection);
        }
        is_accepted
    }

    /// Returns a connection. If there is none, one is made for a later read.
    fn connection(&self) -> Option<Connection> {
        let mut state = lock(&self.shared.state);
        if state.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        let connection = state.idle.pop();
        if connection.is_some() {
            state.in_use += 1;
        } else if !state.is_connecting && state.in_use < MAX_CONNECTIONS {
            state.is_connecting = true;
            let shared = Arc::clone(&self.shared);
            self.runtime.spawn_blocking(move || shared.connect());
        }
        connection
    }
}

impl Shared {
    fn connect(&self) {
        let connected = open(&self.client);
        let mut state = lock(&self.state);
        state.is_connecting = false;
        match connected {
            Ok(connection) => state.idle.push(connection),
            Err(_) => state.failed = Some(Instant::now()),
        }
    }
}

fn open(client: &redis::Client) -> RedisResult<Connection> {
    let connection = client.get_connection_with_timeout(CONNECTED_WITHIN)?;
    connection.set_read_timeout(Some(WITHIN))?;
    connection.set_write_timeout(Some(WITHIN))?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::redis::fake::Fake;

    fn idle(direct: &Direct) -> usize {
        lock(&direct.shared.state).idle.len()
    }

    fn wait_until_idle(direct: &Direct) {
        let started = Instant::now();
        while idle(direct) == 0 {
            assert!(started.elapsed() < Duration::from_secs(5));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn only_a_connection_whose_answers_are_good_is_used_again() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let fake = runtime.block_on(Fake::start("$2\r\nab\r\n"));
        let client = redis::Client::open(format!("redis://{}", fake.server)).unwrap();
        let direct = runtime.block_on(async { Direct::new(client) });
        let ask = |is_good: bool| direct.ask(&redis::cmd("GET"), |read| read == b"ab" && is_good);
        // The first read does not wait for a connection.
        assert!(!ask(true));
        for _ in 0..10 {
            wait_until_idle(&direct);
            assert!(ask(true));
        }
        assert_eq!((idle(&direct), fake.connections()), (1, 1));
        assert!(!ask(false));
        assert_eq!(idle(&direct), 0);
        assert!(!ask(true));
        wait_until_idle(&direct);
        assert!(ask(true));
        assert_eq!(fake.connections(), 2);
        // No answer in time.
        fake.answers_after(3 * WITHIN);
        assert!(!ask(true));
        assert_eq!(idle(&direct), 0);
        let state = lock(&direct.shared.state);
        assert!(state.failed.is_some() && state.in_use == 0);
    }
}
