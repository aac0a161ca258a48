//! Another user of the machine (uid 65534) against what the program reads, writes and connects to: backing
//! files, runtime directories, control sockets and paths.
//!
//! The tests run as root, the attacker's part in processes of that user; without root they are skipped.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::clients::missing;
use crate::common::{Ended, PATIENCE, Place, bare_command, finish, not_root, wait_until};

/// The attacker.
const ATTACKER: u32 = 65534;
/// The contents of files that must not change.
const TREASURE: &[u8] = b"root's own words\n";

/// Returns a place that the attacker can enter.
fn place() -> Place {
    let place = Place::new();
    set_mode(place.root(), 0o711);
    place
}

/// Returns a directory in which all users can create files, like `/var/tmp`.
fn shared(place: &Place) -> PathBuf {
    let dir = place.root().join("shared");
    fs::create_dir(&dir).unwrap();
    set_mode(&dir, 0o1777);
    dir
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Runs a shell script as the attacker, with `paths` as `$1` and so on.
fn attack(script: &str, paths: &[&Path]) {
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).args(paths).uid(ATTACKER).gid(ATTACKER);
    finish(shell).ok();
}

/// Runs `uzram up` with a backing file; the daemon ends at once if it starts.
fn up_on(place: &Place, backing: &str, more: &[&str]) -> Ended {
    let args = ["up", "--size", "1M", "--log", "error", "--exec", "true", "--backing", backing];
    place.run(&[&args, more].concat())
}

fn sized(path: &Path) -> String {
    format!("{}:1M", path.display())
}

#[test]
fn a_file_made_beforehand_by_another_user_gets_no_pages() {
    if not_root() {
        return;
    }
    let place = place();
    let file = shared(&place).join("cold.img");
    // The file is empty, so that only its owner reveals the trap; in turn with a mode that would let root in
    // by itself.
    for mode in ["666", "600"] {
        attack("rm -f \"$1\"; : > \"$1\"; chmod \"$2\" \"$1\"", &[&file, Path::new(mode)]);
        for more in [&[][..], &["--force"]] {
            let ended = up_on(&place, &sized(&file), more);
            let line = ended.complaint(1);
            assert!(line.contains("belongs to user 65534") && line.contains("another path"), "{line}");
            assert_eq!(fs::metadata(&file).unwrap().len(), 0, "something was written to it");
        }
    }
}

#[test]
fn a_symbolic_link_of_another_user_overwrites_nothing() {
    if not_root() {
        return;
    }
    let place = place();
    let dir = shared(&place);
    let (link, target, inner) = (dir.join("cold.img"), place.root().join("precious"), dir.join("inner"));
    fs::write(&target, TREASURE).unwrap();
    set_mode(&target, 0o600);
    let missing = place.root().join("not-yet");
    for target in [&target, &missing] {
        attack("rm -f \"$1\"; ln -s \"$2\" \"$1\"", &[&link, target]);
        for more in [&[][..], &["--force"]] {
            let ended = up_on(&place, &sized(&link), more);
            let line = ended.complaint(1);
            assert!(line.contains(&format!("'{}' is a symbolic link", link.display())), "{line}");
            assert!(line.contains(&format!("'{}'", dir.display())), "{line}");
        }
    }
    // Also in the middle of a path.
    attack("ln -s \"$2\" \"$1\"", &[&inner, place.root()]);
    let ended = up_on(&place, &sized(&inner.join("precious")), &["--force"]);
    assert!(ended.complaint(1).contains("is a symbolic link"), "{}", ended.stderr);
    assert_eq!(fs::read(&target).unwrap(), TREASURE);
    assert!(!missing.exists());
    // Root's own links are followed.
    let own = place.root().join("own");
    symlink(&missing, &own).unwrap();
    assert!(up_on(&place, &sized(&own), &[]).status.success());
    assert!(missing.exists());
}

#[test]
fn a_hard_link_and_a_file_that_others_may_read_are_refused() {
    if not_root() {
        return;
    }
    let place = place();
    let dir = shared(&place);
    let (target, link) = (place.root().join("precious"), dir.join("cold.img"));
    fs::write(&target, TREASURE).unwrap();
    set_mode(&target, 0o600);
    // An attacker can do this if fs.protected_hardlinks is 0.
    fs::hard_link(&target, &link).unwrap();
    for more in [&[][..], &["--force"]] {
        let ended = up_on(&place, &sized(&link), more);
        assert_eq!(fs::read(&target).unwrap(), TREASURE);
        assert!(ended.complaint(1).contains("hard links"), "{}", ended.stderr);
    }

    let open = dir.join("open.img");
    fs::write(&open, "").unwrap();
    for mode in [0o644, 0o640, 0o602] {
        set_mode(&open, mode);
        let ended = up_on(&place, &sized(&open), &[]);
        let line = ended.complaint(1);
        let hint = format!("chmod 600 '{}'", open.display());
        assert!(line.contains(&format!("mode {mode:04o}")) && line.contains(&hint), "{line}");
        assert_eq!(fs::metadata(&open).unwrap().len(), 0);
    }
    set_mode(&open, 0o600);
    assert!(up_on(&place, &sized(&open), &[]).status.success());
}

#[test]
fn what_holds_something_else_wants_force_and_an_own_mark_is_taken_again() {
    let place = Place::new();
    let path = place.root().join("cold.img");
    fs::write(&path, TREASURE).unwrap();
    set_mode(&path, 0o600);
    let refused = up_on(&place, &sized(&path), &[]);
    let line = refused.complaint(1);
    assert!(line.contains("--force") && line.contains("(setting: backing_force)"), "{line}");
    assert_eq!(fs::read(&path).unwrap(), TREASURE);
    let alone = place.run(&["up", "--exec", "true", "--force"]);
    assert!(alone.complaint(2).starts_with("--force: nothing to take: give --backing"), "{}", alone.stderr);

    // A running daemon gives the same error, and uses the file with `backing_force`.
    let daemon = place.up(&[]);
    let add = ["add", "zram1", "--size", "1M", "--backing", &sized(&path)];
    let refused = place.run(&add);
    assert!(refused.complaint(1).contains("backing_force"), "{}", refused.stderr);
    assert_eq!(fs::read(&path).unwrap(), TREASURE);
    place.run(&[&add[..], &["--force"]].concat()).ok();
    assert_eq!(place.run(&["stat", "zram1", "backing_force"]).ok(), "1\n");
    drop(daemon);
    // The daemon was killed, but the file is still recognized as ours.
    assert!(up_on(&place, &sized(&path), &[]).status.success());
    let config = place.root().join("uzram.toml");
    fs::write(&path, TREASURE).unwrap();
    let taken = |force: bool| {
        let text = format!("[zram0]\nsize = '1M'\nbacking = '{}'\nforce = {force}\n", sized(&path));
        fs::write(&config, text).unwrap();
        let mut command = place.command(&["up", "--log", "error", "--config", config.to_str().unwrap()]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("it serves or has ended", || {
            place.run(&["status"]).status.success() || child.try_wait().unwrap().is_some()
        });
        let _ = place.run(&["down"]);
        crate::common::collect(child)
    };
    assert!(taken(false).complaint(1).contains("--force"));
    assert_eq!(fs::read(&path).unwrap(), TREASURE);
    assert!(taken(true).status.success());
}

/// A process of the attacker that listens on a socket and answers every request with a device of its choice.
struct FakeDaemon(Child);

impl FakeDaemon {
    fn start(socket: &Path) -> FakeDaemon {
        let script = "import os, socket, sys\n\
            server = socket.socket(socket.AF_UNIX)\n\
            server.bind(sys.argv[1])\n\
            os.chmod(sys.argv[1], 0o777)\n\
            server.listen()\n\
            while True:\n\
            \x20   client, _ = server.accept()\n\
            \x20   client.recv(4096)\n\
            \x20   body = b'{\"name\": \"mm_stat\", \"value\": \"a lie\"}'\n\
            \x20   head = b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body)\n\
            \x20   client.sendall(head + body)\n\
            \x20   client.close()\n";
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(socket).uid(ATTACKER).gid(ATTACKER).current_dir("/");
        let daemon = FakeDaemon(python.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        wait_until("the fake daemon listens", || {
            fs::metadata(socket).is_ok_and(|found| found.mode() & 0o777 == 0o777)
        });
        daemon
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn stat_in(dir: &Path) -> Ended {
    let mut command = bare_command(&["stat", "zram0", "mm_stat"]);
    command.env("UZRAM_RUNTIME_DIR", dir);
    finish(command)
}

/// Returns whether the attacker cannot run python3.
fn no_python() -> bool {
    if missing(&["python3"]) {
        return true;
    }
    let mut python = Command::new("python3");
    python.args(["-c", ""]).uid(ATTACKER).gid(ATTACKER).current_dir("/").stderr(Stdio::null());
    let runs = python.status().is_ok_and(|status| status.success());
    if !runs {
        println!("skipped: user {ATTACKER} cannot run python3");
    }
    !runs
}

#[test]
fn a_fake_daemon_of_another_user_is_not_believed() {
    if not_root() || no_python() {
        return;
    }
    let place = place();
    // In the attacker's directory.
    let dir = shared(&place).join("run");
    attack("mkdir -m 755 \"$1\"", &[&dir]);
    let fake = FakeDaemon::start(&dir.join("control.sock"));
    let ended = stat_in(&dir);
    let line = ended.complaint(1);
    assert!(line.contains("belongs to user 65534") && line.contains("--runtime-dir"), "{line}");
    // Through the attacker's link to root's directory.
    let own = place.root().join("own");
    fs::create_dir(&own).unwrap();
    let link = dir.parent().unwrap().join("link");
    attack("ln -s \"$2\" \"$1\"", &[&link, &own]);
    assert!(stat_in(&link).complaint(1).contains("is a symbolic link"));
    // In root's directory, which is writable by other users.
    drop(fake);
    set_mode(&own, 0o777);
    let fake = FakeDaemon::start(&own.join("control.sock"));
    assert!(stat_in(&own).complaint(1).contains("mode 0777"));
    // In root's directory, which is no longer writable by other users.
    set_mode(&own, 0o755);
    let ended = stat_in(&own);
    let line = ended.complaint(1);
    assert!(line.contains("a process of user 65534") && line.contains("--runtime-dir"), "{line}");
    drop(fake);
}

#[test]
fn a_runtime_directory_behind_another_user_s_link_is_not_served_in() {
    if not_root() {
        return;
    }
    let place = place();
    let dir = shared(&place);
    let (own, link) = (place.root().join("private"), dir.join("run"));
    fs::create_dir(&own).unwrap();
    set_mode(&own, 0o700);
    fs::write(own.join("uzram.lock"), TREASURE).unwrap();
    attack("ln -s \"$2\" \"$1\"", &[&link, &own]);
    let up = |dir: &Path| {
        let mut command = bare_command(&["up", "--size", "1M", "--log", "error", "--exec", "true"]);
        command.arg("--runtime-dir").arg(dir);
        finish(command)
    };
    for path in [link.clone(), link.join("deeper")] {
        let ended = up(&path);
        let line = ended.complaint(1);
        assert!(line.contains(&format!("'{}' is a symbolic link", link.display())), "{line}");
    }
    assert_eq!(fs::read(own.join("uzram.lock")).unwrap(), TREASURE);
    assert_eq!(fs::read_dir(&own).unwrap().count(), 1, "something was made in it");
    // Root's own link is followed.
    let trusted = place.root().join("trusted");
    symlink(&own, &trusted).unwrap();
    assert!(up(&trusted).status.success());
    // Root's directory has the attacker's link to another lock file.
    fs::remove_file(own.join("uzram.lock")).unwrap();
    let precious = place.root().join("precious");
    fs::write(&precious, TREASURE).unwrap();
    symlink(&precious, own.join("uzram.lock")).unwrap();
    assert!(up(&own).complaint(1).contains("cannot open"));
    assert_eq!(fs::read(&precious).unwrap(), TREASURE);
}

#[test]
fn root_is_not_led_by_xdg_runtime_dir() {
    if not_root() || missing(&["unshare", "mount"]) {
        return;
    }
    let place = place();
    let xdg = shared(&place).join("user");
    attack("mkdir -m 700 \"$1\"", &[&xdg]);
    // In the command's own /run, where no other daemon is.
    let alone = |args: &str| {
        let program = env!("CARGO_BIN_EXE_uzram");
        let script = format!("mount -t tmpfs -o mode=755 none /run && exec {program} {args}");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script]);
        command.env_remove("UZRAM_RUNTIME_DIR").env("XDG_RUNTIME_DIR", &xdg);
        finish(command)
    };
    assert!(alone("status").complaint(3).contains("no daemon is running in '/run/uzram'"));
    let served = alone("up --size 1M --log error --exec 'dirname $socket; stat -c %a /run/uzram'");
    assert_eq!(served.ok(), "/run/uzram\n700\n");
    assert_eq!(fs::read_dir(&xdg).unwrap().count(), 0);
    // For its own user the variable is used.
    let mut command = bare_command(&["status"]);
    command.env("XDG_RUNTIME_DIR", &xdg).uid(ATTACKER).gid(ATTACKER);
    let wanted = format!("no daemon is running in '{}'", xdg.join("uzram").display());
    assert!(finish(command).complaint(3).contains(&wanted));
}

#[test]
fn paths_that_are_not_utf_8_are_refused_at_the_start() {
    let place = Place::new();
    let bad = place.root().join(OsStr::from_bytes(b"d\xff\xfe"));
    let args = ["up", "--size", "1M", "--log", "error", "--exec", "true", "--runtime-dir"];
    let option = |dir: &Path| -> Ended {
        let mut command = bare_command(&args);
        command.arg(dir);
        finish(command)
    };
    let ended = option(&bad);
    assert!(ended.complaint(1).contains("is not UTF-8; choose another --runtime-dir"), "{}", ended.stderr);
    assert!(!bad.exists());
    assert!(stat_in(&bad).complaint(1).contains("is not UTF-8"));
    // Relative to a directory with such a name.
    fs::create_dir(&bad).unwrap();
    let mut command = bare_command(&args);
    command.arg("run").current_dir(&bad);
    assert!(finish(command).complaint(1).contains("is not UTF-8"));
    assert_eq!(fs::read_dir(&bad).unwrap().count(), 0);
}

#[test]
fn a_mount_that_is_not_utf_8_is_refused_at_the_start() {
    if crate::common::block::unable() {
        return;
    }
    let place = Place::new();
    let bad = place.root().join(OsStr::from_bytes(b"m\xff"));
    let link = place.root().join("link");
    fs::create_dir(place.root().join(OsStr::from_bytes(b"t\xff"))).unwrap();
    symlink(OsStr::from_bytes(b"t\xff"), &link).unwrap();
    for dir in [&bad, &link] {
        // A daemon could not report such a path to clients.
        let mut command = place.command(&["up", "--size", "1M", "--log", "error", "--mount"]);
        let mut ask = OsString::from(env!("CARGO_BIN_EXE_uzram"));
        ask.push(" stat zram0");
        command.arg(dir).arg("--exec").arg(&ask);
        let ended = finish(command);
        assert!(ended.complaint(1).contains("not UTF-8; choose another directory"), "{}", ended.stderr);
    }
    assert!(!bad.exists(), "a directory that was made is removed");
    let mounts = fs::read("/proc/self/mountinfo").unwrap();
    let root = place.root().as_os_str().as_bytes();
    assert!(!mounts.windows(root.len()).any(|at| at == root), "something is still mounted");
}

/// The examples' directory is created, accessible only by root.
#[test]
fn the_state_directory_is_made_for_its_owner_alone() {
    if not_root() || missing(&["unshare", "mount"]) {
        return;
    }
    let place = Place::new();
    let alone = |prepare: &str, backing: &str| {
        let program = env!("CARGO_BIN_EXE_uzram");
        let script = format!(
            "mount -t tmpfs -o mode=755 none /var/lib && {prepare} && umask 022 && {program} up --size 1M --log error \
             --backing {backing}:1M --exec 'stat -c \"%a %n\" /var/lib/uzram /var/lib/uzram/cold.img'"
        );
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script]).env("UZRAM_RUNTIME_DIR", place.dir());
        finish(command)
    };
    let wanted = "700 /var/lib/uzram\n600 /var/lib/uzram/cold.img\n";
    assert_eq!(alone("true", "/var/lib/uzram/cold.img").ok(), wanted);
    assert_eq!(alone("mkdir -m 700 /var/lib/uzram", "/var/lib/uzram/cold.img").ok(), wanted);
    // Other directories are not created.
    let ended = alone("true", "/var/lib/uzram/deeper/cold.img");
    assert!(ended.complaint(1).contains("No such file"), "{}", ended.stderr);
}

/// An attacker that races the daemon for the name of its file gains nothing, and no file of root's is lost.
#[test]
fn a_race_for_the_name_of_a_backing_file_is_lost_by_the_attacker() {
    if not_root() || missing(&["ln", "rm"]) {
        return;
    }
    let place = place();
    let dir = shared(&place);
    let (file, precious) = (dir.join("cold.img"), place.root().join("precious"));
    fs::write(&precious, TREASURE).unwrap();
    set_mode(&precious, 0o600);
    // Root's file of that name cannot be removed by the attacker in a sticky directory; so root does, each
    // time.
    let script =
        "while :; do ln -sf \"$2\" \"$1\"; rm -f \"$1\"; : > \"$1\"; chmod 666 \"$1\"; rm -f \"$1\"; done";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).args([&file, &precious]).uid(ATTACKER).gid(ATTACKER);
    let mut racer = shell.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let end = std::time::Instant::now() + PATIENCE / 5;
    let (mut taken, mut refused) = (0, 0);
    while std::time::Instant::now() < end {
        let ended = up_on(&place, &sized(&file), &[]);
        if ended.status.success() {
            let found = fs::symlink_metadata(&file).unwrap();
            assert!(found.uid() == 0 && found.mode() & 0o7777 == 0o600 && found.is_file());
            fs::remove_file(&file).unwrap();
            taken += 1;
        } else {
            refused += 1;
        }
    }
    racer.kill().unwrap();
    racer.wait().unwrap();
    println!("{taken} taken, {refused} refused");
    assert_eq!(fs::read(&precious).unwrap(), TREASURE);
}
