//! What the rows of the table come to, in words. All figures in it are those of the rows, or
//! published ones.

use std::fmt::Write;

use super::{ALL_SIX, published};
use crate::experiment::{Row, Side};
use uzram_bench::harness::stats::{at_least, can_judge, coverage, median};

/// The most rows that are named one by one.
const MOST_NAMED: usize = 6;

/// The verdict on a machine with so many CPUs.
pub(super) fn of(rows: &[Row], cpus: usize) -> Vec<String> {
    let (_, rows): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.case == ALL_SIX);
    let mut verdict = vec![speed(&rows)];
    let crowded: Vec<&Row> = rows.iter().copied().filter(|row| row.jobs > cpus && writes(row)).collect();
    if crowded.is_empty() {
        verdict.push("Waiting: no row wrote with more jobs than CPUs, so nothing is said of it.".to_owned());
    } else {
        verdict.push(waiting(&crowded));
    }
    verdict.push(why(&rows, &crowded));
    verdict
}

fn writes(row: &Row) -> bool {
    row.after.values.contains_key("sleeps_per_write")
}

/// Whether percpu is at least as fast as a list in every row, within the noise.
fn speed(rows: &[&Row]) -> String {
    let mut text = speed_judged(rows);
    let gains: Vec<(f64, f64)> = rows
        .iter()
        .filter(|row| row.jobs > 1 && writes(row))
        .filter_map(|row| Some((row.ratio, row.published.as_ref()?.ratio)))
        .collect();
    if !gains.is_empty() {
        let (ours, theirs): (Vec<f64>, Vec<f64>) = gains.into_iter().unzip();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            " Median gain of the rows that write with 2 jobs or more: {:.2} here, {:.2} published.",
            median(&ours),
            median(&theirs)
        );
    }
    text
}

/// A row is slower when its whole interval lies below 1. Some do by chance: as long as there are no
/// more of them than chance explains, the rows do not tell percpu from a list.
fn speed_judged(rows: &[&Row]) -> String {
    let rounds =
        rows.first().and_then(|row| row.after.values.get("elapsed_s")).map_or(0, |rounds| rounds.len());
    let coverage = coverage(rounds);
    if !can_judge(rounds) {
        return "Speed: not judged; it takes 5 rounds or more to tell a difference from the noise."
            .to_owned();
    }
    let slower: Vec<&Row> = rows.iter().copied().filter(|row| row.ratio_high < 1.0).collect();
    let faster = rows.iter().filter(|row| row.ratio_low > 1.0).count();
    let all = rows.len();
    let outside = (1.0 - coverage) / 2.0;
    let chance = format!(
        "chance alone puts {:.1} of {all} intervals below 1, and as many above; {faster} lie above",
        all as f64 * outside
    );
    if slower.is_empty() {
        return format!(
            "Speed: percpu is at least as fast as a list, within the noise, in all {all} rows ({chance})."
        );
    }
    let few = at_least(slower.len(), all, outside) > 0.05;
    format!(
        "{} in {} of {all} rows the interval lies below 1: {} ({chance}).",
        if few {
            "Speed: percpu is as fast as a list or faster, as far as the noise lets one see;"
        } else {
            "Speed, MISSED: percpu is slower than a list in more rows than chance explains;"
        },
        slower.len(),
        named(&slower)
    )
}

fn named(rows: &[&Row]) -> String {
    let name = |row: &&Row| {
        let (low, high) = (row.ratio_low, row.ratio_high);
        let (jobs, list) = (row.jobs, &row.before.design);
        format!("{}, jobs {jobs}, list of {list}, {:.3} [{low:.3}, {high:.3}]", row.case, row.ratio)
    };
    let mut names: Vec<String> = rows.iter().take(MOST_NAMED).map(name).collect();
    if rows.len() > MOST_NAMED {
        names.push(format!("and {} more", rows.len() - MOST_NAMED));
    }
    names.join("; ")
}

/// For 1000 of them, the mean over rows and rounds.
fn per_1000<'a>(sides: impl Iterator<Item = &'a Side>, quantity: &str) -> f64 {
    let means: Vec<f64> = sides.filter_map(|side| side.mean(quantity)).collect();
    1000.0 * means.iter().sum::<f64>() / means.len().max(1) as f64
}

/// The rows of each list, in the order the lists occur.
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

/// Whether percpu never sleeps where a list does.
fn waiting(crowded: &[&Row]) -> String {
    let sleeps = |side: &Side| side.mean("sleeps_per_write").is_some_and(|sleeps| sleeps > 0.0);
    let lists = by_list(crowded);
    // Each list is compared with the same measurements of percpu.
    let percpu: Vec<&Row> = lists.first().map_or_else(Vec::new, |(_, rows)| rows.clone());
    let sleeping = percpu.iter().filter(|row| sleeps(&row.after)).count();
    let mut text = String::from("Waiting for a stream, in the rows that write with more jobs than CPUs:");
    let _ = if sleeping == 0 {
        write!(
            text,
            " percpu never slept in any of {}: here a holder can be preempted, and when those of all streams are, the next thread makes a spare one.",
            percpu.len()
        )
    } else {
        write!(
            text,
            " MISSED: percpu was never to sleep, and did in {sleeping} of {}, {:.3} times for 1000 writes (a holder can be preempted here, and when those of all streams are and no more spare ones may be made, the next thread waits).",
            percpu.len(),
            per_1000(percpu.iter().map(|row| &row.after), "sleeps_per_write")
        )
    };
    for (list, rows) in lists {
        let slept = rows.iter().filter(|row| sleeps(&row.before)).count();
        let streams: usize = list.parse().unwrap_or(0);
        let can_run_dry = rows.iter().filter(|row| row.jobs > streams).count();
        let _ = write!(
            text,
            " The list of {list} slept in {slept} of {} ({can_run_dry} have more jobs than it has streams), {:.3} times for 1000 writes.",
            rows.len(),
            per_1000(rows.iter().map(|row| &row.before), "sleeps_per_write")
        );
    }
    text
}

/// Why the gain is not the kernel's, from what the counters say.
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
            " With 4 jobs per-cpu streams saved the kernel {:.1} % of its instructions, but {:.0} % of the cycles that stalled and {:.0} % of the time: what the list cost was waiting, not work. By its author's account each write took a contended spinlock twice, and a task preempted with the last stream in hand kept the others asleep.",
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
    let write =
        if page_us.is_finite() { format!("a write of {page_us:.0} µs") } else { "a write".to_owned() };
    let _ = write!(
        text,
        " Here the list's lock is held for a few instructions beside {write}, and who waits for it soon sleeps instead of spinning, so its price drowns in the compression."
    );
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

    use super::*;
    use crate::experiment::Values;
    use uzram_bench::engine::Pattern;

    /// A row of randwrite in which the list takes `ratio` times percpu's seconds.
    fn row(jobs: usize, ratio: f64, list_sleeps: f64, percpu_sleeps: f64) -> Row {
        let side = |design: &str, elapsed_s: f64, sleeps: f64| {
            let rounds = |value: f64| vec![value; 9];
            let values: Values = [
                ("elapsed_s", rounds(elapsed_s)),
                ("write_mb_per_s", rounds(400.0)),
                ("voluntary_switches_per_page", rounds(sleeps)),
                ("sleeps_per_write", rounds(sleeps)),
            ]
            .into();
            Side { design: design.to_owned(), values }
        };
        let published = published::of_pattern(Pattern::RandWrite, jobs, 0);
        Row::new(
            "randwrite",
            jobs,
            side("2", ratio, list_sleeps),
            side("percpu", 1.0, percpu_sleeps),
            published,
        )
        .unwrap()
    }

    #[test]
    fn what_was_promised_and_held_is_said() {
        let verdict = of(&[row(1, 1.0, 0.0, 0.0), row(4, 1.1, 0.02, 0.0)], 2).join("\n");
        assert!(verdict.contains("in all 2 rows (") && verdict.contains("1 lie above"), "{verdict}");
        assert!(verdict.contains("percpu never slept in any of 1:"), "{verdict}");
        assert!(verdict.contains("list of 2 slept in 1 of 1"), "{verdict}");
        assert!(verdict.contains("1.10 here, 1.60 published"), "{verdict}");
        assert!(verdict.contains("a write of 10 µs"), "{verdict}");
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn what_was_missed_is_said_as_plainly() {
        let verdict = of(&[row(1, 0.9, 0.0, 0.0), row(4, 1.0, 0.02, 0.01)], 2).join("\n");
        assert!(verdict.contains("Speed, MISSED: percpu is slower"), "{verdict}");
        assert!(verdict.contains("randwrite, jobs 1, list of 2, 0.900 [0.900, 0.900]"), "{verdict}");
        assert!(
            verdict.contains("MISSED: percpu was never to sleep, and did in 1 of 1, 10.000"),
            "{verdict}"
        );
    }

    /// One interval of 60 below 1 is no wonder.
    #[test]
    fn what_chance_explains_is_not_called_a_miss() {
        let mut rows = vec![row(1, 1.0, 0.0, 0.0); 59];
        rows.push(row(1, 0.99, 0.0, 0.0));
        let verdict = of(&rows, 2).join("\n");
        assert!(verdict.contains("as far as the noise") && verdict.contains("in 1 of 60 rows"), "{verdict}");
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        let verdict = of(&[row(1, 1.0, 0.0, 0.0)], 2).join("\n");
        assert!(verdict.contains("nothing is said"), "{verdict}");
        assert!(!verdict.contains("NaN") && !of(&[], 2).join("\n").contains("NaN"), "{verdict}");
    }
}
