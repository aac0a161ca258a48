//! The report for programs: the machine, and of each table the source of the published figures, the verdict,
//! and the rows in the form of `uzram lab run --json`, and the locks in that of `uzram lab scale --json`; or,
//! as `failed` or `left_out`, why it was not measured.

use serde_json::json;

use super::machine::date;
use super::summary::{Comparison, sentences, tally};
use super::{Report, Section, is_left_out};
use crate::scale::ScaleReport;

/// Returns the report as one line of JSON; figures that do not exist are `null`.
pub(super) fn json(report: &Report) -> String {
    let tables: Vec<_> = report.sections.iter().map(table).collect();
    let json = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "quick": report.quick,
        "machine": report.machine,
        "tables": tables,
    });
    format!("{json}\n")
}

fn table(section: &Section) -> serde_json::Value {
    let Section { table, outcome } = section;
    let measured = match outcome {
        Err(error) => {
            let key = if is_left_out(error) { "left_out" } else { "failed" };
            return json!({ "table": table.name, key: error.to_string() });
        }
        Ok(measured) => measured,
    };
    let report = &measured.report;
    let effects = Comparison::all(&(table.designs)()).into_iter().map(|comparison| {
        let counts = tally(comparison.rows(&report.rows)).map(|(effect, rows)| (effect.name(), rows));
        json!({
            "before": comparison.before,
            "after": comparison.after,
            "rows": counts.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        })
    });
    json!({
        "table": table.name,
        "about": table.about,
        "series": report.series,
        "published_source": table.source(),
        "date": date(measured.unix_s),
        "rounds": measured.rounds,
        "took_s": measured.took_s,
        "sentences": sentences(table, report),
        "effects": effects.collect::<Vec<_>>(),
        "verdict": report.verdict,
        "notes": report.notes,
        "rows": report.rows,
        "scale": ScaleReport::new(table, &report.rows),
    })
}
