//! What is known of a connection: its peer, its traffic, its end.

use std::fmt;
use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::net::{AddressFamily, getpeername, getsockname};
use serde::{Deserialize, Serialize};

use super::proto::command;
use super::request::Request;

/// A snapshot of a connection, as the control API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Its id; later connections have greater ids, and a server never reuses one.
    pub id: u64,
    /// The address it connected to: `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub listener: String,
    /// The other end: `pid N, uid N`, or `ADDRESS:PORT`.
    pub peer: String,
    /// The process that connected to a Unix socket; 0 if it is not visible here.
    pub pid: Option<i32>,
    /// The user of that process.
    pub uid: Option<u32>,
    /// The export that it chose; `None` during the handshake.
    pub export: Option<String>,
    /// When it connected, in seconds since 1970.
    pub connected_at_s: u64,
    /// The number of requests since it chose its export. This and the byte counts are updated once a batch.
    pub requests: u64,
    /// Bytes of read requests.
    pub read_bytes: u64,
    /// Bytes of write requests.
    pub written_bytes: u64,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Traffic {
    pub requests: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

impl Traffic {
    #[inline(always)]
    pub fn count(&mut self, request: &Request) {
        self.requests += 1;
        match request.command {
            command::READ => self.read_bytes = self.read_bytes.saturating_add(request.len_bytes),
            command::WRITE => self.written_bytes = self.written_bytes.saturating_add(request.len_bytes),
            _ => {}
        }
    }
}

/// [`Traffic`] that one thread counts and others read.
#[derive(Default)]
pub(super) struct TrafficCounters {
    requests: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl TrafficCounters {
    /// Publishes what has been counted: three plain stores for a whole batch of requests.
    #[inline(always)]
    pub fn publish(&self, traffic: &Traffic) {
        self.requests.store(traffic.requests, Relaxed);
        self.read_bytes.store(traffic.read_bytes, Relaxed);
        self.written_bytes.store(traffic.written_bytes, Relaxed);
    }

    pub fn get(&self) -> Traffic {
        let [requests, read_bytes, written_bytes] =
            [&self.requests, &self.read_bytes, &self.written_bytes].map(|counter| counter.load(Relaxed));
        Traffic { requests, read_bytes, written_bytes }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Peer {
    /// A process on this machine, with its credentials when it connected; its ID is 0 if it is not visible
    /// here, in another container for example.
    Unix {
        pid: i32,
        uid: u32,
    },
    Tcp(SocketAddr),
}

impl Peer {
    pub fn of(socket: &OwnedFd) -> io::Result<Peer> {
        match getsockname(socket)?.address_family() {
            AddressFamily::UNIX => peer_process(socket),
            AddressFamily::INET | AddressFamily::INET6 => {
                let address: SocketAddr =
                    getpeername(socket)?.ok_or(io::ErrorKind::NotConnected)?.try_into()?;
                Ok(Peer::Tcp(address))
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// Returns the process that connected, unix(7). Does not use rustix, which assumes that its ID is not 0.
fn peer_process(socket: &OwnedFd) -> io::Result<Peer> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len_bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len_bytes` bytes to `who`, which has that size, and the length to
    // `len_bytes`; both outlive the call.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut len_bytes,
        )
    };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer::Unix { pid: who.pid, uid: who.uid })
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Unix { pid, uid } => write!(f, "pid {pid}, uid {uid}"),
            Peer::Tcp(address) => address.fmt(f),
        }
    }
}

/// Counts of clients and connections of a listener that were turned away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnedAway {
    /// Clients refused because all places were taken.
    pub refused: u64,
    /// Handshakes ended to make room.
    pub gave_way: u64,
    /// Handshakes that exceeded their deadline.
    pub too_slow: u64,
    /// Clients that did not start TLS where it is required.
    pub without_tls: u64,
    /// Clients that started TLS and failed: those without an acceptable certificate, and others.
    pub failed_tls: u64,
    /// Why the last of these failed.
    pub why: String,
}

/// The outcome of `Clients::kick`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kicked {
    /// The connection has ended.
    Gone,
    /// The connection is closed, and its thread ends once the device has finished the request in progress.
    Ending,
    /// There is no connection of that id.
    Unknown,
}
