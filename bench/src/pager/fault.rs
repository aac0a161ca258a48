//! One fault: how long a thread waits that touches a page which was paged out, of random ones, beyond the
//! time that decoding such a page takes.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use uzram::Result;
use uzram::codec::{Algorithm, Decoder, Encoder, Kind, ROOM_BYTES};
use uzram::units::{PAGE_SIZE, Page, pages_to_bytes};

use super::memory::{Mapping, Memory, changed, corpus_page, touch};
use super::settings::{PagerSettings, Touched};
use crate::harness::run_together;
use crate::harness::stats::{median, quantile};
use crate::harness::steps::Steps;

/// What faults of so many threads took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Faults {
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// The median time to decode one of the pages.
    pub(super) decode_us: f64,
}

/// Is the process: a step is a number of threads.
pub(crate) fn run(job: &Touched, steps: &mut Steps) -> Result<()> {
    let corpus = Mapping::file(&job.corpus)?;
    let corpus = corpus.pages();
    let limit_bytes = 2 * pages_to_bytes(job.pages as u64) + (64 << 20);
    let pager = PagerSettings::new(job.trap()?, limit_bytes).build()?;
    let mut memory = Memory::map(Some(&pager), job.pages)?;
    memory.fill(corpus, 0);
    let mut order: Vec<u32> = (0..job.pages as u32).collect();
    let mut random = fastrand::Rng::with_seed(2);
    while let Some(step) = steps.next() {
        let threads: usize = step.parse().map_err(|_| uzram::Error::invalid(step))?;
        memory.page_out()?;
        random.shuffle(&mut order);
        let each = job.pages.div_ceil(threads);
        let jobs = order.chunks(each).map(|order| {
            let memory = &memory;
            move |gate: &crate::harness::Gate| {
                gate.pass();
                touched_us(memory.pages(), order, corpus)
            }
        });
        let times = run_together(jobs)?.concat();
        let decode_us = decode_us(corpus, &order)?;
        steps.answer(&Faults { p50_us: median(&times), p99_us: quantile(&times, 0.99), decode_us })?;
    }
    Ok(())
}

/// Touches pages; returns how long each touch took.
fn touched_us(pages: &[Page], order: &[u32], corpus: &[Page]) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(order.len());
    for number in order.iter().map(|number| *number as usize) {
        let start = Instant::now();
        touch(&pages[number]);
        times.push(start.elapsed().as_secs_f64() * 1e6);
        if pages[number] != *corpus_page(corpus, number) {
            return Err(changed(number));
        }
    }
    Ok(times)
}

/// Pages that are decoded.
const DECODED: usize = 4096;

/// Returns the median time to decode a page, of some of the corpus in random order.
fn decode_us(corpus: &[Page], order: &[u32]) -> Result<f64> {
    let algorithm = Algorithm::from(Kind::for_memory());
    let (mut encoder, mut decoder) = (Encoder::new(&algorithm)?, Decoder::new(&algorithm)?);
    let mut room = [0; ROOM_BYTES];
    let mut page = [0; PAGE_SIZE];
    let mut encoded = Vec::new();
    for number in order.iter().take(DECODED) {
        let contents = corpus_page(corpus, *number as usize);
        // Pages that do not get smaller are copied.
        if let Some(len) = encoder.encode(contents, &mut room) {
            encoded.push(room[..len].to_vec());
        }
    }
    let mut times = Vec::with_capacity(encoded.len());
    for bytes in &encoded {
        let start = Instant::now();
        decoder.decode(bytes, &mut page)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&times))
}
