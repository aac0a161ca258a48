//! Reads from a single server on the thread that wants the bytes: its answer wakes this thread, and no other one before, which
//! halves the time of a read. Whatever is not answered at once is left to [`Client`](super::client::Client).

use std::sync::Mutex;
use std::time::{Duration, Instant};

use redis::{Cmd, Connection, ConnectionLike, Value};

use crate::lock;

/// How long connecting, and an answer, may take.
const WITHIN: Duration = Duration::from_millis(100);
/// After a failure, nothing is tried for so long.
const PAUSE: Duration = Duration::from_secs(1);
/// Connections that are kept: one for each thread that reads at a time.
const MAX_IDLE: usize = 16;

/// Connections to a server, each used by one thread at a time.
pub(super) struct Direct {
    client: redis::Client,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    idle: Vec<Connection>,
    failed: Option<Instant>,
}

impl Direct {
    pub(super) fn new(client: redis::Client) -> Direct {
        Direct { client, state: Mutex::default() }
    }

    /// Sends a command, and returns the bytes that are its answer; `None` if that fails, or takes long.
    pub(super) fn ask(&self, command: &Cmd) -> Option<Vec<u8>> {
        let asked = self.connection()?.and_then(|mut connection| {
            let answer = connection.req_command(command);
            answer.ok().map(|answer| (connection, answer))
        });
        let mut state = lock(&self.state);
        match asked {
            Some((connection, Value::BulkString(bytes))) => {
                if state.idle.len() < MAX_IDLE {
                    state.idle.push(connection);
                }
                Some(bytes)
            }
            _ => {
                *state = State { idle: Vec::new(), failed: Some(Instant::now()) };
                None
            }
        }
    }

    /// Returns a connection; `Some(None)` if there is none, and `None` if none is to be tried.
    fn connection(&self) -> Option<Option<Connection>> {
        {
            let mut state = lock(&self.state);
            if state.failed.is_some_and(|at| at.elapsed() < PAUSE) {
                return None;
            }
            if let Some(connection) = state.idle.pop() {
                return Some(Some(connection));
            }
        }
        let connect = || {
            let connection = self.client.get_connection_with_timeout(WITHIN).ok()?;
            connection.set_read_timeout(Some(WITHIN)).ok()?;
            connection.set_write_timeout(Some(WITHIN)).ok()?;
            Some(connection)
        };
        Some(connect())
    }
}
