//! The measured work of a thread, run with or without the clock, and the totals of all threads.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

use uzram::Result;
use uzram_bench::harness::{Span, Usage};

/// The work of one thread; returns the number of units done.
pub(crate) type ThreadWork<'a> = &'a mut dyn FnMut() -> Result<u64>;

/// [`clocked`] or [`unclocked`].
pub(crate) type RunWork = fn(ThreadWork<'_>) -> Result<Done>;

pub(crate) struct Done {
    pub(crate) span: Span,
    pub(crate) units: u64,
}

/// If a second run counts locks and the like, which costs time, it does the timed run's work divided by this.
pub(crate) const COUNTED_SHARE: u64 = 4;

/// Runs and times a thread's work. Profilers look for this function by its name, so it must not be inlined.
#[inline(never)]
pub(crate) fn clocked(work: ThreadWork<'_>) -> Result<Done> {
    #[cfg(feature = "lock-stats")]
    let _recording = uzram::sync::LockRecording::start();
    let usage = Usage::of_this_thread()?;
    let start = Instant::now();
    let units = work()?;
    let end = Instant::now();
    Ok(Done { span: Span { start, end, usage: Usage::of_this_thread()? - usage }, units })
}

/// Runs a thread's work in the counting run, which neither the clock nor a profiler should see.
pub(crate) fn unclocked(work: ThreadWork<'_>) -> Result<Done> {
    let now = Instant::now();
    Ok(Done { span: Span { start: now, end: now, usage: Usage::default() }, units: work()? })
}

#[derive(Default)]
pub(crate) struct Total {
    /// From the first thread's start to the last one's end.
    pub(crate) elapsed: Duration,
    pub(crate) usage: Usage,
    pub(crate) units: u64,
}

impl Total {
    pub(crate) fn of(done: &[Done]) -> Total {
        let (elapsed, usage) = Span::together(done.iter().map(|done| done.span));
        Total { elapsed, usage, units: done.iter().map(|done| done.units).sum() }
    }

    pub(crate) fn per_unit(&self, value: f64) -> f64 {
        value / self.units.max(1) as f64
    }

    /// Returns seconds, and for each unit, by [`Unit::costs`](super::Unit::costs), nanoseconds and context
    /// switches.
    pub(crate) fn values(&self, costs: [&'static str; 4]) -> Vec<(&'static str, f64)> {
        let [ns, cpu_ns, voluntary, involuntary] = costs;
        let Total { elapsed, usage, .. } = self;
        let ns_per_unit = |time: Duration| self.per_unit(time.as_secs_f64() * 1e9);
        vec![
            ("user_s", usage.user.as_secs_f64()),
            ("system_s", usage.system.as_secs_f64()),
            (ns, ns_per_unit(*elapsed)),
            (cpu_ns, ns_per_unit(usage.user + usage.system)),
            (voluntary, self.per_unit(usage.voluntary_switches as f64)),
            (involuntary, self.per_unit(usage.involuntary_switches as f64)),
        ]
    }
}

impl AddAssign for Total {
    fn add_assign(&mut self, other: Total) {
        self.elapsed += other.elapsed;
        self.usage += other.usage;
        self.units += other.units;
    }
}
