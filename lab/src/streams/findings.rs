//! Findings beyond the expectations: sentences whose figures are those of the rows, or published.

use std::fmt::Write;

use super::{ALL_SIX, published};
use crate::experiment::{Row, Side};
use uzram_bench::harness::stats::median;

pub(super) fn paragraphs(rows: &[Row], cpus: usize) -> Vec<String> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.case != ALL_SIX).collect();
    let crowded: Vec<&Row> = rows.iter().copied().filter(|row| row.jobs > cpus && writes(row)).collect();
    let mut findings: Vec<String> = gains(&rows).into_iter().collect();
    if !crowded.is_empty() {
        findings.push(waiting(&crowded));
    }
    findings.push(why(&rows, &crowded));
    findings
}

fn writes(row: &Row) -> bool {
    row.after.values.contains_key("sleeps_per_write")
}

/// Returns the gain of writers, beside the published one.
fn gains(rows: &[&Row]) -> Option<String> {
    let several = rows.iter().filter(|row| row.jobs > 1 && writes(row));
    let gains = several.filter_map(|row| Some((row.gain.ratio, row.published.as_ref()?.ratio)));
    let (ours, theirs): (Vec<f64>, Vec<f64>) = gains.unzip();
    (!ours.is_empty()).then(|| {
        format!(
            "Median gain of the rows that write with 2 jobs or more: {:.2} here, {:.2} published.",
            median(&ours),
            median(&theirs)
        )
    })
}

/// Returns 1000 times a quantity, the mean over rows and rounds.
fn per_1000<'a>(sides: impl Iterator<Item = &'a Side>, quantity: &str) -> f64 {
    let means: Vec<f64> = sides.filter_map(|side| side.mean(quantity)).collect();
    1000.0 * means.iter().sum::<f64>() / means.len().max(1) as f64
}

/// Returns the rows of each list, in the order in which the lists occur.
fn by_list<'a>(rows: &[&'a Row]) -> Vec<(&'a str, Vec<&'a Row>)> {
    let mut lists: Vec<(&str, Vec<&Row>)> = Vec::new();
    for &row in rows {
        match lists.iter_mut().find(|(list, _)| *list == row.before.design) {
            Some((_, rows)) => rows.push(row),
            None => lists.push((&row.before.design, vec![row])),
        }
    }
    lists
}

/// Returns how often threads slept for a stream of each list.
fn waiting(crowded: &[&Row]) -> String {
    let sleeps = |side: &Side| side.mean("sleeps_per_write").is_some_and(|sleeps| sleeps > 0.0);
    let mut text = String::from("Waiting for a stream, in the rows that write with more jobs than CPUs:");
    for (list, rows) in by_list(crowded) {
        let slept = rows.iter().filter(|row| sleeps(&row.before)).count();
        let streams: usize = list.parse().unwrap_or(0);
        let can_run_dry = rows.iter().filter(|row| row.jobs > streams).count();
        let _ = write!(
            text,
            " the list of {list} slept in {slept} of {} ({can_run_dry} have more jobs than it has streams), {:.3} times for 1000 writes;",
            rows.len(),
            per_1000(rows.iter().map(|row| &row.before), "sleeps_per_write")
        );
    }
    text
}

/// Explains from the counters why the gain is smaller than the kernel's. (By its author's account each write
/// took a contended spinlock twice, and a task preempted while it held the last stream kept the others
/// asleep. Here a thread that waits for the lock soon sleeps instead of spinning, so the lock costs little
/// beside the compression; and when the holders of all streams are preempted, the next thread makes a spare
/// one.)
fn why(rows: &[&Row], crowded: &[&Row]) -> String {
    let mut text = String::from("Why the kernel gained more.");
    if let Some(published) = published::of_all(4, 0) {
        let saved = |name: &str| {
            let (before, after) = (&published.before.values, &published.after.values);
            let value = |values: &std::collections::BTreeMap<&str, f64>| values.get(name).copied();
            value(after).zip(value(before)).map_or(f64::NAN, |(after, before)| 100.0 * (1.0 - after / before))
        };
        let _ = write!(
            text,
            " With 4 jobs per-cpu streams saved the kernel {:.1} % of its instructions, but {:.0} % of the cycles that stalled and {:.0} % of the time: what the list cost was waiting, not work.",
            saved("instructions"),
            saved("stalled_cycles_frontend"),
            saved("elapsed_s")
        );
    }
    let alone: Vec<f64> = rows
        .iter()
        .filter(|row| row.jobs == 1 && !row.after.values.contains_key("read_mb_per_s"))
        .filter_map(|row| row.after.median("write_mb_per_s"))
        .collect();
    // 10^6 bytes a second are bytes a microsecond.
    let page_us = uzram::units::PAGE_SIZE as f64 / median(&alone);
    if page_us.is_finite() {
        let _ = write!(
            text,
            " Here a write takes {page_us:.0} µs, beside which the list's lock is held for a few instructions."
        );
    }
    if crowded.is_empty() {
        return text;
    }
    let _ = write!(text, " What is left of the effect are the counters, with more jobs than CPUs:");
    let switches = |side: &dyn Fn(&Row) -> Side, rows: &[&Row]| {
        let sides: Vec<Side> = rows.iter().map(|row| side(row)).collect();
        per_1000(sides.iter(), "voluntary_switches_per_page")
    };
    let lists = by_list(crowded);
    for (list, rows) in &lists {
        let _ = write!(
            text,
            " the list of {list} gave the CPU away {:.2} times for 1000 pages,",
            switches(&|row| row.before.clone(), rows)
        );
    }
    if let Some((_, rows)) = lists.first() {
        let _ = write!(text, " percpu {:.2} times.", switches(&|row| row.after.clone(), rows));
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::SERIES;
    use super::*;
    use crate::experiment::testing::{side, verdict_text};
    use uzram_bench::engine::Pattern;

    /// Returns a row of randwrite in which the list takes `ratio` times percpu's seconds.
    fn row(jobs: usize, ratio: f64, list_sleeps: f64, percpu_sleeps: f64) -> Row {
        let side = |design: &str, elapsed_s: f64, sleeps: f64| {
            let values = [
                ("elapsed_s", elapsed_s),
                ("write_mb_per_s", 400.0),
                ("voluntary_switches_per_page", sleeps),
                ("sleeps_per_write", sleeps),
            ];
            side(design, &values)
        };
        let (list, percpu) = (side("2", ratio, list_sleeps), side("percpu", 1.0, percpu_sleeps));
        // The designs depend on the number of CPUs: not all machines have a list of 2.
        let published = published::of_pattern(Pattern::RandWrite, jobs, 0);
        Row::new("randwrite", jobs, list, percpu, published).unwrap()
    }

    #[test]
    fn expectations_that_are_met_are_told() {
        let verdict = verdict_text(&SERIES, &[row(1, 1.0, 0.0, 0.0), row(4, 1.1, 0.02, 0.0)]);
        assert!(verdict.contains("and is in 2 of 2 rows") && verdict.contains("where 1 lie"), "{verdict}");
        assert!(verdict.contains("sleeps_per_write: percpu should have at most 0.00 with more jobs than CPUs, and has 0.00 at most in 1 rows"), "{verdict}");
        assert!(verdict.contains("list of 2 slept in 1 of 1"), "{verdict}");
        assert!(verdict.contains("1.10 here, 1.60 published"), "{verdict}");
        assert!(verdict.contains("a write takes 10 µs"), "{verdict}");
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn expectations_that_are_missed_are_told() {
        let verdict = verdict_text(&SERIES, &[row(1, 0.9, 0.0, 0.0), row(4, 1.0, 0.02, 0.01)]);
        assert!(verdict.contains("Speed, MISSED: percpu should be at least 1.00"), "{verdict}");
        assert!(
            verdict.contains("missed with randwrite, 1 job against 2: 0.900 [0.900, 0.900]"),
            "{verdict}"
        );
        assert!(
            verdict.contains("sleeps_per_write, MISSED: percpu should have at most 0.00 with more jobs than CPUs, and has 0.01"),
            "{verdict}"
        );
    }

    /// One interval of 60 below 1 is expected by chance.
    #[test]
    fn what_chance_explains_is_not_called_a_miss() {
        let mut rows = vec![row(1, 1.0, 0.0, 0.0); 59];
        rows.push(row(1, 0.99, 0.0, 0.0));
        let verdict = verdict_text(&SERIES, &rows);
        assert!(verdict.contains("Speed: ") && verdict.contains("is in 59 of 60 rows"), "{verdict}");
    }
}
