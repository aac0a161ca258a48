//! Rows: two designs, their measurements in every round, and how they compare.

use serde::Serialize;

use crate::published::Published;
use uzram_bench::harness::rounds::Values;
use uzram_bench::harness::stats::{PairedRatio, median};

/// One design and its measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// Its name.
    pub design: String,
    /// The quantities.
    pub values: Values,
}

impl Side {
    /// Returns the median of a quantity.
    pub fn median(&self, quantity: &str) -> Option<f64> {
        self.values.get(quantity).filter(|rounds| !rounds.is_empty()).map(|rounds| median(rounds))
    }

    /// Returns the seconds of CPU time, in user space and in the kernel.
    pub fn processor_s(&self) -> Option<Vec<f64>> {
        let (user, system) = (self.values.get("user_s")?, self.values.get("system_s")?);
        Some(user.iter().zip(system).map(|(user, system)| user + system).collect())
    }
}

/// A design before against the one after, in one case with one number of jobs.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The case, or the table's name for all of them.
    pub case: String,
    /// The number of concurrent jobs.
    pub jobs: usize,
    /// The design before.
    pub before: Side,
    /// The design after.
    pub after: Side,
    /// Elapsed seconds before / after; above 1 the design after is faster.
    #[serde(flatten)]
    pub gain: PairedRatio,
    /// The author's figures.
    pub published: Option<Published>,
}

impl Row {
    /// Compares two designs; returns `None` if there is no elapsed time to compare.
    pub(crate) fn new(
        case: &str,
        jobs: usize,
        before: Side,
        after: Side,
        published: Option<Published>,
    ) -> Option<Row> {
        let elapsed_s = |side: &Side| side.values.get("elapsed_s").cloned().unwrap_or_default();
        let gain = PairedRatio::new(&elapsed_s(&before), &elapsed_s(&after))?;
        Some(Row { case: case.to_owned(), jobs, before, after, gain, published })
    }

    /// Returns the ratio of the designs' CPU time. It leaves out waiting, and other programs on the machine
    /// disturb it less than elapsed time.
    pub fn processor_time(&self) -> Option<PairedRatio> {
        PairedRatio::new(&self.before.processor_s()?, &self.after.processor_s()?)
    }

    /// Returns the CPU time of the design after, divided by that of the one before.
    pub fn processor_share(&self) -> Option<PairedRatio> {
        PairedRatio::new(&self.after.processor_s()?, &self.before.processor_s()?)
    }
}

/// Returns the figures of a design in the rows with that number of jobs.
pub fn side<'a>(rows: impl IntoIterator<Item = &'a Row>, jobs: usize, design: &str) -> Option<&'a Side> {
    let sides = rows.into_iter().filter(|row| row.jobs == jobs).flat_map(|row| [&row.before, &row.after]);
    sides.into_iter().find(|side| side.design == design)
}

/// Returns the row with the most jobs that still have a CPU each. With more jobs than CPUs, holders of a lock
/// are preempted, and its hold time says little.
pub(crate) fn busiest<'a>(rows: impl Iterator<Item = &'a Row>, cpus: usize) -> Option<&'a Row> {
    rows.filter(|row| row.jobs <= cpus).max_by_key(|row| row.jobs)
}
