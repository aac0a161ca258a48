//! The connections of each listener, by their phase, and the places for them: the state of [`Registry`].
//!
//! Locks: none here; `Registry::connections` protects all of it.
//!
//! [`Registry`]: super::Registry

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::thread::Pid;

use crate::nbd::address::ListenAddress;
use crate::nbd::clients::{Client, Peer, TrafficCounters, TurnedAway};
use crate::nbd::socket::Closer;
use crate::nbd::time_slice;

/// How long a handshake may take before it must give way to a new connection.
pub(super) const HANDSHAKE_TURN: Duration = Duration::from_secs(1);

/// When a listener may accept another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nbd) enum Accept {
    /// Now: a place is free, or the oldest handshake can be ended.
    Now,
    /// Not before a handshake ends, or this time.
    NotBefore(Option<Instant>),
}

/// All connections.
pub(super) struct Connections {
    pub listeners: Vec<ListenerConnections>,
    pub next_id: u64,
}

/// The connections of a listener, by their ids; ids grow with time.
pub(super) struct ListenerConnections {
    pub address: ListenAddress,
    /// Places that clients of other listeners cannot take.
    pub reserved: usize,
    pub handshakes: BTreeMap<u64, ConnectionEntry>,
    pub clients: BTreeMap<u64, ConnectionEntry>,
    pub turned_away: TurnedAway,
    /// Whether the acceptor waits for a free place.
    pub acceptor_waits: bool,
}

/// A connection.
pub(super) struct ConnectionEntry {
    pub closer: Closer,
    pub peer: Peer,
    pub connected: Instant,
    pub since: SystemTime,
    /// The thread that serves it, once it is a client.
    pub thread: Option<Pid>,
    /// The export that it chose, once it is a client.
    pub export: Option<String>,
    pub traffic: Arc<TrafficCounters>,
    /// It was closed, and its thread has not ended yet.
    pub is_ending: bool,
}

/// Returns the number of places that are reserved for each of `listeners` listeners.
pub(super) fn reserved_places(max_clients: usize, listeners: usize) -> impl Iterator<Item = usize> {
    let sixteenth = if max_clients >= 2 * listeners { max_clients / 16 } else { 0 };
    let least = usize::from(max_clients >= 2 * listeners);
    (0..listeners).map(move |listener| {
        let sharers = if listener == 0 { 1 } else { listeners - 1 };
        (sixteenth / sharers).max(least)
    })
}

impl Connections {
    /// Returns snapshots of all connections, in the order in which they came.
    pub fn list(&self) -> Vec<Client> {
        let mut clients: Vec<Client> = self.listeners.iter().flat_map(ListenerConnections::list).collect();
        clients.sort_by_key(|client| client.id);
        clients
    }

    pub fn all(&self) -> impl Iterator<Item = (&u64, &ConnectionEntry)> {
        self.listeners
            .iter()
            .flat_map(|listener_state| listener_state.handshakes.iter().chain(&listener_state.clients))
    }

    pub fn connection(&mut self, id: u64) -> Option<&mut ConnectionEntry> {
        let mut maps = self
            .listeners
            .iter_mut()
            .flat_map(|listener_state| [&mut listener_state.handshakes, &mut listener_state.clients]);
        maps.find_map(|map| map.get_mut(&id))
    }

    /// Shortens the time slices of clients' threads if there are more of them than `cpus`: of all threads when the
    /// first surplus client comes, then of each `newcomer`.
    pub fn shorten_time_slices(&self, cpus: usize, newcomer: Pid) {
        let clients = || self.listeners.iter().flat_map(|listener_state| listener_state.clients.values());
        let count = clients().count();
        let threads: Vec<Pid> = match count.checked_sub(cpus) {
            None | Some(0) => return,
            Some(1) => clients().filter_map(|client| client.thread).collect(),
            Some(_) => vec![newcomer],
        };
        for thread in threads {
            if let Err(error) = time_slice::shorten(thread) {
                tracing::debug!(%error, "a thread keeps its usual time slice");
            }
        }
    }

    /// Returns whether there is a place for one more client of a listener: one of its reserved places, or one that is
    /// neither reserved nor taken.
    pub fn has_client_place(&self, listener: usize, max_clients: usize) -> bool {
        let listener_state = &self.listeners[listener];
        let spoken_for: usize = self
            .listeners
            .iter()
            .map(|listener_state| listener_state.clients.len().max(listener_state.reserved))
            .sum();
        listener_state.clients.len() < listener_state.reserved || spoken_for < max_clients
    }
}

impl ListenerConnections {
    fn list(&self) -> impl Iterator<Item = Client> {
        self.handshakes.iter().chain(&self.clients).map(|(id, connection)| Client {
            id: *id,
            listener: self.address.clone(),
            peer: connection.peer,
            export: connection.export.clone(),
            since: connection.since,
            traffic: connection.traffic.get(),
        })
    }

    pub fn when_to_accept(&self, max_handshakes: usize, now: Instant) -> Accept {
        if self.handshakes.len() < max_handshakes {
            return Accept::Now;
        }
        match self.handshakes.values().next() {
            Some(oldest) if !oldest.is_ending => match oldest.connected + HANDSHAKE_TURN {
                turn_ends if turn_ends <= now => Accept::Now,
                turn_ends => Accept::NotBefore(Some(turn_ends)),
            },
            _ => Accept::NotBefore(None),
        }
    }
}

impl ConnectionEntry {
    pub fn end(&mut self) {
        self.is_ending = true;
        self.closer.close();
    }
}
