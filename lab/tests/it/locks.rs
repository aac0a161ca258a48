//! Tests of `uzram lab locks`: with the feature `lock-stats` what it records, without it how it finds the
//! program that does.

use std::process::Command;

use crate::common::finish;

/// Returns the command `uzram-lab locks args`.
fn locks(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzram-lab"));
    command.arg("locks").args(args);
    command
}

#[test]
fn what_cannot_be_recorded_is_one_line() {
    for (args, mentions) in [
        (&["slabs"][..], "no table 'slabs'"),
        (&["zs-free"], "zs-free:run-cache, zs-free:no-run-cache"),
        (&["streams:trim"], "streams:randwrite"),
        (&["unmap"], "other programs"),
        (&["lru-batch", "--jobs", "0"], "--jobs"),
        (&["lru-batch", "--seconds", "0"], "--seconds"),
        (&["lru-batch", "--seconds=-1"], "--seconds"),
        (&[], "<TABLE:CASE>"),
    ] {
        let ended = finish(locks(args));
        let line = ended.complaint("uzram-lab", 2);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
}

#[cfg(not(feature = "lock-stats"))]
mod without_statistics {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_program_that_records_is_started_or_the_command_that_builds_it_told() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (from, lab) = (Path::new(env!("CARGO_BIN_EXE_uzram-lab")), dir.path().join("uzram-lab"));
        fs::hard_link(from, &lab).or_else(|_| fs::copy(from, &lab).map(drop)).unwrap();
        let run = || {
            let mut command = Command::new(&lab);
            command.args(["locks", "zs-free:run-cache", "--jobs", "2"]).env("PATH", elsewhere.path());
            finish(command)
        };
        let ended = run();
        let line = ended.complaint("uzram-lab", 1);
        let build = "`cargo build --release -p uzram-lab --features lock-stats --bin uzram-lab-locks`";
        assert!(line.contains(build), "{line}");
        for dir in [elsewhere.path(), dir.path()] {
            let program = dir.join("uzram-lab-locks");
            fs::write(&program, "#!/bin/sh\necho \"$0\" \"$@\"\nexit 7\n").unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let ended = run();
            let wanted = format!("{} zs-free:run-cache --jobs 2\n", program.display());
            assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(7), wanted.as_str()));
        }
    }
}

#[cfg(feature = "lock-stats")]
mod with_statistics {
    use std::collections::BTreeMap;

    use serde_json::Value;
    use uzram_lab::locks::HEADINGS;
    use uzram_lab::tables::TABLES;

    use super::*;
    use crate::common::{collect, start};

    /// Writes a small corpus, whose pages are all different.
    fn corpus() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pages: Vec<u8> = (0..256 << 12).map(|at| (at / 7) as u8).collect();
        std::fs::write(file.path(), pages).unwrap();
        file
    }

    /// The figures of each class, by heading.
    type Rows = BTreeMap<String, BTreeMap<&'static str, f64>>;

    /// Parses the text of one design as a reader of `/proc/lock_stat` would.
    fn parse(text: &str) -> Rows {
        let lines = text.lines().skip_while(|line| !line.trim_start().starts_with("class name"));
        let mut lines = lines.map(str::split_whitespace);
        assert_eq!(lines.next().unwrap().collect::<Vec<_>>().join(" "), HEADINGS.join(" "));
        let row = |mut cells: std::str::SplitWhitespace<'_>| {
            let class = cells.next().unwrap().strip_suffix(':').unwrap().to_owned();
            let figures: Vec<f64> = cells.map(|cell| cell.parse().unwrap()).collect();
            assert_eq!(figures.len(), HEADINGS.len() - 1, "{class}");
            (class, HEADINGS[1..].iter().copied().zip(figures).collect())
        };
        lines.map(row).collect()
    }

    /// Checks what is true of every class. Times are printed to 10 ns.
    fn assert_adds_up(rows: &Rows) {
        assert!(!rows.is_empty());
        for (class, row) in rows {
            let of = |heading: &str| row[heading];
            assert!(of("acq-bounces") <= of("acquisitions"), "{class}: {row:?}");
            assert!(of("con-bounces") <= of("contentions"), "{class}: {row:?}");
            for (count, times) in [("contentions", "waittime"), ("acquisitions", "holdtime")] {
                let [min, max, total, avg] =
                    ["min", "max", "total", "avg"].map(|which| of(&format!("{times}-{which}")));
                assert!(min <= avg + 0.01 && avg <= max + 0.01 && max <= total + 0.01, "{class}: {row:?}");
                let counted = avg * of(count);
                assert!((counted - total).abs() <= 0.006 * of(count) + 0.01, "{class}: {row:?}");
                assert_eq!(of(count) == 0.0, total == 0.0, "{class}: {row:?}");
            }
        }
    }

    /// Three threads free objects: which locks a free takes is known of every design.
    #[test]
    fn columns_parse_back_and_add_up() {
        let corpus = corpus();
        let args =
            ["zs-free:run-cache", "--jobs", "3", "--seconds", "0.05", "--design", "split,class-indexed"];
        let mut command = locks(&args);
        let text = collect(start(command.arg("--corpus").arg(corpus.path()))).ok();
        let (split, indexed) = text.split_once("\n\n").unwrap();
        assert!(split.starts_with("zs-free:run-cache, split, 3 jobs: "), "{split}");
        for text in [split, indexed] {
            let rows = parse(text);
            assert_adds_up(&rows);
            let head = text.lines().next().unwrap().split_once(": ").unwrap().1;
            let objects: f64 = head.split(' ').next().unwrap().parse().unwrap();
            let taken = rows["size_class"]["acquisitions"];
            // The threads' shares are rounded up.
            assert!(taken >= objects && taken < 1.01 * objects + 3000.0, "{taken} of {objects}");
            let looked_up = rows.get("zs_pool-R").map(|row| row["acquisitions"]);
            assert_eq!(looked_up, text.contains(" split,").then_some(taken), "{text}");
            assert!(!rows.contains_key("slot"), "{text}");
        }
    }

    /// Every case of every table is recorded, in text and in JSON, by either program.
    #[test]
    fn every_case_is_recorded() {
        let corpus = corpus();
        for table in TABLES.iter().filter(|table| !table.length.is_fixed()) {
            for case in table.case_names() {
                let name = format!("{}:{case}", table.name);
                let args = [&name[..], "--jobs", "2", "--seconds", "0.005", "--json"];
                let mut command = locks(&args);
                let text = collect(start(command.arg("--corpus").arg(corpus.path()))).ok();
                let json: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(
                    (&json["table"], &json["case"], &json["jobs"]),
                    (&table.name.into(), &case.into(), &2.into())
                );
                assert_eq!(json["design"], (table.designs)().after);
                assert!(json["elapsed_s"].as_f64().unwrap() >= 0.005 && json["work"].as_u64().unwrap() > 0);
                let locks = json["locks"].as_array().unwrap();
                let taken: u64 = locks.iter().map(|lock| lock["acquisitions"].as_u64().unwrap()).sum();
                assert!(taken > 0, "{name}");
                assert!(locks.iter().all(|lock| lock["class"].is_string()), "{name}");
            }
        }
        let Some(program) = option_env!("CARGO_BIN_EXE_uzram-lab-locks") else { return };
        let mut command = Command::new(program);
        command.args(["lru-batch", "--design", "single-lock", "--seconds", "0.005"]);
        let text = finish(command).ok();
        let rows = parse(&text);
        assert_adds_up(&rows);
        assert!(rows["lru_lock"]["acquisitions"] > 0.0 && !rows.contains_key("lru_batch"), "{text}");
    }

    #[test]
    fn a_design_that_the_table_does_not_have_is_named() {
        let ended = finish(locks(&["lru-batch", "--design", "frozen", "--seconds", "0.01"]));
        assert!(ended.complaint("uzram-lab", 2).contains("frozen"), "{}", ended.stderr);
    }
}
