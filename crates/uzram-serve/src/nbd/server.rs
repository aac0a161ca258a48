//! Accepting connections, one thread each, and stopping.
//!
//! The threads live in a scope of [`Server::run`], so that nothing of the server is left once it has
//! returned: no thread, no open device, no socket file.

use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use uzram::{Error, ErrorKind, Result};

use super::address::{Endpoint, Listen, ListenAddress};
use super::buffer::{Buffers, SHARED_BYTES};
use super::clients::Peer;
use super::connection::Shared;
use super::listener::{Listener, Sockets, is_local};
use super::registry::{self, Accept, Clients, Registration, Registry};
use super::session;
use super::socket::{Socket, timespec};
use super::tls::Tls;
use crate::Exports;
use crate::device_pool::{Budget, DevicePools, MAX_TASKS};

/// How long accepting pauses when the system refuses file descriptors, memory or threads.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen. A socket file that a dead server left is replaced. Two servers must not start on the
    /// same path at the same moment.
    pub listen: Vec<Listen>,
    /// If given, TLS is required over TCP, and optional on Unix sockets: their files' permissions
    /// say who may connect, and no other process can listen there.
    pub tls: Option<Tls>,
    /// Clients on other machines need no certificate: everyone who can connect over TLS can read and write
    /// the disks.
    pub tls_anyone: bool,
    /// The most clients served at once; further connections are closed. Some of the places are reserved for
    /// each listener, more for the first, so that no listener's clients can take all places.
    pub max_connections: usize,
    /// How long a client may take to choose an export, TLS included.
    pub handshake_timeout: Duration,
    /// How long a client may receive nothing of its replies, or less than 1 MiB of a long one, before it is
    /// disconnected.
    pub send_timeout: Duration,
    /// The same for sending the payload of a write for which memory is held. Otherwise clients may be idle
    /// forever.
    pub payload_timeout: Duration,
    /// Memory for requests and replies that all clients share, besides each connection's minimum.
    pub shared_bytes: usize,
}

impl ServerConfig {
    /// Returns the defaults with one socket file: no TLS, 256 connections, ten seconds for a handshake,
    /// thirty for slow clients, 80 MiB of shared memory.
    pub fn new(socket_path: impl Into<PathBuf>) -> Self {
        ServerConfig {
            listen: vec![ListenAddress::Unix(socket_path.into()).into()],
            tls: None,
            tls_anyone: false,
            max_connections: 256,
            handshake_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            payload_timeout: Duration::from_secs(30),
            shared_bytes: SHARED_BYTES,
        }
    }

    /// Returns the file descriptors that a process with this server may need: two for each client, one for
    /// each handshake, and some for everything else.
    pub fn descriptors(&self) -> u64 {
        const OTHERS: usize = 256;
        let handshakes = registry::max_handshakes(self.max_connections) * self.listen.len();
        (2 * self.max_connections + handshakes + OTHERS) as u64
    }

    /// Checks who may connect from other machines: clients with a certificate signed by an authority of
    /// `tls`, or everyone if `tls_anyone` allows that explicitly. TLS without either encrypts, but
    /// authenticates no client. Errors: `Permission` when everyone on other machines could connect, and
    /// `tls_anyone` is not set; `Invalid` when `tls_anyone` contradicts `tls`.
    pub fn check(&self) -> Result<()> {
        let asks_clients = self.tls.as_ref().is_some_and(Tls::asks_clients);
        if self.tls_anyone && self.tls.is_none() {
            let text = "tls-anyone lets everyone in over TLS, and without a certificate there is no TLS: give tls-cert \
                        and tls-key, too";
            return Err(Error::invalid(text).with_setting("tls-cert"));
        }
        if self.tls_anyone && asks_clients {
            let text = "tls-anyone lets everyone in, and tls-client-ca only clients with a certificate: give one of them";
            return Err(Error::invalid(text).with_setting("tls-anyone"));
        }
        let open = |address: &&ListenAddress| !asks_clients && !self.tls_anyone && !is_local(address);
        let Some(address) = self.listen.iter().map(|listen| &listen.address).find(open) else {
            return Ok(());
        };
        let (why, give) = match self.tls {
            Some(_) => ("TLS without tls-client-ca asks no client for a certificate", "tls-client-ca"),
            None => ("there is no TLS", "a certificate (tls-cert, tls-key) and tls-client-ca"),
        };
        let what = format!(
            "{address} can be reached from other machines, and {why}, so that everyone there could read and change the \
             disks: give {give}, the authority of the clients that may come, or listen on 127.0.0.1 or [::1]; with \
             tls-anyone everyone who can connect reads and changes them, over TLS"
        );
        Err(Error::new(ErrorKind::Permission, what).with_setting("listen"))
    }
}

/// A server that has its sockets and is ready to run.
pub struct Server {
    listeners: Vec<Listener>,
    budget: Arc<Budget>,
    pools: DevicePools,
    registry: Arc<Registry>,
    config: ServerConfig,
}

impl Server {
    /// Creates the sockets; clients can connect from now on, and are answered once the server runs. Errors:
    /// as [`ServerConfig::check`]; `Busy` when another server has a path or port; `Invalid` when a path
    /// cannot be a socket's; `Io` or `NoMemory` when the system refuses.
    pub fn bind(config: ServerConfig, exports: Exports) -> Result<Server> {
        config.check()?;
        Server::on(&Sockets::bind(&config.listen)?, config, exports)
    }

    /// Creates a server on the sockets that were bound for the addresses of `config`, which was checked.
    /// Errors: `Io` or `NoMemory` when the system refuses.
    pub fn on(sockets: &Sockets, config: ServerConfig, exports: Exports) -> Result<Server> {
        let listeners = sockets.listeners(&config.listen, &exports);
        let no_eventfd = |error| Error::new(ErrorKind::Io, format!("cannot create an eventfd: {error}"));
        let addresses = listeners.iter().map(|listener| listener.bound.address.clone());
        // If the number is unknown, assume one: threads then get short time slices earlier than necessary.
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let registry = Registry::new(config.max_connections, cpus, addresses).map_err(no_eventfd)?;
        let budget = Budget::new(config.shared_bytes);
        let pools = DevicePools::new(MAX_TASKS, Arc::clone(&budget));
        Ok(Server { listeners, budget, pools, registry: Arc::new(registry), config })
    }

    /// Returns the server's connections; can be kept after the server has stopped.
    pub fn clients(&self) -> Clients {
        Clients(Some(Arc::clone(&self.registry)))
    }

    /// Returns all URIs of this server, in the order of its addresses; those without TLS first.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let both = |listener: &Listener| {
            let plain = (!self.tls_required(listener)).then(|| listener.endpoint(false));
            let tls = self.config.tls.is_some().then(|| listener.endpoint(true));
            [plain, tls]
        };
        self.listeners.iter().flat_map(both).flatten().collect()
    }

    fn tls_required(&self, listener: &Listener) -> bool {
        self.config.tls.is_some() && matches!(listener.bound.address, ListenAddress::Tcp(_))
    }

    /// Starts a thread that serves until stopped. Errors: `Io` when the system refuses a thread.
    pub fn spawn(self) -> Result<ServerThread> {
        let registry = Arc::clone(&self.registry);
        let thread = thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || self.run())
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start the NBD server: {error}")))?;
        Ok(ServerThread { registry, thread: Some(thread) })
    }

    /// Serves until stopped. A stopping server answers requests that have arrived with `NBD_ESHUTDOWN`, and
    /// gives its clients half a second to receive their last replies.
    fn run(self) {
        for listener in &self.listeners {
            tracing::info!(address = %listener.bound.address, "serving NBD");
        }
        thread::scope(|scope| {
            let mut turn = 0;
            while let Some((socket, listener)) = self.next_connection(turn) {
                turn += 1;
                // Without a peer, the client has disconnected already.
                let Ok(peer) = Peer::of(socket.descriptor()) else { continue };
                if let Some(registration) =
                    self.registry.admit(listener, Arc::clone(socket.descriptor()), peer)
                {
                    self.start(scope, registration, socket, &self.listeners[listener]);
                }
            }
            self.registry.close_all();
        });
        tracing::info!("stopped serving NBD");
    }

    /// Starts the thread of one connection; closes the connection when the system refuses a thread.
    fn start<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        registration: Registration<'scope>,
        socket: Socket,
        listener: &'scope Listener,
    ) {
        let name = format!("nbd-{}", registration.id);
        // The closure owns the registration, which is dropped after everything that the connection holds.
        let serve = move || self.serve(socket, &registration, listener);
        if let Err(error) = thread::Builder::new().name(name).spawn_scoped(scope, serve) {
            tracing::warn!(%error, "cannot start a thread for a connection; closing it");
            self.pause();
        }
    }

    /// Waits for a connection to a listener that has room for its handshake, and returns it with the
    /// listener's index; `None` once the server must stop. `turn` rotates which of several ready listeners
    /// comes first, so that none starves.
    fn next_connection(&self, turn: usize) -> Option<(Socket, usize)> {
        let mut complained = false;
        let count = self.listeners.len();
        loop {
            let ready = self.ready_listeners()?;
            // Each ready listener is tried once per round.
            for listener in (0..count).map(|index| (turn + index) % count).filter(|index| ready[*index]) {
                if !self.registry.make_way(listener, Instant::now()) {
                    continue;
                }
                let error = match self.listeners[listener].accept() {
                    Ok(socket) => return Some((socket, listener)),
                    Err(error) => error,
                };
                match Errno::from_io_error(&error) {
                    // No connection, or it was closed again.
                    Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                    // Out of descriptors or memory: leave the connection in the queue, and try again later.
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
    }

    /// Waits for something to do; returns for each listener whether a connection that may be accepted waits
    /// there. `None` once the server must stop.
    fn ready_listeners(&self) -> Option<Vec<bool>> {
        let now = Instant::now();
        let mut wake_at = None;
        let mut fds = vec![PollFd::new(&self.registry.wake, PollFlags::IN)];
        for (index, listener) in self.listeners.iter().enumerate() {
            let events = match self.registry.when_to_accept(index, now) {
                Accept::Now => PollFlags::IN,
                // New connections wait in the listener's queue.
                Accept::NotBefore(at) => {
                    wake_at = wake_at.into_iter().chain(at).min();
                    PollFlags::empty()
                }
            };
            fds.push(PollFd::new(&listener.bound.fd, events));
        }
        let left = wake_at.map(|at| timespec(at.saturating_duration_since(now)));
        // Waking early only means one more check.
        let polled = poll(&mut fds, left.as_ref());
        // Before the server's state is looked at: what is signalled later wakes the next wait.
        if !fds[0].revents().is_empty() {
            self.registry.clear_wake();
        }
        if self.registry.stopping.load(Ordering::Relaxed) {
            return None;
        }
        Some(fds[1..].iter().map(|fd| polled.is_ok() && !fd.revents().is_empty()).collect())
    }

    /// Waits for [`ACCEPT_PAUSE`], or until a place is free or the server must stop.
    fn pause(&self) {
        let mut fds = [PollFd::new(&self.registry.wake, PollFlags::IN)];
        // Waking early only means one more try.
        let _ = poll(&mut fds, Some(&timespec(ACCEPT_PAUSE)));
    }

    fn serve(&self, mut socket: Socket, registration: &Registration<'_>, listener: &Listener) {
        let (id, peer) = (registration.id, registration.peer);
        tracing::debug!(id, %peer, "client connected");
        // A panic affects only the connection's own state, which is dropped here.
        match catch_unwind(AssertUnwindSafe(|| self.session(&mut socket, registration, listener))) {
            Ok(Ok(())) => tracing::debug!(id, "client disconnected"),
            Ok(Err(error)) => {
                registration.failed(&error);
                match error.kind() {
                    // The server disconnected a slow client, or the device failed within a reply.
                    io::ErrorKind::ConnectionAborted => tracing::warn!(id, %peer, %error, "client cut off"),
                    // The handshake's deadline passed, or the client's host vanished.
                    io::ErrorKind::TimedOut => tracing::debug!(id, %peer, "connection timed out"),
                    _ => tracing::debug!(id, %error, "connection ended"),
                }
            }
            Err(_) => tracing::error!(id, "a panic ended a connection; please report it"),
        }
        socket.finish();
    }

    fn session(
        &self,
        socket: &mut Socket,
        registration: &Registration<'_>,
        listener: &Listener,
    ) -> io::Result<()> {
        socket.set_timeouts(self.config.send_timeout, self.config.payload_timeout)?;
        socket.set_deadline(Instant::now().checked_add(self.config.handshake_timeout));
        let wake = socket.wake();
        let shared = Shared {
            stopping: &self.registry.stopping,
            offload: Some((&self.pools, &wake)),
            traffic: &registration.traffic,
        };
        let tls = self.config.tls.as_ref().map(|tls| (tls, self.tls_required(listener)));
        session::run(socket, &listener.exports, tls, shared, |socket, export, is_tls| {
            socket.set_deadline(None);
            if !registration.become_client(export) {
                return Err(io::Error::other("too many connections"));
            }
            Buffers::of_client(&self.budget, is_tls)
        })
    }
}

/// A server that runs in its own thread; dropping it stops the server and waits for its end.
pub struct ServerThread {
    registry: Arc<Registry>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.registry.stop();
        // An error means a panic, which has been reported already.
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}
