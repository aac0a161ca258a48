//! Memory that stays resident after a random 90 % of many objects were freed and the allocator was asked to
//! return memory.
//!
//! Each allocator is measured in its own child process, so that none disturbs another: anonymous memory at
//! the end, minus anonymous memory before the allocator's first object, by the kernel's count. Pages that the
//! kernel may reclaim at any time (`MADV_FREE`) do not count.

use std::process::Command;
use std::time::Duration;

use serde::Serialize;
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::command;
use uzram_bench::harness::process::run_to_end;

use crate::heap::{names, open};

/// One object in this many is kept.
const KEPT_ONE_IN: usize = 10;

/// The seed for choosing the objects to free.
const SEED: u64 = 1;

/// The time after which a child counts as hung.
const PATIENCE: Duration = Duration::from_secs(600);

/// The memory that one allocator kept.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// The allocator.
    pub allocator: &'static str,
    /// The objects' size.
    pub size_bytes: usize,
    /// Resident bytes for each byte of an object in use.
    pub resident_per_live: f64,
}

/// The option that selects the allocator in a child.
pub const CHILD_OPTION: &str = "--resident-of";

/// Measures every allocator of this build, each in a child process.
///
/// # Errors
/// The error of a child.
pub fn measure_all(size_bytes: usize, objects: usize) -> Result<Vec<Memory>> {
    let live_bytes = (objects / KEPT_ONE_IN * size_bytes) as f64;
    let of = |allocator| {
        let (size, objects) = (size_bytes.to_string(), objects.to_string());
        let printed = in_child(&[CHILD_OPTION, allocator, "--size", &size, "--objects", &objects])?;
        let resident_bytes: u64 = printed.trim().parse().map_err(|_| {
            let what = format!("the memory of {allocator}: the child printed '{}'", printed.trim());
            Error::new(ErrorKind::Io, what)
        })?;
        let resident_bytes = resident_bytes as f64;
        Ok(Memory { allocator, size_bytes, resident_per_live: resident_bytes / live_bytes })
    };
    names().into_iter().map(of).collect()
}

/// Runs this program again to measure one allocator; returns what it prints.
pub fn in_child(args: &[&str]) -> Result<String> {
    run_to_end(Command::new(command::this_program()?).args(args), PATIENCE)
}

/// Run by a child: returns the bytes that an allocator keeps in memory.
///
/// # Errors
/// An error of the heap, or of reading /proc.
pub fn measure(allocator: &str, size_bytes: usize, objects: usize) -> Result<u64> {
    // Touched before the first measurement, as is the memory that reading /proc needs.
    let mut words = vec![1u64; objects];
    anonymous_bytes()?;
    let before_bytes = anonymous_bytes()?;
    let Some(heap) = open(allocator, size_bytes, objects as u64)? else {
        let what = format!("there is no allocator '{allocator}' with objects of {size_bytes} bytes");
        return Err(Error::invalid(what).with_setting(CHILD_OPTION));
    };
    heap.scatter(&mut words, objects / KEPT_ONE_IN, SEED)?;
    Ok(anonymous_bytes()?.saturating_sub(before_bytes))
}

/// Returns this process's anonymous memory, without pages that the kernel may reclaim at any time.
pub fn anonymous_bytes() -> Result<u64> {
    let path = "/proc/self/smaps_rollup";
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::new(ErrorKind::Unsupported, format!("{path}: {error}")))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
    };
    field("Anonymous:")
        .zip(field("LazyFree:"))
        .map(|(anonymous, lazy)| anonymous.saturating_sub(lazy))
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, format!("{path} has no Anonymous and LazyFree")))
}
