//! The memory limit of a disk, and the memory that it gives back.

use crate::common::clients::{arg, qemu_io, random_file, succeed};
use crate::common::{Place, wait_until};

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
