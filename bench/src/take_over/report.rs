//! The tables of outages, memory and prices.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::{Cause, MemoryRow, OutageRow, PriceRow};
use crate::harness::report::Table;
use crate::harness::stats::quantile;

/// All results of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TakeOverReport {
    /// For each device a row for each cause.
    pub outages: Vec<OutageRow>,
    /// For each device two rows: filled, and after all take-overs.
    pub memory: Vec<MemoryRow>,
    /// NBD and swap.
    pub prices: Vec<PriceRow>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl TakeOverReport {
    /// Returns the outages of the device with that pool.
    pub fn outage(&self, pool_bytes: u64, cause: Cause) -> Option<&OutageRow> {
        self.outages.iter().find(|row| (row.pool_bytes, row.cause) == (pool_bytes, cause))
    }

    /// Returns the row of what was measured.
    pub fn price(&self, what: &str) -> Option<&PriceRow> {
        self.prices.iter().find(|row| row.what == what)
    }

    /// Returns the most private memory of the holder of the device with that pool.
    pub fn holder_bytes(&self, pool_bytes: u64) -> Option<u64> {
        let rows = self.memory.iter().filter(|row| row.pool_bytes == pool_bytes);
        rows.map(|row| row.holder.private_dirty_bytes).max()
    }

    fn outages_table(&self) -> Table {
        let mut table = Table::new([
            "<longest gap at a client",
            "pool",
            "device",
            "times",
            "median ms",
            "p99 ms",
            "max ms",
            "daemon's own: outage",
            "gone",
            "attach",
        ]);
        for row in &self.outages {
            let ms = |figure: f64| format!("{figure:.1}");
            let own = |times: &[f64]| match times {
                [] => "-".to_owned(),
                times => format!("{:.1} to {:.1}", quantile(times, 0.5), quantile(times, 1.0)),
            };
            table.row([
                row.cause.name().to_owned(),
                format_size(row.used_bytes),
                format_size(row.size_bytes),
                row.gaps_ms.len().to_string(),
                ms(row.median_ms),
                ms(row.p99_ms),
                ms(row.max_ms),
                own(&row.phases.outage_ms),
                own(&row.phases.gone_ms),
                own(&row.phases.attach_ms),
            ]);
        }
        table
    }

    fn memory_table(&self) -> Table {
        let mut table = Table::new(["<memory", "<process", "pool", "private dirty KiB", "page tables KiB"]);
        for row in &self.memory {
            for (process, memory) in
                [("holder", row.holder), ("worker", row.worker), ("stand-by", row.standby)]
            {
                table.row([
                    row.when.to_owned(),
                    process.to_owned(),
                    format_size(row.pool_bytes),
                    (memory.private_dirty_bytes >> 10).to_string(),
                    (memory.page_table_bytes >> 10).to_string(),
                ]);
            }
        }
        table
    }

    fn prices_table(&self) -> Table {
        let mut table = Table::new(["<beside --no-survive", "<", "default", "--no-survive", "speed ratio"]);
        for row in &self.prices {
            table.row([
                row.what.clone(),
                row.unit.to_owned(),
                format!("{:.0}", row.survive),
                format!("{:.0}", row.no_survive),
                format!("{:.3}", row.speed_ratio),
            ]);
        }
        table
    }
}

impl fmt::Display for TakeOverReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in [self.outages_table(), self.memory_table(), self.prices_table()] {
            if !table.is_empty() {
                writeln!(f, "{table}")?;
            }
        }
        if !self.outages.is_empty() {
            writeln!(f, "the daemon's own figures: median to longest, in ms")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
