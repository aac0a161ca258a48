//! Programs read and write a device's file while the processes that serve it are killed, one after another.
//!
//! Three kinds of processes, all of this program: this one, which holds the connection's descriptors and the
//! ledger; the servers, of which one serves and one stands by; and one with the programs' threads, which gets
//! only the path, so that it can end if the servers do not. The test [`role`] is what the other two do.
//!
//! Each server fills a device of its own with the same contents, and programs only write what is there: what
//! dies with a server is not missed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use std::{env, thread};

use rustix::io::FdFlags;
use uzram::device::Device;
use uzram::mem::ZeroedPages;
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_serve::Exports;
use uzram_serve::fuse::{Connection, ConnectionRecord, Ledger, Mount, MountOptions};

const ROLE: &str = "UZRAM_SURVIVAL_ROLE";
const RECORD: &str = "UZRAM_SURVIVAL_RECORD";
const FDS: &str = "UZRAM_SURVIVAL_FDS";
const DISK: &str = "UZRAM_SURVIVAL_DISK";
const NAME: &str = "d";
const PAGES: usize = 2048;
const THREADS: usize = 6;
const MAX_IO_PAGES: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(60);

fn fill(page: usize, bytes: &mut [u8]) {
    Random::new(page as u64).fill(&mut bytes[..PAGE_SIZE / 2]);
    bytes[PAGE_SIZE / 2..PAGE_SIZE].fill(page as u8);
}

fn exports() -> Exports {
    let device = Device::builder(NAME).build((PAGES * PAGE_SIZE) as u64).unwrap();
    let open = device.open().unwrap();
    let mut bytes = [0; PAGE_SIZE];
    for page in 0..PAGES {
        fill(page, &mut bytes);
        open.write((page * PAGE_SIZE) as u64, &bytes).unwrap();
    }
    drop(open);
    Exports::new([device])
}

/// Serves once a byte comes; after another byte, says how many files are open.
fn serve() {
    let record: ConnectionRecord = serde_json::from_str(&env::var(RECORD).unwrap()).unwrap();
    // SAFETY: the process that started this one left these descriptors open for it alone.
    let own = |fd: &str| unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
    let mut fds: Vec<_> = env::var(FDS).unwrap().split(',').map(own).collect();
    let ledger = Arc::new(Ledger::from_fd(fds.pop().unwrap()).unwrap());
    let connection = Arc::new(Connection::from_parts(record, fds).unwrap());
    let exports = exports();
    println!("ready");
    let mut byte = [0];
    io::stdin().read_exact(&mut byte).unwrap();
    ledger.begin_life();
    let mut mount = Mount::serve(connection, exports.clone(), Arc::clone(&ledger)).unwrap();
    io::stdin().read_exact(&mut byte).unwrap();
    let files = exports.other_files(NAME, 0, TIMEOUT);
    println!("{files} files");
    mount.join();
}

struct Server {
    child: Child,
    stdin: ChildStdin,
    lines: io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Server {
    fn start(connection: &Connection, ledger: &Ledger) -> Server {
        let (record, fds) = connection.parts();
        // Inherited: a copy that is not closed on exec.
        let inherit = |fd: BorrowedFd<'_>| {
            let copy = fd.try_clone_to_owned().unwrap();
            rustix::io::fcntl_setfd(&copy, FdFlags::empty()).unwrap();
            copy
        };
        let copies: Vec<_> = fds.chain([ledger.as_fd()]).map(inherit).collect();
        let numbers: Vec<_> = copies.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        let mut command = command("serve");
        command.env(RECORD, serde_json::to_string(record).unwrap()).env(FDS, numbers.join(","));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Server { child, stdin, lines: BufReader::new(stdout).lines() }
    }

    fn wait_for(&mut self, what: &str) -> String {
        let line = self.lines.find(|line| line.as_ref().unwrap().contains(what));
        line.expect("the server lives").unwrap()
    }

    fn tell(&mut self) {
        self.stdin.write_all(b"x").unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn command(role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "fuse_survival::role", "--nocapture"]).env(ROLE, role);
    command
}

/// Reads and writes in many threads until the standard input ends; prints the number of requests.
fn use_files() {
    let disk = PathBuf::from(env::var(DISK).unwrap());
    let (ends, done) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for index in 0..THREADS {
            let (disk, ends, done) = (&disk, &ends, &done);
            scope.spawn(move || {
                let mut random = Random::new(index as u64);
                while !ends.load(Relaxed) {
                    done.fetch_add(use_file(disk, &mut random), Relaxed);
                }
            });
        }
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
        ends.store(true, Relaxed);
    });
    println!("{} requests", done.into_inner());
}

/// Opens the file, uses it for a while and closes it; returns the number of requests.
fn use_file(disk: &Path, random: &mut Random) -> u64 {
    let size = fs::read_to_string(disk.with_file_name("disksize")).unwrap();
    assert_eq!(size.trim(), (PAGES * PAGE_SIZE).to_string());
    let writes = random.below(2) == 0;
    let file: File =
        OpenOptions::new().read(true).write(writes).custom_flags(libc::O_DIRECT).open(disk).unwrap();
    let count = 1 + random.below(30) as u64;
    let (mut buffer, mut wanted) =
        (ZeroedPages::new(MAX_IO_PAGES * PAGE_SIZE).unwrap(), vec![0; MAX_IO_PAGES * PAGE_SIZE]);
    for _ in 0..count {
        let (first, pages) = (random.below(PAGES - MAX_IO_PAGES), 1 + random.below(MAX_IO_PAGES));
        let (offset, len) = ((first * PAGE_SIZE) as u64, pages * PAGE_SIZE);
        for page in 0..pages {
            fill(first + page, &mut wanted[page * PAGE_SIZE..]);
        }
        if writes && random.below(2) == 0 {
            buffer[..len].copy_from_slice(&wanted[..len]);
            file.write_all_at(&buffer[..len], offset).unwrap();
        } else {
            buffer[..len].fill(0);
            file.read_exact_at(&mut buffer[..len], offset).unwrap();
            assert!(buffer[..len] == wanted[..len], "wrong bytes at {offset}");
        }
    }
    count
}

/// The kernel sends unanswered requests again if it can and may (`resend`); else they are found where they
/// were received.
fn requests_outlive_the_servers(resend: bool) {
    let dir = tempfile::tempdir().unwrap();
    let options = MountOptions { threads: 3, max_io_bytes: 128 << 10, resend, ..MountOptions::default() };
    let mounted = Connection::mount(&dir.path().join("mnt"), dir.path(), options);
    let outlives = |mut connection: Connection| connection.outlives().map(|()| connection);
    let connection = match mounted.and_then(outlives) {
        Ok(connection) => connection,
        Err(error) => return println!("skipped: {error}"),
    };
    let ledger = Ledger::new().unwrap();
    let multiple: u32 = env::var("UZRAM_TEST_ROUNDS").map_or(1, |text| text.parse().unwrap());
    let mut random = Random::new(u64::from(std::process::id()));
    let mut server = Server::start(&connection, &ledger);
    server.wait_for("ready");
    server.tell();
    let mut user = command("use files");
    user.env(DISK, connection.disk(NAME)).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut user = user.spawn().unwrap();
    for _ in 0..25 * multiple {
        let mut next = Server::start(&connection, &ledger);
        next.wait_for("ready");
        thread::sleep(Duration::from_micros(random.below_u64(20_000)));
        server.kill();
        next.tell();
        server = next;
    }
    let input = user.stdin.take();
    drop(input);
    let deadline = Instant::now() + TIMEOUT;
    while user.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the programs wait forever");
        thread::sleep(Duration::from_millis(10));
    }
    let output = user.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "a program saw an error: {said}");
    println!("{} kills, {said}", 25 * multiple);
    // All files were closed, each once.
    server.tell();
    assert!(server.wait_for("files").ends_with("0 files"));
    connection.unmount().unwrap();
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn requests_that_the_kernel_sends_again_outlive_the_servers() {
    requests_outlive_the_servers(true);
}

#[test]
fn requests_that_are_found_again_outlive_the_servers() {
    requests_outlive_the_servers(false);
}

#[test]
fn role() {
    match env::var(ROLE).as_deref() {
        Ok("serve") => serve(),
        Ok(_) => use_files(),
        Err(_) => {}
    }
}
