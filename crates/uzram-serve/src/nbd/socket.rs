//! Connected stream sockets, of any kind, with a deadline.
//!
//! Time limits: the whole handshake has one deadline. From then on a client may be idle forever, but it must
//! receive its replies, and send a payload for which memory is held, at the minimum speed of [`Pace`].

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt};

use super::clients::Peer;
use super::pace::Pace;
use super::wake::Wake;

/// How long a read polls before it sleeps, if there is another CPU for the client to run on.
///
/// A busy client sends its next bytes within microseconds, often as a header and then a payload, and sleeping and
/// waking for each costs more than polling. Measured with fio (4 KiB, iodepth 16, two busy CPUs, medians of interleaved
/// rounds) against 0: random reads 219 to 315 MB/s, random writes 229 to 255, two jobs' writes 464 to 548; processor
/// time a request 6.0 to 6.0, 7.1 to 5.7 and 6.4 to 6.9 us. An idle connection sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// [`SPIN`], or 0 on a machine with one CPU.
static OWN_SPIN: LazyLock<Duration> = LazyLock::new(|| {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 { SPIN } else { Duration::ZERO }
});

/// How many times a waiting send checks its time limit within that limit.
const SEND_LIMIT_PARTS: u32 = 10;

/// How long a closing connection waits for its client to close, too.
const LINGER: Duration = Duration::from_millis(500);
/// The most bytes that it reads meanwhile.
const MAX_LINGER_BYTES: usize = 1 << 20;

/// A connected stream socket, blocking, or with a deadline for everything it does.
pub(super) struct Socket {
    fd: Arc<OwnedFd>,
    deadline: Option<Instant>,
    /// How long a read without a deadline polls before it sleeps.
    spin: Duration,
    /// Ends reads without a deadline while it is armed.
    wake: Arc<Wake>,
    /// The limit on a client's delay in receiving replies; none if `None`.
    send_timeout: Option<Duration>,
    /// The same for sending a payload.
    payload_timeout: Option<Duration>,
    /// The batch of replies that is partly sent.
    sending: Option<Pace>,
    /// The number and progress of the expected payload.
    receiving: Option<(u64, Pace)>,
}

impl Socket {
    /// Creates a socket without time limits.
    pub fn new(fd: OwnedFd) -> Self {
        Socket {
            fd: Arc::new(fd),
            deadline: None,
            spin: *OWN_SPIN,
            wake: Arc::default(),
            send_timeout: None,
            payload_timeout: None,
            sending: None,
            receiving: None,
        }
    }

    /// Sets the limits on the client's delay in receiving replies, and in sending a payload for which memory is held.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeouts(&mut self, send: Duration, payload: Duration) -> io::Result<()> {
        // A time-out in the kernel costs nothing for a send that does not wait. The limit is exceeded by one part at
        // most. 0 would mean no time-out.
        let part = (send / SEND_LIMIT_PARTS).max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Send, Some(part))?;
        (self.send_timeout, self.payload_timeout) = (Some(send), Some(payload));
        Ok(())
    }

    /// Returns the peer.
    ///
    /// # Errors
    /// As [`Peer::of`].
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(&self.fd)
    }

    /// Returns a handle with which another thread can close the connection.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.fd))
    }

    /// Returns the [`Wake`] of this socket. While it is armed and no deadline is set, a signal ends a read
    /// with `WouldBlock` if nothing has arrived.
    pub fn wake(&self) -> Arc<Wake> {
        Arc::clone(&self.wake)
    }

    /// From now on, reads and writes that are not done by `deadline` fail with `TimedOut`; `None`
    /// removes the deadline.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Ends the connection gracefully, so that everything sent arrives.
    ///
    /// Closing a socket that holds unread bytes resets the connection, and a reset discards data in
    /// flight: the last replies, or the end of a TLS session. So this shuts down the sending side, and
    /// waits a moment for the client to close.
    pub fn finish(mut self) {
        if shutdown(&self.fd, Shutdown::Write).is_err() {
            return;
        }
        self.set_deadline(Instant::now().checked_add(LINGER));
        let mut thrown_away = [0; 4096];
        let mut left_bytes = MAX_LINGER_BYTES;
        while let Ok(len_bytes @ 1..) = self.read(&mut thrown_away) {
            left_bytes = left_bytes.saturating_sub(len_bytes);
            if left_bytes == 0 {
                return;
            }
        }
    }

    /// Waits until the socket is ready for `events`, or the deadline has passed.
    fn wait(&self, deadline: Instant, events: PollFlags) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&self.fd, events)];
        match poll(&mut fds, Some(&timespec(left)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

/// Waits until bytes have arrived; `WouldBlock` if none have and `wake` was signalled, `TimedOut` at the deadline.
fn wait_or_wake(
    fd: &OwnedFd,
    wake: &Wake,
    signal: Option<BorrowedFd<'_>>,
    deadline: Option<Instant>,
) -> io::Result<()> {
    let client = PollFd::new(fd, PollFlags::IN);
    let mut fds =
        [client.clone(), signal.map_or(client, |signal| PollFd::from_borrowed_fd(signal, PollFlags::IN))];
    loop {
        let left = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        match poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => continue,
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            result => result?,
        };
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        if !fds[1].revents().is_empty() {
            wake.wait()?;
            return Err(io::ErrorKind::WouldBlock.into());
        }
    }
}

/// Converts `duration` for `poll`; saturates.
pub(super) fn timespec(duration: Duration) -> Timespec {
    duration.try_into().unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

impl Socket {
    /// Waits for bytes before a read without a deadline: forever, unless a payload is expected, or a wake is armed.
    fn wait_for_client(&self) -> io::Result<()> {
        let (signal, pace) = (self.wake.armed(), self.receiving.map(|(_, pace)| pace));
        let deadline = pace.as_ref().and_then(Pace::deadline);
        if signal.is_none() && deadline.is_none() {
            return Ok(());
        }
        wait_or_wake(&self.fd, &self.wake, signal, deadline).map_err(|error| match &pace {
            Some(pace) if error.kind() == io::ErrorKind::TimedOut => pace.too_slow("it sent a payload"),
            _ => error,
        })
    }

    /// Starts or ends the pace of the payload that `wake` expects.
    fn expect(&mut self) {
        let expected = self.wake.expected_payload().zip(self.payload_timeout);
        if self.receiving.map(|(number, _)| number) != expected.map(|(number, _)| number) {
            self.receiving = expected.map(|(number, limit)| (number, Pace::new(limit)));
        }
    }

    fn received(&mut self, len_bytes: usize) -> usize {
        if let Some((_, pace)) = &mut self.receiving {
            pace.progress(len_bytes);
        }
        len_bytes
    }

    /// Sends as much as possible at once, or after waiting within the time limit.
    fn send_in_pace(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            let sent = send(&self.fd, buf, SendFlags::NOSIGNAL);
            if sent == Ok(buf.len()) {
                self.sending = None;
                return Ok(buf.len());
            }
            let Some(limit) = self.send_timeout else { return Ok(sent?) };
            // The kernel has waited for one part of the limit, see `set_timeouts`.
            let pace = self.sending.get_or_insert_with(|| Pace::new(limit));
            match sent {
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
                Ok(len_bytes) => pace.progress(len_bytes),
            }
            if pace.deadline().is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(pace.too_slow("it took its replies"));
            }
            if let Ok(len_bytes) = sent {
                return Ok(len_bytes);
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if let Some(deadline) = self.deadline {
            self.wait(deadline, PollFlags::IN)?;
            return Ok(recv(&self.fd, buf, RecvFlags::empty())?.1);
        }
        self.expect();
        if self.spin > Duration::ZERO {
            let started = Instant::now();
            while started.elapsed() < self.spin {
                match recv(&self.fd, &mut *buf, RecvFlags::DONTWAIT) {
                    Err(Errno::AGAIN) => std::hint::spin_loop(),
                    result => return Ok(self.received(result?.1)),
                }
            }
        }
        self.wait_for_client()?;
        let (_, len_bytes) = recv(&self.fd, buf, RecvFlags::empty())?;
        Ok(self.received(len_bytes))
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let Some(deadline) = self.deadline else {
            return self.send_in_pace(buf);
        };
        loop {
            self.wait(deadline, PollFlags::OUT)?;
            match send(&self.fd, buf, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                result => return Ok(result?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ends a connection from outside its thread.
pub(super) struct Closer(Arc<OwnedFd>);

impl Closer {
    /// Ends the connection's input after the bytes that have arrived.
    pub fn end_input(&self) {
        self.shutdown(Shutdown::Read);
    }

    /// Makes all reads and writes of the connection's thread fail.
    pub fn close(&self) {
        self.shutdown(Shutdown::Both);
    }

    fn shutdown(&self, how: Shutdown) {
        // Fails only when the peer has disconnected already.
        let _ = shutdown(&self.0, how);
    }
}
