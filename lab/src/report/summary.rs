//! Wins and losses: which rows are faster, slower, or within the noise, and the verdict on a series in a few
//! sentences.

use uzram_bench::harness::stats::{can_judge, median};

use crate::experiment::{Designs, LabReport, Outcome, Row, Series, busiest, cpus, spoken};

/// What a row's interval says of the design after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Faster,
    Slower,
    /// The interval contains 1.
    Even,
    /// Too few rounds to tell.
    Unknown,
}

impl Effect {
    /// All, in the order of their declaration.
    const ALL: [Effect; 4] = [Effect::Faster, Effect::Slower, Effect::Even, Effect::Unknown];

    pub(super) fn of(row: &Row) -> Effect {
        let rounds = row.after.values.get("elapsed_s").map_or(0, Vec::len);
        match row.gain {
            _ if !can_judge(rounds) => Effect::Unknown,
            gain if gain.low > 1.0 => Effect::Faster,
            gain if gain.high < 1.0 => Effect::Slower,
            _ => Effect::Even,
        }
    }

    /// Returns its name, which is also that of its colour.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Effect::Faster => "faster",
            Effect::Slower => "slower",
            Effect::Even => "even",
            Effect::Unknown => "unknown",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Comparison {
    pub(super) before: String,
    pub(super) after: String,
    /// The index of `before` in [`Designs::before`], if `after` is the series' own.
    pub(super) before_at: Option<usize>,
}

impl Comparison {
    /// Returns all comparisons of a table: each design before with the one after, and that with each beyond.
    pub(super) fn all(designs: &Designs) -> Vec<Comparison> {
        let comparison = |before: &String, after: &String, before_at| Comparison {
            before: before.clone(),
            after: after.clone(),
            before_at,
        };
        let before = designs.before.iter().enumerate();
        let before = before.map(|(i, before)| comparison(before, &designs.after, Some(i)));
        let beyond = designs.beyond.iter().map(|beyond| comparison(&designs.after, beyond, None));
        before.chain(beyond).collect()
    }

    pub(super) fn rows<'a>(&self, rows: &'a [Row]) -> Vec<&'a Row> {
        let is_this = |row: &&Row| row.before.design == self.before && row.after.design == self.after;
        rows.iter().filter(is_this).collect()
    }

    pub(super) fn name(&self) -> String {
        format!("{} against {}", spoken(&self.after), spoken(&self.before))
    }
}

/// Returns the number of rows with each effect, in the order of [`Effect::ALL`].
pub(super) fn tally<'a>(rows: impl IntoIterator<Item = &'a Row>) -> [(Effect, usize); 4] {
    let mut tally = Effect::ALL.map(|effect| (effect, 0));
    rows.into_iter().for_each(|row| tally[Effect::of(row) as usize].1 += 1);
    tally
}

/// Returns the rows of a comparison that the summary shows: of each case the one with the most jobs that have
/// a CPU each, then the largest gain and the largest loss, if they are another one.
pub(super) fn telling<'a>(comparison: &Comparison, rows: &'a [Row]) -> Vec<&'a Row> {
    let rows = comparison.rows(rows);
    let mut shown = Vec::new();
    for case in rows.chunk_by(|a, b| a.case == b.case) {
        let usual = busiest(case.iter().copied(), cpus()).or(case.first().copied());
        let with = |effect| case.iter().copied().filter(move |row| Effect::of(row) == effect);
        let by_ratio = |a: &&Row, b: &&Row| a.gain.ratio.total_cmp(&b.gain.ratio);
        let best = with(Effect::Faster).max_by(by_ratio);
        let worst = with(Effect::Slower).min_by(by_ratio);
        let mut chosen: Vec<&Row> = Vec::new();
        for row in [usual, best, worst].into_iter().flatten() {
            if !chosen.iter().any(|chosen| chosen.jobs == row.jobs) {
                chosen.push(row);
            }
        }
        chosen.sort_by_key(|row| row.jobs);
        shown.extend(chosen);
    }
    shown
}

/// Returns the verdict on a series: what it gains here over each design before, and how that compares with
/// what was published and expected.
pub(super) fn sentences(table: &Series, report: &LabReport) -> [String; 2] {
    let mut here = Vec::new();
    for comparison in Comparison::all(&(table.designs)()) {
        let rows = comparison.rows(&report.rows);
        match comparison.before_at {
            Some(0) => here.push(gained(&comparison.name(), &rows)),
            Some(_) => here.push(gained(&format!("Against {} it", spoken(&comparison.before)), &rows)),
            None => {}
        }
    }
    [here.join(" "), compared(report)]
}

fn gained(name: &str, rows: &[&Row]) -> String {
    let ratios: Vec<f64> = rows.iter().map(|row| row.gain.ratio).collect();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let gain = format!("a median gain of {:.2} ({least:.2} to {most:.2})", median(&ratios));
    let [faster, slower, even, unknown] = tally(rows.iter().copied()).map(|(_, rows)| rows);
    match rows.len() {
        0 => format!("{name} was not measured."),
        all if unknown == all => {
            format!("{name} has {gain} in {all} rows, of too few rounds to tell it from the noise.")
        }
        all => format!(
            "{name} is faster in {faster} of {all} rows, slower in {slower} and within the noise in {even}, with \
             {gain}."
        ),
    }
}

fn compared(report: &LabReport) -> String {
    let published =
        report.rows.iter().filter_map(|row| Some((row.published.as_ref()?.ratio, row.gain.ratio)));
    let (theirs, ours): (Vec<f64>, Vec<f64>) = published.unzip();
    let beside = match theirs.len() {
        0 => "No row has published figures".to_owned(),
        1 => format!("Published is a gain of {:.2} for a row that has {:.2} here", theirs[0], ours[0]),
        rows => format!(
            "Published is a median gain of {:.2} for {rows} rows, which have {:.2} here",
            median(&theirs),
            median(&ours)
        ),
    };
    let outcomes = &report.outcomes;
    let count = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count();
    let expectations = match outcomes.len() {
        0 => "nothing was expected in figures".to_owned(),
        1 => match outcomes[0] {
            Outcome::Met => "the expectation is met".to_owned(),
            Outcome::Missed => "the expectation is missed".to_owned(),
            Outcome::NotJudged => "the expectation is not judged".to_owned(),
        },
        all => {
            let [met, missed, rest] = [Outcome::Met, Outcome::Missed, Outcome::NotJudged].map(count);
            format!("of {all} expectations {met} are met, {missed} missed and {rest} not judged")
        }
    };
    format!("{beside}; {expectations}.")
}
