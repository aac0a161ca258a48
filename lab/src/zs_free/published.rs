//! The authors' figures, from the file of published figures: the times to unmap memory that is swapped out to zram.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{JOBS, SERIES};
use crate::experiment::{Published, PublishedSide, Row};
use crate::published::{Source, part, times_table};
use uzram_bench::harness::report::Table;

/// The authors' tables.
static LETTER: LazyLock<Letter> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Letter {
    /// The names of the sides before and after.
    designs: [String; 2],
    /// The numbers of processes, in the order of each machine's figures.
    processes: [usize; JOBS.len()],
    /// The machine whose figures are in the table.
    i7: Machine,
    raspberry_pi: Machine,
    source: Source,
}

/// Milliseconds, by number of processes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    name: String,
    base_ms: [f64; JOBS.len()],
    patched_ms: [f64; JOBS.len()],
}

impl Machine {
    const fn gain(&self, at: usize) -> f64 {
        self.base_ms[at] / self.patched_ms[at]
    }
}

/// Returns the published figures.
pub(crate) fn figures(jobs: usize) -> Option<Published> {
    let Letter { designs, processes, i7, raspberry_pi, .. } = &*LETTER;
    let at = processes.iter().position(|published| *published == jobs)?;
    let side = |design: usize, of: fn(&Machine) -> &[f64; JOBS.len()]| {
        let ms = |machine| of(machine)[at];
        let values = BTreeMap::from([
            ("i7_elapsed_s", ms(i7) / 1000.0),
            ("raspberry_pi_elapsed_s", ms(raspberry_pi) / 1000.0),
        ]);
        PublishedSide { design: &designs[design], figure: format!("{:.1} ms", ms(i7)), values }
    };
    let (before, after) = (side(0, |machine| &machine.base_ms), side(1, |machine| &machine.patched_ms));
    Some(Published { before, after, ratio: i7.gain(at) })
}

/// Returns the text about the source of the figures.
pub(crate) fn legend() -> String {
    let of = |machine: &Machine| {
        let ms = |at| {
            let (base, patched): (f64, f64) = (machine.base_ms[at], machine.patched_ms[at]);
            format!("{base:.1} -> {patched:.1} ms ({:.2})", machine.gain(at))
        };
        format!("{}: {}, {}, {}", machine.name, ms(0), ms(1), ms(2))
    };
    let [one, two, most] = LETTER.processes;
    format!(
        "published: {}; with {one}, {two} and {most} processes; {}; {}; in the table the i7's",
        LETTER.source.command,
        of(&LETTER.i7),
        of(&LETTER.raspberry_pi)
    )
}

/// Returns the times of the machine that is not in the table, beside the gains of the rows with published figures.
pub(crate) fn other_machine(rows: &[Row]) -> (String, Table) {
    let Letter { designs: [before, after], processes, raspberry_pi, .. } = &*LETTER;
    let Machine { name, base_ms, patched_ms } = raspberry_pi;
    let times = processes.iter().zip(base_ms.iter().zip(patched_ms)).map(|(jobs, (base, patched))| {
        let here = rows.iter().filter(|row| row.jobs == *jobs && row.published.is_some());
        let here: Vec<_> = here.map(|row| format!("{}: {:.2}", row.case, row.gain)).collect();
        (jobs.to_string(), [*base, *patched], here.join("; "))
    });
    (format!("Published on {name}"), times_table("jobs", [before, after], "gain here", times))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_gains_are_those_of_the_letter() {
        let machines = [&LETTER.i7, &LETTER.raspberry_pi];
        let rounded = |at| machines.map(|machine| (100.0 * machine.gain(at)).round() / 100.0);
        assert_eq!([0, 1, 2].map(rounded), [[1.19, 1.05], [1.40, 1.42], [1.39, 1.83]]);
        let four = figures(4).unwrap();
        assert_eq!((four.before.figure.as_str(), four.after.figure.as_str()), ("63.0 ms", "45.3 ms"));
        assert!((four.after.values["raspberry_pi_elapsed_s"] - 0.1106).abs() < 1e-9);
        assert!(figures(3).is_none());
        assert_eq!(LETTER.processes, JOBS, "the table has a row for each");
        assert!(legend().contains("59.0 -> 56.0 ms (1.05), 94.6 -> 66.7 ms (1.42)"), "{}", legend());
    }
}
