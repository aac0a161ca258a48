//! A pager whose spill file is full.

#![allow(clippy::unwrap_used)]

use uzram::random::Random;
use uzram_pager::{Pager, TrapKind};

const PAGE: usize = 4096;
const PAGES: usize = 5120;

/// Returns the contents of a page, of which half compress.
fn contents(number: usize) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    Random::new(number as u64).fill(&mut page[..PAGE / 2]);
    page
}

/// Memory that is kept below the limit without a spill file is kept below it with one that is full, and what is written to that
/// is bounded.
#[test]
fn a_full_spill_file_is_no_worse_than_none() {
    let dir = tempfile::tempdir().unwrap();
    for trap in TrapKind::ALL.into_iter().filter(|trap| trap.check().is_ok()) {
        // 20 MiB are some 11 MiB compressed.
        let builder = || Pager::builder().limit(16 << 20).capacity(1 << 30).trap(trap);
        for (spills, builder) in [(false, builder()), (true, builder().spill(dir.path(), 2 << 20))] {
            let pager = builder.build().unwrap();
            let mut region = pager.map(PAGES * PAGE).unwrap();
            for round in 0..3 {
                for (number, page) in region.chunks_mut(PAGE).enumerate() {
                    page.copy_from_slice(&contents(number + round));
                }
            }
            let stats = pager.stats();
            println!("{trap:?}, spills: {spills}: {stats:?}");
            assert!(stats.used_pages_max <= stats.limit_pages, "{trap:?}, spills: {spills}: {stats:?}");
            for (number, page) in region.chunks(PAGE).enumerate() {
                assert!(page == contents(number + 2), "{trap:?}, page {number}");
            }
        }
    }
}
