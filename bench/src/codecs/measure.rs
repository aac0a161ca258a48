//! What a codec makes of pages, and how long it takes.
//!
//! In a round, all codecs code the same pages, slice by slice. A slice is long enough that a codec meets it
//! as new: where a second codec codes a page right after the first, the processor predicts the branches that
//! the page makes it take, and it runs up to 1.2 times as fast. The order of codecs changes with each slice
//! and from round to round. Pages and compressed bytes are in the CPU's caches.
//!
//! A codec's time is the sum over the slices of the median over the rounds. It is the thread's CPU time: a
//! slice takes the slowest codecs longer than a busy machine leaves a thread alone, and the fastest ones not.

use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use uzram::Result;
use uzram::codec::{Algorithm, Decoder, Encoder, ROOM_BYTES};
use uzram::units::{PAGE_SIZE, Page};
use uzram_cli::process_pages::spread;

use crate::harness::corpus::Corpus;
use crate::harness::rounds::order;
use crate::harness::stats::median;
use crate::harness::usage::thread_time;
use crate::harness::{go_on, read_back};

const SLICE_PAGES: usize = 64;

/// A codec, and what it did so far.
pub(super) struct Variant {
    pub(super) algorithm: Algorithm,
    encoder: Encoder,
    decoder: Decoder,
    /// The compressed pages of a slice, one after another, and the length of each; `None` if it is left as it
    /// is.
    encoded: Vec<u8>,
    lens: Vec<Option<usize>>,
    page: Page,
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

impl Variant {
    pub(super) fn new(algorithm: &Algorithm) -> Result<Variant> {
        Ok(Variant {
            algorithm: algorithm.clone(),
            encoder: Encoder::new(algorithm)?,
            decoder: Decoder::new(algorithm)?,
            encoded: vec![0; SLICE_PAGES * ROOM_BYTES],
            lens: Vec::new(),
            page: [0; PAGE_SIZE],
            slices: Vec::new(),
        })
    }

    /// Returns the memory that the encoder and the decoder take on each CPU.
    pub(super) fn state_bytes(&self) -> usize {
        self.encoder.state_bytes() + self.decoder.state_bytes()
    }

    /// Compresses all pages, and checks that they decompress to what they were; returns the bytes that they
    /// take compressed, or as they are where that is not smaller.
    pub(super) fn store(&mut self, pages: &Corpus, stop: &AtomicBool) -> Result<usize> {
        let mut stored_bytes = 0;
        for page in pages.pages() {
            go_on(stop)?;
            let len = self.encoder.encode(page, &mut self.encoded).filter(|len| *len < PAGE_SIZE);
            if let Some(len) = len {
                self.decoder.decode(&self.encoded[..len], &mut self.page)?;
                read_back(&self.page, page, || format!("{}: a page", self.algorithm))?;
            }
            stored_bytes += len.unwrap_or(PAGE_SIZE);
        }
        Ok(stored_bytes)
    }

    fn code(&mut self, which: usize, slice: &[&Page]) -> Result<()> {
        self.lens.clear();
        let (mut at, start) = (0, thread_time());
        for page in slice {
            let len = self.encoder.encode(page, &mut self.encoded[at..]).filter(|len| *len < PAGE_SIZE);
            at += len.unwrap_or(0);
            self.lens.push(len);
        }
        let encoding = thread_time() - start;

        let (mut at, start) = (0, thread_time());
        for len in self.lens.iter().flatten() {
            self.decoder.decode(&self.encoded[at..at + len], &mut self.page)?;
            black_box(&self.page);
            at += len;
        }
        let decoding = thread_time() - start;

        if self.slices.len() <= which {
            self.slices.resize_with(which + 1, Spent::default);
        }
        let spent = &mut self.slices[which];
        // The same in each round.
        spent.encoded_bytes = slice.len() * PAGE_SIZE;
        spent.decoded_bytes = self.lens.iter().flatten().count() * PAGE_SIZE;
        spent.encoding.push(encoding.as_secs_f64());
        spent.decoding.push(decoding.as_secs_f64());
        Ok(())
    }

    /// Returns how fast it compressed and decompressed, in 10^6 bytes of pages a second; not a number where
    /// nothing was compressed.
    pub(super) fn speeds(&self) -> [f64; 2] {
        let speed = |bytes: fn(&Spent) -> usize, times: fn(&Spent) -> &[f64]| {
            // Where nothing was done, the time is that of reading the clock.
            let worked = || self.slices.iter().filter(|spent| bytes(spent) > 0);
            let seconds: f64 = worked().map(|spent| median(times(spent))).sum();
            worked().map(bytes).sum::<usize>() as f64 / 1e6 / seconds
        };
        [
            speed(|spent| spent.encoded_bytes, |spent| &spent.encoding),
            speed(|spent| spent.decoded_bytes, |spent| &spent.decoding),
        ]
    }
}

/// Measures rounds over slices that are evenly spread over the pages: as many as a round of about `duration`
/// has time for, at least one.
pub(super) fn measure(
    variants: &mut [Variant],
    pages: &Corpus,
    rounds: usize,
    duration: Duration,
    stop: &AtomicBool,
) -> Result<()> {
    let all: Vec<&Page> = pages.pages().collect();
    let slices: Vec<&[&Page]> = all.chunks(SLICE_PAGES).collect();
    let mut chosen: Vec<&[&Page]> = spread(slices.len()).map(|at| slices[at]).collect();
    for round in 0..rounds {
        let start = Instant::now();
        for (which, slice) in chosen.iter().enumerate() {
            if round == 0 && which > 0 && start.elapsed() >= duration {
                chosen.truncate(which);
                break;
            }
            // Into the caches for all, not by the first codec alone.
            let bytes = slice.iter().flat_map(|page| page.iter().step_by(64));
            black_box(bytes.fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
            for variant in order(round + which, variants.len()) {
                go_on(stop)?;
                variants[variant].code(which, slice)?;
            }
        }
    }
    Ok(())
}
