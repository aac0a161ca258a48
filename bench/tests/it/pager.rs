//! Tiny runs of the benchmark of the pager: they have every figure, and leave nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::common::{finish, wait_until};
use uzram_bench::harness::corpus::{Kind, build};
use uzram_bench::pager::unmap::{Owner, Phase, UnmapOptions, kernel_obstacle, measure};
use uzram_bench::pager::{Amounts, PagerOptions, PagerReport, Part, TRAPS, run};

/// The kernel's areas and cgroups belong to the process, so tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn bench() -> PathBuf {
    env!("CARGO_BIN_EXE_uzram-bench").into()
}

fn tiny(dir: &Path) -> PagerOptions {
    let corpus = dir.join("pages");
    build(Kind::Mixed, 384).unwrap().save(&corpus).unwrap();
    PagerOptions {
        program: bench(),
        corpus,
        dir: dir.to_owned(),
        parts: Part::ALL.into(),
        duration: Duration::from_millis(50),
        repeat: 1,
        amounts: Amounts {
            unmapped_pages: 2048,
            fault_pages: 1024,
            fault_threads: vec![1, 16],
            fitting_pages: 512,
            fitting_passes: 4,
            limit_bytes: 4 << 20,
        },
        stop: Arc::default(),
    }
}

/// Returns the swap areas, zram devices and cgroups of benchmarks of this process.
fn things() -> BTreeSet<String> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut things: BTreeSet<String> =
        swaps.lines().filter_map(|line| line.split_ascii_whitespace().next()).map(str::to_owned).collect();
    let own = format!("uzram-bench-{}", std::process::id());
    for dir in ["/sys/block", "/sys/fs/cgroup/memory"] {
        let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
        let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        let is_one = |path: &PathBuf| name(path).starts_with("zram") || name(path) == own;
        things.extend(entries.filter(is_one).map(|path| path.display().to_string()));
    }
    things
}

/// Fails if there is more than before, after waiting longer than other tests keep such things.
fn assert_nothing_left(before: &BTreeSet<String>) {
    wait_until("nothing is left", || things().is_subset(before));
}

fn assert_complete(report: &PagerReport) {
    let kernel = kernel_obstacle().is_none();
    for trap in TRAPS.iter().filter(|trap| trap.check().is_ok()) {
        let trap = trap.name();
        for phase in Phase::ALL {
            assert!(report.unmap.iter().any(|row| row.side == trap && row.phase == phase && row.ms > 0.0));
            assert_eq!(report.unmap_ratio(trap, phase).is_some(), kernel, "{trap}");
        }
        for threads in [1, 16] {
            let row = report.fault(trap, threads).unwrap();
            assert!(row.p99_us >= row.p50_us && row.p50_us > 0.1 && row.decode_us > 0.01, "{row:?}");
        }
        assert!(report.fitting_ratio(trap).unwrap() > 0.0);
        for spills in [true, false] {
            let row = report.access(trap, spills).unwrap();
            assert!(row.per_s > 0.0 && row.peak_bytes > 1 << 20, "{row:?}");
        }
        assert!(report.beyond_limit_bytes(trap).is_some());
    }
}

#[test]
fn every_figure_is_there_and_nothing_is_left() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let report = run(&tiny(dir.path())).unwrap();
    println!("{report}");
    assert_complete(&report);
    assert_nothing_left(&before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the corpus alone");
}

#[test]
fn a_stop_at_any_time_leaves_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    for after_ms in [0, 60, 150, 400, 900] {
        let options = tiny(dir.path());
        let stop = Arc::clone(&options.stop);
        let outcome = std::thread::scope(|scope| {
            let run = scope.spawn(|| run(&options));
            std::thread::sleep(Duration::from_millis(after_ms));
            stop.store(true, Ordering::Relaxed);
            run.join().unwrap()
        });
        match outcome {
            Err(error) => assert_eq!(error.to_string(), "interrupted"),
            Ok(report) => assert_complete(&report),
        }
        assert_nothing_left(&before);
    }
}

#[test]
fn a_program_that_fails_leaves_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let options = tiny(dir.path());
    let error = run(&PagerOptions { program: "/bin/false".into(), ..options.clone() });
    if TRAPS.iter().any(|trap| trap.check().is_ok()) || kernel_obstacle().is_none() {
        assert!(error.unwrap_err().to_string().contains("the program that is measured"));
    }
    let missing = dir.path().join("missing");
    let error = run(&PagerOptions { corpus: missing, ..options }).err().map(|error| error.to_string());
    assert!(error.is_none_or(|error| error.contains("/missing")));
    assert_nothing_left(&before);
}

/// The kernel's jobs are processes, a pager's are threads of one.
#[test]
fn several_jobs_unmap_at_once() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let options = tiny(dir.path());
    let before = things();
    let kernel = [Owner::Kernel("lz4"), Owner::Kernel("lzo-rle")].into_iter();
    let kernel = kernel.filter(|_| kernel_obstacle().is_none());
    let traps = TRAPS.into_iter().filter(|trap| trap.check().is_ok());
    for owner in kernel.chain(traps.map(|trap| Owner::Pager(trap, Some("split")))) {
        let once = UnmapOptions {
            program: &options.program,
            corpus: &options.corpus,
            pages: 1024,
            jobs: 3,
            phases: &Phase::ALL,
            stop: &options.stop,
        };
        let times = measure(&owner, &once).unwrap();
        assert!(times.iter().map(|(phase, _)| *phase).eq(Phase::ALL), "{owner:?}");
        assert!(times.iter().all(|(_, time)| !time.is_zero()), "{owner:?}: {times:?}");
    }
    assert_nothing_left(&before);
}

#[test]
fn the_program_prints_a_table_or_json() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let corpus = tiny(dir.path()).corpus;
    let run = |args: &[&str]| {
        let mut command = Command::new(bench());
        command
            .args(["pager", "--small", "--repeat", "1", "--only", "faults", "--corpus"])
            .arg(&corpus)
            .args(args);
        finish(command)
    };
    let json: serde_json::Value = serde_json::from_str(&run(&["--json"]).ok()).unwrap();
    assert!(json["faults"].is_array() && json["zipf"].is_null(), "{json}");
    let mut command = Command::new(bench());
    command.args(["pager", "--only", "all"]);
    let ended = finish(command);
    assert!(ended.complaint("uzram-bench", 2).contains("write unmap, faults, fitting or zipf"));
}
