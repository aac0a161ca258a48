//! A limit that follows the stalls of the program, as Senpai does for a cgroup ("TMO: Transparent Memory
//! Offloading in Datacenters", Weiner et al., 2022).
//!
//! Every interval the time that threads waited for memory is compared with a goal. Below it, the limit
//! shrinks a little, the less the closer the goal is; above it, the limit grows. So it settles where the
//! program has the memory that it uses, and what is cold is compressed, without anybody knowing how much that
//! is.
//!
//! Two kinds of waits count: the pager's own faults, which the kernel does not know as such, and what the
//! kernel reports for the process's cgroup, or else for the machine (`some` of `memory.pressure`).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use uzram::store::Store;

use crate::room::Room;

/// How often the limit changes.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);
/// The most by which the limit shrinks or grows in an interval: parts of itself.
const MOST_SHRINKING: f64 = 0.02;
const MOST_GROWTH: f64 = 0.10;
/// The limit stays above this share of the most memory.
const LEAST_SHARE: u64 = 32;

/// Sets a pager's limit by its pressure.
pub(crate) struct Governor {
    goal_percent: f64,
    least_pages: u64,
    most_pages: u64,
    source: Option<PathBuf>,
    /// When it looked last, and the microseconds of stalls until then.
    last: (Instant, u64),
}

impl Governor {
    pub(crate) fn new(goal_percent: f64, most_pages: u64, least_pages: u64) -> Governor {
        let source = source();
        let stalls = stalls_us(source.as_ref());
        Governor {
            goal_percent,
            least_pages: least_pages.max(most_pages / LEAST_SHARE).min(most_pages),
            most_pages,
            source,
            last: (Instant::now(), stalls),
        }
    }

    /// Changes the limit if an interval is over. `fault_us`: the microseconds that faults took so far.
    pub(crate) fn look(&mut self, room: &Room, store: &Store, fault_us: u64) {
        let elapsed = self.last.0.elapsed();
        if elapsed < INTERVAL {
            return;
        }
        let stalls = fault_us.wrapping_add(stalls_us(self.source.as_ref()));
        let stalled_us = stalls.saturating_sub(self.last.1);
        self.last = (Instant::now(), stalls);
        let percent = stalled_us as f64 / elapsed.as_micros() as f64 * 100.0;
        let held = room.used_pages(store);
        let factor = factor(percent / self.goal_percent.max(f64::MIN_POSITIVE));
        // A limit far above what is in use would take long to have an effect.
        let from = if factor < 1.0 { room.limit_pages().min(held) } else { room.limit_pages() };
        let pages = (from as f64 * factor) as u64;
        room.set_limit_pages(pages.clamp(self.least_pages, self.most_pages));
    }
}

/// Returns by what the limit is multiplied, where stalls are `ratio` times the goal.
fn factor(ratio: f64) -> f64 {
    if ratio <= 1.0 { 1.0 - MOST_SHRINKING * (1.0 - ratio) } else { 1.0 + MOST_GROWTH * (1.0 - 1.0 / ratio) }
}

/// Returns the file that tells of stalls: of the process's cgroup (version 2), or of the machine; `None` if
/// the kernel tells of none.
fn source() -> Option<PathBuf> {
    let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_cgroup = cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .map(|path| PathBuf::from("/sys/fs/cgroup").join(path).join("memory.pressure"));
    of_cgroup.into_iter().chain([PathBuf::from("/proc/pressure/memory")]).find(|path| fs::read(path).is_ok())
}

/// Returns the microseconds of stalls so far; 0 if they are not known.
fn stalls_us(source: Option<&PathBuf>) -> u64 {
    source.and_then(|path| fs::read_to_string(path).ok()).and_then(|text| total_us(&text)).unwrap_or(0)
}

/// Returns the total of the line `some`.
fn total_us(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_total_of_some_is_read() {
        let text = "some avg10=0.00 avg60=0.01 avg300=0.00 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=99\n";
        assert_eq!(total_us(text), Some(123_456));
        assert_eq!(total_us("full avg10=0.00 total=1"), None);
        assert_eq!(total_us(""), None);
    }

    #[test]
    fn the_limit_shrinks_below_the_goal_and_grows_above() {
        assert_eq!((factor(0.0), factor(1.0)), (1.0 - MOST_SHRINKING, 1.0));
        assert!(factor(0.9) < 1.0 && factor(0.9) > factor(0.1));
        assert!(factor(1.1) > 1.0 && factor(1e9) <= 1.0 + MOST_GROWTH);
    }
}
