//! The figures of the patch's author, from the file of published figures: all those of his message.
//!
//! Rates are as fio printed them, KB being 1024 bytes and MB 1024 KB (kb_base of fio 2); they are converted to 10^6
//! bytes a second beside ours.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Deserializer, de};

use super::SERIES;
use crate::experiment::{Published, PublishedSide};
use crate::published::{Source, part};
use uzram_bench::engine::Pattern;
use uzram_bench::harness::report::Table;

/// Numbers of jobs, from 1 on.
pub(super) const JOBS: usize = 10;
/// Columns of each table.
const DESIGNS: usize = 3;
const PER_CPU: usize = 2;

/// The author's tables.
static MESSAGE: LazyLock<Message> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    /// The names of the columns: 4 streams, 8 streams, per-cpu.
    designs: [String; DESIGNS],
    jobs: Vec<Lines>,
    source: Source,
}

/// The lines of one number of jobs, each with an entry for each design.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lines {
    jobs: usize,
    read: [Rate; DESIGNS],
    randread: [Rate; DESIGNS],
    write: [Rate; DESIGNS],
    randwrite: [Rate; DESIGNS],
    rw_read: [Rate; DESIGNS],
    rw_write: [Rate; DESIGNS],
    randrw_read: [Rate; DESIGNS],
    randrw_write: [Rate; DESIGNS],
    /// perf stat's counts of all six patterns together.
    stalled_cycles_frontend: [f64; DESIGNS],
    stalled_cycles_backend: [f64; DESIGNS],
    instructions: [f64; DESIGNS],
    branches: [f64; DESIGNS],
    branch_misses: [f64; DESIGNS],
    /// The seconds that perf stat reported of all six patterns together.
    elapsed_s: [f64; DESIGNS],
}

/// A rate in fio's notation, `2520.1MB/s` or `434013KB/s`; here in 10^6 bytes a second.
#[derive(Clone, Copy)]
struct Rate(f64);

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Rate, D::Error> {
        let text = String::deserialize(deserializer)?;
        let in_unit = |unit: &str, bytes: u32| {
            let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
            Some(Rate(number * f64::from(bytes) / 1e6))
        };
        let rate = in_unit("MB/s", 1 << 20).or_else(|| in_unit("KB/s", 1 << 10));
        rate.ok_or_else(|| de::Error::custom(format!("'{text}' is no rate")))
    }
}

/// Returns the author's name of a design.
pub(super) fn design_name(design: usize) -> &'static str {
    &MESSAGE.designs[design]
}

/// Returns the text about the machine.
pub(super) fn machine() -> &'static str {
    &MESSAGE.source.machine
}

fn lines(jobs: usize) -> Option<&'static Lines> {
    MESSAGE.jobs.iter().find(|lines| lines.jobs == jobs)
}

/// Returns the rates of one design with a pattern: `read_mb_per_s` and `write_mb_per_s`, as far as it reads
/// and writes, and their sum `mb_per_s`.
fn rates(pattern: Pattern, jobs: usize, design: usize) -> Option<BTreeMap<&'static str, f64>> {
    let lines = lines(jobs)?;
    let (read, write) = match pattern {
        Pattern::Read => (Some(lines.read), None),
        Pattern::RandRead => (Some(lines.randread), None),
        Pattern::Write => (None, Some(lines.write)),
        Pattern::RandWrite => (None, Some(lines.randwrite)),
        Pattern::Rw => (Some(lines.rw_read), Some(lines.rw_write)),
        Pattern::RandRw => (Some(lines.randrw_read), Some(lines.randrw_write)),
    };
    let [read, write] = [read, write].map(|rates| rates.map(|rates| rates[design].0));
    let sum = read.unwrap_or(0.0) + write.unwrap_or(0.0);
    let parts = [("read_mb_per_s", read), ("write_mb_per_s", write), ("mb_per_s", Some(sum))];
    Some(parts.into_iter().filter_map(|(name, rate)| rate.map(|rate| (name, rate))).collect())
}

/// Returns the patch's gain over the design `before` (0 for 4 streams, 1 for 8) with a pattern.
pub(super) fn of_pattern(pattern: Pattern, jobs: usize, before: usize) -> Option<Published> {
    let side = |design: usize| {
        let values = rates(pattern, jobs, design)?;
        let figure = format!("{:.0} MB/s", values["mb_per_s"]);
        Some(PublishedSide { design: design_name(design), figure, values })
    };
    let (before, after) = (side(before)?, side(PER_CPU)?);
    let ratio = after.values["mb_per_s"] / before.values["mb_per_s"];
    Some(Published { before, after, ratio })
}

impl Lines {
    /// Returns perf's counts by their names.
    const fn counts(&self) -> [(&'static str, [f64; DESIGNS]); 5] {
        [
            ("stalled_cycles_frontend", self.stalled_cycles_frontend),
            ("stalled_cycles_backend", self.stalled_cycles_backend),
            ("instructions", self.instructions),
            ("branches", self.branches),
            ("branch_misses", self.branch_misses),
        ]
    }
}

/// Returns the same for all six patterns together: seconds, and perf's counts.
pub(super) fn of_all(jobs: usize, before: usize) -> Option<Published> {
    let lines = lines(jobs)?;
    let side = |design: usize| {
        let figures = lines.counts().into_iter().chain([("elapsed_s", lines.elapsed_s)]);
        let values = figures.map(|(name, designs)| (name, designs[design])).collect();
        let figure = format!("{:.1} s", lines.elapsed_s[design]);
        PublishedSide { design: design_name(design), figure, values }
    };
    let ratio = lines.elapsed_s[before] / lines.elapsed_s[PER_CPU];
    Some(Published { before: side(before), after: side(PER_CPU), ratio })
}

/// Returns perf's counts of all six patterns together, by number of jobs.
pub(crate) fn counts() -> (String, Table) {
    let headings = ["jobs", "<count"].into_iter().chain(MESSAGE.designs.iter().map(String::as_str));
    let mut table = Table::new(headings);
    for lines in &MESSAGE.jobs {
        for (name, designs) in lines.counts() {
            let counts = designs.iter().map(|count| format!("{count:.0}"));
            table.row([lines.jobs.to_string(), name.replace('_', " ")].into_iter().chain(counts));
        }
    }
    ("Published counts of perf stat, all six patterns together".to_owned(), table)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn figures_of_the_message_are_found() {
        let randwrite = of_pattern(Pattern::RandWrite, 4, 0).unwrap();
        assert_eq!((randwrite.before.design, randwrite.after.design), ("4 streams", "per-cpu"));
        assert!((randwrite.ratio - 5785.4 / 3608.9).abs() < 1e-9);
        assert!((randwrite.before.values["write_mb_per_s"] - 3608.9 * 1.048576).abs() < 1e-6);
        assert!(!randwrite.before.values.contains_key("read_mb_per_s"));
        let randrw = of_pattern(Pattern::RandRw, 1, 1).unwrap();
        assert!((randrw.before.values["mb_per_s"] - (405139.0 + 405197.0) * 1024.0 / 1e6).abs() < 1e-6);
        assert!((randrw.after.values["read_mb_per_s"] - 403373.0 * 1024.0 / 1e6).abs() < 1e-6);
        let all = of_all(10, 1).unwrap();
        assert_eq!(all.before.values["elapsed_s"], 43.874898137);
        assert_eq!(all.after.values["branch_misses"], 183_135_268.0);
        assert!(of_all(11, 0).is_none() && of_pattern(Pattern::Read, 0, 0).is_none());
    }

    /// The message's units change from KB/s to MB/s within columns; a mistake would stand out.
    #[test]
    fn no_figure_is_out_of_line() {
        for pattern in Pattern::ALL {
            for jobs in 1..=JOBS {
                for before in 0..PER_CPU {
                    let gain = of_pattern(pattern, jobs, before).unwrap().ratio;
                    assert!((0.95..1.85).contains(&gain), "{pattern}, {jobs} jobs: {gain}");
                    let gain = of_all(jobs, before).unwrap().ratio;
                    assert!((1.0..1.3).contains(&gain), "{jobs} jobs: {gain}");
                }
            }
        }
    }
}
