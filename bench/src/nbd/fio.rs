//! One run of fio, and the buffers from which it writes.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use crate::harness::corpus::Corpus;
use crate::harness::fio;

const IO_DEPTH: usize = 16;
/// The interval at which the buffers get new contents.
const REFRESH: Duration = Duration::from_millis(1);

/// A run of fio with its NBD engine: pages of 4 KiB, 16 requests in flight for each job.
pub struct Fio {
    /// Its pattern: read, randread, write, randwrite, rw or randrw.
    pub rw: &'static str,
    /// Its jobs, each with its own connection.
    pub jobs: usize,
    /// How long it runs.
    pub duration: Duration,
    /// The seed of its random numbers.
    pub seed: u64,
}

impl Fio {
    /// Runs it on a server's disk, which is as large as the corpus; returns 10^6 bytes a second, read and
    /// written together.
    pub fn run(&self, uri: &str, corpus: &Corpus) -> Result<f64> {
        let buffers = Buffers::new()?;
        let mut command = fio::command();
        command.args(["--ioengine=nbd", "--bs=4k", "--time_based", "--norandommap", "--scramble_buffers=0"]);
        command.arg(format!("--uri={uri}")).arg(format!("--rw={}", self.rw));
        command.arg(format!("--iodepth={IO_DEPTH}")).arg(format!("--numjobs={}", self.jobs));
        command.arg(format!("--size={}", corpus.page_count() * PAGE_SIZE));
        command
            .arg(format!("--runtime={}ms", self.duration.as_millis()))
            .arg(format!("--randseed={}", self.seed));
        let directions: &[&str] = match self.rw {
            "read" | "randread" => &["read"],
            "write" | "randwrite" => &["write"],
            _ => &["read", "write"],
        };
        let writes = directions.contains(&"write");
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
            let speed = fio::speed(command, directions, self.duration);
            ended.store(true, Ordering::Relaxed);
            speed
        })
    }
}

/// fio's write buffers: a memory file that fio maps shared, with the same pages for all its jobs.
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

    /// Returns its path for other processes.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Puts random pages of the corpus into the buffers repeatedly until fio has ended: at its start fio
    /// fills them with noise.
    fn keep_fresh(&self, corpus: &Corpus, seed: u64, ended: &AtomicBool) {
        let mut rng = fastrand::Rng::with_seed(seed);
        while !ended.load(Ordering::Relaxed) {
            for buffer in 0..IO_DEPTH {
                let page = corpus.page(rng.usize(..corpus.page_count()));
                // If the write fails, the old contents stay.
                let _ = self.file.write_all_at(page, (buffer * PAGE_SIZE) as u64);
            }
            thread::sleep(REFRESH);
        }
    }
}

fn io_error(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("the NBD benchmark's files: {error}"))
}
