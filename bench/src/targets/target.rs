//! A target: a figure, where it should lie, and what was measured.

use std::fmt;

use serde::Serialize;

use crate::harness::report::{Table, ratio_cell};

/// Which side of the wanted figure is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The figure or more.
    AtLeast,
    /// The figure or less.
    AtMost,
}

/// One target and what was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// What is measured.
    pub name: String,
    /// Which side of `wanted` is good.
    pub bound: Bound,
    /// The figure to reach: a ratio, unless the name says what else.
    pub wanted: f64,
    /// The figure measured; none when it could not be.
    pub measured: Option<f64>,
}

impl Target {
    /// A figure that should be `wanted` or more.
    pub fn at_least(name: impl Into<String>, wanted: f64, measured: Option<f64>) -> Target {
        Target { name: name.into(), bound: Bound::AtLeast, wanted, measured }
    }

    /// A figure that should be `wanted` or less.
    pub fn at_most(name: impl Into<String>, wanted: f64, measured: Option<f64>) -> Target {
        Target { name: name.into(), bound: Bound::AtMost, wanted, measured }
    }

    /// Whether it is reached; none when it was not measured.
    pub fn is_met(&self) -> Option<bool> {
        self.measured.map(|measured| match self.bound {
            Bound::AtLeast => measured >= self.wanted,
            Bound::AtMost => measured <= self.wanted,
        })
    }
}

/// Prints each target beside what was measured.
pub struct Targets<'a>(pub &'a [Target]);

impl fmt::Display for Targets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["<target", "wanted", "measured", "<"]);
        for target in self.0 {
            let sign = match target.bound {
                Bound::AtLeast => '≥',
                Bound::AtMost => '≤',
            };
            let verdict = match target.is_met() {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "not measured",
            };
            table.row([
                target.name.clone(),
                format!("{sign} {}", target.wanted),
                ratio_cell(target.measured, 3),
                verdict.to_owned(),
            ]);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_has_a_good_side() {
        let mut target = Target::at_least("speed", 1.5, Some(1.5));
        assert_eq!(target.is_met(), Some(true));
        target.bound = Bound::AtMost;
        target.measured = Some(1.6);
        assert_eq!(target.is_met(), Some(false));
        target.measured = None;
        assert_eq!(target.is_met(), None);
    }
}
