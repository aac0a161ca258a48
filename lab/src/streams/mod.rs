//! The table `streams` (docs/lab/streams.md): zram's compression streams, a locked list of idle ones against
//! one for each CPU.
//!
//! The jobs are threads of this process on a [device](uzram::device) for each design, filled with the same
//! pages: the benchmark's own patterns and measuring code, with lz4.

pub mod nbd;

#[cfg(test)]
mod tests;

use uzram::Result;
use uzram::stream::StreamDesign;
use uzram::units::pages_to_bytes;

use crate::experiment::clock::Total;
use crate::experiment::{Bound, Designs, Expect, Experiment, Figure, Jobs, Plan, Sample, Series, Unit, cpus};
use uzram_bench::engine::{Measurement, Plan as BenchPlan};
use uzram_bench::engine::{Pattern, Target, Until, UzramDevice, mb_per_s, measure, verify};
use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::Corpus;

/// The author measured 1 to so many jobs.
const PUBLISHED_JOBS: usize = 10;
const JOBS: [usize; PUBLISHED_JOBS] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
const ALL_SIX: &str = "all six";

/// Returns a case for each access pattern, with these numbers of jobs.
const fn patterns(jobs: &'static [usize]) -> [(&'static str, &'static [usize]); 6] {
    [("read", jobs), ("randread", jobs), ("write", jobs), ("randwrite", jobs), ("rw", jobs), ("randrw", jobs)]
}

/// See the [module's documentation](self).
pub static SERIES: Series = Series {
    name: "streams",
    about: "compression streams: a locked list of idle ones against one for each CPU",
    published: "streams",
    cases: &patterns(&JOBS),
    unit: Unit::Page,
    designs,
    columns: &[
        ("mb_per_s", "MB/s", 1.0, 0),
        ("elapsed_s", "elapsed", 1.0, 3),
        ("user_s", "user", 1.0, 3),
        ("system_s", "system", 1.0, 3),
        ("context_switches_per_page", "switches", 1000.0, 2),
        ("sleeps_per_write", "sleeps", 1000.0, 2),
    ],
    legend,
    total: Some(ALL_SIX),
    open,
    expectations: &[
        Expect::of(Figure::Speed, Bound::NotBelow(1.0)),
        Expect {
            jobs: Jobs::MoreThanCpus,
            ..Expect::of(Figure::Maximum("sleeps_per_write"), Bound::AtMost(0.0))
        },
    ],
    ..Series::NEW
};

fn designs() -> Designs {
    let before = vec![cpus().to_string(), (2 * cpus()).to_string()];
    Designs { before, after: StreamDesign::PerCpu.to_string(), beyond: Vec::new() }
}

fn legend() -> Vec<String> {
    vec![
        format!(
            "designs: a list of {} idle streams (the CPUs here), one of {}, one stream for each CPU",
            cpus(),
            2 * cpus()
        ),
        "elapsed, user, system: seconds; switches: context switches for 1000 pages; sleeps: waits for a stream for 1000 writes".to_owned(),
        "read and randread take no stream here, because lz4 decodes without one: their rows show the noise".to_owned(),
        "all six: seconds of the six patterns, of equal length here and of equal bytes in the published ones".to_owned(),
    ]
}

fn open(corpus: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
    let corpus = corpus.load()?;
    let size_bytes = pages_to_bytes(corpus.page_count() as u64);
    let devices = designs
        .iter()
        .map(|design| UzramDevice::with_attributes(&[("streams", design.clone())], size_bytes))
        .collect::<Result<_>>()?;
    Ok(Box::new(Devices { corpus, devices, pattern: Pattern::Read, filled: false }))
}

struct Devices {
    corpus: Corpus,
    devices: Vec<UzramDevice>,
    pattern: Pattern,
    /// Whether every device holds the corpus unchanged.
    filled: bool,
}

impl Experiment for Devices {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.pattern = case.parse()?;
        if !self.filled {
            for device in &self.devices {
                device.fill(&self.corpus)?;
                verify(device, &self.corpus, self.corpus.page_count())?;
            }
        }
        self.filled = !self.pattern.writes();
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let device = &self.devices[plan.design];
        let sleeps_before = device.device.stats().stream_sleeps;
        let measured = measure(
            device,
            &BenchPlan {
                pattern: self.pattern,
                jobs: plan.jobs,
                until: Until::Pages(plan.work.div_ceil(plan.jobs as u64)),
                seed: plan.seed,
                corpus: &self.corpus,
                page_count: self.corpus.page_count(),
                stop: plan.stop,
            },
        )?;
        Ok(sample(self.pattern, &measured, device.device.stats().stream_sleeps - sleeps_before))
    }
}

fn sample(pattern: Pattern, measured: &Measurement, sleeps: u64) -> Sample {
    let Measurement { elapsed, pages_read, pages_written, usage, .. } = *measured;
    let total = Total { elapsed, usage, units: pages_read + pages_written };
    let switches = usage.voluntary_switches + usage.involuntary_switches;
    let mut values = total.values(Unit::Page.costs());
    values.push(("mb_per_s", mb_per_s(total.units, elapsed)));
    values.push(("context_switches_per_page", total.per_unit(switches as f64)));
    if pattern.reads() {
        values.push(("read_mb_per_s", mb_per_s(pages_read, elapsed)));
    }
    if pattern.writes() {
        values.push(("write_mb_per_s", mb_per_s(pages_written, elapsed)));
        // A mixed pattern of few pages may have no writes.
        values.push(("sleeps_per_write", sleeps as f64 / pages_written.max(1) as f64));
    }
    Sample { elapsed, values }
}
