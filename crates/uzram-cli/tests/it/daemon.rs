//! The daemon's life cycle: its output, its options and settings, its memory, its end, and its runtime
//! directory.

use crate::common::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_device_is_shown_set_and_reset() {
    let place = Place::new();
    let mut daemon = place.up("--name zram7 --mem-limit 8M --compact-threshold 7 --lru-enable=0");
    let uri = format!("nbd+unix:///zram7?socket={}", place.socket("nbd.sock").display());
    for fact in [uri.as_str(), "control.sock", "16 MiB", "fixed cost"] {
        assert!(daemon.facts.contains(fact), "{}", daemon.facts);
    }
    assert_eq!(mode(&place.dir()), 0o700);
    for socket in ["nbd.sock", "control.sock"] {
        assert_eq!(mode(&place.socket(socket)) & 0o777, 0o600);
    }
    place.run("list").shows(&["zram7", &uri, "16 MiB"]);
    assert_eq!(place.json("list")["devices"][0]["uri"], uri);

    let rows = ["stored", "compressed", "pool memory", "charged", "tables", "ratio", "written"];
    let table = place.run("stat zram7").shows(&rows.map(|row| format!("\n  {row} ")));
    assert!(table.contains("limit 8 MiB") || table.contains("no limit"), "{table}");
    let json = place.json("stat zram7");
    let (stats, attributes) = (&json["stats"], &json["attributes"]);
    assert_eq!([&stats["disksize_bytes"], &attributes["disksize"]], [16 << 20; 2]);
    assert_eq!(stats["stream_sleeps"], 0);
    assert_eq!((&attributes["compact_threshold"], &attributes["lru_enable"]), (&7.into(), &0.into()));
    let get = |name: &str| place.run(&format!("stat zram7 {name}")).ok();
    assert!(get("lru").starts_with("inactive              0\nactive"));
    assert_eq!(get("disksize"), "16777216\n");
    assert_eq!(place.json("stat zram7 mem_limit")["value"], 8 << 20);

    let set = |what: &str| assert_eq!(place.run(what).ok(), "");
    set("set zram7 mem_limit=4M mem_limit=6M");
    assert_eq!(get("mem_limit"), "6291456\n");
    set("reset zram7");
    assert_eq!(get("disksize"), "0\n");
    set("set zram7 checksum=1 disksize=32M");
    assert_eq!((get("checksum").trim(), get("disksize").trim()), ("1", "33554432"));

    // The daemon has ended when `down` returns: the next one can start at once.
    for _ in 0..3 {
        set("down");
        daemon = place.up("");
        assert!(!place.run("list").ok().is_empty());
    }
    set("down");
    daemon.succeeds();
}

#[test]
fn what_a_device_does_not_take_is_one_line() {
    let place = Place::new();
    let _daemon = place.up("");
    place.run(&["stat", "zram0", "bad\r\nname"]).says(1, "bad  name");
    place.refuses(&[
        ("stat zram9", 1, &["no device 'zram9'"]),
        ("stat zram9/../zram0", 1, &["no device"]),
        ("stat zrma0", 1, &["no device 'zrma0'; did you mean `zram0`?"]),
        ("stat zram0 nonesuch", 1, &["'nonesuch'; there are: disksize, "]),
        ("stat zram0 mm_stats", 1, &["no attribute 'mm_stats'; did you mean `mm_stat`?"]),
        ("set zram0 mem_limt=1G", 1, &["no attribute 'mem_limt'; did you mean `mem_limit`?"]),
        ("stat zram0 reset", 1, &["reset"]),
        ("set zram9 mem_limit=1M", 1, &["no device 'zram9'"]),
        ("set zram0 nonesuch=1", 1, &["cannot set nonesuch to '1'"]),
        ("set zram0 initstate=1", 1, &["initstate"]),
        ("set zram0 disksize=1M", 1, &["cannot set disksize to '1M'"]),
        ("reset zram9", 1, &["no device 'zram9'"]),
        // The command stops at the first failure, and says what was set before.
        ("set zram0 mem_limit=2M nonesuch=1 mem_limit=3M", 1, &["already set: mem_limit"]),
    ]);
    assert_eq!(place.get("mem_limit"), "2097152");
    // The daemon refuses a value that is too long, with a reason.
    let ended = place.run(&format!("set zram0 mem_limit={}", "9".repeat(80_000)));
    assert!(ended.stderr.contains("longer than 64 KiB"));
    assert_eq!(place.get("mem_limit"), "2097152");
}

#[test]
fn signals_end_it_cleanly_with_and_without_clients() {
    for (signal, with_clients) in
        [(Signal::TERM, true), (Signal::INT, false), (Signal::HUP, true), (Signal::QUIT, false)]
    {
        let place = Place::new();
        let daemon = place.up("");
        let sockets = ["nbd.sock", "control.sock"].map(|name| place.socket(name));
        let _clients = with_clients.then(|| [connect(&sockets[0]), connect(&sockets[1])]);
        daemon.signal(signal);
        let log = daemon.succeeds();
        assert!(log.contains("ending"), "{signal:?}: {log}");
        assert!(!sockets[0].exists() && !sockets[1].exists());
    }
}

#[test]
fn one_directory_has_one_daemon() {
    let place = Place::new();
    let daemon = place.up("");
    place.run("up --size 1M").says(1, "already serves").says(1, &format!("process {}", daemon.id()));
    // The first daemon is not affected.
    place.run("list").ok();
    daemon.kill();
    assert!(place.socket("nbd.sock").exists(), "a crash leaves its sockets");
    let daemon = place.up("");
    place.run("list").ok();
    place.end(daemon);
}

#[test]
fn a_command_runs_with_the_addresses_and_its_status_is_ours() {
    let place = Place::new();
    let up = "up --size 1M --log warn --listen tcp:127.0.0.1:0 --exec".words();
    let exec = |command: &str| place.run(&[&up[..], &[command]].concat());
    let ended = exec(r#"echo "$uri|$socket|$name|$uris"; test -S "$socket""#);
    // Standard output belongs to the command; the daemon uses standard error.
    let (uri, socket) = (place.uri(), place.socket("nbd.sock"));
    let wanted = format!("{uri}|{}|zram0|{uri} nbd://127.0.0.1:", socket.display());
    assert!(ended.stdout.starts_with(&wanted) && ended.stdout.words().len() == 2, "{ended}");
    assert!(ended.status.success());
    assert!(ended.stderr.contains("fixed cost") && ended.stderr.contains("\n  stored "), "{ended}");
    for (command, status) in [
        ("exit 7", 7),
        ("kill -TERM $$", 143),
        ("no-such-program-at-all", 127),
        // The command can control its own daemon, and even end it.
        (&format!("'{UZRAM}' stat zram0 disksize | grep -qx 1048576"), 0),
        (&format!("'{UZRAM}' down; sleep 60"), 143),
    ] {
        assert_eq!(exec(command).status.code(), Some(status), "{command}");
        assert!(!socket.exists());
    }
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
        let pids = place.path("pids");
        let script = format!("{trap} sleep 61 >/dev/null 2>&1 & echo $! $$ > '{pids}'; wait; wait");
        let mut child = start(&mut place.command(&["up", "--size", "1M", "--exec", &script]));
        wait_until("the command starts", || fs::read_to_string(&pids).is_ok_and(|text| text.ends_with('\n')));
        kill_process(Pid::from_child(&child), signals[0]).unwrap();
        if let Some(second) = signals.get(1) {
            // Two signals before the first was handled count as one: send the second until it counts.
            wait_until("it ends", || {
                kill_process(Pid::from_child(&child), *second).unwrap();
                child.try_wait().unwrap().is_some()
            });
        }
        let ended = collect(child);
        assert_eq!(ended.status.code(), Some(code), "{trap} {signals:?} {ended}");
        assert!(!place.socket("control.sock").exists());
        // SIGTERM ends `sleep 61` with its shell. SIGINT does not end a shell's background process, and a
        // shell's trap may run first: then kill it here. It may stay as a zombie that nothing in this
        // container reaps.
        let sleeper = fs::read_to_string(&pids).unwrap().words()[0].parse().unwrap();
        let sleeper = Pid::from_raw(sleeper).unwrap();
        let sleeps = || {
            let status = of_process(sleeper, "status");
            status.starts_with("Name:\tsleep") && !status.contains("State:\tZ")
        };
        if trap.is_empty() && code == 143 {
            wait_until("the command's own child ends", || !sleeps());
        } else if sleeps() {
            let _ = kill_process(sleeper, Signal::KILL);
        }
    }
}

#[test]
fn the_runtime_directory_is_private_or_refused() {
    let place = Place::new();
    let up = |dir: &str| {
        finish(bare_command(&format!("up --size 1M --log error --exec true --runtime-dir {dir}")))
    };
    let nested = place.path("a/b/c");
    up(&nested).ok();
    assert_eq!(mode(nested.as_ref()), 0o700);

    let open = place.path("open");
    fs::create_dir(&open).unwrap();
    set_mode(&open, 0o755);
    up(&open).says(1, "mode 0755").says(1, "chmod 700");
    set_mode(&open, 0o700);
    up(&open).ok();
    let file = place.write("open/nbd.sock", "");
    up(&open).says(1, "not a socket");
    assert!(Path::new(&file).exists());
    up(&file).says(1, "is not a directory");
    up(&place.path(&"x".repeat(120))).says(1, "too long for a socket");
    up("/proc/uzram").says(1, "cannot create");

    let foreign = place.path("foreign");
    fs::create_dir(&foreign).unwrap();
    match chown(&foreign, Some(NOBODY), None) {
        Ok(()) => _ = up(&foreign).says(1, "belongs to user 65534"),
        Err(error) => println!("skipped: giving a directory away: {error}"),
    }
}

#[test]
fn no_runtime_directory_at_all_is_one_line() {
    let mut command = bare_command("status");
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => _ = collect(child).says(1, "no runtime directory: give --runtime-dir"),
        Err(error) => println!("skipped: running as another user: {error}"),
    }
}

/// A running server's socket keeps its mode.
#[test]
fn a_dead_servers_socket_is_replaced_whatever_its_mode() {
    let place = Place::without_rights();
    let path = place.root().join("disk.sock");
    let command = |dir: &str| {
        let up = format!("up --size 1M --listen unix:{} --socket-mode 0", path.display());
        let mut command = place.command(&up);
        command.env("UZRAM_RUNTIME_DIR", place.root().join(dir));
        command
    };
    Daemon::start(command("one")).kill();
    assert_eq!(mode(&path) & 0o777, 0);
    let _daemon = Daemon::start(command("two"));
    finish(command("three")).says(1, "another server has");
    assert_eq!(mode(&path) & 0o777, 0);
}

#[test]
fn a_terminal_gets_a_live_line_and_its_control_c() {
    let Some(place) = Place::needing("script") else { return };
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

#[test]
fn a_full_disk_says_so_and_stays_usable() {
    let Some(place) = Place::needing("nbdcopy qemu-io") else { return };
    let daemon = place.up_sized("32M", "--mem-limit 8M");
    let source = random_file(&place, "source", 32 << 20);
    let charged = || place.number("mem_charged");
    let refused = || complain(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    qemu_io(&place, &["write -P 0x5a 0 1M"]);
    let error = refused();
    assert!(error.contains("No space left on device"), "{error}");

    assert!(place.statistic("failed_writes") > 0);
    let table = place.run("stat zram0").ok();
    let written = table.lines().find(|line| line.trim_start().starts_with("written")).unwrap();
    assert!(written.ends_with("of them at the limit") && !written.contains(" 0 failed"), "{table}");
    assert!(charged() <= 8 * MIB);
    // What needs no memory works, as the help of --mem-limit says: pages of one word, and discards.
    qemu_io(&place, &["write -z 8M 1M", "write -P 0x77 9M 1M", "read -P 0x77 9M 1M"]);
    // Freed memory can be used again, and the limit holds.
    qemu_io(&place, &["discard 0 32M", "read -P 0 0 32M"]);
    qemu_io(&place, &["write -P 0x77 1000 5000", "read -P 0x77 1000 5000"]);
    refused();
    assert!(charged() <= 8 * MIB);

    // The limit can be raised and removed while clients are connected.
    let client = place.nbd();
    place.run("reset zram0").says(1, "in use").says(1, "disconnect");
    place.set("mem_limit=16M");
    refused();
    assert!(charged() > 12 * MIB && charged() <= 16 * MIB, "{}", charged());
    place.set("mem_limit=0");
    place.copy_in(&source);
    place.assert_holds(&source);
    drop(client);

    // A limit below the charge frees nothing, but allows no more.
    place.set("mem_limit=1M");
    place.assert_holds(&source);
    place.end(daemon);
}

#[test]
fn discarding_gives_memory_back() {
    let Some(place) = Place::needing("nbdcopy qemu-io") else { return };
    let daemon = place.up_sized("64M", "");
    let source = random_file(&place, "source", 64 << 20);
    let resident_before = daemon.resident_bytes();
    place.copy_in(&source);
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
fn devices_that_might_not_fit_into_the_cgroup_are_refused() {
    let Some(cgroup) = Cgroup::new("room", 256 * MIB) else { return };
    // The place is dropped, and its daemons end, before the cgroup is removed.
    let place = Place::new();
    let up = |args: &str| cgroup.uzram(&place, &format!("up --size 1G {args}"));
    finish(up("--exec true")).says(1, "this process's cgroup").says(1, "--mem-limit");
    let daemon = Daemon::start(up("--mem-limit 64M"));
    let add = |limit: &str| place.run(&format!("add more --size 1G --mem-limit {limit}"));
    add("192M").says(1, "more may take 192 MiB").says(1, "--mem-limit");
    assert!(!place.run("list").ok().contains("more"));
    add("32M").ok();
    place.run("list").shows(&["more"]);
    place.end(daemon);
}

#[test]
fn a_limit_below_what_a_device_needs_is_refused() {
    let place = Place::new();
    for (options, least) in
        [("4K", "24 KiB"), ("20000B", "24 KiB"), ("4M --reserve 8M", "8 MiB"), ("1M --reserve 1M", "4 MiB")]
    {
        let ended = place.run(&format!("up --size 16M --mem-limit {options}"));
        // The message quotes the option as it was typed.
        ended.begins(2, &format!("--mem-limit {}: ", options.words()[0]));
        ended.says(2, "mem_limit").says(2, &format!("at least {least}"));
    }
    place.run("up --size 17T").begins(2, "--size 17T: a disk has from 4 KiB to 16 TiB");
    place.run("up --size 0K").begins(2, "--size 0K: ");
    let daemon = place.up("--mem-limit 24K");
    place.refuses(&[
        ("add small --size 16M --mem-limit 8K", 1, &["at least 24 KiB"]),
        ("set zram0 mem_limit=1", 1, &["at least 24 KiB"]),
        ("set zram0 mem_limit=4K", 1, &["at least 24 KiB"]),
    ]);
    assert!(!place.run("list").ok().contains("small"));
    assert_eq!(place.number("mem_limit"), 24 << 10);
    daemon.terminate();
}

fn why<'a>(line: &'a str, origin: &str) -> &'a str {
    line.strip_prefix(origin).unwrap_or_else(|| panic!("'{origin}' does not begin: {line}"))
}

#[test]
fn a_wrong_value_gets_the_same_message_wherever_it_is_written() {
    let (place, other) = (Place::new(), Place::new());
    let _daemon = place.up("");
    for (name, is_policy, value) in [
        ("high", true, "many"),
        ("comp_algorithm", false, "nonesuch"),
        ("algorithm", false, "zstd:99"),
        ("disksize", false, "1X"),
        ("lru_enable", false, "exact"),
        ("checksum", false, "2"),
        ("recomp_algorithm", true, "algo=lz5"),
        ("recompress_after", true, "soon"),
        ("writeback_after", true, "1w"),
    ] {
        let option = format!("--{}", name.replace('_', "-"));
        let said = other.run(&format!("up {option}={value}"));
        let wanted = why(said.complaint(2), &format!("{option} {value}: ")).to_owned();
        let expect = |args: &str, origin: &str| {
            assert_eq!(why(other.run(args).complaint(2), origin), wanted, "{name}");
        };
        let config = place.write("config.toml", format!("[zram0]\n{name} = '{value}'\n"));
        expect(&format!("check --config {config}"), &format!("{config}:2: {name}: "));
        expect(&format!("add more {option}={value}"), &format!("{option} {value}: "));
        if is_policy {
            let policy = place.write("policy.toml", format!("{name} = '{value}'\n"));
            expect(&format!("up --policy {policy}"), &format!("--policy {policy}:1: {name}: "));
        }
        let ended = place.run(&format!("set zram0 {name}={value}"));
        let (_, set) = ended.complaint(1).split_once(&format!(" to '{value}': ")).unwrap();
        assert_eq!(set, wanted, "{name}");
    }
}

#[test]
fn short_words_and_the_attributes_names_mean_the_same_everywhere() {
    let place = Place::new();
    // Parameters of algorithms are set after these, in whatever order.
    let options = "--algorithm-params=level=5 --comp-algorithm=zstd";
    let _daemon = place.up(&format!("--low 5 {options} --checksum --recompress=lz4hc:1h"));
    let get = |name: &str| place.get(name);
    assert_eq!(["policy_low", "checksum", "recompress_after"].map(get), ["5", "1", "3600"]);
    assert!(get("comp_algorithm").contains("[zstd:5]") && get("recomp_algorithm").contains("[lz4hc"));
    place.set("low=10 high=50");
    assert_eq!(["policy_low", "policy_high"].map(get), ["10", "50"]);
    place.run(&format!("add added {options} --size=1M")).ok();
    place.run("stat added comp_algorithm").shows(&["[zstd:5]"]);
    let again = ["--algorithm-params=priority=1 level=5", "--recompress=zstd", "--size=1M"];
    place.run(&[&["add", "again"], &again[..]].concat()).ok();
    place.run("stat again recomp_algorithm").shows(&["[zstd:5]"]);
    place.refuses(&[
        // The daemon looked for the file.
        ("add more --algorithm zstd,dict=/nonexistent", 1, &["dict=/nonexistent: No such file"]),
        ("add more --algorithm zstd,dict=near", 2, &["dict=near: write the whole path"]),
        ("add more --algorithm deflate,dict=/a", 2, &["deflate takes no dictionary"]),
    ]);
    Place::new().refuses(&[
        ("up --size 1M --disksize 2M", 2, &["uzram: --size 1M: --disksize 2M already sets it"]),
        (
            "up --recompress zstd:1h --recompress-after 2h",
            2,
            &["uzram: --recompress-after 2h: --recompress zstd:1h"],
        ),
        ("up --high 101", 2, &["uzram: --high 101: '101' is no policy_high"]),
        ("up --force", 2, &["uzram: --force: nothing to take"]),
        ("up --backing-force", 2, &["uzram: --backing-force: nothing to take: give --backing"]),
    ]);
}
