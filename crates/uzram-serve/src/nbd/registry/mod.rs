//! The connections of a server, and the limits on their number.
//!
//! **Clients.** A connection becomes a client when it has chosen an export, not when it connects: connecting alone keeps
//! no client out. Of the server's `max_clients` places, some are reserved for each listener:
//! - a sixteenth, and at least one, for the first listener, which is the socket in the runtime directory;
//! - another sixteenth, and at least one each, divided among the others;
//! - none if there are fewer than two places for each listener.
//!
//! **Handshakes.** Each listener has its own places for handshakes: an eighth of `max_clients`, and at least 64. When
//! all are taken, new connections wait in the listener's queue until one is free, or until the oldest handshake has
//! lasted [`connections::HANDSHAKE_TURN`] and is ended. An honest handshake takes milliseconds.
//!
//! **Those turned away** are counted for each listener, and noted as failures ([`uzram::failures`]).
//!
//! **CPUs.** Threads of clients get a short [time slice](super::time_slice) once there are more of them than CPUs.
//!
//! `connections` has the state, this file the operations.
//!
//! Lock: `Registry::connections`, a leaf; held for a few map operations, a `shutdown(2)`, or as many calls to the scheduler as
//! there are CPUs, never while waiting (a condition variable aside).

mod connections;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::gettid;
use uzram::failures;

use super::address::ListenAddress;
use super::clients::{Client, Kicked, Peer, TrafficCounters, TurnedAway};
use super::handshake::NoTls;
use super::socket::Closer;
use connections::{ConnectionEntry, Connections, ListenerConnections, reserved_places};

pub(super) use connections::Accept;

/// The least places for handshakes of a listener.
const MIN_HANDSHAKES: usize = 64;
/// How long a stopping server lets its connections send their last replies.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// How long `kick` waits for a connection to end.
const KICK_GRACE: Duration = Duration::from_secs(1);

/// The connections of a server.
pub(super) struct Registry {
    connections: Mutex<Connections>,
    /// Signalled whenever a connection has ended.
    ended: Condvar,
    /// Readable when the acceptor has work: a place for a handshake is free.
    acceptor_wake: OwnedFd,
    max_clients: usize,
    max_handshakes: usize,
    /// CPUs that the process may use.
    cpus: usize,
}

/// A registered connection; dropping this removes it.
pub(super) struct Registration<'a> {
    registry: &'a Registry,
    listener: usize,
    id: u64,
    peer: Peer,
    traffic: Arc<TrafficCounters>,
}

/// Returns the number of places for handshakes of each listener.
pub(super) fn max_handshakes(max_clients: usize) -> usize {
    (max_clients / 8).max(MIN_HANDSHAKES)
}

impl Registry {
    /// Creates an empty registry for at most `max_clients` clients, which share `cpus`.
    ///
    /// # Errors
    /// The system's, when it refuses a descriptor.
    pub fn new(
        max_clients: usize,
        cpus: usize,
        listeners: impl ExactSizeIterator<Item = ListenAddress>,
    ) -> io::Result<Self> {
        let reserved = reserved_places(max_clients, listeners.len());
        let listeners = listeners.zip(reserved).map(|(address, reserved)| ListenerConnections {
            address,
            reserved,
            handshakes: BTreeMap::new(),
            clients: BTreeMap::new(),
            turned_away: TurnedAway::default(),
            acceptor_waits: false,
        });
        Ok(Registry {
            connections: Mutex::new(Connections { listeners: listeners.collect(), next_id: 1 }),
            ended: Condvar::new(),
            acceptor_wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            max_clients,
            max_handshakes: max_handshakes(max_clients),
            cpus,
        })
    }

    /// A panic cannot leave the maps half changed, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_acceptor(&self) {
        // Fails only when the counter is full; it is readable then.
        let _ = rustix::io::write(&self.acceptor_wake, &1u64.to_ne_bytes());
    }

    /// Returns a descriptor that becomes readable when the acceptor has work.
    pub fn acceptor_wake(&self) -> BorrowedFd<'_> {
        self.acceptor_wake.as_fd()
    }

    /// Makes [`acceptor_wake`](Self::acceptor_wake) unreadable again.
    pub fn clear_wake(&self) {
        // Fails only when it is not readable.
        let _ = rustix::io::read(&self.acceptor_wake, &mut [0u8; 8]);
    }

    /// Returns when a listener may accept another connection. If not now, the acceptor is woken once a place is free.
    pub fn when_to_accept(&self, listener: usize, now: Instant) -> Accept {
        let mut connections = self.lock();
        let listener_state = &mut connections.listeners[listener];
        let accept = listener_state.when_to_accept(self.max_handshakes, now);
        listener_state.acceptor_waits = accept != Accept::Now;
        accept
    }

    /// Returns whether a waiting connection can be accepted now. If not, ends the oldest handshake once its turn is
    /// over; its place is free when its thread has ended.
    pub fn make_way(&self, listener: usize, now: Instant) -> bool {
        let mut connections = self.lock();
        let listener_state = &mut connections.listeners[listener];
        if listener_state.handshakes.len() < self.max_handshakes {
            return true;
        }
        if listener_state.when_to_accept(self.max_handshakes, now) == Accept::Now
            && let Some(oldest) = listener_state.handshakes.values_mut().next()
        {
            oldest.end();
            listener_state.turned_away.gave_way += 1;
            failures::note();
        }
        false
    }

    /// Registers a new connection; `None` when its listener has no place for another client.
    pub fn admit(&self, listener: usize, closer: Closer, peer: Peer) -> Option<Registration<'_>> {
        let mut connections = self.lock();
        if !connections.has_client_place(listener, self.max_clients) {
            connections.listeners[listener].turned_away.refused += 1;
            failures::note();
            return None;
        }
        let id = connections.next_id;
        connections.next_id += 1;
        let traffic = Arc::default();
        let connection = ConnectionEntry {
            closer,
            peer,
            connected: Instant::now(),
            since: SystemTime::now(),
            thread: None,
            export: None,
            traffic: Arc::clone(&traffic),
            is_ending: false,
        };
        connections.listeners[listener].handshakes.insert(id, connection);
        Some(Registration { registry: self, listener, id, peer, traffic })
    }

    /// Returns how many each listener has turned away.
    pub fn turned_away(&self) -> Vec<(ListenAddress, TurnedAway)> {
        let connections = self.lock();
        let all = connections.listeners.iter();
        all.map(|listener_state| (listener_state.address.clone(), listener_state.turned_away.clone()))
            .collect()
    }

    pub fn max_clients(&self) -> usize {
        self.max_clients
    }

    /// Ends all connections, which have [`STOP_GRACE`] to finish.
    pub fn close_all(&self) {
        let connections = self.lock();
        connections.all().for_each(|(_, connection)| connection.closer.end_input());
        let waited =
            self.ended.wait_timeout_while(connections, STOP_GRACE, |left| left.all().next().is_some());
        let (connections, _) = waited.unwrap_or_else(PoisonError::into_inner);
        connections.all().for_each(|(_, connection)| connection.closer.close());
    }

    /// Returns all connections, in the order in which they came.
    pub fn list(&self) -> Vec<Client> {
        self.lock().list()
    }

    /// Ends a connection, and waits for that for at most [`KICK_GRACE`].
    pub fn kick(&self, id: u64) -> Kicked {
        let mut connections = self.lock();
        let Some(connection) = connections.connection(id) else { return Kicked::Unknown };
        connection.end();
        let peer = connection.peer;
        tracing::info!(id, %peer, "client kicked");
        let waited =
            self.ended.wait_timeout_while(connections, KICK_GRACE, |left| left.connection(id).is_some());
        let timed_out = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        if timed_out { Kicked::Ending } else { Kicked::Gone }
    }
}

impl Registration<'_> {
    /// Returns the connection's id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the peer.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Returns the counters to which its thread publishes its traffic.
    pub fn traffic(&self) -> &TrafficCounters {
        &self.traffic
    }

    /// Ends the handshake and makes the connection a client; `false` when there is no place for it.
    pub fn become_client(&self, export: &str) -> bool {
        let mut connections = self.registry.lock();
        let has_place = connections.has_client_place(self.listener, self.registry.max_clients);
        let listener_state = &mut connections.listeners[self.listener];
        if has_place && let Some(mut connection) = listener_state.handshakes.remove(&self.id) {
            connection.export = Some(export.to_owned());
            let thread = gettid();
            connection.thread = Some(thread);
            listener_state.clients.insert(self.id, connection);
            connections.shorten_time_slices(self.registry.cpus, thread);
        } else {
            listener_state.turned_away.refused += 1;
            failures::note();
        }
        self.handshake_ended(connections);
        has_place
    }

    /// Counts a connection that ended with `error`, if that ended its handshake.
    pub fn failed(&self, error: &io::Error) {
        let mut connections = self.registry.lock();
        let listener_state = &mut connections.listeners[self.listener];
        if !listener_state.handshakes.contains_key(&self.id) {
            return;
        }
        let turned_away = &mut listener_state.turned_away;
        let inner = error.get_ref();
        if error.kind() == io::ErrorKind::TimedOut {
            turned_away.too_slow += 1;
        } else if inner.is_some_and(|inner| inner.is::<NoTls>()) {
            turned_away.without_tls += 1;
        } else if let Some(why) = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            turned_away.failed_tls += 1;
            turned_away.why = why.to_string();
        } else {
            return;
        }
        failures::note();
    }

    /// Wakes the acceptor if it waits for a place.
    fn handshake_ended(&self, mut connections: MutexGuard<'_, Connections>) {
        let acceptor_waits = std::mem::take(&mut connections.listeners[self.listener].acceptor_waits);
        drop(connections);
        if acceptor_waits {
            self.registry.wake_acceptor();
        }
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let mut connections = self.registry.lock();
        let listener_state = &mut connections.listeners[self.listener];
        listener_state.handshakes.remove(&self.id);
        listener_state.clients.remove(&self.id);
        self.handshake_ended(connections);
        self.registry.ended.notify_all();
    }
}
