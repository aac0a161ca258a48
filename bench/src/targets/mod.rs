//! The project's targets, measured in one run and printed beside the wanted figures.
//!
//! A target is a line of `targets.txt`: its bound, the figure of a report (table, row and column), and its
//! name. Nearly all are ratios of two things measured in the same run, on the mixed corpus, with lz4 unless
//! stated otherwise; hit ratios are compared by their difference, and measure no time. If a target cannot be
//! measured on a machine, a note says why.

use std::fmt;

use serde::Serialize;
use uzram::Result;

use crate::engine::{self, backing, compaction, device, hit_ratio, recompression, survive};
use crate::harness::bound::Bound;
use crate::harness::corpus::Saved;
use crate::harness::report::{Table, figure_cell};
use crate::harness::{Options, Report, Source};
use crate::{block, nbd, pager, programs, remote, run, swap, take_over};

const TARGETS: &str = include_str!("targets.txt");

type Measurement = fn(&Options) -> Result<Report>;

/// The measurements, each with what it is called where it cannot be done, in the order in which they are
/// made.
const MEASUREMENTS: [(&str, Measurement); 14] = [
    ("speed", device::of_targets),
    ("hit ratios", hit_ratio::run),
    ("compaction", compaction::run),
    ("recompression", recompression::run),
    ("memory of programs", programs::run),
    ("memory that outlives the process", survive::run),
    ("backing", backing::run),
    ("NBD", nbd::run),
    ("block devices and swap", block::run),
    ("the pager", pager::run),
    ("programs in less memory", run::run),
    ("programs that swap", swap::run),
    ("cold pages in Redis", remote::run),
    ("daemons that outlive their process", take_over::run),
];

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

fn table(targets: &[Target]) -> Table {
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

/// Every target, and the figures behind them.
#[derive(Clone, Debug, Serialize)]
pub struct TargetsReport {
    /// The targets, in the order they are printed.
    pub targets: Vec<Target>,
    /// All figures and notes.
    #[serde(flatten)]
    pub report: Report,
}

/// Measures every target; those of some measurements if they are named.
pub fn measure(options: &Options) -> Result<TargetsReport> {
    options.check(&MEASUREMENTS.map(|(name, _)| name))?;
    let saved = Saved::of(&options.corpus, &options.stop)?;
    let each = Options { corpus: Source::File(saved.path().to_owned()), only: Vec::new(), ..options.clone() };
    let mut report = Report::default();
    report.note(format!("pages are of the corpus {}", options.corpus.name()));
    report.notes.extend(other_uzram(options));
    if options.small {
        report.note("less was measured than the targets' names say");
    }
    for (name, measurement) in MEASUREMENTS.into_iter().filter(|(name, _)| options.has(name)) {
        report.part(name, measurement(&each))?;
    }
    Ok(TargetsReport { targets: judge(TARGETS, &report), report })
}

/// Returns the targets of such a table with their figures.
pub fn judge(table: &str, report: &Report) -> Vec<Target> {
    let other_cpu = if has_vbmi2() { "(without AVX-512" } else { "(with AVX-512" };
    let lines = table.lines().filter(|line| !line.contains(other_cpu));
    lines.filter_map(|line| parse(line, report)).collect()
}

/// Parses a line; `None` for one that is empty, or a comment.
fn parse(line: &str, report: &Report) -> Option<Target> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [bound, table, row, column, name] = cells[..] else { return None };
    let wanted = bound.trim_start_matches(['≥', '≤', ' ']).parse().ok()?;
    let bound = if bound.starts_with('≥') { Bound::AtLeast(wanted) } else { Bound::AtMost(wanted) };
    Some(Target { name: name.to_owned(), bound, measured: report.get(table, row, column) })
}

/// Returns whether the CPU has AVX-512 VBMI2, with which `memory` is to compress faster.
fn has_vbmi2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512vbmi2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns a note that names the measured `uzram`, if it is not the one beside `uzram-bench`.
fn other_uzram(options: &Options) -> Option<String> {
    let uzram = options.uzram.as_ref()?;
    (uzram.parent() != options.bench.parent()).then(|| {
        let (uzram, bench) = (uzram.display(), options.bench.display());
        format!("NBD, block devices and swap are measured with {uzram}: there is no uzram beside {bench}")
    })
}

impl TargetsReport {
    /// Returns a release's page of figures, in Markdown: every target beside its measured figure, and how it
    /// was measured.
    pub fn to_markdown(&self, options: &Options) -> String {
        let machine = rustix::system::uname();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut page = format!(
            "# Figures of uzram {}\n\nWritten by `uzram bench --targets --markdown`: medians of up to {} rounds of {} s, \
             which are interleaved, on {cpus} CPUs, {} {}. Figures are ratios of things measured in this run, unless they \
             say what else. What they mean: [benchmarks](benchmarks.md).\n\n{}",
            env!("CARGO_PKG_VERSION"),
            options.rounds(engine::ROUNDS),
            options.duration.as_secs_f64(),
            machine.sysname().to_string_lossy(),
            machine.release().to_string_lossy(),
            table(&self.targets).to_markdown(),
        );
        for note in &self.report.notes {
            page += &format!("\n- {note}");
        }
        page.trim_end().to_owned() + "\n"
    }
}

impl fmt::Display for TargetsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", table(&self.targets), self.report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_target() {
        let mut report = Report::default();
        report.row("4 KiB pages", "randwrite, 1 job, codec", &[("ratio", 0.95)]);
        let targets = judge(TARGETS, &report);
        assert_eq!(targets.len() + 1, TARGETS.lines().filter(|line| line.contains('|')).count() - 1);
        assert_eq!(targets.len(), 123);
        assert_eq!((targets[0].measured, targets[0].is_met()), (Some(0.95), Some(true)));
        assert!(targets[1..].iter().all(|target| target.measured.is_none()));
        let json = serde_json::to_value(&targets[0]).unwrap();
        assert_eq!((&json["bound"], &json["wanted"]), (&"at_least".into(), &0.9.into()));
    }

    #[test]
    fn another_uzram_than_the_one_beside_is_named() {
        let note = |uzram: &str| {
            let (uzram, bench) = (Some(uzram.into()), "/b/uzram-bench".into());
            other_uzram(&Options { uzram, bench, ..Options::default() })
        };
        assert_eq!(note("/b/uzram"), None);
        assert!(note("/usr/bin/uzram").unwrap().contains("with /usr/bin/uzram: "));
    }

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
