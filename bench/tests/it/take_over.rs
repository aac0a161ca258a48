//! A tiny run of the benchmark of daemons that outlive the process that serves: it has every figure.
//! Its block devices need root.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram_bench::block::{self, Programs};
use uzram_bench::engine::Common;
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::{Source, to_json};
use uzram_bench::take_over::{Amounts, Cause, Part, TakeOverOptions, run};

const MIB: u64 = 1 << 20;

/// Returns the options of a tiny run, unless the program is not there.
fn tiny() -> Option<TakeOverOptions> {
    let bench = Path::new(env!("CARGO_BIN_EXE_uzram-bench"));
    let programs = Programs { uzram: bench.with_file_name("uzram"), bench: bench.to_owned() };
    if !programs.uzram.is_file() {
        println!("skipped: the program uzram is not built: cargo test -p uzram-cli -p uzram-bench builds it");
        return None;
    }
    Some(TakeOverOptions {
        common: Common {
            corpus: Source::Built(Kind::Mixed, 512),
            duration: Duration::from_millis(100),
            repeat: 1,
            ..Common::default()
        },
        programs,
        parts: Part::ALL.into(),
        amounts: Amounts {
            pool_bytes: 4 * MIB,
            large_pool_bytes: 6 * MIB,
            full: true,
            kills: 3,
            upgrades: 2,
        },
        swap: block::Amounts {
            swapped_bytes: 24 * MIB,
            swap_area_bytes: 64 * MIB,
            ..block::Amounts::default()
        },
    })
}

#[test]
fn every_figure_is_there() {
    let Some(options) = tiny() else { return };
    let report = run(&options).unwrap();
    println!("{report}");
    for row in &report.prices {
        assert!(row.survive > 0.0 && row.no_survive > 0.0 && row.speed_ratio > 0.0, "{row:?}");
    }
    if report.outages.is_empty() {
        // Without block devices; the note was printed.
        assert!(report.to_string().contains("not measured"), "{report}");
        return;
    }
    let Amounts { pool_bytes, large_pool_bytes, .. } = options.amounts;
    for pool_bytes in [pool_bytes, large_pool_bytes] {
        for (cause, times) in [(Cause::Nothing, 5), (Cause::Kill, 3), (Cause::Upgrade, 2)] {
            let row = report.outage(pool_bytes, cause).unwrap();
            assert_eq!(row.gaps_ms.len(), times);
            assert!(
                0.0 < row.median_ms && row.median_ms <= row.p99_ms && row.p99_ms <= row.max_ms,
                "{row:?}"
            );
            assert!(row.used_bytes > pool_bytes / 2 && row.used_bytes < 2 * pool_bytes, "{row:?}");
            let own = if cause == Cause::Nothing { 0 } else { times };
            assert_eq!(row.phases.outage_ms.len(), own, "{row:?}");
        }
    }
    assert_eq!(report.memory.len(), 2 * 2);
    for row in &report.memory {
        for process in [row.holder, row.worker, row.standby] {
            assert!(process.private_dirty_bytes > 0 && process.page_table_bytes > 0, "{row:?}");
        }
    }
    assert!(report.holder_bytes(pool_bytes).is_some());
    let text = report.to_string();
    for said in ["kill -9", "upgrade", "holder", "stand-by", "no request failed"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    assert_eq!(json["outages"][1]["cause"], "kill");
}

#[test]
fn a_stop_ends_it() {
    let Some(options) = tiny() else { return };
    let nothing = run(&TakeOverOptions { parts: Vec::new(), ..options.clone() }).unwrap();
    assert!(nothing.prices.is_empty() && nothing.outages.is_empty() && nothing.notes.is_empty());
    let common = Common { stop: Arc::new(AtomicBool::new(true)), ..options.common.clone() };
    assert_eq!(run(&TakeOverOptions { common, ..options }).unwrap_err().to_string(), "interrupted");
}
