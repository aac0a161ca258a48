//! A proxy before a server, which misbehaves as it is told: it delays, swallows, damages what the server
//! says, or resets connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use uzram::random::Random;

/// How a connection goes on after the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    Pass,
    /// Whatever is sent arrives later.
    Delay,
    /// Nothing arrives, and nobody is told.
    Drop,
    /// Connections are reset; new ones, too, once something is sent.
    Reset,
    /// One in so many chunks of what the server says has a flipped bit, anywhere in it.
    Corrupt,
}

const MODES: [Mode; 5] = [Mode::Pass, Mode::Delay, Mode::Drop, Mode::Reset, Mode::Corrupt];
const DELAY: Duration = Duration::from_millis(30);
const CORRUPT_ONE_IN: usize = 10;

/// A proxy; ends with its connections when this is dropped.
pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    mode: AtomicU8,
    ended: AtomicBool,
    server: u16,
    seed: AtomicU64,
    damaged: AtomicU64,
}

impl Proxy {
    /// Listens for connections to a server on loopback, on a port that is not one of its own.
    pub fn start(server: u16, seed: u64) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            mode: AtomicU8::new(Mode::Pass as u8),
            ended: AtomicBool::new(false),
            server,
            seed: AtomicU64::new(seed),
            damaged: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.ended.load(Ordering::Relaxed) {
                    return;
                }
                let serving = Arc::clone(&accepting);
                std::thread::spawn(move || serving.connect(client));
            }
        });
        Proxy { port, shared }
    }

    pub fn set(&self, mode: Mode) {
        self.shared.mode.store(mode as u8, Ordering::Relaxed);
    }

    pub fn damaged(&self) -> u64 {
        self.shared.damaged.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        // The thread that accepts looks.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn connect(self: Arc<Self>, client: TcpStream) {
        let Ok(server) = TcpStream::connect(("127.0.0.1", self.server)) else { return };
        let both = [&client, &server].map(|stream| (stream.try_clone(), stream.set_nodelay(true)));
        let [(Ok(to_client), Ok(())), (Ok(to_server), Ok(()))] = both else { return };
        let back = Arc::clone(&self);
        std::thread::spawn(move || back.copy(server, to_client, true));
        self.copy(client, to_server, false);
    }

    /// Copies one direction of a connection until either end closes it.
    fn copy(&self, mut from: TcpStream, mut to: TcpStream, is_of_server: bool) {
        let mut random = Random::new(self.seed.fetch_add(1, Ordering::Relaxed));
        let mut chunk = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut chunk) {
            let chunk = &mut chunk[..len];
            match MODES[usize::from(self.mode.load(Ordering::Relaxed))] {
                _ if self.ended.load(Ordering::Relaxed) => break,
                Mode::Pass => {}
                Mode::Delay => std::thread::sleep(DELAY),
                // What follows makes no sense without it.
                Mode::Drop => return self.swallow(from),
                Mode::Reset => {
                    let _ = [&from, &to].map(|stream| set_socket_linger(stream, Some(Duration::ZERO)));
                    break;
                }
                Mode::Corrupt => {
                    if is_of_server && random.below(CORRUPT_ONE_IN) == 0 {
                        chunk[random.below(len)] ^= 1 << random.below(8);
                        self.damaged.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            if to.write_all(chunk).is_err() {
                break;
            }
        }
        let _ = [&from, &to].map(|stream| stream.shutdown(Shutdown::Both));
    }

    /// Reads, and does no more: the sender learns nothing.
    fn swallow(&self, mut from: TcpStream) {
        let mut chunk = vec![0; 64 << 10];
        while from.read(&mut chunk).is_ok_and(|len| len > 0) {}
    }
}
