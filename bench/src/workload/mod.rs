//! Programs that need much memory, and what they work on: by themselves, and in less memory than they need.

mod watched;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use uzram::random::Random;
use uzram::{Error, ErrorKind, Result};

use crate::block::PATIENCE;
use crate::harness::io_error;
use crate::harness::process::{self, require, run_to_end, temporary};
pub(crate) use watched::{Watched, watch};

/// Shell scripts whose arguments are a command to start the program with, or none.
const IN_DIR: &str = r#"cd "$1" && shift && exec "$@""#;

/// The amounts to work on.
#[derive(Clone, Debug)]
pub struct Amounts {
    /// What Python's objects take, about, in MiB.
    pub python_mib: u64,
    /// Rows of the table in SQLite.
    pub sqlite_rows: u64,
    /// Values of 1 KiB in Redis.
    pub redis_keys: u64,
    /// The size of the file that is sorted.
    pub sort_bytes: u64,
    /// Classes in the source that is compiled.
    pub classes: usize,
    /// Objects in node.
    pub node_items: u64,
    /// Objects in a JVM.
    pub jvm_items: u64,
}

impl Default for Amounts {
    fn default() -> Self {
        Amounts {
            python_mib: 2048,
            sqlite_rows: 600_000,
            redis_keys: 300_000,
            sort_bytes: 1 << 30,
            classes: 25,
            node_items: 1_500_000,
            jvm_items: 4_000_000,
        }
    }
}

impl Amounts {
    /// Returns amounts with which each program takes some seconds in half of its memory.
    pub fn medium() -> Amounts {
        Amounts {
            python_mib: 256,
            sqlite_rows: 120_000,
            redis_keys: 120_000,
            sort_bytes: 128 << 20,
            classes: 12,
            node_items: 700_000,
            jvm_items: 1_500_000,
        }
    }

    /// Returns amounts with which each program takes about a second.
    pub fn small() -> Amounts {
        Amounts {
            python_mib: 48,
            sqlite_rows: 40_000,
            redis_keys: 20_000,
            sort_bytes: 24 << 20,
            classes: 1,
            node_items: 80_000,
            jvm_items: 120_000,
        }
    }
}

/// A program to run with and without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Python builds and queries objects.
    Python,
    /// SQLite in memory.
    Sqlite,
    /// A Redis server is asked by redis-benchmark.
    Redis,
    /// GNU sort of a file.
    Sort,
    /// The C++ compiler.
    Compile,
    /// node with a large heap.
    Node,
    /// A JVM with a large heap.
    Jvm,
}

impl Workload {
    /// Those that `uzram run` is measured with.
    pub(crate) const LIMITED: [Workload; 6] = [
        Workload::Python,
        Workload::Sqlite,
        Workload::Redis,
        Workload::Sort,
        Workload::Compile,
        Workload::Node,
    ];
    /// Those that swap is measured with.
    pub(crate) const SWAPPED: [Workload; 5] =
        [Workload::Redis, Workload::Compile, Workload::Python, Workload::Node, Workload::Jvm];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Workload::Python => "python",
            Workload::Sqlite => "sqlite",
            Workload::Redis => "redis",
            Workload::Sort => "sort",
            Workload::Compile => "g++",
            Workload::Node => "node",
            Workload::Jvm => "jvm",
        }
    }

    /// `Unsupported` names a program that is missing here.
    pub(crate) fn check(self) -> Result<()> {
        require(match self {
            Workload::Python => &["/usr/bin/python3"],
            Workload::Sqlite => &["sqlite3"],
            Workload::Redis => &["redis-server", "redis-benchmark", "redis-cli"],
            Workload::Sort => &["sort"],
            Workload::Compile => &["g++"],
            Workload::Node => &["node"],
            Workload::Jvm => &["java", "javac"],
        })
    }

    /// Returns whether one round is enough: it takes minutes.
    pub(crate) fn is_long(self, amounts: &Amounts) -> bool {
        match self {
            Workload::Python => amounts.python_mib >= 1024,
            Workload::Sort => amounts.sort_bytes >= 1 << 29,
            _ => false,
        }
    }

    pub(crate) fn prepare(self, dir: &Path, amounts: &Amounts) -> Result<()> {
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(|error| io_error(&path, error))
        };
        match self {
            Workload::Python => write("hungry.py", include_str!("../../../examples/hungry.py")),
            Workload::Sqlite => {
                let rows = amounts.sqlite_rows.to_string();
                write("queries.sql", &include_str!("queries.sql").replace("ROWS", &rows))
            }
            Workload::Redis => write("redis.sh", include_str!("redis.sh")),
            Workload::Sort => {
                let path = dir.join("lines");
                write_lines(&path, amounts.sort_bytes).map_err(|error| io_error(&path, error))
            }
            Workload::Compile => write("large.cpp", &source(amounts.classes)),
            Workload::Node => write("heap.js", include_str!("heap.js")),
            Workload::Jvm => {
                write("Heap.java", include_str!("Heap.java"))?;
                let mut javac = process::command("javac");
                run_to_end(javac.arg("-d").arg(dir).arg(dir.join("Heap.java")), PATIENCE).map(drop)
            }
        }
    }

    /// Returns the command that runs it in that folder, started by `prefix`, which is a command, too, or
    /// nothing. It prints what the results are checked by.
    pub(crate) fn command(self, dir: &Path, amounts: &Amounts, prefix: &[String]) -> Command {
        let mut command = Command::new("bash");
        command.env("LC_ALL", "C").env_remove("LD_PRELOAD");
        let number = |number: u64| number.to_string();
        match self {
            Workload::Redis => {
                command.arg(dir.join("redis.sh")).arg(dir.join("socket")).arg(number(amounts.redis_keys));
                command.args(prefix);
            }
            Workload::Sort => {
                let script =
                    r#"cd "$1" && shift && "$@" sort -o sorted lines && sort -c sorted && wc -lc <sorted"#;
                command.args(["-c", script, "bash"]).arg(dir).args(prefix);
            }
            Workload::Compile => {
                let script =
                    r#"cd "$1" && shift && "$@" g++ -O2 -std=c++17 -S large.cpp -o large.s && cksum large.s"#;
                command.args(["-c", script, "bash"]).arg(dir).args(prefix);
            }
            Workload::Python => {
                command.args(["-c", IN_DIR, "bash"]).arg(dir).args(prefix);
                command.args(["/usr/bin/python3", "hungry.py"]).arg(number(amounts.python_mib));
            }
            Workload::Sqlite => {
                command.args(["-c", IN_DIR, "bash"]).arg(dir).args(prefix);
                command.args(["sqlite3", "-batch", "-bail", ":memory:", ".read queries.sql"]);
            }
            Workload::Node => {
                command.args(["-c", IN_DIR, "bash"]).arg(dir).args(prefix);
                command
                    .args(["node", "--max-old-space-size=8192", "heap.js"])
                    .arg(number(amounts.node_items));
            }
            Workload::Jvm => {
                command.args(["-c", IN_DIR, "bash"]).arg(dir).args(prefix);
                // It would choose by the memory and the CPUs that it sees.
                command.args(["java", "-XX:+UseSerialGC", "-Xmx4g", "-Xshare:auto", "-cp", ".", "Heap"]);
                command.arg(number(amounts.jvm_items));
            }
        }
        command
    }
}

/// A program with what it works on, and how it ran with enough memory.
pub(crate) struct Trial<'a> {
    workload: Workload,
    amounts: &'a Amounts,
    dir: TempDir,
    patience: Duration,
    stop: &'a AtomicBool,
    pub(crate) plain: Watched,
}

impl<'a> Trial<'a> {
    /// Prepares it in a new folder in `dir`, and runs it. It may take so long each time.
    pub(crate) fn new(
        workload: Workload,
        amounts: &'a Amounts,
        dir: &Path,
        patience: Duration,
        stop: &'a AtomicBool,
    ) -> Result<Trial<'a>> {
        let dir = temporary(dir)?;
        workload.prepare(dir.path(), amounts)?;
        let mut trial = Trial { workload, amounts, dir, patience, stop, plain: Watched::default() };
        trial.plain = trial.watch(&[])?;
        Ok(trial)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns half of the memory that it takes, or the least.
    pub(crate) fn half_bytes(&self, least_bytes: u64) -> u64 {
        (self.plain.peak_bytes / 2).max(least_bytes)
    }

    /// Runs it, started by `prefix`.
    pub(crate) fn run(&self, prefix: &[String], place: &str) -> Result<Watched> {
        let watched = self.watch(prefix)?;
        if watched.printed == self.plain.printed {
            return Ok(watched);
        }
        let what = format!("{} {place} printed something else than without a limit", self.workload.name());
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    fn watch(&self, prefix: &[String]) -> Result<Watched> {
        let mut command = self.workload.command(self.dir.path(), self.amounts, prefix);
        watch(&mut command, self.patience, || self.stop.load(Ordering::Relaxed))
            .map_err(|error| Error::new(error.kind(), format!("{}: {error}", self.workload.name())))
    }
}

/// Writes lines in no order.
fn write_lines(path: &PathBuf, bytes: u64) -> std::io::Result<()> {
    const WORDS: [&str; 13] = [
        "memory", "page", "slot", "handle", "fault", "thread", "queue", "device", "block", "limit", "cold",
        "idle", "zram",
    ];
    let mut file = BufWriter::new(File::create(path)?);
    let (mut random, mut written, mut line) = (Random::new(1), 0, String::new());
    while written < bytes {
        line.clear();
        let _ = write!(line, "{:016x}", random.next());
        for _ in 0..6 {
            let _ = write!(line, " {}", WORDS[random.next() as usize % WORDS.len()]);
        }
        let _ = writeln!(line, " {}", random.next() % 1_000_000);
        file.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    file.into_inner()?.sync_data()
}

/// Returns a C++ source that has templates instantiated for so many classes.
fn source(classes: usize) -> String {
    let mut text =
        "#include <algorithm>\n#include <functional>\n#include <map>\n#include <regex>\n#include <string>\n#include <vector>\n"
            .to_owned();
    for nth in 0..classes {
        let _ = write!(
            text,
            "struct S{nth} {{ std::string a; long b; std::vector<int> c; bool operator<(const S{nth} &o) const {{ return b < o.b; }} }};
long f{nth}(std::map<S{nth}, std::vector<S{nth}>> &m, std::vector<std::function<long(const S{nth} &)>> &g) {{
  long t = 0;
  std::vector<S{nth}> v;
  for (auto &[k, w] : m) {{ for (auto &h : g) t += h(k); v.insert(v.end(), w.begin(), w.end()); }}
  std::sort(v.begin(), v.end(), [](const S{nth} &x, const S{nth} &y) {{ return x.a < y.a; }});
  for (auto &x : v) m[x].push_back(x);
  return t;
}}
"
        );
    }
    text
}
