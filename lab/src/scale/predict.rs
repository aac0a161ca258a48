//! Predictions: the speed of a design with so many cores, here and on the machines whose figures were published, each
//! with the band in which the measured times and the costs of lines put it.

use serde::Serialize;
use uzram::Result;

use super::costs::Costs;
use super::measured::{Level, Measured, Pick, elsewhere, here};
use super::model::{Machine, Model};
use super::mva;
use super::parameters::{CaseParameters, MachineParameters, Parameters, SectionParameters};
use super::simulate::simulate;

/// A prediction and its band.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Band {
    /// The least of all variants.
    pub low: f64,
    /// With medians of all measurements, and the middle cost of a line.
    pub middle: f64,
    /// The most of all variants.
    pub high: f64,
}

impl Band {
    /// Returns the band of variants, the first of which is the middle.
    pub fn of(variants: &[f64]) -> Band {
        Band {
            low: variants.iter().copied().fold(f64::INFINITY, f64::min),
            middle: variants.first().copied().unwrap_or(f64::NAN),
            high: variants.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    /// Returns whether a value lies in it.
    pub fn contains(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// A design with so many cores.
#[derive(Clone, Debug)]
pub struct Speeds {
    /// Pages or objects a second by all cores, a prediction for each variant; the first is the middle.
    pub units_per_s: Vec<f64>,
    /// The part of the cores' time in which they wait for locks, of the middle.
    pub waiting_share: f64,
}

/// The variants of a design's model, each with a machine: the first has the medians, two have other costs of lines, and
/// then there is one for each round.
pub struct Variants {
    variants: Vec<(Model, Machine)>,
    units_per_operation: f64,
    operations: usize,
    seed: u64,
}

impl Variants {
    /// Returns those of this machine.
    ///
    /// # Errors
    /// Those of [`Measured::model`].
    pub fn here(
        parameters: &Parameters,
        case: &CaseParameters,
        sections: &[SectionParameters],
        measured: Measured<'_>,
    ) -> Result<Variants> {
        let machine = |level| here(measured.costs, parameters.spin_lines_per_waiter, level);
        Variants::new(parameters, case, sections, measured, machine)
    }

    /// Returns those of another machine, on which an operation alone takes so many nanoseconds a page or object; as
    /// many as here if that is unknown.
    ///
    /// # Errors
    /// Those of [`Measured::model`].
    pub fn elsewhere(
        parameters: &Parameters,
        case: &CaseParameters,
        sections: &[SectionParameters],
        measured: Measured<'_>,
        other: &MachineParameters,
        unit_ns: Option<f64>,
    ) -> Result<Variants> {
        let costs: &Costs = measured.costs;
        let machine = |level| elsewhere(costs, other.line_ns, other.nodes, level);
        let mut variants = Variants::new(parameters, case, sections, measured, machine)?;
        if let Some(unit_ns) = unit_ns {
            let operation_ns = unit_ns * case.units_per_operation;
            for (model, _) in &mut variants.variants {
                *model = model.scaled(operation_ns / model.alone_ns());
            }
        }
        Ok(variants)
    }

    fn new(
        parameters: &Parameters,
        case: &CaseParameters,
        sections: &[SectionParameters],
        measured: Measured<'_>,
        machine: impl Fn(Level) -> Machine,
    ) -> Result<Variants> {
        let median = measured.model(case, sections, Pick::Median)?;
        let levels = [Level::Middle, Level::Low, Level::High];
        let mut variants: Vec<_> = levels.into_iter().map(|level| (median.clone(), machine(level))).collect();
        for round in 0..measured.rounds() {
            variants.push((measured.model(case, sections, Pick::Round(round))?, machine(Level::Middle)));
        }
        let Parameters { operations, seed, .. } = *parameters;
        Ok(Variants { variants, units_per_operation: case.units_per_operation, operations, seed })
    }

    /// Returns the model and the machine of the middle.
    pub fn middle(&self) -> &(Model, Machine) {
        &self.variants[0]
    }

    /// Predicts the speed with so many cores.
    ///
    /// # Errors
    /// Those of [`Model::check`].
    pub fn speeds(&self, cores: usize) -> Result<Speeds> {
        let mut speeds = Speeds { units_per_s: Vec::new(), waiting_share: 0.0 };
        for (at, (model, machine)) in self.variants.iter().enumerate() {
            let outcome = simulate(model, machine, cores, self.seed, self.operations)?;
            speeds.units_per_s.push(outcome.per_s * self.units_per_operation);
            if at == 0 {
                speeds.waiting_share = outcome.waiting_share;
            }
        }
        Ok(speeds)
    }

    /// Returns the exact speed of the middle if lines and waiting cost nothing.
    pub fn without_lines(&self, cores: usize) -> f64 {
        let (model, machine) = self.middle();
        mva::throughput(model, cores, machine.nodes) * self.units_per_operation
    }
}
