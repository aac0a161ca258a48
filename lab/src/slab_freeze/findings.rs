//! Findings beyond the expectations: sentences whose figures are those of the rows, or published.

use std::fmt::Write;

use uzram::slab::{DelayedFreeze, EagerFreeze, OnPartial, Policy, Sheaves, UnfreezeFirst};

use super::published::cpus_per_node;
use super::{Case, rawpkt};
use crate::experiment::{Row, Side, busiest, jobs_text, median_of};

pub(super) fn paragraphs(rows: &[Row], cpus: usize) -> Vec<String> {
    let is_series = |row: &&Row| row.before.design == EagerFreeze::NAME && row.case == Case::Rawpkt.name();
    let busiest = busiest(rows.iter().filter(is_series), cpus);
    [saved(rows), busiest.and_then(|row| many_cpus(row, cpus))].into_iter().flatten().collect()
}

/// Returns the savings of each step, and of the later design.
fn saved(rows: &[Row]) -> Option<String> {
    let steps = [EagerFreeze::NAME, OnPartial::NAME, UnfreezeFirst::NAME, DelayedFreeze::NAME, Sheaves::NAME];
    let list = |case: Case, quantity: &str, decimals: usize| -> Option<String> {
        let values = steps.iter().map(|step| {
            let value = 1000.0 * median_of(rows, case.name(), step, quantity)?;
            Some(format!("{value:.decimals$} ({step})"))
        });
        Some(values.collect::<Option<Vec<_>>>()?.join(", "))
    };
    let mut text =
        String::from("What the steps save, for 1000 objects, median of the rows with 2 jobs or more.");
    let mut measured = false;
    for case in [Case::Rawpkt, Case::Messaging] {
        let Some(exchanges) = list(case, "cmpxchg_double_per_object", 0) else { continue };
        measured = true;
        let _ = write!(text, " {}: exchanges of slab words {exchanges}", case.name());
        for (what, quantity, decimals) in [
            ("failed ones", "cmpxchg_double_fail_per_object", 2),
            ("list_lock taken", "list_lock_acquired_per_object", 1),
        ] {
            if let Some(values) = list(case, quantity, decimals) {
                let _ = write!(text, "; {what} {values}");
            }
        }
        text.push('.');
    }
    measured.then_some(text)
}

/// Returns the expected gain with more CPUs, estimated from the lock's hold time.
fn many_cpus(row: &Row, cpus: usize) -> Option<String> {
    let held_ns = |side: &Side| side.median("list_lock_hold_ns_per_object").filter(|ns| *ns > 0.0);
    let (before_ns, after_ns) = (held_ns(&row.before)?, held_ns(&row.after)?);
    // While a CPU handles an object, the locks of both caches are held for that long together.
    let full =
        |side: &Side, held_ns: f64| Some(rawpkt::CACHES as f64 * side.median("cpu_ns_per_object")? / held_ns);
    let (before_cpus, after_cpus) = (full(&row.before, before_ns)?, full(&row.after, after_ns)?);
    let (before, after) = (EagerFreeze::NAME, DelayedFreeze::NAME);
    let cpus_per_node = cpus_per_node();
    let mut text = String::from("What more CPUs change.");
    let waits = row
        .before
        .mean("list_lock_contended_per_object")
        .zip(row.before.mean("list_lock_acquired_per_object"));
    if let Some((waits, locks)) = waits.filter(|(_, locks)| *locks > 0.0) {
        let _ = write!(
            text,
            " With {} CPUs hardly anybody waits: {before} found list_lock taken {:.1} times in 1000.",
            cpus,
            1000.0 * waits / locks
        );
    }
    let _ = write!(
        text,
        " {cpus_per_node} of the author's CPUs share a node's list_lock. For each object of rawpkt with {}, the locks of the two caches were held for {before_ns:.2} ns with {before} and {after_ns:.2} ns with {after}: {before_cpus:.0} CPUs that do nothing else would have them held all the time with {before}, {after_cpus:.0} with {after}",
        jobs_text(row.jobs)
    );
    let node = cpus_per_node as f64;
    let _ = if before_cpus < node {
        write!(
            text,
            ". So {cpus_per_node} would wait for the lock with {before}, and what counts for them is how long it is held: {:.2} times as long with {before} as with {after}, before counting that a lock in demand takes longer to hand over.",
            before_ns / after_ns
        )
    } else {
        write!(
            text,
            ". So {cpus_per_node} would leave it free for {:.0} % of the time with {before} and {:.0} % with {after}, before counting that a lock in demand takes longer to hand over.",
            100.0 * (1.0 - node / before_cpus),
            100.0 * (1.0 - node / after_cpus)
        )
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::SERIES;
    use super::*;
    use crate::experiment::testing::{row, side, verdict_text};

    fn measured(design: &str, elapsed_s: f64, exchanges: f64, held_ns: f64) -> Side {
        let values = [
            ("elapsed_s", elapsed_s),
            ("cpu_ns_per_object", 50.0),
            ("cmpxchg_double_per_object", exchanges),
            ("cmpxchg_double_fail_per_object", 0.0),
            ("list_lock_acquired_per_object", 0.01),
            ("list_lock_contended_per_object", 0.0001),
            ("list_lock_hold_ns_per_object", held_ns),
        ];
        side(design, &values)
    }

    /// Returns rows in which eager took `ratio` times as long as delayed, and sheaves half as long.
    fn rows_of(case: Case, jobs: usize, ratio: f64) -> Vec<Row> {
        let after = || measured(DelayedFreeze::NAME, 1.0, 0.9, 2.0);
        let row = |before, after| row(&SERIES, case.name(), jobs, before, after);
        vec![
            row(measured(EagerFreeze::NAME, ratio, 1.0, 4.0), after()),
            row(measured(OnPartial::NAME, ratio, 1.0, 4.0), after()),
            row(measured(UnfreezeFirst::NAME, ratio, 1.0, 3.0), after()),
            row(after(), measured(Sheaves::NAME, 0.5, 0.05, 0.5)),
        ]
    }

    #[test]
    fn expectations_that_are_met_are_told() {
        let rows = [
            rows_of(Case::Messaging, 1, 0.99),
            rows_of(Case::Rawpkt, 1, 0.5),
            rows_of(Case::Rawpkt, 2, 1.06),
            rows_of(Case::Rawpkt, 8, 1.06),
        ]
        .concat();
        let verdict = verdict_text(&SERIES, &rows);
        assert!(
            verdict
                .contains("is in 2 of 2 rows; reached with 2 jobs: 1.060 [1.060, 1.060], 8 jobs: 1.060 [1.060, 1.060]. Published with 8 jobs: 1.130."),
            "{verdict}"
        );
        assert!(verdict.contains("is in 1 of 1 rows; reached with 1 job: 0.990"), "{verdict}");
        assert!(verdict.contains("rawpkt: exchanges of slab words 1000 (eager), 1000 (on-partial), 1000 (unfreeze-first), 900 (delayed), 50 (sheaves)"), "{verdict}");
        // 50 ns an object, of which both locks are held for 4 or 2: 2 * 50 / 4 CPUs, or 2 * 50 / 2.
        assert!(verdict.contains("were held for 4.00 ns with eager and 2.00 ns with delayed: 25 CPUs that do nothing else would have them held all the time with eager, 50 with delayed. So 64 would wait"), "{verdict}");
        assert!(
            verdict.contains("taken 10.0 times in 1000.") && verdict.contains("2.00 times as long"),
            "{verdict}"
        );
        assert!(verdict.contains("Beyond the series, sheaves against delayed"), "{verdict}");
        assert!(verdict.contains("2.00 (2.00 to 2.00) in rawpkt"), "{verdict}");
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn expectations_that_are_missed_are_told() {
        let rows = [
            rows_of(Case::Messaging, 5, 0.97),
            rows_of(Case::Rawpkt, 2, 1.04),
            rows_of(Case::Rawpkt, 4, 1.07),
        ]
        .concat();
        let verdict = verdict_text(&SERIES, &rows);
        for said in [
            "Speed, rawpkt, MISSED: delayed should be at least 1.05 times as fast as eager with 2 jobs or more, and is in 1 of 2 rows; reached with 4 jobs: 1.070",
            "missed with 2 jobs: 1.040",
            "Speed, messaging, MISSED:",
            "is in 0 of 1 rows; missed with 5 jobs: 0.970",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
    }

    /// With hold times so short that 64 CPUs do not saturate the locks.
    #[test]
    fn a_lock_with_time_left_is_not_called_full() {
        let mut rows = rows_of(Case::Rawpkt, 2, 1.0);
        for side in rows.iter_mut().flat_map(|row| [&mut row.before, &mut row.after]) {
            side.values.insert("cpu_ns_per_object", vec![200.0; 9]);
        }
        let verdict = verdict_text(&SERIES, &rows);
        // 64 of 100 CPUs, and of 200.
        assert!(verdict.contains("36 % of the time with eager and 68 % with delayed"), "{verdict}");
    }
}
