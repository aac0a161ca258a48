//! Who is connected, and how many may be.
//!
//! **Clients.** A connection becomes a client when it has chosen an export, not when it connects: so who only
//! connects keeps no client out. Of the server's places for clients, `max_clients`, each listener has some kept
//! for it that clients of others cannot take:
//! - the first listener, which is the socket in the runtime directory, has a sixteenth of all places, one at least;
//! - another sixteenth is divided among the others, one place for each at least;
//! - with fewer than two places for each listener, nothing is kept.
//!
//! **Handshakes.** Each listener has places of its own for these: an eighth of `max_clients`, 64 at least. When all
//! are taken, newcomers wait in the listener's queue, until one is free or the oldest handshake has had
//! [`HANDSHAKE_TURN`]: then that gives way. One that is meant seriously takes milliseconds.
//!
//! **The log.** Clients that are refused and handshakes that are cut off are counted, and one line in
//! [`REPORT_PERIOD`] tells of all of a listener's.
//!
//! **CPUs.** Threads of clients are told to take turns quickly ([`time_slice`]) once there are more of them than CPUs.
//!
//! Lock: `Registry::places`, a leaf; held for a few map operations, a `shutdown(2)`, or as many calls to the scheduler as
//! there are CPUs, never while waiting (a condition variable aside).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{Pid, gettid};

use super::address::ListenAddress;
use super::clients::{Client, Kicked, Peer, TrafficCounters};
use super::socket::Closer;
use super::time_slice;

/// Handshakes in progress at once on a listener, at least.
const MIN_HANDSHAKES: usize = 64;
/// How long a handshake has before it must give way to a newcomer.
const HANDSHAKE_TURN: Duration = Duration::from_secs(1);
/// How long a stopping server lets its connections send their last replies.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// How long who ends a connection waits for its end.
const KICK_GRACE: Duration = Duration::from_secs(1);
/// How often the log tells of connections that were turned away.
const REPORT_PERIOD: Duration = Duration::from_secs(10);

/// The connections that exist.
pub(super) struct Registry {
    places: Mutex<Places>,
    /// Signalled whenever a connection has ended.
    ended: Condvar,
    /// Readable when there is news for who accepts: a free place for a handshake, or something to report.
    news: OwnedFd,
    max_clients: usize,
    max_handshakes: usize,
    /// CPUs that the process may use.
    cpus: usize,
}

/// Protected by the lock.
struct Places {
    listeners: Vec<OfListener>,
    next_id: u64,
}

/// The connections of a listener, by number; numbers grow with time.
struct OfListener {
    address: ListenAddress,
    /// Places for clients that no other listener's can take.
    kept: usize,
    handshakes: BTreeMap<u64, Connection>,
    clients: BTreeMap<u64, Connection>,
    turned_away: TurnedAway,
    /// When the log told of them last.
    reported: Option<Instant>,
    /// Who accepts waits for a free place.
    is_awaited: bool,
}

/// Connections that were ended for others' sake, or for being slow, of which the log has not told yet.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct TurnedAway {
    /// Clients, because all places were taken.
    refused: u64,
    /// Handshakes that gave way.
    gave_way: u64,
    /// Handshakes that did not end in time.
    too_slow: u64,
}

struct Connection {
    closer: Closer,
    peer: Peer,
    connected: Instant,
    since: SystemTime,
    /// Once it is a client: the thread that serves it, and what it chose.
    thread: Option<Pid>,
    export: Option<String>,
    traffic: Arc<TrafficCounters>,
    /// It was told to end.
    is_ending: bool,
}

/// A connection's place, given up on drop.
pub(super) struct Place<'a> {
    registry: &'a Registry,
    listener: usize,
    id: u64,
    peer: Peer,
    traffic: Arc<TrafficCounters>,
}

/// Whether a listener has a place for another handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Yes, or one will give way: to be looked at when somebody comes.
    Now,
    /// Not before one ends, or this moment comes.
    NotBefore(Option<Instant>),
}

/// Places for handshakes that each listener has.
pub(super) fn max_handshakes(max_clients: usize) -> usize {
    (max_clients / 8).max(MIN_HANDSHAKES)
}

/// How many places are kept for each of `listeners` listeners.
fn kept(max_clients: usize, listeners: usize) -> impl Iterator<Item = usize> {
    let sixteenth = if max_clients >= 2 * listeners { max_clients / 16 } else { 0 };
    let least = usize::from(max_clients >= 2 * listeners);
    (0..listeners).map(move |listener| {
        let sharers = if listener == 0 { 1 } else { listeners - 1 };
        (sixteenth / sharers).max(least)
    })
}

impl Registry {
    /// No connections to these listeners, and at most `max_clients` that have chosen an export, to share `cpus`.
    ///
    /// # Errors
    /// The system's, when it has no descriptor to give.
    pub fn new(
        max_clients: usize,
        cpus: usize,
        listeners: impl ExactSizeIterator<Item = ListenAddress>,
    ) -> io::Result<Self> {
        let kept = kept(max_clients, listeners.len());
        let listeners = listeners.zip(kept).map(|(address, kept)| OfListener {
            address,
            kept,
            handshakes: BTreeMap::new(),
            clients: BTreeMap::new(),
            turned_away: TurnedAway::default(),
            reported: None,
            is_awaited: false,
        });
        Ok(Registry {
            places: Mutex::new(Places { listeners: listeners.collect(), next_id: 1 }),
            ended: Condvar::new(),
            news: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            max_clients,
            max_handshakes: max_handshakes(max_clients),
            cpus,
        })
    }

    /// A panic cannot leave the maps half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell_acceptor(&self) {
        // It fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.news, &1u64.to_ne_bytes());
    }

    /// Readable when there is news for who accepts.
    pub fn news(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }

    /// Hears the news, so that it is readable no longer.
    pub fn hear(&self) {
        // It fails when there is none.
        let _ = rustix::io::read(&self.news, &mut [0u8; 8]);
    }

    /// Whether a listener has a place for another handshake; if not, there is news when it has.
    pub fn room(&self, listener: usize, now: Instant) -> Room {
        let mut places = self.lock();
        let of = &mut places.listeners[listener];
        let room = of.room(self.max_handshakes, now);
        of.is_awaited = room != Room::Now;
        room
    }

    /// Makes room for a newcomer who is there: true when it can be accepted, false when the oldest handshake gives
    /// way and has to end first.
    pub fn make_room(&self, listener: usize, now: Instant) -> bool {
        let mut places = self.lock();
        let of = &mut places.listeners[listener];
        if of.handshakes.len() < self.max_handshakes {
            return true;
        }
        if of.room(self.max_handshakes, now) == Room::Now
            && let Some(oldest) = of.handshakes.values_mut().next()
        {
            oldest.end();
            of.turned_away.gave_way += 1;
        }
        false
    }

    /// Gives a new connection a place for its handshake; `None` when there is no place for another client of that
    /// listener.
    pub fn admit(&self, listener: usize, closer: Closer, peer: Peer) -> Option<Place<'_>> {
        let mut places = self.lock();
        if !places.has_client_place(listener, self.max_clients) {
            places.listeners[listener].turned_away.refused += 1;
            return None;
        }
        let id = places.next_id;
        places.next_id += 1;
        let traffic = Arc::default();
        let connection = Connection {
            closer,
            peer,
            connected: Instant::now(),
            since: SystemTime::now(),
            thread: None,
            export: None,
            traffic: Arc::clone(&traffic),
            is_ending: false,
        };
        places.listeners[listener].handshakes.insert(id, connection);
        Some(Place { registry: self, listener, id, peer, traffic })
    }

    /// Tells the log of connections that were turned away. Returns when it is to be told next, if it is.
    pub fn report(&self, now: Instant) -> Option<Instant> {
        let mut places = self.lock();
        let mut next = None;
        for of in &mut places.listeners {
            if of.turned_away == TurnedAway::default() {
                continue;
            }
            match of.reported.map(|reported| reported + REPORT_PERIOD).filter(|due| *due > now) {
                Some(due) => next = next.into_iter().chain([due]).min(),
                None => of.report(now, self.max_clients),
            }
        }
        next
    }

    /// Ends all connections, in peace if they are done within [`STOP_GRACE`].
    pub fn close_all(&self) {
        let places = self.lock();
        places.all().for_each(|(_, connection)| connection.closer.end_input());
        let waited = self.ended.wait_timeout_while(places, STOP_GRACE, |left| left.all().next().is_some());
        let (places, _) = waited.unwrap_or_else(PoisonError::into_inner);
        places.all().for_each(|(_, connection)| connection.closer.close());
    }

    /// All connections, in the order in which they came.
    pub fn list(&self) -> Vec<Client> {
        let places = self.lock();
        let of = |of: &OfListener, (id, connection): (&u64, &Connection)| Client {
            id: *id,
            listener: of.address.clone(),
            peer: connection.peer,
            export: connection.export.clone(),
            since: connection.since,
            traffic: connection.traffic.get(),
        };
        let of_listener = |listener: &OfListener| {
            listener
                .handshakes
                .iter()
                .chain(&listener.clients)
                .map(|entry| of(listener, entry))
                .collect::<Vec<_>>()
        };
        let mut clients: Vec<Client> = places.listeners.iter().flat_map(of_listener).collect();
        clients.sort_by_key(|client| client.id);
        clients
    }

    /// Ends a connection, and waits [`KICK_GRACE`] at most for its end.
    pub fn kick(&self, id: u64) -> Kicked {
        let mut places = self.lock();
        let Some(connection) = places.connection(id) else { return Kicked::Unknown };
        connection.end();
        let peer = connection.peer;
        tracing::info!(id, %peer, "client kicked");
        let waited = self.ended.wait_timeout_while(places, KICK_GRACE, |left| left.connection(id).is_some());
        let timed_out = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        if timed_out { Kicked::Ending } else { Kicked::Gone }
    }
}

impl Places {
    fn all(&self) -> impl Iterator<Item = (&u64, &Connection)> {
        self.listeners.iter().flat_map(|of| of.handshakes.iter().chain(&of.clients))
    }

    fn connection(&mut self, id: u64) -> Option<&mut Connection> {
        let mut maps = self.listeners.iter_mut().flat_map(|of| [&mut of.handshakes, &mut of.clients]);
        maps.find_map(|map| map.get_mut(&id))
    }

    /// Has threads of clients take turns quickly, if there are more than `cpus`: all of them with the first client more
    /// than that, and each `newcomer` after it.
    fn share(&self, cpus: usize, newcomer: Pid) {
        let clients = || self.listeners.iter().flat_map(|of| of.clients.values());
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

    /// Whether there is a place for one more client of a listener: one that is kept for it, or one that is neither
    /// kept nor taken.
    fn has_client_place(&self, listener: usize, max_clients: usize) -> bool {
        let of = &self.listeners[listener];
        let spoken_for: usize = self.listeners.iter().map(|of| of.clients.len().max(of.kept)).sum();
        of.clients.len() < of.kept || spoken_for < max_clients
    }
}

impl OfListener {
    fn room(&self, max_handshakes: usize, now: Instant) -> Room {
        if self.handshakes.len() < max_handshakes {
            return Room::Now;
        }
        match self.handshakes.values().next() {
            Some(oldest) if !oldest.is_ending => match oldest.connected + HANDSHAKE_TURN {
                turn_ends if turn_ends <= now => Room::Now,
                turn_ends => Room::NotBefore(Some(turn_ends)),
            },
            _ => Room::NotBefore(None),
        }
    }

    fn report(&mut self, now: Instant, max_clients: usize) {
        let TurnedAway { refused, gave_way, too_slow } = std::mem::take(&mut self.turned_away);
        self.reported = Some(now);
        let listener = &self.address;
        if refused > 0 {
            tracing::warn!(
                refused,
                %listener,
                "clients were refused: all places are taken (max-connections is {max_clients}; uzram clients lists them)"
            );
        }
        if gave_way > 0 {
            tracing::warn!(gave_way, %listener, "handshakes that took over a second gave way to new connections");
        }
        if too_slow > 0 {
            tracing::info!(too_slow, %listener, "handshakes did not end in time and were cut off");
        }
    }
}

impl Connection {
    fn end(&mut self) {
        self.is_ending = true;
        self.closer.close();
    }
}

impl Place<'_> {
    /// The connection's number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Who it is.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Where its thread shows what it asked for.
    pub fn traffic(&self) -> &TrafficCounters {
        &self.traffic
    }

    /// The handshake is over: makes the connection a client. False when there is no place for it.
    pub fn become_client(&self, export: &str) -> bool {
        let mut places = self.registry.lock();
        let has_place = places.has_client_place(self.listener, self.registry.max_clients);
        let of = &mut places.listeners[self.listener];
        if has_place && let Some(mut connection) = of.handshakes.remove(&self.id) {
            connection.export = Some(export.to_owned());
            let thread = gettid();
            connection.thread = Some(thread);
            of.clients.insert(self.id, connection);
            places.share(self.registry.cpus, thread);
        } else {
            of.turned_away.refused += 1;
        }
        self.handshake_ended(places);
        has_place
    }

    /// Notes that the connection has timed out: if it is no client yet, its handshake was too slow.
    pub fn timed_out(&self) {
        let mut places = self.registry.lock();
        let of = &mut places.listeners[self.listener];
        of.turned_away.too_slow += u64::from(of.handshakes.contains_key(&self.id));
        self.handshake_ended(places);
    }

    /// Tells who accepts, if that is news.
    fn handshake_ended(&self, mut places: MutexGuard<'_, Places>) {
        let of = &mut places.listeners[self.listener];
        let is_news = std::mem::take(&mut of.is_awaited) || of.turned_away != TurnedAway::default();
        drop(places);
        if is_news {
            self.registry.tell_acceptor();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut places = self.registry.lock();
        let of = &mut places.listeners[self.listener];
        of.handshakes.remove(&self.id);
        of.clients.remove(&self.id);
        self.handshake_ended(places);
        self.registry.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use super::super::socket::Socket;
    use super::*;

    const PEER: Peer = Peer::Unix { pid: 1, uid: 1 };

    fn registry(max_clients: usize, listeners: usize) -> Registry {
        let address = |_| ListenAddress::Unix("/x".into());
        Registry::new(max_clients, usize::MAX, (0..listeners).map(address)).unwrap()
    }

    /// A connection's closer, and its other end.
    fn connection() -> (Closer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Socket::new(ours.into()).closer(), theirs)
    }

    fn admit(registry: &Registry, listener: usize) -> Option<Place<'_>> {
        registry.admit(listener, connection().0, PEER)
    }

    /// As many clients of a listener as there are places for.
    fn fill(registry: &Registry, listener: usize) -> Vec<Place<'_>> {
        let next = || admit(registry, listener).filter(|place| place.become_client("e"));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn clients_are_counted_when_they_are_ready() {
        let registry = registry(2, 1);
        let mut places: Vec<_> = (0..5).map(|_| admit(&registry, 0).unwrap()).collect();
        assert!(places[4].become_client("e") && places[0].become_client("e"));
        assert!(!places[1].become_client("e"), "there are two already");
        assert!(admit(&registry, 0).is_none());
        places.remove(4);
        let sixth = admit(&registry, 0).unwrap();
        assert!(sixth.become_client("e"));
        assert!(admit(&registry, 0).is_none());
    }

    #[test]
    fn threads_of_more_clients_than_cpus_all_have_short_slices() {
        let registry = Registry::new(8, 2, std::iter::once(ListenAddress::Unix("/x".into()))).unwrap();
        let usual = time_slice::slice_ns(gettid()).unwrap();
        let (registry, all_told) = (&registry, &Barrier::new(5));
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for _ in 0..4 {
                let (came, comes) = mpsc::channel();
                scope.spawn(move || {
                    let place = admit(registry, 0).unwrap();
                    assert!(place.become_client("e"));
                    came.send(gettid()).unwrap();
                    all_told.wait();
                });
                threads.push(comes.recv().unwrap());
                let slices: Vec<_> = threads.iter().map(|id| time_slice::slice_ns(*id).unwrap()).collect();
                let are_short = slices.iter().all(|slice| *slice < usual);
                let are_usual = slices.iter().all(|slice| *slice == usual);
                let has_slices = usual != 0;
                assert!(if threads.len() > 2 && has_slices { are_short } else { are_usual }, "{slices:?}");
            }
            all_told.wait();
        });
    }

    #[test]
    fn places_are_kept_for_each_listener_and_more_for_the_first() {
        assert_eq!(kept(256, 1).collect::<Vec<_>>(), [16]);
        assert_eq!(kept(256, 2).collect::<Vec<_>>(), [16, 16]);
        assert_eq!(kept(256, 4).collect::<Vec<_>>(), [16, 5, 5, 5]);
        assert_eq!(kept(4, 2).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(kept(3, 2).collect::<Vec<_>>(), [0, 0]);
        for max_clients in 1..2000 {
            for listeners in 1..40 {
                assert!(
                    kept(max_clients, listeners).sum::<usize>() <= max_clients,
                    "{max_clients} {listeners}"
                );
            }
        }
    }

    #[test]
    fn no_listener_can_take_what_is_kept_for_another() {
        let registry = registry(256, 3);
        let kept: Vec<usize> = kept(256, 3).collect();
        let greedy = fill(&registry, 1);
        assert_eq!(greedy.len(), 256 - kept[0] - kept[2]);
        let first = fill(&registry, 0);
        let third = fill(&registry, 2);
        assert_eq!((first.len(), third.len()), (kept[0], kept[2]));
        // What a greedy one gives up goes to whoever comes first.
        drop(greedy);
        assert_eq!(fill(&registry, 2).len(), 256 - kept[0] - kept[1] - kept[2]);
        drop((first, third));
        assert_eq!(fill(&registry, 0).len(), 256 - kept[1] - kept[2]);
    }

    #[test]
    fn a_handshake_gives_way_after_its_turn_and_newcomers_wait_until_then() {
        let registry = registry(1000, 2);
        assert_eq!(registry.max_handshakes, 125);
        thread::scope(|scope| {
            let (closer, mut client) = connection();
            let client_place = registry.admit(0, closer, PEER).unwrap();
            assert!(client_place.become_client("e"));
            client.set_nonblocking(true).unwrap();
            let began = Instant::now();
            let mut waiting = Vec::new();
            while registry.make_room(0, began) {
                let (closer, theirs) = connection();
                waiting.push((registry.admit(0, closer, PEER).unwrap(), theirs));
            }
            assert_eq!(waiting.len(), 125);
            // All of them have their turn: nobody was told to go.
            let Room::NotBefore(Some(turn_ends)) = registry.room(0, began) else {
                panic!("there is no room")
            };
            assert!(turn_ends >= began + HANDSHAKE_TURN);
            assert!(waiting.iter().all(|(_, theirs)| theirs.set_nonblocking(true).is_ok()));
            let is_open = |mut theirs: &UnixStream| theirs.read(&mut [0]).is_err();
            assert!(waiting.iter().all(|(_, theirs)| is_open(theirs)));
            assert_eq!(registry.room(1, began), Room::Now, "each listener has its own places");

            // Later the oldest is told to go, and nobody else until it has.
            let later = turn_ends + HANDSHAKE_TURN;
            assert_eq!(registry.room(0, later), Room::Now);
            assert!(!registry.make_room(0, later) && !registry.make_room(0, later));
            assert_eq!(registry.room(0, later), Room::NotBefore(None));
            assert!(!is_open(&waiting[0].1) && waiting[1..].iter().all(|(_, theirs)| is_open(theirs)));
            registry.hear();
            let (oldest, _) = waiting.remove(0);
            scope.spawn(move || drop(oldest));
            let mut news = [rustix::event::PollFd::new(&registry.news, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut news, None).unwrap();
            assert!(registry.make_room(0, later));
            assert_eq!(client.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        });
    }

    #[test]
    fn the_log_is_told_at_once_and_then_now_and_then() {
        let registry = registry(1, 1);
        let _client = fill(&registry, 0);
        let now = Instant::now();
        // `fill` was refused once.
        assert_eq!(registry.report(now), None);
        assert_eq!(registry.report(now), None, "there is nothing to tell");
        assert!(admit(&registry, 0).is_none() && admit(&registry, 0).is_none());
        assert_eq!(registry.lock().listeners[0].turned_away.refused, 2);
        assert_eq!(registry.report(now), Some(now + REPORT_PERIOD));
        assert_eq!(registry.report(now + REPORT_PERIOD), None);
        assert_eq!(registry.lock().listeners[0].turned_away.refused, 0);
    }

    #[test]
    fn clients_are_listed_and_kicked() {
        let registry = registry(10, 2);
        assert_eq!(registry.kick(1), Kicked::Unknown);
        let (closer, mut theirs) = connection();
        let place = registry.admit(1, closer, PEER).unwrap();
        assert_eq!(registry.list()[0].export, None);
        assert!(place.become_client("zram0"));
        let other = admit(&registry, 0).unwrap();
        let listed: Vec<_> = registry.list().into_iter().map(|client| (client.id, client.export)).collect();
        assert_eq!(listed, [(place.id(), Some("zram0".to_owned())), (other.id(), None)]);
        let id = place.id();
        thread::scope(|scope| {
            let kick = scope.spawn(|| registry.kick(id));
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
            drop(place);
            assert_eq!(kick.join().unwrap(), Kicked::Gone);
        });
        // One whose thread is busy.
        assert_eq!(registry.kick(other.id()), Kicked::Ending);
        assert_eq!(registry.list().len(), 1);
    }
}
