//! `uzram slabinfo` of a daemon whose devices are being used.

use std::collections::BTreeMap;
use std::fs;

use crate::common::clients::{arg, client, missing, random_file, succeed, text};
use crate::common::{Place, bare_command, finish, has_program};
use serde_json::Value;

/// The numbers of a line of /proc/slabinfo, in its order.
struct Columns {
    active_objs: u64,
    num_objs: u64,
    objsize: u64,
    objperslab: u64,
    active_slabs: u64,
    num_slabs: u64,
}

/// Parses the text as version 2.1 of the file; skips the counters between the lines.
fn parse(slabinfo: &str) -> BTreeMap<String, Columns> {
    let mut lines = slabinfo.lines();
    assert_eq!(lines.next(), Some("slabinfo - version: 2.1"));
    assert!(lines.next().unwrap().starts_with("# name            <active_objs> <num_objs> <objsize>"));
    let caches = lines.filter(|line| !line.starts_with('#') && line.contains(" : tunables"));
    let columns = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((words.len(), words[6], words[7]), (16, ":", "tunables"), "{line}");
        assert_eq!((words[11], words[12]), (":", "slabdata"), "{line}");
        let number = |at: usize| words[at].parse().unwrap();
        assert_eq!((number(10), number(15)), (0, 0), "{line}");
        let columns = Columns {
            active_objs: number(1),
            num_objs: number(2),
            objsize: number(3),
            objperslab: number(4),
            active_slabs: number(13),
            num_slabs: number(14),
        };
        (words[0].to_owned(), columns)
    };
    caches.map(columns).collect()
}

/// Parses the counters by cache and name; checks that each is the sum of its CPUs.
fn counters(slabinfo: &str) -> BTreeMap<(String, String), u64> {
    let lines = slabinfo.lines().skip(2).filter(|line| !line.starts_with('#') && !line.contains(" : "));
    let counter = |line: &str| {
        let (name, counts) = line.split_once(' ').unwrap();
        let (cache, counter) = name.rsplit_once('/').unwrap();
        let mut words = counts.split(' ');
        let total: u64 = words.next().unwrap().parse().unwrap();
        let sum = words.map(|word| {
            let count = word.strip_prefix('C').unwrap().split_once('=').unwrap().1.parse::<u64>().unwrap();
            assert!(count > 0, "{line}");
            count
        });
        assert_eq!(sum.sum::<u64>(), total, "{line}");
        ((cache.to_owned(), counter.to_owned()), total)
    };
    lines.map(counter).collect()
}

#[test]
fn each_device_has_its_caches_and_both_formats_agree() {
    if missing(&["nbdcopy"]) {
        return;
    }
    let place = Place::new();
    let _daemon = place.up(&[]);
    let other = place.run(&["add", "zram1", "--size", "8M"]).ok();
    let source = random_file(&place, "source", 4 << 20);
    succeed(&place, "nbdcopy", &[arg(&source), &place.uri()]);
    succeed(&place, "nbdcopy", &[arg(&source), other.trim()]);

    let caches = parse(&place.run(&["slabinfo"]).ok());
    for device in ["zram0", "zram1"] {
        let of_device: Vec<_> = caches.iter().filter(|(name, _)| name.contains(device)).collect();
        // A handle for each of 1024 pages, which do not compress.
        let handles = of_device.iter().map(|(_, cache)| cache.active_objs).max().unwrap();
        assert_eq!(handles, 1024, "{device}");
        for (name, cache) in of_device {
            assert!(cache.active_objs <= cache.num_objs, "{name}");
            assert!(cache.num_objs <= cache.num_slabs * cache.objperslab, "{name}");
            assert!(cache.active_slabs <= cache.num_slabs, "{name}");
            assert!(cache.objsize > 0, "{name}");
        }
    }

    // Nothing runs meanwhile, so the numbers do not change.
    let stats = place.run(&["slabinfo", "--stats"]).ok();
    assert_eq!(parse(&stats).len(), caches.len());
    let counters = counters(&stats);
    let json: Value = serde_json::from_str(&place.run(&["slabinfo", "--json"]).ok()).unwrap();
    let listed = json["caches"].as_array().unwrap();
    assert_eq!(listed.len(), caches.len());
    let mut compared = 0;
    for cache in listed {
        let name = cache["name"].as_str().unwrap();
        assert_eq!(cache["active_objs"], caches[name].active_objs, "{name}");
        assert_eq!(cache["num_objs"], caches[name].num_objs, "{name}");
        assert_eq!(cache["objsize_bytes"], caches[name].objsize, "{name}");
        for (counter, count) in cache["stats"].as_object().unwrap() {
            assert_eq!(count["total"], counters[&(name.to_owned(), counter.clone())], "{name} {counter}");
            compared += 1;
        }
        assert_eq!(cache["corrupted"], counters[&(name.to_owned(), "corrupted".to_owned())], "{name}");
        compared += 1;
    }
    assert_eq!(compared, counters.len());
}

#[test]
fn counters_move_while_a_command_works() {
    if missing(&["nbdcopy", "qemu-io"]) {
        return;
    }
    let place = Place::new();
    let source = random_file(&place, "source", 12 << 20);
    let uzram = env!("CARGO_BIN_EXE_uzram");
    for timing in [false, true] {
        // Freed objects go back to their slabs; there are more of them than the CPUs keep.
        let command = format!(
            "nbdcopy '{}' \"$uri\" && qemu-io -f raw -c 'discard 0 16M' \"$uri\" >/dev/null && \
             '{uzram}' slabinfo --stats",
            arg(&source)
        );
        // The command finds its daemon in any runtime directory.
        let mut up = bare_command(&["up", "--size", "16M", "--log", "warn", "--exec", &command]);
        up.args(timing.then_some("--slab-timing")).arg("--runtime-dir").arg(place.dir());
        let slabinfo = finish(up).ok();
        let counters = counters(&slabinfo);
        let sum = |counter: &str| -> u64 {
            counters.iter().filter(|((_, name), _)| name == counter).map(|(_, count)| count).sum()
        };
        assert!(sum("alloc_pcs") > 0 && sum("alloc_slowpath") > 0 && sum("alloc_slab") > 0, "{slabinfo}");
        assert!(sum("free_slowpath") > 0 && sum("list_lock_acquired") > 0, "{slabinfo}");
        assert_eq!(sum("list_lock_hold_ns") > 0, timing, "{slabinfo}");
    }
}

#[test]
fn slabtop_reads_it() {
    if !has_program("slabtop") || !has_program("unshare") {
        println!("skipped: no slabtop, or no unshare to show it another /proc/slabinfo");
        return;
    }
    let place = Place::new();
    let _daemon = place.up(&[]);
    fs::write(place.root().join("slabinfo"), place.run(&["slabinfo"]).ok()).unwrap();
    // In its own mount namespace.
    let script = "mount --bind slabinfo /proc/slabinfo || exit 9; exec slabtop --once";
    let output = client(&place, "unshare", &["--mount", "sh", "-c", script]).output().unwrap();
    let (shown, said) = (text(&output.stdout), text(&output.stderr));
    if !output.status.success() && !shown.contains("Active") && said.contains("ermi") {
        println!("skipped: this user cannot mount: {}", said.trim());
        return;
    }
    assert!(output.status.success(), "{shown}{said}");
    assert!(shown.contains("zram0"), "{shown}{said}");
}
