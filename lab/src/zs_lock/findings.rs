//! What the rows say beyond what was expected: sentences whose figures are those of the rows, or published.

use super::{AFTER, BEFORE, published};
use crate::experiment::{Row, Side};

/// How often threads waited for a lock.
pub(super) fn of(rows: &[Row]) -> Vec<String> {
    waiting(rows).into_iter().collect()
}

fn waiting(rows: &[Row]) -> Option<String> {
    let row = rows.iter().find(|row| row.before.design == BEFORE && row.jobs == published::THREADS)?;
    let sleeps = |side: &Side| Some(1000.0 * side.mean("voluntary_switches_per_page")?);
    let (before, after) = (sleeps(&row.before)?, sleeps(&row.after)?);
    Some(format!(
        "Waiting: for 1000 pages that {} threads wrote, each after it was compressed, and as many read and deleted, a thread slept {before:.2} times with {BEFORE} and {after:.2} times with {AFTER}.",
        row.jobs
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::{BEYOND, SERIES};
    use super::*;
    use crate::experiment::Values;
    use crate::experiment::expect::judge_on;

    fn said_of(rows: &[Row]) -> String {
        [judge_on(&SERIES, rows, 2), of(rows)].concat().join("\n")
    }

    fn side(design: &str, elapsed_s: &[f64]) -> Side {
        let half: Vec<f64> = elapsed_s.iter().map(|seconds| 0.5 * seconds).collect();
        let values = [
            ("elapsed_s", elapsed_s.to_vec()),
            ("user_s", half.clone()),
            ("system_s", half),
            ("voluntary_switches_per_page", vec![0.002; 9]),
        ];
        Side { design: design.to_owned(), values: Values::from(values) }
    }

    /// Split taking so many times as long as consolidated in 9 rounds.
    fn turn(jobs: usize, ratios: &[f64]) -> Vec<Row> {
        let row = |before: Side, after: Side| Row::new("files", jobs, before, after, None).unwrap();
        let after = || side(AFTER, &vec![1.0; ratios.len()]);
        let half = |design| row(after(), side(design, &vec![0.5; ratios.len()]));
        vec![row(side(BEFORE, ratios), after()), half(BEYOND[0]), half(BEYOND[1])]
    }

    #[test]
    fn an_interval_within_bounds_beyond_and_across_is_called_so() {
        let verdict = said_of(&turn(32, &[1.01; 9]));
        for said in [
            "Speed, files: consolidated should be from 0.97 to 1.03, with the whole interval, times as fast as split with 32 jobs, and is in 1 of 1 rows; reached with 32 jobs: 1.010 [1.010, 1.010]. By processor time: 1.010 [1.010, 1.010] with 32 jobs.",
            "slept 2.00 times with split",
            "pinned against consolidated, times as fast, median and range of the rows: 2.00 (2.00 to 2.00) in files.",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
        for ratio in [0.96, 1.04] {
            let verdict = said_of(&turn(32, &[ratio; 9]));
            assert!(verdict.contains("Speed, files, MISSED"), "{verdict}");
        }
        let wide = said_of(&turn(32, &[0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1]));
        assert!(wide.contains("Speed, files, MISSED"), "{wide}");
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        assert!(said_of(&turn(8, &[1.0; 9])).contains("not measured with 32 jobs"));
        assert!(said_of(&turn(32, &[1.0; 4])).contains("not judged"));
        assert!(said_of(&[]).contains("not measured"));
    }
}
