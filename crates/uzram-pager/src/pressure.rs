//! A limit that follows the stalls of the program, as Senpai does for a cgroup ("TMO: Transparent Memory
//! Offloading in Datacenters", Weiner et al., 2022).
//!
//! Every interval the time that threads waited for memory is compared with a goal. Below it, the limit
//! shrinks a little, the less the closer the goal is; above it, the limit grows.
//!
//! Two kinds of waits count: the pager's own faults, which the kernel does not know as such, and what the
//! kernel reports for the process's cgroup, or else for the machine (`some` of `memory.pressure`).

use std::fs::{self, File};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::room::Room;
use crate::system::text_of;

/// How often the limit changes.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);
/// The most by which the limit shrinks or grows in an interval: parts of itself.
const MOST_SHRINKING: f64 = 0.02;
const MOST_GROWTH: f64 = 0.10;
/// The limit stays above this share of the most memory.
const LEAST_SHARE: u64 = 32;

/// The share of the time that threads may wait, in percent, and what tells of the system's pressure.
#[derive(Clone, Debug)]
pub(crate) struct Goal {
    pub(crate) percent: f64,
    pub(crate) source: Option<Arc<Source>>,
}

/// The file that tells of stalls: of the process's cgroup (version 2), or of the machine.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: File,
    pub(crate) path: String,
}

impl Source {
    /// Returns `None` if the kernel tells of none.
    pub(crate) fn open() -> Option<Arc<Source>> {
        let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
        let own = path.map(|path| format!("/sys/fs/cgroup{path}/memory.pressure"));
        [own, Some("/proc/pressure/memory".to_owned())].into_iter().flatten().find_map(|path| {
            let file = File::open(&path).ok()?;
            // A kernel can refuse to read what it lets be opened.
            text_of(&file, &mut [0; 256])?;
            Some(Arc::new(Source { file, path }))
        })
    }
}

/// Sets a pager's limit by its pressure.
pub(crate) struct Governor {
    goal: Goal,
    least_pages: u64,
    most_pages: u64,
    /// When it looked last, and the microseconds of stalls until then.
    last: (Instant, u64),
}

impl Governor {
    pub(crate) fn new(goal: Goal, most_pages: u64, least_pages: u64) -> Governor {
        let stalls = stalls_us(goal.source.as_deref());
        Governor {
            goal,
            least_pages: least_pages.max(most_pages / LEAST_SHARE).min(most_pages),
            most_pages,
            last: (Instant::now(), stalls),
        }
    }

    /// Changes the limit if an interval is over. `fault_us`: the microseconds that faults took so far.
    pub(crate) fn look(&mut self, room: &Room, fault_us: u64) {
        let elapsed = self.last.0.elapsed();
        if elapsed < INTERVAL {
            return;
        }
        let stalls = fault_us.wrapping_add(stalls_us(self.goal.source.as_deref()));
        let stalled_us = stalls.saturating_sub(self.last.1);
        self.last = (Instant::now(), stalls);
        let percent = stalled_us as f64 / elapsed.as_micros() as f64 * 100.0;
        let held = room.used_pages();
        let factor = factor(percent / self.goal.percent.max(f64::MIN_POSITIVE));
        // A limit far above what is in use would take long to have an effect.
        let limit = room.limit_pages.get();
        let from = if factor < 1.0 { limit.min(held) } else { limit };
        let pages = ((from as f64 * factor) as u64).clamp(self.least_pages, self.most_pages);
        room.limit_pages.set(pages);
        if room.resident_pages.get() > pages {
            room.evictor.ring();
        }
    }
}

/// Returns by what the limit is multiplied, where stalls are `ratio` times the goal.
fn factor(ratio: f64) -> f64 {
    if ratio <= 1.0 { 1.0 - MOST_SHRINKING * (1.0 - ratio) } else { 1.0 + MOST_GROWTH * (1.0 - 1.0 / ratio) }
}

/// Returns the microseconds of stalls so far; 0 if they are not known.
fn stalls_us(source: Option<&Source>) -> u64 {
    let mut room = [0; 256];
    source.and_then(|source| text_of(&source.file, &mut room)).and_then(total_us).unwrap_or(0)
}

/// Returns the total of the line `some`.
fn total_us(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_some_is_read() {
        let full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=99\n";
        let both = format!("some avg10=0.00 avg60=0.01 avg300=0.00 total=123456\n{full}");
        assert_eq!([both.as_str(), full, ""].map(total_us), [Some(123_456), None, None]);
    }

    #[test]
    fn the_limit_shrinks_below_the_goal_and_grows_above() {
        assert_eq!((factor(0.0), factor(1.0)), (1.0 - MOST_SHRINKING, 1.0));
        assert!(factor(0.1) < factor(0.9) && factor(0.9) < 1.0);
        assert!(factor(1.1) > 1.0 && factor(1e9) <= 1.0 + MOST_GROWTH);
    }
}
