//! Attacks on a daemon's block devices, swap areas and mounts: mounts with forged sources, moved and
//! unmounted directories, containers with the same paths, reused numbers, and NBD clients of attached
//! devices. For root.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::block::{BlockPlace, unable};
use crate::common::clients::{arg, succeed};
use crate::common::{Ended, daemon_in, finish, wait_until};
use crate::nbd::{Client, cmd, info_request};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal, kill_process};
use uzram_serve::nbd::proto::{NbdError, option, reply, transmission_flags};

/// Starts a swap daemon in the background; returns its block device.
fn swap_on(place: &BlockPlace) -> String {
    let facts = place.run(&["swap", "on", "--size", "64M"]).ok();
    device_after("swap", &facts)
}

/// Returns the block device after `word` in a daemon's output.
fn device_after(word: &str, facts: &str) -> String {
    let line = facts.lines().find(|line| line.split_whitespace().next() == Some(word));
    line.unwrap_or_else(|| panic!("{facts}")).split_whitespace().nth(1).unwrap().to_owned()
}

fn is_running(pid: Pid) -> bool {
    let of_process = |name: &str| format!("/proc/{}/{name}", pid.as_raw_nonzero());
    let stat = fs::read_to_string(of_process("stat")).unwrap_or_default();
    // The daemon holds its memory and files until its last thread has ended.
    let threads = fs::read_dir(of_process("task")).map_or(0, Iterator::count);
    !stat.is_empty() && (!stat.contains(") Z ") || threads > 1)
}

/// Ends a daemon after a failed test, which could not be found otherwise when its directories are lost.
struct NotLeft(Pid);

impl Drop for NotLeft {
    fn drop(&mut self) {
        if std::thread::panicking() && is_running(self.0) {
            let _ = kill_process(self.0, Signal::KILL);
        }
    }
}

fn wait_for_end(pid: Pid) {
    wait_until("the daemon has ended", || !is_running(pid));
}

/// Kills a daemon, and waits until all of its threads have ended.
fn kill(pid: Pid) {
    kill_process(pid, Signal::KILL).unwrap();
    wait_for_end(pid);
}

/// A mount by fusermount3(1) for user 65534, with a source of that user's choice. No process serves it.
struct LyingMount {
    dir: PathBuf,
    _connection: File,
}

impl LyingMount {
    fn new(dir: PathBuf, source: &str) -> LyingMount {
        let connection = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
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
    let Some(place) = BlockPlace::needing(&["mkfs.ext4"]) else { return };
    let daemon = place.up_sized("16M", &["--attach"]);
    let device = place.loops().remove(0);
    let owner = format!("uzram:{}", place.dir().display());
    let _device_of_theirs = LyingMount::new(place.mount_point("a"), &device);
    let _files_of_theirs = LyingMount::new(place.mount_point("b"), &owner);
    // The device is free, and the only daemon here is running.
    place.run(&["detach", "zram0"]).ok();
    place.run(&["attach", "zram0"]).ok();
    let force = place.run(&["detach", "--force"]);
    assert!(force.complaint(1).contains("lives"), "{}", force.stderr);
    place.end(daemon);
    // Clearing after a dead daemon does not touch the attacker's mounts.
    let daemon = place.up_sized("16M", &["--attach"]);
    place.wait_for_standby();
    daemon.signal(Signal::KILL);
    daemon.ended();
    let said = place.run(&["detach", "--force"]).ok();
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains("freed /dev/loop") && said.contains("/mnt"), "{said}");
    assert_eq!(place.mounts().len(), 2, "{:?}", place.mounts());
}

/// How a daemon can lose its directories.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// Its mount is detached.
    LazyUnmount,
    /// A parent directory is renamed.
    Moved,
    /// The file system of its runtime directory is detached, with all mounts below it.
    TmpfsGone,
}

impl Loss {
    const ALL: [Loss; 3] = [Loss::LazyUnmount, Loss::Moved, Loss::TmpfsGone];

    /// Prepares the directories before the daemon starts.
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
    if unable() {
        return;
    }
    for loss in Loss::ALL {
        let place = BlockPlace::new();
        loss.prepare(&place);
        let device = swap_on(&place);
        let daemon = place.daemon_id();
        let _guard = NotLeft(daemon);
        loss.happen(&place);
        for args in [&["down"][..], &["detach", "--force"]] {
            let ended = place.run(args);
            assert!(!ended.status.success(), "{loss:?} {args:?}: {}", ended.stdout);
        }
        assert_eq!(place.swap_areas(), [device.as_str()], "{loss:?}");
        assert!(is_running(daemon));
        let off = place.run(&["swap", "off"]);
        if loss == Loss::LazyUnmount {
            off.ok();
        } else {
            // No daemon responds there: the command says so, and does nothing.
            assert!(!off.status.success(), "{loss:?}: {}", off.stdout);
            assert_eq!(place.swap_areas(), [device.as_str()], "{loss:?}");
            kill_process(daemon, Signal::TERM).unwrap();
        }
        wait_for_end(daemon);
        place.assert_clean();
    }
}

#[test]
fn what_a_dead_daemon_left_is_found_by_its_record() {
    if unable() {
        return;
    }
    for loss in [Loss::LazyUnmount, Loss::Moved] {
        let place = BlockPlace::new();
        let device = swap_on(&place);
        let _guard = NotLeft(place.daemon_id());
        loss.happen(&place);
        let dir = if loss == Loss::Moved { place.root().join("moved") } else { place.dir() };
        kill(daemon_in(&dir));
        let said = place.run(&["swap", "off", "--runtime-dir", arg(&dir)]).ok();
        assert!(said.contains(&format!("switched swap on {device} (zram0) off")), "{loss:?}: {said}");
        assert!(said.contains(&format!("freed {device}")), "{loss:?}: {said}");
        place.assert_clean();
    }
    // Without the record, the device is named and left alone.
    let place = BlockPlace::new();
    Loss::TmpfsGone.prepare(&place);
    let device = swap_on(&place);
    let daemon = place.daemon_id();
    Loss::TmpfsGone.happen(&place);
    kill(daemon);
    for args in [&["swap", "off"][..], &["detach", "--force"]] {
        let ended = place.run(args);
        assert!(ended.complaint(1).contains(&device), "{args:?}: {}", ended.stderr);
    }
    assert_eq!(place.swap_areas(), [device.as_str()]);
}

/// A mount namespace in which the place's directory is an empty file system.
struct Container {
    process: Child,
    dir: PathBuf,
}

impl Container {
    fn new(place: &BlockPlace) -> Container {
        let dir = place.mount_point("same");
        let ready = place.root().join("ready");
        let _ = fs::remove_file(&ready);
        let script = format!(
            "mount -t tmpfs -o mode=0700 none {} && touch {} && exec sleep 300",
            dir.display(),
            ready.display()
        );
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script]).stdin(Stdio::null()).stdout(Stdio::null());
        let container = Container { process: command.spawn().unwrap(), dir };
        wait_until("the container is there", || ready.exists());
        container
    }

    fn run(&self, args: &[&str]) -> Ended {
        let mut command = Command::new("nsenter");
        command
            .args(["-m", "-t", &self.process.id().to_string(), "--", env!("CARGO_BIN_EXE_uzram")])
            .args(args);
        command.env("UZRAM_RUNTIME_DIR", self.dir.join("run"));
        finish(command)
    }

    fn daemon_id(&self) -> Pid {
        daemon_in(
            &Path::new("/proc")
                .join(self.process.id().to_string())
                .join("root")
                .join(self.dir.join("run").strip_prefix("/").unwrap()),
        )
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.run(&["swap", "off"]);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn containers_with_the_same_paths_leave_each_other_alone() {
    let Some(place) = BlockPlace::needing(&["unshare", "nsenter"]) else { return };
    let [one, other] = [Container::new(&place), Container::new(&place)];
    let on = ["swap", "on", "--size", "64M"];
    let first = device_after("swap", &one.run(&on).ok());
    let second = device_after("swap", &other.run(&on).ok());
    assert_ne!(first, second);
    let status = one.run(&["swap", "status"]).ok();
    assert!(status.contains(&first) && !status.contains(&second), "{status}");
    let daemon = other.daemon_id();
    kill(one.daemon_id());
    let said = one.run(&["swap", "off"]).ok();
    assert!(said.contains(&first) && !said.contains(&second), "{said}");
    assert_eq!(place.swap_areas(), [second.as_str()]);
    assert!(is_running(daemon));
    other.run(&["swap", "off"]).ok();
    wait_for_end(daemon);
    place.assert_clean();
}

/// A loop device of a dead daemon that now has another file is left alone.
#[test]
fn numbers_that_are_used_again_are_not_what_they_were() {
    let Some(place) = BlockPlace::needing(&["losetup", "umount"]) else { return };
    let daemon = place.up_sized("16M", &["--attach"]);
    let device = place.loops().remove(0);
    let record = fs::read_to_string(place.dir().join("attached.json")).unwrap();
    place.wait_for_standby();
    daemon.signal(Signal::KILL);
    daemon.ended();
    succeed(&place, "losetup", &["-d", &device]);
    succeed(&place, "umount", &[arg(&place.dir().join("mnt"))]);
    let other_dir = place.root().join("other");
    let other = ["up", "--size", "16M", "--attach", "--runtime-dir", arg(&other_dir)];
    let other = place.start(&other);
    let new_record = || fs::read_to_string(other_dir.join("attached.json")).unwrap_or_default();
    wait_until("it is attached", || new_record().contains("diskseq"));
    assert_eq!(place.loops(), [device.as_str()]);
    let [old, new] =
        [record, new_record()].map(|text| serde_json::from_str::<serde_json::Value>(&text).unwrap());
    let number = |record: &serde_json::Value| record["attached"][0]["attachment"]["number"].clone();
    assert_eq!(number(&old), number(&new), "the test is about the same device");
    assert_eq!(place.run(&["detach", "--force"]).ok(), "nothing was left\n");
    assert!(other_dir.join("mnt/zram0/disk").exists());
    assert_eq!(place.loops(), [device.as_str()]);
    other.signal(Signal::TERM);
    assert!(other.ended().0.success());
    place.assert_clean();
}

#[test]
fn a_daemon_does_not_end_beneath_open_files() {
    let Some(place) = BlockPlace::if_able() else { return };
    let up = || place.up_sized("16M", &["--mount", arg(&place.dir().join("mnt"))]);
    let daemon = up();
    let disk = File::open(place.disk()).unwrap();
    let down = place.run(&["down"]);
    assert!(down.complaint(1).contains("in use by 1 open file"), "{}", down.stderr);
    for _ in 0..3 {
        daemon.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(place.run(&["list"]).ok().contains("zram0"), "it is still there");
    drop(disk);
    assert!(daemon.ended().0.success());
    place.assert_clean();
    // With --force it ends.
    let daemon = up();
    let disk = File::open(place.disk()).unwrap();
    place.run(&["down", "--force"]).ok();
    assert!(daemon.ended().0.success());
    drop(disk);
    place.assert_clean();
}

/// A client of a TCP port, to which any user of the machine can connect.
fn client(port: u16) -> Client<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut client = Client::on(stream);
    client.greet();
    client
}

/// Returns the export names that a client lists.
fn listed(port: u16) -> Vec<String> {
    let replies = client(port).option(option::LIST, &[]);
    let names = replies.into_iter().filter(|(kind, _)| *kind == reply::SERVER);
    names.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect()
}

/// Returns the error for a client that chooses an export.
fn refusal(port: u16, name: &str) -> u32 {
    let mut replies = client(port).option(option::GO, &info_request(name.as_bytes(), &[]));
    replies.pop().unwrap().0
}

/// Returns a daemon's port, from the URI of another export in its output.
fn port_of(facts: &str) -> u16 {
    let at = facts.find("nbd://127.0.0.1:").unwrap_or_else(|| panic!("{facts}")) + "nbd://127.0.0.1:".len();
    facts[at..].split('/').next().unwrap().parse().unwrap()
}

/// Starts a daemon with these devices of a file and an exported device `free`; returns it and its TCP port.
fn with_config(place: &BlockPlace, devices: &str) -> (crate::common::Daemon, u16) {
    let text = format!("listen = [\"tcp:127.0.0.1:0\"]\n[free]\nsize = \"8M\"\n{devices}");
    let daemon = place.up_config(&text, &[]);
    let port = port_of(&daemon.facts);
    (daemon, port)
}

#[test]
fn nobody_reads_or_changes_swapped_out_memory() {
    let Some(place) = BlockPlace::if_able() else { return };
    let swap = "[mem]\nsize = \"64M\"\nswap = true\n";
    let (daemon, port) = with_config(&place, swap);
    assert_eq!(place.swap_areas().len(), 1);
    assert_eq!(listed(port), ["free"]);
    assert_eq!(refusal(port, "mem"), reply::ERR_UNKNOWN);
    daemon.terminate();
    // With an explicit `export`, it can be read.
    let (daemon, port) = with_config(&place, &format!("{swap}export = true\n"));
    assert_eq!(listed(port), ["free", "mem"]);
    let mut client = client(port);
    let (_, flags) = client.enter_export(b"mem");
    assert_ne!(flags & transmission_flags::READ_ONLY, 0);
    assert_eq!(client.read(0, 4086, 10).data(), b"SWAPSPACE2");
    for (command, payload) in [(cmd::WRITE, &[1; 4096][..]), (cmd::TRIM, &[]), (cmd::WRITE_ZEROES, &[])] {
        client.request(0, command, 0, 4096, payload);
        assert_eq!(client.reply(0).error, NbdError::Perm as u32, "{command}");
    }
    assert_eq!(client.read(0, 4086, 10).data(), b"SWAPSPACE2");
    daemon.terminate();
    place.assert_clean();
}

#[test]
fn who_attaches_a_device_has_it_alone() {
    let Some(place) = BlockPlace::if_able() else { return };
    let mount = format!("mount = \"{}\"\n", place.dir().join("mnt").display());
    let config = |keys: &str| format!("[d]\nsize = \"16M\"\n{keys}");
    let start = |keys: &str| {
        let text = format!("{mount}listen = \"tcp:127.0.0.1:0\"\n[free]\nsize = \"8M\"\n{}", config(keys));
        let daemon = place.up_config(&text, &[]);
        let port = port_of(&daemon.facts);
        (daemon, port)
    };
    for keys in
        ["", "export = true\n", "read-only = true\n", "export = true\nread-only = true\n", "export = false\n"]
    {
        let (daemon, port) = start(keys);
        let (always, read_only) = (keys.contains("export = true"), keys.contains("read-only"));
        if keys == "export = false\n" {
            assert_eq!(refusal(port, "d"), reply::ERR_UNKNOWN);
            daemon.terminate();
            continue;
        }
        let mut before = client(port);
        let (_, flags) = before.enter_export(b"d");
        assert_eq!(flags & transmission_flags::READ_ONLY != 0, read_only, "{keys}");
        assert_eq!(before.write(0, &[7; 4096]).error == 0, !read_only, "{keys}");
        let attach = place.run(&["attach", "d"]);
        if always && read_only {
            attach.ok();
        } else {
            assert!(attach.complaint(1).contains("NBD clients have it open"), "{}", attach.stderr);
            drop(before);
            wait_until("the client is gone", || place.run(&["attach", "d"]).status.success());
        }
        // While it is attached, only the kernel writes.
        if always {
            let mut reader = client(port);
            let (_, flags) = reader.enter_export(b"d");
            assert_ne!(flags & transmission_flags::READ_ONLY, 0, "{keys}");
            assert_eq!(reader.write(0, &[1; 4096]).error, NbdError::Perm as u32, "{keys}");
        } else {
            assert_eq!(refusal(port, "d"), reply::ERR_POLICY, "{keys}");
            assert_eq!(listed(port), ["free"]);
        }
        place.run(&["detach", "d"]).ok();
        wait_until("it is exported again", || listed(port) == ["free", "d"]);
        // A file open for writing has the same effect as a block device.
        let disk = OpenOptions::new().write(true).open(place.dir().join("mnt/d/disk"));
        let readers_only = always && read_only;
        if let Ok(disk) = disk {
            assert!(readers_only || refused_or_reader(port), "{keys}");
            drop(disk);
        }
        daemon.terminate();
        place.assert_clean();
    }
}

/// Returns whether a new client of the export `d` cannot write.
fn refused_or_reader(port: u16) -> bool {
    let mut client = client(port);
    let replies = client.option(option::GO, &info_request(b"d", &[]));
    match &replies[..] {
        [(reply::INFO, info), (reply::ACK, _)] => {
            u16::from_be_bytes(info[10..].try_into().unwrap()) & transmission_flags::READ_ONLY != 0
        }
        _ => true,
    }
}

#[test]
fn what_clients_wrote_is_not_lost_without_a_word() {
    let place = crate::common::Place::new();
    let up = || place.up(&["--listen", "tcp:127.0.0.1:0"]);
    let daemon = up();
    let mut client = client(port_of(&daemon.facts));
    client.enter_export(b"zram0");
    assert_eq!(client.write(0, &[7; 4096]).error, 0);
    let down = place.run(&["down"]);
    assert!(down.complaint(1).contains("in use by 1 NBD client"), "{}", down.stderr);
    assert_eq!(client.read(0, 0, 4096).data(), [7; 4096]);
    drop(client);
    wait_until("the client is gone", || place.run(&["down"]).status.success());
    assert!(daemon.ended().0.success());
    let daemon = up();
    let mut client = self::client(port_of(&daemon.facts));
    client.enter_export(b"zram0");
    place.run(&["down", "--force"]).ok();
    assert!(daemon.ended().0.success());
}

#[test]
fn a_listener_serves_the_devices_that_it_names() {
    let place = crate::common::Place::new();
    let text = "listen = [\"free@tcp:127.0.0.1:0\"]\n[secret]\nsize = \"8M\"\n[free]\nsize = \"8M\"\n";
    let daemon = place.up_config(text, &[]);
    let port = port_of(&daemon.facts);
    assert_eq!(listed(port), ["free"]);
    for name in ["secret", "other"] {
        assert_eq!(refusal(port, name), reply::ERR_UNKNOWN, "{name}");
    }
    // The listener has its own default export; a device added later is served if the listener names it.
    let mut default = client(port);
    default.enter_export(b"");
    assert_eq!(default.write(0, &[7; 4096]).error, 0);
    assert!(
        !daemon.facts.contains("nbd://127.0.0.1:") || !daemon.facts.contains("/secret\n"),
        "{}",
        daemon.facts
    );
    let stat = place.run(&["stat", "secret", "--json"]).ok();
    let json: serde_json::Value = serde_json::from_str(&stat).unwrap();
    assert_eq!(json["uris"].as_array().unwrap().len(), 1, "{stat}");
    drop(default);
    wait_until("the client is gone", || place.run(&["down"]).status.success());
    assert!(daemon.ended().0.success());
}

/// Runs a shell command as user 65534.
fn as_another_user(command: &str) -> std::process::Output {
    use std::os::unix::process::CommandExt;
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).uid(65534).gid(65534).stdin(Stdio::null());
    shell.output().unwrap()
}

#[test]
fn a_public_directory_makes_no_public_disk() {
    let Some(place) = BlockPlace::if_able() else { return };
    let public = place.mount_point("public");
    for dir in [place.root(), &public] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let daemon = place.up_sized("16M", &["--mount", arg(&public), "--attach"]);
    let device = place.loops().remove(0);
    for path in
        [public.join("zram0/disk"), public.join("zram0/reset"), public.join("zram0"), device.clone().into()]
    {
        let said = as_another_user(&format!("cat {0} || echo 1 > {0} || ls {0}/", path.display()));
        assert!(!said.status.success() && said.stdout.is_empty(), "{}", path.display());
    }
    // Other users can neither unmount it nor make the daemon unmount it.
    as_another_user(&format!(
        "umount {0} || umount -l {0} || fusermount3 -u {0} || fusermount -u {0}",
        public.display()
    ));
    assert!(public.join("zram0/disk").exists());
    place.end_clean(daemon);
}

#[test]
fn another_users_directory_names_nothing_of_roots() {
    let Some(place) = BlockPlace::needing(&["losetup"]) else { return };
    let daemon = place.up_sized("16M", &["--attach"]);
    let device = place.loops().remove(0);
    // Another user forges a runtime directory with a record of root's device.
    let forged = place.root().join("forged");
    fs::set_permissions(place.root(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::DirBuilder::new().mode(0o700).create(&forged).unwrap();
    fs::copy(place.dir().join("attached.json"), forged.join("attached.json")).unwrap();
    for path in [forged.join("attached.json"), forged.clone()] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    let link = place.root().join("link");
    std::os::unix::fs::symlink(&forged, &link).unwrap();
    for dir in [&forged, &link] {
        for args in [&["detach", "--force"][..], &["swap", "off"], &["swap", "status"]] {
            let ended = place.run(&[args, &["--runtime-dir", arg(dir)]].concat());
            assert!(!ended.status.success(), "{args:?}: {}", ended.stdout);
        }
    }
    assert_eq!(place.loops(), [device.as_str()]);
    // The daemon does not mount on a directory that another user chooses by a link.
    let open = place.mount_point("open");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let target = place.mount_point("target");
    assert!(as_another_user(&format!("ln -s {} {}/mnt", target.display(), open.display())).status.success());
    for dir in ["mnt", "mnt/below"] {
        let (mount, run) = (open.join(dir), open.join("r"));
        let up = ["up", "--size", "16M", "--mount", arg(&mount), "--runtime-dir", arg(&run)];
        let up = place.run(&up);
        assert!(up.complaint(1).contains("symbolic link"), "{}", up.stderr);
    }
    assert!(fs::read_dir(&target).unwrap().next().is_none());
    place.end_clean(daemon);
}

/// Commands, signals and renames in random order, from two threads at once. A daemon that has ended by itself
/// must leave nothing, and cleaning up after a killed one must work.
#[test]
fn whatever_happens_nothing_is_left_without_a_word() {
    if unable() {
        return;
    }
    let seed = crate::nbd::seed();
    for round in 0..6 {
        let place = BlockPlace::new();
        let device = swap_on(&place);
        let (dir, moved) = (place.dir(), place.root().join("moved"));
        let daemon = daemon_in(&dir);
        let _guard = NotLeft(daemon);
        let mut random = crate::nbd::Random::new(seed ^ round);
        let mut script = || (0..4).map(|_| random.below(9)).collect::<Vec<_>>();
        let (one, other) = (script(), script());
        println!("{device}: {one:?} {other:?}");
        let act = |what: usize| {
            let run = |args: &[&str]| drop(place.run(args));
            match what {
                0 => run(&["detach", "zram0"]),
                1 => run(&["detach", "--force"]),
                2 => run(&["swap", "off"]),
                3 => run(&["down"]),
                4 => run(&["attach", "zram0"]),
                5 => drop(rustix::mount::unmount(dir.join("mnt"), UnmountFlags::DETACH)),
                6 => drop(fs::rename(&dir, &moved).and_then(|()| fs::rename(&moved, &dir))),
                7 => drop(kill_process(daemon, Signal::TERM)),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        std::thread::scope(|scope| {
            for script in [one, other] {
                scope.spawn(move || script.into_iter().for_each(act));
            }
        });
        if round % 2 == 0 && is_running(daemon) {
            kill(daemon);
            place.run(&["detach", "--force"]).ok();
        } else {
            // The daemon may have ended already.
            let _ = kill_process(daemon, Signal::TERM);
            wait_for_end(daemon);
        }
        place.assert_clean();
    }
}
