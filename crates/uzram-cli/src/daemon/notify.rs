//! Notifications to the service manager, if there is one: sd_notify(3).

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr};

const SOCKET: &str = "NOTIFY_SOCKET";

/// How long the manager may take to read a descriptor.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reports that the devices are served; `status` is a line for people.
pub fn ready(status: &str) {
    notify(&["READY=1", &format!("STATUS={status}")]);
}

pub fn status(status: &str) {
    notify(&[&format!("STATUS={status}")]);
}

/// Has the manager keep a duplicate of a descriptor, by this name, until the next start of the service.
pub fn store(name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    send_all(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &mut ancillary)
}

/// Has the manager close what it keeps by this name.
pub fn forget(name: &str) -> io::Result<()> {
    send_all(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &mut SendAncillaryBuffer::default())
}

/// Sends a message that must arrive: waits for the manager to read, for a while.
fn send_all(message: &str, ancillary: &mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<()> {
    let socket = std::env::var_os(SOCKET).ok_or(io::ErrorKind::NotFound)?;
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(STORE_TIMEOUT))?;
    let message = [IoSlice::new(message.as_bytes())];
    sendmsg_addr(&sender, &address, &message, ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends assignments to the manager, if there is one. A failure is only logged.
fn notify(assignments: &[&str]) {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    if let Err(error) = send(&socket, assignments) {
        tracing::warn!("cannot tell the service manager at {SOCKET}={}: {error}", socket.display());
    }
}

fn send(socket: &OsStr, assignments: &[&str]) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(socket)?,
        _ => return Err(io::Error::other("neither a path from the root nor '@' and a name")),
    };
    // An assignment is one line.
    let lines: Vec<_> = assignments.iter().map(|line| line.replace('\n', " ")).collect();
    let message = lines.join("\n");
    // Do not wait for a manager that does not read.
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(manager: &UnixDatagram) -> String {
        let mut message = [0; 200];
        let len = manager.recv(&mut message).unwrap();
        str::from_utf8(&message[..len]).unwrap().to_owned()
    }

    #[test]
    fn the_manager_hears_of_it_at_a_path_or_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), &["READY=1", "STATUS=two\nlines"]).unwrap();
        assert_eq!(received(&manager), "READY=1\nSTATUS=two lines");

        let name = format!("uzram-notify-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), &["STOPPING=1"]).unwrap();
        assert_eq!(received(&manager), "STOPPING=1");
    }

    #[test]
    fn a_manager_that_is_not_there_or_does_not_read_holds_up_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        assert!(send(path.as_os_str(), &["READY=1"]).is_err());
        assert!(send(OsStr::new("notify"), &["READY=1"]).is_err());
        assert!(send(OsStr::new(""), &["READY=1"]).is_err());
        let _manager = UnixDatagram::bind(&path).unwrap();
        let full = (0..1_000_000).find(|_| send(path.as_os_str(), &["STATUS=again"]).is_err());
        assert!(full.is_some());
    }
}
