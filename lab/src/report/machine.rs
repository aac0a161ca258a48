//! The machine that a report was measured on, and dates.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::experiment::cpus;

/// What identifies a machine to a reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// The model of its CPUs.
    pub(super) cpu: String,
    /// The number of CPUs that jobs can run on.
    pub(super) cpus: usize,
    /// The kernel and its release.
    pub(super) kernel: String,
    pub(super) memory_mib: u64,
}

impl Machine {
    pub(super) fn of_this_system() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let release = read("/proc/sys/kernel/osrelease");
        let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let arch = std::env::consts::ARCH;
        // Not every architecture has a name for its CPUs there.
        let cpu = field(&read("/proc/cpuinfo"), "model name");
        Machine {
            cpu: cpu.map_or_else(|| arch.to_owned(), |cpu| format!("{cpu}, {arch}")),
            cpus: cpus(),
            kernel: format!("Linux {}", release.trim()),
            memory_mib: kib / 1024,
        }
    }

    /// Returns it as names and values.
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("CPU", self.cpu.clone()),
            ("CPUs", self.cpus.to_string()),
            ("memory", format!("{:.1} GiB", self.memory_mib as f64 / 1024.0)),
            ("kernel", self.kernel.clone()),
        ]
    }
}

/// Returns the value of the first line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(found, _)| found.trim() == name)?;
    Some(value.split_whitespace().collect::<Vec<_>>().join(" "))
}

pub(super) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns a time as `2026-04-30 12:07 UTC`.
///
/// The day: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`: years begin in
/// March, and 400 of them have 146097 days.
pub(super) fn date(unix_s: u64) -> String {
    const DAYS_TO_MARCH_OF_YEAR_0: u64 = 719_468;
    let (days, seconds) = (unix_s / 86_400 + DAYS_TO_MARCH_OF_YEAR_0, unix_s % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_known_times() {
        for (unix_s, wanted) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_234_567_890, "2009-02-13 23:31 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(unix_s), wanted);
        }
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::of_this_system();
        assert!(machine.cpus > 0 && machine.memory_mib > 0, "{machine:?}");
        assert!(machine.kernel.len() > "Linux ".len() && !machine.cpu.is_empty(), "{machine:?}");
        assert_eq!(field("a b : 1\nmodel name\t:  Some  CPU\n", "model name").as_deref(), Some("Some CPU"));
    }
}
