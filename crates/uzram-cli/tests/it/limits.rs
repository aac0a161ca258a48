//! The memory limit of a disk, and the memory that it gives back.

use std::fs;
use std::path::Path;

use crate::common::block::{BlockPlace, Cgroup};
use crate::common::clients::{arg, qemu_io, random_file, succeed};
use crate::common::{Daemon, Place, finish, wait_until};

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
    finish(up(&["--exec", "true"])).says(1, "this process's cgroup").says(1, "--mem-limit");
    let daemon = Daemon::start(up(&["--mem-limit", "64M"]));
    let add = |limit: &str| place.run(&["add", "more", "--size", "1G", "--mem-limit", limit]);
    add("192M").says(1, "more may take 192 MiB").says(1, "--mem-limit");
    assert!(!place.run(&["list"]).ok().contains("more"));
    add("32M").ok();
    place.run(&["list"]).shows(&["more"]);
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
