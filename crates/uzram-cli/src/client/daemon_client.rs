//! Client of a daemon's control API: one HTTP request and response per connection to its control socket.
//!
//! Only a daemon of this user or of root is trusted: only they can write to its directory ([`check_trusted`]), and
//! the process at the other end runs as one of them (unix(7), `SO_PEERCRED`).

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use uzram_serve::control::About;
use uzram_serve::control::percent::encode_segment;

use crate::failure::{Context, Failure, Result};
use crate::system::interrupts::Interrupts;
use crate::system::runtime_dir::{CONTROL_SOCKET, RuntimeArgs, check_trusted, socket_path};
use crate::terminal::live::StatusLine;

/// Time-out for each read of a response.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for an operation on all pages: recompression with a slow algorithm, or writeback to a disk, takes minutes
/// per 10 GiB.
const WORK_TIMEOUT: Duration = Duration::from_hours(6);
/// The longest response accepted: enough for the slab counters of a hundred devices on a hundred CPUs.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// Deserializes a response.
///
/// # Errors
/// The response has another structure.
pub fn understand<T: serde::de::DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context(|| "unexpected response from the daemon".to_owned())
}

/// The daemon of a runtime directory, running or not.
pub struct Daemon {
    /// The runtime directory.
    pub dir: PathBuf,
    socket: PathBuf,
    /// Time-out for each read of a response.
    pub answer_timeout: Duration,
}

impl Daemon {
    /// Returns the daemon of the runtime directory that these arguments name.
    ///
    /// # Errors
    /// They name no directory, or its path is too long.
    pub fn at(runtime: &RuntimeArgs) -> Result<Daemon> {
        Daemon::in_dir(runtime.path()?)
    }

    /// Returns the daemon of a runtime directory.
    ///
    /// # Errors
    /// The directory's path is too long.
    pub fn in_dir(dir: PathBuf) -> Result<Daemon> {
        Ok(Daemon { socket: socket_path(&dir, CONTROL_SOCKET)?, dir, answer_timeout: ANSWER_TIMEOUT })
    }

    /// Returns the daemon's description.
    ///
    /// # Errors
    /// As [`Daemon::ask`].
    pub fn about(&self) -> Result<About> {
        self.about_if_running()?.ok_or_else(|| self.absent())
    }

    /// Like [`Daemon::about`], but returns `None` if no daemon is running.
    ///
    /// # Errors
    /// The daemon does not respond in time, or responds with an error.
    pub fn about_if_running(&self) -> Result<Option<About>> {
        match self.connect()? {
            Some(mut stream) => {
                send(&mut stream, "GET", "/v1/daemon", None);
                understand(self.answer(stream)?)
            }
            None => Ok(None),
        }
    }

    /// Returns the value of a device's attribute.
    ///
    /// # Errors
    /// As [`Daemon::ask`].
    pub fn attribute(&self, device: &str, attribute: &str) -> Result<String> {
        let answer = self.ask("GET", &attribute_path(device, attribute), None)?;
        understand(answer["value"].clone())
    }

    /// Sends a request and returns the response: JSON, or null if it has no body.
    ///
    /// # Errors
    /// No daemon is running, or it does not respond in time, or responds with an error.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut stream = self.connect()?.ok_or_else(|| self.absent())?;
        send(&mut stream, method, path, body);
        self.answer(stream)
    }

    fn answer(&self, stream: UnixStream) -> Result<Value> {
        let mut bytes = Vec::new();
        match stream.take(MAX_ANSWER_BYTES).read_to_end(&mut bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(self.silent());
            }
            // A truncated response does not parse.
            _ => {}
        }
        outcome(&bytes)
    }

    /// Like [`Daemon::ask`], but for a long operation: calls `meanwhile` every [`StatusLine::PERIOD`]. On SIGINT it
    /// shuts down its side of the connection; the daemon then ends the operation and responds.
    ///
    /// # Errors
    /// As [`Daemon::ask`].
    pub fn ask_for_work(
        &self,
        (method, path, body): (&str, &str, &Value),
        interrupts: &Interrupts,
        mut meanwhile: impl FnMut(),
    ) -> Result<Value> {
        let mut stream = self.connect()?.ok_or_else(|| self.absent())?;
        send(&mut stream, method, path, Some(body));
        let failed = || "cannot wait for the daemon".to_owned();
        stream.set_read_timeout(Some(StatusLine::PERIOD)).context(failed)?;
        let (begun, mut is_told) = (Instant::now(), false);
        let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            match stream.read(&mut piece) {
                Ok(0) => return outcome(&bytes),
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if is_to_be_tried_again(&error) => {}
                // The bytes received so far give a better message.
                Err(_) => return outcome(&bytes),
            }
            if bytes.len() as u64 > MAX_ANSWER_BYTES || begun.elapsed() > WORK_TIMEOUT {
                return Err(Failure::Line(format!("the daemon in '{}' does not answer", self.dir.display())));
            }
            if !interrupts.came() {
                meanwhile();
            } else if !is_told {
                is_told = true;
                // Fails if the daemon has responded and closed the connection; the response is then read.
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    }

    /// Returns whether a process listens on the socket, possibly a stopped one. An ending process no longer listens,
    /// though it may still hold its memory and files.
    pub fn is_there(&self) -> bool {
        matches!(self.connect(), Ok(Some(_)))
    }

    /// Connects with time-outs, as the standard library's connect would wait forever for a stopped daemon.
    /// Returns `None` if no process listens.
    fn connect(&self) -> Result<Option<UnixStream>> {
        check_trusted(&self.dir)?;
        let connected = SocketAddrUnix::new(&self.socket).and_then(|address| {
            let socket = rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )?;
            sockopt::set_socket_timeout(&socket, Timeout::Send, Some(self.answer_timeout))?;
            sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(self.answer_timeout))?;
            rustix::net::connect(&socket, &address)?;
            Ok(UnixStream::from(socket))
        });
        let stream = match connected {
            Ok(stream) => stream,
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            Err(Errno::AGAIN) => return Err(self.silent()),
            Err(error) => {
                return Err(Failure::Line(format!("cannot connect to '{}': {error}", self.socket.display())));
            }
        };
        self.check_peer(&stream)?;
        Ok(Some(stream))
    }

    fn absent(&self) -> Failure {
        Failure::Line(format!("no daemon is running in '{}' (start one with `uzram up`)", self.dir.display()))
    }

    /// Fails unless the listening process runs as this user or root.
    fn check_peer(&self, stream: &UnixStream) -> Result<()> {
        let shown = self.socket.display();
        let peer = sockopt::socket_peercred(stream)
            .context(|| format!("cannot identify the process that listens at '{shown}'"))?;
        if peer.uid.is_root() || peer.uid == rustix::process::geteuid() {
            return Ok(());
        }
        Err(Failure::Line(format!(
            "the listener at '{shown}' is not trusted: it is a process of user {}; choose another --runtime-dir",
            peer.uid.as_raw()
        )))
    }

    fn silent(&self) -> Failure {
        Failure::Line(format!(
            "the daemon in '{}' has not answered for {} s",
            self.dir.display(),
            self.answer_timeout.as_secs()
        ))
    }
}

/// Returns the path of a device in the control API.
pub fn device_path(name: &str) -> String {
    format!("/v1/devices/{}", encode_segment(name))
}

/// Returns the path of a device's attribute in the control API.
pub fn attribute_path(name: &str, attribute: &str) -> String {
    format!("{}/attributes/{}", device_path(name), encode_segment(attribute))
}

/// Sends a request. Ignores write errors: a daemon that refuses early may close before it has read everything, and its
/// response says why.
fn send(stream: &mut UnixStream, method: &str, path: &str, body: Option<&Value>) {
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let _ = stream.write_all(request.as_bytes());
}

fn is_to_be_tried_again(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Returns the body of a complete HTTP response, or the error that it reports.
fn outcome(bytes: &[u8]) -> Result<Value> {
    let (status, body) = parse_answer(bytes)?;
    if status < 300 {
        return Ok(body);
    }
    match body["error"].as_str() {
        Some(error) => Err(Failure::line(error)),
        None => Err(Failure::Line(format!("the daemon answers with status {status}"))),
    }
}

/// Parses the status and JSON body of a complete HTTP response.
fn parse_answer(bytes: &[u8]) -> Result<(u16, Value)> {
    let ended_early = || Failure::line("the daemon ended before it had answered");
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let head_bytes = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) => return Err(ended_early()),
        Err(error) => return Err(Failure::Line(format!("the daemon does not speak HTTP: {error}"))),
    };
    let announced = response
        .headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case("content-length"))
        .and_then(|header| str::from_utf8(header.value).ok()?.parse::<usize>().ok());
    // A long body has no Content-Length and ends with the connection.
    let body = &bytes[head_bytes..];
    let body = announced.map_or(Some(body), |len| body.get(..len)).ok_or_else(ended_early)?;
    let value = match serde_json::from_slice(body) {
        Ok(value) => value,
        Err(_) if body.is_empty() && (announced.is_some() || response.code == Some(204)) => Value::Null,
        Err(error) if error.is_eof() => return Err(ended_early()),
        Err(error) => return Err(Failure::Line(format!("the daemon's answer is not JSON: {error}"))),
    };
    Ok((response.code.unwrap_or(0), value))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_cut_anywhere_is_an_error() {
        for length in ["Content-Length: 7\r\n", ""] {
            let answer = format!("HTTP/1.1 200 OK\r\n{length}\r\n{{\"a\":1}}");
            assert_eq!(parse_answer(answer.as_bytes()).unwrap(), (200, json!({ "a": 1 })));
            for len in 0..answer.len() {
                assert!(parse_answer(&answer.as_bytes()[..len]).is_err(), "{len}");
            }
        }
        assert_eq!(parse_answer(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap(), (204, Value::Null));
        assert!(parse_answer(b"SSH-2.0-OpenSSH\r\n").is_err());
    }
}
