//! The memory limit of a disk, and the memory that it gives back.

use std::fs;
use std::path::Path;

use crate::common::block::{BlockPlace, Cgroup};
use crate::common::clients::{Connected, arg, complain, qemu_io, random_file, same, succeed};
use crate::common::{Daemon, Place, finish, wait_until};

const MIB: u64 = 1 << 20;

#[test]
fn a_full_disk_says_so_and_stays_usable() {
    let Some(place) = Place::needing(&["nbdcopy", "qemu-io"]) else { return };
    let daemon = place.up_sized("32M", &["--mem-limit", "8M"]);
    let (source, copy) = (random_file(&place, "source", 32 << 20), place.root().join("copy"));
    qemu_io(&place, &["write -P 0x5a 0 1M"]);
    let error = complain(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    assert!(error.contains("No space left on device"), "{error}");

    assert!(place.statistic("failed_writes") > 0);
    let table = place.run(&["stat", "zram0"]).ok();
    let written = table.lines().find(|line| line.trim_start().starts_with("written")).unwrap();
    assert!(written.ends_with("of them at the limit") && !written.contains(" 0 failed"), "{table}");
    assert!(place.number("mem_charged") <= 8 * MIB);
    // What needs no memory works, as the help of --mem-limit says: pages of one word, and discards.
    qemu_io(&place, &["write -z 8M 1M", "write -P 0x77 9M 1M", "read -P 0x77 9M 1M"]);
    // Freed memory can be used again, and the limit holds.
    qemu_io(
        &place,
        &["discard 0 32M", "read -P 0 0 32M", "write -P 0x77 1000 5000", "read -P 0x77 1000 5000"],
    );
    complain(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    assert!(place.number("mem_charged") <= 8 * MIB);

    // The limit can be raised and removed while clients are connected.
    let client = Connected::new(&place, &place.uri());
    place.run(&["set", "zram0", "mem_limit=16M"]).ok();
    complain(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    let charged = place.number("mem_charged");
    assert!(charged > 12 * MIB && charged <= 16 * MIB, "{charged}");
    place.run(&["set", "zram0", "mem_limit=0"]).ok();
    succeed(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&source, &copy));
    drop(client);

    // A limit below the charge frees nothing, but allows no more.
    place.run(&["set", "zram0", "mem_limit=1M"]).ok();
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&source, &copy));
    place.end(daemon);
}

#[test]
fn a_device_in_use_is_not_reset() {
    let Some(place) = Place::needing(&["qemu-io"]) else { return };
    let _daemon = place.up(&[]);
    let mut client = Connected::new(&place, &place.uri());
    client.command("write -P 0x5a 0 1M", "wrote");
    let ended = place.run(&["reset", "zram0"]);
    let line = ended.complaint(1);
    assert!(line.contains("in use") && line.contains("disconnect"), "{line}");
    client.command("read -P 0x5a 0 1M", "read");
    drop(client);

    // The server notices when it reads from the socket.
    wait_until("the device can be reset", || place.run(&["reset", "zram0"]).status.success());
    assert_eq!(place.number("disksize"), 0);
    assert_eq!(place.statistic("mem_charged_bytes"), 0);
    place.run(&["set", "zram0", "comp_algorithm=zstd", "disksize=8M"]).ok();
    qemu_io(&place, &["read -P 0 0 8M", "write -P 0x11 0 8M", "read -P 0x11 0 8M"]);
}

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
        assert!(ended.complaint(2).starts_with(what), "{}", ended.stderr);
    }
    let daemon = place.up(&["--mem-limit", "24K"]);
    let ended = place.run(&["add", "small", "--size", "16M", "--mem-limit", "8K"]);
    assert!(ended.complaint(1).contains("at least 24 KiB"), "{}", ended.stderr);
    assert!(!place.run(&["list"]).ok().contains("small"));
    for limit in ["1", "4K"] {
        let ended = place.run(&["set", "zram0", &format!("mem_limit={limit}")]);
        assert!(ended.complaint(1).contains("at least 24 KiB"), "{}", ended.stderr);
    }
    assert_eq!(place.number("mem_limit"), 24 << 10);
    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.ended().0.success());
}

#[test]
fn devices_that_might_not_fit_into_the_cgroup_are_refused() {
    let Some(cgroup) = Cgroup::new("room", 256 * MIB) else { return };
    // The place is dropped, and its daemons end, before the cgroup is removed.
    let place = Place::new();
    let up = |args: &[&str]| {
        let mut command = cgroup.command(Path::new(env!("CARGO_BIN_EXE_uzram")));
        command.args(["up", "--size", "1G"]).args(args).env("UZRAM_RUNTIME_DIR", place.dir());
        command
    };
    let refused = finish(up(&["--exec", "true"]));
    let line = refused.complaint(1);
    assert!(line.contains("this process's cgroup") && line.contains("--mem-limit"), "{line}");
    let daemon = Daemon::start(up(&["--mem-limit", "64M"]));
    let add = |limit: &str| place.run(&["add", "more", "--size", "1G", "--mem-limit", limit]);
    let refused = add("192M");
    let line = refused.complaint(1);
    assert!(line.contains("more may take 192 MiB") && line.contains("--mem-limit"), "{line}");
    assert!(!place.run(&["list"]).ok().contains("more"));
    add("32M").ok();
    assert!(place.run(&["list"]).ok().contains("more"));
    place.end(daemon);
}

#[test]
fn swap_that_may_outgrow_the_machine_is_warned_about() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let ram_kib: u64 = meminfo.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    let Some(place) = BlockPlace::if_able() else { return };
    let size = format!("{ram_kib}K");
    let on = |args: &[&str]| place.run(&[&["swap", "on", "--size", &size], args].concat()).ok();
    let facts = on(&[]);
    let warnings: Vec<&str> = facts.lines().filter(|line| line.starts_with("warning ")).collect();
    let about_memory = |line: &&&str| line.contains("swap on zram0 may take") && line.contains("--mem-limit");
    assert_eq!(warnings.iter().filter(about_memory).count(), 1, "{facts}");
    let log = fs::read_to_string(place.dir().join("uzram.log")).unwrap();
    assert!(log.contains("WARN") && log.contains("swap on zram0 may take"), "{log}");
    place.run(&["swap", "off"]).ok();
    let facts = on(&["--mem-limit", "64M"]);
    assert!(!facts.contains("may take"), "{facts}");
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}
