//! Programs that need much memory, and what they work on: by themselves, and in less memory than they need.

use std::cell::Cell;
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use uzram::random::Random;
use uzram::{Error, ErrorKind, Result};

use crate::block::PATIENCE;
use crate::block::cgroup::LimitedCgroup;
use crate::harness::process::{self, Process, family, require, run_to_end, temporary};
use crate::harness::report::mib;
use crate::harness::{Report, io_error, proc_bytes};

/// How often the memory of a program is looked at.
const EVERY: Duration = Duration::from_millis(10);

/// A program to run with and without a limit.
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    programs: &'static [&'static str],
    /// How much it works on: for long runs, for some seconds in half of its memory, for about a second.
    pub(crate) amounts: [u64; 3],
    /// Whether a long run takes minutes, so that one is enough.
    pub(crate) is_long: bool,
    /// Writes what it works on to a folder.
    prepare: fn(&Path, u64) -> Result<()>,
    /// The shell's command that runs it in that folder: `$n` is the amount, `$@` a command to start the
    /// program with, or nothing. It prints what the results are checked by.
    script: &'static str,
}

/// Builds and queries objects that take about so many MiB.
pub(crate) static PYTHON: Workload = Workload {
    name: "python",
    programs: &["/usr/bin/python3"],
    amounts: [2048, 256, 48],
    is_long: true,
    prepare: |dir, _| write(dir, "hungry.py", include_str!("../../../examples/hungry.py")),
    script: r#"exec "$@" /usr/bin/python3 hungry.py $n"#,
};

/// In memory, a table of so many rows.
pub(crate) static SQLITE: Workload = Workload {
    name: "sqlite",
    programs: &["sqlite3"],
    amounts: [600_000, 120_000, 40_000],
    is_long: false,
    prepare: |dir, rows| {
        write(dir, "queries.sql", &include_str!("queries.sql").replace("ROWS", &rows.to_string()))
    },
    script: r#"exec "$@" sqlite3 -batch -bail :memory: ".read queries.sql""#,
};

/// A server with so many values of 1 KiB is asked by redis-benchmark.
static REDIS: Workload = Workload {
    name: "redis",
    programs: &["redis-server", "redis-benchmark", "redis-cli"],
    amounts: [300_000, 120_000, 20_000],
    is_long: false,
    prepare: |dir, _| write(dir, "redis.sh", include_str!("redis.sh")),
    script: r#"exec bash redis.sh "$PWD/socket" $n "$@""#,
};

/// GNU sort of a file of so many bytes.
pub(crate) static SORT: Workload = Workload {
    name: "sort",
    programs: &["sort"],
    amounts: [1 << 30, 128 << 20, 24 << 20],
    is_long: true,
    prepare: |dir, bytes| {
        let path = dir.join("lines");
        write_lines(&path, bytes).map_err(|error| io_error(&path, error))
    },
    script: r#""$@" sort -o sorted lines && sort -c sorted && wc -lc <sorted"#,
};

/// A source that has templates instantiated for so many classes.
static COMPILE: Workload = Workload {
    name: "g++",
    programs: &["g++"],
    amounts: [25, 12, 1],
    is_long: false,
    prepare: |dir, classes| {
        let (head, class) = include_str!("classes.cpp").split_once("\n\n").expect("a class after a head");
        let classes = (0..classes).map(|nth| class.replace("NTH", &nth.to_string()));
        write(dir, "large.cpp", &format!("{head}\n{}", classes.collect::<String>()))
    },
    script: r#""$@" g++ -O2 -std=c++17 -S large.cpp -o large.s && cksum large.s"#,
};

/// So many objects in a large heap.
static NODE: Workload = Workload {
    name: "node",
    programs: &["node"],
    amounts: [1_500_000, 700_000, 80_000],
    is_long: false,
    prepare: |dir, _| write(dir, "heap.js", include_str!("heap.js")),
    script: r#"exec "$@" node --max-old-space-size=8192 heap.js $n"#,
};

/// The same. It would choose by the memory and the CPUs that it sees.
static JVM: Workload = Workload {
    name: "jvm",
    programs: &["java", "javac"],
    amounts: [4_000_000, 1_500_000, 120_000],
    is_long: false,
    prepare: |dir, _| {
        write(dir, "Heap.java", include_str!("Heap.java"))?;
        let mut javac = process::command("javac");
        run_to_end(javac.arg("-d").arg(dir).arg(dir.join("Heap.java")), PATIENCE).map(drop)
    },
    script: r#"exec "$@" java -XX:+UseSerialGC -Xmx4g -Xshare:auto -cp . Heap $n"#,
};

/// Writes to so many MiB at once.
pub(crate) static BURST: Workload = Workload {
    name: "burst",
    programs: &["/usr/bin/python3"],
    amounts: [1024, 256, 64],
    is_long: false,
    prepare: |_, _| Ok(()),
    script: r#"exec "$@" /usr/bin/python3 -c "print(len(b'x' * ($n << 20)))""#,
};

/// Those that `uzram run` is measured with.
pub(crate) static LIMITED: [&Workload; 6] = [&PYTHON, &SQLITE, &REDIS, &SORT, &COMPILE, &NODE];
/// Those that swap is measured with.
pub(crate) static SWAPPED: [&Workload; 5] = [&REDIS, &COMPILE, &PYTHON, &NODE, &JVM];

impl Workload {
    /// `Unsupported` names a program that is missing here.
    pub(crate) fn check(&self) -> Result<()> {
        require(self.programs)
    }

    pub(crate) fn prepare(&self, dir: &Path, amount: u64) -> Result<()> {
        (self.prepare)(dir, amount)
    }

    /// Returns the command that runs it in that folder, started by `prefix`, which is a command, too, or
    /// nothing.
    pub(crate) fn command(&self, dir: &Path, amount: u64, prefix: &[String]) -> Command {
        let script = format!(r#"cd "$1" && n=$2 && shift 2 && {}"#, self.script);
        let mut command = Command::new("bash");
        command.env("LC_ALL", "C").env_remove("LD_PRELOAD");
        command.args(["-c", &script, "bash"]).arg(dir).arg(amount.to_string()).args(prefix);
        command
    }
}

fn write(dir: &Path, name: &str, text: &str) -> Result<()> {
    let path = dir.join(name);
    fs::write(&path, text).map_err(|error| io_error(&path, error))
}

/// A program with what it works on, and how it ran with enough memory.
pub(crate) struct Trial<'a> {
    workload: &'static Workload,
    amount: u64,
    dir: TempDir,
    patience: Duration,
    stop: &'a AtomicBool,
    /// How often a cgroup's limit was raised because the program waited.
    raised: Cell<usize>,
    pub(crate) plain: Watched,
}

impl<'a> Trial<'a> {
    /// Prepares it in a new folder in `dir`, and runs it. It may take so long each time.
    pub(crate) fn new(
        workload: &'static Workload,
        amount: u64,
        dir: &Path,
        patience: Duration,
        stop: &'a AtomicBool,
    ) -> Result<Trial<'a>> {
        let dir = temporary(dir)?;
        workload.prepare(dir.path(), amount)?;
        let (raised, plain) = (Cell::default(), Watched::default());
        let mut trial = Trial { workload, amount, dir, patience, stop, raised, plain };
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

    pub(crate) fn run_in_cgroup(&self, limit_bytes: u64) -> Result<Watched> {
        let cgroup = LimitedCgroup::new(limit_bytes)?;
        let watched = self.run(&cgroup.words(), "in a cgroup");
        self.raised.update(|raised| raised + cgroup.raised());
        watched
    }

    /// Adds what it takes with enough memory to a row, and a note if a cgroup's limit was raised.
    pub(crate) fn describe(&self, table: &str, row: &str, limit_bytes: u64, report: &mut Report) {
        let plain = [
            ("plain s", self.plain.seconds),
            ("peak MiB", mib(self.plain.peak_bytes)),
            ("limit MiB", mib(limit_bytes)),
        ];
        report.row(table, row, &plain);
        let (name, raised) = (self.workload.name, self.raised.get());
        let note = format!("{name}: the cgroup's limit was raised for a moment {raised} times");
        if raised > 0 && !report.notes.contains(&note) {
            report.note(note);
        }
    }

    /// Runs it, started by `prefix`.
    pub(crate) fn run(&self, prefix: &[String], place: &str) -> Result<Watched> {
        let watched = self.watch(prefix)?;
        if watched.printed == self.plain.printed {
            return Ok(watched);
        }
        let what = format!("{} {place} printed something else than without a limit", self.workload.name);
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    fn watch(&self, prefix: &[String]) -> Result<Watched> {
        let mut command = self.workload.command(self.dir.path(), self.amount, prefix);
        watch(&mut command, self.patience, || self.stop.load(Ordering::Relaxed))
            .map_err(|error| Error::new(error.kind(), format!("{}: {error}", self.workload.name)))
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Watched {
    pub(crate) printed: String,
    pub(crate) seconds: f64,
    /// The most memory of one of its processes, as the kernel counts it (`VmHWM`).
    pub(crate) peak_bytes: u64,
    /// The most anonymous memory of one process (`RssAnon`), in bytes, at each of the looks.
    anonymous: Vec<u64>,
}

/// Runs a command to its end, which must be a success, and looks at the memory of all processes that it
/// starts.
pub(crate) fn watch(command: &mut Command, timeout: Duration, stops: impl Fn() -> bool) -> Result<Watched> {
    let start = Instant::now();
    let mut process = Process::start(command)?;
    let mut watched = Watched::default();
    process.finish(timeout, stops, EVERY, |process| watched.look(process.id()))?;
    watched.seconds = start.elapsed().as_secs_f64();
    watched.printed = process.printed();
    Ok(watched)
}

impl Watched {
    fn look(&mut self, process: u32) {
        // Those that have ended meanwhile are gone.
        let bytes = |process: &u32, field| proc_bytes(&process.to_string(), "status", &[field]).unwrap_or(0);
        let all = family(process);
        let most = |field| all.iter().map(|process| bytes(process, field)).max().unwrap_or(0);
        self.peak_bytes = self.peak_bytes.max(most("VmHWM"));
        self.anonymous.push(most("RssAnon"));
    }

    /// Returns the most anonymous memory of one process at one of the looks, without the looks with most of
    /// it: those of so many seconds.
    pub(crate) fn anonymous_bytes(&self, without_seconds: f64) -> u64 {
        let mut looks = self.anonymous.clone();
        looks.sort_unstable_by_key(|bytes| Reverse(*bytes));
        let without = looks.len() as f64 * without_seconds / self.seconds;
        looks.get(without as usize).or(looks.last()).copied().unwrap_or(0)
    }
}

fn write_lines(path: &Path, bytes: u64) -> std::io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_what_a_program_starts_is_seen() {
        let mut command = Command::new("bash");
        command.args([
            "-c",
            "bash -c 'x=$(head -c 20000000 /dev/zero | tr \"\\\\0\" x); sleep 0.3; echo ${#x}'",
        ]);
        let watched = watch(&mut command, Duration::from_secs(60), || false).unwrap();
        assert_eq!(watched.printed, "20000000\n");
        assert!(watched.peak_bytes > 20_000_000 && watched.anonymous_bytes(0.1) > 20_000_000, "{watched:?}");
        assert!(watched.seconds > 0.3, "{watched:?}");
    }
}
