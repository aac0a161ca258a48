//! Sorts numbers in a quarter of the memory that they take.
//!
//! `cargo run --release --example region [SIZE_MIB] [message|signal]`
//!
//! The numbers are a slice over a [`Region`](uzram_pager::Region), sorted in place. The pager's limit is a
//! quarter of their size: what was not used for long is compressed, and what does not fit compressed goes to
//! a file in the folder for temporary files. Prints the time, the pager's statistics and the most resident
//! memory for every trap that works here.

use std::time::Instant;

use uzram::random::Random;
use uzram::{Error, Result};
use uzram_pager::{Pager, PagerStats, Trap};

/// Sorts numbers of `size_bytes` bytes.
///
/// # Errors
/// Those of the pager.
///
/// # Panics
/// If the result is not what was to be sorted, in order.
fn sort(size_bytes: usize, trap: Trap) -> Result<PagerStats> {
    let spill =
        tempfile::tempdir().map_err(|error| Error::invalid(format!("no folder to spill to: {error}")))?;
    let builder = Pager::builder().limit(size_bytes as u64 / 4).capacity(2 * size_bytes as u64).trap(trap);
    let pager = builder.spill(spill.path(), 2 * size_bytes as u64).build()?;
    let region = pager.map(size_bytes)?;
    // SAFETY: the region has these bytes, starts at a page, lives longer than the slice, and is not used
    // otherwise meanwhile. Any bytes are numbers.
    let numbers: &mut [u64] =
        unsafe { std::slice::from_raw_parts_mut(region.as_mut_ptr().cast(), size_bytes / size_of::<u64>()) };
    // Random numbers below 2^40 hardly compress, sorted ones do.
    let random_numbers = |count| {
        let mut random = Random::new(1);
        (0..count).map(move |_| random.below_u64(1 << 40))
    };
    numbers.iter_mut().zip(random_numbers(usize::MAX)).for_each(|(number, random)| *number = random);
    numbers.sort_unstable();
    assert!(numbers.is_sorted(), "not in order");
    let sum = |all: u64, number: u64| all.wrapping_add(Random::new(number).next());
    let wanted = random_numbers(numbers.len()).fold(0, sum);
    assert_eq!(numbers.iter().copied().fold(0, sum), wanted, "other numbers than before");
    Ok(pager.stats())
}

fn main() -> Result<()> {
    let (mut size_mib, mut traps) = (1024, Vec::new());
    for argument in std::env::args().skip(1) {
        if let Ok(mib) = argument.parse::<usize>() {
            size_mib = mib;
        } else if let Some(trap) = Trap::ALL.into_iter().find(|trap| trap.name() == argument) {
            traps.push(trap);
        } else {
            return Err(Error::invalid(format!("'{argument}' is neither a size in MiB nor a trap")));
        }
    }
    for trap in if traps.is_empty() { Trap::ALL.into() } else { traps } {
        // Has the peak begin anew; without it, the first run's is shown for all.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let start = Instant::now();
        match trap.check().and_then(|()| sort(size_mib << 20, trap)) {
            Ok(stats) => {
                let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
                let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("?").trim();
                let seconds = start.elapsed().as_secs_f64();
                println!("{:<8} {size_mib} MiB in {seconds:.1} s, {peak} resident: {stats:?}", trap.name());
            }
            Err(error) => println!("{:<8} skipped: {error}", trap.name()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sorted_in_a_quarter_of_their_memory() {
        for trap in Trap::ALL {
            if let Err(error) = trap.check() {
                println!("skipped: {}: {error}", trap.name());
                continue;
            }
            let stats = sort(64 << 20, trap).unwrap_or_else(|error| panic!("{trap:?}: {error}"));
            assert!(stats.pages_out > 12 << 8, "{trap:?} {stats:?}");
        }
    }
}
