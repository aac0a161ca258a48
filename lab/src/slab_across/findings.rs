//! Findings: whether sheaves collapse across CPUs, why, and whether the later design reaches its goals. Their
//! figures are those of the rows, or published.

use uzram::slab::{BareSheaves, DelayedFreeze, ElasticSheaves, Policy, Sheaves};

use super::{Case, EXCHANGES, REFUSED, SERIES, published};
use crate::experiment::{Bound, Designs, Expect, Figure, Jobs, Row, jobs_text, side};

/// The loss that counts as a collapse, and that the later design must keep below.
const LOSS: f64 = 0.1;
/// The share of the gain of [`Sheaves`] that the later design must keep where it has nothing to win.
const KEPT: f64 = 0.95;

/// The goals of [`ElasticSheaves`].
const GOALS: [Expect; 5] = [
    // Both have the same fast path.
    goal(Case::SameCpu, Sheaves::NAME, Bound::NotBelow(KEPT)),
    goal(Case::Across, DelayedFreeze::NAME, Bound::AtLeast(1.0 - LOSS)),
    goal(Case::AcrossNowait, DelayedFreeze::NAME, Bound::AtLeast(1.0 - LOSS)),
    goal(Case::Bursts, DelayedFreeze::NAME, Bound::AtLeast(1.0 - LOSS)),
    goal(Case::BurstsNowait, DelayedFreeze::NAME, Bound::AtLeast(1.0 - LOSS)),
];

const fn goal(case: Case, before: &'static str, bound: Bound) -> Expect {
    Expect {
        case: Some(case.name()),
        jobs: Jobs::AtLeast(1),
        before: Some(before),
        figure: Figure::Speed,
        bound,
    }
}

pub(super) fn paragraphs(rows: &[Row], cpus: usize) -> Vec<String> {
    let collapses =
        [BareSheaves::NAME, Sheaves::NAME].into_iter().filter_map(|design| collapse(rows, design));
    collapses.chain(causes(rows)).chain(goals(rows, cpus)).collect()
}

/// Compares two designs in every case, with every number of jobs.
fn compared(rows: &[Row], before: &str, after: &str) -> Vec<Row> {
    let groups = rows.chunk_by(|a, b| a.case == b.case && a.jobs == b.jobs);
    let compare = |group: &[Row]| {
        let Row { case, jobs, .. } = group.first()?;
        let [before, after] = [before, after].map(|design| side(group, *jobs, design).cloned());
        Row::new(case, *jobs, before?, after?, None)
    };
    groups.filter_map(compare).collect()
}

fn across(rows: &[Row], design: &str) -> Vec<Row> {
    let mut rows = compared(rows, DelayedFreeze::NAME, design);
    rows.retain(|row| row.case != Case::SameCpu.name());
    rows
}

/// Returns the row with the surest loss.
fn slowest(rows: &[Row]) -> Option<&Row> {
    rows.iter().min_by(|a, b| a.gain.high.total_cmp(&b.gain.high))
}

/// Returns whether a design collapses across CPUs: in some row it loses, beyond the noise.
fn collapse(rows: &[Row], design: &str) -> Option<String> {
    let rows = across(rows, design);
    let worst = slowest(&rows)?;
    let is_lost = |row: &&Row| row.gain.ratio < 1.0 - LOSS && row.gain.high < 1.0;
    let lost = rows.iter().filter(is_lost).count();
    let verdict = if lost > 0 { "collapses" } else { "does not collapse" };
    let processor_time = worst.processor_time().map(|ratio| format!("; by processor time {ratio}"));
    Some(format!(
        "Across CPUs {design} {verdict} here: in {lost} of {} rows it loses more than {:.0} % against {}, beyond the noise. It is slowest in {} with {}, where it is {} times as fast{}. Published: Linux 7.0-rc lost {:.0} % against 6.19.",
        rows.len(),
        100.0 * LOSS,
        DelayedFreeze::NAME,
        worst.case,
        jobs_text(worst.jobs),
        worst.gain,
        processor_time.unwrap_or_default(),
        published::loss_percent()
    ))
}

/// Explains the slowest row by the counters of each design.
fn causes(rows: &[Row]) -> Option<String> {
    let bare = across(rows, BareSheaves::NAME);
    let Row { case, jobs, .. } = slowest(&bare)?;
    let of_row = || rows.iter().filter(|row| row.case == *case);
    let told = |design: &str| {
        let side = side(of_row(), *jobs, design)?;
        let count = |counter| side.median(counter).map(|count| 1000.0 * count);
        let mut text = format!(
            "{design} took {:.0} objects from slabs and list_lock {:.1} times ({:.2} times it was not free)",
            count("alloc_slowpath_per_object")?,
            count("list_lock_acquired_per_object")?,
            count("list_lock_contended_per_object")?
        );
        if design != DelayedFreeze::NAME {
            text += &format!(
                ", half filled {:.2} sheaves from slabs, half emptied {:.2} into them and exchanged {:.2} with the barn",
                count("sheaf_refill_per_object")?,
                count("sheaf_flush_per_object")?,
                count(EXCHANGES)?
            );
        }
        let refused = count(REFUSED)?;
        if refused > 0.0 {
            text += &format!("; {refused:.2} allocations were refused and repeated");
        }
        Some(text)
    };
    let designs = (SERIES.designs)().all();
    let told: Option<Vec<_>> = designs.iter().map(|design| told(design)).collect();
    Some(format!("Why, for 1000 objects of {case} with {}: {}.", jobs_text(*jobs), told?.join("; ")))
}

/// Judges the goals of the later design.
fn goals(rows: &[Row], cpus: usize) -> Vec<String> {
    let before = [DelayedFreeze::NAME, Sheaves::NAME];
    let rows: Vec<Row> =
        before.iter().flat_map(|before| compared(rows, before, ElasticSheaves::NAME)).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let designs = Designs {
        before: before.map(str::to_owned).to_vec(),
        after: ElasticSheaves::NAME.to_owned(),
        beyond: Vec::new(),
    };
    GOALS.iter().map(|goal| goal.judge(&SERIES, &designs, &rows, cpus).1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Side;
    use crate::experiment::testing::{row, side, verdict_text};

    fn measured(design: &str, elapsed_s: f64) -> Side {
        let names = [
            "sheaf_refill_per_object",
            "sheaf_flush_per_object",
            "alloc_slowpath_per_object",
            "list_lock_acquired_per_object",
            "list_lock_contended_per_object",
            EXCHANGES,
        ];
        let counts = names.into_iter().zip([0.002, 0.003, 0.25, 0.5, 0.01, 0.02]);
        let values: Vec<_> = counts.chain([("elapsed_s", elapsed_s), (REFUSED, 0.0)]).collect();
        side(design, &values)
    }

    /// Returns rows in which the designs took so long.
    fn rows_of(case: Case, jobs: usize, [delayed, bare, sheaves, elastic]: [f64; 4]) -> Vec<Row> {
        let (of, bare_s) = (measured, bare);
        let bare = || of(BareSheaves::NAME, bare_s);
        vec![
            row(&SERIES, case.name(), jobs, of(DelayedFreeze::NAME, delayed), bare()),
            row(&SERIES, case.name(), jobs, bare(), of(Sheaves::NAME, sheaves)),
            row(&SERIES, case.name(), jobs, bare(), of(ElasticSheaves::NAME, elastic)),
        ]
    }

    #[test]
    fn a_collapse_is_told_with_its_causes() {
        let rows = [
            rows_of(Case::SameCpu, 1, [2.0, 1.0, 1.0, 1.0]),
            rows_of(Case::Across, 1, [1.0, 0.5, 0.5, 0.5]),
            rows_of(Case::BurstsNowait, 4, [1.0, 2.5, 0.5, 0.4]),
        ]
        .concat();
        let verdict = verdict_text(&SERIES, &rows);
        for said in [
            "Across CPUs bare-sheaves collapses here: in 1 of 2 rows it loses more than 10 % against delayed, beyond the noise",
            "in bursts-nowait with 4 jobs, where it is 0.400",
            "Published: Linux 7.0-rc lost 64 %",
            "Across CPUs sheaves does not collapse here: in 0 of 2 rows",
            "Why, for 1000 objects of bursts-nowait with 4 jobs: delayed took 250 objects from slabs and list_lock 500.0 times (10.00 times it was not free); bare-sheaves took",
            "half filled 2.00 sheaves from slabs, half emptied 3.00 into them and exchanged 20.00 with the barn",
            "Speed, same-cpu: elastic-sheaves should be at least 0.95, within the noise, times as fast as sheaves",
            "Speed, across: elastic-sheaves should be at least 0.90 times as fast as delayed with any number of jobs, and is in 1 of 1 rows; reached with 1 job: 2.000",
            "Speed, bursts: not measured with any number of jobs",
        ] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
        assert!(!verdict.contains("MISSED"), "{verdict}");
    }

    #[test]
    fn goals_that_are_missed_are_told() {
        let rows =
            [rows_of(Case::SameCpu, 1, [2.0, 1.0, 1.0, 1.1]), rows_of(Case::Across, 1, [1.0, 1.0, 1.0, 1.2])]
                .concat();
        let verdict = verdict_text(&SERIES, &rows);
        for said in ["Speed, same-cpu, MISSED:", "Speed, across, MISSED:", "bare-sheaves does not collapse"] {
            assert!(verdict.contains(said), "{said}: {verdict}");
        }
    }
}
