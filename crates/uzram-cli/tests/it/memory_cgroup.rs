//! Daemons whose files are written by programs of their own memory cgroup, version 1, which is at its limit.
//! For root, with the memory controller of cgroup v1. The daemons lack CAP_SYS_RESOURCE, with which they
//! would not wait.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::common::block::{BlockPlace, Cgroup, Hog, swapped_bytes};
use crate::common::clients::{arg, succeed};
use crate::common::{Daemon, Ended, collect_within, finish, program_path, start, wait_until};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;

const MIB: u64 = 1 << 20;
/// The limit of a daemon and the program that writes.
const LIMIT_BYTES: u64 = 130 * MIB;
const MEM_LIMIT: &str = "80M";
/// What is written compresses to less than `MEM_LIMIT`, and is more than the rest of the cgroup.
const COPIES: u64 = 15;
const SOURCE_BYTES: usize = 12 << 20;
/// Whoever carries out a request for this place of the disk dies, if the daemon is told so.
const DEADLY: u64 = 12 * MIB;
/// A time limit for programs that would wait for ever.
const PATIENCE: Duration = Duration::from_secs(60);
/// Page faults of a thread for pages that the kernel moves.
const MOST_MOVED_PAGES: u64 = 32;
const MAPPER_VARIABLE: &str = "UZRAM_TEST_MAPPER";

/// Maps a file shared, and writes all of it.
#[test]
#[ignore = "the process that another test starts"]
fn mapper() {
    let Some(path) = std::env::var_os(MAPPER_VARIABLE) else { return };
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let len = COPIES as usize * SOURCE_BYTES;
    let (access, source) = (ProtFlags::READ | ProtFlags::WRITE, contents());
    // SAFETY: a new mapping, which only this test uses; the file is as long, and nobody truncates it.
    let memory = unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0).unwrap();
        std::slice::from_raw_parts_mut(start.cast::<u8>(), len)
    };
    memory.chunks_mut(SOURCE_BYTES).for_each(|part| part.copy_from_slice(&source));
    // SAFETY: the range is the mapping.
    unsafe { rustix::mm::msync(memory.as_mut_ptr().cast(), len, MsyncFlags::SYNC) }.unwrap();
}

/// Returns pages that are random by a third.
fn contents() -> Vec<u8> {
    let mut random = Random::new(1);
    let mut bytes = vec![0x5a; SOURCE_BYTES];
    let words = bytes.chunks_mut(PAGE_SIZE).flat_map(|page| page[..PAGE_SIZE / 3].chunks_exact_mut(8));
    words.for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
    bytes
}

/// A place, and a cgroup for a daemon and programs.
struct Shared {
    place: BlockPlace,
    cgroup: Cgroup,
}

impl Shared {
    /// Prints why and returns `None` where there can be none.
    fn new(name: &str, limit_bytes: u64) -> Option<Shared> {
        let cgroup = Cgroup::new(name, limit_bytes)?;
        Some(Shared { place: BlockPlace::needing(&["setpriv", "unshare", "mkfs.ext4"])?, cgroup })
    }

    /// Returns the command `uzram args` in the cgroup, without CAP_SYS_RESOURCE and these capabilities.
    fn command(&self, args: &[&str], without: &str) -> Command {
        let mut command = self.cgroup.command(Path::new("setpriv"));
        command.args(["--bounding-set", &format!("-sys_resource{without}"), env!("CARGO_BIN_EXE_uzram")]);
        command.args(args).env("UZRAM_RUNTIME_DIR", self.place.dir());
        command
    }

    fn up(&self, args: &[&str]) -> Daemon {
        Daemon::start(self.command(&[&["up", "--size", "256M"], args].concat(), ""))
    }

    fn refused(&self, args: &[&str], without: &str) -> String {
        finish(self.command(args, without)).complaint(1).to_owned()
    }

    /// Returns a shell script in the cgroup.
    fn shell(&self, script: &str, args: &[&Path]) -> Command {
        let mut command = self.cgroup.command(Path::new("sh"));
        command.args(["-ec", script, "sh"]).args(args).env("PATH", program_path());
        command
    }

    /// Waits for the end of a program; if it waits for ever, fails all requests for files first.
    fn ended(&self, mut child: Child) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                self.abort();
                collect_within(child, PATIENCE);
                panic!("it waits for ever");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        collect_within(child, PATIENCE)
    }

    /// Fails all requests for files, now and later.
    fn abort(&self) {
        let list = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_fuse = |line: &&str| line.contains(" - fuse ");
        for dir in self.place.mounts() {
            let mut lines = list.lines().filter(is_fuse);
            let Some(line) = lines.find(|line| line.split(' ').nth(4) == Some(&dir)) else { continue };
            let number = line.split(' ').nth(2).unwrap().split_once(':').unwrap().1;
            let script = "mount -t fusectl none /sys/fs/fuse/connections
                echo 1 > /sys/fs/fuse/connections/$0/abort";
            let _ = Command::new("unshare").args(["-m", "sh", "-c", script, number]).status();
        }
    }

    /// Returns the page faults of the threads that serve files.
    fn faults(&self, daemon: &Daemon) -> Vec<(String, u64)> {
        let worker = self.place.process("worker_pid").map(|worker| worker.as_raw_pid().unsigned_abs());
        let tasks = fs::read_dir(format!("/proc/{}/task", worker.unwrap_or(daemon.id()))).unwrap();
        let of_thread = |task: std::io::Result<fs::DirEntry>| {
            // A thread may have ended meanwhile.
            let stat = fs::read_to_string(task.unwrap().path().join("stat")).ok()?;
            let (name, fields) = stat.split_once('(')?.1.rsplit_once(')')?;
            let field = |number: usize| fields.split_whitespace().nth(number - 3)?.parse::<u64>().ok();
            // Minor and major ones, proc_pid_stat(5).
            name.starts_with("fuse-").then_some((name.to_owned(), field(10)? + field(12)?))
        };
        let mut faults: Vec<_> = tasks.filter_map(of_thread).collect();
        assert!(faults.len() >= 2, "{faults:?}");
        faults.sort();
        faults
    }

    /// Checks that the threads that serve took no page faults since `before`, but for a few: a thread also
    /// takes one when the kernel just moves a page, which charges nothing. To charge what was written takes
    /// thousands.
    fn assert_no_faults(&self, daemon: &Daemon, before: &[(String, u64)]) {
        let now = self.faults(daemon);
        for ((name, now), (same_name, before)) in now.iter().zip(before) {
            assert!(name == same_name && now - before < MOST_MOVED_PAGES, "{name}: {before}, then {now}");
        }
    }

    fn source(&self) -> PathBuf {
        let path = self.place.root().join("source");
        fs::write(&path, contents()).unwrap();
        path
    }

    /// Writes a file system, larger than what the cgroup has left, and reads it. It is synced from outside of
    /// the cgroup.
    fn use_file_system(&self, device: &Path) {
        let (dir, source) = (self.place.mount_point("mounted"), self.source());
        let copies = format!("$(seq {COPIES})");
        let write =
            format!("mkfs.ext4 -q $1; mount $1 $2; for i in {copies}; do cp $3 $2/$i; done; echo written");
        let written = self.ended(start(&mut self.shell(&write, &[device, &dir, &source])));
        assert_eq!(written.stdout, "written\n", "{}", written.stderr);
        self.ended(start(Command::new("sync").arg("-f").arg(&dir)));
        let read = format!("umount $1; mount $2 $1; for i in {copies}; do cmp $3 $1/$i; done; umount $1");
        self.ended(start(&mut self.shell(&read, &[&dir, device, &source]))).ok();
    }
}

#[test]
fn a_file_system_is_written_by_a_program_of_the_daemons_cgroup() {
    let Some(shared) = Shared::new("attach", LIMIT_BYTES) else { return };
    let daemon = shared.up(&["--mem-limit", MEM_LIMIT, "--attach"]);
    let [device] = &shared.place.loops()[..] else { panic!("{}", daemon.facts) };
    let before = shared.faults(&daemon);
    shared.use_file_system(Path::new(device));
    shared.assert_no_faults(&daemon, &before);
    let place = &shared.place;
    assert_eq!(place.statistic("failed_writes") + place.statistic("failed_reads"), 0);
    let status = place.run(&["status"]).ok();
    assert!(status.contains("memory charged in advance yes"), "{status}");
    // What is added or set later is charged in advance, too, whoever asks for it.
    let backing = format!("backing_dev={}:8M", place.root().join("backing").display());
    place.run(&["add", "zram1", "--size", "8M", "--mem-limit", "8M", "--reserve", "8M"]).ok();
    for refused in [
        &["add", "zram2", "--size", "8M"][..],
        &["add", "zram2", "--size", "8M", "--mem-limit", "8M", "--reserve", "4M"],
        &["add", "zram2", "--size", "8M", "--mem-limit", "8M", "--reserve", "8M", "--recompress", "zstd"],
        &["set", "zram0", "mem_limit=128M"],
        &["set", "zram1", "mem_limit=0"],
        &["set", "zram1", "reset=1", &backing],
        &["set", "zram1", "disksize=8M"],
    ] {
        let refused = place.run(refused);
        assert!(refused.complaint(1).contains("charged in advance"), "{}", refused.stderr);
    }
    assert!(fs::write(shared.place.files().join("mem_limit"), "128M").is_err());
    place.run(&["set", "zram1", "mem_limit=8M", "reserve=8M", "disksize=8M"]).ok();
    place.run(&["attach", "zram1"]).ok();
    place.run(&["detach", "zram1"]).ok();
    place.down();
    assert!(daemon.ended().1.contains("contents are lost if the process that serves dies"));
    shared.place.assert_clean();
}

#[test]
fn a_command_ends_a_daemon_without_a_stand_by() {
    let Some(shared) = Shared::new("exec", LIMIT_BYTES) else { return };
    let options = ["up", "--size", "64M", "--attach", "--log", "error"];
    let command = "mkfs.ext4 -q $device && echo made && exit 7";
    let ended = finish(shared.command(&[&options[..], &["--exec", command]].concat(), ""));
    assert_eq!((ended.stdout.as_str(), ended.status.code()), ("made\n", Some(7)), "{}", ended.stderr);
    shared.place.assert_clean();
}

#[test]
fn a_file_is_mapped_and_made_a_loop_device_in_the_daemons_cgroup() {
    let Some(shared) = Shared::new("mount", LIMIT_BYTES) else { return };
    let dir = shared.place.dir().join("mnt");
    let daemon = shared.up(&["--mem-limit", MEM_LIMIT, "--mount", arg(&dir)]);
    let before = shared.faults(&daemon);
    let mut mapper = shared.cgroup.command(&std::env::current_exe().unwrap());
    mapper.args(["--exact", "memory_cgroup::mapper", "--ignored"]).env(MAPPER_VARIABLE, shared.place.disk());
    shared.ended(start(&mut mapper)).ok();
    let place = &shared.place;
    let device = succeed(place, "losetup", &["-f", "--show", arg(&shared.place.disk())]);
    let device = device.trim();
    shared.use_file_system(Path::new(device));
    succeed(place, "losetup", &["-d", device]);
    shared.assert_no_faults(&daemon, &before);
    shared.place.down();
    shared.place.assert_clean();
}

#[test]
fn what_would_wait_for_ever_is_refused() {
    let Some(shared) = Shared::new("refused", LIMIT_BYTES) else { return };
    let backing = format!("{}:32M", shared.place.root().join("backing").display());
    let (attach, swap) = (["up", "--size", "64M", "--attach"], ["swap", "on", "--size", "64M"]);
    for command in [&attach[..], &swap] {
        let with_backing = [command, &["--mem-limit", "16M", "--backing", &backing]].concat();
        let recompressed = [command, &["--recompress", "zstd"]].concat();
        let small = [command, &["--reserve", "0"]].concat();
        for (args, without, why) in [
            (&*with_backing, "", "--backing"),
            (&recompressed, "", "--recompress"),
            (&small, "", "--reserve"),
            (command, ",-ipc_lock", "CAP_IPC_LOCK"),
        ] {
            let line = shared.refused(args, without);
            for part in
                ["zram0: ", "memory cgroup of version 1 '/uzram-refused-", "130 MiB", why, "CAP_SYS_RESOURCE"]
            {
                assert!(line.contains(part), "{part}: {line}");
            }
        }
    }
}

#[test]
fn files_are_served_without_the_page_cache_where_memory_is_not_charged_in_advance() {
    let Some(shared) = Shared::new("unsafe", LIMIT_BYTES) else { return };
    let place = &shared.place;
    let (dir, backing) = (place.dir().join("mnt"), format!("{}:32M", place.root().join("backing").display()));
    let options = ["up", "--size", "256M", "--mem-limit", "16M", "--backing", &backing, "--mount", arg(&dir)];
    let mut command = shared.command(&[&options[..], &["--give-up-after", "1"]].concat(), "");
    command.env("UZRAM_DIE_AT", DEADLY.to_string());
    let daemon = Daemon::start(command);
    let check = |path: &Path| {
        let line = place.run(&["attach", "zram0"]).complaint(1).to_owned();
        assert!(line.contains("memory cgroup of version 1") && line.contains("--backing"), "{line}");
        let disk = OpenOptions::new().read(true).write(true).open(path).unwrap();
        rustix::io::pwrite(&disk, b"written", 0).unwrap();
        assert_eq!(map_shared(&disk), Err(rustix::io::Errno::NODEV));
        disk
    };
    drop(check(&shared.place.disk()));
    // The next program knows, too, and so do its new files.
    place.run(&["upgrade"]).ok();
    let disk = check(&shared.place.disk());
    assert!(rustix::io::pread(&disk, &mut [0; PAGE_SIZE][..], DEADLY).is_err());
    drop(disk);
    wait_until("the daemon gives up", || place.run(&["status"]).stdout.contains("gave up"));
    let said = place.run(&["recover", "zram0"]).ok();
    drop(check(Path::new(said.split_whitespace().last().unwrap())));
    place.end_clean(daemon);
}

fn map_shared(file: &File) -> Result<(), rustix::io::Errno> {
    // SAFETY: a new mapping, which nobody uses.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, file, 0) }
        .map(drop)
}

#[test]
fn without_a_limit_nothing_is_charged_in_advance() {
    let Some(shared) = Shared::new("free", LIMIT_BYTES) else { return };
    shared.cgroup.set_limit(1 << 62);
    let backing = format!("{}:32M", shared.place.root().join("backing").display());
    let daemon = shared.up(&["--mem-limit", "16M", "--backing", &backing, "--attach"]);
    let status = shared.place.run(&["status"]).ok();
    assert!(!status.contains("charged in advance"), "{status}");
    assert!(shared.place.process("worker_pid").is_some(), "it outlives the process that serves");
    shared.place.end_clean(daemon);
}

#[test]
fn swap_is_used_by_a_program_of_the_daemons_cgroup() {
    let Some(shared) = Shared::new("swap", LIMIT_BYTES) else { return };
    let on = finish(shared.command(&["swap", "on", "--size", "256M", "--mem-limit", MEM_LIMIT], "")).ok();
    let device = on.lines().find_map(|line| line.strip_prefix("swap ")).unwrap();
    let device = device.split_whitespace().next().unwrap().to_owned();
    // To compress pages again takes memory, and so does the stand-by, for which a file system would wait.
    let place = &shared.place;
    assert_eq!(place.run(&["stat", "zram0", "recomp_algorithm"]).ok().trim(), "");
    place.run(&["add", "zram1", "--size", "8M", "--mem-limit", "8M", "--reserve", "8M"]).ok();
    let refused = place.run(&["attach", "zram1"]);
    assert!(refused.complaint(1).contains("--no-survive"), "{}", refused.stderr);
    place.run(&["remove", "zram1"]).ok();
    let hog = Hog::start(&shared.cgroup, LIMIT_BYTES / MIB, 1);
    wait_until("much is swapped out", || swapped_bytes(&device) > 32 * MIB);
    let ended = hog.ended(PATIENCE);
    assert!(ended.status.success(), "{}{}", ended.stdout, ended.stderr);
    // Writes may have failed while the reserve was filled: that waits.
    assert_eq!(place.statistic("failed_reads"), 0);
    place.run(&["swap", "off"]).ok();
    shared.place.assert_clean();
}
