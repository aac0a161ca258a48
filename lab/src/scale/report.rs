//! The report of predictions: curves, checks and published figures, as JSON for programs and as text for people.
//!
//! The JSON is one object: `table` and `series`; `parameters`, the whole file and so every assumption; `costs` of this
//! machine, an array over the rounds each; `curves`, each a design's `model` (its sections with their numbers) and `points`; `checks`
//! against what was measured here; `published`, with every error. A prediction is `low`, `middle` and `high`. Speeds are
//! pages or objects a second by all cores.

use std::fmt;

use serde::Serialize;

use super::costs::Costs;
use super::model::{Model, Spread};
use super::parameters::{Parameters, PublishedParameters};
use super::predict::Band;
use super::published::{PublishedCase, TOLERATED_PERCENT};
use crate::experiment::{Series, Unit, wrap};
use uzram_bench::harness::report::Table;
use uzram_bench::harness::stats::{median, quantile};

/// A design's speed by the number of cores.
#[derive(Clone, Debug, Serialize)]
pub struct Curve {
    /// The table's case.
    pub case: String,
    /// The design.
    pub design: String,
    /// The model of the middle.
    pub model: ModelReport,
    /// The predictions.
    pub points: Vec<Point>,
}

/// A prediction for a number of cores.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The number of cores.
    pub cores: usize,
    /// Pages or objects a second.
    pub units_per_s: Band,
    /// The same if moving lines and waiting cost nothing: mean value analysis.
    pub without_lines_per_s: f64,
    /// The part of the cores' time in which they wait for locks.
    pub waiting_share: f64,
}

/// A model's sections.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// In the order of the operation.
    pub sections: Vec<SectionReport>,
}

/// A section of a model.
#[derive(Clone, Debug, Serialize)]
pub struct SectionReport {
    /// Its name.
    pub name: String,
    /// The lock that it holds.
    pub lock: Option<String>,
    /// Visits of an operation.
    pub visits: f64,
    /// Nanoseconds of a visit.
    pub ns: f64,
    /// Lines that a visit moves one after the other.
    pub lines: f64,
    /// Lines that it moves side by side.
    pub bulk_lines: f64,
}

impl From<&Model> for ModelReport {
    fn from(model: &Model) -> Self {
        let lock = |at: usize| {
            let lock = &model.locks[at];
            match lock.spread {
                Spread::One | Spread::Stack => lock.name.clone(),
                Spread::Random(count) => format!("{}, one of {count}", lock.name),
                Spread::PerNode => format!("{}, the node's", lock.name),
            }
        };
        let section = |section: &super::model::Section| SectionReport {
            name: section.name.clone(),
            lock: section.lock.map(lock),
            visits: section.visits,
            ns: section.ns,
            lines: section.lines,
            bulk_lines: section.bulk_lines,
        };
        ModelReport { sections: model.sections.iter().map(section).collect() }
    }
}

/// A prediction beside what was measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The table's case.
    pub case: String,
    /// The design.
    pub design: String,
    /// The number of jobs that were measured.
    pub jobs: usize,
    /// The cores that they ran on.
    pub cores: usize,
    /// Pages or objects a second.
    pub measured_per_s: f64,
    /// The prediction.
    pub predicted_per_s: Band,
    /// How much the middle of the prediction exceeds the measurement.
    pub error_percent: f64,
}

/// The predictions for a table. `Display` prints them; the JSON is above.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleReport {
    /// The table's name.
    pub table: &'static str,
    /// The patch series.
    pub series: String,
    /// The structure of the workloads and the other machines.
    pub parameters: Parameters,
    /// The costs of this machine.
    pub costs: Costs,
    /// The curves.
    pub curves: Vec<Curve>,
    /// The predictions that were measured here.
    pub checks: Vec<Check>,
    /// The predictions of published figures.
    pub published: Vec<PublishedCase>,
    #[serde(skip)]
    unit: Unit,
    #[serde(skip)]
    rounds: usize,
}

impl ScaleReport {
    pub(super) fn new(
        table: &Series,
        mut parameters: Parameters,
        costs: Costs,
        rounds: usize,
    ) -> ScaleReport {
        parameters.tables.retain(|case| case.table == table.name);
        let is_used = |name: &str| {
            parameters.tables.iter().flat_map(|case| &case.published).any(|figures| figures.machine == name)
        };
        let machines = parameters.machines.iter().filter(|machine| is_used(&machine.name)).cloned().collect();
        parameters.machines = machines;
        ScaleReport {
            table: table.name,
            series: table.reference(),
            parameters,
            costs,
            curves: Vec::new(),
            checks: Vec::new(),
            published: Vec::new(),
            unit: table.unit,
            rounds,
        }
    }

    /// Returns the curves of a case, and what they count.
    pub(crate) fn curves_table(&self, curves: &[Curve]) -> (String, Table) {
        let headings = curves
            .iter()
            .flat_map(|curve| [format!("<{}", curve.design), "no lines".to_owned(), "wait%".to_owned()]);
        let mut table = Table::new(["cores".to_owned()].into_iter().chain(headings));
        let numbers = curves.first().map_or(0, |curve| curve.points.len());
        for at in 0..numbers {
            let cells = curves.iter().flat_map(|curve| {
                let Point {
                    units_per_s: Band { low, middle, high }, without_lines_per_s, waiting_share, ..
                } = curve.points[at];
                let millions = |per_s: f64| short(per_s / 1e6);
                [
                    format!("{} [{}, {}]", millions(middle), millions(low), millions(high)),
                    millions(without_lines_per_s),
                    format!("{:.0}", 100.0 * waiting_share),
                ]
            });
            table.row([curves[0].points[at].cores.to_string()].into_iter().chain(cells));
        }
        let case = curves.first().map_or("", |curve| &curve.case);
        (format!("{case}, predicted here, millions of {}s a second", self.unit.name()), table)
    }

    fn fmt_curves(&self, f: &mut fmt::Formatter<'_>, curves: &[Curve]) -> fmt::Result {
        let (heading, table) = self.curves_table(curves);
        write!(f, "\n{heading}\n{table}")
    }

    fn fmt_models(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings = ["<case", "<design", "<section", "<lock", "visits", "ns", "lines", "bulk"];
        let mut table = Table::new(headings);
        for curve in &self.curves {
            for (at, section) in curve.model.sections.iter().enumerate() {
                let named = |name: &str| if at == 0 { name.to_owned() } else { String::new() };
                table.row([
                    named(&curve.case),
                    named(&curve.design),
                    section.name.clone(),
                    section.lock.clone().unwrap_or_else(|| "-".to_owned()),
                    format!("{:.4}", section.visits),
                    format!("{:.1}", section.ns),
                    short(section.lines),
                    short(section.bulk_lines),
                ]);
            }
        }
        write!(f, "\nthe models, of one operation\n{table}")
    }

    /// Returns the predictions beside what was measured here.
    pub(crate) fn checks_table(&self) -> Table {
        let mut table = Table::new(["<case", "<design", "jobs", "cores", "measured", "predicted", "error%"]);
        for check in &self.checks {
            let Band { low, middle, high } = check.predicted_per_s;
            let millions = |per_s: f64| short(per_s / 1e6);
            table.row([
                check.case.clone(),
                check.design.clone(),
                check.jobs.to_string(),
                check.cores.to_string(),
                millions(check.measured_per_s),
                format!("{} [{}, {}]", millions(middle), millions(low), millions(high)),
                error(check.error_percent),
            ]);
        }
        table
    }

    fn fmt_checks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = self.unit.name();
        write!(f, "\npredicted and measured here, millions of {unit}s a second\n{}", self.checks_table())
    }

    /// Returns the predictions in two or three sentences: the gains with the most cores, how far they were off here, and
    /// how far off published figures.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        sentences.extend(self.with_most_cores());
        let off = |what: &str, errors: &[f64]| {
            let errors: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
            let most = errors.iter().copied().fold(0.0, f64::max);
            let beyond = errors.iter().filter(|error| **error > TOLERATED_PERCENT).count();
            (!errors.is_empty()).then(|| {
                format!(
                    "Of {} {what} {beyond} are off by more than {TOLERATED_PERCENT} %, the median by {:.1} % and the worst by {most:.1} %.",
                    errors.len(),
                    median(&errors)
                )
            })
        };
        let here: Vec<f64> = self.checks.iter().map(|check| check.error_percent).collect();
        sentences.extend(off("speeds that were measured here", &here));
        let figures = self.published.iter().flat_map(|case| &case.figures).filter(|point| point.tasks > 1);
        let figures: Vec<f64> = figures.map(|point| point.error_percent).collect();
        sentences.extend(off("published figures", &figures));
        let gains: Vec<f64> =
            self.published.iter().flat_map(|case| &case.gains).map(|gain| gain.error_percent).collect();
        sentences.extend(off("published gains", &gains));
        sentences
    }

    /// Returns what the table's last designs gain over the first with the most cores, by case.
    fn with_most_cores(&self) -> Option<String> {
        let cores = self.curves.first()?.points.last()?.cores;
        let gains = self.curves.chunk_by(|a, b| a.case == b.case).filter_map(|curves| {
            let speed = |curve: &Curve| Some(curve.points.last()?.units_per_s.middle);
            let (first, others) = curves.split_first()?;
            let first_speed = speed(first)?;
            let gain = |curve: &Curve| {
                Some(format!("{} {} times", curve.design, short(speed(curve)? / first_speed)))
            };
            let gains: Vec<String> = others.iter().filter_map(gain).collect();
            (!gains.is_empty())
                .then(|| format!("{}: {} as fast as {}", first.case, gains.join(", "), first.design))
        });
        let gains: Vec<String> = gains.collect();
        let tasks = if cores == 1 { "core" } else { "cores" };
        (!gains.is_empty()).then(|| format!("With {cores} {tasks}, predicted: {}.", gains.join("; ")))
    }

    fn fmt_costs(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Costs {
            line_ns,
            bulk_line_ns,
            clock_ns,
            spin_ns,
            wake_ns,
            wake_call_ns,
            stream_list_ns,
            compress_ns,
        } = &self.costs;
        let costs = [
            ("a line from another core", line_ns),
            ("one of many lines", bulk_line_ns),
            ("reading the clock", clock_ns),
            ("spinning before a waiter sleeps", spin_ns),
            ("from waking a thread until it runs", wake_ns),
            ("the call that wakes", wake_call_ns),
            ("a hold of the list of streams", stream_list_ns),
            ("compressing a page", compress_ns),
        ];
        let text = costs.map(|(name, ns)| {
            let [low, middle, high] = [quantile(ns, 0.1), median(ns), quantile(ns, 0.9)].map(short);
            format!("{name} {middle} [{low}, {high}]")
        });
        wrap(f, &format!("this machine, ns: {}", text.join("; ")))
    }

    fn fmt_notes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parameters { operations, spin_lines_per_waiter: [least, guess, most], .. } = self.parameters;
        wrap(
            f,
            &format!(
                "the times are those of {} rounds with 1 job; a prediction is the simulation of {operations} operations with the medians, in brackets the least and the most of simulations with each round's times, and with the least and the most that a line costs; times are distributed exponentially",
                self.rounds
            ),
        )?;
        wrap(f, &legend())?;
        wrap(f, "bulk: lines that are fetched side by side")?;
        wrap(f, &self.parameters.why)?;
        wrap(
            f,
            &format!(
                "assumed: each spinning waiter delays a hand-over by {guess} lines here ({least} to {most}); more tasks than cores take turns; all cores are alike, and so is the way between any two"
            ),
        )?;
        for case in &self.parameters.tables {
            let cases = case.cases.join(", ");
            wrap(f, &format!("{cases}: {}", case.why))?;
            for PublishedParameters { machine, units, why, .. } in &case.published {
                wrap(f, &format!("{cases}, units on {machine}: {units}. {why}"))?;
            }
        }
        for machine in &self.parameters.machines {
            let [low, high] = machine.line_ns;
            let [cores, nodes] = [machine.cores, machine.nodes];
            wrap(
                f,
                &format!(
                    "{}: {cores} cores, {nodes} node{} ({}), a line {low} to {high} ns ({})",
                    machine.name,
                    if nodes == 1 { "" } else { "s" },
                    machine.why.trim_end_matches('.'),
                    machine.line_source
                ),
            )?;
        }
        Ok(())
    }
}

/// Formats a number with about three digits.
fn short(number: f64) -> String {
    let decimals = match number.abs() {
        0.0 => 0,
        below if below < 0.1 => 4,
        below if below < 1.0 => 3,
        below if below < 10.0 => 2,
        below if below < 100.0 => 1,
        _ => 0,
    };
    format!("{number:.decimals$}")
}

fn fmt_published(f: &mut fmt::Formatter<'_>, case: &PublishedCase) -> fmt::Result {
    writeln!(f, "\n{}, published on {}, {}", case.case, case.machine, case.heading)?;
    for table in [figures_table(case), gains_table(case)] {
        if !table.is_empty() {
            write!(f, "{table}")?;
        }
    }
    case.reasons.iter().try_for_each(|reason| wrap(f, reason))
}

/// Returns the published figures of a case beside their predictions.
pub(crate) fn figures_table(case: &PublishedCase) -> Table {
    let headings = [
        "<design",
        "<modelled as",
        "tasks",
        "published",
        "predicted",
        "error%",
        "speedup",
        "predicted speedup",
    ];
    let mut table = Table::new(headings);
    for point in &case.figures {
        let Band { low, middle, high } = point.predicted;
        let is_fitted = point.tasks == 1;
        table.row([
            point.published_design.to_owned(),
            point.design.clone(),
            point.tasks.to_string(),
            short(point.published),
            if is_fitted {
                "fitted".to_owned()
            } else {
                format!("{} [{}, {}]", short(middle), short(low), short(high))
            },
            if is_fitted { String::new() } else { error(point.error_percent) },
            format!("{:.2}", point.published_speedup),
            format!("{:.2}", point.predicted_speedup),
        ]);
    }
    table
}

/// Returns the published gains of a case beside their predictions.
pub(crate) fn gains_table(case: &PublishedCase) -> Table {
    let mut table = Table::new(["<after", "<over", "tasks", "gain", "predicted", "error%"]);
    for gain in &case.gains {
        let Band { low, middle, high } = gain.predicted;
        table.row([
            gain.published_after.to_owned(),
            gain.published_before.to_owned(),
            gain.tasks.to_string(),
            format!("{:.2}", gain.published),
            format!("{middle:.2} [{low:.2}, {high:.2}]"),
            error(gain.error_percent),
        ]);
    }
    table
}

/// Explains the columns of the tables.
pub(crate) fn legend() -> String {
    format!(
        "in brackets: the least and the most of all simulations; no lines: mean value analysis, which is exact if moving lines costs nothing and nobody sleeps; wait%: of the cores' time, waiting for locks; error%: by how much a prediction exceeds what was measured or published, with ! if by more than {TOLERATED_PERCENT} % above or below; published figures have their authors' names of designs; modelled as: the design here whose times, scaled, predict the figures; fitted: the figure to which they are scaled; speedup: how many times the work of one task all tasks did together; gain: how many times as fast the design is as the one that it is over"
    )
}

/// Formats an error; one of more than [`TOLERATED_PERCENT`] has a mark.
fn error(percent: f64) -> String {
    let mark = if percent.abs() > TOLERATED_PERCENT { "!" } else { " " };
    format!("{percent:+.1}{mark}")
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, scaling: {}", self.table, self.series)?;
        for curves in self.curves.chunk_by(|a, b| a.case == b.case) {
            // Three designs fit a line.
            curves.chunks(3).try_for_each(|curves| self.fmt_curves(f, curves))?;
        }
        self.fmt_checks(f)?;
        self.published.iter().try_for_each(|case| fmt_published(f, case))?;
        self.fmt_models(f)?;
        writeln!(f)?;
        self.fmt_costs(f)?;
        self.fmt_notes(f)
    }
}
