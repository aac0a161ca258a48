//! Connections of the control API: a thread for each, with bounds on their number and time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::http::{Ending, refusal};
use super::{Api, exchange};

/// Bounds on what clients may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections served at once; one more is answered 503.
    pub connections: usize,
    /// How long a request may take to arrive, however it trickles in.
    pub request_timeout: Duration,
    /// How long a client may take to read its answer, or, of one that is long, each 64 KiB of it.
    pub response_timeout: Duration,
}

impl Default for Limits {
    /// 64 connections, ten seconds each at most, besides the work they ask for and long answers.
    fn default() -> Self {
        Limits {
            connections: 64,
            request_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(5),
        }
    }
}

/// After this many bytes, a client that goes on sending a refused request is cut off.
const MAX_DRAIN_BYTES: usize = 1 << 20;
/// After this long, likewise.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait before accepting again when the system has no descriptors or memory left.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// What the threads of one server share.
struct Shared {
    api: Api,
    limits: Limits,
    on_shutdown: Box<dyn Fn(Ending) + Send + Sync>,
    connections: AtomicUsize,
    stopping: AtomicBool,
}

/// A running control server; dropping it stops accepting. Connections it still has end by themselves within their
/// [`Limits`], of which the one for an answer holds for each piece of a long one, or with the process.
pub struct Server {
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `api` on `listener`. `on_shutdown` is called, from another thread, each time a client
    /// has asked for a shutdown, after it was answered; it should not block.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        listener: UnixListener,
        api: Api,
        limits: Limits,
        on_shutdown: impl Fn(Ending) + Send + Sync + 'static,
    ) -> io::Result<Server> {
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            api,
            limits,
            on_shutdown: Box::new(on_shutdown),
            connections: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
        });
        let acceptor = {
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            thread::Builder::new().name("control".to_owned()).spawn(move || accept(&listener, &shared))?
        };
        Ok(Server { listener, shared, acceptor: Some(acceptor) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux this wakes a thread that sleeps in accept on the socket.
        if rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both).is_ok()
            && let Some(acceptor) = self.acceptor.take()
        {
            // It has no way to panic, and nothing is left to do if it did.
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    while !shared.stopping.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => admit(stream, shared),
            Err(_) if shared.stopping.load(Ordering::Acquire) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::warn!(%error, "the control socket cannot accept a connection");
                thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

/// Counts a connection in [`Shared::connections`] until it is dropped.
struct ConnectionGuard(Arc<Shared>);

impl ConnectionGuard {
    fn take(shared: &Arc<Shared>) -> Option<ConnectionGuard> {
        let limit = shared.limits.connections;
        // Only the acceptor adds, so the count cannot pass the limit between the two steps.
        (shared.connections.load(Ordering::Relaxed) < limit).then(|| {
            shared.connections.fetch_add(1, Ordering::Relaxed);
            ConnectionGuard(Arc::clone(shared))
        })
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn admit(stream: UnixStream, shared: &Arc<Shared>) {
    let Some(guard) = ConnectionGuard::take(shared) else {
        tracing::warn!(limit = shared.limits.connections, "control connection refused: too many");
        // An empty socket buffer takes these few bytes; a client that made sure otherwise gets none.
        let _ = stream.set_nonblocking(true);
        let _ = refusal(503, "too many control connections; try again").write_to(&mut &stream);
        return;
    };
    let spawned = thread::Builder::new().name("control-client".to_owned()).spawn(move || {
        converse(&stream, &guard.0);
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for a control connection");
    }
}

fn converse(stream: &UnixStream, shared: &Shared) {
    let mut input = Timed::new(stream, shared.limits.request_timeout);
    let mut output = Timed::new(stream, shared.limits.response_timeout);
    let outcome = exchange(&shared.api, &mut input, &mut output, &|| !has_left(stream));
    match outcome.sent {
        Ok(()) if outcome.unread_input => drain(stream),
        Ok(()) => {}
        Err(error) => tracing::debug!(%error, "a control client did not take its answer"),
    }
    if let Some(ending) = outcome.shutdown {
        (shared.on_shutdown)(ending);
    }
}

/// Whether the client has closed the connection, or will send nothing more over it: it waits for its answer with both
/// halves open.
fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    // `HUP` and `ERR` are told of without being asked for. A failure says nothing of the client.
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && !fds[0].revents().is_empty()
}

/// Reads on for a moment after a refusal: closing a socket with unread bytes resets it, and the
/// client might then never see why it was refused.
fn drain(stream: &UnixStream) {
    if stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let mut rest = Timed::new(stream, DRAIN_TIMEOUT).take(MAX_DRAIN_BYTES as u64);
    let _ = io::copy(&mut rest, &mut io::sink());
}

/// A stream whose reads and writes must all be done within an allowance that starts with the first, or the first after a
/// flush. A time-out for each single read would let a client stay for ever, one byte at a time.
struct Timed<'a> {
    stream: &'a UnixStream,
    allowance: Duration,
    deadline: Option<Instant>,
}

impl<'a> Timed<'a> {
    const fn new(stream: &'a UnixStream, allowance: Duration) -> Self {
        Timed { stream, allowance, deadline: None }
    }

    fn left(&mut self) -> io::Result<Duration> {
        let now = Instant::now();
        let left = self.deadline.get_or_insert(now + self.allowance).saturating_duration_since(now);
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.left()?;
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buf)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let left = self.left()?;
        self.stream.set_write_timeout(Some(left))?;
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.deadline = None;
        Ok(())
    }
}
