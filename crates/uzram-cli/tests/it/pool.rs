//! The pool of a device of the real program: its classes, and compaction while the disk is used.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::clients::{arg, fio, missing, same, succeed};
use crate::common::{Daemon, Place, ask};

/// Starts a daemon with a disk of 64 MiB and no automatic compaction.
fn up(place: &Place) -> Daemon {
    // The test does not read the log, and compactions log more than a pipe holds.
    place.up_sized("64M", &["--log", "warn", "--compact-threshold", "0"])
}

/// Fills both halves of the disk with pages that compress to different sizes.
fn fill(place: &Place, uri: &str) {
    for (offset, compress) in [("--offset=0", "30"), ("--offset=32M", "65")] {
        let compress = format!("--buffer_compress_percentage={compress}");
        let args = ["--rw=write", "--bs=64k", "--size=32M", "--refill_buffers", offset, &compress];
        succeed(place, "fio", &fio(uri, &args));
    }
}

/// [`up`] with a full disk, and fio's argument for that.
fn up_and_full() -> (Place, Daemon, String) {
    let place = Place::new();
    let daemon = up(&place);
    let uri = format!("--uri={}", place.uri());
    fill(&place, &uri);
    (place, daemon, uri)
}

#[test]
fn memory_falls_when_a_pool_of_random_discards_is_compacted() {
    if missing(&["fio", "nbdcopy"]) {
        return;
    }
    let (place, _daemon, uri) = up_and_full();
    // Three pages in four.
    succeed(&place, "fio", &fio(&uri, &["--rw=randtrim", "--bs=4k", "--size=64M", "--io_size=48M"]));
    let copies = ["before", "after"].map(|name| place.root().join(name));
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copies[0])]);
    let held =
        || ["mem_used_bytes", "mem_charged_bytes", "mem_chunk_bytes"].map(|name| place.statistic(name));
    let (compressed, scattered) = (place.statistic("compr_data_bytes"), held());
    assert!(scattered[0] > 2 * compressed, "{scattered:?} for {compressed}");

    assert_eq!(place.run(&["set", "zram0", "compact=1"]).ok(), "");
    let compacted = held();
    assert!(compacted[0] < compressed / 10 * 11, "{compacted:?} for {compressed}");
    for (now, before) in compacted.iter().zip(scattered) {
        assert!(*now < before / 10 * 7, "{compacted:?} of {scattered:?}");
    }
    // The freed pages are in the kernel's column of mm_stat.
    let freed = (scattered[0] - compacted[0]) / 4096;
    let mm_stat = place.run(&["stat", "zram0", "mm_stat"]).ok();
    let columns: Vec<u64> = mm_stat.split_whitespace().map(|column| column.parse().unwrap()).collect();
    assert_eq!((columns[2], columns[6]), (compacted[0], freed), "{mm_stat}");
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copies[1])]);
    assert!(same(&copies[0], &copies[1]), "the contents changed");
}

#[test]
fn fio_verifies_while_compaction_never_stops() {
    if missing(&["fio"]) {
        return;
    }
    let (place, _daemon, uri) = up_and_full();
    // The pool also compacts by itself.
    place.run(&["set", "zram0", "compact_threshold=1", "compact_rate=256M"]).ok();
    let ends = AtomicBool::new(false);
    let compactions = std::thread::scope(|scope| {
        let looped = scope.spawn(|| compact_until(&place, &ends));
        // One job verifies its writes, while the other scatters the pool.
        let mut args = fio(&uri, &["--rw=randwrite", "--bsrange=512-16k", "--size=24M", "--iodepth=8"]);
        args.extend(["--verify=crc32c", "--do_verify=1", "--loops=2", "--buffer_compress_percentage=50"]);
        args.extend([
            "--exitall",
            "--name=scatter",
            "--ioengine=nbd",
            &uri,
            "--thread",
            "--rw=randtrimwrite",
        ]);
        args.extend(["--bs=4k", "--offset=32M", "--size=32M", "--time_based", "--runtime=6"]);
        args.extend(["--buffer_compress_percentage=80", "--refill_buffers"]);
        let verified = std::panic::catch_unwind(|| succeed(&place, "fio", &args));
        ends.store(true, Ordering::Relaxed);
        let compactions = looped.join().unwrap();
        verified.unwrap();
        compactions
    });
    assert!(compactions > 10 && place.statistic("pages_compacted") > 100, "{compactions}");
    for failures in ["failed_reads", "failed_writes", "corrupted_objects"] {
        assert_eq!(place.statistic(failures), 0, "{failures}");
    }
}

/// Compacts repeatedly, with a minimum number of times; returns how often.
fn compact_until(place: &Place, ends: &AtomicBool) -> usize {
    let body = r#"{"value": "1"}"#;
    let request = format!(
        "PUT /v1/devices/zram0/attributes/compact HTTP/1.1\r\nHost: localhost\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut compactions = 0;
    while !ends.load(Ordering::Relaxed) || compactions <= 10 {
        let answer = ask(&place.socket("control.sock"), request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
        compactions += 1;
    }
    compactions
}

#[test]
fn classes_are_told_in_the_kernels_columns() {
    let Some(place) = Place::needing(&["fio"]) else { return };
    let _daemon = place.up_sized("64M", &[]);
    fill(&place, &format!("--uri={}", place.uri()));
    let text = place.run(&["stat", "zram0", "classes"]).ok();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(columns[..3], ["class", "size", "10%"]);
    let names = ["99%", "100%", "obj_allocated", "obj_used", "pages_used", "pages_per_zspage", "freeable"];
    assert_eq!(columns[11..], names);
    let rows: Vec<Vec<u64>> = lines
        .by_ref()
        .take_while(|line| !line.contains("Total"))
        .map(|line| line.split_whitespace().map(|number| number.parse().unwrap()).collect())
        .collect();
    let sum = |column: usize| rows.iter().map(|row| row[column]).sum::<u64>();
    for row in &rows {
        assert!(row.len() == columns.len() && row[13] >= row[14], "{row:?}");
        assert!((1..=16).contains(&row[16]) && row[1] <= 4096, "{row:?}");
    }
    // One object for each page, and the pages add up to the pool's.
    assert_eq!((sum(14), sum(15) * 4096), (64 << 8, place.statistic("mem_used_bytes")), "{text}");
    let total: Vec<u64> =
        text.lines().last().unwrap().split_whitespace().skip(1).map(|n| n.parse().unwrap()).collect();
    assert_eq!(total[11..14], [sum(13), sum(14), sum(15)], "{text}");
    let json = place.json(&["stat", "zram0", "classes"]);
    let classes = json["value"].as_array().unwrap();
    let in_use: Vec<_> = rows.iter().filter(|row| row[13] > 0).collect();
    assert_eq!(classes.len(), in_use.len());
    let used: u64 = classes.iter().map(|class| class["pages_used"].as_u64().unwrap()).sum();
    assert_eq!((used, &classes[0]["size_bytes"]), (sum(15), &in_use[0][1].into()), "{text}");
}
