//! Client of a daemon's control API: one HTTP request and response per connection to its control socket.
//!
//! Only a daemon of this user or of root is trusted: only they can write to its directory
//! ([`check_trusted`]), and the process at the other end runs as one of them (unix(7), `SO_PEERCRED`).
//!
//! The process that serves can die, and another one take over: a request whose connection ended without a
//! whole response is sent again, as long as the daemon's lock is held, for [`PATIENCE`].

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};
use uzram_serve::control::About;
use uzram_serve::percent::encode_segment;

use crate::failure::{Context, Exit, Failure, Result};
use crate::system::interrupts::Interrupts;
use crate::system::runtime_dir::{
    CONTROL_SOCKET, OF_ROOT, RuntimeArgs, check_trusted, denied, is_of_root, socket_path, wait_until_free,
};
use crate::terminal::live::StatusLine;

/// Time-out for each read of a response.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for an operation on all pages, which may take minutes per 10 GiB.
const WORK_TIMEOUT: Duration = Duration::from_hours(6);
/// The longest response accepted: enough for `block_state` of a large disk.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// How long a request is sent again, since the first connection that ended without a whole response.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a request waits for a listener that a daemon's lock announces: the daemon starts, or ends.
const LISTENER_PATIENCE: Duration = Duration::from_secs(1);
/// Pauses between two tries: the first; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(200);
/// What a failure says if the request may have been carried out before.
const REPEATED: &str =
    " (asked again after the daemon's worker died: the first time may have been carried out)";

pub fn understand<T: serde::de::DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context(|| "unexpected response from the daemon")
}

/// The daemon of a runtime directory, running or not.
pub struct Daemon {
    pub dir: PathBuf,
    socket: PathBuf,
    pub answer_timeout: Duration,
    patience: Duration,
}

struct Request<'a> {
    method: &'a str,
    path: &'a str,
    body: Option<&'a Value>,
}

/// What is done while a long operation goes on.
struct Work<'a> {
    interrupts: &'a Interrupts,
    meanwhile: &'a mut dyn FnMut(),
}

/// Why there is no response to a request.
enum Unanswered {
    /// There is no socket; once it is given up, also that no process listens on it.
    Absent,
    /// No process listens on the socket.
    Refused,
    /// The connection ended before a whole response had come. The request may have been carried out. Once it
    /// is given up: the daemon has ended.
    Cut,
    /// A failure, or a response that is one.
    Failed(Failure),
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Unanswered::Failed(failure)
    }
}

type Answer = std::result::Result<Value, Unanswered>;

impl Request<'_> {
    fn is_idempotent(&self) -> bool {
        self.method == "GET" || self.path == "/v1/reload"
    }

    /// Sends it. Ignores write errors: a daemon that refuses early may close before it has read everything,
    /// and its response says why.
    fn send(&self, stream: &mut UnixStream) {
        let Request { method, path, body } = self;
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let _ = stream.write_all(request.as_bytes());
    }
}

impl Daemon {
    pub fn at(runtime: &RuntimeArgs) -> Result<Daemon> {
        Daemon::in_dir(runtime.path()?)
    }

    pub fn in_dir(dir: PathBuf) -> Result<Daemon> {
        let socket = socket_path(&dir, CONTROL_SOCKET)?;
        Ok(Daemon { dir, socket, answer_timeout: ANSWER_TIMEOUT, patience: PATIENCE })
    }

    pub fn about(&self) -> Result<About> {
        self.about_if_running()?.ok_or_else(|| self.absent())
    }

    pub fn about_if_running(&self) -> Result<Option<About>> {
        self.get_if_running("/v1/daemon")?.map(understand).transpose()
    }

    /// Returns the response to a GET request; `None` if no daemon is running.
    pub fn get_if_running(&self, path: &str) -> Result<Option<Value>> {
        match self.request(&Request { method: "GET", path, body: None }, None) {
            Err(Unanswered::Absent) => Ok(None),
            answer => answer.map(Some).map_err(|why| self.failure(why)),
        }
    }

    pub fn attribute(&self, device: &str, attribute: &str) -> Result<String> {
        let answer = self.ask("GET", &attribute_path(device, attribute), None)?;
        understand(answer["text"].clone())
    }

    /// Sends a request and returns the response: JSON, or null if it has no body.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        self.request(&Request { method, path, body }, None).map_err(|why| self.failure(why))
    }

    /// Like [`Daemon::ask`], but for a long operation: calls `meanwhile` every [`StatusLine::PERIOD`]. On
    /// SIGINT it shuts down its side of the connection; the daemon then ends the operation and responds.
    pub fn ask_for_work(
        &self,
        (method, path, body): (&str, &str, &Value),
        interrupts: &Interrupts,
        mut meanwhile: impl FnMut(),
    ) -> Result<Value> {
        let mut work = Work { interrupts, meanwhile: &mut meanwhile };
        self.request(&Request { method, path, body: Some(body) }, Some(&mut work))
            .map_err(|why| self.failure(why))
    }

    /// Asks the daemon to end, with `force` even if its devices are in use. Returns whether it said that it
    /// will; if not, it ended before it could.
    pub fn ask_to_end(&self, force: bool) -> Result<bool> {
        let body = json!({ "force": force });
        match self.request(&Request { method: "POST", path: "/v1/shutdown", body: Some(&body) }, None) {
            Ok(_) => Ok(true),
            Err(Unanswered::Cut) => Ok(false),
            Err(other) => Err(self.failure(other)),
        }
    }

    fn request(&self, request: &Request<'_>, mut work: Option<&mut Work<'_>>) -> Answer {
        let (mut cuts, mut pause, mut first_failure) = (0, FIRST_PAUSE, None);
        let noted = |failure: Failure, cuts: u32| match cuts == 0 || request.is_idempotent() {
            true => failure,
            false => failure.map_line(|line| line + REPEATED),
        };
        loop {
            let is_absent = match self.attempt(request, work.as_deref_mut()) {
                Ok(answer) => return Ok(answer),
                Err(Unanswered::Failed(failure)) => return Err(noted(failure, cuts).into()),
                Err(why) => {
                    cuts += u32::from(matches!(why, Unanswered::Cut));
                    matches!(why, Unanswered::Absent)
                }
            };
            let waited = first_failure.get_or_insert_with(Instant::now).elapsed();
            if cuts == 0 {
                if is_absent || waited >= LISTENER_PATIENCE || !self.is_held() {
                    return Err(Unanswered::Absent);
                }
            } else if !self.is_held() {
                return Err(Unanswered::Cut);
            } else if work.as_ref().is_some_and(|work| work.interrupts.came()) {
                return Err(Failure::line("interrupted").into());
            } else if waited >= self.patience {
                return Err(noted(self.died_again(cuts, waited), cuts).into());
            }
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn attempt(&self, request: &Request<'_>, work: Option<&mut Work<'_>>) -> Answer {
        let mut stream = self.connect()?;
        request.send(&mut stream);
        outcome(&self.read_answer(stream, work)?)?.ok_or(Unanswered::Cut)
    }

    /// Reads until the connection ends, in whatever way; a long operation may be silent meanwhile.
    fn read_answer(&self, mut stream: UnixStream, mut work: Option<&mut Work<'_>>) -> Result<Vec<u8>> {
        if work.is_some() {
            let failed = || "cannot wait for the daemon";
            stream.set_read_timeout(Some(StatusLine::PERIOD)).context(failed)?;
        }
        let dir = self.dir.display();
        let (begun, mut is_told) = (Instant::now(), false);
        let (mut bytes, mut piece) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            match stream.read(&mut piece).map_err(|error| error.kind()) {
                Ok(count @ 1..) => bytes.extend_from_slice(&piece[..count]),
                Err(ErrorKind::Interrupted) => {}
                Err(ErrorKind::WouldBlock | ErrorKind::TimedOut) if work.is_some() => {}
                Err(ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Err(self.silent()),
                // The bytes received so far say more than another error would.
                Ok(0) | Err(_) => return Ok(bytes),
            }
            if bytes.len() >= MAX_ANSWER_BYTES {
                return Err(Failure::line(format!("the answer of the daemon in '{dir}' is too long")));
            }
            let Some(work) = &mut work else { continue };
            if begun.elapsed() > WORK_TIMEOUT {
                return Err(Failure::line(format!("the daemon in '{dir}' does not answer")));
            }
            if !work.interrupts.came() {
                (work.meanwhile)();
            } else if !is_told {
                is_told = true;
                // Fails if the daemon has responded and closed the connection; the response is then read.
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    }

    fn is_held(&self) -> bool {
        // A lock that cannot be examined promises nothing.
        matches!(wait_until_free(&self.dir, Duration::ZERO), Ok(false))
    }

    /// Returns whether a process listens on the socket, possibly a stopped one. An ending process no longer
    /// listens, though it may still hold its memory and files.
    pub fn is_there(&self) -> bool {
        self.connect().is_ok()
    }

    /// Connects with time-outs, as the standard library's connect would wait forever for a stopped daemon.
    fn connect(&self) -> std::result::Result<UnixStream, Unanswered> {
        check_trusted(&self.dir)?;
        let connected = SocketAddrUnix::new(&self.socket).and_then(|address| {
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_timeout(&socket, Timeout::Send, Some(self.answer_timeout))?;
            sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(self.answer_timeout))?;
            rustix::net::connect(&socket, &address)?;
            Ok(UnixStream::from(socket))
        });
        let stream = connected.map_err(|error| match error {
            Errno::NOENT => Unanswered::Absent,
            Errno::CONNREFUSED => Unanswered::Refused,
            Errno::AGAIN => self.silent().into(),
            error => {
                let what = format!("cannot connect to '{}'", self.socket.display());
                denied(&self.dir, &what, &error.into()).into()
            }
        })?;
        self.check_peer(&stream)?;
        Ok(stream)
    }

    fn failure(&self, why: Unanswered) -> Failure {
        match why {
            Unanswered::Absent | Unanswered::Refused => self.absent(),
            Unanswered::Cut => Failure::line("the daemon ended before it had answered"),
            Unanswered::Failed(failure) => failure,
        }
    }

    pub fn absent(&self) -> Failure {
        let mut advice = "start one with `uzram up`".to_owned();
        if self.dir != Path::new(OF_ROOT) && is_of_root(Path::new(OF_ROOT)) {
            advice += &format!("; root's would be in {OF_ROOT}: use sudo");
        }
        let line = format!("no daemon is running in '{}' ({advice})", self.dir.display());
        Failure::line(line).with_exit(Exit::NoDaemon)
    }

    /// Fails unless the listening process runs as this user or root.
    fn check_peer(&self, stream: &UnixStream) -> Result<()> {
        let shown = self.socket.display();
        let peer = sockopt::socket_peercred(stream)
            .context(|| format!("cannot identify the process that listens at '{shown}'"))?;
        if peer.uid.is_root() || peer.uid == rustix::process::geteuid() {
            return Ok(());
        }
        Err(Failure::line(format!(
            "the listener at '{shown}' is not trusted: it is a process of user {}; choose another --runtime-dir",
            peer.uid.as_raw()
        )))
    }

    fn died_again(&self, cuts: u32, waited: Duration) -> Failure {
        let (dir, waited_s) = (self.dir.display(), waited.as_secs());
        let what = "ended the connection before it had answered";
        Failure::line(format!("the daemon in '{dir}' {what}, {cuts} times in {waited_s} s"))
    }

    fn silent(&self) -> Failure {
        let (dir, waited_s) = (self.dir.display(), self.answer_timeout.as_secs());
        Failure::line(format!("the daemon in '{dir}' has not answered for {waited_s} s"))
    }
}

pub fn device_path(name: &str) -> String {
    format!("/v1/devices/{}", encode_segment(name))
}

pub fn attribute_path(name: &str, attribute: &str) -> String {
    format!("{}/attributes/{}", device_path(name), encode_segment(attribute))
}

/// Returns the body of an HTTP response, or the error that it reports; `None` if it is not complete.
fn outcome(bytes: &[u8]) -> Result<Option<Value>> {
    let Some((status, body)) = parse_answer(bytes)? else { return Ok(None) };
    match (status, body["error"].as_str()) {
        (..300, _) => Ok(Some(body)),
        (_, Some(error)) => Err(Failure::line(error).with_setting(body["setting"].as_str())),
        (_, None) => Err(Failure::line(format!("the daemon answers with status {status}"))),
    }
}

/// Parses the status and JSON body of an HTTP response; `None` if it is not complete.
fn parse_answer(bytes: &[u8]) -> Result<Option<(u16, Value)>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let head_bytes = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(Failure::line(format!("the daemon does not speak HTTP: {error}"))),
    };
    let announced = response
        .headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case("content-length"))
        .and_then(|header| str::from_utf8(header.value).ok()?.parse::<usize>().ok());
    // A long body has no Content-Length and ends with the connection.
    let body = &bytes[head_bytes..];
    let Some(body) = announced.map_or(Some(body), |len| body.get(..len)) else { return Ok(None) };
    let value = match serde_json::from_slice(body) {
        Ok(value) => value,
        Err(_) if body.is_empty() && (announced.is_some() || response.code == Some(204)) => Value::Null,
        Err(error) if error.is_eof() && announced.is_none() => return Ok(None),
        Err(error) => return Err(Failure::line(format!("the daemon's answer is not JSON: {error}"))),
    };
    Ok(Some((response.code.unwrap_or(0), value)))
}

#[cfg(test)]
mod tests;
