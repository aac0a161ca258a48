//! The time left, on standard error: one line that changes if that is a terminal, else a line for each table.
//!
//! The state is global because a measurement reports its progress through a function pointer ([`show`]).

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use uzram_bench::harness::command::show_progress;

/// When the current table was begun, and the seconds that it and those after it take, about.
static CURRENT: Mutex<Option<(Instant, f64)>> = Mutex::new(None);

pub(super) fn words(seconds: f64) -> String {
    match seconds.round() as u64 {
        seconds @ ..60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

/// Shows the progress of the measurement under way, if standard error is a terminal.
pub(super) fn show(what: &str) {
    let line = match *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) {
        Some((begun, all_s)) if !what.is_empty() => {
            format!("{} left  {what}", words((all_s - begun.elapsed().as_secs_f64()).max(0.0)))
        }
        _ => what.to_owned(),
    };
    show_progress(&line);
}

/// Begins a table: it and those after it take about so long.
pub(super) fn begin(table: &str, all_s: f64) {
    line(&format!("{table}: measuring; {} left", words(all_s)));
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), all_s));
}

pub(super) fn end(table: &str, took_s: f64) {
    show_progress("");
    line(&format!("{table}: took {}", words(took_s)));
}

/// Prints a line where no progress is shown.
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
    fn a_minute_has_sixty_seconds() {
        assert_eq!([59.4, 59.6, 60.0, 125.0].map(words), ["59 s", "1 min 0 s", "1 min 0 s", "2 min 5 s"]);
    }
}
