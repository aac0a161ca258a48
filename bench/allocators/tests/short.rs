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
    for allocator in ["uzram", "uzram hardened", "uzram delayed", "uzram eager", "system", "mimalloc"] {
        let of_it = |rows: &str| {
            report[rows].as_array().unwrap().iter().filter(|row| row["allocator"] == allocator).count()
        };
        assert_eq!((of_it("times"), of_it("memory")), (6, 2), "{allocator}");
    }
    // What is stored is in memory, and an allocator that takes several times as much has lost some.
    let blobs = report["blobs"].as_array().unwrap();
    for row in blobs {
        let [all, half] = [0, 1].map(|state| row["resident_per_stored"][state].as_f64().unwrap());
        assert!((1.0..2.0).contains(&all) && (1.0..4.0).contains(&half), "{row}");
    }
    let of_blobs: Vec<_> = blobs.iter().map(|row| row["allocator"].as_str().unwrap()).collect();
    assert!(["uzram", "system", "mimalloc"].iter().all(|name| of_blobs.contains(name)), "{of_blobs:?}");
    // A tenth is in use: less cannot be kept, and much more than all would be a leak.
    for row in report["memory"].as_array().unwrap() {
        let kept = row["resident_per_live"].as_f64().unwrap();
        assert!((1.0..40.0).contains(&kept), "{row}");
    }
}

/// Of pages with 64 objects hardly any is empty when a tenth of the objects stay: no allocator can keep much
/// less than all of them, and one that keeps much more does not reuse or return memory.
#[test]
fn memory_is_what_the_kernel_counts() {
    for allocator in ["uzram", "uzram hardened", "uzram delayed", "uzram eager", "system", "mimalloc"] {
        let output = run(&["--resident-of", allocator, "--size", "64", "--objects", "200000"]);
        let bytes: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
        let of_all = bytes / (200_000.0 * 64.0);
        // glibc adds 16 bytes to each object, mimalloc some megabytes to all.
        let most = if allocator.starts_with("uzram") { 1.08 } else { 1.5 };
        assert!((0.98..most).contains(&of_all), "{allocator}: {of_all}");
    }
}

#[test]
fn what_cannot_be_measured_is_said() {
    for (arguments, says) in [
        (["--resident-of", "nobody", "--size", "64"].as_slice(), "no allocator 'nobody'"),
        (&["--blobs-of", "nobody"], "no allocator 'nobody'"),
        (&["--resident-of", "mimalloc", "--size", "65"], "objects of 65 bytes"),
        (&["--seconds=-1"], "--seconds"),
        (&["--rounds", "101"], "--rounds"),
    ] {
        let output = run(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
