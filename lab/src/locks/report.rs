//! Recorded locks as a table in the columns of `/proc/lock_stat`, and as JSON.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::experiment::{Series, jobs_text};
use uzram_bench::harness::report::Table;

/// The columns, which are the kernel's (Documentation/locking/lockstat.rst). Times are in µs.
pub const HEADINGS: [&str; 13] = [
    "class name",
    "con-bounces",
    "contentions",
    "waittime-min",
    "waittime-max",
    "waittime-total",
    "waittime-avg",
    "acq-bounces",
    "acquisitions",
    "holdtime-min",
    "holdtime-max",
    "holdtime-total",
    "holdtime-avg",
];

/// The locks of a class. `-R` after its name means held by readers, `-W` by a writer.
#[derive(Clone, Debug)]
pub(crate) struct LockRow {
    class: String,
    contentions: u64,
    acquisitions: u64,
    /// Those of [`HEADINGS`] after the first.
    figures: Vec<Value>,
}

impl LockRow {
    /// Makes a row of waits and of acquisitions, each with the number of those that bounced, and how many
    /// there were, the shortest that took any time, the longest, and all together in ns.
    pub(crate) fn new(
        class: &str,
        (con_bounces, wait): (u64, [u64; 4]),
        (acq_bounces, hold): (u64, [u64; 4]),
    ) -> LockRow {
        let figures = |bounces: u64, [count, min_ns, max_ns, total_ns]: [u64; 4]| -> [Value; 6] {
            let [min, max, total] = [min_ns, max_ns, total_ns].map(|ns| ns as f64 / 1e3);
            let avg = total / count.max(1) as f64;
            [bounces.into(), count.into(), min.into(), max.into(), total.into(), avg.into()]
        };
        let figures = [figures(con_bounces, wait), figures(acq_bounces, hold)].concat();
        LockRow { class: class.to_owned(), contentions: wait[0], acquisitions: hold[0], figures }
    }

    fn cells(&self) -> impl Iterator<Item = String> {
        let figure = |figure: &Value| match figure.as_u64() {
            Some(count) => count.to_string(),
            None => format!("{:.2}", figure.as_f64().unwrap_or_default()),
        };
        // The colon is the kernel's: `grep :` finds the rows.
        std::iter::once(format!("{}:", self.class)).chain(self.figures.iter().map(figure))
    }
}

/// Its keys are the columns' names.
impl Serialize for LockRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let key = |heading: &str| {
            let unit = if heading.contains("time-") { "_us" } else { "" };
            heading.replace('-', "_") + unit
        };
        let figures = HEADINGS[1..].iter().map(|heading| key(heading)).zip(self.figures.iter().cloned());
        serializer
            .collect_map(std::iter::once(("class".to_owned(), self.class.clone().into())).chain(figures))
    }
}

/// The recorded locks of a design in a case, the most contended first. `Display` prints them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LocksReport {
    table: &'static str,
    case: String,
    design: String,
    jobs: usize,
    /// The time that was recorded, from the first job's start to the last one's end.
    elapsed_s: f64,
    /// About how many units of work were done.
    work: u64,
    unit: &'static str,
    locks: Vec<LockRow>,
}

impl LocksReport {
    pub(crate) fn new(
        table: &Series,
        case: &str,
        design: &str,
        jobs: usize,
        (elapsed, work): (Duration, u64),
        mut locks: Vec<LockRow>,
    ) -> LocksReport {
        locks.sort_by_key(|row| std::cmp::Reverse((row.contentions, row.acquisitions)));
        LocksReport {
            table: table.name,
            case: case.to_owned(),
            design: design.to_owned(),
            jobs,
            elapsed_s: elapsed.as_secs_f64(),
            work,
            unit: table.unit.name(),
            locks,
        }
    }
}

impl fmt::Display for LocksReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LocksReport { table, case, design, elapsed_s, work, unit, .. } = self;
        writeln!(
            f,
            "{table}:{case}, {design}, {}: {work} {unit}s in {elapsed_s:.2} s, {:.1} ns for each",
            jobs_text(self.jobs),
            elapsed_s * 1e9 / (*work).max(1) as f64
        )?;
        let mut rows = Table::new(HEADINGS);
        self.locks.iter().for_each(|row| rows.row(row.cells()));
        write!(f, "{rows}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zs_free;
    use uzram_bench::harness::to_json;

    fn report() -> LocksReport {
        let rows = vec![
            LockRow::new("size_class", (1, [2, 90, 1910, 2000]), (9, [4000, 21, 10_000, 123_456_789])),
            LockRow::new("zs_pool-R", (2, [3, 1000, 1000, 3000]), (50, [4000, 0, 0, 0])),
            LockRow::new("arena", (0, [0; 4]), (1, [4001, 5, 5, 20_005])),
            LockRow::new("run_cache", (0, [0; 4]), (1, [7, 5, 6, 40])),
        ];
        let done = (Duration::from_millis(500), 2_000_000);
        LocksReport::new(&zs_free::SERIES, "run-cache", "split", 2, done, rows)
    }

    #[test]
    fn the_most_contended_class_comes_first_in_the_kernels_columns() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "zs-free:run-cache, split, 2 jobs: 2000000 objects in 0.50 s, 250.0 ns for each"
        );
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>().join(" "), HEADINGS.join(" "));
        let cells: Vec<Vec<&str>> = lines[2..].iter().map(|line| line.split_whitespace().collect()).collect();
        let classes: Vec<&str> = cells.iter().map(|cells| cells[0]).collect();
        assert_eq!(classes, ["zs_pool-R:", "size_class:", "arena:", "run_cache:"]);
        let wanted = "size_class: 1 2 0.09 1.91 2.00 1.00 9 4000 0.02 10.00 123456.79 30.86";
        assert_eq!(cells[1].join(" "), wanted);
        assert_eq!(cells[2].join(" "), "arena: 0 0 0.00 0.00 0.00 0.00 1 4001 0.01 0.01 20.00 0.01");
        // Columns are aligned right.
        let ends: Vec<usize> = lines[1..].iter().map(|line| line.len()).collect();
        assert!(ends.windows(2).all(|ends| ends[0] == ends[1]), "{text}");
    }

    #[test]
    fn the_json_has_the_documented_form() {
        let json: serde_json::Value = serde_json::from_str(&to_json(&report())).unwrap();
        assert_eq!(json["locks"].as_array().unwrap().len(), 4);
        let wanted = serde_json::json!({
            "class": "zs_pool-R",
            "con_bounces": 2, "contentions": 3,
            "waittime_min_us": 1.0, "waittime_max_us": 1.0, "waittime_total_us": 3.0, "waittime_avg_us": 1.0,
            "acq_bounces": 50, "acquisitions": 4000,
            "holdtime_min_us": 0.0, "holdtime_max_us": 0.0, "holdtime_total_us": 0.0, "holdtime_avg_us": 0.0,
        });
        assert_eq!(json["locks"][0], wanted);
        let mut head = json;
        head.as_object_mut().unwrap().remove("locks");
        let wanted = serde_json::json!({
            "table": "zs-free", "case": "run-cache", "design": "split", "jobs": 2,
            "elapsed_s": 0.5, "work": 2_000_000, "unit": "object",
        });
        assert_eq!(head, wanted);
    }
}
