//! The daemon's life cycle: its output, its options, its end, and its runtime directory.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;

use crate::common::{Place, bare_command, connect, finish, has_program, in_a_terminal, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn mode(path: &std::path::Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_device_is_shown_set_and_reset() {
    let place = Place::new();
    let mut daemon =
        place.up(&["--name", "zram7", "--mem-limit", "8M", "--compact-threshold", "7", "--lru-enable=0"]);
    let uri = format!("nbd+unix:///zram7?socket={}", place.socket("nbd.sock").display());
    for fact in [uri.as_str(), "control.sock", "16 MiB", "fixed cost"] {
        assert!(daemon.facts.contains(fact), "{}", daemon.facts);
    }
    assert_eq!(mode(&place.dir()), 0o700);
    assert_eq!(mode(&place.socket("nbd.sock")) & 0o777, 0o600);
    assert_eq!(mode(&place.socket("control.sock")) & 0o777, 0o600);

    let list = place.run(&["list"]).ok();
    assert!(list.contains("zram7") && list.contains(&uri) && list.contains("16 MiB"), "{list}");
    let json = place.json(&["list"]);
    assert_eq!(json["devices"][0]["uri"], uri);

    let table = place.run(&["stat", "zram7"]).ok();
    for row in ["stored", "compressed", "pool memory", "charged", "tables", "ratio", "written"] {
        assert!(table.contains(&format!("\n  {row} ")), "{table}");
    }
    assert!(table.contains("limit 8 MiB") || table.contains("no limit"), "{table}");
    let json = place.json(&["stat", "zram7"]);
    assert_eq!(json["stats"]["disksize_bytes"], 16 << 20);
    assert_eq!(json["attributes"]["disksize"], 16 << 20);
    assert_eq!(json["stats"]["stream_sleeps"], 0);
    let set = ["compact_threshold", "lru_enable"].map(|name| &json["attributes"][name]);
    assert_eq!(set, [&Value::from(7), &0.into()]);
    assert!(place.run(&["stat", "zram7", "lru"]).ok().starts_with("inactive              0\nactive"));
    assert_eq!(place.run(&["stat", "zram7", "disksize"]).ok(), "16777216\n");
    let json = place.run(&["stat", "zram7", "mem_limit", "--json"]).ok();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["value"], 8 << 20);

    assert_eq!(place.run(&["set", "zram7", "mem_limit=4M", "mem_limit=6M"]).ok(), "");
    assert_eq!(place.run(&["stat", "zram7", "mem_limit"]).ok(), "6291456\n");
    assert_eq!(place.run(&["reset", "zram7"]).ok(), "");
    assert_eq!(place.run(&["stat", "zram7", "disksize"]).ok(), "0\n");
    assert_eq!(place.run(&["set", "zram7", "checksum=1", "disksize=32M"]).ok(), "");
    assert_eq!(place.run(&["stat", "zram7", "checksum"]).ok(), "1\n");
    assert_eq!(place.run(&["stat", "zram7", "disksize"]).ok(), "33554432\n");

    // The daemon has ended when `down` returns: the next one can start at once.
    for _ in 0..3 {
        assert_eq!(place.run(&["down"]).ok(), "");
        daemon = place.up(&[]);
        assert!(!place.run(&["list"]).ok().is_empty());
    }
    assert_eq!(place.run(&["down"]).ok(), "");
    let (status, _) = daemon.ended();
    assert!(status.success());
}

#[test]
fn what_a_device_does_not_take_is_one_line() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    for (args, mentions) in [
        (&["stat", "zram9"][..], "no device 'zram9'"),
        (&["stat", "zram9/../zram0"], "no device"),
        (&["stat", "zrma0"], "no device 'zrma0'; did you mean `zram0`?"),
        (&["stat", "zram0", "nonesuch"], "'nonesuch'; there are: disksize, "),
        (&["stat", "zram0", "mm_stats"], "no attribute 'mm_stats'; did you mean `mm_stat`?"),
        (&["set", "zram0", "mem_limt=1G"], "no attribute 'mem_limt'; did you mean `mem_limit`?"),
        (&["stat", "zram0", "bad\r\nname"], "bad  name"),
        (&["stat", "zram0", "reset"], "reset"),
        (&["set", "zram9", "mem_limit=1M"], "no device 'zram9'"),
        (&["set", "zram0", "nonesuch=1"], "cannot set nonesuch to '1'"),
        (&["set", "zram0", "initstate=1"], "initstate"),
        (&["set", "zram0", "disksize=1M"], "cannot set disksize to '1M'"),
        (&["reset", "zram9"], "no device 'zram9'"),
    ] {
        let ended = place.run(args);
        let line = ended.complaint(1);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
    // The command stops at the first failure, and says what was set before.
    let ended = place.run(&["set", "zram0", "mem_limit=2M", "nonesuch=1", "mem_limit=3M"]);
    assert!(ended.complaint(1).contains("already set: mem_limit"), "{}", ended.stderr);
    assert_eq!(place.run(&["stat", "zram0", "mem_limit"]).ok(), "2097152\n");

    // The daemon refuses a value that is too long, with a reason.
    let ended = place.run(&["set", "zram0", &format!("mem_limit={}", "9".repeat(80_000))]);
    assert!(ended.stderr.contains("longer than 64 KiB"));
    assert_eq!(place.run(&["stat", "zram0", "mem_limit"]).ok(), "2097152\n");
}

#[test]
fn signals_end_it_cleanly_with_and_without_clients() {
    for signal in [Signal::TERM, Signal::INT] {
        for with_clients in [false, true] {
            let place = Place::new();
            let daemon = place.up(&[]);
            let clients = with_clients
                .then(|| [connect(&place.socket("nbd.sock")), connect(&place.socket("control.sock"))]);
            daemon.signal(signal);
            let (status, stderr) = daemon.ended();
            assert!(status.success(), "{signal:?} {with_clients} {stderr}");
            assert!(!place.socket("nbd.sock").exists() && !place.socket("control.sock").exists());
            drop(clients);
        }
    }
}

#[test]
fn one_directory_has_one_daemon() {
    let place = Place::new();
    let daemon = place.up(&[]);
    let ended = place.run(&["up", "--size", "1M"]);
    let line = ended.complaint(1);
    assert!(line.contains("already serves") && line.contains(&format!("process {}", daemon.id())), "{line}");
    // The first daemon is not affected.
    place.run(&["list"]).ok();

    daemon.signal(Signal::KILL);
    let (status, _) = daemon.ended();
    assert!(!status.success());
    assert!(place.socket("nbd.sock").exists(), "a crash leaves its sockets");
    let daemon = place.up(&[]);
    place.run(&["list"]).ok();
    place.end(daemon);
}

#[test]
fn a_command_runs_with_the_addresses_and_its_status_is_ours() {
    let place = Place::new();
    let exec = |command: &str| place.run(&["up", "--size", "1M", "--log", "warn", "--exec", command]);
    let ended = exec(r#"echo "$uri|$socket|$name"; test -S "$socket""#);
    let socket = place.socket("nbd.sock");
    let socket = socket.display();
    // Standard output belongs to the command; the daemon uses standard error.
    assert_eq!(ended.stdout, format!("nbd+unix:///zram0?socket={socket}|{socket}|zram0\n"));
    assert!(ended.status.success());
    assert!(ended.stderr.contains("fixed cost") && ended.stderr.contains("\n  stored "), "{}", ended.stderr);

    assert_eq!(exec("exit 7").status.code(), Some(7));
    assert_eq!(exec("kill -TERM $$").status.code(), Some(143));
    assert_eq!(exec("no-such-program-at-all").status.code(), Some(127));
    assert!(!place.socket("nbd.sock").exists());
    // The command can control its own daemon, and even end it.
    let uzram = env!("CARGO_BIN_EXE_uzram");
    assert!(exec(&format!("'{uzram}' stat zram0 disksize | grep -qx 1048576")).status.success());
    assert_eq!(exec(&format!("'{uzram}' down; sleep 60")).status.code(), Some(143));
}

#[test]
fn signals_reach_the_command_and_all_it_started() {
    for (trap, signals, code) in [
        ("", &[Signal::TERM][..], 143),
        ("", &[Signal::INT], 130),
        ("trap 'exit 5' TERM;", &[Signal::TERM], 5),
        // It ignores the signal: the second request kills it.
        ("trap '' TERM;", &[Signal::TERM; 2], 137),
    ] {
        let place = Place::new();
        let pids = place.root().join("pids");
        let script =
            format!("{trap} sleep 61 >/dev/null 2>&1 & echo $! $$ > '{}'; wait; wait", pids.display());
        let mut child = place
            .command(&["up", "--size", "1M", "--exec", &script])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("the command starts", || fs::read_to_string(&pids).is_ok_and(|text| text.ends_with('\n')));
        kill_process(Pid::from_child(&child), signals[0]).unwrap();
        if let Some(second) = signals.get(1) {
            // Two signals before the first was handled count as one: send the second until it counts.
            wait_until("it ends", || {
                kill_process(Pid::from_child(&child), *second).unwrap();
                child.try_wait().unwrap().is_some()
            });
        }
        let ended = crate::common::collect(child);
        assert_eq!(ended.status.code(), Some(code), "{trap} {signals:?} {}", ended.stderr);
        assert!(!place.socket("control.sock").exists());
        // SIGTERM ends `sleep 61` with its shell. SIGINT does not end a shell's background process, and a
        // shell's trap may run first: then kill it here. It may stay as a zombie that nothing in this
        // container reaps.
        let sleeper: i32 = fs::read_to_string(&pids).unwrap().split(' ').next().unwrap().parse().unwrap();
        let sleeps = || {
            let status = fs::read_to_string(format!("/proc/{sleeper}/status")).unwrap_or_default();
            status.starts_with("Name:\tsleep") && !status.contains("State:\tZ")
        };
        if trap.is_empty() && code == 143 {
            wait_until("the command's own child ends", || !sleeps());
        } else if sleeps() {
            let _ = kill_process(Pid::from_raw(sleeper).unwrap(), Signal::KILL);
        }
    }
}

#[test]
fn the_runtime_directory_is_private_or_refused() {
    let place = Place::new();
    let up = |dir: PathBuf| {
        let mut command = bare_command(&["up", "--size", "1M", "--log", "error", "--exec", "true"]);
        command.arg("--runtime-dir").arg(dir);
        finish(command)
    };
    let nested = place.root().join("a/b/c");
    assert!(up(nested.clone()).status.success());
    assert_eq!(mode(&nested), 0o700);

    let open = place.root().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
    let ended = up(open.clone());
    let line = ended.complaint(1);
    assert!(line.contains("mode 0755") && line.contains("chmod 700"), "{line}");
    fs::set_permissions(&open, Permissions::from_mode(0o700)).unwrap();
    assert!(up(open.clone()).status.success());

    fs::write(open.join("nbd.sock"), "").unwrap();
    assert!(up(open.clone()).complaint(1).contains("not a socket"));
    assert!(open.join("nbd.sock").exists());
    assert!(up(open.join("nbd.sock")).complaint(1).contains("is not a directory"));
    assert!(up(place.root().join("x".repeat(120))).complaint(1).contains("too long for a socket"));
    assert!(up(PathBuf::from("/proc/uzram")).complaint(1).contains("cannot create"));

    let foreign = place.root().join("foreign");
    fs::create_dir(&foreign).unwrap();
    match std::os::unix::fs::chown(&foreign, Some(65534), None) {
        Ok(()) => assert!(up(foreign).complaint(1).contains("belongs to user 65534")),
        Err(error) => println!("skipped: giving a directory away: {error}"),
    }
}

#[test]
fn the_environment_names_the_runtime_directory() {
    let place = Place::new();
    let script = "dirname \"$socket\"";
    let args = ["up", "--size", "1M", "--log", "error", "--exec", script];
    // Root ignores the variable, as `attack_files` shows.
    if !rustix::process::geteuid().is_root() {
        let mut command = bare_command(&args);
        command.env("XDG_RUNTIME_DIR", place.root());
        assert_eq!(finish(command).ok().trim(), place.root().join("uzram").to_str().unwrap());
    }
    let mut command = bare_command(&args);
    command.env("XDG_RUNTIME_DIR", place.root()).env("UZRAM_RUNTIME_DIR", place.dir());
    assert_eq!(finish(command).ok().trim(), place.dir().to_str().unwrap());
    // A relative path is relative to the program's working directory.
    let mut command = bare_command(&args);
    command.args(["--runtime-dir", "near"]).current_dir(place.root());
    assert!(finish(command).ok().trim().ends_with("/near"));
}

#[test]
fn no_runtime_directory_at_all_is_one_line() {
    let mut command = bare_command(&["status"]);
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => {
            let ended = crate::common::collect(child);
            assert!(ended.complaint(1).contains("no runtime directory: give --runtime-dir"));
        }
        Err(error) => println!("skipped: running as another user: {error}"),
    }
}

/// A killed server's socket without any permissions does not prevent a new server's start; a running server's
/// socket keeps its mode.
#[test]
fn a_dead_servers_socket_is_replaced_whatever_its_mode() {
    let place = Place::new();
    fs::set_permissions(place.root(), Permissions::from_mode(0o777)).unwrap();
    let path = place.root().join("disk.sock");
    let listen = format!("unix:{}", path.display());
    let command = |dir: &str| {
        let mut command = place.command(&["up", "--size", "1M", "--listen", &listen, "--socket-mode", "0"]);
        command.env("UZRAM_RUNTIME_DIR", place.root().join(dir));
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        command
    };
    let killed = crate::common::Daemon::start(command("one"));
    killed.signal(Signal::KILL);
    drop(killed.ended());
    assert_eq!(mode(&path) & 0o777, 0);
    let _daemon = crate::common::Daemon::start(command("two"));
    let second = finish(command("three"));
    assert!(second.complaint(1).contains("another server has"), "{}", second.stderr);
    assert_eq!(mode(&path) & 0o777, 0);
}

#[test]
fn a_terminal_gets_a_live_line_and_its_control_c() {
    if !has_program("script") {
        println!("skipped: no script(1) to make a terminal");
        return;
    }
    let place = Place::new();
    let (code, shown) = in_a_terminal(&place, "up --size 1M", "ratio");
    assert_eq!(code, Some(0), "{shown}");
    let live = shown.split("\r\u{1b}[K").find(|line| line.starts_with("stored ")).unwrap();
    assert!(live.contains("used") && live.len() < 60, "{live}");
    assert!(!place.socket("nbd.sock").exists());

    // The terminal sends ^C to the command itself; a trap shows that it arrives once.
    let command = "up --size 1M --exec 'trap \"echo got it; got=1\" INT; echo ready; i=0; \
                   while test -z \"$got\" && test $i -lt 300; do sleep 0.1; i=$((i+1)); done; sleep 0.3; exit 9'";
    let (code, shown) = in_a_terminal(&place, command, "ready");
    assert_eq!(code, Some(9), "{shown}");
    assert_eq!(shown.matches("got it").count(), 1, "{shown}");
    assert!(shown.contains("stored"), "{shown}");
}
