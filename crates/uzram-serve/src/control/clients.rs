//! Connected NBD clients as JSON.

use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::nbd::{Client, Peer};

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientJson {
    /// Its id, for `DELETE`.
    pub id: u64,
    /// The address it connected to: `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub listener: String,
    /// The peer as text: `pid N, uid N`, or `ADDRESS:PORT`.
    pub peer: String,
    /// The process that connected to a Unix socket; 0 if it is not visible here.
    pub pid: Option<i32>,
    /// The user of that process.
    pub uid: Option<u32>,
    /// The export that it chose, if any.
    pub export: Option<String>,
    /// When it connected, in seconds since 1970.
    pub connected_at_s: u64,
    /// The number of requests since it chose its export.
    pub requests: u64,
    /// Bytes of read requests.
    pub read_bytes: u64,
    /// Bytes of write requests.
    pub written_bytes: u64,
}

/// Connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientsJson {
    /// The connections.
    pub clients: Vec<ClientJson>,
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
            // A clock before 1970 is not set.
            connected_at_s: client.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            requests: client.traffic.requests,
            read_bytes: client.traffic.read_bytes,
            written_bytes: client.traffic.written_bytes,
        }
    }
}
