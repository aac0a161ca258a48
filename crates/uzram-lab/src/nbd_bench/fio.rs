//! One run of fio, and the buffers it writes from.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use uzram::base::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use super::server::run_to_end;
use crate::corpus::Corpus;

const IO_DEPTH: usize = 16;
/// How often the buffers get new contents.
const REFRESH: Duration = Duration::from_millis(1);
/// What fio needs beyond its runtime to start, and to end.
const SLACK: Duration = Duration::from_secs(60);

/// What fio is to do.
pub(super) struct Fio {
    pub(super) rw: &'static str,
    pub(super) jobs: usize,
    pub(super) duration: Duration,
    pub(super) seed: u64,
}

impl Fio {
    /// Runs it on a server's disk, which is as large as the corpus; 10^6 bytes a second.
    pub(super) fn run(&self, uri: &str, corpus: &Corpus) -> Result<f64> {
        let buffers = Buffers::new()?;
        let results = tempfile::NamedTempFile::new().map_err(io_error)?;
        let mut command = Command::new("fio");
        command.args(["--name=bench", "--ioengine=nbd", "--bs=4k", "--time_based", "--norandommap"]);
        command.args(["--group_reporting", "--output-format=json", "--scramble_buffers=0"]);
        command.arg(format!("--uri={uri}")).arg(format!("--rw={}", self.rw));
        command.arg(format!("--iodepth={IO_DEPTH}")).arg(format!("--numjobs={}", self.jobs));
        command.arg(format!("--size={}", corpus.page_count() * PAGE_SIZE));
        command
            .arg(format!("--runtime={}ms", self.duration.as_millis()))
            .arg(format!("--randseed={}", self.seed));
        command.arg(format!("--output={}", results.path().display()));
        let writes = self.rw.contains("write");
        if writes {
            command.arg(format!("--mem=mmapshared:{}", buffers.path()));
        }
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            if writes {
                thread::Builder::new()
                    .spawn_scoped(scope, || buffers.keep_fresh(corpus, self.seed, &ended))
                    .map_err(io_error)?;
            }
            let result = run_to_end(&mut command, self.duration + SLACK);
            ended.store(true, Ordering::Relaxed);
            result
        })?;
        let text = std::fs::read_to_string(results.path()).map_err(io_error)?;
        speed(&text, if writes { "write" } else { "read" })
    }
}

/// The throughput in fio's JSON, 10^6 bytes a second.
fn speed(text: &str, direction: &str) -> Result<f64> {
    let json: Value = serde_json::from_str(text)
        .map_err(|error| Error::new(ErrorKind::Io, format!("fio's report is no JSON: {error}")))?;
    let job = &json["jobs"][0];
    match (job["error"].as_i64(), job[direction]["bw_bytes"].as_f64()) {
        (Some(0), Some(speed)) if speed > 0.0 => Ok(speed / 1e6),
        (error, _) => {
            Err(Error::new(ErrorKind::Io, format!("fio reports error {error:?} and no {direction}s")))
        }
    }
}

/// The memory fio writes from: a memory file that fio maps shared, all its jobs the same pages.
struct Buffers {
    file: File,
}

impl Buffers {
    fn new() -> Result<Buffers> {
        let file =
            File::from(memfd_create("fio-buffers", MemfdFlags::CLOEXEC).map_err(|e| io_error(e.into()))?);
        // Twice what fio needs: it maps without growing the file.
        file.set_len((2 * IO_DEPTH * PAGE_SIZE) as u64).map_err(io_error)?;
        Ok(Buffers { file })
    }

    /// Where another process finds it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Puts random pages of the corpus into the buffers, again and again until fio has ended: at
    /// its start fio fills them with noise.
    fn keep_fresh(&self, corpus: &Corpus, seed: u64, ended: &AtomicBool) {
        let mut rng = fastrand::Rng::with_seed(seed);
        while !ended.load(Ordering::Relaxed) {
            for buffer in 0..IO_DEPTH {
                let page = corpus.page(rng.usize(..corpus.page_count()));
                // Memory that cannot be written leaves what was there.
                let _ = self.file.write_all_at(page, (buffer * PAGE_SIZE) as u64);
            }
            thread::sleep(REFRESH);
        }
    }
}

fn io_error(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("the NBD benchmark's files: {error}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fios_report_is_understood_or_refused() {
        let good = r#"{"jobs":[{"error":0,"read":{"bw_bytes":2500000},"write":{"bw_bytes":0}}]}"#;
        assert_eq!(speed(good, "read").unwrap(), 2.5);
        for bad in [r#"{"jobs":[]}"#, "", r#"{"jobs":[{"error":5,"write":{"bw_bytes":9}}]}"#] {
            assert!(speed(bad, "write").is_err(), "{bad}");
        }
        assert!(speed(good, "write").is_err(), "nothing was written");
    }
}
