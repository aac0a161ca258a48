//! What two measured numbers say of more CPUs (docs/lab/scale.md): for how long an operation holds a lock,
//! and how long it takes besides. One job measures both.

use std::fmt;

use serde::Serialize;

use uzram::{Error, Result};
use uzram_bench::harness::report::Table;

use crate::experiment::{self, HeldLock, LabOptions, Row, Series, side, wrap};
use crate::tables::TABLES;

/// A lock of a design in a case, by the measurements of one job.
#[derive(Clone, Debug, Serialize)]
pub struct Saturation {
    case: String,
    design: String,
    lock: &'static str,
    locks: f64,
    /// CPU time of a page or object with one of the locks held, and besides.
    held_ns: f64,
    between_ns: f64,
    /// The CPUs that have all of the locks held all the time.
    saturating_cpus: f64,
    /// The most pages or objects a second, with so many CPUs or more.
    most_per_s: f64,
}

/// Published figures of several tasks, beside the most that the locks allow.
#[derive(Clone, Debug, Serialize)]
pub struct Beside {
    case: String,
    tasks: usize,
    before: String,
    after: String,
    gain: f64,
    /// How many times the work of one CPU so many do at most, before and after.
    at_most: [f64; 2],
}

/// The locks of a table's designs, and published figures beside them. `Display` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleReport {
    table: &'static str,
    series: String,
    unit: &'static str,
    locks: Vec<Saturation>,
    published: Vec<Beside>,
}

/// Measures a table with one job, and reports on its locks. The options' numbers of jobs are not used.
pub fn measure(table: &Series, options: &LabOptions) -> Result<ScaleReport> {
    let options = check(table, options)?;
    Ok(ScaleReport::new(table, &experiment::run(table, &options)?.rows))
}

/// Returns how the table is measured.
pub fn check(table: &Series, options: &LabOptions) -> Result<LabOptions> {
    if table.locks.is_empty() {
        let known = TABLES.iter().filter(|table| !table.locks.is_empty()).map(|table| table.name);
        let known = known.collect::<Vec<_>>().join(", ");
        return Err(Error::invalid(format!("'{}' measures no lock's hold time, only: {known}", table.name)));
    }
    let options = LabOptions { jobs: vec![1], ..options.clone() };
    options.estimate(table).map(|_| options)
}

/// What the columns mean.
const LEGEND: &str = "held: CPU time, ns, with the lock held, reading the clock included; between: \
    without; locks: how many of the kind are used equally; CPUs: so many have them held all the time; most: \
    millions a second then, and with more CPUs; at most: times the work of one CPU, before and after, with \
    as many CPUs as tasks. Bounds, no predictions: waiting and moving cache lines make speeds less";

impl ScaleReport {
    /// Makes a report of rows, of which those with one job count.
    pub fn new(table: &Series, rows: &[Row]) -> ScaleReport {
        let mut locks = Vec::new();
        for (case, _) in table.cases {
            for design in (table.designs)().all() {
                let of = |lock| Saturation::of(table, rows, case, &design, lock);
                locks.extend(table.locks.iter().filter_map(of));
            }
        }
        let published = table.cases.iter().flat_map(|(case, _)| beside(table, case, &locks)).collect();
        ScaleReport {
            table: table.name,
            series: table.reference(),
            unit: table.unit.name(),
            locks,
            published,
        }
    }

    /// Returns the tables with their headings: the locks, then the published figures.
    pub fn tables(&self) -> Vec<(String, Table)> {
        let mut tables = vec![
            (format!("Locks, by one job, for each {}", self.unit), self.locks_table()),
            ("Published, beside what the locks allow".to_owned(), self.published_table()),
        ];
        tables.retain(|(_, table)| !table.is_empty());
        tables
    }

    fn locks_table(&self) -> Table {
        let mut table =
            Table::new(["<case", "<design", "<lock", "locks", "held", "between", "CPUs", "most, M/s"]);
        for lock in &self.locks {
            table.row([
                lock.case.clone(),
                lock.design.clone(),
                lock.lock.to_owned(),
                format!("{:.0}", lock.locks),
                format!("{:.2}", lock.held_ns),
                format!("{:.1}", lock.between_ns),
                format!("{:.1}", lock.saturating_cpus),
                format!("{:.2}", lock.most_per_s / 1e6),
            ]);
        }
        table
    }

    fn published_table(&self) -> Table {
        let mut table = Table::new(["<case", "tasks", "<before", "at most", "<after", "at most", "gain"]);
        for Beside { case, tasks, before, after, gain, at_most } in &self.published {
            let [most_before, most_after] = at_most.map(|times| format!("{times:.1}"));
            let gain = format!("{gain:.2}");
            let tasks = tasks.to_string();
            table.row([case.clone(), tasks, before.clone(), most_before, after.clone(), most_after, gain]);
        }
        table
    }
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.table, self.series)?;
        for (heading, table) in self.tables() {
            write!(f, "\n{heading}\n{table}")?;
        }
        writeln!(f)?;
        wrap(f, LEGEND)
    }
}

impl Saturation {
    /// Returns a lock of a design, if it was held and measured with one job.
    fn of(table: &Series, rows: &[Row], case: &str, design: &str, lock: &HeldLock) -> Option<Saturation> {
        let side = side(rows.iter().filter(|row| row.case == case), 1, design)?;
        let held_ns = side.median(lock.held).filter(|ns| *ns > 0.0)?;
        let locks = lock.count.map_or(Some(1.0), |count| side.median(count))?;
        // Noise may make the parts larger than the whole.
        let all_ns = side.median(table.unit.costs()[1])?.max(held_ns);
        Some(Saturation {
            case: case.to_owned(),
            design: design.to_owned(),
            lock: lock.name,
            locks,
            held_ns,
            between_ns: all_ns - held_ns,
            saturating_cpus: locks * all_ns / held_ns,
            most_per_s: locks * 1e9 / held_ns,
        })
    }
}

/// Returns a case's published figures, of designs whose locks were measured.
fn beside(table: &Series, case: &str, locks: &[Saturation]) -> Vec<Beside> {
    let designs = (table.designs)();
    let saturating = |design: &str| {
        let of_design = locks.iter().filter(|lock| lock.case == case && lock.design == design);
        of_design.map(|lock| lock.saturating_cpus).reduce(f64::min)
    };
    let Some(after_cpus) = saturating(&designs.after) else { return Vec::new() };
    let mut found = Vec::new();
    for (at, before) in designs.before.iter().enumerate() {
        let Some(before_cpus) = saturating(before) else { continue };
        found.extend(table.all_published(case, at).map(|(tasks, published)| Beside {
            case: case.to_owned(),
            tasks,
            before: format!("{}: {}", published.before.design, published.before.figure),
            after: format!("{}: {}", published.after.design, published.after.figure),
            gain: published.ratio,
            at_most: [before_cpus, after_cpus].map(|cpus| cpus.min(tasks as f64)),
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::testing::{row, side};
    use crate::tables;

    #[test]
    fn a_lock_saturates_when_the_parts_with_it_held_make_a_whole() {
        let table = tables::table("lru-batch").unwrap();
        let held = |design: &str, held_ns: f64| {
            let values = [("elapsed_s", 1.0), ("cpu_ns_per_page", 100.0), (table.locks[0].held, held_ns)];
            side(design, &values)
        };
        let rows = [row(table, "page-fault", 1, held("single-lock", 25.0), held("splice", 5.0))];
        let report = ScaleReport::new(table, &rows);
        let [before, after] = &report.locks[..] else { panic!("{report}") };
        assert_eq!((before.between_ns, before.saturating_cpus, before.most_per_s), (75.0, 4.0, 4e7));
        assert_eq!((after.between_ns, after.saturating_cpus, after.most_per_s), (95.0, 20.0, 2e8));
        let sixteen = report.published.iter().find(|beside| beside.tasks == 16).unwrap();
        assert_eq!(sixteen.at_most, [4.0, 16.0]);
        let text = report.to_string();
        assert!(text.contains("4.15-rc2: 6445 k/s") && text.contains("splice: 8264 k/s"), "{text}");
        assert!(ScaleReport::new(table, &[]).tables().is_empty());
    }

    #[test]
    fn several_locks_of_a_kind_hold_for_all_together() {
        let table = tables::table("zs-free").unwrap();
        let lock = table.locks[0];
        let held = |design: &str| {
            let values = [("elapsed_s", 1.0), ("cpu_ns_per_object", 200.0), (lock.held, 80.0)];
            side(design, &[&values[..], &[(lock.count.unwrap(), 40.0)]].concat())
        };
        let rows = [row(table, "run-cache", 1, held("split"), held("class-indexed"))];
        assert_eq!(ScaleReport::new(table, &rows).locks[0].saturating_cpus, 100.0);
    }
}
