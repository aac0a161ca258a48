//! The wanted figures of the pager.

use super::Target;
use crate::pager::unmap::Phase;
use crate::pager::{Amounts, FaultRow, PagerReport, TRAPS};

/// The wanted time of a fault beyond that of decoding a page: its median, and its 99th percentile, in µs.
const fn wanted_us(trap: &str) -> (f64, Option<f64>) {
    match trap.as_bytes() {
        b"uffd" => (5.0, Some(20.0)),
        _ => (8.0, None),
    }
}

/// Returns the targets of a pager, with each way to trap touches.
pub(super) fn pager_targets(amounts: &Amounts, report: Option<&PagerReport>) -> Vec<Target> {
    TRAPS.iter().flat_map(|trap| of_trap(trap.name(), amounts, report)).collect()
}

fn of_trap(trap: &str, amounts: &Amounts, report: Option<&PagerReport>) -> Vec<Target> {
    let phase = |what: &str, wanted, phase| {
        let ratio = report.and_then(|report| report.unmap_ratio(trap, phase));
        Target::at_most(format!("pager, {trap}, {what}: time / kernel zram"), wanted, ratio)
    };
    let mut targets = vec![
        phase("page-out", 0.85, Phase::PageOut),
        phase("unmap", 0.4, Phase::Unmap),
        phase("sequential fault-in", 0.6, Phase::Sequential),
        phase("random fault-in", 1.2, Phase::Random),
    ];
    let (wanted_p50_us, wanted_p99_us) = wanted_us(trap);
    for threads in &amounts.fault_threads {
        let row = report.and_then(|report| report.fault(trap, *threads));
        let mut target = |what, wanted, figure: fn(&FaultRow) -> f64| {
            let name = format!("pager, {trap}, one fault, {threads} threads, beyond decoding: {what} µs");
            targets.push(Target::at_most(name, wanted, row.map(figure)));
        };
        target("p50", wanted_p50_us, |row| row.p50_beyond_us);
        if let Some(wanted) = wanted_p99_us {
            target("p99", wanted, |row| row.p99_beyond_us);
        }
    }
    targets.push(Target::at_most(
        format!("pager, {trap}, memory that fits: time / plain memory"),
        1.01,
        report.and_then(|report| report.fitting_ratio(trap)),
    ));
    for (what, spills) in [("the same limit and a spill file", true), ("as much memory", false)] {
        let row = report.and_then(|report| report.access(trap, spills));
        targets.push(Target::at_least(
            format!("pager, {trap}, Zipf access, {what}: speed / a cgroup on kernel zram"),
            1.0,
            row.and_then(|row| row.speed_ratio),
        ));
    }
    let beyond = report.and_then(|report| report.beyond_limit_bytes(trap));
    targets.push(Target::at_most(
        format!("the same, {trap}: most memory beyond the limit, MiB"),
        16.0,
        beyond.map(|bytes| bytes / f64::from(1 << 20)),
    ));
    targets
}
