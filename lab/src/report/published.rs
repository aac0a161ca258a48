//! Published figures that stand beside no row: of cases and numbers of jobs that were not measured, and those that are
//! no row's.

use uzram_bench::harness::report::Table;

use super::summary::published_only;
use crate::experiment::{Row, Series};
use crate::{streams, zs_defer, zs_free};

/// Returns tables of them, each with its heading.
pub(super) fn tables(table: &Series, rows: &[Row]) -> Vec<(String, Table)> {
    let mut tables = vec![("Published, not measured here".to_owned(), not_measured(table, rows))];
    tables.extend(match table.name {
        "streams" => Some(streams::published::counts()),
        "zs-free" | "unmap" => Some(zs_free::published::other_machine(rows)),
        "zs-defer" => Some(zs_defer::published::sizes(rows)),
        _ => None,
    });
    tables.retain(|(_, table)| !table.is_empty());
    tables
}

fn not_measured(table: &Series, rows: &[Row]) -> Table {
    let mut text = Table::new(["<case", "jobs", "<before", "figure", "<after", "figure", "gain"]);
    for (case, jobs, published) in published_only(table, rows) {
        text.row([
            case,
            jobs.to_string(),
            published.before.design.to_owned(),
            published.before.figure,
            published.after.design.to_owned(),
            published.after.figure,
            format!("{:.2}", published.ratio),
        ]);
    }
    text
}
