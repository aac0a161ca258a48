//! Memory that stays resident after a random 90 % of many objects were freed and the allocator was asked to
//! return memory.
//!
//! Each allocator is measured in its own child process, so that none disturbs another: anonymous memory at
//! the end, minus anonymous memory before the allocator's first object, by the kernel's count. Pages that the
//! kernel may reclaim at any time (`MADV_FREE`) do not count.

use std::process::Command;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::process::run_to_end;
use uzram_bench::harness::{Report, command, proc_bytes};

use crate::heap::SIZES_BYTES;
use crate::slab::{PLAIN, names, open};

/// One object in this many is kept.
const KEPT_ONE_IN: usize = 10;

/// The seed for choosing the objects to free.
const SEED: u64 = 1;

/// The time after which a child counts as hung.
const PATIENCE: Duration = Duration::from_secs(600);

/// The option that selects the allocator in a child.
pub const CHILD_OPTION: &str = "--resident-of";

/// Measures every allocator of this build, each in a child process.
pub fn measure_all(objects: usize, report: &mut Report) -> Result<()> {
    const TABLE: &str = "bytes in memory / in use";
    for (size_bytes, column) in SIZES_BYTES.into_iter().zip(["64 bytes", "256 bytes"]) {
        let live_bytes = (objects / KEPT_ONE_IN * size_bytes) as f64;
        let (mut ours, mut best) = (f64::NAN, f64::INFINITY);
        for allocator in names() {
            let (size, objects) = (size_bytes.to_string(), objects.to_string());
            let printed = in_child(&[CHILD_OPTION, allocator, "--size", &size, "--objects", &objects])?;
            let resident_bytes: f64 = printed.trim().parse().map_err(|_| {
                let what = format!("the memory of {allocator}: the child printed '{}'", printed.trim());
                Error::new(ErrorKind::Io, what)
            })?;
            let kept = resident_bytes / live_bytes;
            match allocator {
                PLAIN => ours = kept,
                _ if !allocator.starts_with(PLAIN) => best = best.min(kept),
                _ => {}
            }
            report.row(TABLE, allocator, &[(column, kept)]);
        }
        report.row(TABLE, "uzram / the best other", &[(column, ours / best)]);
    }
    Ok(())
}

/// Runs this program again to measure one allocator; returns what it prints.
pub fn in_child(args: &[&str]) -> Result<String> {
    run_to_end(Command::new(command::this_program()?).args(args), PATIENCE)
}

/// Run by a child: returns the bytes that an allocator keeps in memory.
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
    let field = |name| proc_bytes("self", "smaps_rollup", &[name]);
    let of = |(anonymous, lazy): (u64, u64)| anonymous.saturating_sub(lazy);
    field("Anonymous").zip(field("LazyFree")).map(of).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "/proc/self/smaps_rollup has no Anonymous and LazyFree")
    })
}
