//! Accepting connections, one thread each, and stopping.
//!
//! The threads live in a scope of [`Server::run`], so that nothing of the server is left once it has
//! returned: no thread, no open device, no socket file.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use uzram::{Error, ErrorKind, Result};

use super::address::{Endpoint, ListenAddress};
use super::listener::{Listener, is_local};
use super::registry::{Place, Registry};
use super::session::{self, Terms};
use super::socket::{Socket, timespec};
use super::tls::Tls;
use super::transmission::Handover;
use super::{BUFFER_BYTES, Buffers, RequestCache};
use crate::Exports;
use crate::waiters::Waiters;

/// How long accepting rests when the system has no file descriptors, memory or threads to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a server needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen. A socket file gets mode 0600; one that a dead server left is replaced. Two
    /// servers must not start on the same path at the same moment.
    pub listen: Vec<ListenAddress>,
    /// With it, TLS is required of clients that come over TCP, and offered on Unix sockets: these are
    /// their user's alone, and nobody else can listen there.
    pub tls: Option<Tls>,
    /// Other machines are let in over TLS without a certificate of theirs: everyone who can connect reads and changes
    /// the disks.
    pub tls_anyone: bool,
    /// Clients served at once; further connections are closed at once.
    pub max_connections: usize,
    /// How long a client may take to choose an export, TLS included.
    pub handshake_timeout: Duration,
}

impl Config {
    /// A socket file and the defaults: no TLS, 256 connections, ten seconds for a handshake.
    pub fn new(socket_path: impl Into<PathBuf>) -> Self {
        Config {
            listen: vec![ListenAddress::Unix(socket_path.into())],
            tls: None,
            tls_anyone: false,
            max_connections: 256,
            handshake_timeout: Duration::from_secs(10),
        }
    }

    /// Who may come from other machines: those with a certificate of an authority of `tls`, unless `tls_anyone` says in
    /// so many words that it is everyone. TLS without either hides from third parties what is read and written, and keeps
    /// nobody from doing so.
    fn check(&self) -> Result<()> {
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
        match self.listen.iter().find(open) {
            None => Ok(()),
            Some(address) => Err(Error::new(ErrorKind::Permission, open_to_all(address, self.tls.is_some()))
                .with_setting("listen")),
        }
    }
}

/// Why nobody listens at an address that other machines can reach.
fn open_to_all(address: &ListenAddress, has_certificate: bool) -> String {
    let (why, give) = if has_certificate {
        ("TLS without tls-client-ca asks no client for a certificate", "tls-client-ca")
    } else {
        ("there is no TLS", "a certificate (tls-cert, tls-key) and tls-client-ca")
    };
    format!(
        "{address} can be reached from other machines, and {why}, so that everyone there could read and change the disks: \
         give {give}, the authority of the clients that may come, or listen on 127.0.0.1 or [::1]; with tls-anyone \
         everyone who can connect reads and changes them, over TLS"
    )
}

/// A server that has its sockets and is ready to run.
pub struct Server {
    listeners: Vec<Listener>,
    exports: Exports,
    requests: RequestCache,
    waiters: Waiters,
    config: Config,
    stop: StopHandle,
}

/// Stops a server, from any thread, any number of times.
#[derive(Clone)]
pub struct StopHandle(Arc<Stop>);

struct Stop {
    stopping: Arc<AtomicBool>,
    /// Becomes readable when the server is to stop, which ends its wait for connections.
    wake: OwnedFd,
}

impl StopHandle {
    fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(StopHandle(Arc::new(Stop { stopping: Arc::default(), wake })))
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
    /// Creates the sockets; clients can connect from now on, and are answered once the server runs.
    ///
    /// # Errors
    /// `Permission` when everyone on other machines could come, and `tls_anyone` is not set; `Busy` when
    /// a server answers at a path or has a port; `Invalid` when a path cannot be a socket's, or
    /// `tls_anyone` contradicts `tls`; `Io` or `NoMemory` when the system refuses.
    pub fn bind(config: Config, exports: Exports) -> Result<Server> {
        config.check()?;
        let listeners = config.listen.iter().map(Listener::bind).collect::<Result<_>>()?;
        let requests = RequestCache::new(config.max_connections)?;
        let stop = StopHandle::new()
            .map_err(|errno| Error::new(ErrorKind::Io, format!("cannot create an eventfd: {errno}")))?;
        Ok(Server { listeners, exports, requests, waiters: Waiters::default(), config, stop })
    }

    /// All ways to this server, in the order of its addresses; without TLS before with it.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let both = |listener: &Listener| {
            let address = listener.address();
            let plain =
                (!self.tls_required(address)).then(|| Endpoint { address: address.clone(), tls: false });
            let tls = self.config.tls.is_some().then(|| Endpoint { address: address.clone(), tls: true });
            [plain, tls]
        };
        self.listeners.iter().flat_map(both).flatten().collect()
    }

    fn tls_required(&self, address: &ListenAddress) -> bool {
        self.config.tls.is_some() && matches!(address, ListenAddress::Tcp(_))
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
    /// and the socket files are gone.
    ///
    /// A stopping server answers requests that have arrived with `NBD_ESHUTDOWN`, and gives its
    /// clients half a second to take their last replies.
    pub fn run(self) {
        for listener in &self.listeners {
            tracing::info!(address = %listener.address(), "serving NBD");
        }
        let registry = Registry::new(self.config.max_connections);
        thread::scope(|scope| {
            let mut complained = false;
            let mut next_id = 0u64;
            while let Some((socket, listener)) = self.next_connection(next_id) {
                match registry.admit(next_id, socket.closer()) {
                    Some(place) => {
                        complained = false;
                        self.start(scope, place, next_id, socket, self.tls_required(listener.address()));
                    }
                    // Whoever is turned away may come again at once: one line tells of them all.
                    None if complained => {}
                    None => {
                        complained = true;
                        let limit = self.config.max_connections;
                        tracing::warn!(limit, "too many connections: refused until one ends");
                    }
                }
                next_id += 1;
            }
            registry.close_all();
        });
        tracing::info!("stopped serving NBD");
    }

    /// Starts the thread of one connection; closes the connection when the system gives none.
    fn start<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        place: Place<'scope>,
        id: u64,
        socket: Socket,
        tls_required: bool,
    ) {
        // The place moves in, to be given up after everything that the connection holds.
        let serve = move || self.serve(id, socket, &place, tls_required);
        if let Err(error) = thread::Builder::new().name(format!("nbd-{id}")).spawn_scoped(scope, serve) {
            tracing::warn!(%error, "no thread for a connection: it is closed");
            self.pause();
        }
    }

    /// Waits for a connection; `None` once the server is to stop. `turn` says which of several waiting
    /// listeners comes first, so that none has to wait for ever.
    fn next_connection(&self, turn: u64) -> Option<(Socket, &Listener)> {
        let mut complained = false;
        let mut fds: Vec<PollFd<'_>> =
            self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.stop.0.wake, PollFlags::IN));
        let first = (turn % self.listeners.len().max(1) as u64) as usize;
        loop {
            let polled = poll(&mut fds, None);
            if self.stop.is_stopping() {
                return None;
            }
            if polled.is_err() {
                continue;
            }
            let in_turn =
                std::iter::zip(&self.listeners, &fds).cycle().skip(first).take(self.listeners.len());
            for (listener, fd) in in_turn {
                if fd.revents().is_empty() {
                    continue;
                }
                let error = match listener.accept() {
                    Ok(socket) => return Some((socket, listener)),
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
    }

    /// Rests for [`ACCEPT_PAUSE`], or until the server is to stop.
    fn pause(&self) {
        let mut fds = [PollFd::new(&self.stop.0.wake, PollFlags::IN)];
        // An early end only means one more try.
        let _ = poll(&mut fds, Some(&timespec(ACCEPT_PAUSE)));
    }

    /// Serves one connection to its end, whatever that is.
    fn serve(&self, id: u64, mut socket: Socket, place: &Place<'_>, tls_required: bool) {
        tracing::debug!(id, "client connected");
        // What a panic leaves behind is the connection's own, and it is dropped here.
        match catch_unwind(AssertUnwindSafe(|| self.session(&mut socket, place, tls_required))) {
            Ok(Ok(())) => tracing::debug!(id, "client disconnected"),
            Ok(Err(error)) => tracing::debug!(id, %error, "connection ended"),
            Err(_) => tracing::error!(id, "a panic ended a connection; please report it"),
        }
        socket.finish();
    }

    fn session(&self, socket: &mut Socket, place: &Place<'_>, tls_required: bool) -> io::Result<()> {
        socket.set_deadline(Instant::now().checked_add(self.config.handshake_timeout));
        let wake = socket.wake();
        let terms = Terms {
            exports: &self.exports,
            requests: &self.requests,
            tls: self.config.tls.as_ref(),
            tls_required,
            stopping: &self.stop.0.stopping,
            handover: Some(Handover { waiters: &self.waiters, wake: &wake }),
        };
        session::run(socket, terms, |socket| {
            socket.set_deadline(None);
            if !place.become_client() {
                return Err(io::Error::other("too many connections"));
            }
            Buffers::new(BUFFER_BYTES)
        })
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
