//! The server of the control API: a thread for each connection, with limits on their number and time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::api::Api;
use super::http::{self, Ending, refusal};
use crate::device_pool::Budget;

/// The most connections served at once; further ones get 503.
pub(super) const MAX_CONNECTIONS: usize = 64;
/// How long a whole request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to read the response, or each 64 KiB of a long one.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most bytes read from a client that keeps sending a refused request.
const MAX_DRAIN_BYTES: usize = 1 << 20;
/// The longest time to read from such a client.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait before accepting again when the system is out of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

struct Shared {
    api: Api,
    on_shutdown: Box<dyn Fn(Ending) + Send + Sync>,
    connections: Arc<Budget>,
    stopping: AtomicBool,
}

/// A running control server; dropping it stops accepting. Open connections end by themselves within their
/// time limits, of which that of the response is for each piece of a long one, or with the process.
pub struct Server {
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `api` on `listener`. Each shutdown request calls `on_shutdown` from another thread, after the
    /// response; it should not block. Errors: the system refuses a thread.
    pub fn start(
        listener: UnixListener,
        api: Api,
        on_shutdown: impl Fn(Ending) + Send + Sync + 'static,
    ) -> io::Result<Server> {
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            api,
            on_shutdown: Box::new(on_shutdown),
            connections: Budget::new(MAX_CONNECTIONS),
            stopping: AtomicBool::new(false),
        });
        let (socket, own) = (Arc::clone(&listener), Arc::clone(&shared));
        let acceptor =
            thread::Builder::new().name("control".to_owned()).spawn(move || accept(&socket, &own))?;
        Ok(Server { listener, shared, acceptor: Some(acceptor) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux this wakes a thread that sleeps in accept on the socket.
        if rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both).is_ok() {
            // The thread cannot panic, and a panic would need no handling.
            let _ = self.acceptor.take().map(JoinHandle::join);
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

fn admit(stream: UnixStream, shared: &Arc<Shared>) {
    let Some(place) = shared.connections.take(1) else {
        tracing::warn!(limit = MAX_CONNECTIONS, "control connection refused: too many");
        // Normally the empty socket buffer takes these few bytes; do not wait if it does not.
        let _ = stream.set_nonblocking(true);
        let _ = refusal(503, "too many control connections; try again").write_to(&mut &stream);
        return;
    };
    let shared = Arc::clone(shared);
    let spawned = thread::Builder::new().name("control-client".to_owned()).spawn(move || {
        converse(&stream, &shared);
        drop(place);
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot start a thread for a control connection");
    }
}

fn converse(stream: &UnixStream, shared: &Shared) {
    let mut input = Timed::new(stream, REQUEST_TIMEOUT);
    let mut output = Timed::new(stream, RESPONSE_TIMEOUT);
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

/// Returns whether the client has closed the connection or its sending half; a client that waits for a
/// response keeps both halves open.
fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    // `HUP` and `ERR` are always reported. A failure of poll says nothing about the client.
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && !fds[0].revents().is_empty()
}

/// Reads on for a moment after a refusal: closing a socket with unread bytes resets the connection, and
/// the client might not receive the response.
fn drain(stream: &UnixStream) {
    if stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let mut rest = Timed::new(stream, DRAIN_TIMEOUT).take(MAX_DRAIN_BYTES as u64);
    let _ = io::copy(&mut rest, &mut io::sink());
}

/// A stream whose reads and writes must all be done within an allowance that starts with the first one, or
/// the first after a flush. With a time-out for each read, a client could stay forever by sending single
/// bytes.
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

/// How an [`exchange`] ended.
#[derive(Debug)]
pub struct Exchanged {
    /// How the daemon is to end, if the request asked for that.
    pub shutdown: Option<Ending>,
    /// The request was refused before all of it was read.
    pub unread_input: bool,
    /// Whether the response was sent; if not, the client disconnected or was too slow.
    pub sent: io::Result<()>,
}

/// Reads one request from `input`, and writes the response to `output`. `input` is written to only for
/// `100 Continue`. A long operation ends early once `is_wanted` returns false.
pub fn exchange(
    api: &Api,
    input: &mut (impl Read + Write),
    output: &mut impl Write,
    is_wanted: &dyn Fn() -> bool,
) -> Exchanged {
    let (response, unread_input) = match http::read_request(input) {
        Ok(request) => (api.handle(&request, is_wanted), false),
        Err(refusal) => (refusal, true),
    };
    Exchanged { shutdown: response.shutdown, unread_input, sent: response.write_to(output) }
}
