//! The server's life cycle: its socket file, its limits, misbehaving clients, and stopping.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use crate::common::{Client, Headers, TestServer, cmd, device, eventually};
use uzram::ErrorKind;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{command_flags, option, reply};
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

/// Returns whether the other side has closed a connection, even if there is unread data.
fn is_hung_up(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec::default())).unwrap();
    polled[0].revents().contains(PollFlags::HUP)
}

#[test]
fn a_client_that_does_not_finish_its_handshake_is_dropped() {
    // Long enough for those that finish theirs, on a busy machine.
    let timeout = Duration::from_secs(2);
    let server = TestServer::with(device("1M"), |config| config.handshake_timeout = timeout);
    let mut ready = server.ready(true);
    let started = Instant::now();
    let mut silent = server.client();
    let mut dripping = Client::silent(&server.path);
    dripping.take::<18>();
    let mut stream = dripping.stream.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        while std::io::Write::write_all(&mut stream, &[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    // It requests more than its socket holds, and does not read the replies in time.
    let mut deaf = server.client();
    deaf.send(
        &crate::common::option_bytes(option::INFO, &crate::common::info_request(b"", &[1, 2, 3])).repeat(255),
    );
    assert!(silent.at_end());
    // The client does not read before the server has closed the connection.
    eventually(|| is_hung_up(&deaf.stream));
    let mut heard = Vec::new();
    // Its requests were not all read, so the connection may be reset.
    let _ = std::io::Read::read_to_end(&mut deaf.stream, &mut heard);
    let acknowledged = heard.windows(4).filter(|word| *word == reply::ACK.to_be_bytes()).count();
    assert!(acknowledged < 255, "the server stopped talking to it");
    drip.join().unwrap();
    assert!(started.elapsed() >= timeout);
    assert_eq!(ready.write(0, b"in time").error, 0, "the time limit ends with the handshake");
}

#[test]
fn stopping_ends_idle_busy_and_stuck_clients() {
    let server = TestServer::new("32M");
    let mut idle = server.ready(true);
    let mut haggling = server.client();
    let mut in_mid_write = server.ready(true);
    in_mid_write.request(0, cmd::WRITE, 0, 1 << 20, &[1; 1000]);
    // It requests more than the socket holds and never reads.
    let mut stuck = server.ready(true);
    stuck.request(0, cmd::READ, 0, 32 << 20, &[]);
    let busy: Vec<_> = (0..2)
        .map(|_| {
            let mut client = server.ready(true);
            std::thread::spawn(move || {
                let request = crate::common::request_bytes(0, cmd::READ, 0, 0, 4096);
                let mut reply = [0; 4096 + 28];
                while std::io::Write::write_all(&mut client.stream, &request).is_ok()
                    && std::io::Read::read_exact(&mut client.stream, &mut reply).is_ok()
                {}
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    let TestServer { device, thread, path, .. } = server;
    drop(thread);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert!(idle.at_end() && haggling.at_end() && in_mid_write.at_end());
    busy.into_iter().for_each(|client| client.join().unwrap());
    assert!(UnixStream::connect(&path).is_err());
    device.set("reset", "1").unwrap();
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
