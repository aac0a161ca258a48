//! The connections of a server as the control API sees them: a list, and a way to end one.

use std::fmt;
use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use rustix::net::{AddressFamily, getpeername, getsockname};

use super::address::ListenAddress;
use super::registry::Registry;
use super::request::{Command, Request};

/// A connection, as of a moment.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its id; later connections have greater ids, and a server uses none twice.
    pub id: u64,
    /// Where it connected.
    pub listener: ListenAddress,
    /// Who it is.
    pub peer: Peer,
    /// The export that it chose; `None` during the handshake.
    pub export: Option<String>,
    /// When it connected.
    pub since: SystemTime,
    /// What it has requested.
    pub traffic: Traffic,
}

/// What a client has requested since it chose an export, as of its last batch of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests of any kind.
    pub requests: u64,
    /// Bytes of read requests.
    pub read_bytes: u64,
    /// Bytes of write requests.
    pub written_bytes: u64,
}

impl Traffic {
    /// Counts a request that has arrived.
    pub(super) fn count(&mut self, request: &Request) {
        self.requests += 1;
        match request.command {
            Command::Read => self.read_bytes = self.read_bytes.saturating_add(request.len_bytes),
            Command::Write => self.written_bytes = self.written_bytes.saturating_add(request.len_bytes),
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
    pub fn publish(&self, traffic: &Traffic) {
        self.requests.store(traffic.requests, Relaxed);
        self.read_bytes.store(traffic.read_bytes, Relaxed);
        self.written_bytes.store(traffic.written_bytes, Relaxed);
    }

    /// Returns what was published last.
    pub fn get(&self) -> Traffic {
        let [requests, read_bytes, written_bytes] =
            [&self.requests, &self.read_bytes, &self.written_bytes].map(|counter| counter.load(Relaxed));
        Traffic { requests, read_bytes, written_bytes }
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this machine, as it was when it connected.
    Unix {
        /// Its number; 0 when it cannot be seen from here, in another container for example.
        pid: i32,
        /// Its user.
        uid: u32,
    },
    /// An address and a port.
    Tcp(SocketAddr),
}

impl Peer {
    /// Who is at the other end of `socket`.
    ///
    /// # Errors
    /// The system's; `Unsupported` for a socket of another family.
    pub(super) fn of(socket: &OwnedFd) -> io::Result<Peer> {
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

/// The process that connected, unix(7). Not by rustix, which takes for granted that its number is not 0.
fn peer_process(socket: &OwnedFd) -> io::Result<Peer> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len_bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len_bytes` bytes to `who`, which has that many, and how many to
    // `len_bytes`; both live as long as the call.
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

/// How [`Clients::kick`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kicked {
    /// The connection has ended.
    Gone,
    /// It was told to end, and does so once the device has done what is under way.
    Ending,
    /// There is none of that id.
    Unknown,
}

/// The connections of a server. The default is those of no server: none.
#[derive(Clone, Default)]
pub struct Clients(pub(super) Option<Arc<Registry>>);

impl Clients {
    /// Returns all connections in the order in which they came, including those that have not chosen an export yet.
    pub fn list(&self) -> Vec<Client> {
        self.0.as_ref().map(|registry| registry.list()).unwrap_or_default()
    }

    /// Ends a connection, and waits a moment for its end. Replies under way may be lost.
    pub fn kick(&self, id: u64) -> Kicked {
        self.0.as_ref().map_or(Kicked::Unknown, |registry| registry.kick(id))
    }
}
