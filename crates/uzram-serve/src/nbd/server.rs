//! Accepting connections, one thread each, and stopping.
//!
//! The threads live in a scope of [`Server::run`], so that nothing of the server is left once it has
//! returned: no thread, no open device, no socket file.
//!
//! Lock: `Registry::connections`, a leaf; held for a map operation or a `shutdown(2)` each, never
//! while waiting (a condition variable aside).

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use uzram::{Error, ErrorKind, Result};

use super::socket::{Closer, Listener, Socket, timespec};
use super::{BUFFER_BYTES, Buffers, handshake, transmission};
use crate::Exports;

/// How long accepting rests when the system has no file descriptors, memory or threads to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a stopping server lets its connections send their last replies.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// What a server needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket file to create, mode 0600. Two servers must not start on the same path at the same
    /// moment; a file that a dead server left is replaced.
    pub socket_path: PathBuf,
    /// Connections served at once; further ones are closed at once.
    pub max_connections: usize,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Duration,
}

impl Config {
    /// The defaults: 256 connections, ten seconds for a handshake.
    pub fn new(socket_path: impl Into<PathBuf>) -> Self {
        Config {
            socket_path: socket_path.into(),
            max_connections: 256,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// A server that has its socket and is ready to run.
pub struct Server {
    listener: Listener,
    exports: Exports,
    config: Config,
    stop: StopHandle,
}

/// Stops a server, from any thread, any number of times.
#[derive(Clone)]
pub struct StopHandle(Arc<Stop>);

struct Stop {
    stopping: AtomicBool,
    /// Becomes readable when the server is to stop, which ends its wait for connections.
    wake: OwnedFd,
}

impl StopHandle {
    fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(StopHandle(Arc::new(Stop { stopping: AtomicBool::new(false), wake })))
    }

    /// Tells the server to stop, and returns at once; [`Server::run`] returns when it has.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::Relaxed);
        // It fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }

    fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Relaxed)
    }
}

impl Server {
    /// Creates the socket; clients can connect from now on, and are answered once the server runs.
    ///
    /// # Errors
    /// `Busy` when a server answers at the path; `Invalid` when the path cannot be a socket's; `Io`
    /// when the system refuses.
    pub fn bind(config: Config, exports: Exports) -> Result<Server> {
        let listener = Listener::bind(&config.socket_path)?;
        let stop = StopHandle::new()
            .map_err(|errno| Error::new(ErrorKind::Io, format!("cannot create an eventfd: {errno}")))?;
        Ok(Server { listener, exports, config, stop })
    }

    /// A handle that stops this server.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Serves until stopped, in a thread of its own.
    ///
    /// # Errors
    /// `Io` when the system gives no thread.
    pub fn spawn(self) -> Result<ServerThread> {
        let stop = self.stop_handle();
        let thread = thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || self.run())
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start the NBD server: {error}")))?;
        Ok(ServerThread { stop, thread: Some(thread) })
    }

    /// Serves until stopped. When it returns, all connections are closed, their threads have ended,
    /// and the socket file is gone.
    ///
    /// A stopping server answers requests that have arrived with `NBD_ESHUTDOWN`, and gives its
    /// clients half a second to take their last replies.
    pub fn run(self) {
        tracing::info!(path = %self.listener.path().display(), "serving NBD");
        let registry = Registry::default();
        thread::scope(|scope| {
            let mut next_id = 0u64;
            while let Some(socket) = self.next_connection() {
                if registry.len() >= self.config.max_connections {
                    tracing::warn!(limit = self.config.max_connections, "too many connections: one refused");
                    continue;
                }
                self.start(scope, &registry, next_id, socket);
                next_id += 1;
            }
            registry.close_all();
        });
        tracing::info!(path = %self.listener.path().display(), "stopped serving NBD");
    }

    /// Starts the thread of one connection; closes the connection when the system gives none.
    fn start<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        registry: &'scope Registry,
        id: u64,
        socket: Socket,
    ) {
        let registered = registry.add(id, socket.closer());
        let serve = move || {
            // Moved in to be dropped here, after everything that the connection holds.
            let _registered = registered;
            self.serve(id, socket);
        };
        if let Err(error) = thread::Builder::new().name(format!("nbd-{id}")).spawn_scoped(scope, serve) {
            tracing::warn!(%error, "no thread for a connection: it is closed");
            self.pause();
        }
    }

    /// Waits for a connection; `None` once the server is to stop.
    fn next_connection(&self) -> Option<Socket> {
        let mut complained = false;
        loop {
            let mut fds =
                [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.stop.0.wake, PollFlags::IN)];
            // Whatever poll answers, the two questions below have to be asked.
            let polled = poll(&mut fds, None);
            if self.stop.is_stopping() {
                return None;
            }
            let error = match polled.map_err(io::Error::from).and_then(|_| self.listener.accept()) {
                Ok(socket) => return Some(socket),
                Err(error) => error,
            };
            match Errno::from_io_error(&error) {
                // Nobody there, or gone again.
                Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                // Out of descriptors or memory: the connection keeps waiting, and so do we.
                _ => {
                    if !complained {
                        tracing::warn!(%error, "cannot accept a connection; trying again");
                        complained = true;
                    }
                    self.pause();
                }
            }
        }
    }

    /// Rests for [`ACCEPT_PAUSE`], or until the server is to stop.
    fn pause(&self) {
        let mut fds = [PollFd::new(&self.stop.0.wake, PollFlags::IN)];
        // An early end only means one more try.
        let _ = poll(&mut fds, Some(&timespec(ACCEPT_PAUSE)));
    }

    /// Serves one connection to its end, whatever that is.
    fn serve(&self, id: u64, mut socket: Socket) {
        tracing::debug!(id, "client connected");
        // What a panic leaves behind is the connection's own, and it is dropped here.
        match catch_unwind(AssertUnwindSafe(|| self.session(&mut socket))) {
            Ok(Ok(())) => tracing::debug!(id, "client disconnected"),
            Ok(Err(error)) => tracing::debug!(id, %error, "connection ended"),
            Err(_) => tracing::error!(id, "a panic ended a connection; please report it"),
        }
    }

    fn session(&self, socket: &mut Socket) -> io::Result<()> {
        socket.set_deadline(Instant::now().checked_add(self.config.handshake_timeout));
        let Some(session) = handshake::run(socket, &self.exports)? else {
            return Ok(());
        };
        socket.set_deadline(None);
        let mut buffers = Buffers::new(BUFFER_BYTES)?;
        transmission::run(socket, session, &self.stop.0.stopping, &mut buffers)
    }
}

/// A server that runs in a thread of its own; dropping it stops the server and waits for its end.
pub struct ServerThread {
    stop: StopHandle,
    thread: Option<thread::JoinHandle<()>>,
}

impl ServerThread {
    /// A handle that stops this server.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // An error would be a panic, which has been reported where it happened.
            let _ = thread.join();
        }
    }
}

/// The connections that are being served.
#[derive(Default)]
struct Registry {
    /// By number.
    connections: Mutex<HashMap<u64, Closer>>,
    /// Signalled whenever a connection has ended.
    ended: Condvar,
}

/// A connection's place in the registry, given up on drop.
struct Registered<'a> {
    registry: &'a Registry,
    id: u64,
}

impl Registry {
    /// A panic cannot leave the map half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Closer>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.lock().len()
    }

    fn add(&self, id: u64, closer: Closer) -> Registered<'_> {
        self.lock().insert(id, closer);
        Registered { registry: self, id }
    }

    /// Ends all connections, in peace if they are done within [`STOP_GRACE`].
    fn close_all(&self) {
        let connections = self.lock();
        connections.values().for_each(Closer::end_input);
        let waited = self.ended.wait_timeout_while(connections, STOP_GRACE, |left| !left.is_empty());
        let (connections, _) = waited.unwrap_or_else(PoisonError::into_inner);
        connections.values().for_each(Closer::close);
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.id);
        self.registry.ended.notify_all();
    }
}
