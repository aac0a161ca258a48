//! The programs of the `processes` corpus and their data: each some tens of MiB, built within a few seconds.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::super::files::words;

/// A program whose memory is taken.
pub(super) struct Workload {
    /// Its name in tables.
    pub name: &'static str,
    pub program: &'static str,
    pub args: &'static [&'static str],
    /// The name and the text of a file in the folder that it runs in.
    pub file: Option<(&'static str, &'static str)>,
    /// When it has built its data.
    pub ready: Ready,
}

/// How a program shows that it has built its data. It runs on after that, until it is ended.
pub(super) enum Ready {
    /// It prints `ready`.
    Says,
    /// One of its processes holds so many bytes of anonymous memory.
    Holds(u64),
    /// This, called again and again with the program's folder, has filled it.
    Filled(fn(&Path) -> io::Result<bool>),
}

const fn workload(
    name: &'static str,
    program: &'static str,
    args: &'static [&'static str],
    file: Option<(&'static str, &'static str)>,
    ready: Ready,
) -> Workload {
    Workload { name, program, args, file, ready }
}

pub(super) static ALL: [Workload; 6] = [
    workload("python", "python3", &["-c", PYTHON, "0"], None, Ready::Says),
    // Many templates, which the compiler takes seconds for, and more memory than is waited for.
    workload("c++", "g++", COMPILE, Some(("main.cpp", include_str!("main.cpp"))), Ready::Holds(96 << 20)),
    // Parsed JSON, maps, closures, strings and typed arrays.
    workload("node", "node", &["-e", include_str!("objects.js")], None, Ready::Says),
    workload("redis", "redis-server", REDIS, None, Ready::Filled(fill_redis)),
    // Tables and indexes of a database in memory.
    workload("sqlite", "python3", &["-c", include_str!("tables.py")], None, Ready::Says),
    // A tree, hash maps, strings and arrays of a program with a small heap, which is collected a few times.
    workload("jvm", "java", &["-Xmx192m", "Main.java"], Some(("Main.java", JVM)), Ready::Says),
];

/// A Python with so much memory that it is worth the while to park it: 1 GiB of its pages are taken, of more,
/// for some are same-filled, and some of no use.
pub(super) static LARGE_PYTHON: Workload =
    workload("python", "python3", &["-c", PYTHON, "1152"], None, Ready::Says);

/// Syntax trees, lines, words and records of the standard library; again and again, until the process has so
/// many MiB.
const PYTHON: &str = include_str!("objects.py");
const JVM: &str = include_str!("Main.java");
const COMPILE: &[&str] =
    &["-std=c++17", "-O2", "-g", "-ftemplate-depth=1000", "-c", "main.cpp", "-o", "main.o"];
const REDIS_SOCKET: &str = "redis.sock";
/// It persists nothing, and no other user can connect.
const REDIS: &[&str] = &[
    "--port",
    "0",
    "--unixsocket",
    REDIS_SOCKET,
    "--unixsocketperm",
    "700",
    "--save",
    "",
    "--appendonly",
    "no",
];

/// Fills a server with sessions, counters, lists and rankings, once it serves.
fn fill_redis(dir: &Path) -> io::Result<bool> {
    const COMMANDS: usize = 160_000;
    let stream = match UnixStream::connect(dir.join(REDIS_SOCKET)) {
        Ok(stream) => stream,
        // It does not serve yet.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;
    let (mut rng, mut answers) = (fastrand::Rng::with_seed(5), BufReader::new(stream.try_clone()?));
    let (words, mut line) = (words(&mut rng, 5000), String::new());
    let mut stream = stream;
    for from in (0..COMMANDS).step_by(1000) {
        let mut batch = String::new();
        for id in from..from + 1000 {
            let (first, second) = (&words[rng.usize(..5000)], &words[rng.usize(..5000)]);
            let (number, time) = (rng.u32(..100_000), 1_700_000_000 + rng.u32(..30_000_000));
            batch += &match id % 5 {
                0 => format!(
                    "SET session:{id} '{{\"user\":\"{first}\",\"token\":\"{:032x}\",\"at\":{time},\"cart\":[{number},{id}]}}'\r\n",
                    rng.u128(..)
                ),
                1 => format!(
                    "HSET user:{id} name {first}.{second} mail {first}@example.com visits {number} at {time}\r\n"
                ),
                2 => format!("RPUSH queue:{} {first}:{second}:{time}\r\n", id % 700),
                3 => format!("ZADD ranking:{} {number} {first}-{id}\r\n", id % 40),
                _ => format!("SET count:{first}:{id} {number}\r\n"),
            };
        }
        stream.write_all(batch.as_bytes())?;
        for _ in 0..1000 {
            line.clear();
            if answers.read_line(&mut line)? == 0 || line.starts_with('-') {
                return Err(io::Error::other(format!("it refused a command: {}", line.trim())));
            }
        }
    }
    Ok(true)
}
