//! NBD clients of a daemon: those of the server's tests, on the daemon's sockets.

use super::*;
use std::net::TcpStream;

pub use crate::nbd::{Client, cmd};

impl Place {
    /// Returns a client of the runtime socket, which has the default export open.
    pub fn nbd(&self) -> Client {
        let mut client = Client::connect(&self.socket("nbd.sock"));
        client.enter();
        client
    }
}

pub fn port(daemon: &Daemon) -> String {
    let uri = daemon.facts.lines().find_map(|line| line.split_once("nbd://")).expect("it has a TCP port").1;
    uri.split_once('/').unwrap().0.to_owned()
}

/// Returns a client of a TCP port, which has chosen no export; `None` if the server closes its connection.
pub fn tcp_if_admitted(port: &str) -> Option<Client<TcpStream>> {
    let stream = TcpStream::connect(port).unwrap();
    // Else each step of the handshake waits 40 ms, for an acknowledgement.
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    // Waits for the greeting.
    stream.peek(&mut [0]).ok().filter(|len| *len > 0)?;
    let mut client = Client::on(stream);
    client.greet();
    Some(client)
}

/// Returns such a client with the default export open, if it can write a page and read it back.
pub fn tcp_if_served(port: &str, page: u64) -> Option<Client<TcpStream>> {
    let mut client = tcp_if_admitted(port)?;
    client.enter();
    works(&mut client, page).then_some(client)
}

pub fn tcp(port: &str) -> Client<TcpStream> {
    tcp_if_admitted(port).expect("a place is free")
}

pub fn works<S: Read + Write>(client: &mut Client<S>, page: u64) -> bool {
    let data = Random::new(page).bytes(4096);
    client.write(page * 4096, &data).error == 0 && client.read(0, page * 4096, 4096).data() == data
}
