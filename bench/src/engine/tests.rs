use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::codec_loop::CodecLoop;
use super::device::{Against, Bench, run};
use super::*;
use crate::harness::Source;
use crate::harness::corpus::Corpus;
use crate::harness::corpus::Kind;
use crate::harness::{Options, Report};
use uzram::codec::{self, Algorithm};
use uzram::units::PAGE_SIZE;

fn tiny() -> Options {
    let (corpus, duration) = (Source::Built(Kind::Text, 24), Duration::from_millis(2));
    Options { corpus, duration, repeat: Some(2), ..Options::default() }
}

fn bench<'a>(options: &'a Options, patterns: &'a [Pattern], jobs: &'a [usize]) -> Bench<'a> {
    let comparison = Comparison { options, table: "speed", patterns, jobs };
    Bench { comparison, size_bytes: None, against: &[], memory: true }
}

fn reads(options: &Options) -> Bench<'_> {
    bench(options, &[Pattern::RandRead], &[1])
}

fn against(options: &Options, against: &[Against]) -> Report {
    run(&Bench { against, ..reads(options) }).unwrap()
}

#[test]
fn every_pattern_runs_beside_the_codec() {
    let (options, against) = (tiny(), &[Against::Codec]);
    let size_bytes = Some(64 * PAGE_SIZE as u64);
    let report = run(&Bench { against, size_bytes, ..bench(&options, &Pattern::ALL, &[1, 2]) }).unwrap();
    assert_eq!(report.column("speed", "ratio").count(), 6 * 2);
    for figure in report.figures.iter().filter(|figure| figure.column == "MB/s") {
        assert_eq!(figure.rounds.len(), 2);
        let [p50, p99] = ["p50 µs", "p99 µs"].map(|column| report.get("speed", &figure.row, column).unwrap());
        assert!(figure.value > 0.0 && p50 <= p99, "{figure:?}");
    }
    assert!(report.get("speed", "rw, 2 jobs, codec", "ratio").unwrap() > 0.0);
    let memory = "memory of a filled device";
    assert!(report.get(memory, "of another size, uzram", "used / compressed").unwrap() > 1.0);
}

#[test]
fn devices_are_compared() {
    let report = against(&tiny(), &[Against::NoLru, Against::Codec]);
    assert!(report.get("speed", "randread, 1 job, no-lru", "ratio").unwrap() > 0.0);
    assert!(report.notes.iter().any(|note| note.contains("lru_enable=0")));
    let options = Options { algorithm: codec::Kind::Zstd.into(), ..tiny() };
    let report = against(&options, &[Against::Lz4]);
    assert!(report.get("speed", "randread, 1 job, lz4", "ratio").unwrap() > 0.0);
}

#[test]
fn the_kernels_device_is_removed_again() {
    let report = against(&tiny(), &[Against::Kernel]);
    match report.get("speed", "randread, 1 job, kernel", "MB/s") {
        Some(speed) => assert!(speed > 0.0),
        None => {
            let why = report.notes.iter().find(|note| note.starts_with("kernel zram left out")).unwrap();
            println!("skipped: {why}");
        }
    }
    let dictionary = codec::Dictionary::new("/nonexistent/dictionary", vec![7; 64]).unwrap();
    let algorithm = Algorithm::new(codec::Kind::Zstd, None, Some(dictionary)).unwrap();
    assert!(kernel_zram::KernelDevice::add(&algorithm, 1 << 20).is_err());
}

#[test]
fn the_stop_flag_ends_a_run() {
    let options = Options { duration: Duration::from_secs(600), ..tiny() };
    let stop = Arc::clone(&options.stop);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| run(&reads(&options)));
        std::thread::sleep(Duration::from_millis(50));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().err().unwrap().to_string(), "interrupted");
    });
}

#[test]
fn same_filled_pages_are_left_out_beside_the_codec() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    let mut contents = vec![0u8; 2 * PAGE_SIZE];
    contents[..8].copy_from_slice(b"contents");
    std::fs::write(&path, contents).unwrap();
    let options = Options { corpus: Source::File(path), ..tiny() };
    for (targets, wanted) in [(&[][..], "corpus corpus, 8 KiB"), (&[Against::Codec], "corpus corpus, 4 KiB")]
    {
        let report = against(&options, targets);
        assert!(report.notes.iter().any(|note| note.ends_with(wanted)), "{report}");
    }
}

#[test]
fn the_bare_loop_copies_what_does_not_compress() {
    let mut rng = fastrand::Rng::with_seed(11);
    let noise: Vec<u8> = (0..PAGE_SIZE).map(|_| rng.u8(..)).collect();
    let contents = [noise, vec![7; PAGE_SIZE]].concat();
    let corpus = Corpus::from_bytes(&contents).unwrap();
    let codec = CodecLoop::new(Algorithm::default(), &corpus).unwrap();
    verify(&codec, &corpus, 5).unwrap();
    let mut worker = codec.worker().unwrap();
    assert!(worker.write(0, corpus.page(1)).is_ok());
    assert_eq!(worker.read(4).unwrap(), corpus.page(0));
}
