//! The bar, and the time left, on standard error: one line that changes if that is a terminal, else a line
//! for each table.
//!
//! The state is global because a measurement reports its progress through a function pointer ([`show`]).

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzram_bench::harness::command::show_progress;

/// Characters of the bar.
const BAR: usize = 20;
/// The most by which the tables so far change the estimate of those to come.
const MOST: f64 = 4.0;

/// What is being measured.
static STATE: Mutex<Option<State>> = Mutex::new(None);

#[derive(Clone)]
struct State {
    /// The estimates of the tables that are not done, the one being measured first, in seconds.
    estimates_s: Vec<(&'static str, f64)>,
    begun: Instant,
    /// Estimated and measured seconds of the tables that are done.
    estimated_s: f64,
    took_s: f64,
}

impl State {
    /// Returns the fraction that is done, and the seconds left, when the current table has taken `elapsed_s`.
    fn at(&self, elapsed_s: f64) -> (f64, f64) {
        let factor = match self.estimated_s > 0.0 {
            true => (self.took_s / self.estimated_s).clamp(1.0 / MOST, MOST),
            false => 1.0,
        };
        let mut all = self.estimates_s.iter().map(|(_, estimate)| estimate * factor);
        let current_s = all.next().unwrap_or(0.0);
        let left_s = (current_s - elapsed_s).max(0.0) + all.sum::<f64>();
        let done_s = self.took_s + elapsed_s;
        (done_s / (done_s + left_s).max(1e-9), left_s)
    }

    fn line(&self, elapsed_s: f64, what: &str) -> String {
        let (fraction, left_s) = self.at(elapsed_s);
        let filled = ((fraction * BAR as f64) as usize).min(BAR);
        format!(
            "[{}{}] {:.0} %, {} left  {what}",
            "#".repeat(filled),
            "-".repeat(BAR - filled),
            100.0 * fraction,
            words(left_s)
        )
    }
}

/// Returns a duration in words.
pub(super) fn words(seconds: f64) -> String {
    match seconds.round() as u64 {
        seconds @ ..60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

/// Shows the progress of the measurement under way, if standard error is a terminal.
pub(super) fn show(what: &str) {
    let line = match &*STATE.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(state) if !what.is_empty() => state.line(state.begun.elapsed().as_secs_f64(), what),
        _ => what.to_owned(),
    };
    show_progress(&line);
}

/// The progress of a report.
pub(super) struct Progress {
    state: State,
}

impl Progress {
    /// Begins with the tables to be measured, each with its estimate.
    pub(super) fn new(tables: impl Iterator<Item = (&'static str, Duration)>) -> Progress {
        let estimates_s = tables.map(|(table, estimate)| (table, estimate.as_secs_f64())).collect();
        Progress { state: State { estimates_s, begun: Instant::now(), estimated_s: 0.0, took_s: 0.0 } }
    }

    /// Begins a table, which is the next of those to be measured.
    pub(super) fn begin(&mut self, table: &str) {
        self.state.begun = Instant::now();
        let (_, left_s) = self.state.at(0.0);
        line(&format!("{table}: measuring; {} left", words(left_s)));
        self.publish();
    }

    /// Ends the table begun last.
    pub(super) fn end(&mut self, table: &str) {
        let took_s = self.state.begun.elapsed().as_secs_f64();
        if !self.state.estimates_s.is_empty() {
            let (_, estimate_s) = self.state.estimates_s.remove(0);
            self.state.estimated_s += estimate_s;
            self.state.took_s += took_s;
        }
        show_progress("");
        line(&format!("{table}: took {}", words(took_s)));
        self.publish();
    }

    fn publish(&self) {
        *STATE.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.state.clone());
    }
}

/// Prints a line where no bar is shown.
fn line(text: &str) {
    let mut stderr = io::stderr().lock();
    if !stderr.is_terminal() {
        // If standard error is closed, nobody reads it.
        let _ = writeln!(stderr, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_learns_from_the_tables_so_far() {
        let table = |name, seconds| (name, Duration::from_secs(seconds));
        let mut progress = Progress::new([table("a", 10), table("b", 20), table("c", 70)].into_iter());
        assert_eq!(progress.state.at(0.0), (0.0, 100.0));
        assert_eq!(progress.state.at(5.0), (0.05, 95.0));
        // Longer than estimated.
        assert_eq!(progress.state.at(15.0), (15.0 / 105.0, 90.0));
        progress.state.estimates_s.remove(0);
        (progress.state.estimated_s, progress.state.took_s) = (10.0, 20.0);
        assert_eq!(progress.state.at(0.0), (0.1, 180.0));
        assert_eq!(progress.state.at(40.0), (0.3, 140.0));
        assert_eq!(progress.state.line(40.0, "b: x"), "[######--------------] 30 %, 2 min 20 s left  b: x");
        assert_eq!(words(59.4) + &words(60.0), "59 s1 min 0 s");
    }
}
