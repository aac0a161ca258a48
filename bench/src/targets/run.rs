//! The wanted figures of `uzram run`.

use super::Target;
use crate::run::{ProgramRow, RunReport, program_names};

/// Returns its targets.
pub(super) fn run_targets(report: Option<&RunReport>) -> Vec<Target> {
    let mut targets = vec![
        Target::at_most(
            "run, memory that fits: time / plain mimalloc",
            1.03,
            report.and_then(|report| report.fitting_ratio),
        ),
        Target::at_most("run, starting: ms more", 20.0, report.and_then(|report| report.start_ms)),
        Target::at_least(
            "run, programs in half of their memory, of six: not slower than on kernel zram",
            3.0,
            report.and_then(RunReport::as_fast).map(|count| count as f64),
        ),
    ];
    for name in program_names() {
        let ratio = report.and_then(|report| report.program(name)).and_then(|row: &ProgramRow| row.ratio);
        targets.push(Target::at_most(format!("the same, {name}: time / kernel zram"), 2.0, ratio));
    }
    let beyond = report.and_then(RunReport::beyond_limit_bytes);
    targets.push(Target::at_most(
        "the same: most anonymous memory beyond the limit, MiB",
        16.0,
        beyond.map(|bytes| bytes / f64::from(1 << 20)),
    ));
    targets
}
