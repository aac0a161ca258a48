//! Daemons whose files are written by programs of their own memory cgroup, version 1, which is at its limit.
//! For root, with the memory controller of cgroup v1. The daemons lack CAP_SYS_RESOURCE, with which they
//! would not wait.

use rustix::io::Errno;
use uzram::units::PAGE_SIZE;

use crate::common::*;

const LIMIT_BYTES: u64 = 130 * MIB;
const MEM_LIMIT: &str = "80M";
/// What is written compresses to less than `MEM_LIMIT`, and is more than the rest of the cgroup.
const COPIES: u64 = 15;
const SOURCE_BYTES: usize = 12 << 20;
/// Whoever carries out a request for this place of the disk dies, if the daemon is told so.
const DEADLY: u64 = 12 * MIB;
/// Page faults of a thread for pages that the kernel moves.
const MOST_MOVED_PAGES: u64 = 32;
const MAPPER_VARIABLE: &str = "UZRAM_TEST_MAPPER";

/// Maps a file shared, and writes all of it.
#[test]
#[ignore = "the process that another test starts"]
fn mapper() {
    let Some(path) = std::env::var_os(MAPPER_VARIABLE) else { return };
    let (source, len) = (contents(), COPIES as usize * SOURCE_BYTES);
    let map = Map::new(&open(path), len).unwrap();
    (0..len).step_by(SOURCE_BYTES).for_each(|at| map.write(at, &source));
    map.sync();
}

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

impl std::ops::Deref for Shared {
    type Target = BlockPlace;

    fn deref(&self) -> &BlockPlace {
        &self.place
    }
}

impl Shared {
    /// Prints why and returns `None` where there can be none.
    fn new(name: &str) -> Option<Shared> {
        let cgroup = Cgroup::new(name, LIMIT_BYTES)?;
        Some(Shared { place: BlockPlace::needing("setpriv unshare mkfs.ext4")?, cgroup })
    }

    /// Returns the command `uzram args` in the cgroup, without CAP_SYS_RESOURCE and these capabilities.
    fn command(&self, args: &(impl Words + ?Sized), without: &str) -> Command {
        let mut command = self.cgroup.command("setpriv");
        command.args(["--bounding-set", &format!("-sys_resource{without}"), UZRAM]);
        command.args(args.words()).env("UZRAM_RUNTIME_DIR", self.dir());
        command
    }

    fn up(&self, args: &str) -> Daemon {
        Daemon::start(self.command(&format!("up --size 256M {args}"), ""))
    }

    fn shell(&self, script: &str, args: &[&Path]) -> Command {
        let mut command = self.cgroup.command("sh");
        command.args(["-ec", script, "sh"]).args(args).env("PATH", program_path());
        command
    }

    /// Runs a program to its end; if it waits for ever, fails all requests for files first.
    fn ended(&self, command: &mut Command) -> Ended {
        let (mut child, deadline) = (start(command), Instant::now() + PATIENCE);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                self.abort();
                collect(child);
                panic!("it waits for ever");
            }
            thread::sleep(Duration::from_millis(5));
        }
        collect(child)
    }

    /// Fails all requests for files, now and later.
    fn abort(&self) {
        let list = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = self.mounts();
        for line in list.lines().filter(|line| line.contains(" - fuse ")) {
            let words = line.words();
            if mounts.iter().any(|dir| dir == words[4]) {
                let connections = "/sys/fs/fuse/connections";
                let abort = "mount -t fusectl none $0 && echo 1 > $0/$1/abort";
                let number = words[2].split_once(':').unwrap().1;
                let _ = isolated(abort).args([connections, number]).status();
            }
        }
    }

    /// Returns the page faults of the threads that serve files.
    fn faults(&self, daemon: &Daemon) -> Vec<(String, u64)> {
        let served_by = self.process("worker_pid").unwrap_or(daemon.process());
        let tasks = fs::read_dir(format!("/proc/{}/task", served_by.as_raw_pid())).unwrap();
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

    /// Writes a file system, larger than what the cgroup has left, and reads it. It is synced from outside of
    /// the cgroup.
    fn use_file_system(&self, device: &Path) {
        let (dir, source) = (self.mount_point("mounted"), self.place.write("source", contents()));
        let source = source.as_ref();
        let write = "mkfs.ext4 -q $1; mount $1 $2; for i in COPIES; do cp $3 $2/$i; done; echo written";
        let read = "umount $1; mount $2 $1; for i in COPIES; do cmp $3 $1/$i; done; umount $1";
        let [write, read] = [write, read].map(|script| script.replace("COPIES", &format!("$(seq {COPIES})")));
        let written = self.ended(&mut self.shell(&write, &[device, &dir, source]));
        assert_eq!(written.stdout, "written\n", "{written}");
        self.ended(Command::new("sync").arg("-f").arg(&dir));
        self.ended(&mut self.shell(&read, &[&dir, device, source])).ok();
    }
}

#[test]
fn a_file_system_is_written_by_a_program_of_the_daemons_cgroup() {
    let Some(shared) = Shared::new("attach") else { return };
    let daemon = shared.up(&format!("--mem-limit {MEM_LIMIT} --attach"));
    let [device] = &shared.loops()[..] else { panic!("{}", daemon.facts) };
    let before = shared.faults(&daemon);
    shared.use_file_system(Path::new(device));
    shared.assert_no_faults(&daemon, &before);
    shared.assert_zero("failed_writes failed_reads");
    shared.run("status").shows(&["memory charged in advance yes"]);
    // What is added or set later is charged in advance, too, whoever asks for it.
    shared.run("add zram1 --size 8M --mem-limit 8M --reserve 8M").ok();
    for refused in [
        "add zram2 --size 8M",
        "add zram2 --size 8M --mem-limit 8M --reserve 4M",
        "add zram2 --size 8M --mem-limit 8M --reserve 8M --recompress zstd",
        "set zram0 mem_limit=128M",
        "set zram1 mem_limit=0",
        &format!("set zram1 reset=1 backing_dev={}", shared.path("backing:8M")),
        "set zram1 disksize=8M",
    ] {
        shared.run(refused).says(1, "charged in advance");
    }
    assert!(fs::write(shared.files().join("mem_limit"), "128M").is_err());
    for args in ["set zram1 mem_limit=8M reserve=8M disksize=8M", "attach zram1", "detach zram1"] {
        shared.run(args).ok();
    }
    let said = shared.end_clean(daemon);
    assert!(said.contains("contents are lost if the process that serves dies"), "{said}");
}

#[test]
fn a_command_ends_a_daemon_without_a_stand_by() {
    let Some(shared) = Shared::new("exec") else { return };
    let command = "mkfs.ext4 -q $device && echo made && exit 7";
    let up = ["up", "--size", "64M", "--attach", "--log", "error", "--exec", command];
    let ended = finish(shared.command(&up, ""));
    assert_eq!((ended.stdout.as_str(), ended.status.code()), ("made\n", Some(7)), "{ended}");
    shared.assert_clean();
}

#[test]
fn a_file_is_mapped_and_made_a_loop_device_in_the_daemons_cgroup() {
    let Some(shared) = Shared::new("mount") else { return };
    let mount = shared.dir().join("mnt");
    let daemon = shared.up(&format!("--mem-limit {MEM_LIMIT} --mount {}", mount.display()));
    let before = shared.faults(&daemon);
    let mut mapper = shared.cgroup.command(std::env::current_exe().unwrap());
    mapper.args(["--exact", "memory_cgroup::mapper", "--ignored"]).env(MAPPER_VARIABLE, shared.disk());
    shared.ended(&mut mapper).ok();
    let device = succeed(&shared, "losetup", &["-f", "--show", arg(&shared.disk())]);
    shared.use_file_system(Path::new(device.trim()));
    succeed(&shared, "losetup", &["-d", device.trim()]);
    shared.assert_no_faults(&daemon, &before);
    shared.down();
    shared.assert_clean();
}

#[test]
fn what_would_wait_for_ever_is_refused() {
    let Some(shared) = Shared::new("refused") else { return };
    let backing = format!("--mem-limit 16M --backing {}", shared.path("backing:32M"));
    for command in ["up --size 64M --attach", "swap on --size 64M"] {
        for (options, without, why) in [
            (backing.as_str(), "", "--backing"),
            ("--recompress zstd", "", "--recompress"),
            ("--reserve 0", "", "--reserve"),
            ("", ",-ipc_lock", "CAP_IPC_LOCK"),
        ] {
            let ended = finish(shared.command(&format!("{command} {options}"), without));
            let cgroup = "memory cgroup of version 1 '/uzram-refused-";
            for said in ["zram0: ", cgroup, "130 MiB", why, "CAP_SYS_RESOURCE"] {
                ended.says(1, said);
            }
        }
    }
}

#[test]
fn files_are_served_without_the_page_cache_where_memory_is_not_charged_in_advance() {
    let Some(shared) = Shared::new("unsafe") else { return };
    let (mount, backing) = (shared.dir().join("mnt"), shared.path("backing:32M"));
    let options = format!("--backing {backing} --mount {} --give-up-after 1", mount.display());
    let mut command = shared.command(&format!("up --size 256M --mem-limit 16M {options}"), "");
    let daemon = Daemon::start(command.env("UZRAM_DIE_AT", DEADLY.to_string()));
    let check = |path: &Path| {
        shared.run("attach zram0").says(1, "memory cgroup of version 1").says(1, "--backing");
        let disk = open(path);
        disk.write_all_at(b"written", 0).unwrap();
        assert_eq!(Map::new(&disk, PAGE_SIZE).err(), Some(Errno::NODEV));
        disk
    };
    drop(check(&shared.disk()));
    // The next program knows, too, and so do its new files.
    shared.run("upgrade").ok();
    let disk = check(&shared.disk());
    assert!(disk.read_at(&mut [0; PAGE_SIZE], DEADLY).is_err());
    drop(disk);
    wait_until("the daemon gives up", || shared.run("status").stdout.contains("gave up"));
    let said = shared.run("recover zram0").ok();
    drop(check(Path::new(said.words().last().unwrap())));
    shared.end_clean(daemon);
}

#[test]
fn without_a_limit_nothing_is_charged_in_advance() {
    let Some(shared) = Shared::new("free") else { return };
    shared.cgroup.set_limit(1 << 62);
    let daemon = shared.up(&format!("--mem-limit 16M --attach --backing {}", shared.path("backing:32M")));
    let status = shared.run("status").ok();
    assert!(!status.contains("charged in advance"), "{status}");
    assert!(shared.process("worker_pid").is_some(), "it outlives the process that serves");
    shared.end_clean(daemon);
}

#[test]
fn swap_is_used_by_a_program_of_the_daemons_cgroup() {
    let Some(cgroup) = Cgroup::new("swap", LIMIT_BYTES) else { return };
    let Some(place) = BlockPlace::alone("setpriv") else { return };
    let shared = Shared { place, cgroup };
    let on = shared.command(&format!("swap on --size 256M --mem-limit {MEM_LIMIT}"), "");
    let device = swap_device(&finish(on).ok());
    // To compress pages again takes memory, and so does the stand-by, for which a file system would wait.
    assert_eq!(shared.get("recomp_algorithm"), "");
    shared.run("add zram1 --size 8M --mem-limit 8M --reserve 8M").ok();
    shared.run("attach zram1").says(1, "--no-survive");
    shared.run("remove zram1").ok();
    let hog = Hog::start(&shared.cgroup, LIMIT_BYTES / MIB, 1);
    wait_until("much is swapped out", || swapped_bytes(&device) > 32 * MIB);
    hog.verified(PATIENCE, false);
    // Writes may have failed while the reserve was filled: that waits.
    shared.assert_zero("failed_reads");
    shared.swap_off();
}
