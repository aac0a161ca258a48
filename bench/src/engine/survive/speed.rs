//! Random reads and writes of a store in memory that outlives the process, beside the same store in private memory.
//!
//! All pages of both are written before anything counts, so that their memory is there: having the system give it is
//! no part of this. The rounds are slices, as the difference is a few percent ([`Common::in_slices`]).

use uzram::Result;

use super::super::report::Row;
use super::super::{BenchOptions, Common, Pattern, Target, measure_all, verify};
use super::stores::MeasuredStore;
use crate::harness::corpus::Corpus;
use crate::harness::go_on;

/// Numbers of threads.
const JOBS: [usize; 2] = [1, 2];

/// Measures rows for both stores, the one in private memory with the ratio.
pub(super) fn measure(common: &Common, corpus: &Corpus, notes: &mut Vec<String>) -> Result<Vec<Row>> {
    let page_count = corpus.page_count();
    let surviving = MeasuredStore::surviving(&common.algorithm, page_count)?;
    let private = MeasuredStore::private(&common.algorithm, page_count)?;
    let stores: [&dyn Target; 2] = [&surviving, &private];
    for store in stores {
        store.fill(corpus)?;
        verify(store, corpus, page_count)?;
        go_on(&common.stop)?;
    }
    let options = BenchOptions {
        common: common.clone().in_slices(),
        patterns: vec![Pattern::RandRead, Pattern::RandWrite],
        jobs: JOBS.to_vec(),
        ..BenchOptions::default()
    };
    notes.push(format!(
        "reads and writes: {} interleaved rounds of {:.3} s, medians; ratio = memfd / private, median of the rounds' ratios",
        options.common.repeat,
        options.common.duration.as_secs_f64()
    ));
    measure_all(&options, &stores, corpus, page_count)
}
