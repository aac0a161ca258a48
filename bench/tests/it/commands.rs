//! Tests of the program `uzram-bench`: its errors and its output.

use std::process::Command;

use crate::common::{Ended, finish};

fn bench(args: &[&str]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzram-bench"));
    command.args(args);
    finish(command)
}

#[test]
fn what_makes_no_sense_is_one_line() {
    for (args, status, mentions) in [
        (&["--rw", "sideways"][..], 2, "sideways"),
        (&["--jobs", "0"], 2, "--jobs"),
        (&["--seconds", "NaN"], 2, "--seconds"),
        (&["--seconds", "0"], 2, "--seconds"),
        (&["--repeat", "0"], 2, "--repeat"),
        (&["--repeat", "1001"], 2, "--repeat"),
        (&["--against", "disk"], 2, "--against"),
        (&["--size", "17T"], 2, "--size"),
        (&["--size", "0"], 2, "--size"),
        (&["--markdown"], 2, "--targets|--codecs"),
        (&["--codecs", "--targets"], 2, "--targets"),
        (&["--codecs", "--repeat", "0"], 2, "--repeat"),
        (&["--targets", "--only", "all"], 2, "write speed, hit ratios, "),
        (&["--corpus", "heap", "--corpus", "text"], 2, "--corpus"),
        (&["survive", "--only", "all"], 2, "write store, outages, nbd, swap"),
        (&["pager", "--only", "all"], 2, "write unmap, faults, fitting, zipf"),
        (&["swap", "--only", "emacs"], 2, "unknown part 'emacs'"),
        (&["run", "--repeat", "0"], 2, "--repeat"),
        (&["remote", "--only", "reads"], 2, "--only"),
        (&["--aginst", "codec"], 2, "did you mean `--against`?"),
        (&["--corpus", "/nonexistent"], 1, "/nonexistent"),
        (&["--codecs", "--corpus", "/nonexistent"], 1, "/nonexistent"),
        (&["memory-user", "walk"], 2, "for the benchmark itself"),
        (
            &["memory-user", r#"{"Swap":{"cgroup":"/none","pages":"/dev/null","size_bytes":1}}"#],
            1,
            "/none/cgroup.procs",
        ),
    ] {
        let ended = bench(args);
        let line = ended.complaint("uzram-bench", status);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
}

/// A file of 64 pages, in a folder that goes.
fn corpus() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let pages: Vec<u8> = (0..64 << 12).map(|at| (at / 7) as u8).collect();
    std::fs::write(&path, pages).unwrap();
    (dir, path.to_str().unwrap().to_owned())
}

/// Each prints a table and JSON, which has this figure.
#[test]
fn a_short_run_prints_a_table_or_json() {
    let (_dir, corpus) = corpus();
    for (args, table, row, column) in [
        (&["--rw", "randwrite", "--jobs", "1"][..], "4 KiB pages", "randwrite, 1 job, uzram", "MB/s"),
        (&["--codecs"], "codecs on pages", "zstd:3", "compress × lz4"),
        (
            &["survive", "--only", "store"],
            "attach",
            "small, written in random order, mapped ahead",
            "median ms",
        ),
        (&["pager", "--only", "faults"], "one fault", "message, 4 threads", "p50 µs"),
        (&["--targets", "--only", "hit ratios"], "hits", "loop, 5 % in memory", "points"),
    ] {
        let short = ["--seconds", "0.01", "--repeat", "1", "--small", "--corpus", &corpus];
        let args = [args, &short].concat();
        let text = bench(&args).ok();
        let is_unable = args[0] == "pager" && text.contains("not measured");
        assert!(is_unable || text.contains(table) && text.contains(row), "{text}");
        let json = bench(&[&args[..], &["--json"]].concat()).ok();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let is_it = |figure: &&serde_json::Value| {
            [&figure["table"], &figure["row"], &figure["column"]].iter().copied().eq([table, row, column])
        };
        let figure = json["figures"].as_array().unwrap().iter().find(is_it);
        assert!(is_unable || figure.unwrap()["value"].is_number(), "{json}");
    }
    let twice = bench(&["--codecs", "--corpus", &corpus, "--corpus", &corpus]);
    assert!(twice.complaint("uzram-bench", 2).contains("two corpora are called 'pages'"), "{}", twice.stderr);
    let args =
        ["--codecs", "--small", "--seconds", "0.01", "--repeat", "1", "--corpus", &corpus, "--markdown"];
    assert!(bench(&args).ok().contains("\n| zstd:3 | "));
}

#[test]
fn help_speaks_of_the_word_that_users_type() {
    let text = bench(&["--help"]).ok();
    assert!(text.contains("Usage: uzram bench ") && !text.contains("memory-user"), "{text}");
    assert!(text.contains("Example: uzram bench ") && text.contains("survive"), "{text}");
    let text = bench(&["survive", "--help"]).ok();
    assert!(text.contains("Usage: uzram bench survive ") && text.contains("--full"), "{text}");
}
