//! Tests of `uzram lab locks`: with the feature `lock-stats` what it records.

use std::process::Command;

use crate::common::finish;
use crate::lab;

fn locks(args: &[&str]) -> Command {
    let mut command = lab(&["locks"]);
    command.args(args);
    command
}

#[cfg(not(feature = "lock-stats"))]
#[test]
fn a_program_that_cannot_record_tells_the_command_that_builds_one() {
    let ended = finish(locks(&["zs-free:run-cache"]));
    let build = "`cargo build --release -p uzram-lab --features lock-stats --target-dir target/lock-stats`";
    assert!(ended.complaint("uzram-lab", 1).contains(build), "{}", ended.stderr);
}

#[cfg(feature = "lock-stats")]
mod with_statistics {
    use std::collections::BTreeMap;

    use serde_json::Value;
    use uzram_lab::locks::HEADINGS;
    use uzram_lab::tables::TABLES;

    use super::*;
    use crate::common::{collect, start};
    use crate::corpus;

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
        let dir = tempfile::tempdir().unwrap();
        let corpus = corpus(dir.path());
        let args =
            ["zs-free:run-cache", "--jobs", "3", "--seconds", "0.05", "--design", "split,class-indexed"];
        let mut command = locks(&args);
        let text = collect(start(command.arg("--corpus").arg(&corpus))).ok();
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

    #[test]
    fn every_case_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let corpus = corpus(dir.path());
        for table in TABLES.iter().filter(|table| !table.length.is_fixed()) {
            for case in table.case_names() {
                let name = format!("{}:{case}", table.name);
                let args = [&name[..], "--jobs", "2", "--seconds", "0.005", "--json"];
                let mut command = locks(&args);
                let text = collect(start(command.arg("--corpus").arg(&corpus))).ok();
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
        let text = finish(locks(&["lru-batch", "--design", "single-lock", "--seconds", "0.005"])).ok();
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
