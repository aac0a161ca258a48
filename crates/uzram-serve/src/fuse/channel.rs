//! The way of a reply to the kernel.
//!
//! A request is *under way* from its arrival until its reply was written. A [`Reply`] is sent exactly once:
//! dropped unsent, by a panic say, it is an I/O error.

use std::io::{self, IoSlice};
use std::sync::Arc;

use rustix::io::Errno;
use uzram::sync::Mutex;

use super::connection::Connection;
use super::ledger::{Ledger, UnderWay};
use super::proto::{Message, bytes_of, fuse_out_header};
use super::received::Outcomes;

pub(super) struct Channel {
    pub sink: Sink,
    pub ledger: Arc<Ledger>,
    /// Where outcomes are noted, if requests outlive this process.
    pub outcomes: Option<Arc<Outcomes>>,
    /// The number of the channel and of the thread that reads it.
    pub thread: usize,
}

pub(super) enum Sink {
    Kernel(Arc<Connection>),
    /// For tests and fuzzers.
    Memory(Mutex<Vec<Vec<u8>>>),
}

impl Channel {
    fn send(&self, reply: &[IoSlice<'_>; 2]) -> io::Result<()> {
        // A reply without data is one part: fewer for the kernel to look at.
        let parts = if reply[1].is_empty() { &reply[..1] } else { &reply[..] };
        match &self.sink {
            // The kernel takes a reply as a whole or not at all.
            Sink::Kernel(connection) => {
                rustix::io::writev(connection.channel(self.thread), parts).map(drop)?
            }
            Sink::Memory(replies) => replies.lock().push([&*reply[0], &*reply[1]].concat()),
        }
        Ok(())
    }
}

pub(super) struct Reply {
    channel: Arc<Channel>,
    unique: u64,
    under_way: UnderWay,
    is_sent: bool,
}

impl Reply {
    pub fn new(channel: &Arc<Channel>, unique: u64) -> Self {
        let under_way = channel.ledger.begin_request(channel.thread, unique);
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
        let Channel { ledger, outcomes, thread, .. } = &*self.channel;
        if let Some(outcomes) = outcomes {
            outcomes.decide(*thread, errno);
        }
        // A reply is at most as long as the longest request.
        let len = (size_of::<fuse_out_header>() + bytes.len()) as u32;
        let header = fuse_out_header { len, error: -errno, unique: self.unique };
        let sent = self.channel.send(&[IoSlice::new(bytes_of(&header)), IoSlice::new(bytes)]);
        ledger.end_request(*thread, std::mem::take(&mut self.under_way));
        sent
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.is_sent {
            // An error means that nobody waits.
            let _ = self.write(libc::EIO, &[]);
        }
    }
}
