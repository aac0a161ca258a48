//! Sorts numbers in a quarter of the memory that they take.
//!
//! `cargo run --release --example region [SIZE_MIB] [uffd|guard]`
//!
//! The numbers are a slice over a [`Region`](uzram_pager::Region), sorted in place. The pager's limit is a
//! quarter of their size: what was not used for long is compressed, and what does not fit compressed goes to
//! a file in the folder for temporary files. Prints the time, the pager's statistics and the most resident
//! memory for every trap that works here.

use std::time::Instant;

use uzram::random::Random;
use uzram::{Error, Result};
use uzram_pager::{Pager, PagerStats, TrapKind};

/// The numbers are below this: random ones hardly compress, sorted ones compress well.
const BOUND: u64 = 1 << 40;
const SEED: u64 = 1;

/// What a run has shown.
struct Sorted {
    fill_seconds: f64,
    sort_seconds: f64,
    check_seconds: f64,
    stats: PagerStats,
    /// The most memory that the process had resident.
    peak_bytes: u64,
}

/// Sorts numbers of `size_bytes` bytes, and checks the result.
///
/// # Errors
/// Those of the pager.
///
/// # Panics
/// If the result is not what was to be sorted, in order.
fn sort(size_bytes: usize, trap: TrapKind) -> Result<Sorted> {
    reset_peak();
    let spill =
        tempfile::tempdir().map_err(|error| Error::invalid(format!("no folder to spill to: {error}")))?;
    let builder = Pager::builder().limit(size_bytes as u64 / 4).capacity(2 * size_bytes as u64).trap(trap);
    let pager = builder.spill(spill.path(), 2 * size_bytes as u64).build()?;
    let region = pager.map(size_bytes)?;
    // SAFETY: the region has these bytes, starts at a page, lives longer than the slice, and is not used
    // otherwise meanwhile. Any bytes are numbers.
    let numbers: &mut [u64] =
        unsafe { std::slice::from_raw_parts_mut(region.as_mut_ptr().cast(), size_bytes / size_of::<u64>()) };

    let start = Instant::now();
    let mut random = Random::new(SEED);
    numbers.iter_mut().for_each(|number| *number = random.below_u64(BOUND));
    let fill_seconds = start.elapsed().as_secs_f64();

    let start = Instant::now();
    numbers.sort_unstable();
    let sort_seconds = start.elapsed().as_secs_f64();

    let start = Instant::now();
    assert!(numbers.is_sorted(), "not in order");
    let mut random = Random::new(SEED);
    let wanted = checksum((0..numbers.len()).map(|_| random.below_u64(BOUND)));
    assert_eq!(checksum(numbers.iter().copied()), wanted, "other numbers than before");
    let check_seconds = start.elapsed().as_secs_f64();
    Ok(Sorted { fill_seconds, sort_seconds, check_seconds, stats: pager.stats(), peak_bytes: peak_bytes() })
}

/// Returns the sums of numbers and of what a hash makes of them, which are the same in any order.
fn checksum(numbers: impl Iterator<Item = u64>) -> (u64, u64) {
    numbers.fold((0, 0), |(sum, hashes), number| {
        (sum.wrapping_add(number), hashes.wrapping_add(Random::new(number).next()))
    })
}

/// Has [`peak_bytes`] begin anew.
fn reset_peak() {
    // Without it, the first run's peak is shown for all.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Returns the most memory that the process had resident; 0 if the system does not say.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn main() -> Result<()> {
    let (mut size_mib, mut traps) = (1024, Vec::new());
    for argument in std::env::args().skip(1) {
        if let Ok(mib) = argument.parse::<usize>() {
            size_mib = mib;
        } else if let Some(trap) = TrapKind::ALL.into_iter().find(|trap| trap.name() == argument) {
            trap.check()?;
            traps.push(trap);
        } else {
            return Err(Error::invalid(format!("'{argument}' is neither a size in MiB nor a trap")));
        }
    }
    if traps.is_empty() {
        traps = TrapKind::ALL.into();
    }
    for trap in traps {
        if let Err(error) = trap.check() {
            println!("{:<8} skipped: {error}", trap.name());
            continue;
        }
        let sorted = sort(size_mib << 20, trap)?;
        println!(
            "{:<8} {size_mib} MiB: filled in {:.1} s, sorted in {:.1} s, checked in {:.1} s; at most {} MiB resident",
            trap.name(),
            sorted.fill_seconds,
            sorted.sort_seconds,
            sorted.check_seconds,
            sorted.peak_bytes >> 20
        );
        println!("         {:?}", sorted.stats);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sorted_in_a_quarter_of_their_memory() {
        for trap in TrapKind::ALL {
            if let Err(error) = trap.check() {
                println!("skipped: {}: {error}", trap.name());
                continue;
            }
            match sort(64 << 20, trap) {
                Ok(sorted) => assert!(sorted.stats.pages_out > 12 << 8, "{trap:?} {:?}", sorted.stats),
                Err(error) => panic!("{trap:?}: {error}"),
            }
        }
    }
}
