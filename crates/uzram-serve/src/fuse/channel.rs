//! The way of a reply: a channel of the kernel's, or a list of replies in a test.
//!
//! A request is *under way* from its arrival until its reply was written. A [`Reply`] is sent exactly once: dropped
//! unsent, by a panic say, it is an I/O error.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::connection::Connection;
use super::ledger::{Ledger, UnderWay};
use super::proto::{Message, bytes_of, fuse_out_header};
use super::received::Outcomes;

/// Where replies go.
pub(super) trait Channel: Send + Sync + 'static {
    /// Sends a reply.
    ///
    /// # Errors
    /// Nobody waits for it, or the system's.
    fn send(&self, reply: &[IoSlice<'_>; 2]) -> io::Result<()>;

    /// Notes that a request is under way.
    fn begin(&self, unique: u64) -> UnderWay;

    /// Notes the errno of the reply that is about to be sent; 0 for success.
    fn decide(&self, errno: i32);

    /// Notes that a request was answered.
    fn end(&self, request: UnderWay);
}

/// One of a connection's channels; a reply goes through the one by which its request came.
pub(super) struct KernelChannel {
    pub connection: Arc<Connection>,
    pub ledger: Arc<Ledger>,
    /// Where outcomes are noted, if requests outlive this process.
    pub outcomes: Option<Arc<Outcomes>>,
    /// The number of the channel and of the thread that reads it.
    pub thread: usize,
}

impl KernelChannel {
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.channel(self.thread)
    }
}

impl Channel for KernelChannel {
    fn send(&self, reply: &[IoSlice<'_>; 2]) -> io::Result<()> {
        // A reply without data is one part: fewer for the kernel to look at.
        let parts = if reply[1].is_empty() { &reply[..1] } else { &reply[..] };
        // The kernel takes a reply as a whole or not at all.
        rustix::io::writev(self.fd(), parts)?;
        Ok(())
    }

    fn begin(&self, unique: u64) -> UnderWay {
        self.ledger.begin_request(self.thread, unique)
    }

    fn decide(&self, errno: i32) {
        if let Some(outcomes) = &self.outcomes {
            outcomes.decide(self.thread, errno);
        }
    }

    fn end(&self, request: UnderWay) {
        self.ledger.end_request(self.thread, request);
    }
}

/// Collects replies.
#[derive(Default)]
pub(super) struct Replies {
    state: Mutex<RepliesState>,
    all_ended: Condvar,
}

/// Protected by the lock, a leaf.
#[derive(Default)]
struct RepliesState {
    under_way: usize,
    replies: Vec<Vec<u8>>,
}

impl Replies {
    /// Waits until no request is under way; takes all replies so far.
    pub fn take(&self) -> Vec<Vec<u8>> {
        let is_busy = |state: &mut RepliesState| state.under_way > 0;
        let state = self.all_ended.wait_while(self.lock(), is_busy);
        std::mem::take(&mut state.unwrap_or_else(PoisonError::into_inner).replies)
    }

    fn lock(&self) -> MutexGuard<'_, RepliesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel for Replies {
    fn send(&self, reply: &[IoSlice<'_>; 2]) -> io::Result<()> {
        self.lock().replies.push([&*reply[0], &*reply[1]].concat());
        Ok(())
    }

    fn begin(&self, _: u64) -> UnderWay {
        self.lock().under_way += 1;
        UnderWay::default()
    }

    fn decide(&self, _: i32) {}

    fn end(&self, _: UnderWay) {
        self.lock().under_way -= 1;
        self.all_ended.notify_all();
    }
}

/// The reply that a request waits for.
pub(super) struct Reply<C: Channel> {
    channel: Arc<C>,
    /// The request's, as received.
    unique: u64,
    under_way: UnderWay,
    is_sent: bool,
}

impl<C: Channel> Reply<C> {
    /// Notes that the request is under way.
    pub fn new(channel: &Arc<C>, unique: u64) -> Self {
        let under_way = channel.begin(unique);
        Reply { channel: Arc::clone(channel), unique, under_way, is_sent: false }
    }

    pub fn data(self, bytes: &[u8]) {
        self.send(0, bytes);
    }

    pub fn message<T: Message>(self, message: &T) {
        self.send(0, bytes_of(message));
    }

    /// As `message`; returns whether the kernel took it, and will use what it tells.
    pub fn message_taken<T: Message>(mut self, message: &T) -> bool {
        self.write(0, bytes_of(message)).is_ok()
    }

    pub fn ok(self) {
        self.send(0, &[]);
    }

    pub fn error(self, errno: Errno) {
        self.send(errno.raw_os_error(), &[]);
    }

    /// Replies as `data` if `errno` is 0, else as `error`.
    pub fn outcome(self, errno: i32, bytes: &[u8]) {
        self.send(errno, if errno == 0 { bytes } else { &[] });
    }

    fn send(mut self, errno: i32, bytes: &[u8]) {
        match self.write(errno, bytes) {
            // `ENOENT`: the request was aborted; the others: so was the connection.
            Ok(()) => {}
            Err(error)
                if matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED)
                ) => {}
            Err(error) => tracing::warn!(%error, "the kernel refused a reply"),
        }
    }

    fn write(&mut self, errno: i32, bytes: &[u8]) -> io::Result<()> {
        self.is_sent = true;
        self.channel.decide(errno);
        // A reply is at most as long as the longest request.
        let len = (size_of::<fuse_out_header>() + bytes.len()) as u32;
        let header = fuse_out_header { len, error: -errno, unique: self.unique };
        let sent = self.channel.send(&[IoSlice::new(bytes_of(&header)), IoSlice::new(bytes)]);
        self.channel.end(std::mem::take(&mut self.under_way));
        sent
    }
}

impl<C: Channel> Drop for Reply<C> {
    fn drop(&mut self) {
        if !self.is_sent {
            // An error means that nobody waits.
            let _ = self.write(libc::EIO, &[]);
        }
    }
}
