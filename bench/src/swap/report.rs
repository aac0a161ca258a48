//! What is measured of programs that swap, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use super::SIDES;
use crate::harness::report::{Table, figure_cell};

/// The results; medians over the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SwapReport {
    /// The programs.
    pub programs: Vec<ProgramRow>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// A program in half of its memory. Arrays are in the order of [`SIDES`].
#[derive(Clone, Debug, Serialize)]
pub struct ProgramRow {
    /// Its name.
    pub name: &'static str,
    /// Its time with enough memory, once.
    pub plain_s: f64,
    /// The most memory that it takes then.
    pub peak_bytes: u64,
    /// Half of that: the cgroup's limit.
    pub limit_bytes: u64,
    /// Its times.
    pub seconds: [f64; 3],
    /// Those of uzram divided by kernel zram's: the medians of the rounds' ratios.
    pub ratios: [f64; 2],
    /// What was swapped in.
    pub in_bytes: [f64; 3],
    /// What was swapped out.
    pub out_bytes: [f64; 3],
    /// Context switches of the machine.
    pub switches: [f64; 3],
    /// How often the cgroup's limit was raised for a moment, as the kernel found nothing to reclaim, in all rounds.
    pub raised: [usize; 3],
    /// Writes that uzram has failed, in all rounds.
    pub failed_writes: u64,
}

impl SwapReport {
    /// Returns the geometric mean of the programs' ratios, for each of uzram's sides; `None` without programs.
    pub fn mean_ratio(&self, side: usize) -> Option<f64> {
        let logs: Vec<f64> = self.programs.iter().map(|row| row.ratios[side].ln()).collect();
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
    }

    /// Returns the largest of the ratios.
    pub fn worst_ratio(&self, side: usize) -> Option<f64> {
        self.programs.iter().map(|row| row.ratios[side]).reduce(f64::max)
    }

    /// Returns the writes that have failed.
    pub fn failed_writes(&self) -> Option<u64> {
        (!self.programs.is_empty()).then(|| self.programs.iter().map(|row| row.failed_writes).sum())
    }
}

impl fmt::Display for SwapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.programs.is_empty() {
            let mut table = Table::new([
                "<program in half of its memory",
                "<swap",
                "plain s",
                "limit MiB",
                "s",
                "/ kernel zram",
                "MiB in",
                "MiB out",
                "1000 switches",
            ]);
            let mib = |bytes: f64| figure_cell(Some(bytes / f64::from(1 << 20)), 0);
            for row in &self.programs {
                for (side, name) in SIDES.into_iter().enumerate() {
                    table.row([
                        row.name.to_owned(),
                        name.to_owned(),
                        figure_cell(Some(row.plain_s), 2),
                        mib(row.limit_bytes as f64),
                        figure_cell(Some(row.seconds[side]), 2),
                        figure_cell(row.ratios.get(side).copied(), 2),
                        mib(row.in_bytes[side]),
                        mib(row.out_bytes[side]),
                        figure_cell(Some(row.switches[side] / 1e3), 0),
                    ]);
                }
            }
            writeln!(f, "{table}")?;
            for (side, name) in SIDES.into_iter().enumerate().take(2) {
                if let (Some(mean), Some(worst)) = (self.mean_ratio(side), self.worst_ratio(side)) {
                    writeln!(f, "{name}: geometric mean {mean:.2}, worst {worst:.2}")?;
                }
            }
            for row in &self.programs {
                if row.raised.iter().any(|times| *times > 0) {
                    writeln!(
                        f,
                        "{}: the cgroup's limit was raised for a moment {:?} times ({})",
                        row.name,
                        row.raised,
                        SIDES.join(", ")
                    )?;
                }
                if row.failed_writes > 0 {
                    writeln!(f, "{}: {} writes failed", row.name, row.failed_writes)?;
                }
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_geometric() {
        let row = |ratios| ProgramRow {
            name: "a",
            plain_s: 1.0,
            peak_bytes: 2,
            limit_bytes: 1,
            seconds: [1.0; 3],
            ratios,
            in_bytes: [0.0; 3],
            out_bytes: [0.0; 3],
            switches: [0.0; 3],
            raised: [0, 0, 1],
            failed_writes: 1,
        };
        let report = SwapReport { programs: vec![row([1.0, 0.5]), row([4.0, 0.5])], notes: Vec::new() };
        assert!(report.mean_ratio(0).is_some_and(|mean| (mean - 2.0).abs() < 1e-9));
        assert_eq!((report.worst_ratio(0), report.worst_ratio(1)), (Some(4.0), Some(0.5)));
        assert_eq!(report.failed_writes(), Some(2));
        let text = report.to_string();
        assert!(
            text.contains("geometric mean 2.00, worst 4.00") && text.contains("1 writes failed"),
            "{text}"
        );
        assert_eq!(SwapReport::default().mean_ratio(0), None);
    }
}
