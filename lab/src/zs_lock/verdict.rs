//! What the rows of the table come to, in words. All figures in it are those of the rows, or published
//! ones.

use std::fmt::Write;

use super::{AFTER, BEFORE, BEYOND, published};
use crate::experiment::{Row, Side};
use uzram_bench::harness::stats::{PairedRatio, can_judge, coverage, median};

/// How far the interval of the ratio may reach from 1.
const WANTED: f64 = 0.03;

/// The verdict.
pub(super) fn of(rows: &[Row]) -> Vec<String> {
    let mut verdict = vec![as_fast(rows)];
    verdict.extend(waiting(rows));
    verdict.extend(BEYOND.iter().filter_map(|design| beyond(rows, design)));
    verdict
}

fn the_row(rows: &[Row]) -> Option<&Row> {
    rows.iter().find(|row| row.before.design == BEFORE && row.jobs == published::THREADS)
}

/// Whether one lock is as fast as two kinds of them.
fn as_fast(rows: &[Row]) -> String {
    let threads = published::THREADS;
    let Some(row) = the_row(rows) else {
        return format!("Speed: not measured with {threads} threads, so nothing is said of it.");
    };
    let rounds = row.after.values.get("elapsed_s").map_or(0, Vec::len);
    if !can_judge(rounds) {
        return "Speed: not judged; it takes 5 rounds or more to tell a difference from the noise."
            .to_owned();
    }
    let allowed = 1.0 - WANTED..=1.0 + WANTED;
    let within = allowed.contains(&row.ratio_low) && allowed.contains(&row.ratio_high);
    let beyond = row.ratio_high < *allowed.start() || row.ratio_low > *allowed.end();
    let percent = 100.0 * WANTED;
    let outcome = if within {
        format!("all of it within the {percent:.0} % wanted")
    } else if beyond {
        format!("all of it beyond the {percent:.0} % wanted")
    } else {
        format!(
            "which reaches beyond the {percent:.0} % wanted on one side or both: more rounds may narrow it"
        )
    };
    let [btrfs, ext4] = published::changes_percent();
    let by_processor_time = row.processor_time().map_or_else(String::new, |PairedRatio { ratio, low, high, .. }| {
        format!(" By processor time, which leaves out waiting and which other programs disturb less, it is {ratio:.3} [{low:.3}, {high:.3}] times as fast.")
    });
    format!(
        "Speed{}: with {threads} threads {AFTER} does {:.3} times the files a second of {BEFORE}, with a {:.0} % interval from {:.3} to {:.3}, {outcome}.{by_processor_time} Published: {btrfs:+.1} % on btrfs, {ext4:+.1} % on ext4.",
        if within { "" } else { ", MISSED" },
        row.ratio,
        100.0 * coverage(rounds),
        row.ratio_low,
        row.ratio_high
    )
}

/// How often threads waited for a lock.
fn waiting(rows: &[Row]) -> Option<String> {
    let row = the_row(rows)?;
    let sleeps = |side: &Side| Some(1000.0 * side.mean("voluntary_switches_per_page")?);
    let (before, after) = (sleeps(&row.before)?, sleeps(&row.after)?);
    Some(format!(
        "Waiting: for 1000 pages that {} threads wrote, each after it was compressed, and as many read and deleted, a thread slept {before:.2} times with {BEFORE} and {after:.2} times with {AFTER}.",
        row.jobs
    ))
}

/// What a design that came later gains over the single lock.
fn beyond(rows: &[Row], design: &str) -> Option<String> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.after.design == design).collect();
    if rows.is_empty() {
        return None;
    }
    let ratios: Vec<f64> = rows.iter().map(|row| row.ratio).collect();
    let mut text = format!(
        "Beyond the series, {design} is {:.2} times as fast as {AFTER}, median of the rows (",
        median(&ratios)
    );
    for (i, row) in rows.iter().enumerate() {
        let comma = if i > 0 { ", " } else { "" };
        let jobs = if row.jobs == 1 { "job" } else { "jobs" };
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{comma}{} {jobs}: {:.2} [{:.2}, {:.2}]",
            row.jobs, row.ratio, row.ratio_low, row.ratio_high
        );
    }
    Some(text + ").")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::experiment::Values;

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
        let verdict = of(&turn(32, &[1.01; 9])).join("\n");
        for said in [
            "Speed: with 32 threads consolidated does 1.010 times the files a second of split, with a 96 % interval from 1.010 to 1.010, all of it within the 3 % wanted. By processor time, which leaves out waiting and which other programs disturb less, it is 1.010 [1.010, 1.010] times as fast. Published: -0.3 % on btrfs, -0.9 % on ext4.",
            "slept 2.00 times with split",
            "pinned is 2.00 times as fast as consolidated, median of the rows (32 jobs: 2.00 [2.00, 2.00])",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
        for (ratio, said) in [(0.96, "all of it beyond"), (1.04, "all of it beyond")] {
            let verdict = of(&turn(32, &[ratio; 9]))[0].clone();
            assert!(verdict.contains("MISSED") && verdict.contains(said), "{verdict}");
        }
        let wide = of(&turn(32, &[0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1]))[0].clone();
        assert!(wide.contains("Speed, MISSED") && wide.contains("more rounds"), "{wide}");
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        assert!(of(&turn(8, &[1.0; 9]))[0].contains("not measured with 32 threads"));
        assert!(of(&turn(32, &[1.0; 4]))[0].contains("not judged"));
        assert!(of(&[])[0].contains("not measured"));
    }
}
