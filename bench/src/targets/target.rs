//! A target: a figure, its bound, and the measured value.

use serde::Serialize;

use crate::harness::bound::Bound;
use crate::harness::report::{Table, figure_cell};

/// One target and its measured value.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// The name of the figure.
    pub name: String,
    /// The bound of the figure, which is a ratio unless the name says otherwise.
    #[serde(flatten)]
    pub bound: Bound,
    /// The measured value; `None` if it could not be measured.
    pub measured: Option<f64>,
}

impl Target {
    /// Returns whether it is met; `None` if it was not measured.
    pub fn is_met(&self) -> Option<bool> {
        self.measured.map(|measured| self.bound.holds(measured))
    }
}

/// Returns a table with a row for each target.
pub fn table(targets: &[Target]) -> Table {
    let mut table = Table::new(["<target", "wanted", "measured", "<"]);
    for target in targets {
        let verdict = match target.is_met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "not measured",
        };
        let measured = figure_cell(target.measured, 3);
        table.row([target.name.clone(), target.bound.cell(), measured, verdict.to_owned()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_missed_or_not_measured() {
        let target = |(name, bound, measured): (&str, _, _)| Target { name: name.into(), bound, measured };
        let targets = [
            ("speed", Bound::AtLeast(1.5), Some(1.5)),
            ("memory", Bound::AtMost(1.5), Some(1.6)),
            ("time", Bound::AtMost(1.0), None),
        ]
        .map(target);
        assert_eq!(targets.each_ref().map(Target::is_met), [Some(true), Some(false), None]);
        let text = table(&targets).to_string();
        let lines = [
            "target wanted measured",
            "speed   ≥ 1.5    1.500  met",
            "memory  ≤ 1.5    1.600  MISSED",
            "time      ≤ 1        -  not measured",
        ];
        assert!(text.lines().eq(lines), "{text}");
    }
}
