//! Bounds of measured figures, checked and put into words, for benchmarks and lab alike.

use std::fmt;

use serde::Serialize;

use super::stats::PairedRatio;

/// The range in which a figure should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "bound", content = "wanted", rename_all = "snake_case")]
pub enum Bound {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
    /// From the first to the second; of a ratio, the whole interval.
    Within(f64, f64),
    /// This or more; of a ratio, at least the end of its interval.
    NotBelow(f64),
}

impl Bound {
    /// Returns whether a figure is within the bound.
    pub fn holds(self, figure: f64) -> bool {
        self.holds_between(figure, figure, figure)
    }

    /// Returns whether a ratio is within the bound, judged by its interval where the bound says so.
    pub fn holds_for(self, ratio: &PairedRatio) -> bool {
        self.holds_between(ratio.low, ratio.ratio, ratio.high)
    }

    fn holds_between(self, low: f64, middle: f64, high: f64) -> bool {
        match self {
            Bound::AtLeast(wanted) => middle >= wanted,
            Bound::AtMost(wanted) => middle <= wanted,
            Bound::Within(least, most) => low >= least && high <= most,
            Bound::NotBelow(wanted) => high >= wanted,
        }
    }

    /// The text for a cell of a table.
    pub fn cell(self) -> String {
        match self {
            Bound::AtLeast(wanted) | Bound::NotBelow(wanted) => format!("≥ {wanted}"),
            Bound::AtMost(wanted) => format!("≤ {wanted}"),
            Bound::Within(least, most) => format!("{least} to {most}"),
        }
    }
}

/// The text for a sentence.
impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::AtLeast(wanted) => write!(f, "at least {wanted:.2}"),
            Bound::AtMost(wanted) => write!(f, "at most {wanted:.2}"),
            Bound::Within(least, most) => write!(f, "from {least:.2} to {most:.2}, with the whole interval,"),
            Bound::NotBelow(wanted) => write!(f, "at least {wanted:.2}, within the noise,"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_judged_by_itself_and_a_ratio_by_its_interval() {
        let ratio = PairedRatio { ratio: 1.0, low: 0.9, high: 1.1, p: 1.0 };
        for (bound, least_figure, most_figure, holds_for_ratio) in [
            (Bound::AtLeast(1.0), 1.0, f64::MAX, true),
            (Bound::AtLeast(1.01), 1.01, f64::MAX, false),
            (Bound::AtMost(1.0), 0.0, 1.0, true),
            (Bound::AtMost(0.99), 0.0, 0.99, false),
            (Bound::Within(0.9, 1.1), 0.9, 1.1, true),
            (Bound::Within(0.9, 1.09), 0.9, 1.09, false),
            (Bound::Within(0.91, 1.1), 0.91, 1.1, false),
            (Bound::NotBelow(1.1), 1.1, f64::MAX, true),
            (Bound::NotBelow(1.11), 1.11, f64::MAX, false),
        ] {
            assert!(bound.holds(least_figure) && bound.holds(most_figure), "{bound:?}");
            assert!(!bound.holds(least_figure - 0.005) || least_figure == 0.0, "{bound:?}");
            assert!(!bound.holds(most_figure + 0.005) || most_figure == f64::MAX, "{bound:?}");
            assert_eq!(bound.holds_for(&ratio), holds_for_ratio, "{bound:?}");
        }
    }
}
