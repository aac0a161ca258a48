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
    for (args, mentions) in [
        (&["--rw", "sideways"][..], "sideways"),
        (&["--jobs", "0"], "--jobs"),
        (&["--streams", "1025"], "must have 1 to 1024"),
        (&["--seconds", "NaN"], "--seconds"),
        (&["--seconds", "0"], "--seconds"),
        (&["--repeat", "0"], "--repeat"),
        (&["--full"], "--targets"),
        (&["--markdown"], "--targets|--codecs"),
        (&["--codecs", "--targets"], "--targets"),
        (&["--codecs", "--repeat", "0"], "--repeat"),
        (&["--corpus", "heap", "--corpus", "text"], "--corpus"),
        (&["survive", "--size", "0"], "--size"),
        (&["survive", "--only", "all"], "--only"),
        (&["--aginst", "codec"], "did you mean `--against`?"),
    ] {
        let ended = bench(args);
        let line = ended.complaint("uzram-bench", 2);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
    let ended = bench(&["--corpus", "/nonexistent"]);
    assert!(ended.complaint("uzram-bench", 1).contains("/nonexistent"), "{}", ended.stderr);
}

#[test]
fn help_speaks_of_the_word_that_users_type() {
    let text = bench(&["--help"]).ok();
    assert!(text.contains("Usage: uzram bench ") && !text.contains("swap-user"), "{text}");
    assert!(text.contains("Example: uzram bench ") && text.contains("survive"), "{text}");
    let text = bench(&["survive", "--help"]).ok();
    assert!(text.contains("Usage: uzram bench survive ") && text.contains("--full"), "{text}");
}

/// A file of 64 pages, in a folder that goes.
fn corpus() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let pages: Vec<u8> = (0..64 << 12).map(|at| (at / 7) as u8).collect();
    std::fs::write(&path, pages).unwrap();
    (dir, path.to_str().unwrap().to_owned())
}

#[test]
fn a_short_run_prints_a_table_or_json() {
    let (_dir, corpus) = corpus();
    let args = ["--seconds", "0.01", "--repeat", "1", "--rw", "randwrite", "--jobs", "1", "--corpus"];
    let args = [&args[..], &[corpus.as_str()]].concat();
    assert!(bench(&args).ok().contains("randwrite"));
    let json = bench(&[&args[..], &["--json"]].concat()).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["rows"][0]["target"], &json["corpus"]), (&"uzram".into(), &"pages".into()));
}

#[test]
fn a_short_run_compares_codecs() {
    let (_dir, corpus) = corpus();
    let args = ["--codecs", "--seconds", "0.01", "--repeat", "1", "--corpus", &corpus, "--corpus", "heap"];
    let text = bench(&args).ok();
    for part in ["corpus pages, 256 KiB\n", "corpus heap, 16 MiB\n", "zstd:3"] {
        assert!(text.contains(part), "{text}");
    }
    let twice = bench(&["--codecs", "--corpus", &corpus, "--corpus", &corpus]);
    assert!(twice.complaint("uzram-bench", 2).contains("two corpora are called 'pages'"), "{}", twice.stderr);
    assert!(bench(&[&args[..], &["--markdown"]].concat()).ok().contains("| zstd:3 | 16 KiB | "));
    let json = bench(&[&args[..], &["--json"]].concat()).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let row = &json["rows"][0];
    assert_eq!(
        (&row["codec"], &row["corpus"], &row["page_bytes"]),
        (&"lz4".into(), &"pages".into(), &4096.into())
    );
}

#[test]
fn a_short_run_attaches_a_store() {
    let (_dir, corpus) = corpus();
    let args = ["survive", "--seconds", "0.01", "--repeat", "1", "--size", "1M", "--only", "store"];
    let args = [&args[..], &["--corpus", &corpus]].concat();
    let text = bench(&args).ok();
    assert!(text.contains("in random order") && text.contains("--full"), "{text}");
    let json = bench(&[&args[..], &["--json"]].concat()).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["attach"][0]["pages"], 256);
}

#[test]
fn the_program_that_is_swapped_out_says_what_it_lacks() {
    let args = ["swap-user", "--cgroup", "/nonexistent", "--pages", "/dev/null", "--size", "1M"];
    let ended = bench(&args);
    let line = ended.complaint("uzram-bench", 1);
    assert!(line.contains("/nonexistent/cgroup.procs"), "{line}");
}
