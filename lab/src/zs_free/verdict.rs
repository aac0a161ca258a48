//! What the rows of the table come to, in words. All figures in it are those of the rows, or published
//! ones.

use std::fmt::Write;

use uzram::zsmalloc::design::{Pinned, PoolLocks};

use super::{AFTER, BEFORE, Case, ClassInWord, NoPoolLock, PagesAfterLock, published};
use crate::experiment::{Row, Side};
use uzram_bench::harness::stats::{PairedRatio, can_judge, median};

/// How many times as fast as before the series a free should be with so many jobs.
fn wanted_gain(jobs: usize) -> f64 {
    if jobs == 1 { 1.05 } else { 1.4 }
}

/// The verdict on a machine with so many CPUs.
pub(super) fn of(rows: &[Row], cpus: usize) -> Vec<String> {
    let series: Vec<&Row> = rows.iter().filter(|row| row.before.design == BEFORE).collect();
    let mut verdict = vec![locks(&series)];
    for case in Case::ALL {
        let of_case: Vec<&Row> = series.iter().copied().filter(|row| row.case == case.name()).collect();
        verdict.push(speed(case, &of_case));
        verdict.extend(steps(case, rows));
        verdict.extend(hold_times(case, &of_case, cpus));
    }
    verdict.extend(beyond(rows));
    verdict
}

/// Whether the locks are gone that the series takes away.
fn locks(rows: &[&Row]) -> String {
    if rows.is_empty() {
        return "Locks: not measured.".to_owned();
    }
    let most = |quantity: &str, side: fn(&Row) -> &Side| {
        let rounds = rows.iter().filter_map(|row| side(row).values.get(quantity)).flatten();
        rounds.copied().fold(0.0, f64::max)
    };
    let [pool, arena] = ["pool_locks_per_object", "locked_frees_per_zspage"]
        .map(|quantity| [most(quantity, |row| &row.before), most(quantity, |row| &row.after)]);
    let gone = pool[1] == 0.0 && arena[1] == 0.0;
    format!(
        "Locks{}: for each object freed, {BEFORE} takes the pool's lock {:.2} times and {AFTER} {:.2}; for each zspage that runs empty, {BEFORE} calls the arena {:.2} times with its class's lists locked, and {AFTER} {:.2} (the most of all rows and rounds; both are to be 0 with {AFTER}).",
        if gone { "" } else { ", MISSED" },
        pool[0],
        pool[1],
        arena[0],
        arena[1]
    )
}

fn jobs(row: &Row) -> String {
    format!("{} job{}", row.jobs, if row.jobs == 1 { "" } else { "s" })
}

fn named(rows: &[&Row]) -> String {
    let name = |row: &&Row| {
        let published = published::gains(row.jobs)
            .map_or_else(String::new, |[i7, pi]| format!(" (published {i7:.2} and {pi:.2})"));
        let Row { ratio, ratio_low, ratio_high, .. } = row;
        format!("{}: {ratio:.2} [{ratio_low:.2}, {ratio_high:.2}]{published}", jobs(row))
    };
    rows.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Whether a free is as much faster as it should be.
fn speed(case: Case, rows: &[&Row]) -> String {
    let case = case.name();
    let Some(first) = rows.first() else {
        return format!("Speed, {case}: not measured, so nothing is said of it.");
    };
    if !can_judge(first.after.values.get("elapsed_s").map_or(0, Vec::len)) {
        return format!(
            "Speed, {case}: not judged; it takes 5 rounds or more to tell a difference from the noise."
        );
    }
    let (reached, missed): (Vec<&Row>, Vec<&Row>) =
        rows.iter().partition(|row| row.ratio >= wanted_gain(row.jobs));
    let mut text = format!(
        "Speed, {case}{}: {AFTER} should be at least {:.2} times as fast as {BEFORE} with one job and {:.2} times with more, and is in {} of {} rows",
        if missed.is_empty() { "" } else { ", MISSED" },
        wanted_gain(1),
        wanted_gain(2),
        reached.len(),
        rows.len()
    );
    for (what, rows) in [("reached", &reached), ("missed", &missed)] {
        if !rows.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(text, "; {what} with {}", named(rows));
        }
    }
    text += ".";
    let by_processor_time = rows.iter().filter_map(|row| {
        let PairedRatio { ratio, low, high, .. } = row.processor_time()?;
        Some(format!("{ratio:.2} [{low:.2}, {high:.2}] with {}", jobs(row)))
    });
    let by_processor_time: Vec<String> = by_processor_time.collect();
    if !by_processor_time.is_empty() {
        let _ = write!(
            text,
            " By processor time, which leaves out waiting and which other programs disturb less: {}.",
            by_processor_time.join(", ")
        );
    }
    text
}

/// What a quantity of a design is in a case, median of the rows with 2 jobs or more.
fn of_design(rows: &[Row], case: Case, design: &str, quantity: &str) -> Option<f64> {
    let rows = rows.iter().filter(|row| row.case == case.name() && row.jobs >= 2);
    let side = |row: &Row| [&row.before, &row.after].into_iter().find(|side| side.design == design).cloned();
    let medians: Vec<f64> = rows.filter_map(side).filter_map(|side| side.median(quantity)).collect();
    (!medians.is_empty()).then(|| median(&medians))
}

/// What each step brings.
fn steps(case: Case, rows: &[Row]) -> Option<String> {
    let steps = [BEFORE, ClassInWord::NAME, NoPoolLock::NAME, AFTER];
    let ns = |design: &str| of_design(rows, case, design, "ns_per_object");
    let series =
        steps.iter().map(|step| Some(format!("{:.0} ({step})", ns(step)?))).collect::<Option<Vec<_>>>()?;
    Some(format!(
        "The steps, {}, ns an object, median of the rows with 2 jobs or more: {}; the last step alone: {:.0}.",
        case.name(),
        series.join(", "),
        ns(PagesAfterLock::NAME)?
    ))
}

/// What the time for which lists are locked lets one expect.
fn hold_times(case: Case, rows: &[&Row], cpus: usize) -> Option<String> {
    // With more threads than CPUs some holders of a lock are preempted, which is another matter.
    let row = rows.iter().filter(|row| row.jobs <= cpus).max_by_key(|row| row.jobs)?;
    let held_ns = |side: &Side| side.median("lists_hold_ns_per_object").filter(|ns| *ns > 0.0);
    let (before_ns, after_ns) = (held_ns(&row.before)?, held_ns(&row.after)?);
    let classes = row.before.median("equal_classes")?;
    // How much of the time one thread has a class's lists locked, for each class as if all were alike.
    let taken = |side: &Side, held_ns: f64| {
        Some(100.0 * (held_ns / side.median("cpu_ns_per_object")?).min(1.0) / classes)
    };
    Some(format!(
        "Why, {}: with {}, lists are locked for {before_ns:.0} ns of an object's {:.0} with {BEFORE} and for {after_ns:.0} of {:.0} with {AFTER}. The objects are of so many classes as {classes:.0} with as many objects each, so that a CPU's free finds its class's lock taken by a given other CPU in about {:.1} % and {:.1} % of the cases. What the pool's lock costs beside that, two atomic additions to one cache line that all CPUs share, grows with their number: here {cpus}.",
        case.name(),
        jobs(row),
        row.before.median("cpu_ns_per_object")?,
        row.after.median("cpu_ns_per_object")?,
        taken(&row.before, before_ns)?,
        taken(&row.after, after_ns)?
    ))
}

/// What the design that came later gains.
fn beyond(rows: &[Row]) -> Option<String> {
    let gain = |case: Case| {
        let later = rows.iter().filter(|row| row.after.design == Pinned::NAME && row.case == case.name());
        let ratios: Vec<f64> = later.map(|row| row.ratio).collect();
        let (least, most) = ratios
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
        (!ratios.is_empty())
            .then(|| format!("{:.2} ({least:.2} to {most:.2}) in {}", median(&ratios), case.name()))
    };
    let gains: Vec<String> = Case::ALL.into_iter().filter_map(gain).collect();
    (!gains.is_empty()).then(|| {
        format!(
            "Beyond the series, {} is as many times as fast as {AFTER}, median and range of the rows: {}.",
            Pinned::NAME,
            gains.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::experiment::Values;

    /// What a design measured in every one of 9 rounds.
    fn side(design: &str, elapsed_s: f64, pool_locks: f64, held_ns: f64) -> Side {
        let values: Values = [
            ("elapsed_s", elapsed_s),
            ("user_s", 0.5 * elapsed_s),
            ("system_s", 0.25),
            ("ns_per_object", 100.0 * elapsed_s),
            ("cpu_ns_per_object", 200.0),
            ("pool_locks_per_object", pool_locks),
            ("locked_frees_per_zspage", pool_locks),
            ("lists_hold_ns_per_object", held_ns),
            ("equal_classes", 40.0),
        ]
        .map(|(quantity, value)| (quantity, vec![value; 9]))
        .into();
        Side { design: design.to_owned(), values }
    }

    /// The rows of a turn in which split took `ratio` times as long as class-indexed, and pinned half.
    fn turn(case: Case, jobs: usize, ratio: f64) -> Vec<Row> {
        let after = || side(AFTER, 1.0, 0.0, 20.0);
        let row = |before: Side, after: Side| Row::new(case.name(), jobs, before, after, None).unwrap();
        let step = |design: &str| row(side(design, ratio, 1.0, 80.0), after());
        vec![
            step(BEFORE),
            step(ClassInWord::NAME),
            step(NoPoolLock::NAME),
            step(PagesAfterLock::NAME),
            row(after(), side(Pinned::NAME, 0.5, 0.0, 10.0)),
        ]
    }

    #[test]
    fn what_was_promised_and_held_is_said() {
        let rows = [turn(Case::RunCache, 1, 1.06), turn(Case::RunCache, 2, 1.41)].concat();
        let verdict = of(&rows, 2).join("\n");
        for said in [
            "Locks: for each object freed, split takes the pool's lock 1.00 times and class-indexed 0.00;",
            "Speed, run-cache: class-indexed should be at least 1.05 times as fast as split with one job and 1.40 times with more, and is in 2 of 2 rows; reached with 1 job: 1.06 [1.06, 1.06] (published 1.19 and 1.05), 2 jobs: 1.41 [1.41, 1.41] (published 1.40 and 1.42). By processor",
            // 0.705 + 0.25 s and 0.5 + 0.25.
            "1.04 [1.04, 1.04] with 1 job, 1.27 [1.27, 1.27] with 2 jobs.",
            "Speed, no-run-cache: not measured",
            "141 (split), 141 (class-in-word), 141 (no-pool-lock), 100 (class-indexed); the last step alone: 141",
            // 80 of 200 ns, and 20, over 40 classes.
            "with 2 jobs, lists are locked for 80 ns of an object's 200 with split and for 20 of 200",
            "in about 1.0 % and 0.2 % of the cases",
            "2.00 (2.00 to 2.00) in run-cache.",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn what_was_missed_is_said_as_plainly() {
        let mut rows = [turn(Case::NoRunCache, 1, 1.04), turn(Case::NoRunCache, 4, 1.5)].concat();
        rows[0].after.values.insert("pool_locks_per_object", vec![0.0, 0.0, 0.01]);
        let verdict = of(&rows, 2).join("\n");
        for said in [
            "Locks, MISSED:",
            "and class-indexed 0.01;",
            "Speed, no-run-cache, MISSED:",
            "is in 1 of 2 rows; reached with 4 jobs: 1.50",
            "missed with 1 job: 1.04",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        let mut rows = turn(Case::RunCache, 2, 1.0);
        for side in rows.iter_mut().flat_map(|row| [&mut row.before, &mut row.after]) {
            side.values.values_mut().for_each(|rounds| rounds.truncate(4));
        }
        let verdict = of(&rows, 2).join("\n");
        assert!(verdict.contains("Speed, run-cache: not judged"), "{verdict}");
        assert!(of(&[], 2)[0].contains("not measured") && !of(&[], 2).join("\n").contains("NaN"));
    }
}
