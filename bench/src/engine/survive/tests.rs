#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;
use crate::harness::to_json;
use uzram::units::PAGE_SIZE;

fn tiny() -> SurviveOptions {
    SurviveOptions {
        common: Common { duration: Duration::from_millis(10), ..Common::tiny(96, 2) },
        size_bytes: 2 << 20,
        large_size_bytes: 4 << 20,
        full: true,
    }
}

#[test]
fn stores_are_attached_and_compared() {
    let options = tiny();
    let report = run(&options).unwrap();
    assert_eq!(report.attach.len(), 2 * 2 * 2);
    for row in &report.attach {
        assert!(row.attach_ms > 0.0 && (2..=32).contains(&row.rounds_ms.len()), "{row:?}");
        assert_eq!(row.pages * PAGE_SIZE as u64, row.size_bytes);
        assert!(0 < row.compressed_bytes && row.compressed_bytes < row.used_bytes, "{row:?}");
    }
    for size_bytes in [options.size_bytes, options.large_size_bytes] {
        for mapped in [MappedWhen::Attached, MappedWhen::Ahead] {
            assert!(report.attach(size_bytes, WriteOrder::Random, mapped).is_some());
        }
    }
    assert_eq!(report.speed.len(), 2 * 2 * 2);
    for (rw, jobs) in [(Pattern::RandRead, 1), (Pattern::RandRead, 2), (Pattern::RandWrite, 2)] {
        assert!(report.speed_ratio(rw, jobs).unwrap() > 0.0);
    }
    assert_eq!(report.speed_ratio(Pattern::Rw, 1), None);
    let text = report.to_string();
    for said in ["in random order", "4 MiB", "memfd", "private", "at attach", "ahead"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    assert_eq!(json["attach"][0]["written"], "in_order");
    assert!(json["attach"][0]["attach_ms"].is_f64() && json["speed"][1]["ratio"].is_f64(), "{json}");
}

#[test]
fn the_large_store_is_left_out_and_the_reason_said() {
    let corpus = tiny().load_corpus().unwrap();
    let reason = |options: SurviveOptions| reason_to_leave_out(&options, &corpus).unwrap();
    assert_eq!(reason(tiny()), None);
    assert!(reason(SurviveOptions { full: false, ..tiny() }).unwrap().contains("--full"));
    // The largest there is.
    let reason = attach::missing_memory(&tiny().common, &corpus, 16 << 30).unwrap();
    assert!(reason.is_none_or(|reason| reason.contains("is available")));
    let report = run(&SurviveOptions { full: false, ..tiny() }).unwrap();
    assert_eq!(report.attach.len(), 2 * 2);
    assert!(report.to_string().contains("attach of 4 MiB not measured: it takes --full"), "{report}");
}

#[test]
fn only_memory_that_outlives_the_process_is_attached() {
    let private = MeasuredStore::private(&uzram::codec::Algorithm::default(), 9).unwrap();
    assert!(private.attach_again(MappedWhen::Attached).err().unwrap().to_string().contains("private memory"));
    let empty = MeasuredStore::surviving(&uzram::codec::Algorithm::default(), 9).unwrap();
    assert!(
        empty.attach_again(MappedWhen::Ahead).err().unwrap().to_string().contains("9 pages"),
        "none was written"
    );
    assert!(tiny().obstacle().is_none());
}

#[test]
fn an_option_that_cannot_be_is_named() {
    let cases = [
        (SurviveOptions { size_bytes: 0, ..tiny() }, "--size"),
        (SurviveOptions { size_bytes: u64::MAX, ..tiny() }, "--size"),
        (SurviveOptions { common: Common { repeat: 0, ..tiny().common }, ..tiny() }, "--repeat"),
        (
            SurviveOptions { common: Common { duration: Duration::ZERO, ..tiny().common }, ..tiny() },
            "--seconds",
        ),
    ];
    for (options, named) in cases {
        let error = run(&options).unwrap_err().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn a_stop_ends_it() {
    let stop = Arc::new(AtomicBool::new(true));
    let options = SurviveOptions { common: Common { stop, ..tiny().common }, ..tiny() };
    assert_eq!(run(&options).unwrap_err().to_string(), "interrupted");
}
