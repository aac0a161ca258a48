//! Common code of the NBD tests: a server in its own directory, and seeded random numbers.

mod client;
pub mod gate;
pub mod pki;
pub mod secure;

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub use client::*;
use uzram::device::Device;
#[allow(unused_imports)] // Some tests have no use for it.
pub use uzram::random::Random;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::option;
use uzram_serve::nbd::{Clients, Endpoint, ListenAddress, Server, ServerConfig, ServerThread};

pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;

pub fn device(size: &str) -> Arc<Device> {
    named("zram0", size)
}

pub fn named(name: &str, size: &str) -> Arc<Device> {
    let device = Device::new(name).unwrap();
    device.set("disksize", size).unwrap();
    device
}

pub struct TestServer {
    pub device: Arc<Device>,
    pub thread: ServerThread,
    pub path: PathBuf,
    pub clients: Clients,
    endpoints: Vec<Endpoint>,
    directory: tempfile::TempDir,
}

impl TestServer {
    pub fn new(size: &str) -> Self {
        Self::with(device(size), |_| {})
    }

    pub fn with(device: Arc<Device>, configure: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::with_all(&[device], configure)
    }

    pub fn with_all(devices: &[Arc<Device>], configure: impl FnOnce(&mut ServerConfig)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let mut config = ServerConfig::new(&path);
        configure(&mut config);
        let server = Server::bind(config, Exports::new(devices.iter().cloned())).unwrap();
        let (endpoints, clients) = (server.endpoints(), server.clients());
        TestServer {
            device: Arc::clone(&devices[0]),
            thread: server.spawn().unwrap(),
            path,
            clients,
            endpoints,
            directory,
        }
    }

    pub fn tcp_address(&self) -> SocketAddr {
        let tcp = self.endpoints.iter().find_map(|endpoint| match endpoint.address {
            ListenAddress::Tcp(address) => Some(address),
            ListenAddress::Unix(_) => None,
        });
        tcp.expect("it has a TCP port")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    /// Returns a directory that is removed with the server.
    pub fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.path)
    }

    /// Returns a TCP client that has sent nothing.
    pub fn tcp(&self) -> Client<TcpStream> {
        let stream = TcpStream::connect(self.tcp_address()).unwrap();
        // Two short messages in a row are not held back for 40 ms.
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client::on(stream)
    }

    pub fn ready(&self, structured: bool) -> Client {
        self.ready_with(if structured { Headers::Structured } else { Headers::Simple })
    }

    /// Returns a client that has chosen these headers and the default export.
    pub fn ready_with(&self, headers: Headers) -> Client {
        let mut client = self.client();
        client.agree(headers);
        client.enter();
        client
    }

    /// Returns a client that has chosen these headers, metadata contexts and the default export, and the
    /// contexts' ids.
    pub fn with_contexts(&self, headers: Headers, names: &[&[u8]]) -> (Client, Vec<u32>) {
        let mut client = self.client();
        client.agree(headers);
        let set = client.contexts(option::SET_META_CONTEXT, b"", names).unwrap();
        client.enter();
        (client, set.into_iter().map(|(id, _)| id).collect())
    }
}

/// Waits until `done` returns true, for asynchronous work of the server.
pub fn eventually(done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns a new seed, or the one in `UZRAM_TEST_SEED`, and prints it, so that a failure can be reproduced.
pub fn seed() -> u64 {
    let seed = match std::env::var("UZRAM_TEST_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
        }
    };
    println!("UZRAM_TEST_SEED={seed}");
    seed
}
