//! Connected NBD clients as JSON.

use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::nbd::{Client, Peer};

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientJson {
    /// Its number, by which it is kicked.
    pub id: u64,
    /// Where it connected: `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub listener: String,
    /// Who it is, in words: `pid N, uid N`, or `ADDRESS:PORT`.
    pub peer: String,
    /// The process that connected to a Unix socket; 0 if it cannot be seen from here.
    pub pid: Option<i32>,
    /// Its user.
    pub uid: Option<u32>,
    /// The export that it chose, if it has.
    pub export: Option<String>,
    /// When it connected, in seconds since 1970.
    pub since: u64,
    /// How many requests it has sent since it chose its export.
    pub requests: u64,
    /// How much it asked to read.
    pub read_bytes: u64,
    /// How much it asked to write.
    pub written_bytes: u64,
}

impl From<Client> for ClientJson {
    fn from(client: Client) -> Self {
        let (pid, uid) = match client.peer {
            Peer::Unix { pid, uid } => (Some(pid), Some(uid)),
            Peer::Tcp(_) => (None, None),
        };
        ClientJson {
            id: client.id,
            listener: client.listener.to_string(),
            peer: client.peer.to_string(),
            pid,
            uid,
            export: client.export,
            // Before 1970 no clock is set.
            since: client.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            requests: client.traffic.requests,
            read_bytes: client.traffic.read_bytes,
            written_bytes: client.traffic.written_bytes,
        }
    }
}
