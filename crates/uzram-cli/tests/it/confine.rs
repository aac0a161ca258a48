//! The privileges that a daemon gives up once it serves, and the contents of its core file.

use crate::common::*;

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 64;
const SYS_ADMIN: u64 = 1 << 21;
const IPC_LOCK: u64 = 1 << 14;

fn capabilities(status: &str) -> u64 {
    u64::from_str_radix(status_field(status, "CapPrm"), 16).unwrap()
}

/// Fails unless all threads of a process have a seccomp filter, and exactly these capabilities.
fn assert_confined(process: Pid, capabilities_left: u64) {
    let mut seen = 0;
    for task in fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap() {
        // A thread may have ended meanwhile.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        assert_eq!(status_field(&status, "Seccomp"), "2", "{status}");
        assert_eq!(status_field(&status, "NoNewPrivs"), "1", "{status}");
        assert_eq!(capabilities(&status) & !capabilities_left, 0, "{status}");
        seen += 1;
    }
    assert!(seen >= 2, "{seen} threads");
}

/// Returns incompressible pages, all different.
fn secrets() -> Vec<u8> {
    Random::new(20).bytes(PAGES * PAGE_BYTES)
}

/// Returns the number of secret pages found in a file, by a part of each; and whether the file has the
/// program's environment, as a core file has.
fn found_in(path: &Path) -> (usize, bool) {
    let secrets = secrets();
    let mut left: Vec<&[u8]> = secrets.chunks(PAGE_BYTES).map(|page| &page[1024..1056]).collect();
    let mut has_other = false;
    let file = File::open(path).unwrap();
    let (mut bytes, mut at) = (vec![0; 16 << 20], 0);
    loop {
        let len = file.read_at(&mut bytes, at).unwrap();
        left.retain(|part| !contains(&bytes[..len], part));
        // The program's environment, on its stack.
        has_other |= contains(&bytes[..len], b"UZRAM_RUNTIME_DIR=");
        if len < bytes.len() {
            return (PAGES - left.len(), has_other);
        }
        // A match across the end is found in the next round.
        at += (len - 64) as u64;
    }
}

/// Returns the command `uzram args`, whose processes leave core files of any size in `dir`; prints why and
/// returns `None` if the machine stores them elsewhere.
fn with_cores(place: &Place, args: &str, dir: &Path) -> Option<Command> {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/']) {
        println!("skipped: core files of this machine go to {}", pattern.trim());
        return None;
    }
    Some(place.command_after(&format!("ulimit -c unlimited && cd {}", dir.display()), args))
}

fn core_file(dir: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("core"))
}

#[test]
fn users_memory_is_not_in_core_files() {
    // The place unmounts what is left.
    let place = BlockPlace::new(false);
    let cores = tempfile::tempdir().unwrap();
    let has_files = !not_root() && !lacks("/dev/fuse");
    let mount = if has_files { format!("--mount {}", place.path("mnt")) } else { String::new() };
    let args = format!("up --size 16M {mount}");
    let Some(command) = with_cores(&place, &args, cores.path()) else { return };
    let daemon = Daemon::start(command);
    let mut client = place.nbd();
    let secrets = secrets();
    for (number, page) in secrets.chunks(PAGE_BYTES).enumerate() {
        let at = (number * PAGE_BYTES) as u64;
        assert_eq!(client.write(at, page).error, 0);
        assert_eq!(client.read(0, at, PAGE_BYTES as u32).data(), page);
    }
    drop(client);
    if has_files {
        let path = place.root().join("mnt/zram0/disk");
        wait_until("the client is gone", || File::options().write(true).open(&path).is_ok());
        let (disk, mut read) = (open(&path), vec![0; secrets.len()]);
        disk.write_all_at(&secrets, 0).unwrap();
        disk.read_exact_at(&mut read, 0).unwrap();
        assert!(read == secrets);
    }
    for process in ["worker_pid", "standby_pid"] {
        let process = place.process(process).unwrap();
        kill_process(process, Signal::ABORT).unwrap();
        wait_until("it left a core file", || core_file(cores.path()).is_some());
        wait_until("it is gone", || place.process("standby_pid").is_some_and(|other| other != process));
        let core = core_file(cores.path()).unwrap();
        assert_eq!(found_in(&core), (0, true), "of {PAGES} pages");
        fs::remove_file(core).unwrap();
    }
    place.end(daemon);
}

#[test]
fn daemons_that_swap_leave_no_core_files() {
    let Some(place) = BlockPlace::alone("") else { return };
    let cores = tempfile::tempdir().unwrap();
    let Some(command) = with_cores(&place, "swap on --size 64M", cores.path()) else { return };
    finish(command).ok();
    place.run("swap status").shows(&["kept out of core files   yes"]);
    // Only the process that attaches needs other capabilities.
    place.wait_for_standby();
    assert_confined(place.worker_id(), SYS_ADMIN | IPC_LOCK);
    assert_confined(place.process("standby_pid").unwrap(), SYS_ADMIN | IPC_LOCK);
    kill_process(place.worker_id(), Signal::ABORT).unwrap();
    wait_until("another process serves", || {
        place.run("status").stdout.contains("take-overs               1")
    });
    kill_process(place.daemon_id(), Signal::ABORT).unwrap();
    wait_until("it is dead", || !place.run("status").status.success());
    place.run("swap off").ok();
    assert_eq!(core_file(cores.path()), None);
    place.assert_clean();
}

fn attendant_of(daemon: Pid) -> PathBuf {
    let attendants = children(daemon.as_raw_pid().cast_unsigned(), "attendant");
    format!("/proc/{}", attendants.first().expect("it has one")).into()
}

#[test]
fn the_process_that_attaches_has_nothing_of_the_daemons_and_outlives_its_program_but_not_the_daemon() {
    let Some(place) = BlockPlace::if_able() else { return };
    let program = place.root().join("uzram");
    fs::copy(UZRAM, &program).unwrap();
    let up = || {
        // With an open file of the caller, and a secret in the environment.
        let mut command = Command::new("sh");
        command.args(["-c", "exec 9</etc/passwd; exec \"$0\" up --size 1M --attach"]).arg(&program);
        Daemon::start(command.env("UZRAM_RUNTIME_DIR", place.dir()).env("SECRET", "secret"))
    };
    let daemon = up();
    let process = attendant_of(place.daemon_id());
    assert!(fs::read(process.join("environ")).unwrap().is_empty(), "it has an environment");
    let files = fs::read_dir(process.join("fd")).unwrap();
    let mut files: Vec<_> = files.map(|file| fs::read_link(file.unwrap().path()).unwrap()).collect();
    files.sort();
    let [null @ .., socket] = &files[..] else { panic!("{files:?}") };
    assert_eq!(null, ["/dev/null"; 3].map(PathBuf::from), "{files:?}");
    assert!(socket.to_str().unwrap().starts_with("socket:"), "{files:?}");
    // An update replaces the program by one with other options.
    let other = place.write("other", "#!/bin/sh\nexit 1\n");
    set_mode(&other, 0o755);
    fs::rename(&other, &program).unwrap();
    place.end_clean(daemon);
    wait_until("it has ended", || !process.exists());
    // A killed daemon cannot notify it.
    fs::remove_file(&program).unwrap();
    fs::copy(UZRAM, &program).unwrap();
    let daemon = up();
    let process = attendant_of(place.daemon_id());
    daemon.kill();
    wait_until("it has ended", || !process.exists());
    place.run("detach --force").ok();
    place.assert_clean();
}

#[test]
fn a_daemon_keeps_what_it_needs_and_no_more() {
    let place = Place::new();
    let daemon = place.up("");
    place.wait_for_standby();
    assert_confined(place.worker_id(), IPC_LOCK);
    assert_confined(place.process("standby_pid").unwrap(), IPC_LOCK);
    // Threads started later are confined, too, and the daemon still does everything.
    place.run(&format!("add other --size 8M --algorithm zstd:3 --backing {}", place.path("cold:8M"))).ok();
    let files = fs::read_dir(format!("/proc/{}/fd", place.worker_id().as_raw_nonzero())).unwrap();
    let files: Vec<_> = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(files.iter().any(|file| file.ends_with("cold")), "{files:?}");
    assert!(!files.iter().any(|file| file.to_string_lossy().contains("io_uring")), "{files:?}");
    assert!(works(&mut place.nbd(), 3));
    assert_confined(place.worker_id(), IPC_LOCK);
    place.run("remove other").ok();
    place.end(daemon);
}

#[test]
fn what_stays_in_another_users_directory_is_said() {
    let Some(place) = BlockPlace::if_able() else { return };
    let dir = place.mount_point("theirs");
    set_mode(place.root(), 0o755);
    chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
    let (socket, mnt) = (dir.join("nbd.sock"), dir.join("mnt"));
    let daemon = place.up(&format!("--listen unix:{} --mount {}", socket.display(), mnt.display()));
    place.run("down").ok();
    let said = daemon.succeeds();
    assert!(!socket.exists() && !mnt.exists(), "the holder, which is not confined, removes them: {said}");
    place.assert_clean();
}

#[test]
fn what_exec_starts_keeps_everything() {
    let place = Place::new();
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let exec = |show: &str, survives: &str| {
        place.run(&[&["up", "--size", "1M", "--exec", show], &survives.words()[..]].concat()).ok()
    };
    let shown = exec("grep -E '^(CapPrm|Seccomp|NoNewPrivs):' /proc/self/status", "");
    for name in ["CapPrm", "Seccomp", "NoNewPrivs"] {
        assert_eq!(status_field(&shown, name), status_field(&own, name), "{shown}");
    }
    // The process that serves is confined meanwhile.
    let show = format!(
        "worker=$('{UZRAM}' status | awk '/^worker/ {{ print $2 }}'); \
         grep -h -E '^(CapPrm|Seccomp|NoNewPrivs):' /proc/$worker/status"
    );
    for survives in ["", "--no-survive"] {
        let shown = exec(&show, survives);
        assert_eq!((status_field(&shown, "Seccomp"), status_field(&shown, "NoNewPrivs")), ("2", "1"));
        assert_eq!(capabilities(&shown) & !IPC_LOCK, 0, "{shown}");
    }
}

#[test]
fn a_users_mount_is_unmounted_by_a_program_that_may() {
    if not_root() || lacks("/dev/fuse") || missing("fusermount3 unshare setpriv") {
        return;
    }
    let place = Place::new();
    set_mode(place.root(), 0o755);
    // A place where all users can run it.
    fs::copy(UZRAM, place.root().join("uzram")).unwrap();
    let home = place.root().join("home");
    fs::create_dir(&home).unwrap();
    chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    // A namespace where all users can use FUSE.
    let mut command = isolated(
        "cd $0 && mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse && \
         exec setpriv --reuid 65534 --regid 65534 --clear-groups ./uzram up --size 1M --runtime-dir home/run \
         --mount home/run/mnt --exec 'ls home/run/mnt; grep Seccomp: /proc/$PPID/status'",
    );
    let ended = finish(command.arg(place.root()).env_remove("UZRAM_RUNTIME_DIR"));
    assert!(!ended.stderr.contains("WARN"), "{ended}");
    assert_eq!(ended.ok(), "zram0\nSeccomp:\t0\n");
    assert!(!home.join("run/mnt").exists(), "it was unmounted, and removed");
}
