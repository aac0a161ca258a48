//! The pool of a device of the real program: its classes, and compaction while the disk is used.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;

/// Fills both halves of the disk with pages that compress to different sizes.
fn fill(place: &Place) {
    for (offset, compress) in [("0", "30"), ("32M", "65")] {
        place.fio(&format!(
            "--rw=write --bs=64k --size=32M --refill_buffers --offset={offset} --buffer_compress_percentage={compress}"
        ));
    }
}

/// Starts a daemon with a full disk of 64 MiB and no automatic compaction.
fn up_and_full(place: &Place) -> Daemon {
    // The test does not read the log, and compactions log more than a pipe holds.
    let daemon = place.up_sized("64M", "--log warn --compact-threshold 0");
    fill(place);
    daemon
}

#[test]
fn memory_falls_when_a_pool_of_random_discards_is_compacted() {
    let Some(place) = Place::needing("fio nbdcopy") else { return };
    let _daemon = up_and_full(&place);
    // Three pages in four.
    place.fio("--rw=randtrim --bs=4k --size=64M --io_size=48M");
    let before = place.copy_out(&place.uri(), "before");
    let held =
        || ["mem_used_bytes", "mem_charged_bytes", "mem_chunk_bytes"].map(|name| place.statistic(name));
    let (compressed, scattered) = (place.statistic("compr_data_bytes"), held());
    assert!(scattered[0] > 2 * compressed, "{scattered:?} for {compressed}");

    place.set("compact=1");
    let compacted = held();
    assert!(compacted[0] < compressed / 10 * 11, "{compacted:?} for {compressed}");
    for (now, before) in compacted.iter().zip(scattered) {
        assert!(*now < before / 10 * 7, "{compacted:?} of {scattered:?}");
    }
    // The freed pages are in the kernel's column of mm_stat.
    let freed = (scattered[0] - compacted[0]) / 4096;
    let columns = numbers(&place.get("mm_stat"));
    assert_eq!((columns[2], columns[6]), (compacted[0], freed), "{columns:?}");
    place.assert_holds(&before);
}

#[test]
fn fio_verifies_while_compaction_never_stops() {
    let Some(place) = Place::needing("fio") else { return };
    let _daemon = up_and_full(&place);
    // The pool also compacts by itself.
    place.set("compact_threshold=1 compact_rate=256M");
    let ends = AtomicBool::new(false);
    let compactions = thread::scope(|scope| {
        let looped = scope.spawn(|| compact_until(&place, &ends));
        // One job verifies its writes, while the other scatters the pool.
        let options = format!(
            "--rw=randwrite --bsrange=512-16k --size=24M --iodepth=8 --verify=crc32c --do_verify=1 --loops=2 \
             --buffer_compress_percentage=50 --exitall --name=scatter --ioengine=nbd --uri={} --thread \
             --rw=randtrimwrite --bs=4k --offset=32M --size=32M --time_based --runtime=6 \
             --buffer_compress_percentage=80 --refill_buffers",
            place.uri()
        );
        let verified = std::panic::catch_unwind(|| place.fio(&options));
        ends.store(true, Ordering::Relaxed);
        let compactions = looped.join().unwrap();
        verified.unwrap();
        compactions
    });
    assert!(compactions > 10 && place.statistic("pages_compacted") > 100, "{compactions}");
    place.assert_zero("failed_reads failed_writes corrupted_objects");
}

/// Compacts repeatedly, with a minimum number of times; returns how often.
fn compact_until(place: &Place, ends: &AtomicBool) -> usize {
    let request = b"PUT /v1/devices/zram0/attributes/compact HTTP/1.1\r\nHost: localhost\r\n\
        Content-Length: 14\r\nConnection: close\r\n\r\n{\"value\": \"1\"}";
    let mut compactions = 0;
    while !ends.load(Ordering::Relaxed) || compactions <= 10 {
        let answer = ask(&place.socket("control.sock"), request);
        assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
        compactions += 1;
    }
    compactions
}

/// Returns the numbers of a line.
fn numbers(line: &str) -> Vec<u64> {
    line.words().iter().filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn classes_are_told_in_the_kernels_columns() {
    let Some(place) = Place::needing("fio") else { return };
    let _daemon = place.up_sized("64M", "");
    fill(&place);
    let text = place.get("classes");
    let mut lines = text.lines();
    let columns = lines.next().unwrap().words();
    assert_eq!(columns[..3], ["class", "size", "10%"]);
    let names = ["99%", "100%", "obj_allocated", "obj_used", "pages_used", "pages_per_zspage", "freeable"];
    assert_eq!(columns[11..], names);
    let rows: Vec<Vec<u64>> = lines.take_while(|line| !line.contains("Total")).map(numbers).collect();
    let sum = |column: usize| rows.iter().map(|row| row[column]).sum::<u64>();
    for row in &rows {
        assert!(row.len() == columns.len() && row[13] >= row[14], "{row:?}");
        assert!((1..=16).contains(&row[16]) && row[1] <= 4096, "{row:?}");
    }
    // One object for each page, and the pages add up to the pool's.
    assert_eq!((sum(14), sum(15) * 4096), (64 << 8, place.statistic("mem_used_bytes")), "{text}");
    let total = numbers(text.lines().last().unwrap());
    assert_eq!(total[11..14], [sum(13), sum(14), sum(15)], "{text}");
    let json = place.json("stat zram0 classes");
    let classes = json["value"].as_array().unwrap();
    let in_use: Vec<_> = rows.iter().filter(|row| row[13] > 0).collect();
    assert_eq!(classes.len(), in_use.len());
    let used: u64 = classes.iter().map(|class| class["pages_used"].as_u64().unwrap()).sum();
    assert_eq!((used, &classes[0]["size_bytes"]), (sum(15), &in_use[0][1].into()), "{text}");
}
