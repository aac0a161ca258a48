//! Messages between the processes of a daemon, with descriptors.
//!
//! A message is one datagram of JSON, with its descriptors in the order that the message says.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzram::backing::MAX_TIERS;
use uzram_serve::ExportPolicy;

/// The longest message. A datagram of this length fits into a socket's default buffer.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// The most descriptors of a message: memory, the parts of a backing device, and their key.
const MAX_DESCRIPTORS: usize = 2 + MAX_TIERS;

/// What a worker asks of the holder, which answers with [`Answer`].
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    Added {
        name: String,
        policy: ExportPolicy,
    },
    Removed {
        name: String,
    },
    /// A device has got its store. Comes with its memory and the descriptors of its backing device's parts.
    Keep {
        name: String,
        backing: Vec<KeptBacking>,
    },
    /// A device has given its store up.
    GiveUp {
        name: String,
    },
    /// The process serves; for the first time, or after a take-over.
    Serving(Served),
    Status(String),
    /// A control client or the user's ^C ends the daemon: if this process dies before, the next one ends it.
    WillEnd(End),
    /// Answered when what workers before began to attach or detach is done.
    Settle,
    /// All requests for files are to fail, now and later.
    FailFiles,
    /// A control client asks the daemon to end, and to leave everything to the service manager for its next
    /// start.
    Leave,
    /// A control client asks for new files in the place of those that failed.
    Recover,
    /// The command of `--exec` is to end, at once if it was told before.
    EndCommand,
    /// A control client asks for another program: the one at this path, or at that of the running one.
    Upgrade(Option<PathBuf>),
    /// The process has let go of everything and ends, with this exit status, or could not start.
    Ended(crate::failure::Result<u8>),
}

/// What the process that serves tells the holder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Served {
    pub status: String,
    pub address: crate::daemon::exec::Address,
}

/// The holder's answer to a request: done, or why not.
pub type Answer = std::result::Result<(), String>;

/// An order to a worker, from the holder; [`Order::End`] also from the worker's own control API.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// To a stand-by: another device. Comes with the memory and the descriptors of the backing device, if it
    /// has them.
    Device(KeptDevice),
    /// To a stand-by: a device is gone.
    Forget {
        name: String,
    },
    End(End),
    /// The user pressed ^C. The worker asks for a second one while NBD clients are connected; when it does
    /// end, it sends [`Request::WillEnd`].
    Interrupt,
    CommandEnded,
    Reload,
}

/// Who asked a daemon to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Signal(i32),
    Client {
        /// Even if devices are in use, except by swap.
        force: bool,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeptDevice {
    pub name: String,
    pub policy: ExportPolicy,
    /// Whether it has a store, whose memory is the first descriptor.
    pub has_memory: bool,
    /// The parts of its backing device, whose descriptors come next.
    pub backing: Vec<KeptBacking>,
}

/// A part of the backing device of a device that the holder keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptBacking {
    pub name: String,
    pub len_bytes: u64,
}

/// A device, with the descriptors of its memory and its backing device.
#[derive(Debug)]
pub struct Kept {
    pub device: KeptDevice,
    pub memory: Option<OwnedFd>,
    pub backing: Vec<OwnedFd>,
}

impl Kept {
    pub fn without_memory(name: String, policy: ExportPolicy) -> Kept {
        let device = KeptDevice { name, policy, has_memory: false, backing: Vec::new() };
        Kept { device, memory: None, backing: Vec::new() }
    }

    pub fn received(device: KeptDevice, descriptors: Vec<OwnedFd>) -> io::Result<Kept> {
        let mut descriptors = descriptors.into_iter();
        let memory = if device.has_memory { descriptors.next() } else { None };
        let backing: Vec<_> = descriptors.collect();
        match memory.is_some() == device.has_memory && backing.len() == device.backing.len() {
            true => Ok(Kept { device, memory, backing }),
            false => Err(io::Error::other("a message about a device has the wrong descriptors")),
        }
    }

    /// Returns the order that tells a stand-by of it, and its descriptors.
    pub fn order(&self) -> (Order, Vec<BorrowedFd<'_>>) {
        let descriptors = self.memory.iter().chain(&self.backing).map(AsFd::as_fd);
        (Order::Device(self.device.clone()), descriptors.collect())
    }
}

/// One end of a socket.
#[derive(Debug)]
pub struct Link(pub OwnedFd);

impl Link {
    pub fn pair() -> io::Result<(Link, Link)> {
        let flags = SocketFlags::CLOEXEC;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Link(one), Link(other)))
    }

    /// Sends a message. Waits if the other side has much to read.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, descriptors, SendFlags::NOSIGNAL)
    }

    /// As [`Link::send`], but fails with `WouldBlock` rather than waiting.
    pub fn try_send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, descriptors, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(
        &self,
        message: &impl Serialize,
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_DESCRIPTORS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, flags))?;
        Ok(())
    }

    /// Receives the next message; `None` when the other side is gone.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match retry_on_intr(|| recvmsg(&self.0, &mut parts, &mut ancillary, flags)) {
            // Its messages may be unread by us.
            Err(Errno::CONNRESET) => return Ok(None),
            received => received?,
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        match received.bytes {
            0 => Ok(None),
            len => Ok(Some((serde_json::from_slice(&bytes[..len])?, descriptors))),
        }
    }

    /// Sends a request, and waits for its answer; `None` when the other side is gone.
    pub fn ask<A: DeserializeOwned>(
        &self,
        request: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Option<A>> {
        match self.send(request, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            sent => sent?,
        }
        Ok(self.receive()?.map(|(answer, _)| answer))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
