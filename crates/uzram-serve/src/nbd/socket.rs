//! Connected stream sockets, of any kind, with a deadline.
//!
//! Time limits: a handshake has a deadline for everything. From then on a client may be idle for ever, but it must
//! take its replies, and send the payload that memory is held for, in [`Pace`].

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

/// How long a read polls before it sleeps, where the client has another CPU to run on.
///
/// A busy client sends its next bytes within microseconds, often as a header and then a payload, and sleeping and waking
/// for each costs more than polling. Measured with fio (4 KiB,
/// iodepth 16, two busy CPUs, medians of interleaved rounds) against 0: random reads 219 to 315 MB/s,
/// random writes 229 to 255, two jobs' writes 464 to 548; processor time a request 6.0 to 6.0, 7.1 to
/// 5.7 and 6.4 to 6.9 us. An idle connection sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// [`SPIN`], or nothing where there is one CPU.
static OWN_SPIN: LazyLock<Duration> = LazyLock::new(|| {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 { SPIN } else { Duration::ZERO }
});

/// How often a send that waits looks at its time limit, within that.
const SEND_LIMIT_PARTS: u32 = 10;

/// How long a closing connection waits for its client to hang up as well.
const LINGER: Duration = Duration::from_millis(500);
/// What it reads meanwhile, at most.
const MAX_LINGER_BYTES: usize = 1 << 20;

/// A connected stream socket, blocking, or with a deadline for everything it does.
pub(super) struct Socket {
    fd: Arc<OwnedFd>,
    deadline: Option<Instant>,
    /// How long a read without a deadline tries before it sleeps.
    spin: Duration,
    /// Ends reads without a deadline while it is armed.
    wake: Arc<Wake>,
    /// How long the client may keep a reply waiting; for ever, if none.
    send_timeout: Option<Duration>,
    /// The same for a payload.
    payload_timeout: Option<Duration>,
    /// The batch of replies that the client has begun to take.
    sending: Option<Pace>,
    /// The payload that is expected of it, by its number.
    receiving: Option<(u64, Pace)>,
}

impl Socket {
    /// A socket that waits for ever.
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

    /// How long the client may keep a reply waiting, and a payload that memory is held for.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeouts(&mut self, send: Duration, payload: Duration) -> io::Result<()> {
        // The kernel wakes a send that waits, so that one that does not costs no more than without a limit. It is
        // late by a part at most. No time at all would mean for ever.
        let part = (send / SEND_LIMIT_PARTS).max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Send, Some(part))?;
        (self.send_timeout, self.payload_timeout) = (Some(send), Some(payload));
        Ok(())
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// As [`Peer::of`].
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(&self.fd)
    }

    /// Another hold on the same connection, for [`Closer::close`] from another thread.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.fd))
    }

    /// What ends a read early, with `WouldBlock`: while it is armed and no deadline is set, when it is
    /// signalled and nothing has arrived.
    pub fn wake(&self) -> Arc<Wake> {
        Arc::clone(&self.wake)
    }

    /// From now on, reads and writes that are not done by `deadline` fail with `TimedOut`; `None`
    /// lets them wait for ever.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Ends the connection so that what was sent arrives.
    ///
    /// To close a socket that holds unread bytes resets the connection, and a reset overtakes what is
    /// still on its way: the last replies, or the end of a TLS session. So the client is told that
    /// nothing more comes, and has a moment to say the same.
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

/// Waits until something has arrived; `WouldBlock` when nothing has and `wake` was signalled, `TimedOut` at the
/// deadline.
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

/// `duration` for `poll`; a time too long for it becomes the longest.
pub(super) fn timespec(duration: Duration) -> Timespec {
    duration.try_into().unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

impl Socket {
    /// Waits as long as a read without a deadline may: for ever, unless a payload is expected, or a wake is armed.
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

    /// Notes which payload is expected.
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

    /// Sends as much as goes at once, or after some waiting, which the time limit bounds.
    fn send_in_pace(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            let sent = send(&self.fd, buf, SendFlags::NOSIGNAL);
            if sent == Ok(buf.len()) {
                self.sending = None;
                return Ok(buf.len());
            }
            let Some(limit) = self.send_timeout else { return Ok(sent?) };
            // The kernel has waited for a part of the limit, see `set_timeouts`.
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
    /// Lets the connection read what has arrived, and nothing more.
    pub fn end_input(&self) {
        self.shutdown(Shutdown::Read);
    }

    /// Fails everything the connection's thread waits for.
    pub fn close(&self) {
        self.shutdown(Shutdown::Both);
    }

    fn shutdown(&self, how: Shutdown) {
        // It fails only when the peer has gone already.
        let _ = shutdown(&self.0, how);
    }
}
