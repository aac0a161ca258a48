//! Attacks on a daemon's block devices, swap areas and mounts: mounts with forged sources, moved and
//! unmounted directories, containers with the same paths, reused numbers, and NBD clients of attached
//! devices. For root.

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;

use rustix::mount::{MountFlags, UnmountFlags};
use uzram_serve::nbd::proto::{NbdError, option, reply, transmission_flags};

use crate::common::*;
use crate::nbd::info_request;

/// Ends a daemon after a failed test, which could not be found otherwise when its directories are lost.
struct NotLeft(Pid);

impl Drop for NotLeft {
    fn drop(&mut self) {
        if thread::panicking() && is_running(self.0) {
            let _ = kill_process(self.0, Signal::KILL);
        }
    }
}

fn wait_for_end(pid: Pid) {
    wait_until("the daemon has ended", || !is_running(pid));
}

fn kill_whole(pid: Pid) {
    kill(pid);
    wait_for_end(pid);
}

/// A mount by fusermount3(1) for user 65534, with a source of that user's choice. No process serves it.
struct LyingMount {
    dir: PathBuf,
    _connection: File,
}

impl LyingMount {
    fn new(dir: PathBuf, source: &str) -> LyingMount {
        let connection = open("/dev/fuse");
        let data = format!("fd={},rootmode=40000,user_id=65534,group_id=65534", connection.as_raw_fd());
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        rustix::mount::mount(source, &dir, "fuse", flags, &*CString::new(data).unwrap()).unwrap();
        LyingMount { dir, _connection: connection }
    }
}

impl Drop for LyingMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH);
    }
}

#[test]
fn a_mounts_source_proves_nothing() {
    let Some(place) = BlockPlace::needing("mkfs.ext4") else { return };
    let (daemon, device) = place.up_attached("16M", "");
    let owner = format!("uzram:{}", place.dir().display());
    let _device_of_theirs = LyingMount::new(place.mount_point("a"), &device);
    let _files_of_theirs = LyingMount::new(place.mount_point("b"), &owner);
    // The device is free, and the only daemon here is running.
    place.run("detach zram0").ok();
    place.run("attach zram0").ok();
    place.run("detach --force").says(1, "lives");
    place.end(daemon);
    // Clearing after a dead daemon does not touch the attacker's mounts.
    let (daemon, _) = place.up_attached("16M", "");
    place.wait_for_standby();
    daemon.kill();
    let said = place.run("detach --force").shows(&["freed /dev/loop", "/mnt"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    assert_eq!(place.mounts().len(), 2, "{:?}", place.mounts());
}

/// How a daemon can lose its directories.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    LazyUnmount,
    Moved,
    /// The file system of its runtime directory is detached, with all mounts below it.
    TmpfsGone,
}

impl Loss {
    const ALL: [Loss; 3] = [Loss::LazyUnmount, Loss::Moved, Loss::TmpfsGone];

    fn prepare(self, place: &BlockPlace) {
        if self == Loss::TmpfsGone {
            fs::DirBuilder::new().mode(0o700).create(place.dir()).unwrap();
            let flags = MountFlags::NODEV | MountFlags::NOSUID;
            rustix::mount::mount("tmpfs", place.dir(), "tmpfs", flags, c"mode=0700").unwrap();
        }
    }

    fn happen(self, place: &BlockPlace) {
        let dir = place.dir();
        match self {
            Loss::LazyUnmount => rustix::mount::unmount(dir.join("mnt"), UnmountFlags::DETACH).unwrap(),
            Loss::Moved => fs::rename(&dir, place.root().join("moved")).unwrap(),
            Loss::TmpfsGone => rustix::mount::unmount(dir, UnmountFlags::DETACH).unwrap(),
        }
    }
}

#[test]
fn swap_ends_before_its_daemon_does_wherever_the_directories_are() {
    for loss in Loss::ALL {
        let Some(place) = BlockPlace::alone("") else { return };
        loss.prepare(&place);
        let device = place.swap_on("--size 64M");
        let daemon = place.daemon_id();
        let _guard = NotLeft(daemon);
        loss.happen(&place);
        for args in ["down", "detach --force"] {
            let ended = place.run(args);
            assert!(!ended.status.success(), "{loss:?} {args}: {ended}");
        }
        assert_eq!(place.swap_areas(), [device.as_str()], "{loss:?}");
        assert!(is_running(daemon));
        let off = place.run("swap off");
        if loss == Loss::LazyUnmount {
            off.ok();
        } else {
            // No daemon responds there: the command says so, and does nothing.
            assert!(!off.status.success(), "{loss:?}: {off}");
            assert_eq!(place.swap_areas(), [device.as_str()], "{loss:?}");
            kill_process(daemon, Signal::TERM).unwrap();
        }
        wait_for_end(daemon);
        place.assert_clean();
    }
}

#[test]
fn what_a_dead_daemon_left_is_found_by_its_record() {
    for loss in [Loss::LazyUnmount, Loss::Moved] {
        let Some(place) = BlockPlace::alone("") else { return };
        let device = place.swap_on("--size 64M");
        let _guard = NotLeft(place.daemon_id());
        loss.happen(&place);
        let dir = if loss == Loss::Moved { place.root().join("moved") } else { place.dir() };
        kill_whole(daemon_in(&dir));
        let off = place.run(&format!("swap off --runtime-dir {}", dir.display()));
        off.shows(&[&format!("switched swap on {device} (zram0) off"), &format!("freed {device}")]);
        place.assert_clean();
    }
    // Without the record, the device is named and left alone.
    let Some(place) = BlockPlace::alone("") else { return };
    Loss::TmpfsGone.prepare(&place);
    let device = place.swap_on("--size 64M");
    let daemon = place.daemon_id();
    Loss::TmpfsGone.happen(&place);
    kill_whole(daemon);
    for args in ["swap off", "detach --force"] {
        place.run(args).says(1, &device);
    }
    assert_eq!(place.swap_areas(), [device.as_str()]);
}

/// A mount namespace in which the place's directory is an empty file system.
struct Container {
    process: Killed,
    dir: PathBuf,
}

impl Container {
    fn new(place: &BlockPlace) -> Container {
        let dir = place.mount_point("same");
        let ready = place.root().join("ready");
        let _ = fs::remove_file(&ready);
        let mut command = isolated(&format!(
            "mount -t tmpfs -o mode=0700 none {} && touch {} && exec sleep 300",
            dir.display(),
            ready.display()
        ));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let container = Container { process: Killed(command.spawn().unwrap()), dir };
        wait_until("the container is there", || ready.exists());
        container
    }

    fn run(&self, args: &str) -> Ended {
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &self.process.id().to_string(), "--", UZRAM]).args(args.words());
        finish(command.env("UZRAM_RUNTIME_DIR", self.dir.join("run")))
    }

    fn daemon_id(&self) -> Pid {
        daemon_in(Path::new(&format!("/proc/{}/root{}/run", self.process.id(), self.dir.display())))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.run("swap off");
    }
}

#[test]
fn containers_with_the_same_paths_leave_each_other_alone() {
    let Some(place) = BlockPlace::alone("unshare nsenter") else { return };
    let [one, other] = [Container::new(&place), Container::new(&place)];
    let [first, second] = [&one, &other].map(|each| swap_device(&each.run("swap on --size 64M").ok()));
    assert_ne!(first, second);
    let status = one.run("swap status").ok();
    assert!(status.contains(&first) && !status.contains(&second), "{status}");
    let daemon = other.daemon_id();
    kill_whole(one.daemon_id());
    let said = one.run("swap off").ok();
    assert!(said.contains(&first) && !said.contains(&second), "{said}");
    assert_eq!(place.swap_areas(), [second.as_str()]);
    assert!(is_running(daemon));
    other.run("swap off").ok();
    wait_for_end(daemon);
    place.assert_clean();
}

#[test]
fn numbers_that_are_used_again_are_not_what_they_were() {
    let Some(place) = BlockPlace::alone("losetup umount") else { return };
    let (daemon, device) = place.up_attached("16M", "");
    let record = fs::read_to_string(place.dir().join("attached.json")).unwrap();
    place.wait_for_standby();
    daemon.kill();
    succeed(&place, "losetup", &["-d", &device]);
    succeed(&place, "umount", &[arg(&place.dir().join("mnt"))]);
    let other_dir = place.root().join("other");
    let other = place.start(&format!("up --size 16M --attach --runtime-dir {}", other_dir.display()));
    let new_record = || fs::read_to_string(other_dir.join("attached.json")).unwrap_or_default();
    wait_until("it is attached", || new_record().contains("diskseq"));
    assert_eq!(place.loops(), [device.as_str()]);
    let [old, new] = [record, new_record()].map(|text| {
        let record: Value = serde_json::from_str(&text).unwrap();
        record["attached"][0]["attachment"]["number"].clone()
    });
    assert_eq!(old, new, "the test is about the same device");
    assert_eq!(place.run("detach --force").ok(), "nothing was left\n");
    assert!(other_dir.join("mnt/zram0/disk").exists());
    assert_eq!(place.loops(), [device.as_str()]);
    other.terminate();
    place.assert_clean();
}

#[test]
fn a_daemon_does_not_end_beneath_open_files() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_mounted("16M", "");
    let disk = File::open(place.disk()).unwrap();
    place.run("down").says(1, "in use by 1 open file");
    for _ in 0..3 {
        daemon.signal(Signal::TERM);
        thread::sleep(Duration::from_millis(50));
    }
    place.run("list").shows(&["zram0"]);
    drop(disk);
    daemon.succeeds();
    place.assert_clean();
}

fn listed(port: &str) -> Vec<String> {
    let replies = tcp(port).option(option::LIST, &[]);
    let names = replies.into_iter().filter(|(kind, _)| *kind == reply::SERVER);
    names.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect()
}

fn refusal(port: &str, name: &str) -> u32 {
    let mut replies = tcp(port).option(option::GO, &info_request(name.as_bytes(), &[]));
    replies.pop().unwrap().0
}

/// Starts a daemon with these devices of a file and an exported device `free`; returns it and its TCP port.
fn with_config(place: &BlockPlace, keys: &str, devices: &str) -> (Daemon, String) {
    let text = format!("{keys}listen = ['tcp:127.0.0.1:0']\n[free]\nsize = '8M'\n{devices}");
    let daemon = place.up_config(&text, "");
    let port = port(&daemon);
    (daemon, port)
}

#[test]
fn nobody_reads_or_changes_swapped_out_memory() {
    let Some(place) = BlockPlace::alone("") else { return };
    let swap = "[mem]\nsize = '64M'\nswap = true\n";
    // With an explicit `export`, it can be read.
    let devices = format!("{swap}{}export = true\n", swap.replace("mem", "shown"));
    let (daemon, port) = with_config(&place, "", &devices);
    assert_eq!(place.swap_areas().len(), 2);
    assert_eq!(listed(&port), ["free", "shown"]);
    assert_eq!(refusal(&port, "mem"), reply::ERR_UNKNOWN);
    let mut client = tcp(&port);
    let (_, flags) = client.enter_export(b"shown");
    assert_ne!(flags & transmission_flags::READ_ONLY, 0);
    assert_eq!(client.read(0, 4086, 10).data(), b"SWAPSPACE2");
    for (command, payload) in [(cmd::WRITE, &[1; 4096][..]), (cmd::TRIM, &[]), (cmd::WRITE_ZEROES, &[])] {
        assert_eq!(client.call(0, command, 0, 4096, payload).error, NbdError::Perm as u32, "{command}");
    }
    assert_eq!(client.read(0, 4086, 10).data(), b"SWAPSPACE2");
    daemon.terminate();
    place.assert_clean();
}

#[test]
fn who_attaches_a_device_has_it_alone() {
    let Some(place) = BlockPlace::if_able() else { return };
    let mount = format!("mount = '{}'\n", place.dir().join("mnt").display());
    let devices = [
        ("plain", ""),
        ("always", "export = true\n"),
        ("reader", "read-only = true\n"),
        ("both", "export = true\nread-only = true\n"),
        ("hidden", "export = false\n"),
    ];
    let text = devices.map(|(name, keys)| format!("[{name}]\nsize = '16M'\n{keys}")).concat();
    let (daemon, port) = with_config(&place, &mount, &text);
    let all = ["free", "plain", "always", "reader", "both"];
    assert_eq!(listed(&port), all);
    assert_eq!(refusal(&port, "hidden"), reply::ERR_UNKNOWN);
    for (name, keys) in &devices[..4] {
        let (always, read_only) = (keys.contains("export = true"), keys.contains("read-only"));
        let mut before = tcp(&port);
        let (_, flags) = before.enter_export(name.as_bytes());
        assert_eq!(flags & transmission_flags::READ_ONLY != 0, read_only, "{name}");
        assert_eq!(before.write(0, &[7; 4096]).error == 0, !read_only, "{name}");
        let attach = || place.run(&format!("attach {name}"));
        if always && read_only {
            attach().ok();
        } else {
            attach().says(1, "NBD clients have it open");
            drop(before);
            wait_until("the client is gone", || attach().status.success());
        }
        // While it is attached, only the kernel writes.
        if always {
            let mut reader = tcp(&port);
            let (_, flags) = reader.enter_export(name.as_bytes());
            assert_ne!(flags & transmission_flags::READ_ONLY, 0, "{name}");
            assert_eq!(reader.write(0, &[1; 4096]).error, NbdError::Perm as u32, "{name}");
        } else {
            assert_eq!(refusal(&port, name), reply::ERR_POLICY, "{name}");
            let others: Vec<&str> = all.into_iter().filter(|other| other != name).collect();
            assert_eq!(listed(&port), others);
        }
        place.run(&format!("detach {name}")).ok();
        wait_until("it is exported again", || listed(&port) == all);
        // A file open for writing has the same effect as a block device.
        let disk = place.dir().join("mnt").join(name).join("disk");
        if let Ok(_disk) = OpenOptions::new().write(true).open(disk) {
            assert!(always && read_only || refused_or_reader(&port, name), "{name}");
        }
    }
    daemon.terminate();
    place.assert_clean();
}

/// Returns whether a new client of an export cannot write.
fn refused_or_reader(port: &str, name: &str) -> bool {
    let mut client = tcp(port);
    let replies = client.option(option::GO, &info_request(name.as_bytes(), &[]));
    match &replies[..] {
        [(reply::INFO, info), (reply::ACK, _)] => {
            u16::from_be_bytes(info[10..].try_into().unwrap()) & transmission_flags::READ_ONLY != 0
        }
        _ => true,
    }
}

#[test]
fn what_clients_wrote_is_not_lost_without_a_word() {
    let place = Place::new();
    let daemon = place.up("--listen tcp:127.0.0.1:0");
    let mut client = tcp(&port(&daemon));
    client.enter_export(b"zram0");
    assert_eq!(client.write(0, &[7; 4096]).error, 0);
    place.run("down").says(1, "in use by 1 NBD client");
    assert_eq!(client.read(0, 0, 4096).data(), [7; 4096]);
    place.run("down --force").ok();
    daemon.succeeds();
}

#[test]
fn a_listener_serves_the_devices_that_it_names() {
    let place = Place::new();
    let text = "listen = ['free@tcp:127.0.0.1:0']\n[secret]\nsize = '8M'\n[free]\nsize = '8M'\n";
    let daemon = place.up_config(text, "");
    let port = port(&daemon);
    assert_eq!(listed(&port), ["free"]);
    for name in ["secret", "other"] {
        assert_eq!(refusal(&port, name), reply::ERR_UNKNOWN, "{name}");
    }
    // The listener has its own default export; a device added later is served if the listener names it.
    let mut default = tcp(&port);
    default.enter_export(b"");
    assert_eq!(default.write(0, &[7; 4096]).error, 0);
    let facts = &daemon.facts;
    assert!(!facts.contains("nbd://127.0.0.1:") || !facts.contains("/secret\n"), "{facts}");
    let json = place.json("stat secret");
    assert_eq!(json["uris"].as_array().unwrap().len(), 1, "{json}");
    drop(default);
    place.end(daemon);
}

fn as_another_user(command: &str) -> Ended {
    finish(Command::new("sh").args(["-c", command]).uid(NOBODY).gid(NOBODY))
}

#[test]
fn a_public_directory_makes_no_public_disk() {
    let Some(place) = BlockPlace::if_able() else { return };
    let public = place.mount_point("public");
    for dir in [place.root(), &public] {
        set_mode(dir, 0o755);
    }
    let (daemon, device) = place.up_attached("16M", &format!("--mount {}", public.display()));
    for path in [public.join("zram0/disk"), public.join("zram0/reset"), public.join("zram0"), device.into()] {
        let said = as_another_user(&format!("cat {0} || echo 1 > {0} || ls {0}/", path.display()));
        assert!(!said.status.success() && said.stdout.is_empty(), "{}", path.display());
    }
    // Other users can neither unmount it nor make the daemon unmount it.
    let unmount = "umount DIR || umount -l DIR || fusermount3 -u DIR || fusermount -u DIR";
    as_another_user(&unmount.replace("DIR", arg(&public)));
    assert!(public.join("zram0/disk").exists());
    place.end_clean(daemon);
}

#[test]
fn another_users_directory_names_nothing_of_roots() {
    let Some(place) = BlockPlace::needing("losetup") else { return };
    let (daemon, device) = place.up_attached("16M", "");
    // Another user forges a runtime directory with a record of root's device.
    let forged = place.root().join("forged");
    set_mode(place.root(), 0o755);
    fs::DirBuilder::new().mode(0o700).create(&forged).unwrap();
    fs::copy(place.dir().join("attached.json"), forged.join("attached.json")).unwrap();
    for path in [forged.join("attached.json"), forged.clone()] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let link = place.root().join("link");
    symlink(&forged, &link).unwrap();
    for dir in [&forged, &link] {
        for args in ["detach --force", "swap off", "swap status"] {
            let ended = place.run(&format!("{args} --runtime-dir {}", dir.display()));
            assert!(!ended.status.success(), "{args}: {ended}");
        }
    }
    assert_eq!(place.loops(), [device.as_str()]);
    // The daemon does not mount on a directory that another user chooses by a link.
    let open = place.mount_point("open");
    set_mode(&open, 0o777);
    let target = place.mount_point("target");
    as_another_user(&format!("ln -s {} {}/mnt", target.display(), open.display())).ok();
    for dir in ["mnt", "mnt/below"] {
        let up = format!("up --size 16M --mount {0}/{dir} --runtime-dir {0}/r", open.display());
        place.run(&up).says(1, "symbolic link");
    }
    assert!(fs::read_dir(&target).unwrap().next().is_none());
    place.end_clean(daemon);
}

/// A daemon that has ended by itself must leave nothing, and cleaning up after a killed one must work.
#[test]
fn whatever_happens_nothing_is_left_without_a_word() {
    let seed = crate::nbd::seed();
    for round in 0..6 {
        let Some(place) = BlockPlace::alone("") else { return };
        let device = place.swap_on("--size 64M");
        let (dir, moved) = (place.dir(), place.root().join("moved"));
        let daemon = daemon_in(&dir);
        let _guard = NotLeft(daemon);
        let mut random = Random::new(seed ^ round);
        let mut script = || (0..4).map(|_| random.below(9)).collect::<Vec<_>>();
        let scripts = [script(), script()];
        println!("{device}: {scripts:?}");
        let act = |what: usize| match what {
            0..5 => {
                let commands = ["detach zram0", "detach --force", "swap off", "down", "attach zram0"];
                drop(place.run(commands[what]));
            }
            5 => drop(rustix::mount::unmount(dir.join("mnt"), UnmountFlags::DETACH)),
            6 => drop(fs::rename(&dir, &moved).and_then(|()| fs::rename(&moved, &dir))),
            7 => drop(kill_process(daemon, Signal::TERM)),
            _ => thread::sleep(Duration::from_millis(10)),
        };
        thread::scope(|scope| {
            for script in scripts {
                scope.spawn(move || script.into_iter().for_each(act));
            }
        });
        if round % 2 == 0 && is_running(daemon) {
            kill_whole(daemon);
            place.run("detach --force").ok();
        } else {
            // The daemon may have ended already.
            let _ = kill_process(daemon, Signal::TERM);
            wait_for_end(daemon);
        }
        place.assert_clean();
    }
}
