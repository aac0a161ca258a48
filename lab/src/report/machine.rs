//! The machine that a report was measured on, and dates.

use std::fs;

use jiff::Timestamp;
use serde::Serialize;

use crate::experiment::cpus;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    pub(super) cpus: usize,
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

/// Returns a time as `2026-04-30 12:07 UTC`.
pub(super) fn date(unix_s: u64) -> String {
    let time = i64::try_from(unix_s).ok().and_then(|unix_s| Timestamp::from_second(unix_s).ok());
    time.map_or_else(String::new, |time| time.strftime("%Y-%m-%d %H:%M UTC").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_of_this_form() {
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_234_567_890), "2009-02-13 23:31 UTC");
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::of_this_system();
        assert!(machine.cpus > 0 && machine.memory_mib > 0, "{machine:?}");
        assert!(machine.kernel.len() > "Linux ".len() && !machine.cpu.is_empty(), "{machine:?}");
        assert_eq!(field("a b : 1\nmodel name\t:  Some  CPU\n", "model name").as_deref(), Some("Some CPU"));
    }
}
