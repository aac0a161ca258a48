//! Which connections are admitted, refused and ended, and what is logged, with real sockets and no server.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::{Barrier, mpsc};
use std::thread;

use super::*;

const PEER: Peer = Peer::Unix { pid: 1, uid: 1 };

fn registry(max_clients: usize, listeners: usize) -> Arc<Registry> {
    let address = |_| ListenAddress::Unix("/x".into());
    Arc::new(Registry::new(max_clients, usize::MAX, (0..listeners).map(address)).unwrap())
}

/// Returns a thread's time slice; 0 if the kernel has one slice for all.
fn slice_ns(thread: u32) -> u64 {
    scheduling(thread).unwrap().sched_runtime
}

/// Returns a registry as the control API sees it.
fn clients(registry: &Arc<Registry>) -> Clients {
    Clients(Some(Arc::clone(registry)))
}

/// Returns both ends of a connection.
fn connection() -> (Arc<OwnedFd>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Arc::new(ours.into()), theirs)
}

fn admit(registry: &Registry, listener: usize) -> Option<Registration<'_>> {
    registry.admit(listener, connection().0, PEER)
}

/// Admits as many clients of a listener as there are places for.
fn fill(registry: &Registry, listener: usize) -> Vec<Registration<'_>> {
    let next = || admit(registry, listener).filter(|place| place.become_client("e"));
    std::iter::from_fn(next).collect()
}

#[test]
fn threads_of_more_clients_than_cpus_all_have_short_slices() {
    let registry = Registry::new(8, 2, std::iter::once(ListenAddress::Unix("/x".into()))).unwrap();
    let usual = slice_ns(this_thread());
    let (registry, all_told) = (&registry, &Barrier::new(5));
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..4 {
            let (came, comes) = mpsc::channel();
            scope.spawn(move || {
                let place = admit(registry, 0).unwrap();
                assert!(place.become_client("e"));
                came.send(this_thread()).unwrap();
                all_told.wait();
            });
            threads.push(comes.recv().unwrap());
            let slices: Vec<_> = threads.iter().map(|id| slice_ns(*id)).collect();
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
    assert_eq!(reserved_places(256, 1).collect::<Vec<_>>(), [16]);
    assert_eq!(reserved_places(256, 2).collect::<Vec<_>>(), [16, 16]);
    assert_eq!(reserved_places(256, 4).collect::<Vec<_>>(), [16, 5, 5, 5]);
    assert_eq!(reserved_places(4, 2).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(reserved_places(3, 2).collect::<Vec<_>>(), [0, 0]);
    for max_clients in 1..2000 {
        for listeners in 1..40 {
            assert!(
                reserved_places(max_clients, listeners).sum::<usize>() <= max_clients,
                "{max_clients} {listeners}"
            );
        }
    }
}

#[test]
fn no_listener_can_take_what_is_kept_for_another() {
    let registry = registry(256, 3);
    let reserved: Vec<usize> = reserved_places(256, 3).collect();
    let greedy = fill(&registry, 1);
    assert_eq!(greedy.len(), 256 - reserved[0] - reserved[2]);
    let first = fill(&registry, 0);
    let third = fill(&registry, 2);
    assert_eq!((first.len(), third.len()), (reserved[0], reserved[2]));
    // A free place that is not reserved goes to the next client of any listener.
    drop(greedy);
    assert_eq!(fill(&registry, 2).len(), 256 - reserved[0] - reserved[1] - reserved[2]);
    drop((first, third));
    assert_eq!(fill(&registry, 0).len(), 256 - reserved[1] - reserved[2]);
}

#[test]
fn a_handshake_gives_way_after_its_turn_and_newcomers_wait_until_then() {
    let registry = registry(1000, 2);
    assert_eq!(registry.max_handshakes, 125);
    thread::scope(|scope| {
        let (ours, mut client) = connection();
        let client_place = registry.admit(0, ours, PEER).unwrap();
        assert!(client_place.become_client("e"));
        client.set_nonblocking(true).unwrap();
        let began = Instant::now();
        let mut waiting = Vec::new();
        while registry.make_way(0, began) {
            let (ours, theirs) = connection();
            waiting.push((registry.admit(0, ours, PEER).unwrap(), theirs));
        }
        assert_eq!(waiting.len(), 125);
        // All handshakes are within their turn: none is ended.
        let Accept::NotBefore(Some(turn_ends)) = registry.when_to_accept(0, began) else {
            panic!("there is no room")
        };
        assert!(turn_ends >= began + HANDSHAKE_TURN);
        assert!(waiting.iter().all(|(_, theirs)| theirs.set_nonblocking(true).is_ok()));
        let is_open = |mut theirs: &UnixStream| theirs.read(&mut [0]).is_err();
        assert!(waiting.iter().all(|(_, theirs)| is_open(theirs)));
        assert_eq!(registry.when_to_accept(1, began), Accept::Now, "each listener has its own places");

        // Later the oldest is ended, and no other before its thread has ended.
        let later = turn_ends + HANDSHAKE_TURN;
        assert_eq!(registry.when_to_accept(0, later), Accept::Now);
        assert!(!registry.make_way(0, later) && !registry.make_way(0, later));
        assert_eq!(registry.when_to_accept(0, later), Accept::NotBefore(None));
        assert!(!is_open(&waiting[0].1) && waiting[1..].iter().all(|(_, theirs)| is_open(theirs)));
        registry.clear_wake();
        let (oldest, _) = waiting.remove(0);
        scope.spawn(move || drop(oldest));
        let mut news = [rustix::event::PollFd::new(&registry.wake, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut news, None).unwrap();
        assert!(registry.make_way(0, later));
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    });
}

#[test]
fn those_turned_away_are_counted_by_their_reason() {
    let registry = registry(2, 2);
    let failed = |inner: Box<dyn std::error::Error + Send + Sync>| {
        admit(&registry, 1).unwrap().failed(&io::Error::new(io::ErrorKind::InvalidData, inner));
    };
    failed(Box::new(NoTls));
    failed(Box::new(rustls::Error::NoCertificatesPresented));
    failed("a violation of the protocol".into());
    admit(&registry, 1).unwrap().failed(&io::ErrorKind::TimedOut.into());
    // Clients are not turned away.
    let filled = fill(&registry, 1);
    filled[0].failed(&io::ErrorKind::TimedOut.into());
    assert!(admit(&registry, 1).is_none());
    let turned_away = clients(&registry).turned_away();
    let wanted = TurnedAway {
        // `fill` was refused once.
        refused: 2,
        gave_way: 0,
        too_slow: 1,
        without_tls: 1,
        failed_tls: 1,
        why: "peer sent no certificates".to_owned(),
    };
    assert_eq!((&turned_away[0].1, &turned_away[1].1), (&TurnedAway::default(), &wanted));
}
