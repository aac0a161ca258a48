//! Recompression of pages on a device of the real program.

use crate::common::clients::{arg, fio, same, succeed};
use crate::common::{Place, wait_until};
use uzram::random::Random;

/// Creates a file that lz4 compresses and zstd compresses better: numbers in decimal.
fn text_file(place: &Place, bytes: usize) -> std::path::PathBuf {
    let path = place.root().join("text");
    let mut text = String::with_capacity(bytes + 20);
    let mut random = Random::new(1);
    while text.len() < bytes {
        text += &format!("{} ", random.below(10_000));
    }
    std::fs::write(&path, &text.as_bytes()[..bytes]).unwrap();
    path
}

#[test]
fn a_disk_takes_less_memory_after_it() {
    let Some(place) = Place::needing(&["nbdcopy"]) else { return };
    let _daemon = place.up_sized("4M", &["--recompress", "zstd:3"]);
    let algorithms = place.run(&["stat", "zram0", "recomp_algorithm"]).ok();
    assert_eq!(algorithms.trim(), "#1: lz4 lz4hc [zstd:3] deflate memory");
    let text = text_file(&place, 4 << 20);
    succeed(&place, "nbdcopy", &[arg(&text), &place.uri()]);
    let before = ["compr_data_bytes", "mem_used_bytes"].map(|name| place.statistic(name));
    // Nothing is idle yet.
    assert_eq!(place.run(&["set", "zram0", "idle=3600", "recompress=type=idle"]).ok(), "");
    assert_eq!(place.statistic("pages_recompressed"), 0);
    assert_eq!(place.run(&["set", "zram0", "idle=all", "recompress=type=idle"]).ok(), "");
    assert_eq!(place.statistic("pages_recompressed"), 1024);
    let after = ["compr_data_bytes", "mem_used_bytes"].map(|name| place.statistic(name));
    for (after, before) in after.into_iter().zip(before) {
        assert!(after * 100 < before * 90, "{after} of {before}");
    }
    let states = place.run(&["stat", "zram0", "block_state"]).ok();
    assert!(states.lines().count() == 1024 && states.lines().all(|line| line.ends_with("....r.")));
    let copy = place.root().join("copy");
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&text, &copy), "the contents changed");
    let refusal = place.run(&["set", "zram0", "recompress=type=warm"]);
    assert!(refusal.complaint(1).contains("write idle, huge or huge_idle"));
}

#[test]
fn fio_verifies_meanwhile() {
    let Some(place) = Place::needing(&["fio"]) else { return };
    let _daemon = place.up_sized("32M", &["--log", "warn", "--recompress", "deflate:1"]);
    let uri = format!("--uri={}", place.uri());
    std::thread::scope(|scope| {
        let verified = scope.spawn(|| {
            let mut args = fio(&uri, &["--rw=randwrite", "--bsrange=512-16k", "--size=24M", "--iodepth=8"]);
            args.extend(["--verify=crc32c", "--do_verify=1", "--loops=2", "--buffer_compress_percentage=40"]);
            succeed(&place, "fio", &args);
        });
        wait_until("verified", || {
            place.run(&["set", "zram0", "recompress="]).ok();
            verified.is_finished()
        });
        verified.join().unwrap();
    });
    assert!(place.statistic("pages_recompressed") > 100);
    for failures in ["failed_reads", "failed_writes", "corrupted_objects"] {
        assert_eq!(place.statistic(failures), 0, "{failures}");
    }
}
