//! The part of a report about more cores than there are here: predictions from the measured rows, for the tables that
//! have a model ([`crate::scale`]).
//!
//! What cache lines cost here is measured once for all tables, and kept. The simulations are deterministic, and are made
//! anew for every report.

use std::time::Duration;

use uzram::{ErrorKind, Result};
use uzram_bench::harness::report::Table;

use super::chart::{Chart, Line, Point};
use super::figures::COLOURS;
use super::html::{details, escape, paragraph, table as html_table};
use super::kept::Kept;
use super::plan::Planned;
use super::progress::Progress;
use super::{Outcome, ReportOptions, Section};
use crate::experiment::LabReport;
use crate::scale::costs::Costs;
use crate::scale::published::{PublishedCase, TOLERATED_PERCENT};
use crate::scale::report::{Curve, figures_table, gains_table, legend};
use crate::scale::{self, ScaleOptions, ScaleReport};

/// Its name in the progress.
pub(super) const NAME: &str = "more cores";
/// Numbers of cores that are predicted.
const CORES: &str = "1..128";
/// Operations of a simulation, if the time is short; else those of the parameters.
const QUICK_OPERATIONS: usize = 4000;
/// The seconds that all simulations of one table take, quick or not.
const TABLE_S: [f64; 2] = [2.0, 10.0];

/// The predictions of a table, or why there are none.
pub(super) type Predicted = std::result::Result<ScaleReport, String>;

/// Estimates how long the predictions of these tables take; `None` if none of them has a model.
pub(super) fn estimate(planned: &[Planned], quick: bool) -> Option<Duration> {
    let tables = planned.iter().filter(|planned| scale::has_model(planned.table)).count();
    let [quick_s, full_s] = TABLE_S;
    let seconds = tables as f64 * if quick { quick_s } else { full_s };
    (tables > 0).then(|| Duration::from_secs_f64(seconds))
}

/// Predicts what was measured, and puts it into the sections.
///
/// # Errors
/// `Busy`: interrupted; `Io`: the folder cannot be written.
pub(super) fn predict(
    options: &ReportOptions,
    planned: &[Planned],
    kept: &Kept<'_>,
    progress: &mut Progress,
    sections: &mut [Section],
) -> Result<()> {
    let has_model = |planned: &&Planned| scale::has_model(planned.table);
    let Some(first) = planned.iter().find(has_model) else { return Ok(()) };
    progress.begin(NAME);
    let costs = match kept.load_costs(&first.options) {
        Some(costs) => Ok(costs),
        None => {
            let costs = told(scale::measure_costs(&first.options))?;
            if let Ok(costs) = &costs {
                kept.store_costs(&first.options, costs)?;
            }
            costs
        }
    };
    for (planned, section) in planned.iter().zip(sections).filter(|(planned, _)| has_model(planned)) {
        let Outcome::Ok(measured) = &section.outcome else { continue };
        let predicted = match &costs {
            Ok(costs) => told(predict_table(options, planned, costs.clone(), &measured.report))?,
            Err(why) => Err(why.clone()),
        };
        section.predicted = Some(predicted);
    }
    progress.end(NAME);
    Ok(())
}

/// Returns why something was not predicted; only an interruption ends the report.
fn told<T>(outcome: Result<T>) -> Result<std::result::Result<T, String>> {
    match outcome {
        Ok(done) => Ok(Ok(done)),
        Err(error) if error.kind() == ErrorKind::Busy => Err(error),
        Err(error) => Ok(Err(error.to_string())),
    }
}

fn predict_table(
    options: &ReportOptions,
    planned: &Planned,
    costs: Costs,
    measured: &LabReport,
) -> Result<ScaleReport> {
    let scale_options = ScaleOptions {
        lab: planned.options.clone(),
        cores: scale::parse_cores(CORES)?,
        operations: options.quick.then_some(QUICK_OPERATIONS),
    };
    scale::predict_from(planned.table, &scale_options, costs, measured)
}

/// Returns the pictures: each case's speeds by the number of cores, then published gains beside their predictions.
fn charts(report: &ScaleReport) -> Vec<Chart> {
    let speeds = report.curves.chunk_by(|a, b| a.case == b.case).map(speeds);
    let gains = report.published.iter().filter(|case| !case.gains.is_empty()).map(gains);
    speeds.chain(gains).collect()
}

/// Returns speeds as multiples of that of one core of the first design.
fn speeds(curves: &[Curve]) -> Chart {
    let one = curves.first().and_then(|curve| curve.points.first());
    let one = one.map_or(f64::NAN, |point| point.units_per_s.middle);
    let line = |(at, curve): (usize, &Curve)| Line {
        name: curve.design.clone(),
        colour: at % COLOURS,
        is_published: false,
        points: curve
            .points
            .iter()
            .map(|point| Point {
                at: point.cores,
                ratio: point.units_per_s.middle / one,
                interval: Some((point.units_per_s.low / one, point.units_per_s.high / one)),
            })
            .collect(),
    };
    let case = curves.first().map_or("", |curve| &curve.case);
    Chart {
        title: format!("{case}, predicted: times the work of one core"),
        across: "cores".to_owned(),
        lines: curves.iter().enumerate().map(line).collect(),
    }
}

/// Returns the published gains, and the predicted ones.
fn gains(case: &PublishedCase) -> Chart {
    let mut names: Vec<(&str, &str)> =
        case.gains.iter().map(|gain| (gain.published_after, gain.published_before)).collect();
    names.sort_unstable();
    names.dedup();
    let lines = names.into_iter().enumerate().flat_map(|(at, (after, before))| {
        let points = |is_published: bool| {
            let is_of_these = |gain: &&scale::published::GainPoint| {
                gain.published_after == after && gain.published_before == before
            };
            let of_these = case.gains.iter().filter(is_of_these);
            let point = |gain: &scale::published::GainPoint| Point {
                at: gain.tasks,
                ratio: if is_published { gain.published } else { gain.predicted.middle },
                interval: (!is_published).then_some((gain.predicted.low, gain.predicted.high)),
            };
            of_these.map(point).collect()
        };
        let name = format!("{after} against {before}");
        [true, false].map(|is_published| Line {
            name: if is_published { format!("published: {name}") } else { name.clone() },
            colour: at % COLOURS,
            is_published,
            points: points(is_published),
        })
    });
    Chart {
        title: format!("{}, gain predicted for {}", case.case, case.machine),
        across: "tasks".to_owned(),
        lines: lines.collect(),
    }
}

/// Returns tables with their headings: the curves, then what they are compared with.
fn tables(report: &ScaleReport) -> Vec<(String, Table)> {
    let curves = report.curves.chunk_by(|a, b| a.case == b.case);
    let mut tables: Vec<_> = curves.map(|curves| report.curves_table(curves)).collect();
    tables.push(("predicted and measured here, millions a second".to_owned(), report.checks_table()));
    for case in &report.published {
        let PublishedCase { case: name, machine, heading, .. } = case;
        tables.push((format!("{name}, published on {machine}: {heading}"), figures_table(case)));
        tables.push((format!("{name}, published on {machine}: gains"), gains_table(case)));
    }
    tables.retain(|(_, table)| !table.is_empty());
    tables
}

/// Returns what published figures show, and why errors are large, each with the figures that it is about.
fn reasons(report: &ScaleReport) -> Vec<String> {
    let of_case = |case: &PublishedCase| {
        let name = format!("{}, {}", case.case, case.machine);
        case.reasons.iter().map(move |reason| format!("{name}: {reason}")).collect::<Vec<_>>()
    };
    report.published.iter().flat_map(of_case).collect()
}

const HEADING: &str = "With more cores, predicted";

/// Returns the heading of the reasons.
fn reasons_heading() -> String {
    format!("What published figures show, and why predictions are off by more than {TOLERATED_PERCENT} %")
}

/// Returns the part of the page.
pub(super) fn html(predicted: &Predicted) -> String {
    let mut html = format!("<h3>{HEADING}</h3>\n");
    let report = match predicted {
        Ok(report) => report,
        Err(why) => return html + &paragraph(&format!("Not predicted: {why}")),
    };
    html += &paragraph(&report.sentences().join(" "));
    html += "<div class=\"charts\">\n";
    charts(report).iter().for_each(|chart| html += &chart.to_figure());
    html += "</div>\n<p class=\"small\">Simulated from times measured here inside and outside of each lock, and from the cost of a cache line; a thin line is the band of all rounds and of what a line may cost; dashed: published.</p>\n";
    let reasons: String = reasons(report).iter().map(|reason| paragraph(reason)).collect();
    if !reasons.is_empty() {
        html += &details(&reasons_heading(), &reasons);
    }
    let tables: String = tables(report)
        .iter()
        .map(|(heading, table)| format!("<h4>{}</h4>\n{}", escape(heading), html_table(table, &[])))
        .collect();
    html += &details("Every prediction and its error", &(paragraph(&legend()) + &tables));
    let full = format!("<pre class=\"scroll\" tabindex=\"0\">{}</pre>\n", escape(&report.to_string()));
    html + &details("The models, and all parameters", &full)
}

/// Returns the part of the Markdown.
pub(super) fn markdown(predicted: &Predicted, plain: impl Fn(&str) -> String) -> String {
    let mut text = format!("\n### {HEADING}\n\n");
    let report = match predicted {
        Ok(report) => report,
        Err(why) => return text + &format!("Not predicted: {}\n", plain(why)),
    };
    text += &format!("{}\n", plain(&report.sentences().join(" ")));
    for (heading, table) in tables(report) {
        text += &format!("\n#### {}\n\n{}", plain(&heading), table.to_markdown());
    }
    text += &format!("\n{}\n", plain(&legend()));
    let reasons = reasons(report);
    if !reasons.is_empty() {
        text += &format!("\n#### {}\n\n", reasons_heading());
        reasons.iter().for_each(|reason| text += &format!("- {}\n", plain(reason)));
    }
    text
}
