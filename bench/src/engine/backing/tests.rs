#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::*;
use crate::harness::process::is_missing;

fn tiny() -> BackingOptions {
    BackingOptions {
        common: Common::tiny(300, 1),
        dir: std::env::temp_dir(),
        written_size_bytes: 4 << 20,
        overwritten_file_bytes: 2 << 20,
        limit_bytes: 2 << 20,
        reclaimed_size_bytes: 4 << 20,
    }
}

#[test]
fn all_of_it_is_measured_and_the_files_go() {
    let dir = tempfile::tempdir().unwrap();
    let report = run(&BackingOptions { dir: dir.path().to_owned(), ..tiny() }).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    let Written { size_bytes, compressed_bytes, written_bytes, extent_bytes, .. } = report.written;
    assert!(compressed_bytes > 0 && compressed_bytes < size_bytes, "{:?}", report.written);
    assert!(compressed_bytes < written_bytes && written_bytes <= extent_bytes, "{:?}", report.written);
    assert!(report.written.bytes_ratio().unwrap() > 1.0 && report.written.mb_per_s > 0.0);
    assert!((0.5..=1.0).contains(&report.written.reads_ratio().unwrap()), "{:?}", report.written);
    if is_missing("fio") {
        println!("skipped: {}", report.notes[0]);
    } else {
        assert!(report.written.speed_ratio.unwrap() > 0.0 && report.notes.is_empty());
    }

    let [.., less, packed, blocks] = &report.overwrites[..] else { panic!("{:?}", report.overwrites) };
    assert_eq!(report.fullest().unwrap().pages, packed.pages);
    assert!((75.0..85.0).contains(&packed.live_percent) && packed.moved_bytes > 0, "{packed:?}");
    assert!(
        less.live_percent < packed.live_percent - 5.0 && less.moved_bytes < packed.moved_bytes,
        "{less:?}"
    );
    assert!(packed.written_bytes > packed.compressed_bytes + packed.moved_bytes, "{packed:?}");
    assert!((79.0..81.0).contains(&blocks.live_percent) && blocks.moved_bytes == 0, "{blocks:?}");
    assert_eq!((blocks.written_bytes % 4096, blocks.pages), (0, packed.pages));

    let zipf = &report.zipf;
    assert_eq!(zipf.size_bytes, 4 * zipf.limit_bytes);
    assert!((0.1..99.0).contains(&zipf.miss_percent), "{zipf:?}");
    assert!((1..zipf.size_bytes).contains(&zipf.compressed_bytes), "{zipf:?}");
    assert!(zipf.memory_per_s > 0.0 && zipf.backing_per_s > 0.0, "{zipf:?}");
    assert!(zipf.speed_ratio > 0.0 && zipf.speed_ratio.is_finite(), "{zipf:?}");

    assert_eq!(report.reclaim.iter().map(|row| row.order).collect::<Vec<_>>(), ["pages", "zspages"]);
    for row in &report.reclaim {
        assert!(row.freed_mb_per_s > 0.0 && row.refault_percent > 0.0, "{row:?}");
    }
    let text = report.to_string();
    assert!(text.contains("written/compressed") && text.contains("reclaim by"), "{text}");
}

#[test]
fn a_stop_ends_it_and_the_files_go() {
    let dir = tempfile::tempdir().unwrap();
    let count = || fs::read_dir(dir.path()).unwrap().count();
    let stop = Arc::new(AtomicBool::new(false));
    let common = Common { stop: Arc::clone(&stop), repeat: 1000, ..tiny().common };
    let options = BackingOptions { common, dir: dir.path().to_owned(), ..tiny() };
    thread::scope(|scope| {
        let running = scope.spawn(|| run(&options));
        while count() == 0 && !running.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(running.join().unwrap().unwrap_err().to_string(), "interrupted");
    });
    assert_eq!(count(), 0);
}

#[test]
fn what_keeps_files_from_being_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let options = BackingOptions { dir: dir.path().to_owned(), ..tiny() };
    assert!(options.obstacle().unwrap().is_none());
    let too_large = BackingOptions { written_size_bytes: 1 << 60, ..options.clone() };
    let obstacle = too_large.obstacle().unwrap().unwrap();
    assert!(obstacle.to_string().contains("room"), "{obstacle}");
    // The layout of blocks takes more room than the packed one.
    let corpus = options.load_corpus().unwrap();
    let scratch = Scratch::new(dir.path(), &corpus, &options.common.algorithm).unwrap();
    let files_bytes = overwrites::files_bytes(&options, &scratch).unwrap();
    let measured = overwrites::measure(&options, &scratch).unwrap();
    let blocks = measured.last().unwrap();
    assert!(files_bytes >= options.overwritten_file_bytes + blocks.file_bytes, "{files_bytes} {blocks:?}");
    drop(scratch);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let missing = BackingOptions { dir: "/nonexistent".into(), ..tiny() };
    for error in [missing.obstacle().unwrap().unwrap(), run(&missing).unwrap_err()] {
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
