//! A short run of the whole comparison, so that it cannot rot: every allocator of the build, every case, the
//! children that measure memory, and the report.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-allocators")).args(arguments).output().unwrap()
}

#[test]
fn every_target_is_measured() {
    let output =
        run(&["--rounds", "2", "--seconds", "0.001", "--objects", "20000", "--pages", "4096", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let targets = report["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 12);
    for target in targets {
        assert!(target["measured"].as_f64().unwrap() > 0.0, "{target}");
    }
    let figures = |column: &str, allocator: &str| {
        let all = report["figures"].as_array().unwrap().clone().into_iter();
        let (column, allocator) = (column.to_owned(), allocator.to_owned());
        let of_it = all.filter(move |figure| figure["column"] == column && figure["row"] == allocator);
        of_it.map(|figure| figure["value"].as_f64().unwrap())
    };
    for allocator in ["uzram", "uzram hardened", "system", "mimalloc"] {
        let of_it = |column: &str| figures(column, allocator).count();
        assert_eq!((of_it("ns/object"), of_it("64 bytes"), of_it("256 bytes")), (6, 1, 1), "{allocator}");
    }
    // What is stored is in memory, and an allocator that takes several times as much has lost some.
    for allocator in ["uzram", "system", "mimalloc"] {
        let of_it = |column: &str| figures(column, allocator).next().unwrap();
        assert!((1.0..2.0).contains(&of_it("all stored")), "{allocator}");
        assert!((1.0..4.0).contains(&of_it("half freed")), "{allocator}");
        // A tenth is in use: less cannot be kept, and much more than all would be a leak.
        assert!(
            ["64 bytes", "256 bytes"].iter().all(|size| (1.0..40.0).contains(&of_it(size))),
            "{allocator}"
        );
    }
}

/// Of pages with 64 objects hardly any is empty when a tenth of the objects stay: no allocator can keep much
/// less than all of them, and one that keeps much more does not reuse or return memory.
#[test]
fn memory_is_what_the_kernel_counts() {
    for allocator in ["uzram", "uzram hardened", "system", "mimalloc"] {
        let output = run(&["--memory-of", allocator, "--size", "64", "--objects", "200000"]);
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let of_kept: f64 = printed.split_whitespace().nth(1).unwrap().parse().unwrap();
        let of_all = of_kept / 10.0;
        // glibc adds 16 bytes to each object, mimalloc some megabytes to all.
        let most = if allocator.starts_with("uzram") { 1.08 } else { 1.5 };
        assert!((0.98..most).contains(&of_all), "{allocator}: {of_all}");
    }
}

#[test]
fn what_cannot_be_measured_is_said() {
    for (arguments, says) in [
        (["--memory-of", "nobody", "--size", "64"].as_slice(), "no allocator 'nobody'"),
        (&["--memory-of", "nobody"], "no allocator 'nobody'"),
        (&["--seconds=-1"], "--seconds"),
        (&["--rounds", "101"], "--rounds"),
    ] {
        let output = run(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
