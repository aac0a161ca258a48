//! Notifications to the service manager, if there is one: sd_notify(3).

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr};

const SOCKET: &str = "NOTIFY_SOCKET";

/// How long the manager may take to read a descriptor.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reports that the devices are served; `status` is a line for people.
pub fn ready(status: &str) {
    tell("READY=1\n", status);
}

pub fn status(status: &str) {
    tell("", status);
}

/// Has the manager keep a duplicate of a descriptor, by this name, until the next start of the service.
pub fn store(name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    store_or_forget(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &mut ancillary)
}

/// Has the manager close what it keeps by this name.
pub fn forget(name: &str) -> io::Result<()> {
    store_or_forget(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &mut SendAncillaryBuffer::default())
}

fn store_or_forget(message: &str, ancillary: &mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<()> {
    let socket = std::env::var_os(SOCKET).ok_or(io::ErrorKind::NotFound)?;
    send(&socket, message, ancillary, Some(STORE_TIMEOUT))
}

/// Tells the manager, if there is one. A failure is only logged.
fn tell(first: &str, status: &str) {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    if let Err(error) = send(&socket, &with_status(first, status), &mut SendAncillaryBuffer::default(), None)
    {
        tracing::warn!("cannot tell the service manager at {SOCKET}={}: {error}", socket.display());
    }
}

fn with_status(first: &str, status: &str) -> String {
    // An assignment is one line.
    format!("{first}STATUS={}", status.replace('\n', " "))
}

/// Sends a message; waits for so long for a manager that does not read, or not at all.
fn send(
    socket: &OsStr,
    message: &str,
    ancillary: &mut SendAncillaryBuffer<'_, '_, '_>,
    patience: Option<Duration>,
) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path @ [b'/', ..] => SocketAddrUnix::new(path)?,
        _ => return Err(io::Error::other("neither a path from the root nor '@' and a name")),
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(patience.is_none())?;
    sender.set_write_timeout(patience)?;
    sendmsg_addr(&sender, &address, &[IoSlice::new(message.as_bytes())], ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    use super::*;

    fn send_at_once(socket: &str, status: &str) -> io::Result<()> {
        let message = with_status("READY=1\n", status);
        send(socket.as_ref(), &message, &mut SendAncillaryBuffer::default(), None)
    }

    #[test]
    fn a_manager_hears_of_it_wherever_it_is_and_holds_up_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let at_path = path.to_str().unwrap();
        for socket in [at_path, "notify", ""] {
            assert!(send_at_once(socket, "").is_err(), "nobody is there: {socket}");
        }
        let name = format!("uzram-notify-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (manager, socket) in [
            (UnixDatagram::bind(&path).unwrap(), at_path),
            (UnixDatagram::bind_addr(&abstract_name).unwrap(), &format!("@{name}")),
        ] {
            send_at_once(socket, "two\nlines").unwrap();
            let mut message = [0; 200];
            let len = manager.recv(&mut message).unwrap();
            assert_eq!(str::from_utf8(&message[..len]), Ok("READY=1\nSTATUS=two lines"));
            // It does not read any more.
            let full = (0..1_000_000).find(|_| send_at_once(socket, "again").is_err());
            assert!(full.is_some());
        }
    }
}
