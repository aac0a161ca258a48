//! Small runs of all benchmarks: they have every figure, and leave nothing behind, however they end. Most
//! need root.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::common::wait_until;
use uzram::{ErrorKind, Result};
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::{Options, Report, Source};
use uzram_bench::pager::unmap::{Owner, Phase, UnmapOptions, check_kernel, measure};
use uzram_bench::{block, pager, targets};
use uzram_pager::Trap;

/// Leftovers are recognised by this process's ID, so tests run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bench() -> PathBuf {
    env!("CARGO_BIN_EXE_uzram-bench").into()
}

fn small(dir: &Path) -> Options {
    Options {
        corpus: Source::Built(Kind::Mixed, 512),
        duration: Duration::from_millis(50),
        dir: dir.to_owned(),
        small: true,
        full: true,
        uzram: Some(bench().with_file_name("uzram")),
        bench: bench(),
        ..Options::default()
    }
}

/// Returns everything on the system that belongs to this process's benchmarks, every zram device, and every
/// swap area.
fn things() -> BTreeSet<String> {
    let own = format!("uzram-bench-{}-", std::process::id());
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut things: BTreeSet<String> =
        swaps.lines().filter_map(|line| line.split_ascii_whitespace().next()).map(str::to_owned).collect();
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
    for dir in [std::env::temp_dir(), "/sys/fs/cgroup/memory".into()] {
        let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
        let own = entries.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&own));
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

/// What programs print, and what is read back, is compared: otherwise this is an error.
#[test]
fn every_target_is_measured_and_nothing_is_left() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let options = small(dir.path());
    let measured = targets::measure(&options).unwrap();
    println!("{measured}");
    // Every report also says which pages it leaves out.
    let words = ["not measured", "left out: ", "left out of processes: ", "not compared"];
    let is_missing = |note: &&String| words.iter().any(|why| note.contains(why));
    let missing: Vec<_> = measured.report.notes.iter().filter(is_missing).collect();
    missing.iter().for_each(|note| println!("skipped: {note}"));
    for target in &measured.targets {
        assert!(target.measured.is_some() || !missing.is_empty(), "{target:?}");
        let must_be_met =
            ["failed writes", "beyond the limit, MiB"].iter().any(|end| target.name.ends_with(end));
        assert!(!must_be_met || target.is_met() != Some(false), "{target:?}");
    }
    let page = measured.to_markdown(&options);
    assert!(
        page.contains("\n| hits, scan through Zipf, 5 % in memory: points above exact LRU | ≥ 0 |"),
        "{page}"
    );
    assert_nothing_left(&before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_stop_at_any_time_leaves_nothing() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let benchmarks: [fn(&Options) -> Result<Report>; 2] = [block::run, pager::run];
    for benchmark in benchmarks {
        for after_ms in [0, 60, 300, 900, 1600, 2400] {
            let options = small(dir.path());
            let stop = Arc::clone(&options.stop);
            let outcome = thread::scope(|scope| {
                let run = scope.spawn(|| benchmark(&options));
                thread::sleep(Duration::from_millis(after_ms));
                stop.store(true, Ordering::Relaxed);
                run.join().unwrap()
            });
            match outcome {
                Err(error) if error.kind() == ErrorKind::Unsupported => println!("skipped: {error}"),
                Err(error) => assert_eq!(error.to_string(), "interrupted"),
                Ok(report) => assert!(!report.figures.is_empty() || !report.notes.is_empty()),
            }
            assert_nothing_left(&before);
        }
    }
}

#[test]
fn a_program_that_fails_leaves_nothing() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let before = things();
    let broken =
        Options { uzram: Some("/bin/false".into()), bench: "/bin/false".into(), ..small(dir.path()) };
    // What the program cannot do is not measured.
    assert_eq!(block::run(&broken).unwrap_err().kind(), ErrorKind::Unsupported);
    if Trap::ALL.iter().any(|trap| trap.check().is_ok()) || check_kernel().is_ok() {
        assert!(pager::run(&broken).unwrap_err().to_string().contains("the program that is measured"));
    }
    let missing = Source::File(dir.path().join("missing"));
    let error = pager::run(&Options { corpus: missing, ..small(dir.path()) }).err();
    assert!(error.is_none_or(|error| error.to_string().contains("/missing")));
    assert_nothing_left(&before);
}

/// The kernel's jobs are processes, a pager's are threads of one.
#[test]
fn several_jobs_unmap_at_once() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("pages");
    uzram_bench::harness::corpus::build(Kind::Mixed, 384).unwrap().save(&corpus).unwrap();
    let (program, before) = (bench(), things());
    let kernel = [Owner::Kernel("lz4"), Owner::Kernel("lzo-rle")].into_iter();
    let kernel = kernel.filter(|_| check_kernel().is_ok());
    let traps = Trap::ALL.into_iter().filter(|trap| trap.check().is_ok());
    for owner in kernel.chain(traps.map(|trap| Owner::Pager(trap, Some("split")))) {
        let stop = &Options::default().stop;
        let (program, corpus, phases) = (&program, &corpus, &Phase::ALL);
        let once = UnmapOptions { program, corpus, pages: 1024, jobs: 3, phases, stop };
        let times = measure(&owner, &once).unwrap();
        assert!(times.iter().map(|(phase, _)| *phase).eq(Phase::ALL), "{owner:?}");
        assert!(times.iter().all(|(_, time)| !time.is_zero()), "{owner:?}: {times:?}");
    }
    assert_nothing_left(&before);
}
