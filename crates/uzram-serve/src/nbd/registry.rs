//! The connections of a server, and the limits on their number: docs/internals/nbd.md has the rules for
//! clients and handshakes, and says why threads get short time slices. Those turned away are counted for each
//! listener, and noted as failures ([`uzram::failures`]).
//!
//! Lock: `Registry::connections`, a leaf; held for a few map operations, a `shutdown(2)`, a list of all, or
//! as many calls to the scheduler as there are CPUs, never while waiting (a condition variable aside).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{Shutdown, shutdown};
use rustix::thread::gettid;
use uzram::failures;
use uzram::sync::{Arc, Condvar, Mutex, MutexGuard};
use uzram::thread::{scheduling, set_scheduling};

use super::address::ListenAddress;
use super::clients::{Client, Kicked, Peer, Traffic, TrafficCounters, TurnedAway};
use super::handshake::NoTls;

/// The least places for handshakes of a listener.
const MIN_HANDSHAKES: usize = 64;
/// How long a handshake may take before it must give way to a new connection.
const HANDSHAKE_TURN: Duration = Duration::from_secs(1);
/// How long a stopping server lets its connections send their last replies.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// How long `kick` waits for a connection to end.
const KICK_GRACE: Duration = Duration::from_secs(1);
/// The shortest time slice that the kernel accepts (`sched_setattr(2)`).
const SLICE_NS: u64 = 100_000;

pub(super) struct Registry {
    connections: Mutex<Connections>,
    /// Signalled whenever a connection has ended.
    ended: Condvar,
    pub stopping: Arc<AtomicBool>,
    /// Readable when the acceptor has work: a place for a handshake is free, or the server stops.
    pub wake: OwnedFd,
    max_clients: usize,
    max_handshakes: usize,
    cpus: usize,
}

/// All connections; protected by the registry's lock.
struct Connections {
    listeners: Vec<ListenerState>,
    entries: BTreeMap<u64, Entry>,
    next_id: u64,
}

struct ListenerState {
    address: ListenAddress,
    /// Places that clients of other listeners cannot take.
    reserved: usize,
    turned_away: TurnedAway,
    acceptor_waits: bool,
}

struct Entry {
    listener: usize,
    socket: Arc<OwnedFd>,
    peer: Peer,
    connected: Instant,
    since: SystemTime,
    /// The export that it chose and the thread that serves it, once it is a client.
    client: Option<(String, u32)>,
    traffic: Arc<TrafficCounters>,
    /// It was closed, and its thread has not ended yet.
    is_ending: bool,
}

/// A registered connection; dropping this removes it.
pub(super) struct Registration<'a> {
    registry: &'a Registry,
    pub id: u64,
    listener: usize,
    pub peer: Peer,
    pub traffic: Arc<TrafficCounters>,
}

/// When a listener may accept another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accept {
    /// Now: a place is free, or the oldest handshake can be ended.
    Now,
    /// Not before a handshake ends, or this time.
    NotBefore(Option<Instant>),
}

pub(super) fn max_handshakes(max_clients: usize) -> usize {
    (max_clients / 8).max(MIN_HANDSHAKES)
}

fn reserved_places(max_clients: usize, listeners: usize) -> impl Iterator<Item = usize> {
    let (sixteenth, least) = if max_clients >= 2 * listeners { (max_clients / 16, 1) } else { (0, 0) };
    (0..listeners).map(move |listener| {
        let sharers = if listener == 0 { 1 } else { listeners - 1 };
        (sixteenth / sharers).max(least)
    })
}

/// Gives a thread of this process a short time slice. Its policy and niceness stay as they are; a thread with
/// a real-time policy has no slice, and nothing is changed.
fn shorten_time_slice(thread: u32) -> io::Result<()> {
    let mut attr = scheduling(thread)?;
    if ![libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&attr.sched_policy.cast_signed()) {
        return Ok(());
    }
    attr.sched_runtime = SLICE_NS;
    set_scheduling(thread, &attr)
}

fn this_thread() -> u32 {
    gettid().as_raw_nonzero().get().unsigned_abs()
}

impl Connections {
    /// Returns the clients or the handshakes of a listener, in the order in which they came.
    fn of(&mut self, listener: usize, clients: bool) -> impl Iterator<Item = &mut Entry> {
        let is_of = move |entry: &&mut Entry| entry.listener == listener && entry.client.is_some() == clients;
        self.entries.values_mut().filter(is_of)
    }

    fn when_to_accept(&mut self, listener: usize, max_handshakes: usize, now: Instant) -> Accept {
        if self.of(listener, false).count() < max_handshakes {
            return Accept::Now;
        }
        match self.of(listener, false).next() {
            Some(oldest) if !oldest.is_ending => match oldest.connected + HANDSHAKE_TURN {
                turn_ends if turn_ends <= now => Accept::Now,
                turn_ends => Accept::NotBefore(Some(turn_ends)),
            },
            _ => Accept::NotBefore(None),
        }
    }

    /// Returns whether there is a place for one more client of a listener: one of its reserved places, or one
    /// that is neither reserved nor taken. Counts a refusal if not.
    fn has_client_place(&mut self, listener: usize, max_clients: usize) -> bool {
        let mut counts = vec![0; self.listeners.len()];
        let clients = self.entries.values().filter(|entry| entry.client.is_some());
        clients.for_each(|client| counts[client.listener] += 1);
        let spoken_for = self.listeners.iter().zip(&counts).map(|(state, count)| state.reserved.max(*count));
        if counts[listener] < self.listeners[listener].reserved || spoken_for.sum::<usize>() < max_clients {
            return true;
        }
        self.listeners[listener].turned_away.refused += 1;
        failures::note();
        false
    }

    /// Shortens the time slices of clients' threads if there are more of them than `cpus`: of all threads
    /// when the first surplus client comes, then of each `newcomer`.
    fn shorten_time_slices(&self, cpus: usize, newcomer: u32) {
        let clients = self.entries.values().filter_map(|entry| entry.client.as_ref());
        let threads: Vec<u32> = clients.map(|(_, thread)| *thread).collect();
        let threads = match threads.len().checked_sub(cpus) {
            None | Some(0) => return,
            Some(1) => threads,
            Some(_) => vec![newcomer],
        };
        for thread in threads {
            if let Err(error) = shorten_time_slice(thread) {
                tracing::debug!(%error, "a thread keeps its usual time slice");
            }
        }
    }
}

impl Entry {
    fn end(&mut self) {
        self.is_ending = true;
        self.shut(Shutdown::Both);
    }

    fn shut(&self, how: Shutdown) {
        // Fails only when the peer has disconnected already.
        let _ = shutdown(&self.socket, how);
    }
}

impl Registry {
    /// Creates an empty registry for at most `max_clients` clients, which share `cpus`.
    pub fn new(
        max_clients: usize,
        cpus: usize,
        listeners: impl ExactSizeIterator<Item = ListenAddress>,
    ) -> io::Result<Self> {
        let reserved = reserved_places(max_clients, listeners.len());
        let listeners = listeners.zip(reserved).map(|(address, reserved)| ListenerState {
            address,
            reserved,
            turned_away: TurnedAway::default(),
            acceptor_waits: false,
        });
        let connections =
            Connections { listeners: listeners.collect(), entries: BTreeMap::new(), next_id: 1 };
        Ok(Registry {
            connections: Mutex::unordered(connections),
            ended: Condvar::new(),
            stopping: Arc::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            max_clients,
            max_handshakes: max_handshakes(max_clients),
            cpus,
        })
    }

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.wake_acceptor();
    }

    fn wake_acceptor(&self) {
        // Fails only when the counter is full; it is readable then.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub fn clear_wake(&self) {
        // Fails only when it is not readable.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    /// Returns when a listener may accept another connection. If not now, the acceptor is woken once a place
    /// is free.
    pub fn when_to_accept(&self, listener: usize, now: Instant) -> Accept {
        let mut connections = self.connections.lock();
        let accept = connections.when_to_accept(listener, self.max_handshakes, now);
        connections.listeners[listener].acceptor_waits = accept != Accept::Now;
        accept
    }

    /// Returns whether a waiting connection can be accepted now. If not, ends the oldest handshake once its
    /// turn is over; its place is free when its thread has ended.
    pub fn make_way(&self, listener: usize, now: Instant) -> bool {
        let mut connections = self.connections.lock();
        if connections.of(listener, false).count() < self.max_handshakes {
            return true;
        }
        if connections.when_to_accept(listener, self.max_handshakes, now) == Accept::Now {
            connections.of(listener, false).take(1).for_each(Entry::end);
            connections.listeners[listener].turned_away.gave_way += 1;
            failures::note();
        }
        false
    }

    /// Registers a new connection; `None` when its listener has no place for another client.
    pub fn admit(&self, listener: usize, socket: Arc<OwnedFd>, peer: Peer) -> Option<Registration<'_>> {
        let mut connections = self.connections.lock();
        if !connections.has_client_place(listener, self.max_clients) {
            return None;
        }
        let (id, traffic) = (connections.next_id, Arc::<TrafficCounters>::default());
        connections.next_id += 1;
        let entry = Entry {
            listener,
            socket,
            peer,
            connected: Instant::now(),
            since: SystemTime::now(),
            client: None,
            traffic: Arc::clone(&traffic),
            is_ending: false,
        };
        connections.entries.insert(id, entry);
        Some(Registration { registry: self, id, listener, peer, traffic })
    }

    /// Ends all connections, which have [`STOP_GRACE`] to finish.
    pub fn close_all(&self) {
        let connections = self.connections.lock();
        // The bytes that have arrived are still read.
        connections.entries.values().for_each(|entry| entry.shut(Shutdown::Read));
        let connections =
            connections.wait_while_for(&self.ended, STOP_GRACE, |left| !left.entries.is_empty());
        connections.entries.values().for_each(|entry| entry.shut(Shutdown::Both));
    }
}

impl Registration<'_> {
    /// Ends the handshake and makes the connection a client; `false` when there is no place for it.
    pub fn become_client(&self, export: &str) -> bool {
        let mut connections = self.registry.connections.lock();
        let has_place = connections.has_client_place(self.listener, self.registry.max_clients);
        if has_place && let Some(entry) = connections.entries.get_mut(&self.id) {
            let thread = this_thread();
            entry.client = Some((export.to_owned(), thread));
            connections.shorten_time_slices(self.registry.cpus, thread);
        }
        self.handshake_ended(connections);
        has_place
    }

    /// Counts a connection that ended with `error`, if that ended its handshake.
    pub fn failed(&self, error: &io::Error) {
        let mut connections = self.registry.connections.lock();
        if connections.entries.get(&self.id).is_none_or(|entry| entry.client.is_some()) {
            return;
        }
        let turned_away = &mut connections.listeners[self.listener].turned_away;
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
        let mut connections = self.registry.connections.lock();
        connections.entries.remove(&self.id);
        self.handshake_ended(connections);
        self.registry.ended.notify_all();
    }
}

/// The connections of a server, for the control API; empty by default. Can be kept after the server has
/// stopped.
#[derive(Clone, Default)]
pub struct Clients(pub(super) Option<Arc<Registry>>);

impl Clients {
    /// Returns all connections in the order in which they came, including those that have not chosen an
    /// export yet.
    pub fn list(&self) -> Vec<Client> {
        let Some(registry) = &self.0 else { return Vec::new() };
        let connections = registry.connections.lock();
        let client = |(id, entry): (&u64, &Entry)| {
            let Traffic { requests, read_bytes, written_bytes } = entry.traffic.get();
            let (pid, uid) = match entry.peer {
                Peer::Unix { pid, uid } => (Some(pid), Some(uid)),
                Peer::Tcp(_) => (None, None),
            };
            Client {
                id: *id,
                listener: connections.listeners[entry.listener].address.to_string(),
                peer: entry.peer.to_string(),
                pid,
                uid,
                export: entry.client.as_ref().map(|(export, _)| export.clone()),
                // A clock before 1970 is not set.
                connected_at_s: entry.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
                requests,
                read_bytes,
                written_bytes,
            }
        };
        connections.entries.iter().map(client).collect()
    }

    /// Returns how many clients and connections each listener has turned away.
    pub fn turned_away(&self) -> Vec<(ListenAddress, TurnedAway)> {
        let Some(registry) = &self.0 else { return Vec::new() };
        let connections = registry.connections.lock();
        let of = |state: &ListenerState| (state.address.clone(), state.turned_away.clone());
        connections.listeners.iter().map(of).collect()
    }

    /// Returns the most clients that are served at once.
    pub fn max_clients(&self) -> usize {
        self.0.as_ref().map_or(0, |registry| registry.max_clients)
    }

    /// Ends a connection, and waits a moment for its end. Replies in flight may be lost.
    pub fn kick(&self, id: u64) -> Kicked {
        let Some(registry) = &self.0 else { return Kicked::Unknown };
        let mut connections = registry.connections.lock();
        let Some(entry) = connections.entries.get_mut(&id) else { return Kicked::Unknown };
        entry.end();
        tracing::info!(id, peer = %entry.peer, "client kicked");
        let is_there = |left: &mut Connections| left.entries.contains_key(&id);
        let connections = connections.wait_while_for(&registry.ended, KICK_GRACE, is_there);
        if connections.entries.contains_key(&id) { Kicked::Ending } else { Kicked::Gone }
    }
}

#[cfg(test)]
mod tests;
