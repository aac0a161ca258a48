#![allow(clippy::unwrap_used)]

use super::*;
use crate::experiment::testing::{row, side, verdict_text};
use crate::experiment::{Row, Side};

fn measured(design: &str, unmap_s: f64, page_out_s: f64) -> Side {
    side(design, &[("elapsed_s", unmap_s), ("unmap_s", unmap_s), ("page_out_s", page_out_s)])
}

/// Returns rows of a machine that has both traps, whatever this one has.
fn rows(jobs: usize) -> Vec<Row> {
    let after = || measured("uffd-class-indexed", 0.010, 0.5);
    let row = |before, after| row(&SERIES, CASE, jobs, before, after);
    vec![
        row(measured(KERNEL_LZ4, 0.030, 1.0), after()),
        row(measured(KERNEL_LZO, 0.020, 2.0), after()),
        row(after(), measured("uffd", 0.009, 0.5)),
        row(after(), measured("guard", 0.012, 0.7)),
    ]
}

#[test]
fn each_phase_is_compared_with_the_kernels() {
    let verdict = verdict_text(&SERIES, &[rows(1), rows(2)].concat());
    for said in [
        "Speed: uffd-class-indexed should be at least 2.50 times as fast as kernel-lz4 with 1 job",
        "uffd / kernel-lz4, 1 job, time: page out 0.50 [0.50, 0.50], unmap 0.30 [0.30, 0.30].",
        "guard / kernel-lzo-rle, 2 jobs, time: page out 0.35 [0.35, 0.35], unmap 0.60 [0.60, 0.60].",
    ] {
        let said = said.replace("uffd-class-indexed", &pool(PoolDesign::ClassIndexed));
        assert!(verdict.contains(&said), "{said}: {verdict}");
    }
}

#[test]
fn every_side_has_an_owner() {
    let designs = designs();
    for name in designs.all() {
        let (owner, phases) = owner(&name).unwrap();
        assert_eq!(phases.last(), Some(&Phase::Unmap), "{name}: {owner:?}");
    }
    assert!(owner("nobody").is_err());
    assert_eq!(owner(KERNEL_LZO).unwrap().0, Owner::Kernel("lzo-rle"));
    // The author's figures are those of the series.
    let at = designs.before.iter().position(|name| *name == pool(PoolDesign::Split)).unwrap();
    assert_eq!((SERIES.published)(CASE, 4, at).unwrap().after.figure, "45.3 ms");
    assert!((SERIES.published)(CASE, 3, at).is_none());
}
