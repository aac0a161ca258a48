//! How to run a table.

use std::thread;
use std::time::Duration;

use uzram::units::PAGE_SIZE;
use uzram::{Error, Result};
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::stats::MAX_PAIRS;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

use super::series::{Length, MAX_JOBS, Series};

pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of a corpus's pages, as far as it is known before they are loaded.
pub(crate) fn pages_of(corpus: &Source) -> usize {
    match corpus {
        Source::Built(_, pages) | Source::Processes(pages) => *pages,
        // Loading complains about a file that does not exist.
        Source::File(path) => path.metadata().map_or(0, |metadata| metadata.len() as usize / PAGE_SIZE),
    }
}

/// How to run a table.
#[derive(Clone)]
pub struct LabOptions {
    /// The cases; empty for all of them.
    pub cases: Vec<String>,
    /// Numbers of jobs; empty for the table's own.
    pub jobs: Vec<usize>,
    /// The number of rounds, and the length of a measurement.
    pub rounds: RoundOptions,
    /// The pages, if a table needs some.
    pub corpus: Source,
}

const MAX_DURATION: Duration = Duration::from_hours(1);

impl Default for LabOptions {
    fn default() -> Self {
        LabOptions {
            cases: Vec::new(),
            jobs: Vec::new(),
            rounds: RoundOptions::default(),
            corpus: Source::Built(Kind::Mixed, DEFAULT_CORPUS_PAGES),
        }
    }
}

impl LabOptions {
    /// Returns the cases of a table to run, each with its numbers of jobs.
    pub(super) fn resolve(&self, table: &Series) -> Result<Vec<(&'static str, Vec<usize>)>> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        let known = table.case_names();
        if let Some(case) = self.cases.iter().find(|case| !known.contains(&case.as_str())) {
            let name = table.name;
            return bad(format!("'{case}' is no case of {name}, which has: {}", known.join(", ")), "--case");
        }
        let wanted = |case: &str| self.cases.is_empty() || self.cases.iter().any(|wanted| wanted == case);
        let jobs_of = |(case, jobs): &(&'static str, &[usize])| {
            let mut jobs = if self.jobs.is_empty() { jobs.to_vec() } else { self.jobs.clone() };
            jobs.sort_unstable();
            jobs.dedup();
            (*case, jobs)
        };
        let cases: Vec<_> = table.cases.iter().filter(|(case, _)| wanted(case)).map(jobs_of).collect();
        if let Some(jobs) =
            cases.iter().flat_map(|(_, jobs)| jobs).find(|jobs| !(1..=MAX_JOBS).contains(*jobs))
        {
            return bad(format!("{jobs} jobs: it must be 1 to {MAX_JOBS}"), "--jobs");
        }
        let RoundOptions { rounds, duration, .. } = self.rounds;
        if !(1..=MAX_PAIRS).contains(&rounds) {
            return bad(format!("{rounds} rounds: it must be 1 to {MAX_PAIRS}"), "--rounds");
        }
        if duration.is_zero() || duration > MAX_DURATION {
            return bad("a measurement must last more than 0 s and at most an hour".into(), "--seconds");
        }
        Ok(cases)
    }

    /// Estimates how long a table takes: every round, and the one that warms up.
    pub fn estimate(&self, table: &Series) -> Result<Duration> {
        let designs_and_rounds = (table.designs)().all().len() * (self.rounds.rounds + 1);
        let mut seconds = 0.0;
        for (case, jobs) in self.resolve(table)? {
            let measurement_s = |jobs| match table.length {
                Length::Calibrated => self.rounds.duration.as_secs_f64(),
                Length::Fixed { seconds, .. } => seconds(case, jobs),
            };
            seconds += jobs.into_iter().map(measurement_s).sum::<f64>();
        }
        let all_s = seconds * designs_and_rounds as f64;
        Ok(Duration::try_from_secs_f64(all_s).unwrap_or(Duration::MAX))
    }
}
