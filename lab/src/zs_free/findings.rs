//! Findings beyond the expectations: sentences whose figures are those of the rows, or published.

use uzram::zsmalloc::design::PoolLocks;

use super::{AFTER, BEFORE, ClassInWord, NO_RUN_CACHE, NoPoolLock, PagesAfterLock, RUN_CACHE};
use crate::experiment::{Row, Side, busiest, jobs_text, median_of};

pub(super) fn paragraphs(rows: &[Row], cpus: usize) -> Vec<String> {
    let of_case = |case| [steps(case, rows), hold_times(case, rows, cpus)];
    [RUN_CACHE, NO_RUN_CACHE].into_iter().flat_map(of_case).flatten().collect()
}

/// Returns the gain of each step.
fn steps(case: &str, rows: &[Row]) -> Option<String> {
    let steps = [BEFORE, ClassInWord::NAME, NoPoolLock::NAME, AFTER];
    let ns = |design: &str| median_of(rows, case, design, "ns_per_object");
    let series =
        steps.iter().map(|step| Some(format!("{:.0} ({step})", ns(step)?))).collect::<Option<Vec<_>>>()?;
    Some(format!(
        "The steps, {}, ns an object, median of the rows with 2 jobs or more: {}; the last step alone: {:.0}.",
        case,
        series.join(", "),
        ns(PagesAfterLock::NAME)?
    ))
}

/// Returns the expected contention, estimated from the time for which lists are locked. (The pool's lock
/// costs two atomic additions to a cache line that all CPUs share. That cost grows with their number and is
/// not part of this.)
fn hold_times(case: &str, rows: &[Row], cpus: usize) -> Option<String> {
    let rows = rows.iter().filter(|row| row.before.design == BEFORE && row.case == case);
    let row = busiest(rows, cpus)?;
    let held_ns = |side: &Side| side.median("lists_hold_ns_per_object").filter(|ns| *ns > 0.0);
    let (before_ns, after_ns) = (held_ns(&row.before)?, held_ns(&row.after)?);
    let classes = row.before.median("equal_classes")?;
    // The fraction of the time for which one thread has a class's lists locked, as if all classes were used
    // equally.
    let taken = |side: &Side, held_ns: f64| {
        Some(100.0 * (held_ns / side.median("cpu_ns_per_object")?).min(1.0) / classes)
    };
    Some(format!(
        "Why, {}: with {}, lists are locked for {before_ns:.0} ns of an object's {:.0} with {BEFORE} and for {after_ns:.0} of {:.0} with {AFTER}. The objects are of so many classes as {classes:.0} with as many objects each, so that a CPU's free finds its class's lock taken by a given other CPU in about {:.1} % and {:.1} % of the cases.",
        case,
        jobs_text(row.jobs),
        row.before.median("cpu_ns_per_object")?,
        row.after.median("cpu_ns_per_object")?,
        taken(&row.before, before_ns)?,
        taken(&row.after, after_ns)?
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::zsmalloc::design::Pinned;

    use super::super::SERIES;
    use super::*;
    use crate::experiment::testing::{row, side, verdict_text};

    fn measured(design: &str, elapsed_s: f64, pool_locks: f64, held_ns: f64) -> Side {
        let values = [
            ("elapsed_s", elapsed_s),
            ("user_s", 0.5 * elapsed_s),
            ("system_s", 0.25),
            ("ns_per_object", 100.0 * elapsed_s),
            ("cpu_ns_per_object", 200.0),
            ("pool_locks_per_object", pool_locks),
            ("locked_frees_per_zspage", pool_locks),
            ("lists_hold_ns_per_object", held_ns),
            ("equal_classes", 40.0),
        ];
        side(design, &values)
    }

    /// Returns rows in which split took `ratio` times as long as class-indexed, and pinned half as long.
    fn rows_of(case: &str, jobs: usize, ratio: f64) -> Vec<Row> {
        let after = || measured(AFTER, 1.0, 0.0, 20.0);
        let row = |before, after| row(&SERIES, case, jobs, before, after);
        let step = |design: &str| row(measured(design, ratio, 1.0, 80.0), after());
        vec![
            step(BEFORE),
            step(ClassInWord::NAME),
            step(NoPoolLock::NAME),
            step(PagesAfterLock::NAME),
            row(after(), measured(Pinned::NAME, 0.5, 0.0, 10.0)),
        ]
    }

    #[test]
    fn expectations_that_are_met_are_told() {
        let rows =
            [(1, 1.06), (2, 1.41), (4, 1.41)].map(|(jobs, ratio)| rows_of(RUN_CACHE, jobs, ratio)).concat();
        let verdict = verdict_text(&SERIES, &rows);
        for said in [
            "pool_locks_per_object: class-indexed should have at most 0.00 with any number of jobs, and has 0.00 at most in 3 rows; split has 1.00.",
            "locked_frees_per_zspage: class-indexed should have at most 0.00",
            "Speed, run-cache: class-indexed should be at least 1.05 times as fast as split with 1 job, and is in 1 of 1 rows; reached with 1 job: 1.060 [1.060, 1.060]. By processor time with 1 job: 1.040 [1.040, 1.040]. Published with 1 job: 1.194.",
            // 0.705 + 0.25 s and 0.5 + 0.25.
            "at least 1.40 times as fast as split with 2 jobs or more, and is in 2 of 2 rows; reached with 2 jobs: 1.410 [1.410, 1.410], 4 jobs: 1.410 [1.410, 1.410]. By processor time with 2 jobs: 1.273 [1.273, 1.273], 4 jobs: 1.273 [1.273, 1.273]. Published with 2 jobs: 1.401, 4 jobs: 1.391.",
            "Speed, no-run-cache: not measured with 1 job,",
            "141 (split), 141 (class-in-word), 141 (no-pool-lock), 100 (class-indexed); the last step alone: 141",
            // 80 of 200 ns, and 20, over 40 classes.
            "with 2 jobs, lists are locked for 80 ns of an object's 200 with split and for 20 of 200",
            "in about 1.0 % and 0.2 % of the cases",
            "Beyond the series, pinned against class-indexed, times as fast, median and range of the rows: 2.00 (2.00 to 2.00) in run-cache.",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn expectations_that_are_missed_are_told() {
        let mut rows = [rows_of(NO_RUN_CACHE, 1, 1.04), rows_of(NO_RUN_CACHE, 4, 1.5)].concat();
        rows[0].after.values.insert("pool_locks_per_object", vec![0.0, 0.0, 0.01]);
        let verdict = verdict_text(&SERIES, &rows);
        for said in [
            "pool_locks_per_object, MISSED:",
            "has 0.01 at most in 2 rows;",
            "Speed, no-run-cache, MISSED:",
            "is in 1 of 1 rows; reached with 4 jobs: 1.50",
            "is in 0 of 1 rows; missed with 1 job: 1.04",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
    }
}
