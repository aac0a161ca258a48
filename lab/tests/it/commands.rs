//! Tests of the lab's command line: the output, the file it writes, and its errors.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{PATIENCE, collect, collect_within, finish, start, wait_until};
use crate::{corpus, lab};

#[test]
fn the_list_says_what_each_table_is() {
    let text = finish(lab(&["list"])).ok();
    for said in [
        "\"zram: user per-cpu compression streams\", Sergey Senozhatsky, May 2016",
        "randrw",
        "min:",
        "streams-nbd",
        "zs-lock-disk the same as zs-lock: files on ext4 and btrfs, on a block device",
        "slab-freeze",
        "Delay freezing of CPU partial slabs",
        "delayed against eager, on-partial, unfreeze-first; sheaves against delayed",
        "messaging: 1 2 5; rawpkt: 1 2 4 8",
        "consolidated against split; class-indexed, pinned against consolidated",
        "zs-free",
        "lru-batch",
        "a pager against the kernel's swap on zram",
        "reduce lock contention in zs_free()",
        "class-indexed against split, class-in-word, no-pool-lock, pages-after-lock; pinned against class-indexed",
        "zs-defer",
        "pinned-deferred against split, pinned; split-deferred against pinned-deferred",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
}

#[test]
fn what_cannot_be_is_one_line() {
    for (args, status, mentions) in [
        (&["walk"][..], 2, "walk"),
        (&["run"], 2, "<TABLE"),
        (
            &["run", "slabs"],
            2,
            "no table 'slabs', only: streams, streams-nbd, slab-freeze, zs-lock, zs-lock-disk, zs-free, zs-defer, lru-batch, unmap",
        ),
        (&["run", "slab-freeze", "--case", "randread"], 2, "messaging, rawpkt"),
        (&["run", "zs-free", "--case", "randread"], 2, "run-cache, no-run-cache"),
        (&["run", "streams", "--case", "trim"], 2, "--case"),
        (&["run", "streams", "--jobs", "0"], 2, "--jobs"),
        (&["run", "streams", "--jobs", "257"], 2, "--jobs"),
        (&["run", "streams", "--rounds", "101"], 2, "--rounds"),
        (&["run", "streams", "--seconds", "3601"], 2, "--seconds"),
        (&["run", "streams", "--rounds", "0"], 2, "--rounds"),
        (&["run", "streams", "--rounds", "some"], 2, "--rounds"),
        (&["run", "streams", "--seconds", "0"], 2, "--seconds"),
        (&["run", "streams", "--seconds=-1"], 2, "--seconds"),
        (&["run", "streams", "--seconds", "NaN"], 2, "--seconds"),
        (&["run", "streams", "--json", "/nonexistent/streams.json"], 1, "/nonexistent/streams.json"),
        (
            &["scale", "unmap"],
            2,
            "'unmap' measures no lock's hold time, only: slab-freeze, zs-free, lru-batch",
        ),
        (&["scale", "zs-free", "--case", "trim"], 2, "--case"),
        (&["report", "/tmp", "--tables", "slabs"], 2, "no table 'slabs'"),
        (&["report", "/tmp", "--seconds", "0"], 2, "--seconds"),
        (&["report", "/tmp", "--jobs", "0"], 2, "--jobs"),
        (&["report", "/tmp", "--rounds", "0"], 2, "--rounds"),
        (&["report", "/dev/null", "--tables", "lru-batch"], 1, "/dev/null"),
        (&["locks"], 2, "<TABLE:CASE>"),
        (&["locks", "slabs"], 2, "no table 'slabs'"),
        (&["locks", "zs-free"], 2, "zs-free:run-cache, zs-free:no-run-cache"),
        (&["locks", "zs-free:"], 2, "zs-free:run-cache"),
        (&["locks", "streams:trim"], 2, "streams:randwrite"),
        (&["locks", "unmap"], 2, "other programs"),
        (&["locks", "lru-batch", "--jobs", "0"], 2, "--jobs"),
        (&["locks", "lru-batch", "--seconds", "0"], 2, "--seconds"),
        (&["locks", "lru-batch", "--seconds=-1"], 2, "--seconds"),
    ] {
        let ended = finish(lab(args));
        let line = ended.complaint("uzram-lab", status);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
}

#[test]
fn help_speaks_of_the_word_that_users_type() {
    let text = finish(lab(&["--help"])).ok();
    assert!(text.contains("Usage: uzram lab ") && text.contains("Example: uzram lab "), "{text}");
}

/// Returns the numbers at a place that must be an array of `rounds` measured values.
fn measured(values: &Value, rounds: usize) -> Vec<f64> {
    let numbers: Vec<f64> = values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
    assert_eq!(numbers.len(), rounds);
    assert!(numbers.iter().all(|number| *number >= 0.0));
    numbers
}

#[test]
fn a_short_run_prints_the_table_and_replaces_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("old.json"), dir.path().join("link.json"));
    fs::write(&file, "old").unwrap();
    symlink(&file, &link).unwrap();
    let mut command = lab(&["run", "streams", "--seconds", "0.01", "--rounds", "2"]);
    command.args(["--jobs", "1,3", "--case", "randwrite", "--json"]).arg(&link);
    let text = finish(command).ok();
    for said in ["randwrite", "published", "Verdict", "Sergey Senozhatsky"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 104), "{text}");

    assert!(link.is_symlink() && fs::read_dir(dir.path()).unwrap().count() == 2);
    let json: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(keys(&json), ["rows", "series", "table"].map(str::to_owned).into());
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "two lists, with 1 and 3 jobs");
    let row_keys = ["after", "before", "case", "jobs", "p", "published", "ratio", "ratio_high", "ratio_low"];
    for row in rows {
        assert_eq!(keys(row), row_keys.map(str::to_owned).into());
        for side in ["before", "after"] {
            let values = &row[side]["values"];
            for quantity in ["elapsed_s", "user_s", "system_s", "write_mb_per_s", "sleeps_per_write"] {
                measured(&values[quantity], 2);
            }
            assert!(measured(&values["elapsed_s"], 2).iter().all(|seconds| *seconds > 0.0));
        }
        assert!(row["published"]["ratio"].is_f64());
    }
}

/// Valgrind counts the function that `docs/lab/README.md` names.
#[test]
fn the_work_of_a_design_is_done_once_for_a_profiler() {
    let dir = tempfile::tempdir().unwrap();
    let pages = corpus(dir.path());
    let work = |design: [&str; 3]| lab(&[&["work"], &design[..], &[pages.to_str().unwrap()]].concat());
    for design in [["zs-free", "run-cache", "pinned"], ["streams", "write", "percpu"]] {
        assert_eq!(finish(work(design)).ok(), "");
    }
    assert!(finish(work(["zs-free", "run-cache", "fast"])).complaint("uzram-lab", 2).contains("fast"));
    if !Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: counting instructions: the program valgrind is missing");
        return;
    }
    let counted = dir.path().join("counted");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--collect-atstart=no"]);
    valgrind.arg("--toggle-collect=uzram_lab::experiment::clock::clocked");
    valgrind.arg(format!("--callgrind-out-file={}", counted.display()));
    let command = work(["zs-free", "run-cache", "pinned"]);
    valgrind.arg(command.get_program()).args(command.get_args());
    collect_within(start(&mut valgrind), 4 * PATIENCE).ok();
    let counted = fs::read_to_string(&counted).unwrap();
    let total = counted.lines().find_map(|line| line.strip_prefix("totals: ")).unwrap();
    // At least a hundred for each of 120,000 objects.
    assert!(total.parse::<u64>().unwrap() > 12_000_000, "{total}");
}

/// Every table that measures a lock's hold time, in smoke size.
#[test]
fn locks_saturate_with_so_many_cpus() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("scale.json");
    let mut command = lab(&["scale", "zs-free", "slab-freeze", "lru-batch", "--seconds", "0.001"]);
    let text = collect_within(start(command.args(["--rounds", "1", "--json"]).arg(&file)), 2 * PATIENCE).ok();
    for said in ["run-cache", "size_class", "list_lock", "lru_lock", "Base: 63.0 ms", "Patched: 45.3 ms"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    for line in fs::read_to_string(&file).unwrap().lines() {
        let json: Value = serde_json::from_str(line).unwrap();
        for lock in json["locks"].as_array().unwrap() {
            assert!(lock["saturating_cpus"].as_f64().unwrap() >= 1.0, "{lock}");
        }
        assert!(!json["published"].as_array().unwrap().is_empty(), "{line}");
    }
}

#[test]
fn memory_is_paged_out_and_unmapped() {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, file) = (corpus(dir.path()), dir.path().join("unmap.json"));
    let mut command = lab(&["run", "unmap", "--rounds", "2", "--jobs", "1,2", "--json"]);
    let text = collect_within(start(command.arg(&file).arg("--corpus").arg(&corpus)), 2 * PATIENCE).ok();
    for said in ["paged-out", "class-indexed", "split", "random", "24.1 ms"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let has_kernel = text.contains("kernel-lz4 ");
    assert!(has_kernel || text.contains("the kernel's swap on zram left out: "), "{text}");
    let json: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    for row in json["rows"].as_array().unwrap() {
        for side in ["before", "after"] {
            for phase in ["fill_s", "page_out_s", "unmap_s"] {
                measured(&row[side]["values"][phase], 2);
            }
        }
    }
}

/// Runs cases of a table that takes other programs and root, and checks a speed of each case that can be
/// measured here.
fn measures_with_programs(table: &str, cases: &[&str], side: &str, (speed, least): (&str, f64)) {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, file) = (corpus(dir.path()), dir.path().join("rows.json"));
    let mut command = lab(&["run", table, "--case", &cases.join(","), "--jobs", "2", "--rounds", "1"]);
    let ended =
        collect_within(start(command.arg("--json").arg(&file).arg("--corpus").arg(&corpus)), 4 * PATIENCE);
    let lacks = ["root's", "there is no /dev", "is missing"];
    if ended.status.code() == Some(1) && lacks.iter().any(|lack| ended.stderr.contains(lack)) {
        println!("skipped: {}", ended.stderr.trim());
        return;
    }
    let text = ended.ok();
    let left_out = text.lines().filter(|line| line.contains(" left out: "));
    left_out.for_each(|line| println!("skipped: {line}"));
    let json: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    for side in ["before", "after"] {
        let elapsed = rows.iter().map(|row| measured(&row[side]["values"]["elapsed_s"], 1)[0]);
        assert!(elapsed.into_iter().all(|seconds| seconds > 0.0), "{json}");
    }
    for case in cases {
        let of_case: Vec<_> = rows.iter().filter(|row| row["case"] == *case).collect();
        assert!(!of_case.is_empty() || text.contains(&format!("{case} left out: ")), "{case}: {text}");
        for row in of_case {
            assert!(measured(&row[side]["values"][speed], 1)[0] > least, "{row}");
        }
    }
}

#[test]
fn files_are_measured_on_disks() {
    measures_with_programs("zs-lock-disk", &["ext4", "btrfs"], "before", ("files_per_s", 1.0));
}

#[test]
fn servers_are_measured_by_a_client() {
    measures_with_programs("streams-nbd", &["randread", "randrw"], "after", ("mb_per_s", 0.0));
}

#[test]
fn the_file_is_written_though_nobody_reads_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("streams.json");
    let mut command = lab(&["run", "streams", "--seconds", "0.005", "--rounds", "1"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.args(["--jobs", "1", "--case", "read", "--json"]).arg(&file).stdout(writer);
    let ended = collect(command.stderr(Stdio::piped()).spawn().unwrap());
    assert!(ended.status.success() && ended.stderr.is_empty(), "{}", ended.stderr);
    assert!(fs::read_to_string(&file).unwrap().starts_with("{\"table\":\"streams\""));
}

#[test]
fn an_interrupted_run_leaves_the_file_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("old.json");
    fs::write(&file, "old").unwrap();
    let mut command = lab(&["run", "streams", "--seconds", "60", "--json"]);
    let child = start(command.arg(&file));
    // Measuring has begun once the file that is to replace the old one exists.
    wait_until("it is at work", || fs::read_dir(dir.path()).unwrap().count() > 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = collect(child);
    assert!(ended.complaint("uzram-lab", 1).ends_with("interrupted"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
