//! Mistakes of new users: each gets one line that says what is wrong and what to write instead, and leaves
//! nothing behind.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::common::*;

#[test]
fn sizes_say_what_to_write() {
    let place = Place::new();
    let unit = "has no unit: write 64M for MiB";
    place.refuses(&[
        ("up --size 64", 2, &["--size 64: ", unit]),
        ("add a --size 64", 2, &["--size 64: ", unit]),
        ("up --mem-limit 64", 2, &["--mem-limit 64: ", unit]),
        ("up --reserve=64", 2, &["--reserve 64: ", unit]),
        ("run --limit 64 -- /bin/true", 125, &["--limit", unit]),
        ("train /a -o /b --size 64", 2, &["--size", unit]),
        ("up --size -1G", 2, &["--size -1G: ", "it is negative"]),
        ("up --size=-1G", 2, &["--size -1G: ", "it is negative"]),
        ("up --size --attach", 2, &["--size: its value is missing before --attach"]),
        ("up --high -1", 2, &["--high -1: '-1' is no policy_high: write 1 to 100"]),
        ("swap on --priority -5", 2, &["'-5'", "a number cannot be negative"]),
        ("up --give-up-after soon", 2, &["--give-up-after", "write a whole number"]),
        ("up --backing /nonexistent/cold:1.5G", 1, &["does not exist", "write 1536M"]),
    ]);
    // What a file takes, options take, too.
    for size in ["ram/2", "min(ram / 2, 64M)", "64M"] {
        place.run(&["up", "--size", size, "--log", "error", "--exec", "uzram=1"]).ok();
    }
    let memory = uzram::machine_memory::read().unwrap();
    let _daemon = place.up_sized("ram/2", &["--mem-limit", "min(ram, 32M)"]);
    assert_eq!(place.number("disksize"), memory.ram_bytes / 2 / 4096 * 4096);
    assert_eq!(place.number("mem_limit"), 32 << 20);
    place.refuses(&[
        ("set zram0 mem_limit=1.5G", 1, &["no fractions: write 1536M"]),
        ("set zram0 mem_limit=-1G", 1, &["it is negative"]),
    ]);
    assert_eq!(place.number("mem_limit"), 32 << 20);
}

#[test]
fn words_of_other_programs_are_translated() {
    let place = Place::new();
    let config = place.write("uzram.toml", "[zram0]\nsize = '1M'\n");
    let with = |option: &str| format!("{option} cannot be used with --config {config}");
    let daemon: &[&str] = &["`uzram swap on`", "dist/systemd/uzram.service"];
    place.refuses(&[
        ("stop", 2, &["unrecognized subcommand 'stop'; `uzram down` ends the daemon"]),
        ("shutdown", 2, &["`uzram down`"]),
        ("start", 2, &["`uzram up`"]),
        ("ls", 2, &["`uzram list`"]),
        ("rm zram0", 2, &["`uzram remove`"]),
        ("umount", 2, &["`uzram detach`"]),
        ("swapoff", 2, &["`uzram swap off`"]),
        ("stauts", 2, &["did you mean `stat"]),
        ("up --daemon", 2, daemon),
        ("up --background", 2, daemon),
        ("up -d", 2, daemon),
        ("up --memory 1G", 2, &["--mem-limit"]),
        ("up --compression lz4", 2, &["--algorithm"]),
        ("kick abc", 2, &["'abc'", "a client is named by its number: `uzram clients` lists them"]),
        ("kick -1", 2, &["a number cannot be negative"]),
        (&format!("up --config {config} --size 1G"), 2, &[&with("--size"), "device's table"]),
        (&format!("up --config {config} --read-only"), 2, &[&with("--read-only")]),
        (&format!("up --config {config} --policy x"), 2, &[&with("--policy")]),
        (&format!("up --config {config} --name x"), 2, &["cannot be used with '--name"]),
    ]);
}

#[test]
fn a_file_that_is_no_dictionary_is_refused() {
    let place = Place::new();
    let is_none = ["dict=/etc/passwd: it is not a dictionary", "`uzram train`"];
    for option in [
        "--algorithm-params ",
        "--algorithm lz4,",
        "--algorithm lz4hc:2,",
        "--algorithm zstd:3,",
        "--algorithm memory,",
    ] {
        place.refuses(&[(&format!("up {option}dict=/etc/passwd"), 2, &is_none)]);
    }
}

#[test]
fn an_argument_that_is_not_utf_8_is_named() {
    let place = Place::new();
    for (words, named) in [
        (&[&b"--backing"[..], b"/tmp/\xff:4M"][..], "--backing /tmp/\u{fffd}:4M: it is not UTF-8"),
        (&[b"--backing=/tmp/\xff"], "--backing=/tmp/\u{fffd}: it is not UTF-8"),
        (&[b"--size", b"1M", b"--algorithm", b"\xfe"], "--algorithm \u{fffd}: it is not UTF-8"),
    ] {
        let mut command = place.command("up");
        command.args(words.iter().map(|word| OsStr::from_bytes(word)));
        finish(command).says(2, named);
    }
}

/// Every key of zram-generator.conf(5), the obsolete ones included, is one of ours or has an answer.
#[test]
fn keys_of_zram_generator_say_what_they_are_here() {
    let place = Place::new();
    let said = |line: &str| {
        let config = place.write("uzram.toml", format!("[zram0]\n{line}\n"));
        place.run(&["check", "--config", &config])
    };
    for (line, answer) in [
        ("zram-size = 'min(ram / 2, 4096)'", "zram-generator's `zram-size` is `size`"),
        ("zram-fraction = '0.5'", "is part of `size`, as in size = \"ram * 0.5\""),
        ("max-zram-size = 4096", "is part of `size`, as in size = \"min(ram / 2, 4G)\""),
        ("zram-resident-limit = '0'", "is `mem-limit`"),
        ("compression-algorithm = 'zstd'", "is `algorithm`"),
        ("compression_algorithm = 'zstd'", "is `algorithm`"),
        ("writeback-device = '/dev/vdb'", "is `backing`"),
        ("memory-limit = '64G'", "is `host-memory-limit`"),
        ("mount-point = '/var/compressed'", "attach = true"),
        ("fs-type = 'ext4'", "attach = true"),
        ("options = 'discard'", "`swap-discard`"),
        ("'set!maxhotplug' = 'x'", "`ram` and `limit`"),
        // As they are written there.
        (
            "zram-size = min(ram / 2, 4096)",
            "write the value in quotes; zram-generator's `zram-size` is `size`",
        ),
        (
            "compression-algorithm = zstd lzo-rle",
            "in quotes; zram-generator's `compression-algorithm` is `algorithm`",
        ),
        ("swap-priority = ", "swap-priority"),
        ("swap = yes", "write true or false"),
        ("host-memory-limit = 9048", "9048 has no unit: write 9048M for MiB, as zram-generator reads it"),
    ] {
        said(line).says(2, answer);
    }
    said("host-memory-limit = 'none'\nswap-priority = 100").ok();
}

#[test]
fn a_mount_in_a_missing_directory_is_refused_and_makes_none() {
    let place = Place::new();
    let missing = place.path("nope");
    let why = format!("cannot mount '{missing}/x': '{missing}' does not exist: create it");
    if !lacks("/dev/fuse") {
        place.refuses(&[(&format!("up --size 1M --mount {missing}/x"), 1, &[&why])]);
    }
    assert!(!Path::new(&missing).exists());
}

#[test]
fn another_user_is_told_that_the_daemon_is_roots() {
    let Some(place) = Place::if_root() else { return };
    set_mode(place.root(), 0o755);
    let _daemon = place.up("");
    let wanted = format!("'{}' is root's: use sudo", place.dir().display());
    for args in ASKING.into_iter().chain(["swap status", "up"]) {
        let ended = finish(place.command(args).uid(NOBODY).gid(NOBODY));
        // There may be programs under `uzram run` of this user.
        if args != "list" || !ended.status.success() {
            ended.says(1, &wanted);
        }
    }
}

#[test]
fn interrupts_are_confirmed_while_clients_are_connected() {
    for options in ["", "--no-survive"] {
        let place = Place::new();
        let args = format!("up --size 1M --log error {options}");
        let again =
            "is in use by 1 NBD client, and its contents are lost when this daemon ends: press ^C again";
        let start = || {
            let terminal = Terminal::start(&place, &args);
            wait_until("it serves", || terminal.shown().contains("fixed cost"));
            wait_until("it answers", || place.run("status").status.success());
            terminal
        };
        let mut terminal = start();
        let mut client = place.nbd();
        assert!(works(&mut client, 1));
        terminal.press_interrupt();
        wait_until("it asks", || terminal.shown().contains(again));
        assert!(works(&mut client, 2), "it goes on");
        terminal.press_interrupt();
        let (code, shown) = terminal.ended();
        assert_eq!((code, shown.matches("press ^C again").count()), (Some(0), 1), "{shown}");

        // Without a client once is enough.
        let mut terminal = start();
        drop(place.nbd());
        wait_until("it has left", || !place.run("clients").ok().contains("zram0"));
        terminal.press_interrupt();
        let (code, shown) = terminal.ended();
        assert!(code == Some(0) && !shown.contains("press ^C again"), "{shown}");

        // Other requests to end are not asked about.
        for signal in [Signal::TERM, Signal::INT] {
            let daemon = place.up_sized("1M", options);
            let mut client = place.nbd();
            assert!(works(&mut client, 1));
            daemon.signal(signal);
            daemon.succeeds();
        }
    }
}

#[test]
fn an_unconfirmed_interrupt_is_forgotten_by_a_take_over() {
    let place = Place::new();
    let mut terminal = Terminal::start(&place, "up --size 1M --log error");
    wait_until("it serves", || terminal.shown().contains("fixed cost"));
    let client = place.nbd();
    terminal.press_interrupt();
    wait_until("it asks", || terminal.shown().contains("press ^C again"));
    let before = place.worker_id();
    place.wait_for_standby();
    kill(before);
    drop(client);
    wait_until("another one serves", || place.worker_id() != before);
    assert!(works(&mut place.nbd(), 1));
    wait_until("the client has left", || !place.run("clients").ok().contains("zram0"));
    terminal.press_interrupt();
    assert_eq!(terminal.ended().0, Some(0));
}

/// Returns what `uzram up --mount` and `uzram check` of a user without rights say of FUSE after `prepare`.
fn fuse_denied(prepare: &str) -> (Ended, Ended) {
    let place = Place::new();
    set_mode(place.root(), 0o777);
    let script = format!(
        "cd {0}; mkdir bin dir node; chmod 777 dir; mount -t tmpfs none node; mknod node/fuse c 10 229; {prepare}
         exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups \
             env PATH={0}/bin:$PATH UZRAM_RUNTIME_DIR={0}/dir/run TMPDIR={0}/dir \"$@\"",
        place.root().display()
    );
    let run = |args: &str| {
        fs::read_dir(place.root()).unwrap().for_each(|entry| {
            let path = entry.unwrap().path();
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        });
        finish(isolated(&format!("set -eu\n{script}")).args(["sh", UZRAM]).args(args.words()))
    };
    (run(&format!("up --size 1M --mount {} --exec true", place.path("dir/files"))), run("check"))
}

#[test]
fn a_denied_mount_names_the_device_and_who_denies_it() {
    if not_root() || lacks("/dev/fuse") {
        return;
    }
    let fusermount = "printf '#!/bin/sh\\necho \"fusermount3: mount failed: Permission denied\" >&2; exit 1\\n' >bin/fusermount3
         chmod +x bin/fusermount3";
    let bind = "mount --bind node/fuse /dev/fuse";
    for (prepare, said) in [
        (
            format!("chmod 660 node/fuse; chgrp 107 node/fuse; {bind}"),
            &["/dev/fuse: Permission denied", "group 107", "mode 0660", "add this user to the group"][..],
        ),
        (
            format!("chmod 666 node/fuse; {bind}; {fusermount}"),
            &["fusermount3: mount failed: Permission denied: ", "set-uid root", "AppArmor"],
        ),
    ] {
        let (up, check) = fuse_denied(&prepare);
        let check = check.ok();
        let fuse = check.lines().find(|line| line.starts_with("FUSE ")).unwrap();
        assert_eq!(fuse.words()[1], "no", "{fuse}");
        for said in said {
            up.says(1, said);
            assert!(fuse.contains(said), "no '{said}' in: {fuse}");
        }
    }
    // Where it is allowed, nothing stays mounted.
    let mounts = || fs::read_to_string("/proc/self/mounts").unwrap();
    let said = finish(bare_command("check")).ok();
    assert!(said.starts_with("FUSE           yes    a mount in a namespace of its own succeeds"), "{said}");
    assert!(!mounts().contains("uzram-check-"), "{}", mounts());
}

#[test]
fn a_disk_with_tables_beyond_the_machine_is_warned_about() {
    let memory = uzram::machine_memory::read().unwrap();
    if memory.ram_bytes >= 200 << 30 || memory.limit_bytes < memory.ram_bytes {
        return println!("skipped: the machine is too large, or the cgroup limited");
    }
    let place = Place::new();
    let add = format!("{UZRAM} add more --size 16T");
    let ended = place.run(&["up", "--size", "16T", "--exec", &add]);
    assert!(ended.status.success(), "{ended}");
    for name in ["zram0", "more"] {
        let warning = format!("the tables of {name} may take 112.");
        assert!(ended.stderr.contains(&warning) && ended.stderr.contains("(--size)"), "{ended}");
    }
}
