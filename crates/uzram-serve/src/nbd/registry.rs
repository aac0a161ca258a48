//! Who is connected, and how many may be.
//!
//! A client takes one of the server's places when it has chosen an export, not when it connects: so
//! who only connects cannot keep clients out. Handshakes in progress have places of their own. When
//! these are all taken, the oldest handshake gives way to the newcomer: one that is meant seriously
//! takes milliseconds, and to be the oldest it would have to be overtaken by [`MAX_HANDSHAKES`]
//! others in that time.
//!
//! Lock: `Registry::places`, a leaf; held for a map operation or a `shutdown(2)` each, never while
//! waiting (a condition variable aside).

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::socket::Closer;

/// Handshakes in progress at once.
const MAX_HANDSHAKES: usize = 64;
/// How long a newcomer waits for the oldest handshake to give way. Its thread has only to notice, so
/// this is for a machine that is too busy to let it.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a stopping server lets its connections send their last replies.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// The connections that exist.
pub(super) struct Registry {
    places: Mutex<Places>,
    /// Signalled whenever a connection has ended.
    ended: Condvar,
    max_clients: usize,
}

/// Connections by number; numbers grow with time.
#[derive(Default)]
struct Places {
    handshakes: BTreeMap<u64, Closer>,
    clients: BTreeMap<u64, Closer>,
}

impl Places {
    fn all(&self) -> impl Iterator<Item = &Closer> {
        self.handshakes.values().chain(self.clients.values())
    }
}

/// A connection's place, given up on drop.
pub(super) struct Place<'a> {
    registry: &'a Registry,
    id: u64,
}

impl Registry {
    /// No connections, and at most `max_clients` that have chosen an export.
    pub fn new(max_clients: usize) -> Self {
        Registry { places: Mutex::default(), ended: Condvar::new(), max_clients }
    }

    /// A panic cannot leave the maps half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a new connection a place for its handshake; `None` when there are as many clients as
    /// there may be. Later connections have greater numbers.
    pub fn admit(&self, id: u64, closer: Closer) -> Option<Place<'_>> {
        let mut places = self.lock();
        if places.clients.len() >= self.max_clients {
            return None;
        }
        if places.handshakes.len() >= MAX_HANDSHAKES {
            if let Some((oldest, closer)) = places.handshakes.first_key_value() {
                tracing::debug!(id = oldest, "the oldest handshake gives way to a new connection");
                closer.close();
            }
            let full = |places: &mut Places| places.handshakes.len() >= MAX_HANDSHAKES;
            let waited = self.ended.wait_timeout_while(places, EVICTION_TIMEOUT, full);
            let (freed, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return None;
            }
            places = freed;
        }
        places.handshakes.insert(id, closer);
        Some(Place { registry: self, id })
    }

    /// Ends all connections, in peace if they are done within [`STOP_GRACE`].
    pub fn close_all(&self) {
        let places = self.lock();
        places.all().for_each(Closer::end_input);
        let waited = self.ended.wait_timeout_while(places, STOP_GRACE, |left| left.all().next().is_some());
        let (places, _) = waited.unwrap_or_else(PoisonError::into_inner);
        places.all().for_each(Closer::close);
    }
}

impl Place<'_> {
    /// The handshake is over: makes the connection a client. False when there are as many as there
    /// may be.
    pub fn become_client(&self) -> bool {
        let mut places = self.registry.lock();
        if places.clients.len() >= self.registry.max_clients {
            return false;
        }
        if let Some(closer) = places.handshakes.remove(&self.id) {
            places.clients.insert(self.id, closer);
        }
        true
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut places = self.registry.lock();
        places.handshakes.remove(&self.id);
        places.clients.remove(&self.id);
        drop(places);
        self.registry.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::super::socket::Socket;
    use super::*;

    /// A connection's closer, and its other end.
    fn connection() -> (Closer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Socket::new(ours.into()).closer(), theirs)
    }

    #[test]
    fn clients_are_counted_when_they_are_ready() {
        let registry = Registry::new(2);
        let mut places: Vec<_> = (0..5).map(|id| registry.admit(id, connection().0).unwrap()).collect();
        assert!(places[4].become_client() && places[0].become_client());
        assert!(!places[1].become_client(), "there are two already");
        assert!(registry.admit(5, connection().0).is_none());
        places.remove(4);
        let sixth = registry.admit(6, connection().0).unwrap();
        assert!(sixth.become_client());
        assert!(registry.admit(7, connection().0).is_none());
    }

    #[test]
    fn the_oldest_handshake_gives_way() {
        let registry = Registry::new(1000);
        thread::scope(|scope| {
            let (closer, mut client) = connection();
            let client_place = registry.admit(0, closer).unwrap();
            assert!(client_place.become_client());
            client.set_nonblocking(true).unwrap();
            for id in 1..=3 * MAX_HANDSHAKES as u64 {
                let (closer, mut waiting) = connection();
                let place = registry.admit(id, closer).unwrap();
                assert!(registry.lock().handshakes.len() <= MAX_HANDSHAKES);
                // As a connection's thread: it goes when its socket has ended.
                scope.spawn(move || {
                    assert_eq!(waiting.read(&mut [0]).unwrap(), 0);
                    drop(place);
                });
            }
            // The first are gone, the last are here, and the client was left alone.
            let first = *registry.lock().handshakes.first_key_value().unwrap().0;
            assert!(first > 2 * MAX_HANDSHAKES as u64);
            assert_eq!(client.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
            drop(client_place);
            registry.close_all();
        });
    }

    #[test]
    fn who_does_not_give_way_keeps_newcomers_out() {
        let registry = Registry::new(1000);
        let _stuck: Vec<_> =
            (0..MAX_HANDSHAKES as u64).map(|id| registry.admit(id, connection().0).unwrap()).collect();
        assert!(registry.admit(1000, connection().0).is_none());
    }
}
