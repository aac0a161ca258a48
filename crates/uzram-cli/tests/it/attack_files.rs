//! Another user of the machine (uid 65534) against what the program reads, writes and connects to: backing
//! files, runtime directories, control sockets and paths.
//!
//! The tests run as root, the attacker's part in processes of that user; without root they are skipped.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;

use crate::common::*;

/// The contents of files that must not change.
const TREASURE: &[u8] = b"root's own words\n";
const UP: &str = "up --size 1M --log error --exec true";

/// Makes a place of root, and a directory in it in which all users can create files, like `/var/tmp`.
fn place() -> Option<(Place, PathBuf)> {
    let place = Place::if_root()?;
    set_mode(place.root(), 0o711);
    let shared = place.root().join("shared");
    fs::create_dir(&shared).unwrap();
    set_mode(&shared, 0o1777);
    Some((place, shared))
}

fn precious(place: &Place) -> PathBuf {
    let path = PathBuf::from(place.write("precious", TREASURE));
    set_mode(&path, 0o600);
    path
}

/// Runs a shell script as the attacker, with `paths` as `$1` and so on.
fn attack(script: &str, paths: &[&Path]) {
    finish(Command::new("sh").args(["-c", script, "sh"]).args(paths).uid(NOBODY).gid(NOBODY)).ok();
}

/// Runs `uzram up` with a backing file; the daemon ends at once if it starts.
fn up_on(place: &Place, path: &Path) -> Ended {
    place.run(&format!("{UP} --backing {}:1M", path.display()))
}

#[test]
fn what_holds_something_else_wants_force_and_an_own_mark_is_taken_again() {
    let place = Place::new();
    let path = precious(&place);
    up_on(&place, &path).says(1, "--force").says(1, "(setting: backing_force)");
    assert_eq!(fs::read(&path).unwrap(), TREASURE);
    // A running daemon gives the same error, and uses the file with `backing_force`.
    let daemon = place.up("");
    let add = format!("add zram1 --size 1M --backing {}:1M", path.display());
    place.run(&add).says(1, "backing_force");
    assert_eq!(fs::read(&path).unwrap(), TREASURE);
    place.run(&format!("{add} --force")).ok();
    assert_eq!(place.run("stat zram1 backing_force").ok(), "1\n");
    drop(daemon);
    // The daemon was killed, but the file is still recognized as ours.
    up_on(&place, &path).ok();
}

/// Listens on a socket as the attacker, and answers every request with a device of its choice.
fn fake_daemon(socket: &Path) {
    let listener = as_nobody(|_| UnixListener::bind(socket).unwrap());
    set_mode(socket, 0o777);
    // Ends with the test's process.
    thread::spawn(move || {
        let body = r#"{"name": "mm_stat", "value": "a lie"}"#;
        for mut client in listener.incoming().flatten() {
            let _ = client.read(&mut [0; 4096]);
            let _ = write!(client, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
}

fn stat_in(dir: &Path) -> Ended {
    finish(bare_command("stat zram0 mm_stat").env("UZRAM_RUNTIME_DIR", dir))
}

#[test]
fn a_fake_daemon_of_another_user_is_not_believed() {
    let Some((place, shared)) = place() else { return };
    // In the attacker's directory.
    let dir = shared.join("run");
    attack("mkdir -m 755 $1", &[&dir]);
    fake_daemon(&dir.join("control.sock"));
    stat_in(&dir).says(1, "belongs to user 65534").says(1, "--runtime-dir");
    // Through the attacker's link to root's directory.
    let (own, link) = (place.root().join("own"), shared.join("link"));
    fs::create_dir(&own).unwrap();
    attack("ln -s $2 $1", &[&link, &own]);
    stat_in(&link).says(1, "is a symbolic link");
    // In root's directory, which is writable by other users.
    set_mode(&own, 0o777);
    fake_daemon(&own.join("control.sock"));
    stat_in(&own).says(1, "mode 0777");
    // In root's directory, which is no longer writable by other users.
    set_mode(&own, 0o755);
    stat_in(&own).says(1, "a process of user 65534").says(1, "--runtime-dir");
}

#[test]
fn a_runtime_directory_behind_another_user_s_link_is_not_served_in() {
    let Some((place, shared)) = place() else { return };
    let (own, link) = (place.root().join("private"), shared.join("run"));
    let lock = own.join("uzram.lock");
    fs::create_dir(&own).unwrap();
    set_mode(&own, 0o700);
    fs::write(&lock, TREASURE).unwrap();
    attack("ln -s $2 $1", &[&link, &own]);
    let up = |dir: &Path| finish(bare_command(UP).arg("--runtime-dir").arg(dir));
    for path in [link.clone(), link.join("deeper")] {
        up(&path).says(1, &format!("'{}' is a symbolic link", link.display()));
    }
    assert_eq!(fs::read(&lock).unwrap(), TREASURE);
    assert_eq!(fs::read_dir(&own).unwrap().count(), 1, "something was made in it");
    // Root's own link is followed.
    let trusted = place.root().join("trusted");
    symlink(&own, &trusted).unwrap();
    up(&trusted).ok();
    // Root's directory has the attacker's link to another lock file.
    fs::remove_file(&lock).unwrap();
    let precious = precious(&place);
    symlink(&precious, &lock).unwrap();
    up(&own).says(1, "cannot open");
    assert_eq!(fs::read(&precious).unwrap(), TREASURE);
}

#[test]
fn root_is_not_led_by_xdg_runtime_dir() {
    let Some((_place, shared)) = place() else { return };
    if missing("unshare mount") {
        return;
    }
    let xdg = shared.join("user");
    attack("mkdir -m 700 $1", &[&xdg]);
    // In the command's own /run, where no other daemon is.
    let alone = |args: &str| {
        let mut command = isolated(&format!("mount -t tmpfs -o mode=755 none /run && exec {UZRAM} {args}"));
        finish(command.env_remove("UZRAM_RUNTIME_DIR").env("XDG_RUNTIME_DIR", &xdg))
    };
    alone("status").says(3, "no daemon is running in '/run/uzram'");
    let served = alone("up --size 1M --log error --exec 'dirname $socket; stat -c %a /run/uzram'");
    assert_eq!(served.ok(), "/run/uzram\n700\n");
    assert_eq!(fs::read_dir(&xdg).unwrap().count(), 0);
    // For its own user the variable is used.
    let theirs = finish(bare_command("status").env("XDG_RUNTIME_DIR", &xdg).uid(NOBODY).gid(NOBODY));
    theirs.says(3, &format!("no daemon is running in '{}'", xdg.join("uzram").display()));
}

#[test]
fn paths_that_are_not_utf_8_are_refused_at_the_start() {
    let place = Place::new();
    let bad = place.root().join(OsStr::from_bytes(b"d\xff\xfe"));
    let up = || bare_command(&format!("{UP} --runtime-dir"));
    finish(up().arg(&bad)).says(1, "is not UTF-8; choose another --runtime-dir");
    assert!(!bad.exists());
    stat_in(&bad).says(1, "is not UTF-8");
    // Relative to a directory with such a name.
    fs::create_dir(&bad).unwrap();
    finish(up().arg("run").current_dir(&bad)).says(1, "is not UTF-8");
    assert_eq!(fs::read_dir(&bad).unwrap().count(), 0);
}

#[test]
fn a_mount_that_is_not_utf_8_is_refused_at_the_start() {
    if unable() {
        return;
    }
    let place = Place::new();
    let [bad, target] = [b"m\xff", b"t\xff"].map(|name| place.root().join(OsStr::from_bytes(name)));
    let link = place.root().join("link");
    fs::create_dir(&target).unwrap();
    symlink(&target, &link).unwrap();
    for dir in [&bad, &link] {
        // A daemon could not report such a path to clients.
        let ask = OsString::from(format!("{UZRAM} stat zram0"));
        let mut command = place.command("up --size 1M --log error --mount");
        finish(command.arg(dir).arg("--exec").arg(ask)).says(1, "not UTF-8; choose another directory");
    }
    assert!(!bad.exists(), "a directory that was made is removed");
    let mounts = fs::read("/proc/self/mountinfo").unwrap();
    assert!(!contains(&mounts, place.root().as_os_str().as_bytes()), "something is still mounted");
}

#[test]
fn the_state_directory_is_made_for_its_owner_alone() {
    let Some((place, _)) = place() else { return };
    if missing("unshare mount") {
        return;
    }
    let alone = |prepare: &str, backing: &str| {
        let mut command = isolated(&format!(
            "mount -t tmpfs -o mode=755 none /var/lib && {prepare} && umask 022 && {UZRAM} up --size 1M --log error \
             --backing {backing}:1M --exec 'stat -c \"%a %n\" /var/lib/uzram /var/lib/uzram/cold.img'"
        ));
        finish(command.env("UZRAM_RUNTIME_DIR", place.dir()))
    };
    let wanted = "700 /var/lib/uzram\n600 /var/lib/uzram/cold.img\n";
    assert_eq!(alone("true", "/var/lib/uzram/cold.img").ok(), wanted);
    assert_eq!(alone("mkdir -m 700 /var/lib/uzram", "/var/lib/uzram/cold.img").ok(), wanted);
    // Other directories are not created.
    alone("true", "/var/lib/uzram/deeper/cold.img").says(1, "No such file");
}

#[test]
fn a_race_for_the_name_of_a_backing_file_is_lost_by_the_attacker() {
    let Some((place, shared)) = place() else { return };
    let (file, precious) = (shared.join("cold.img"), precious(&place));
    // Root's file of that name cannot be removed by the attacker in a sticky directory; so root does, each
    // time. Nor opened: a shell would end by that, if it were for `:`.
    let script = "while :; do ln -sf $2 $1; rm -f $1; true > $1; chmod 666 $1; rm -f $1; done";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).args([&file, &precious]).uid(NOBODY).gid(NOBODY);
    let racer = Killed(shell.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let end = Instant::now() + Duration::from_secs(12);
    let (mut taken, mut refused) = (0, 0);
    while Instant::now() < end {
        if up_on(&place, &file).status.success() {
            let found = fs::symlink_metadata(&file).unwrap();
            assert!(found.uid() == 0 && found.mode() & 0o7777 == 0o600 && found.is_file());
            fs::remove_file(&file).unwrap();
            taken += 1;
        } else {
            refused += 1;
        }
    }
    drop(racer);
    println!("{taken} taken, {refused} refused");
    assert!(refused > 0, "the attacker never came first");
    assert_eq!(fs::read(&precious).unwrap(), TREASURE);
}
