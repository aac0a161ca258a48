//! Findings beyond the expectations: sentences whose figures are those of the rows, or published.

use super::{AFTER, BEFORE, published};
use crate::experiment::{Row, Side};

pub(super) fn paragraphs(rows: &[Row], _cpus: usize) -> Vec<String> {
    waiting(rows).into_iter().collect()
}

/// Returns how often threads waited for a lock.
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
    use crate::experiment::testing::{row, verdict_text};

    /// Returns a design that took these seconds, one number a round.
    fn side(design: &str, elapsed_s: &[f64]) -> Side {
        let half: Vec<f64> = elapsed_s.iter().map(|seconds| 0.5 * seconds).collect();
        let values = [
            ("elapsed_s", elapsed_s.to_vec()),
            ("user_s", half.clone()),
            ("system_s", half),
            ("voluntary_switches_per_page", vec![0.002; elapsed_s.len()]),
        ];
        Side { design: design.to_owned(), values: values.into() }
    }

    /// Returns rows in which split took so many times as long as consolidated, one ratio a round.
    fn rows_of(jobs: usize, ratios: &[f64]) -> Vec<Row> {
        let row = |before, after| row(&SERIES, "files", jobs, before, after);
        let after = || side(AFTER, &vec![1.0; ratios.len()]);
        let half = |design| row(after(), side(design, &vec![0.5; ratios.len()]));
        vec![row(side(BEFORE, ratios), after()), half(BEYOND[0]), half(BEYOND[1])]
    }

    #[test]
    fn a_speed_is_met_with_its_whole_interval_within_the_bounds() {
        let wanted = "consolidated should be from 0.97 to 1.03, with the whole interval, times as fast as split with 32 jobs, and is in";
        let met = "Speed, files:";
        let missed = "Speed, files, MISSED:";
        // The interval of 9 rounds is from the second smallest ratio to the second largest.
        let across = [0.9, 0.96, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1];
        let odd_rounds = [0.9, 0.98, 1.0, 1.0, 1.0, 1.0, 1.0, 1.02, 1.1];
        for (ratios, judged, gain) in [
            ([1.01; 9], [met, "1 of 1 rows; reached"], "1.010 [1.010, 1.010]"),
            (odd_rounds, [met, "1 of 1 rows; reached"], "1.000 [0.980, 1.020]"),
            ([0.96; 9], [missed, "0 of 1 rows; missed"], "0.960 [0.960, 0.960]"),
            ([1.04; 9], [missed, "0 of 1 rows; missed"], "1.040 [1.040, 1.040]"),
            (across, [missed, "0 of 1 rows; missed"], "1.000 [0.960, 1.000]"),
        ] {
            let verdict = verdict_text(&SERIES, &rows_of(32, &ratios));
            let said = format!(
                "{} {wanted} {} with 32 jobs: {gain}. By processor time with 32 jobs: {gain}. Published with 32 jobs: 0.997.",
                judged[0], judged[1]
            );
            assert_eq!(verdict.lines().next(), Some(said.as_str()));
        }
    }

    #[test]
    fn sleeps_and_later_designs_are_told() {
        let verdict = verdict_text(&SERIES, &rows_of(32, &[1.01; 9]));
        for said in [
            "slept 2.00 times with split and 2.00 times with consolidated.",
            "pinned against consolidated, times as fast, median and range of the rows: 2.00 (2.00 to 2.00) in files.",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
    }

    #[test]
    fn rows_that_were_not_measured_are_not_judged() {
        assert!(verdict_text(&SERIES, &rows_of(8, &[1.0; 9])).contains("not measured with 32 jobs"));
        assert!(verdict_text(&SERIES, &rows_of(32, &[1.0; 4])).contains("not judged"));
    }
}
