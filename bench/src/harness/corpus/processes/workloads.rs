//! The programs of the `processes` corpus and their data: each some tens of MiB, built within a few seconds.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::super::generated::words;

/// A program whose memory is taken.
pub(super) struct Workload {
    /// Its name in tables.
    pub name: &'static str,
    /// The program to run.
    pub program: &'static str,
    /// Adds the program's arguments, and writes files that it needs to the folder that it will run in.
    pub prepare: fn(&Path, &mut Command) -> io::Result<()>,
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

pub(super) const ALL: [Workload; 6] = [
    Workload { name: "python", program: "python3", prepare: python, ready: Ready::Says },
    Workload { name: "c++", program: "g++", prepare: compiler, ready: Ready::Holds(96 << 20) },
    Workload { name: "node", program: "node", prepare: node, ready: Ready::Says },
    Workload { name: "redis", program: "redis-server", prepare: redis, ready: Ready::Filled(fill_redis) },
    Workload { name: "sqlite", program: "python3", prepare: sqlite, ready: Ready::Says },
    Workload { name: "jvm", program: "java", prepare: jvm, ready: Ready::Says },
];

/// A Python with so much memory that it is worth the while to park it: 1 GiB of its pages are taken.
pub(super) const LARGE_PYTHON: Workload =
    Workload { name: "python", program: "python3", prepare: large_python, ready: Ready::Says };

/// Syntax trees, lines, words and records of the standard library; again and again, until the process has so
/// many MiB.
const PYTHON: &str = include_str!("objects.py");

fn python(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", PYTHON, "0"]);
    Ok(())
}

/// With more than 1 GiB, for some pages are same-filled, and some of no use.
fn large_python(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", PYTHON, "1152"]);
    Ok(())
}

/// Tables and indexes of a database in memory.
const SQLITE: &str = include_str!("tables.py");

fn sqlite(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", SQLITE]);
    Ok(())
}

/// Parsed JSON, maps, closures, strings and typed arrays.
const NODE: &str = include_str!("objects.js");

fn node(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-e", NODE]);
    Ok(())
}

/// A tree, hash maps, strings and arrays of a program with a small heap, which is collected a few times.
const JVM: &str = include_str!("Main.java");

fn jvm(dir: &Path, command: &mut Command) -> io::Result<()> {
    fs::write(dir.join("Main.java"), JVM)?;
    command.args(["-Xmx192m", "Main.java"]);
    Ok(())
}

/// A program of many templates, which the compiler takes seconds for, and more memory than is waited for.
const COMPILED: &str = include_str!("main.cpp");

fn compiler(dir: &Path, command: &mut Command) -> io::Result<()> {
    fs::write(dir.join("main.cpp"), COMPILED)?;
    command.args(["-std=c++17", "-O2", "-g", "-ftemplate-depth=1000", "-c", "main.cpp", "-o", "main.o"]);
    Ok(())
}

const REDIS_SOCKET: &str = "redis.sock";

fn redis(_: &Path, command: &mut Command) -> io::Result<()> {
    // It persists nothing, and no other user can connect.
    command.args(["--port", "0", "--unixsocket", REDIS_SOCKET, "--unixsocketperm", "700"]);
    command.args(["--save", "", "--appendonly", "no"]);
    Ok(())
}

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
