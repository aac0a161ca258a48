//! A small run of the benchmark of programs in less memory: all of them print what they print without a limit, and have every
//! figure.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use crate::common::finish;
use uzram_bench::run::{RunOptions, obstacle, run};
use uzram_bench::workload::Amounts;

/// The most memory beyond a limit: what a library and a thread take, too.
const MOST_BEYOND_BYTES: f64 = (16 << 20) as f64;

fn bench() -> PathBuf {
    env!("CARGO_BIN_EXE_uzram-bench").into()
}

/// Builds `uzram` and its library, beside the benchmark.
fn uzram() -> PathBuf {
    let dir = bench().parent().unwrap().to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        // With the feature of `make test`, whose program this replaces.
        .args(["build", "--quiet", "-p", "uzram-run", "-p", "uzram-cli", "--features", "uzram-cli/remote"])
        .arg("--target-dir")
        .arg(dir.parent().unwrap());
    if dir.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    dir.join("uzram")
}

#[test]
fn six_programs_are_right_in_half_of_their_memory() {
    let (uzram, dir) = (uzram(), tempfile::tempdir().unwrap());
    if let Some(obstacle) = obstacle(&uzram) {
        return println!("skipped: {obstacle}");
    }
    let options = RunOptions {
        uzram,
        dir: dir.path().to_owned(),
        repeat: 1,
        amounts: Amounts::small(),
        stop: Arc::default(),
    };
    // What they print is compared: otherwise this is an error.
    let report = run(&options).unwrap();
    for note in &report.notes {
        println!("skipped: {note}");
    }
    let missing = report.notes.iter().filter(|note| note.contains(" is missing")).count();
    assert!(report.programs.len() + missing >= 6, "{report}");
    for row in &report.programs {
        assert!(row.uzram_s > 0.0 && row.limit_bytes < row.peak_bytes, "{report}");
        assert!(row.last_line.contains("limit") || row.last_line.contains("in memory, with "), "{report}");
    }
    assert!(report.beyond_limit_bytes().is_none_or(|bytes| bytes < MOST_BEYOND_BYTES), "{report}");
    assert!(report.start_ms.is_some());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_folder_that_is_not_there_is_said() {
    let mut command = Command::new(bench());
    command.args(["run", "--small", "--dir", "/no/such/folder"]);
    let ended = finish(command);
    assert!(!ended.status.success() && ended.stdout.is_empty(), "{}", ended.stdout);
    assert!(!ended.stderr.is_empty());
}
