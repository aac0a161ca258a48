#![allow(clippy::unwrap_used)]

use super::*;
use crate::harness::corpus::{self, Kind as CorpusKind};
use crate::harness::to_json;

fn tiny() -> CodecsOptions {
    CodecsOptions {
        corpora: vec![Source::Built(CorpusKind::Mixed, 96)],
        pages: 64,
        duration: Duration::from_millis(1),
        repeat: 2,
        ..CodecsOptions::default()
    }
}

#[test]
fn every_kind_is_measured_at_several_levels() {
    let algorithms = algorithms().unwrap();
    assert_eq!(algorithms.len(), Kind::ALL.len() + LEVELS.len());
    for kind in Kind::ALL {
        assert!(algorithms.contains(&kind.into()), "{}", kind.name());
    }
    for (at, algorithm) in algorithms.iter().enumerate() {
        assert!(!algorithms[..at].contains(algorithm), "{algorithm}");
    }
}

#[test]
fn a_short_run_has_a_row_for_each() {
    let report = run(&tiny()).unwrap();
    let without = report.notes.iter().filter(|note| note.contains("has no row")).count();
    assert_eq!(report.rows.len(), 2 * algorithms().unwrap().len() - without);
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    for row in json["rows"].as_array().unwrap() {
        assert_eq!(row["corpus"], "mixed");
        assert!([4096, 16384].contains(&row["page_bytes"].as_u64().unwrap()));
        assert!(row["ratio"].as_f64().unwrap() > 1.0, "{row}");
        for key in ["compress_mb_per_s", "decompress_mb_per_s", "compress_per_lz4", "decompress_per_lz4"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{row}");
        }
        let stored = row["stored_bytes"].as_u64().unwrap();
        match row["class_bytes"].as_u64() {
            Some(bytes) => assert!(bytes > stored && row["page_bytes"] == 4096, "{row}"),
            None => assert_eq!(row["page_bytes"], 16384, "{row}"),
        }
    }
    let lz4 = &report.rows[0];
    assert!(lz4.codec == "lz4" && lz4.compress_per_lz4 == 1.0 && lz4.decompress_per_lz4 == Some(1.0));
    for text in [report.to_string(), report.to_markdown()] {
        assert!(text.contains("corpus mixed, 256 KiB") && text.contains("zstd:9"), "{text}");
    }
}

#[test]
fn only_the_wanted_codecs_and_sizes_are_measured() {
    let algorithms = Some(vec![Kind::Lz4.into(), Kind::Zstd.into()]);
    let report = run(&CodecsOptions { algorithms, page_sizes: vec![PAGE_SIZE], ..tiny() }).unwrap();
    assert_eq!(report.rows.len(), 2);
    assert!(report.row("zstd", "mixed").unwrap().ratio > report.row("lz4", "mixed").unwrap().ratio);
    assert!(report.row("lz4hc", "mixed").is_none() && report.row("zstd", "text").is_none());
    assert!(!report.to_string().contains("16 KiB"), "{report}");
}

#[test]
fn the_coders_for_larger_pages_are_the_engines() {
    let pages = corpus::build(CorpusKind::Mixed, 60).unwrap();
    let mut out = vec![0; 2 * PAGE_SIZE];
    for algorithm in algorithms().unwrap() {
        let Some(mut wide) = wide::Coder::new(&algorithm).unwrap() else { continue };
        let mut engine = uzram::codec::Encoder::new(&algorithm).unwrap();
        let mut found = vec![0; PAGE_SIZE];
        for page in pages.pages() {
            let len = wide.encode(page, &mut out).unwrap();
            wide.decode(&out[..len], &mut found).unwrap();
            assert_eq!(&found, page, "{algorithm}");
            assert_eq!(engine.encode(page, &mut out), Some(len), "{algorithm}");
            assert!(wide.decode(&out[..len / 2], &mut found).is_err(), "{algorithm}");
        }
    }
}

#[test]
fn what_does_not_compress_counts_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("noise.bin");
    let mut rng = fastrand::Rng::with_seed(9);
    std::fs::write(&path, (0..20 * PAGE_SIZE).map(|_| rng.u8(..)).collect::<Vec<_>>()).unwrap();
    let report = run(&CodecsOptions { corpora: vec![Source::File(path)], ..tiny() }).unwrap();
    for row in &report.rows {
        assert_eq!(
            (row.corpus.as_str(), row.ratio, row.decompress_mb_per_s),
            ("noise", 1.0, None),
            "{row:?}"
        );
        assert!(row.class_bytes.is_none_or(|bytes| bytes == row.bytes) && row.decompress_per_lz4.is_none());
    }
    assert!(report.to_string().contains(" -"));
}

#[test]
fn an_option_that_cannot_be_is_named() {
    for (options, named) in [
        (CodecsOptions { repeat: 0, ..tiny() }, "--repeat"),
        (CodecsOptions { duration: Duration::ZERO, ..tiny() }, "--seconds"),
        (CodecsOptions { corpora: vec![Source::File("/nonexistent".into())], ..tiny() }, "/nonexistent"),
        (CodecsOptions { corpora: vec![Source::Built(CorpusKind::Text, 3)], ..tiny() }, "--corpus"),
    ] {
        let error = run(&options).err().unwrap().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    let options = tiny();
    options.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(run(&options).err().unwrap().to_string(), "interrupted");
}
