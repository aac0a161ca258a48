//! Requests in flight, as the slab caches of the process show them.
//!
//! One test function: every server of the process has a cache of that name.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{ALL_HEADERS, TestServer, cmd, request_bytes};
use uzram::slab::{self, CacheInfo, Stat};

fn info() -> CacheInfo {
    let mut caches = slab::caches();
    caches.retain(|cache| cache.name == "nbd_request");
    assert_eq!(caches.len(), 1);
    caches.remove(0)
}

fn wait_for(active_objs: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while info().active_objs != active_objs {
        assert!(Instant::now() < deadline, "never {active_objs}: {:?}", info());
        thread::sleep(Duration::from_millis(2));
    }
}

fn sum(info: &CacheInfo, stat: Stat) -> u64 {
    info.stats.iter().map(|cpu| cpu[stat as usize]).sum()
}

#[test]
fn a_request_is_in_flight_until_it_is_answered() {
    let server = TestServer::new("16M");
    let mut clients: Vec<_> = (0..5).map(|_| server.ready(false)).collect();
    wait_for(0);
    // Half of a write each, twice: no more than one of a client is in flight.
    for client in &mut clients {
        client.send(&request_bytes(0, cmd::WRITE, 1, 0, 8192));
        client.send(&[1; 4096]);
    }
    wait_for(5);
    for client in &mut clients {
        client.send(&[2; 4096]);
        client.send(&request_bytes(0, cmd::WRITE, 2, 0, 8192));
        assert_eq!(client.take::<16>()[4..], [&[0; 4][..], &1u64.to_be_bytes()].concat());
    }
    wait_for(5);
    // Those who leave within a request take it with them.
    clients.truncate(2);
    wait_for(2);
    drop(clients);
    wait_for(0);

    let (before, mut requests) = (info(), 0);
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        for page in 0..200 {
            assert_eq!(client.write(page * 4096, &[page as u8; 4096]).error, 0);
            assert_eq!(client.read(0, page * 4096, 4096).data(), [page as u8; 4096]);
            // One that is refused has been in flight, too.
            assert_ne!(client.call(0, cmd::FLUSH, 4096, 0, &[]).error, 0);
            requests += 3;
        }
    }
    wait_for(0);
    let after = info();
    // Nearly all are found in a sheaf and go back into one. What is moved from a sheaf to the next is
    // not counted there.
    for stat in [Stat::AllocPcs, Stat::FreePcs] {
        let counted = sum(&after, stat) - sum(&before, stat);
        assert!(counted <= requests && counted > requests * 9 / 10, "{stat:?}: {counted} of {requests}");
    }
}
