//! A program that runs while its memory is looked at.

use std::process::Command;
use std::time::{Duration, Instant};

use uzram::Result;

use crate::harness::proc_bytes;
use crate::harness::process::{Process, family};

const EVERY: Duration = Duration::from_millis(10);

/// What a program has printed, and taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watched {
    pub(crate) printed: String,
    pub(crate) seconds: f64,
    /// The most memory of one of its processes, as the kernel counts it (`VmHWM`).
    pub(crate) peak_bytes: u64,
    /// The most anonymous memory of one process at one of the looks (`RssAnon`).
    pub(crate) anonymous_bytes: u64,
}

/// Runs a command to its end, which must be a success, and looks at the memory of all processes that it
/// starts.
pub(crate) fn watch(command: &mut Command, timeout: Duration, stops: impl Fn() -> bool) -> Result<Watched> {
    let start = Instant::now();
    let mut process = Process::start(command)?;
    let mut watched = Watched::default();
    process.finish(timeout, stops, EVERY, |process| watched.look(process.id()))?;
    watched.seconds = start.elapsed().as_secs_f64();
    watched.printed = process.printed();
    Ok(watched)
}

impl Watched {
    fn look(&mut self, process: u32) {
        for process in family(process) {
            // Those that have ended meanwhile are gone.
            let bytes = |field| proc_bytes(&process.to_string(), "status", &[field]).unwrap_or(0);
            self.peak_bytes = self.peak_bytes.max(bytes("VmHWM"));
            self.anonymous_bytes = self.anonymous_bytes.max(bytes("RssAnon"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_what_a_program_starts_is_seen() {
        let mut command = Command::new("bash");
        command.args([
            "-c",
            "bash -c 'x=$(head -c 20000000 /dev/zero | tr \"\\\\0\" x); sleep 0.3; echo ${#x}'",
        ]);
        let watched = watch(&mut command, Duration::from_secs(60), || false).unwrap();
        assert_eq!(watched.printed, "20000000\n");
        assert!(watched.peak_bytes > 20_000_000 && watched.anonymous_bytes > 20_000_000, "{watched:?}");
        assert!(watched.seconds > 0.3, "{watched:?}");
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error() {
        let mut fails = Command::new("bash");
        fails.args(["-c", "echo no >&2; exit 3"]);
        assert!(watch(&mut fails, Duration::from_secs(60), || false).unwrap_err().to_string().contains("no"));
        let mut hangs = Command::new("sleep");
        hangs.arg("60");
        let error = watch(&mut hangs, Duration::from_millis(30), || false).unwrap_err();
        assert!(error.to_string().contains("in time"), "{error}");
    }
}
