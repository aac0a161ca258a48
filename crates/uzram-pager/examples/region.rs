//! Sorts numbers in a quarter of the memory that they take.
//!
//! `cargo run --release --example region [SIZE_MIB]`
//!
//! The numbers are a slice over a [`Region`](uzram_pager::Region), sorted in place. The pager's limit is a
//! quarter of their size: what was not used for long is compressed, and what does not fit compressed goes to
//! a file in the folder for temporary files. Prints the time, and the pager's statistics.

use std::time::Instant;

use uzram::random::Random;
use uzram::{Error, Result};
use uzram_pager::{Pager, PagerStats};

/// Sorts numbers of `size_bytes` bytes.
///
/// # Errors
/// Those of the pager.
///
/// # Panics
/// If the result is not what was to be sorted, in order.
fn sort(size_bytes: usize) -> Result<PagerStats> {
    let spill =
        tempfile::tempdir().map_err(|error| Error::invalid(format!("no folder to spill to: {error}")))?;
    let builder = Pager::builder().limit(size_bytes as u64 / 4).capacity(2 * size_bytes as u64);
    let pager = builder.spill(spill.path(), 2 * size_bytes as u64).build()?;
    let region = pager.map(size_bytes)?;
    // SAFETY: the region has these bytes, starts at a page, lives longer than the slice, and is not used
    // otherwise meanwhile. Any bytes are numbers.
    let numbers: &mut [u64] =
        unsafe { std::slice::from_raw_parts_mut(region.as_mut_ptr().cast(), size_bytes / size_of::<u64>()) };
    // Random numbers below 2^40 hardly compress, sorted ones do.
    let (mut random, mut wanted) = (Random::new(1), 0u64);
    numbers.fill_with(|| {
        let number = random.below_u64(1 << 40);
        wanted = wanted.wrapping_add(number);
        number
    });
    numbers.sort_unstable();
    let sum = numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number));
    assert!(numbers.is_sorted() && sum == wanted, "not what was to be sorted, in order");
    Ok(pager.stats())
}

fn main() -> Result<()> {
    let size_mib: usize = std::env::args()
        .nth(1)
        .map_or(Ok(1024), |text| text.parse())
        .map_err(|_| Error::invalid("the size is a number of MiB"))?;
    let start = Instant::now();
    let stats = sort(size_mib << 20)?;
    println!("{size_mib} MiB in {:.1} s: {stats:?}", start.elapsed().as_secs_f64());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sorted_in_a_quarter_of_their_memory() {
        match sort(64 << 20) {
            Err(error) if error.setting() == Some("trap") => println!("skipped: {error}"),
            sorted => assert!(sorted.unwrap().pages_out > 12 << 8),
        }
    }
}
