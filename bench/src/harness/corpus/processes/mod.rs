//! The `processes` corpus: memory of programs that run, as swap would get it. This starts them, waits until
//! each has built its data, takes some of its pages, and ends it.
//!
//! `workloads.rs` says what each program does; their data are seeded, or made of files of this machine.
//! Programs that are not installed, or fail, are left out, and the corpus says so. Pages are chosen as `uzram
//! corpus` chooses them.

mod workloads;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};
use uzram_cli::process_pages;
use uzram_cli::program::Program;

use super::{AlignedPage, Corpus};
use crate::harness::process::{POLL, find, last_words, text_from};
use crate::harness::{go_on, joined, proc_bytes};
use workloads::{Ready, Workload};

/// The time that a program has to build its data. On an idle machine each takes some seconds.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Pages that follow each other in a program's memory stay together in the whole corpus in groups of so many.
const GROUP_PAGES: usize = 16;

/// The memory of several programs.
pub struct Processes {
    /// Each program's name and its pages, none of them same-filled.
    pub parts: Vec<(&'static str, Corpus)>,
    /// The programs that are missing, each with the reason.
    pub left_out: Vec<String>,
}

/// Builds the corpus, with up to `pages` pages, as many of each program. The programs run one after the
/// other, so that there must be memory for one only. With `at_once` they run concurrently, for a short trial.
pub fn build(pages: usize, at_once: bool, stop: &AtomicBool) -> Result<Processes> {
    let mut processes = Processes { parts: Vec::new(), left_out: Vec::new() };
    let each = pages.div_ceil(workloads::ALL.len());
    let take = |workload: &Workload| go_on(stop).and_then(|()| memory_of(workload, each, stop));
    let taken = if at_once {
        thread::scope(|scope| {
            let threads = workloads::ALL.each_ref().map(|workload| scope.spawn(move || take(workload)));
            threads.map(joined)
        })
    } else {
        workloads::ALL.each_ref().map(take)
    };
    for (workload, taken) in workloads::ALL.iter().zip(taken) {
        match taken {
            Ok(corpus) => processes.parts.push((workload.name, corpus)),
            Err(error) => {
                go_on(stop)?;
                processes.left_out.push(format!("{} left out of processes: {error}", workload.name));
            }
        }
    }
    if processes.parts.is_empty() {
        return Err(
            Error::new(ErrorKind::Unsupported, processes.left_out.join("; ")).with_setting("--corpus")
        );
    }
    Ok(processes)
}

/// Returns up to `pages` pages of a Python of more than 1 GiB.
pub fn large_python(pages: usize, stop: &AtomicBool) -> Result<Corpus> {
    memory_of(&workloads::LARGE_PYTHON, pages, stop)
}

impl Processes {
    /// Returns the pages of all programs, in groups of neighbours, from each program in turn.
    pub fn whole(&self) -> Result<Corpus> {
        let groups = |corpus: &Corpus| corpus.pages.chunks(GROUP_PAGES).map(<[_]>::to_vec).collect();
        let mut parts: VecDeque<VecDeque<_>> = self.parts.iter().map(|(_, corpus)| groups(corpus)).collect();
        let mut pages = Vec::new();
        while let Some(mut part) = parts.pop_front() {
            if let Some(mut group) = part.pop_front() {
                pages.append(&mut group);
                parts.push_back(part);
            }
        }
        Corpus::new(pages)
    }
}

/// Runs one program; returns up to `pages` pages of its memory, and of the processes that it started.
fn memory_of(workload: &Workload, pages: usize, stop: &AtomicBool) -> Result<Corpus> {
    if find(workload.program).is_none() {
        return Err(Error::new(ErrorKind::NotFound, format!("{} is not installed", workload.program)));
    }
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::Io, format!("{} cannot run: {error}", workload.program))
    };
    let dir = tempfile::tempdir().map_err(failed)?;
    let (printed, said) = (dir.path().join("printed"), dir.path().join("said"));
    let mut command = Command::new(workload.program);
    if let Some((name, text)) = workload.file {
        fs::write(dir.path().join(name), text).map_err(failed)?;
    }
    command.args(workload.args).current_dir(dir.path()).stdout(File::create(&printed).map_err(failed)?);
    command.stderr(File::create(&said).map_err(failed)?);

    let program = Program::start(&mut command).map_err(failed)?;
    let failure = |what: &str| {
        let words = File::open(&said).map(|file| last_words(&file)).unwrap_or_default();
        Error::new(ErrorKind::Io, format!("{} {what}: {}", workload.program, words.trim()))
    };
    let deadline = Instant::now() + READY_TIMEOUT;
    while !is_ready(workload, &program, dir.path(), &printed).map_err(failed)? {
        go_on(stop)?;
        if let Some(how) = program.ended().map_err(failed)? {
            return Err(failure(&format!("ended {how}")));
        }
        if Instant::now() > deadline {
            return Err(failure("was not ready in time"));
        }
        thread::sleep(POLL);
    }
    let pids = program.pids();
    let taken = process_pages::take(&pids[..1], &pids[1..], pages, stop)?;
    Corpus::new(taken.pages.into_iter().map(AlignedPage).collect())
}

fn is_ready(workload: &Workload, program: &Program, dir: &Path, printed: &Path) -> std::io::Result<bool> {
    match workload.ready {
        Ready::Says => Ok(File::open(printed).is_ok_and(|file| text_from(&file, 0).contains("ready"))),
        Ready::Holds(wanted_bytes) => {
            let anonymous_bytes = |pid: u32| proc_bytes(&pid.to_string(), "status", &["RssAnon"]);
            let held = program.pids().into_iter().filter_map(anonymous_bytes).max();
            Ok(held.is_some_and(|bytes| bytes >= wanted_bytes))
        }
        Ready::Filled(fill) => fill(dir),
    }
}

#[cfg(test)]
mod tests;
