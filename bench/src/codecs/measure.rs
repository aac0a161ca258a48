//! What a codec makes of pages, and how long it takes.
//!
//! In a round, all codecs, at all sizes of pages, code the same pages, slice by slice. A slice is long enough that a codec
//! meets it as new: where a second codec codes a page right after the first, the processor predicts the branches that the
//! page makes it take, and it runs up to 1.2 times as fast. The order of codecs changes with each slice and from round to
//! round. Pages and compressed bytes are in the CPU's caches.
//!
//! A codec's time is the sum over the slices of the median over the rounds. It is the thread's CPU time: a slice takes the
//! slowest codecs longer than a busy machine leaves a thread alone, and the fastest ones not.

use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use uzram::codec::{Algorithm, ROOM_BYTES};
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::{SizeClass, huge_threshold};
use uzram::{Pool, Result};
use uzram_cli::process_pages::spread;

use super::coder::Coder;
use super::pages::Pages;
use crate::harness::rounds::order;
use crate::harness::stats::median;
use crate::harness::{go_on, read_back};

/// The bytes of a slice: 64 pages of 4 KiB.
const SLICE_BYTES: usize = 64 * PAGE_SIZE;
/// Room that a page of so many bytes may take compressed, as a share of it: the engine's for its own.
const ROOM_SHARE: usize = PAGE_SIZE / (ROOM_BYTES - PAGE_SIZE);

/// The sizes that objects of the default pool take.
pub(super) struct Classes(Vec<SizeClass>);

impl Classes {
    /// Reads them from a pool.
    ///
    /// # Errors
    /// `NoMemory`.
    pub(super) fn new() -> Result<Classes> {
        let pool = Pool::builder("classes").chain_size(uzram::device::DEFAULT_CHAIN_SIZE).build()?;
        let mut classes: Vec<SizeClass> = pool.class_stats().into_iter().map(|stat| stat.class).collect();
        classes.sort_by_key(|class| class.size_bytes);
        Ok(Classes(classes))
    }

    /// Returns the bytes that an object takes; a page from the huge threshold on.
    fn bytes(&self, len: usize) -> usize {
        // What an object's header takes: the longest object that is not huge fills the largest class with one.
        let threshold = huge_threshold(uzram::device::DEFAULT_CHAIN_SIZE);
        if len >= threshold {
            return PAGE_SIZE;
        }
        let largest =
            self.0.iter().rfind(|class| !class.is_huge()).map_or(PAGE_SIZE, |class| class.size_bytes.into());
        let object_bytes = len + (largest + 1).saturating_sub(threshold);
        let class = self.0.iter().find(|class| usize::from(class.size_bytes) >= object_bytes);
        class.map_or(PAGE_SIZE, |class| class.size_bytes.into())
    }
}

/// A codec at one size of pages, and what it did so far.
pub(super) struct Variant {
    pub(super) algorithm: Algorithm,
    pub(super) page_bytes: usize,
    pub(super) coder: Coder,
    /// The compressed pages of a slice, one after another, and the length of each; `None` if it is left as it is.
    encoded: Vec<u8>,
    lens: Vec<Option<usize>>,
    page: Vec<u8>,
    /// Of each slice.
    slices: Vec<Spent>,
}

/// The work on a slice, and its times in seconds, each with an entry a round.
#[derive(Default)]
struct Spent {
    encoded_bytes: usize,
    encoding: Vec<f64>,
    decoded_bytes: usize,
    decoding: Vec<f64>,
}

/// Speeds in 10^6 bytes of pages a second.
pub(super) struct Speeds {
    pub(super) encoding: f64,
    /// `None` if nothing was compressed.
    pub(super) decoding: Option<f64>,
}

/// What pages take when they are compressed.
pub(super) struct Stored {
    /// Compressed, or as they are if that is not smaller.
    pub(super) bytes: usize,
    /// Each rounded up to its size class; `None` for pages that the pool does not store.
    pub(super) class_bytes: Option<usize>,
}

impl Variant {
    /// Returns a codec; `None` if it does not code pages of this size.
    ///
    /// # Errors
    /// `NoMemory`.
    pub(super) fn new(algorithm: &Algorithm, page_bytes: usize) -> Result<Option<Variant>> {
        Ok(Coder::new(algorithm, page_bytes)?.map(|coder| Variant {
            algorithm: algorithm.clone(),
            page_bytes,
            coder,
            encoded: vec![0; SLICE_BYTES + SLICE_BYTES / ROOM_SHARE],
            lens: Vec::new(),
            page: vec![0; page_bytes],
            slices: Vec::new(),
        }))
    }

    /// Compresses all pages, and checks that they decompress to what they were.
    ///
    /// # Errors
    /// `Corrupt`: they do not. `Busy`: interrupted.
    pub(super) fn store(&mut self, pages: &Pages, classes: &Classes, stop: &AtomicBool) -> Result<Stored> {
        let is_stored = self.page_bytes == PAGE_SIZE;
        let mut stored = Stored { bytes: 0, class_bytes: is_stored.then_some(0) };
        for page in pages.bytes().chunks_exact(self.page_bytes) {
            go_on(stop)?;
            let len = self.coder.encode(page, &mut self.encoded);
            if let Some(len) = len {
                self.coder.decode(&self.encoded[..len], &mut self.page)?;
                read_back(&self.page, page, || format!("{}: a page", self.algorithm))?;
            }
            stored.bytes += len.unwrap_or(self.page_bytes);
            if let Some(bytes) = &mut stored.class_bytes {
                *bytes += classes.bytes(len.unwrap_or(self.page_bytes));
            }
        }
        Ok(stored)
    }

    /// Compresses a slice and decompresses it.
    fn code(&mut self, which: usize, slice: &[u8]) -> Result<()> {
        self.lens.clear();
        let (mut at, start) = (0, cpu_seconds());
        for page in slice.chunks_exact(self.page_bytes) {
            let len = self.coder.encode(page, &mut self.encoded[at..]);
            at += len.unwrap_or(0);
            self.lens.push(len);
        }
        let encoding = cpu_seconds() - start;

        let (mut at, start) = (0, cpu_seconds());
        for len in self.lens.iter().flatten() {
            self.coder.decode(&self.encoded[at..at + len], &mut self.page)?;
            black_box(&self.page);
            at += len;
        }
        let decoding = cpu_seconds() - start;

        if self.slices.len() <= which {
            self.slices.resize_with(which + 1, Spent::default);
        }
        let spent = &mut self.slices[which];
        // The same in each round.
        spent.encoded_bytes = slice.len();
        spent.decoded_bytes = self.lens.iter().flatten().count() * self.page_bytes;
        spent.encoding.push(encoding);
        spent.decoding.push(decoding);
        Ok(())
    }

    /// Returns how fast it was.
    pub(super) fn speeds(&self) -> Speeds {
        let speed = |bytes: fn(&Spent) -> usize, times: fn(&Spent) -> &[f64]| {
            // Where nothing was done, the time is that of reading the clock.
            let worked = || self.slices.iter().filter(|spent| bytes(spent) > 0);
            let seconds: f64 = worked().map(|spent| median(times(spent))).sum();
            worked().map(bytes).sum::<usize>() as f64 / 1e6 / seconds
        };
        let is_decoded = self.slices.iter().any(|spent| spent.decoded_bytes > 0);
        Speeds {
            encoding: speed(|spent| spent.encoded_bytes, |spent| &spent.encoding),
            decoding: is_decoded.then(|| speed(|spent| spent.decoded_bytes, |spent| &spent.decoding)),
        }
    }
}

/// Returns the CPU time of this thread so far.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Measures rounds over slices that are evenly spread over the pages: as many as a round of about `duration` has time for,
/// at least one.
///
/// # Errors
/// `Corrupt`: a codec does not decode. `Busy`: interrupted.
pub(super) fn measure(
    variants: &mut [Variant],
    pages: &Pages,
    rounds: usize,
    duration: Duration,
    stop: &AtomicBool,
) -> Result<()> {
    let slices: Vec<&[u8]> = pages.bytes().chunks(SLICE_BYTES).collect();
    let mut chosen: Vec<&[u8]> = spread(slices.len()).map(|at| slices[at]).collect();
    for round in 0..rounds {
        let start = Instant::now();
        for (which, slice) in chosen.iter().enumerate() {
            if round == 0 && which > 0 && start.elapsed() >= duration {
                chosen.truncate(which);
                break;
            }
            // Into the caches for all, not by the first codec alone.
            black_box(slice.iter().step_by(64).fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
            for variant in order(round + which, variants.len()) {
                go_on(stop)?;
                variants[variant].code(which, slice)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The pool's own arithmetic, told by what it stores.
    #[test]
    fn objects_take_their_classes() {
        let classes = Classes::new().unwrap();
        let pool = Pool::builder("objects").chain_size(uzram::device::DEFAULT_CHAIN_SIZE).build().unwrap();
        for len in (1..=PAGE_SIZE).step_by(7).chain([3624, 3625, 4095, PAGE_SIZE]) {
            let object = pool.store(&vec![1; len]).unwrap();
            let used = pool.class_stats().into_iter().find(|stat| stat.obj_used > 0).unwrap();
            assert_eq!(classes.bytes(len), usize::from(used.class.size_bytes), "{len}");
            drop(object);
        }
    }
}
