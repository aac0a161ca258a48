//! The server's life cycle: its socket file, and how it stops.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use crate::common::{Client, Headers, TestServer, cmd, device};
use uzram::ErrorKind;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::command_flags;
use uzram_serve::nbd::{Server, ServerConfig};

#[test]
fn a_path_that_cannot_be_used_is_refused_in_words() {
    let server = TestServer::new("1M");
    let bind = |path: &std::path::Path| {
        Server::bind(ServerConfig::new(path), Exports::new([device("1M")])).err().expect("refused")
    };
    let error = bind(&server.path);
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    server.ready(true);

    let file = server.directory().join("file");
    std::fs::write(&file, "kept").unwrap();
    assert_eq!(bind(&file).kind(), ErrorKind::Invalid);
    assert_eq!(std::fs::read(&file).unwrap(), b"kept");

    let error = bind(&server.directory().join("x".repeat(120)));
    assert!(error.to_string().contains("107 bytes"), "{error}");
    assert_eq!(bind(&server.directory().join("none/nbd.sock")).kind(), ErrorKind::Io);
}

#[test]
fn a_stale_socket_is_replaced_and_a_successors_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    drop(UnixListener::bind(&path).unwrap());
    let server =
        Server::bind(ServerConfig::new(&path), Exports::new([device("1M")])).unwrap().spawn().unwrap();
    Client::connect(&path).go(true);
    std::fs::remove_file(&path).unwrap();
    let _successor = UnixListener::bind(&path).unwrap();
    drop(server);
    assert!(path.exists());
}

#[test]
fn stopping_an_idle_server_is_immediate() {
    // At least one attempt is fast, even on a busy machine.
    let fastest = (0..20).map(|_| {
        let server = TestServer::new("1M");
        let started = Instant::now();
        drop(server);
        started.elapsed()
    });
    assert!(fastest.min().unwrap() < Duration::from_millis(400));
}

/// Zeroing and trimming terabytes takes long, but delays neither other clients nor the server's end.
#[test]
fn a_server_that_stops_does_not_wait_for_terabytes() {
    let server = TestServer::new("16T");
    let mut clients: Vec<Client> = (0..2).map(|_| server.ready_with(Headers::Extended)).collect();
    let mut small = server.ready(true);
    // The first is done at once, as nothing was written; the other allocates every page.
    for (client, (flags, command)) in
        clients.iter_mut().zip([(0, cmd::TRIM), (command_flags::NO_HOLE, cmd::WRITE_ZEROES)])
    {
        client.request(flags, command, 0, 16 << 40, &[]);
    }
    assert_eq!(small.write(0, b"meanwhile").error, 0);
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    for mut client in clients {
        // The client got ESHUTDOWN, was disconnected, or, on a fast machine, the request is done.
        let mut heard = Vec::new();
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut heard);
        assert!(heard.is_empty() || heard[..4] == 0x6e8a_278cu32.to_be_bytes());
    }
}
