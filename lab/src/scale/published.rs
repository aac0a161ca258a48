//! Published figures of several tasks, predicted from that of one.
//!
//! The times of a design's sections are those measured here, all scaled by one factor, so that one task takes as long as
//! its author published. Nothing else is fitted. Where no figure of one task was published, the times stay as they are
//! here, and only the gain of one design over another can be compared.

use std::sync::atomic::AtomicBool;

use serde::Serialize;
use uzram::Result;

use super::Design;
use super::parameters::{CaseParameters, MachineParameters, Parameters, PublishedParameters};
use super::predict::{Band, Speeds, Variants};
use super::reasons;
use crate::experiment::Series;
use uzram_bench::harness::go_on;

/// Errors beyond so many percent are marked, and those of published figures explained.
pub const TOLERATED_PERCENT: f64 = 15.0;

/// The published figures of a case on one machine, and their predictions.
#[derive(Clone, Debug, Serialize)]
pub struct PublishedCase {
    /// The table's case.
    pub case: String,
    /// The machine.
    pub machine: String,
    /// Its cores.
    pub cores: usize,
    /// The quantity.
    pub figure: String,
    /// The same in words.
    pub heading: String,
    /// The figures; none if there is none of one task.
    pub figures: Vec<FigurePoint>,
    /// The gains of the table's design after over those before.
    pub gains: Vec<GainPoint>,
    /// What the figures show that no model of locks can, and why errors exceed [`TOLERATED_PERCENT`], as far as the model
    /// can tell.
    pub reasons: Vec<String>,
}

/// A published figure.
#[derive(Clone, Debug, Serialize)]
pub struct FigurePoint {
    /// The design, by its author's name.
    pub published_design: &'static str,
    /// The design here whose model predicts it.
    pub design: String,
    /// The number of tasks.
    pub tasks: usize,
    /// The figure.
    pub published: f64,
    /// Its prediction.
    pub predicted: Band,
    /// How much the middle of the prediction exceeds the figure.
    pub error_percent: f64,
    /// How many times the work of one task all did, as published.
    pub published_speedup: f64,
    /// The same, predicted.
    pub predicted_speedup: f64,
    /// The part of their time in which the predicted tasks wait for locks.
    pub waiting_share: f64,
}

/// The published gain of a design.
#[derive(Clone, Debug, Serialize)]
pub struct GainPoint {
    /// The design before, by its author's name.
    pub published_before: &'static str,
    /// The design after, by its author's name.
    pub published_after: &'static str,
    /// The design here whose model is that of the one before.
    pub before: String,
    /// That of the one after.
    pub after: String,
    /// The number of tasks.
    pub tasks: usize,
    /// How many times as fast the design after was.
    pub published: f64,
    /// The same, predicted.
    pub predicted: Band,
    /// How much the middle of the prediction exceeds the gain.
    pub error_percent: f64,
}

/// A published figure.
struct Figure {
    /// The author's name of the design.
    design: &'static str,
    tasks: usize,
    value: f64,
}

/// A published figure of a design here, and the speeds that are predicted for it.
struct Prediction<'a> {
    design: &'a Design<'a>,
    figure: Figure,
    speeds: Speeds,
}

/// Predicts the published figures of a case.
///
/// # Errors
/// Those of the models; `Busy` once `stop` is set.
pub(super) fn predict(
    table: &Series,
    parameters: &Parameters,
    case: &str,
    workload: &CaseParameters,
    designs: &[Design<'_>],
    stop: &AtomicBool,
) -> Result<Vec<PublishedCase>> {
    let mut cases = Vec::new();
    for published in &workload.published {
        let machine = parameters.machine(&published.machine)?;
        let mut predictions = Vec::new();
        for design in designs {
            go_on(stop)?;
            let figures = figures(table, case, published, &design.name);
            let variants = |unit_ns| {
                Variants::elsewhere(parameters, workload, design.sections, design.measured, machine, unit_ns)
            };
            predictions.extend(predict_design(design, figures, published, machine, variants)?);
        }
        let mut of_machine = PublishedCase {
            case: case.to_owned(),
            machine: machine.name.clone(),
            cores: machine.cores,
            figure: published.figure.clone(),
            heading: published.heading.clone(),
            figures: if published.fits_one_task {
                figure_points(published, &predictions)
            } else {
                Vec::new()
            },
            gains: gain_points(&(table.designs)().after, published, &predictions),
            reasons: Vec::new(),
        };
        of_machine.reasons = reasons::paragraphs(&of_machine, published);
        cases.push(of_machine);
    }
    Ok(cases)
}

/// Returns the published figures of a design, which has this name in the table.
fn figures(table: &Series, case: &str, published: &PublishedParameters, design: &str) -> Vec<Figure> {
    let designs = (table.designs)();
    let before = designs.before.iter().position(|before| before == design);
    if before.is_none() && design != designs.after {
        return Vec::new();
    }
    let figure = |(jobs, tasks)| {
        let row = (table.published)(case, jobs, before.unwrap_or(0))?;
        let side = if before.is_some() { row.before } else { row.after };
        let value = side.values.get(published.figure.as_str()).copied()?;
        Some(Figure { design: side.design, tasks, value })
    };
    published.points().filter_map(figure).collect()
}

/// Predicts the speed of each number of tasks of a design, from its published figures.
fn predict_design<'a>(
    design: &'a Design<'a>,
    figures: Vec<Figure>,
    published: &PublishedParameters,
    machine: &MachineParameters,
    variants: impl FnOnce(Option<f64>) -> Result<Variants>,
) -> Result<Vec<Prediction<'a>>> {
    let one = figures.iter().find(|figure| figure.tasks == 1);
    if figures.is_empty() || (published.fits_one_task && one.is_none()) {
        return Ok(Vec::new());
    }
    let variants = variants(one.map(|figure| 1e9 / published.units_per_s(figure.value, 1)))?;
    let predict = |figure: Figure| {
        let speeds = match figure.tasks {
            // What was fitted is exact, whatever a simulation's times are.
            1 => Speeds { units_per_s: vec![published.units_per_s(figure.value, 1)], waiting_share: 0.0 },
            // More tasks than cores take turns.
            tasks => variants.speeds(tasks.min(machine.cores))?,
        };
        Ok(Prediction { design, figure, speeds })
    };
    figures.into_iter().map(predict).collect()
}

fn figure_points(published: &PublishedParameters, predictions: &[Prediction<'_>]) -> Vec<FigurePoint> {
    let of_one = |design: &str| {
        let one = predictions.iter().find(|one| one.design.name == design && one.figure.tasks == 1);
        one.map_or(f64::NAN, |one| published.units_per_s(one.figure.value, 1))
    };
    let point = |Prediction { design, figure, speeds }: &Prediction<'_>| {
        let Figure { design: published_design, tasks, value } = *figure;
        let of_one = of_one(&design.name);
        let figure_of = |per_s: &f64| published.figure_of(*per_s, tasks);
        let predicted = Band::of(&speeds.units_per_s.iter().map(figure_of).collect::<Vec<_>>());
        FigurePoint {
            published_design,
            design: design.modelled_as.clone(),
            tasks,
            published: value,
            predicted,
            error_percent: 100.0 * (predicted.middle / value - 1.0),
            published_speedup: published.units_per_s(value, tasks) / of_one,
            predicted_speedup: Band::of(&speeds.units_per_s).middle / of_one,
            waiting_share: speeds.waiting_share,
        }
    };
    predictions.iter().map(point).collect()
}

/// Returns the gains of the design after, which has this name in the table, over each before, with more than one task.
fn gain_points(
    after: &str,
    published: &PublishedParameters,
    predictions: &[Prediction<'_>],
) -> Vec<GainPoint> {
    let gain = |before: &Prediction<'_>| {
        let tasks = before.figure.tasks;
        if before.design.name == after || tasks == 1 {
            return None;
        }
        let is_after = |other: &&Prediction<'_>| other.design.name == after && other.figure.tasks == tasks;
        let after = predictions.iter().find(is_after)?;
        let per_s = |of: &Prediction<'_>| published.units_per_s(of.figure.value, tasks);
        let gain = per_s(after) / per_s(before);
        // Variant by variant: both have the same cost of lines, or were measured in the same round.
        let variants = after.speeds.units_per_s.iter().zip(&before.speeds.units_per_s);
        let predicted = Band::of(&variants.map(|(after, before)| after / before).collect::<Vec<_>>());
        Some(GainPoint {
            published_before: before.figure.design,
            published_after: after.figure.design,
            before: before.design.modelled_as.clone(),
            after: after.design.modelled_as.clone(),
            tasks,
            published: gain,
            predicted,
            error_percent: 100.0 * (predicted.middle / gain - 1.0),
        })
    };
    predictions.iter().filter_map(gain).collect()
}
