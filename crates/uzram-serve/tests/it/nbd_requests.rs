//! Requests that arrive in pieces, are refused, or end with their client, and their counts.

use crate::common::{ALL_HEADERS, TestServer, cmd, eventually, request_bytes};
use uzram_serve::nbd::Traffic;

fn traffic(server: &TestServer) -> Vec<Traffic> {
    server.clients.list().into_iter().map(|client| client.traffic).collect()
}

#[test]
fn half_a_write_waits_for_its_other_half_and_leaves_with_its_client() {
    let server = TestServer::new("16M");
    let mut clients: Vec<_> = (0..5).map(|_| server.ready(false)).collect();
    let all_have = |count: usize, requests: u64| {
        eventually(|| {
            let traffic = traffic(&server);
            traffic.len() == count && traffic.iter().all(|traffic| traffic.requests == requests)
        });
    };
    all_have(5, 0);
    for client in &mut clients {
        client.send(&request_bytes(0, cmd::WRITE, 1, 0, 8192));
        client.send(&[1; 4096]);
    }
    all_have(5, 1);
    for client in &mut clients {
        client.send(&[2; 4096]);
        client.send(&request_bytes(0, cmd::WRITE, 2, 0, 8192));
        assert_eq!(client.take::<16>()[4..], [&[0; 4][..], &1u64.to_be_bytes()].concat());
    }
    all_have(5, 2);
    clients.truncate(2);
    all_have(2, 2);
    drop(clients);
    all_have(0, 0);
    let mut client = server.ready(true);
    assert_eq!(client.read(0, 0, 8192).data(), [[1; 4096], [2; 4096]].concat());
}

#[test]
fn every_request_is_counted_refused_ones_too() {
    let server = TestServer::new("16M");
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        for page in 0..200 {
            assert_eq!(client.write(page * 4096, &[page as u8; 4096]).error, 0);
            assert_eq!(client.read(0, page * 4096, 4096).data(), [page as u8; 4096]);
            assert_ne!(client.call(0, cmd::FLUSH, 4096, 0, &[]).error, 0);
        }
        let expected = Traffic { requests: 600, read_bytes: 200 * 4096, written_bytes: 200 * 4096 };
        eventually(|| traffic(&server).contains(&expected));
    }
}
