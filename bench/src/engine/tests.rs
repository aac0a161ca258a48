#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering;

use super::*;
use crate::harness::to_json;
use uzram::codec;
use uzram::units::PAGE_SIZE;

fn common() -> Common {
    Common {
        corpus: Source::Built(Kind::Text, 24),
        duration: Duration::from_millis(2),
        repeat: 2,
        ..Common::default()
    }
}

/// A run of a few ms.
fn tiny() -> BenchOptions {
    with(common())
}

fn with(common: Common) -> BenchOptions {
    BenchOptions { common, patterns: vec![Pattern::RandRead], jobs: vec![1], ..BenchOptions::default() }
}

#[test]
fn slices_take_as_long_as_the_rounds_did() {
    let sliced = |duration_ms, repeat| {
        let duration = Duration::from_millis(duration_ms);
        let options = Common { duration, repeat, ..Common::default() }.in_slices();
        (options.duration.as_millis(), options.repeat)
    };
    assert_eq!(sliced(1000, 5), (20, 250));
    assert_eq!(sliced(500, 3), (20, 75));
    assert_eq!(sliced(20, 3), (20, 3));
    assert_eq!(sliced(2, 3), (2, 3), "shorter ones stay");
    assert_eq!(sliced(60_000, 5), (20, MAX_REPEAT), "no more rounds than there may be");
}

#[test]
fn every_pattern_runs_beside_the_codec() {
    let options = BenchOptions {
        patterns: Pattern::ALL.to_vec(),
        jobs: vec![1, 2],
        against: vec![Against::Codec],
        size_bytes: Some(64 * PAGE_SIZE as u64),
        ..tiny()
    };
    let report = run(options).unwrap();
    assert_eq!(report.rows.len(), 6 * 2 * 2);
    for row in &report.rows {
        assert!(row.mb_per_s > 0.0 && row.p50_us <= row.p99_us && row.p99_us <= row.p999_us, "{row:?}");
        assert_eq!(row.ratio.is_some(), row.target == "codec");
        assert_eq!(row.rounds_mb_per_s.len(), 2);
    }
    assert!(report.row(Pattern::Rw, 2, "codec").is_some());
    let text = report.to_string();
    assert!(text.contains("randwrite") && text.contains("memory"), "{text}");
}

#[test]
fn a_device_without_an_lru_is_one_but_for_its_nodes() {
    let options = BenchOptions { against: vec![Against::NoLru, Against::Codec], ..tiny() };
    let report = run(options).unwrap();
    let row = report.row(Pattern::RandRead, 1, "no-lru").unwrap();
    assert!(row.mb_per_s > 0.0 && row.ratio.is_some(), "{row:?}");
    assert!(report.notes.iter().any(|note| note.contains("lru_enable=0")));

    const PAGES: u64 = 1 << 20;
    let (algorithm, streams) = (Algorithm::default(), StreamDesign::PerCpu);
    let fixed_bytes = |device: UzramDevice| device.stats().mem_fixed_bytes;
    let with = fixed_bytes(UzramDevice::new(&algorithm, streams, pages_to_bytes(PAGES)).unwrap());
    let without = fixed_bytes(UzramDevice::without_lru(&algorithm, streams, pages_to_bytes(PAGES)).unwrap());
    let nodes_bytes = uzram::lru::NODE_BYTES as u64 * PAGES;
    assert!((nodes_bytes..nodes_bytes + (1 << 16)).contains(&(with - without)), "{}", with - without);
}

#[test]
fn another_algorithm_is_compared_with_lz4() {
    let common = Common { algorithm: codec::Kind::Zstd.into(), ..common() };
    let report = run(BenchOptions { against: vec![Against::Lz4], ..with(common) }).unwrap();
    let row = report.row(Pattern::RandRead, 1, "lz4").unwrap();
    assert!(row.mb_per_s > 0.0 && row.ratio.is_some(), "{row:?}");
    assert!(report.notes.iter().any(|note| note.contains("uzram device with lz4")));
    assert_eq!("lz4".parse::<Against>().unwrap(), Against::Lz4);
}

#[test]
fn the_json_has_rows_and_memory() {
    let json: serde_json::Value = serde_json::from_str(&to_json(&run(tiny()).unwrap())).unwrap();
    let row = &json["rows"][0];
    assert_eq!((&row["rw"], &row["jobs"], &row["target"]), (&"randread".into(), &1.into(), &"uzram".into()));
    for key in ["mb_per_s", "p50_us", "p99_us", "p999_us"] {
        assert!(row[key].is_f64(), "{key}");
    }
    for key in ["stored_bytes", "compressed_bytes", "used_bytes", "fixed_bytes"] {
        assert!(json["memory"][key].is_u64(), "{key}");
    }
}

#[test]
fn the_kernels_device_is_removed_again() {
    let options = BenchOptions {
        against: vec![Against::Kernel],
        patterns: vec![Pattern::RandRead, Pattern::RandWrite],
        ..tiny()
    };
    let report = run(options).unwrap();
    match report.row(Pattern::RandWrite, 1, "kernel") {
        Some(row) => assert!(row.mb_per_s > 0.0 && report.memory.kernel.is_some()),
        None => {
            let why = report.notes.iter().find(|note| note.starts_with("kernel zram left out")).unwrap();
            println!("skipped: {why}");
        }
    }
}

#[test]
fn an_algorithm_the_kernel_lacks_is_said_and_the_run_goes_on() {
    let dictionary = codec::Dictionary::new("/nonexistent/dictionary", vec![7; 64]).unwrap();
    let algorithm = Algorithm::new(codec::Kind::Zstd, None, Some(dictionary)).unwrap();
    let device = kernel::KernelDevice::add(&algorithm, 1 << 20);
    let error = device.err().unwrap();
    assert!(!error.to_string().is_empty());
}

#[test]
fn without_patterns_only_memory_is_measured() {
    let report = run(BenchOptions { patterns: Vec::new(), jobs: Vec::new(), ..tiny() }).unwrap();
    assert!(report.rows.is_empty() && report.size_bytes == 24 * PAGE_SIZE as u64);
}

#[test]
fn an_option_that_cannot_be_is_named() {
    let cases: [(BenchOptions, &str); 8] = [
        (BenchOptions { jobs: vec![0], ..tiny() }, "--jobs"),
        (BenchOptions { jobs: vec![100_000], ..tiny() }, "--jobs"),
        (BenchOptions { jobs: Vec::new(), ..tiny() }, "--jobs"),
        (with(Common { repeat: 0, ..common() }), "--repeat"),
        (with(Common { duration: Duration::ZERO, ..common() }), "--seconds"),
        (BenchOptions { size_bytes: Some(0), ..tiny() }, "--size"),
        (BenchOptions { size_bytes: Some(u64::MAX), ..tiny() }, "--size"),
        (with(Common { corpus: Source::File("/nonexistent".into()), ..common() }), "/nonexistent"),
    ];
    for (options, named) in cases {
        let error = run(options).err().unwrap().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    assert!("disk".parse::<Against>().unwrap_err().to_string().contains("--against"));
}

#[test]
fn the_stop_flag_ends_a_run() {
    let options = with(Common { duration: Duration::from_secs(600), ..common() });
    let stop = Arc::clone(&options.common.stop);
    let run = std::thread::spawn(move || run(options));
    std::thread::sleep(Duration::from_millis(50));
    stop.store(true, Ordering::Relaxed);
    assert_eq!(run.join().unwrap().err().unwrap().to_string(), "interrupted");
}

#[test]
fn same_filled_pages_are_left_out_beside_the_codec() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    let mut contents = vec![0u8; 2 * PAGE_SIZE];
    contents[..8].copy_from_slice(b"contents");
    std::fs::write(&path, contents).unwrap();
    for (against, wanted) in [(Vec::new(), 2), (vec![Against::Codec], 1)] {
        let report =
            run(BenchOptions { against, ..with(Common { corpus: Source::File(path.clone()), ..common() }) })
                .unwrap();
        assert_eq!(report.corpus_pages, wanted);
    }
}

#[test]
fn the_bare_loop_copies_what_does_not_compress() {
    let mut rng = fastrand::Rng::with_seed(11);
    let noise: Vec<u8> = (0..PAGE_SIZE).map(|_| rng.u8(..)).collect();
    let contents = [noise, vec![7; PAGE_SIZE]].concat();
    let corpus = Corpus::from_bytes(&contents).unwrap();
    let codec = codec_loop::CodecLoop::new(Algorithm::default(), 3625, &corpus, 5).unwrap();
    verify(&codec, &corpus, 5).unwrap();
    let mut worker = codec.worker().unwrap();
    assert!(worker.write(0, corpus.page(1)).is_ok());
    assert_eq!(worker.read(4).unwrap(), corpus.page(0));
}
