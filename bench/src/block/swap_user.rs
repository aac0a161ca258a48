//! A program whose memory is swapped out: a separate process that the benchmark starts.
//!
//! It enters its cgroup, fills its memory with the corpus's pages, has the kernel swap them out by lowering
//! the cgroup's limit, raises the limit again, and touches one page after the other; then it does so again,
//! and touches them in no order.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use uzram::units::bytes_to_pages;
use uzram::{Error, ErrorKind, Result};

use super::cgroup::read_stat;
use crate::harness::corpus::{self, AlignedPage};
use crate::harness::io_error;

/// The memory limit while it is swapped out.
const LIMIT_BYTES: u64 = 4 << 20;
/// How often setting a limit is retried that the kernel could not reach.
const TRIES: usize = 50;
/// The limit of a cgroup without one.
const NO_LIMIT: &str = "-1";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SwapUser {
    /// The folder of a cgroup of the memory controller, version 1, without a limit.
    pub(crate) cgroup: PathBuf,
    pub(crate) pages: PathBuf,
    /// The size of its memory, which these pages fill repeatedly.
    pub(crate) size_bytes: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SwapTimes {
    /// The time until the limit was reached.
    pub(crate) swap_out_ms: f64,
    /// The time until every page was in memory again.
    pub(crate) fault_in_ms: f64,
    /// The time until every page was in memory again that had been swapped out a second time, touched in no
    /// order.
    pub(crate) random_in_ms: f64,
    /// Bytes on the swap area only when the limit was reached, `swap` of the cgroup's `memory.stat`.
    pub(crate) swapped_bytes: u64,
}

impl SwapUser {
    pub(crate) fn run(&self) -> Result<SwapTimes> {
        self.set("cgroup.procs", &std::process::id().to_string())?;
        let memory = self.fill()?;
        let sum = checksum(&memory);

        let start = Instant::now();
        self.shrink()?;
        let swap_out = start.elapsed();
        let swapped_bytes = read_stat(&self.cgroup, "swap")?.unwrap_or_default();
        self.set("memory.limit_in_bytes", NO_LIMIT)?;

        let in_order: Vec<usize> = (0..memory.len()).collect();
        let fault_in = touch(&memory, &in_order);
        let check = || match checksum(&memory) == sum {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Corrupt, "a page changed while it was swapped out")),
        };
        check()?;
        self.shrink()?;
        self.set("memory.limit_in_bytes", NO_LIMIT)?;
        // Always the same.
        let mut in_no_order = in_order;
        fastrand::Rng::with_seed(1).shuffle(&mut in_no_order);
        let random_in = touch(&memory, &in_no_order);
        check()?;
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        Ok(SwapTimes {
            swap_out_ms: ms(swap_out),
            fault_in_ms: ms(fault_in),
            random_in_ms: ms(random_in),
            swapped_bytes,
        })
    }

    fn fill(&self) -> Result<Vec<AlignedPage>> {
        let (corpus, count) = (corpus::load(&self.pages)?, bytes_to_pages(self.size_bytes) as usize);
        Ok((0..count).map(|page| AlignedPage(*corpus.page(page))).collect())
    }

    /// Lowers the limit, which returns when the kernel has reached it.
    fn shrink(&self) -> Result<()> {
        let mut outcome = Ok(());
        for _ in 0..TRIES {
            outcome = self.try_set("memory.limit_in_bytes", &LIMIT_BYTES.to_string());
            match &outcome {
                // The kernel gives up after it found nothing to reclaim a few times.
                Err(error) if Errno::from_io_error(error) == Some(Errno::BUSY) => {}
                _ => break,
            }
        }
        outcome.map_err(|error| io_error(&self.cgroup, error))
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        self.try_set(name, value).map_err(|error| io_error(&self.cgroup.join(name), error))
    }

    fn try_set(&self, name: &str, value: &str) -> std::io::Result<()> {
        fs::write(Path::join(&self.cgroup, name), value)
    }
}

/// Touches pages in this order; returns how long that took.
fn touch(memory: &[AlignedPage], order: &[usize]) -> Duration {
    let start = Instant::now();
    for at in order {
        black_box(memory[*at].0[0]);
    }
    start.elapsed()
}

fn checksum(memory: &[AlignedPage]) -> u64 {
    let words = memory.iter().flat_map(|page| page.0.as_chunks::<8>().0);
    words
        .zip(1u64..)
        .fold(0, |sum, (word, place)| sum.wrapping_add(u64::from_ne_bytes(*word).wrapping_mul(place)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzram::units::PAGE_SIZE;

    #[test]
    fn memory_holds_the_pages_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let bytes: Vec<u8> = (0..3 * PAGE_SIZE).map(|at| (at / 100) as u8).collect();
        fs::write(&pages, &bytes).unwrap();
        let user = SwapUser { cgroup: dir.path().to_owned(), pages: pages.clone(), size_bytes: 5 << 12 };
        let mut memory = user.fill().unwrap();
        assert_eq!(memory.len(), 5);
        assert!(memory[4].0[..] == bytes[PAGE_SIZE..2 * PAGE_SIZE]);
        let sum = checksum(&memory);
        memory.swap(0, 1);
        assert_ne!(checksum(&memory), sum);
        fs::write(&pages, b"less than a page").unwrap();
        assert!(user.fill().is_err());
    }

    #[test]
    fn what_a_cgroup_is_told_goes_there() {
        let dir = tempfile::tempdir().unwrap();
        let user = SwapUser { cgroup: dir.path().to_owned(), pages: "/dev/null".into(), size_bytes: 1 << 12 };
        user.shrink().unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("memory.limit_in_bytes")).unwrap(), "4194304");
        let gone = SwapUser { cgroup: dir.path().join("gone"), ..user };
        assert!(gone.run().unwrap_err().to_string().contains("gone/cgroup.procs"));
    }
}
