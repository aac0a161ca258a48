//! The pool of a device of the real program: its classes, and what compaction gives back.

use crate::common::*;

/// Fills both halves of the disk with pages that compress to different sizes.
fn fill(place: &Place) {
    for (offset, compress) in [("0", "30"), ("32M", "65")] {
        place.fio(&format!(
            "--rw=write --bs=64k --size=32M --refill_buffers --offset={offset} --buffer_compress_percentage={compress}"
        ));
    }
}

#[test]
fn memory_falls_when_a_pool_of_random_discards_is_compacted() {
    let Some(place) = Place::needing("fio nbdcopy") else { return };
    // The test does not read the log, and compactions log more than a pipe holds.
    let _daemon = place.up_sized("64M", "--log warn --compact-threshold 0");
    fill(&place);
    expect_classes(&place);
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

fn numbers(line: &str) -> Vec<u64> {
    line.words().iter().filter_map(|word| word.parse().ok()).collect()
}

/// Checks that the classes of a full disk are told in the kernel's columns.
fn expect_classes(place: &Place) {
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
