//! Reads from a single server on the thread that wants the bytes: its answer wakes this thread, and no other
//! one before, which halves the time of a read. Whatever is not answered at once is left to
//! [`Client`](super::client::Client), and so are servers with TLS. The runtime connects: a name and a login
//! can take long.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, ErrorKind as Kind, Parser, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use uzram::sync::Mutex;

use super::link::{CONNECTED_WITHIN, Credentials};
use crate::{Address, Server};

const WITHIN: Duration = Duration::from_millis(100);
/// After a failure, nothing is tried for so long.
const PAUSE: Duration = Duration::from_secs(1);
/// Connections at a time: one for each thread that reads.
const MAX_CONNECTIONS: usize = 16;
/// What an answer may have besides the bytes that were asked for: their length, or an error instead.
const MORE_BYTES: usize = 1024;

/// Connections to a server, each used by one thread at a time.
pub(super) struct Direct {
    shared: Arc<Shared>,
    runtime: Handle,
}

struct Shared {
    server: Server,
    database: u16,
    credentials: Credentials,
    state: Mutex<State>,
}

/// A connection on which one command at a time is sent, and each answer waited for.
struct Connection {
    stream: TcpStream,
    parser: Parser,
}

/// Reads an answer: up to so many bytes, until then.
struct Limited<'a> {
    stream: &'a TcpStream,
    left_bytes: usize,
    until: Instant,
}

#[derive(Default)]
struct State {
    idle: Vec<Connection>,
    in_use: usize,
    is_connecting: bool,
    failed: Option<Instant>,
}

impl Direct {
    /// Connects later, on the runtime of the caller.
    pub(super) fn new(address: &Address, server: Server, credentials: Credentials) -> Direct {
        let shared = Shared { server, database: address.database, credentials, state: Mutex::default() };
        Direct { shared: Arc::new(shared), runtime: Handle::current() }
    }

    /// Sends a command, and returns whether `accept` takes the bytes that are its answer, at most
    /// `most_bytes`; false if there is no connection yet, or that fails, or takes long.
    pub(super) fn ask(&self, command: &Cmd, most_bytes: usize, accept: impl FnOnce(&[u8]) -> bool) -> bool {
        let Some(mut connection) = self.connection() else { return false };
        let answer = connection.ask(command, most_bytes, WITHIN);
        let has_failed = !matches!(answer, Ok(Value::BulkString(_)));
        let is_accepted = matches!(answer, Ok(Value::BulkString(bytes)) if accept(&bytes));
        let mut state = self.shared.state.lock();
        state.in_use -= 1;
        if has_failed {
            state.idle.clear();
            state.failed = Some(Instant::now());
        } else if is_accepted {
            // The answers of any other may belong to other commands.
            state.idle.push(connection);
        }
        is_accepted
    }

    /// Returns a connection. If there is none, one is made for a later read.
    fn connection(&self) -> Option<Connection> {
        let mut state = self.shared.state.lock();
        if state.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        let connection = state.idle.pop();
        if connection.is_some() {
            state.in_use += 1;
        } else if !state.is_connecting && state.in_use < MAX_CONNECTIONS {
            state.is_connecting = true;
            let shared = Arc::clone(&self.shared);
            self.runtime.spawn_blocking(move || shared.connect());
        }
        connection
    }
}

impl Shared {
    fn connect(&self) {
        let connected = self.open();
        let mut state = self.state.lock();
        state.is_connecting = false;
        match connected {
            Ok(connection) => state.idle.push(connection),
            Err(_) => state.failed = Some(Instant::now()),
        }
    }

    fn open(&self) -> RedisResult<Connection> {
        let addresses = (self.server.host.as_str(), self.server.port).to_socket_addrs()?;
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECTED_WITHIN) {
                Ok(stream) => return self.log_in(stream),
                Err(error) => failure = error,
            }
        }
        Err(failure.into())
    }

    fn log_in(&self, stream: TcpStream) -> RedisResult<Connection> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WITHIN))?;
        let mut connection = Connection { stream, parser: Parser::new() };
        let mut login = Vec::new();
        if let Some(password) = &self.credentials.password {
            login.push(std::mem::take(redis::cmd("AUTH").arg(&self.credentials.user).arg(password)));
        }
        if self.database > 0 {
            login.push(std::mem::take(redis::cmd("SELECT").arg(self.database)));
        }
        for command in login {
            match connection.ask(&command, 0, CONNECTED_WITHIN)? {
                Value::Okay => {}
                _ => return Err(RedisError::from((Kind::UnexpectedReturnType, "an odd answer to a login"))),
            }
        }
        Ok(connection)
    }
}

impl Connection {
    fn ask(&mut self, command: &Cmd, most_bytes: usize, within: Duration) -> RedisResult<Value> {
        let until = Instant::now() + within;
        self.stream.write_all(&command.get_packed_command())?;
        let limited = Limited { stream: &self.stream, left_bytes: most_bytes + MORE_BYTES, until };
        self.parser.parse_value(limited)?.extract_error()
    }
}

impl Read for Limited<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let most_bytes = out.len().min(self.left_bytes);
        if most_bytes == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let len_bytes = self.stream.read(&mut out[..most_bytes])?;
        self.left_bytes -= len_bytes;
        Ok(len_bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::units::PAGE_SIZE;

    use super::*;
    use crate::redis::fake::Fake;

    fn idle(direct: &Direct) -> usize {
        direct.shared.state.lock().idle.len()
    }

    fn wait_until_idle(direct: &Direct) {
        let started = Instant::now();
        while idle(direct) == 0 {
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn direct_to(server: Server) -> Direct {
        let address = Address { servers: vec![server.clone()], tls: false, database: 0, size_bytes: None };
        Direct::new(&address, server, Credentials::default())
    }

    /// However a server draws its answer out, or whatever length it says, the read ends soon.
    #[test]
    fn an_answer_that_has_no_end_is_given_up() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        for (part, pause) in [(1, Duration::from_millis(20)), (1 << 20, Duration::ZERO)] {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let server = Server { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
            let thread = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let asked = stream.read(&mut [0; 100]).unwrap();
                let (mut sent, part) = (0, vec![b'a'; part]);
                let begun = stream.write_all(b"$9000000000000000000\r\n");
                while begun.is_ok() && stream.write_all(&part).is_ok() {
                    sent += part.len();
                    std::thread::sleep(pause);
                }
                (asked, sent)
            });
            let direct = runtime.block_on(async { direct_to(server) });
            let ask = || direct.ask(&redis::cmd("GET"), PAGE_SIZE, |_| true);
            assert!(!ask());
            wait_until_idle(&direct);
            let asked = Instant::now();
            assert!(!ask());
            assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
            let (asked, sent) = thread.join().unwrap();
            assert!(asked > 0 && sent < 64 << 20, "{sent} bytes");
        }
    }

    #[test]
    fn only_a_connection_whose_answers_are_good_is_used_again() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let fake = runtime.block_on(Fake::start("$2\r\nab\r\n"));
        let direct = runtime.block_on(async { direct_to(fake.server.clone()) });
        let ask = |is_good: bool| direct.ask(&redis::cmd("GET"), 2, |read| read == b"ab" && is_good);
        // The first read does not wait for a connection.
        assert!(!ask(true));
        for _ in 0..10 {
            wait_until_idle(&direct);
            assert!(ask(true));
        }
        assert_eq!((idle(&direct), fake.connections()), (1, 1));
        assert!(!ask(false));
        assert_eq!(idle(&direct), 0);
        assert!(!ask(true));
        wait_until_idle(&direct);
        assert!(ask(true));
        assert_eq!(fake.connections(), 2);
        // No answer in time.
        fake.answers_after(3 * WITHIN);
        assert!(!ask(true));
        assert_eq!(idle(&direct), 0);
        let state = direct.shared.state.lock();
        assert!(state.failed.is_some() && state.in_use == 0);
    }
}
