//! The table `streams-nbd`: the same change as in `streams`, seen by a client: fio reads and writes an NBD
//! server's disk.
//!
//! Each design is a `uzram up` of its own, whose disk is filled with the corpus. A job is a job of fio, with
//! its own connection; fio runs for a fixed time, and the designs are compared by the time that as many bytes
//! as the disk has would take.

use std::path::PathBuf;
use std::time::Duration;

use uzram::units::{PAGE_SIZE, pages_to_bytes};
use uzram::{Error, Result};

use super::{PUBLISHED_JOBS, patterns};
use crate::experiment::{Bound, Expect, Experiment, Figure, Length, Plan, Sample, Series, Unit};
use uzram_bench::harness::command::uzram_program;
use uzram_bench::harness::corpus::{Corpus, Saved};
use uzram_bench::harness::process::require;
use uzram_bench::harness::{Source, unsupported};
use uzram_bench::nbd::{CLIENTS, Server, fill, run_fio};

const JOBS: [usize; 2] = [2, PUBLISHED_JOBS];
/// How long fio runs, and how long it takes to start and end.
const RUNTIME: Duration = Duration::from_millis(300);
const FIO_S: f64 = 0.25;
const ALGORITHM: &str = "lz4";

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "streams-nbd",
    about: "the same as streams, through an NBD server and fio",
    published: "streams",
    cases: &patterns(&JOBS),
    slow_cases: &["read", "randread", "write", "rw", "randrw"],
    unit: Unit::Page,
    designs: super::designs,
    columns: &[("mb_per_s", "MB/s", 1.0, 0)],
    legend,
    length: Length::Fixed { seconds: |_, _| RUNTIME.as_secs_f64() + FIO_S, is_of_corpus: false },
    open,
    expectations: &[Expect::of(Figure::Speed, Bound::NotBelow(1.0))],
    ..Series::NEW
};

fn legend() -> Vec<String> {
    vec![
        format!(
            "designs: servers `uzram up` with --streams as in the table {}, with {ALGORITHM}",
            super::SERIES.name
        ),
        "MB/s: 10^6 bytes a second, read and written together".to_owned(),
    ]
}

fn open(source: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    require(&CLIENTS)?;
    let program = uzram_program().ok_or_else(|| unsupported("the program uzram is missing"))?;
    let corpus = source.load()?;
    let saved = Saved::new(source, &corpus)?;
    let designs = designs.to_vec();
    Ok(Box::new(Servers { program, corpus, saved, designs, pattern: "read", servers: Vec::new() }))
}

struct Servers {
    program: PathBuf,
    corpus: Corpus,
    saved: Saved,
    designs: Vec<String>,
    pattern: &'static str,
    servers: Vec<Server>,
}

impl Experiment for Servers {
    fn begin(&mut self, case: &str) -> Result<()> {
        let known = SERIES.case_names().into_iter().find(|known| *known == case);
        self.pattern = known.ok_or_else(|| Error::invalid(format!("there is no case '{case}'")))?;
        self.servers.clear();
        let size_bytes = pages_to_bytes(self.corpus.page_count() as u64);
        for design in &self.designs {
            let options = ["--streams", design];
            self.servers.push(Server::uzram(&self.program, ALGORITHM, size_bytes, &options)?);
        }
        self.servers.iter().try_for_each(|server| fill(server, self.saved.path()))
    }

    fn fixed_work(&self, _: usize) -> Option<u64> {
        Some(self.corpus.page_count() as u64)
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let uri = self.servers[plan.design].uri();
        let mb_per_s = run_fio(uri, &self.corpus, self.pattern, plan.jobs, RUNTIME, plan.seed + 1)?;
        let work_bytes = plan.work as f64 * PAGE_SIZE as f64;
        let elapsed = Duration::from_secs_f64(work_bytes / (mb_per_s * 1e6));
        Ok(Sample { elapsed, values: vec![("mb_per_s", mb_per_s)] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_rates_stand_beside_the_same_patterns() {
        let published = |case| SERIES.published_at(case, 10, 0);
        assert!(published("randwrite").is_some());
        assert_eq!((published("rw").unwrap().ratio * 100.0).round(), 110.0);
    }
}
