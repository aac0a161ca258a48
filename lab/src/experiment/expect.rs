//! The expectations of a series as data ([`Expect`]), judged and put into words here for all series.
//!
//! A speed is judged from five rounds on: fewer do not distinguish a difference from the noise. The verdict
//! also shows CPU time, which leaves out waiting and which other programs disturb less, and the author's
//! published figures.

use uzram_bench::harness::bound::Bound;
use uzram_bench::harness::stats::{PairedRatio, at_least, can_judge, coverage, median};

use super::jobs_text;
use super::row::{Row, Side};
use super::series::{Designs, Expect, Figure, Series};

/// The most rows that are named individually.
const MOST_NAMED: usize = 6;
/// An expectation counts as missed only if chance explains its missing rows with less than this probability.
const CHANCE: f64 = 0.05;

/// Returns the outcome of each expectation, and the verdict on the rows, in paragraphs: whether each
/// expectation is met, and the gains of designs beyond the series. `cpus` is the number of the machine's
/// CPUs.
pub(crate) fn verdict(series: &Series, rows: &[Row], cpus: usize) -> (Vec<Outcome>, Vec<String>) {
    let designs = (series.designs)();
    let judged = series.expectations.iter().map(|expect| expect.judge(series, &designs, rows, cpus));
    let (outcomes, mut paragraphs): (Vec<_>, Vec<_>) = judged.unzip();
    paragraphs
        .extend(designs.beyond.iter().filter_map(|design| beyond(series, rows, design, &designs.after)));
    (outcomes, paragraphs)
}

/// What became of an expectation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is met.
    Met,
    /// It is not.
    Missed,
    /// It was not measured, or in too few rounds.
    NotJudged,
}

impl Outcome {
    const fn of(is_met: bool) -> Outcome {
        if is_met { Outcome::Met } else { Outcome::Missed }
    }

    const fn mark(self) -> &'static str {
        match self {
            Outcome::Missed => ", MISSED",
            Outcome::Met | Outcome::NotJudged => "",
        }
    }
}

impl Expect {
    /// Judges the rows whose design after is that of `designs`; returns the outcome, and a paragraph.
    pub(crate) fn judge(
        &self,
        series: &Series,
        designs: &Designs,
        rows: &[Row],
        cpus: usize,
    ) -> (Outcome, String) {
        let is_case = |case: &str| match self.case {
            Some(wanted) => wanted == case,
            None => series.cases.iter().any(|(name, _)| *name == case),
        };
        let is_before = |before: &str| self.before.is_none_or(|wanted| wanted == before);
        let has_figure = |row: &Row| match self.figure {
            Figure::Speed => true,
            Figure::ProcessorTime => row.processor_share().is_some(),
            Figure::Maximum(quantity) => row.after.values.contains_key(quantity),
        };
        let rows: Vec<&Row> = rows
            .iter()
            .filter(|row| row.after.design == designs.after && is_before(&row.before.design))
            .filter(|row| is_case(&row.case) && self.jobs.contain(row.jobs, cpus) && has_figure(row))
            .collect();
        let name = self.name();
        let Some(first) = rows.first() else {
            let said = format!("{name}: not measured with {}, so not judged.", self.jobs.words());
            return (Outcome::NotJudged, said);
        };
        match self.figure {
            Figure::Maximum(quantity) => self.judge_quantity(quantity, &designs.after, &rows),
            _ if !can_judge(rounds(first)) => {
                let said = format!(
                    "{name}: not judged; it takes 5 rounds or more to tell a difference from the noise."
                );
                (Outcome::NotJudged, said)
            }
            Figure::Speed | Figure::ProcessorTime => self.judge_ratio(&designs.after, &rows),
        }
    }

    fn name(&self) -> String {
        let figure = match self.figure {
            Figure::Speed => "Speed",
            Figure::ProcessorTime => "Processor time",
            Figure::Maximum(quantity) => quantity,
        };
        self.case.map_or_else(|| figure.to_owned(), |case| format!("{figure}, {case}"))
    }

    fn judge_quantity(&self, quantity: &str, after: &str, rows: &[&Row]) -> (Outcome, String) {
        let most = |side: fn(&Row) -> &Side| {
            let rounds = rows.iter().filter_map(|row| side(row).values.get(quantity)).flatten();
            rounds.copied().fold(0.0, f64::max)
        };
        let (before, measured) = (most(|row| &row.before), most(|row| &row.after));
        let outcome = Outcome::of(self.bound.holds(measured));
        let said = format!(
            "{}{}: {after} should have {} with {}, and has {measured:.2} at most in {} rows; {} has {before:.2}.",
            self.name(),
            outcome.mark(),
            self.bound,
            self.jobs.words(),
            rows.len(),
            self.before.unwrap_or("what it is compared with")
        );
        (outcome, said)
    }

    fn ratio(&self, row: &Row) -> Option<PairedRatio> {
        match self.figure {
            Figure::ProcessorTime => row.processor_share(),
            _ => Some(row.gain),
        }
    }

    fn judge_ratio(&self, after: &str, rows: &[&Row]) -> (Outcome, String) {
        let holds = |row: &Row| self.ratio(row).is_some_and(|ratio| self.bound.holds_for(&ratio));
        let (reached, missing): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| holds(row));
        let mut chance = String::new();
        let mut is_met = missing.is_empty();
        if let Bound::NotBelow(wanted) = self.bound {
            let outside = (1.0 - coverage(rows.first().map_or(0, |row| rounds(row)))) / 2.0;
            is_met = is_met || at_least(missing.len(), rows.len(), outside) > CHANCE;
            let is_above = |row: &&&Row| self.ratio(row).is_some_and(|ratio| ratio.low > wanted);
            let above = rows.iter().filter(is_above).count();
            chance = format!(
                "; chance alone puts {:.1} of {} intervals below {wanted}, and as many above, where {above} lie",
                rows.len() as f64 * outside,
                rows.len()
            );
        }
        let (verb, times, does) = match self.figure {
            Figure::ProcessorTime => ("take", "times the processor time of", "does"),
            _ => ("be", "times as fast as", "is"),
        };
        let outcome = Outcome::of(is_met);
        let mut text = format!(
            "{}{}: {after} should {verb} {} {times} {} with {}, and {does} in {} of {} rows",
            self.name(),
            outcome.mark(),
            self.bound,
            self.before.unwrap_or("each design before"),
            self.jobs.words(),
            reached.len(),
            rows.len()
        );
        for (what, rows) in [("reached", &reached), ("missed", &missing)] {
            let mut gains = self.by_row(rows, |row| Some(self.ratio(row)?.to_string()));
            if gains.len() > MOST_NAMED {
                gains.truncate(MOST_NAMED);
                gains.push(format!("{} more", rows.len() - MOST_NAMED));
            }
            if !gains.is_empty() {
                text += &format!("; {what} with {}", gains.join(", "));
            }
        }
        text += &chance;
        text += ".";
        if self.figure == Figure::ProcessorTime {
            return (outcome, text);
        }
        let processor_time = self.by_row(rows, |row| Some(row.processor_time()?.to_string()));
        let published = self.by_row(rows, |row| Some(format!("{:.3}", row.published.as_ref()?.ratio)));
        for (what, ratios) in [("By processor time", processor_time), ("Published", published)] {
            if (1..=MOST_NAMED).contains(&ratios.len()) {
                text += &format!(" {what} with {}.", ratios.join(", "));
            }
        }
        (outcome, text)
    }

    /// Describes rows, each with the number of jobs and whatever else distinguishes it.
    fn by_row(&self, rows: &[&Row], known: impl Fn(&Row) -> Option<String>) -> Vec<String> {
        let text = |row: &&Row| {
            let case = if self.case.is_none() { format!("{}, ", row.case) } else { String::new() };
            let before =
                if self.before.is_none() { format!(" against {}", row.before.design) } else { String::new() };
            Some(format!("{case}{}{before}: {}", jobs_text(row.jobs), known(row)?))
        };
        rows.iter().filter_map(text).collect()
    }
}

fn rounds(row: &Row) -> usize {
    row.after.values.get("elapsed_s").map_or(0, Vec::len)
}

/// Returns the gain of a design that came after the series.
fn beyond(series: &Series, rows: &[Row], design: &str, after: &str) -> Option<String> {
    let gain = |(case, _): &(&str, &[usize])| {
        let later = rows.iter().filter(|row| row.after.design == design && row.case == *case);
        let ratios: Vec<f64> = later.map(|row| row.gain.ratio).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        (!ratios.is_empty()).then(|| format!("{:.2} ({least:.2} to {most:.2}) in {case}", median(&ratios)))
    };
    let gains: Vec<String> = series.cases.iter().filter_map(gain).collect();
    (!gains.is_empty()).then(|| {
        format!(
            "Beyond the series, {design} against {after}, times as fast, median and range of the rows: {}.",
            gains.join(", ")
        )
    })
}
