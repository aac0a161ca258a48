//! The pictures of a series: for each case the gain by number of jobs, ours beside the published one, then
//! those of the series' steps and of later designs.

use super::chart::{Chart, Line, Point};
use super::summary::Comparison;
use crate::experiment::{LabReport, Series};
use crate::published::Published;

/// Colours of the page.
pub(super) const COLOURS: usize = 6;

pub(super) fn charts(table: &Series, report: &LabReport) -> Vec<Chart> {
    let all = Comparison::all(&(table.designs)());
    let mut cases: Vec<&str> = report.rows.iter().map(|row| row.case.as_str()).collect();
    cases.dedup();
    let (mut main, mut others) = (Vec::new(), Vec::new());
    for case in cases {
        let is_main = |comparison: &&Comparison| {
            let before_at = comparison.before_at;
            before_at == Some(0)
                || before_at.is_some_and(|before| table.all_published(case, before).next().is_some())
        };
        let (of_series, later): (Vec<_>, Vec<_>) = all.iter().partition(is_main);
        main.push(chart(table, report, case, "", &of_series));
        others.push(chart(table, report, case, ": steps and later designs", &later));
    }
    main.append(&mut others);
    main.retain(|chart| !chart.lines.is_empty());
    main
}

fn chart(table: &Series, report: &LabReport, case: &str, what: &str, comparisons: &[&Comparison]) -> Chart {
    let mut lines = Vec::new();
    for (i, comparison) in comparisons.iter().enumerate() {
        let colour = i % COLOURS;
        let rows = comparison.rows(&report.rows).into_iter().filter(|row| row.case == case);
        let points = rows.map(|row| Point {
            at: row.jobs,
            ratio: row.gain.ratio,
            interval: Some((row.gain.low, row.gain.high)),
        });
        let ours = Line { name: comparison.name(), colour, is_published: false, points: points.collect() };
        if ours.points.is_empty() {
            continue;
        }
        lines.push(ours);
        let Some(before_at) = comparison.before_at else { continue };
        let theirs: Vec<_> = table.all_published(case, before_at).collect();
        if let Some((_, first)) = theirs.first() {
            let name = format!("published: {} against {}", first.after.design, first.before.design);
            let point = |(jobs, published): &(usize, Published)| Point {
                at: *jobs,
                ratio: published.ratio,
                interval: None,
            };
            let points = theirs.iter().map(point).collect();
            lines.push(Line { name, colour, is_published: true, points });
        }
    }
    Chart { title: format!("{case}{what}"), lines }
}
