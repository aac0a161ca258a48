//! The daemon's life cycle: its output, its options and settings, its end, and its runtime directory.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;

use crate::common::clients::{arg, qemu_io, random_file, succeed};
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
        place.run(args).says(1, mentions);
    }
    // The command stops at the first failure, and says what was set before.
    place
        .run(&["set", "zram0", "mem_limit=2M", "nonesuch=1", "mem_limit=3M"])
        .says(1, "already set: mem_limit");
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
    assert!(ended.stderr.contains("fixed cost") && ended.stderr.contains("\n  stored "), "{ended}");

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
        assert_eq!(ended.status.code(), Some(code), "{trap} {signals:?} {ended}");
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
    up(open.clone()).says(1, "mode 0755").says(1, "chmod 700");
    fs::set_permissions(&open, Permissions::from_mode(0o700)).unwrap();
    assert!(up(open.clone()).status.success());

    fs::write(open.join("nbd.sock"), "").unwrap();
    up(open.clone()).says(1, "not a socket");
    assert!(open.join("nbd.sock").exists());
    up(open.join("nbd.sock")).says(1, "is not a directory");
    up(place.root().join("x".repeat(120))).says(1, "too long for a socket");
    up(PathBuf::from("/proc/uzram")).says(1, "cannot create");

    let foreign = place.root().join("foreign");
    fs::create_dir(&foreign).unwrap();
    match std::os::unix::fs::chown(&foreign, Some(65534), None) {
        Ok(()) => assert!(up(foreign).complaint(1).contains("belongs to user 65534")),
        Err(error) => println!("skipped: giving a directory away: {error}"),
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
    finish(command("three")).says(1, "another server has");
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

const MIB: u64 = 1 << 20;

#[test]
fn discarding_gives_memory_back() {
    let Some(place) = Place::needing(&["nbdcopy", "qemu-io"]) else { return };
    let daemon = place.up_sized("64M", &[]);
    let source = random_file(&place, "source", 64 << 20);
    let resident_before = daemon.resident_bytes();
    succeed(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    let (charged, resident) = (place.number("mem_charged"), daemon.resident_bytes());
    assert!(charged >= 64 * MIB && resident >= resident_before + 60 * MIB, "{charged} {resident}");

    qemu_io(&place, &["discard 0 32M"]);
    // The device's own thread gives memory back asynchronously.
    wait_until("half goes back", || place.number("mem_charged") < charged - 28 * MIB);
    // Zeros, with and without permission to make holes.
    qemu_io(&place, &["write -z -u 32M 16M", "write -z 48M 16M"]);
    // Free runs kept for each CPU stay charged.
    wait_until("all goes back", || place.number("mem_charged") < 4 * MIB);
    wait_until("it is in memory no more", || daemon.resident_bytes() < resident_before + 16 * MIB);
    assert_eq!(place.statistic("orig_data_bytes"), 16 * MIB, "pages of zeros count, and take no memory");
}

#[test]
fn a_limit_below_what_a_device_needs_is_refused() {
    let place = Place::new();
    for (args, least) in [
        (&["--mem-limit", "4K"][..], "24 KiB"),
        (&["--mem-limit", "20000B"], "24 KiB"),
        (&["--mem-limit", "4M", "--reserve", "8M"], "8 MiB"),
        (&["--mem-limit", "1M", "--reserve", "1M"], "4 MiB"),
    ] {
        let ended = place.run(&[&["up", "--size", "16M"], args].concat());
        let line = ended.complaint(2);
        // The message quotes the option as it was typed.
        assert!(line.starts_with(&format!("--mem-limit {}: ", args[1])), "{line}");
        assert!(line.contains("mem_limit") && line.contains(&format!("at least {least}")), "{line}");
    }
    for (size, what) in [("17T", "--size 17T: a disk has from 4 KiB to 16 TiB"), ("0K", "--size 0K: ")] {
        let ended = place.run(&["up", "--size", size]);
        assert!(ended.complaint(2).starts_with(what), "{ended}");
    }
    let daemon = place.up(&["--mem-limit", "24K"]);
    place.run(&["add", "small", "--size", "16M", "--mem-limit", "8K"]).says(1, "at least 24 KiB");
    assert!(!place.run(&["list"]).ok().contains("small"));
    for limit in ["1", "4K"] {
        let ended = place.run(&["set", "zram0", &format!("mem_limit={limit}")]);
        ended.says(1, "at least 24 KiB");
    }
    assert_eq!(place.number("mem_limit"), 24 << 10);
    daemon.terminate();
}

fn why<'a>(line: &'a str, origin: &str) -> &'a str {
    line.strip_prefix(origin).unwrap_or_else(|| panic!("'{origin}' does not begin: {line}"))
}

#[test]
fn a_wrong_value_gets_the_same_message_wherever_it_is_written() {
    let place = Place::new();
    let other = Place::new();
    let _daemon = place.up(&[]);
    let path = |name: &str| place.root().join(name).display().to_string();
    let (config, policy) = (path("config.toml"), path("policy.toml"));
    for (name, is_policy, value) in [
        ("high", true, "many"),
        ("comp_algorithm", false, "nonesuch"),
        ("algorithm", false, "zstd:99"),
        ("disksize", false, "1X"),
        ("mem_limit", false, "12Q"),
        ("lru_enable", false, "exact"),
        ("checksum", false, "2"),
        ("compact_threshold", false, "101"),
        ("policy_high", true, "101"),
        ("low", true, "-1"),
        ("recomp_algorithm", true, "algo=lz5"),
        ("recompress_after", true, "soon"),
        ("reclaim", true, "all"),
        ("writeback_after", true, "1w"),
        ("writeback_batch_size", true, "129"),
    ] {
        let option = format!("--{}", name.replace('_', "-"));
        let ended = other.run(&["up", &format!("{option}={value}")]);
        let said = ended.complaint(2).to_owned();
        let wanted = why(&said, &format!("{option} {value}: "));

        fs::write(&config, format!("[zram0]\n{name} = '{value}'\n")).unwrap();
        let ended = other.run(&["check", "--config", &config]);
        assert_eq!(why(ended.complaint(2), &format!("{config}:2: {name}: ")), wanted, "{name}");
        let ended = other.run(&["add", "more", &format!("{option}={value}")]);
        assert_eq!(why(ended.complaint(2), &format!("{option} {value}: ")), wanted, "{name}");
        if is_policy {
            fs::write(&policy, format!("{name} = '{value}'\n")).unwrap();
            let ended = other.run(&["up", "--policy", &policy]);
            assert_eq!(why(ended.complaint(2), &format!("--policy {policy}:1: {name}: ")), wanted, "{name}");
        }
        let ended = place.run(&["set", "zram0", &format!("{name}={value}")]);
        let (_, set) = ended.complaint(1).split_once(&format!(" to '{value}': ")).unwrap();
        assert_eq!(set, wanted, "{name}");
    }
}

#[test]
fn parameters_of_algorithms_come_after_these_however_a_device_is_made() {
    let (place, added) = (Place::new(), ["zram0", "added"]);
    let options = ["--algorithm-params=level=5", "--algorithm=zstd", "--size=1M"];
    let _daemon = place.up_sized("2M", &["--algorithm-params=level=5", "--algorithm=zstd"]);
    place.run(&[&["add", "added"], &options[..]].concat()).ok();
    for name in added {
        assert!(place.run(&["stat", name, "comp_algorithm"]).ok().contains("[zstd:5]"), "{name}");
    }
    let again = ["--algorithm-params=priority=1 level=5", "--recompress=zstd", "--size=1M"];
    place.run(&[&["add", "again"], &again[..]].concat()).ok();
    place.run(&["stat", "again", "recomp_algorithm"]).shows(&["[zstd:5]"]);
}

#[test]
fn a_dictionary_is_for_the_daemon_to_read() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    let with = |path: &str| place.run(&["add", "more", "--algorithm", &format!("zstd,dict={path}")]);
    // The daemon looked for the file.
    with("/nonexistent").says(1, "dict=/nonexistent: No such file");
    with("near").says(2, "dict=near: write the whole path");
    assert!(
        place
            .run(&["add", "more", "--algorithm", "deflate,dict=/a"])
            .complaint(2)
            .contains("deflate takes no dictionary")
    );
}

#[test]
fn short_words_and_the_attributes_names_mean_the_same_everywhere() {
    let place = Place::new();
    let _daemon = place.up(&["--low", "5", "--comp-algorithm=zstd:4", "--checksum", "--recompress=lz4hc:1h"]);
    let get = |name: &str| place.run(&["stat", "zram0", name]).ok();
    assert_eq!((get("policy_low").trim(), get("checksum").trim()), ("5", "1"));
    assert!(get("comp_algorithm").contains("[zstd:4]") && get("recomp_algorithm").contains("[lz4hc"));
    assert_eq!(get("recompress_after").trim(), "3600");
    place.run(&["set", "zram0", "low=10", "high=50"]).ok();
    assert_eq!((get("policy_low").trim(), get("policy_high").trim()), ("10", "50"));
    for (args, said) in [
        (&["--size", "1M", "--disksize", "2M"][..], "--size 1M: --disksize 2M already sets it"),
        (
            &["--recompress", "zstd:1h", "--recompress-after", "2h"],
            "--recompress-after 2h: --recompress zstd:1h",
        ),
        (&["--high", "101"], "--high 101: '101' is no policy_high"),
        (&["--backing-force"], "--backing-force: nothing to take: give --backing"),
    ] {
        let ended = Place::new().run(&[&["up"], args].concat());
        assert!(ended.complaint(2).starts_with(said), "{ended}");
    }
}
