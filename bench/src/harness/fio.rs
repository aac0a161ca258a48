//! Runs fio and reads its report.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use uzram::{Error, ErrorKind, Result};

use crate::harness::process::{self, run_to_end};

/// The time that fio needs beyond its runtime to start and end.
const SLACK: Duration = Duration::from_secs(60);

/// Returns a command for fio with one job, called `bench`.
pub fn command() -> Command {
    let mut command = process::command("fio");
    command.args(["--name=bench", "--group_reporting", "--output-format=json"]);
    command
}

/// Runs fio for `runtime`, with some slack, and returns its speed in 10^6 bytes a second. `directions` are
/// what it does, `read`, `write` or both, whose speeds add up.
pub fn speed(mut command: Command, directions: &[&str], runtime: Duration) -> Result<f64> {
    let io_error =
        |error: std::io::Error| Error::new(ErrorKind::Io, format!("cannot read fio's report: {error}"));
    let results = tempfile::NamedTempFile::new().map_err(io_error)?;
    command.arg(format!("--output={}", results.path().display()));
    run_to_end(&mut command, runtime + SLACK)?;
    parsed(&std::fs::read_to_string(results.path()).map_err(io_error)?, directions)
}

/// Returns the throughput in fio's JSON.
fn parsed(text: &str, directions: &[&str]) -> Result<f64> {
    let json: Value = serde_json::from_str(text)
        .map_err(|error| Error::new(ErrorKind::Io, format!("fio's report is not JSON: {error}")))?;
    let job = &json["jobs"][0];
    let speed = |direction: &&str| job[*direction]["bw_bytes"].as_f64().filter(|speed| *speed > 0.0);
    let all: Option<Vec<f64>> = directions.iter().map(speed).collect();
    match (job["error"].as_i64(), all) {
        (Some(0), Some(speeds)) => Ok(speeds.iter().sum::<f64>() / 1e6),
        (error, _) => {
            let missing = directions.join("s or no ");
            Err(Error::new(ErrorKind::Io, format!("fio reports error {error:?} and no {missing}s")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_report_is_understood_or_refused() {
        let good = r#"{"jobs":[{"error":0,"read":{"bw_bytes":2500000},"write":{"bw_bytes":0}}]}"#;
        assert_eq!(parsed(good, &["read"]).unwrap(), 2.5);
        let mixed = r#"{"jobs":[{"error":0,"read":{"bw_bytes":2500000},"write":{"bw_bytes":500000}}]}"#;
        assert_eq!(parsed(mixed, &["read", "write"]).unwrap(), 3.0);
        for bad in [r#"{"jobs":[]}"#, "", r#"{"jobs":[{"error":5,"write":{"bw_bytes":9}}]}"#] {
            assert!(parsed(bad, &["write"]).is_err(), "{bad}");
        }
        assert!(parsed(good, &["write"]).is_err(), "nothing was written");
        assert!(parsed(good, &["read", "write"]).is_err(), "nothing was written");
    }
}
