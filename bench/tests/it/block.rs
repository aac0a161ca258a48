//! A tiny run of the benchmark of block devices and swap: it has every figure, and leaves nothing behind.
//! Needs root and the programs for it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::common::wait_until;
use uzram_bench::block::{Amounts, BlockOptions, BlockReport, Compared, Programs, run};
use uzram_bench::harness::corpus::{Kind, build};
use uzram_bench::harness::process::find;
use uzram_bench::swap::{self, SIDES, SwapOptions};
use uzram_bench::workload;

const MIB: u64 = 1 << 20;
/// Leftovers are recognised by this process's ID, so tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns whether nothing can be measured here, and prints why: the test then cannot run.
fn unable() -> bool {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: this user is not root");
        return true;
    }
    let needed =
        ["/dev/fuse", "/dev/loop-control", "/sys/class/zram-control", "/sys/fs/cgroup/memory/memory.stat"];
    if let Some(path) = needed.into_iter().find(|path| !Path::new(path).exists()) {
        println!("skipped: there is no {path}");
        return true;
    }
    let programs = ["fs_mark", "mkfs.ext4", "mkswap", "swapon", "swapoff"];
    if let Some(program) = programs.into_iter().find(|program| find(program).is_none()) {
        println!("skipped: {program} is not installed");
        return true;
    }
    if !programs_beside().uzram.is_file() {
        println!("skipped: the program uzram is not built: cargo test -p uzram-cli -p uzram-bench builds it");
        return true;
    }
    false
}

/// Returns the two programs, which cargo puts into one directory.
fn programs_beside() -> Programs {
    let bench = Path::new(env!("CARGO_BIN_EXE_uzram-bench"));
    Programs { uzram: bench.with_file_name("uzram"), bench: bench.to_owned() }
}

fn tiny(corpus: &Path) -> BlockOptions {
    build(Kind::Mixed, 512).unwrap().save(corpus).unwrap();
    BlockOptions {
        programs: programs_beside(),
        corpus: corpus.to_owned(),
        repeat: 1,
        amounts: Amounts {
            ext4_bytes: 64 * MIB,
            btrfs_bytes: 128 * MIB,
            files_per_thread: 4,
            file_bytes: 8 * MIB,
            swapped_bytes: 24 * MIB,
            swap_area_bytes: 64 * MIB,
            idle_sizes_bytes: vec![32 * MIB, 256 * MIB],
            rest: Duration::from_millis(200),
            idle: Duration::from_millis(300),
        },
        stop: Arc::default(),
    }
}

/// Returns everything on the system that belongs to this process's benchmarks, and every zram device. (A swap
/// area is on one of its devices.)
fn things() -> BTreeSet<String> {
    let own = format!("uzram-bench-{}-", std::process::id());
    let mut things = BTreeSet::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    things.extend(mounts.lines().filter(|line| line.contains(&own)).map(str::to_owned));
    for entry in fs::read_dir("/sys/block").unwrap() {
        let path = entry.unwrap().path();
        let file = fs::read_to_string(path.join("loop/backing_file")).unwrap_or_default();
        let is_zram = path.file_name().unwrap().to_str().unwrap().starts_with("zram");
        // The last: a loop device on a file whose mount is gone.
        if is_zram || file.contains(&own) || file.trim_end() == "/zram0/disk" {
            things.insert(path.display().to_string());
        }
    }
    for (dir, name) in
        [(std::env::temp_dir(), own.as_str()), ("/sys/fs/cgroup/memory".into(), own.trim_end_matches('-'))]
    {
        let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
        let own = entries.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(name));
        things.extend(own.map(|path| path.display().to_string()));
    }
    for entry in fs::read_dir("/proc").unwrap() {
        let line = fs::read_to_string(entry.unwrap().path().join("cmdline")).unwrap_or_default();
        if line.contains(&own) {
            things.insert(line.replace('\0', " "));
        }
    }
    things
}

/// Fails if there is more than before, after waiting longer than other tests keep such things.
fn assert_nothing_left(before: &BTreeSet<String>) {
    wait_until("nothing is left", || {
        let left: Vec<_> = things().difference(before).cloned().collect();
        if !left.is_empty() {
            println!("left: {left:?}");
        }
        left.is_empty()
    });
}

fn assert_compared(compared: &Compared) {
    assert!(compared.uzram > 0.0 && compared.kernel > 0.0, "{compared:?}");
    assert!(compared.ratio.unwrap() > 0.0, "{compared:?}");
}

fn assert_complete(report: &BlockReport) {
    for file_system in &report.file_systems {
        assert_compared(&file_system.files_per_s);
        assert_compared(&file_system.write_mb_per_s);
        assert_compared(&file_system.read_mb_per_s);
    }
    assert!(report.file_system("ext4").is_some());
    let swap = report.swap.as_ref().unwrap();
    assert_compared(&swap.swap_out_ms);
    assert_compared(&swap.fault_in_ms);
    assert_compared(&swap.random_in_ms);
    swap.no_survive.iter().for_each(assert_compared);
    for swapped in [swap.swapped_bytes.uzram, swap.swapped_bytes.kernel] {
        assert!(swapped > 8.0 * MIB as f64 && swapped <= 30.0 * MIB as f64, "{swap:?}");
    }
    assert!(swap.left_bytes.uzram < swap.swapped_bytes.uzram, "{swap:?}");
    assert_eq!(report.idle.len(), 2);
    let idle = report.largest_idle().unwrap();
    assert_eq!(idle.size_bytes, 256 * MIB);
    assert!(idle.cpu_percent < 50.0 && idle.resident_bytes > MIB, "{idle:?}");
    assert!(idle.slot_table_bytes <= MIB, "{idle:?}");
}

#[test]
fn every_figure_is_there_and_nothing_is_left() {
    if unable() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let report = run(&tiny(&dir.path().join("pages"))).unwrap();
    println!("{report}");
    assert_complete(&report);
    assert_nothing_left(&before);
    let text = report.to_string();
    for said in ["ext4, fs_mark, files/s", "swap-out of 24 MiB, ms", "idle daemon of 256 MiB"] {
        assert!(text.contains(said), "{said}: {text}");
    }
}

#[test]
fn a_stop_at_any_time_leaves_nothing() {
    if unable() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    for after_ms in [0, 300, 900, 1600, 2400] {
        let options = tiny(&dir.path().join("pages"));
        let stop: Arc<AtomicBool> = Arc::clone(&options.stop);
        let outcome = thread::scope(|scope| {
            let run = scope.spawn(|| run(&options));
            thread::sleep(Duration::from_millis(after_ms));
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
fn what_fails_leaves_nothing() {
    if unable() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let options = tiny(&dir.path().join("pages"));
    // If the program cannot do it, this is a note, not an error.
    let programs = Programs { uzram: "/bin/false".into(), ..programs_beside() };
    let report = run(&BlockOptions { programs, ..options.clone() }).unwrap();
    assert!(report.file_systems.is_empty() && report.swap.is_none() && report.idle.is_empty());
    assert!(report.to_string().contains("not measured: /bin/false failed"), "{report}");
    // A file larger than the disk fails while it is written, with the file system mounted.
    let amounts = Amounts { file_bytes: 80 * MIB, ..options.amounts.clone() };
    let error = run(&BlockOptions { amounts, ..options.clone() }).unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
    assert_nothing_left(&before);
}

#[test]
fn programs_that_swap_are_right_with_every_area() {
    if unable() {
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (before, dir) = (things(), tempfile::tempdir().unwrap());
    let options = SwapOptions {
        uzram: programs_beside().uzram,
        dir: dir.path().to_owned(),
        only: swap::program_names().map(str::to_owned).collect(),
        repeat: 1,
        amounts: workload::Amounts::small(),
        stop: Arc::default(),
    };
    // What they print is compared: otherwise this is an error.
    let report = swap::run(&options).unwrap();
    for note in &report.notes {
        println!("skipped: {note}");
    }
    assert_eq!(report.programs.len() + report.notes.len(), swap::program_names().count(), "{report}");
    for row in &report.programs {
        assert!(
            row.seconds.iter().all(|seconds| *seconds > 0.0) && row.limit_bytes < row.peak_bytes,
            "{report}"
        );
        // Half of what a small node takes is its program, which is not swapped.
        assert!(row.name == "node" || row.out_bytes.iter().all(|bytes| *bytes > 0.0), "{report}");
        assert!(row.ratios.iter().all(|ratio| *ratio > 0.0), "{report}");
    }
    assert_eq!(report.failed_writes().unwrap_or(0), 0, "{report}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_nothing_left(&before);
}

#[test]
fn faults_are_followed_through_the_kernel() {
    if unable() {
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = things();
    match swap::trace::run(&programs_beside(), &Arc::default()) {
        Err(error) if error.kind() == uzram::ErrorKind::Unsupported => println!("skipped: {error}"),
        traced => {
            let traced = traced.unwrap();
            assert_eq!(traced.sides.len(), SIDES.len());
            for side in &traced.sides {
                assert!(side.faults > 1000 && side.total_us > 0.1, "{traced}");
            }
            for side in &traced.sides[..2] {
                let sum: f64 = side.steps.iter().map(|step| step.us).sum();
                assert!(
                    side.steps.len() >= 8 && (sum - side.total_us).abs() < side.total_us / 10.0,
                    "{traced}"
                );
            }
        }
    }
    assert_nothing_left(&before);
}
