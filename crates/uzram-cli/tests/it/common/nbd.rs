//! An NBD client with control of every byte, for requests that common clients never send.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::{Daemon, PATIENCE, Place, connect};

/// Commands of requests.
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;

pub trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

pub struct Raw(pub Box<dyn Stream>);

/// Returns the TCP port of a daemon without TLS.
pub fn port(daemon: &Daemon) -> String {
    let uri = daemon.facts.lines().find_map(|line| line.split_once("nbd://")).expect("it has a TCP port").1;
    uri.split_once('/').unwrap().0.to_owned()
}

impl Raw {
    /// Connects to the runtime socket, and sends nothing.
    pub fn unix(place: &Place) -> Raw {
        Raw(Box::new(connect(&place.socket("nbd.sock"))))
    }

    /// Connects over TCP, and sends nothing.
    pub fn tcp(port: &str) -> Raw {
        let stream = TcpStream::connect(port).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Raw(Box::new(stream))
    }

    /// Chooses the default export, with simple replies; `None` when the server ends the connection instead.
    pub fn enter(mut self) -> Option<Raw> {
        let mut greeting = [0; 18];
        self.0.read_exact(&mut greeting).ok()?;
        assert_eq!(greeting[..8], *b"NBDMAGIC");
        // Both flags, and NBD_OPT_EXPORT_NAME without a name.
        self.0.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat()).ok()?;
        self.0.read_exact(&mut [0; 10]).ok()?;
        Some(self)
    }

    pub fn request(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) -> std::io::Result<()> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(command.to_be_bytes());
        bytes.extend([7; 8]);
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(payload);
        self.0.write_all(&bytes)
    }

    /// Receives a reply with `len` bytes of data, and returns them if the request succeeded.
    pub fn reply(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut reply = vec![0; 16 + len];
        self.0.read_exact(&mut reply).ok()?;
        (reply[4..8] == [0; 4]).then(|| reply.split_off(16))
    }

    /// Returns whether a page can be written and read back.
    pub fn works(&mut self, page: u64) -> bool {
        let (data, at) = ([page as u8 | 1; 4096], page * 4096);
        let written = self.request(WRITE, at, 4096, &data).is_ok() && self.reply(0).is_some();
        written
            && self.request(READ, at, 4096, &[]).is_ok()
            && self.reply(4096).is_some_and(|read| read == data)
    }

    /// Returns the client if a page can be written and read back.
    pub fn if_served(mut self, page: u64) -> Option<Raw> {
        self.works(page).then_some(self)
    }

    /// Returns whether the server ends the connection within the time limit.
    pub fn ends(&mut self) -> bool {
        let mut thrown_away = vec![0; 1 << 16];
        loop {
            match self.0.read(&mut thrown_away) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// Waits a moment for asynchronous work of the daemon.
pub fn a_moment() {
    std::thread::sleep(Duration::from_millis(10));
}
