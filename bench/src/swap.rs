//! Programs that swap: in a cgroup of half of the memory that they take, with a swap daemon that survives,
//! with one that does not, and with kernel zram of the same size.
//!
//! What they print must be the same everywhere, and no write may fail. Each turn has a new swap area.

use std::fs;
use std::path::Path;
use std::time::Duration;

use uzram::Result;

use crate::block::swap_area::{Side, SwapArea};
use crate::block::{check_disk, check_kernel};
use crate::harness::memory::named_count;
use crate::harness::report::{each, mib};
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, io_error, unsupported};
use crate::workload::{SWAPPED, Trial, Workload};

const PATIENCE: Duration = Duration::from_secs(600);
const LEAST_LIMIT_BYTES: u64 = 16 << 20;
/// How much larger the swap area is than the limit.
const AREA_LIMITS: u64 = 4;
const ROUNDS: usize = 3;
/// What is compared. A swap daemon has its own default algorithm.
const SIDES: [(&str, Side<'_>); 3] = [
    ("uzram", Side::Uzram(&[])),
    ("uzram --no-survive", Side::Uzram(&["--no-survive"])),
    ("kernel zram", Side::Kernel("lz4")),
];
const TABLE: &str = "program in swap";
const RATIO: &str = "/ kernel zram";
const FAILED_WRITES: &str = "failed writes";

/// Runs all programs that are installed, of those that are wanted.
pub fn run(options: &Options) -> Result<Report> {
    let names: Vec<&str> = SWAPPED.iter().map(|workload| workload.name).collect();
    options.check(&names)?;
    check_disk(options.uzram()?)?;
    crate::block::swap::check()?;
    check_kernel()?;
    let mut report = Report::default();
    for workload in SWAPPED.into_iter().filter(|workload| options.has(workload.name)) {
        report.part(workload.name, measure(options, workload))?;
    }
    if report.figures.is_empty() {
        return Ok(report);
    }
    for (name, _) in &SIDES[..2] {
        let of_side = |row: &str| row.ends_with(&format!(", {name}"));
        let ratios = report.figures.iter().filter(|figure| figure.column == RATIO && of_side(&figure.row));
        let ratios: Vec<f64> = ratios.map(|figure| figure.value).collect();
        report.mean_and_slowest("all programs in swap", name, &ratios);
    }
    let failed_writes = report.column(TABLE, FAILED_WRITES).sum();
    report.row("all programs in swap", "uzram", &[(FAILED_WRITES, failed_writes)]);
    Ok(report)
}

fn measure(options: &Options, workload: &'static Workload) -> Result<Report> {
    workload.check()?;
    let mut report = Report::default();
    let amount = options.amount(workload.amounts[1], workload.amounts[2]);
    let trial = Trial::new(workload, amount, &options.dir, PATIENCE, &options.stop)?;
    let limit_bytes = trial.half_bytes(LEAST_LIMIT_BYTES);
    let turns: [Vec<[f64; 4]>; 3] = in_turn(options.rounds(ROUNDS), &options.stop, |_, side| {
        let area = SwapArea::on(options.uzram()?, SIDES[side].1, AREA_LIMITS * limit_bytes)?;
        let before = swapped_pages()?;
        let seconds = trial.run_in_cgroup(limit_bytes)?.seconds;
        let after = swapped_pages()?;
        let failed_writes = area.off()? as f64;
        let page = rustix::param::page_size() as u64;
        let [mib_in, mib_out] = [0, 1].map(|at| mib((after[at] - before[at]) * page));
        Ok([seconds, mib_in, mib_out, failed_writes])
    })?;
    let figures = |side: usize, at: usize| each(&turns[side], |turn| turn[at]);
    let kernel_s = figures(2, 0);
    for (side, (name, _)) in SIDES.into_iter().enumerate() {
        let row = format!("{}, {name}", workload.name);
        trial.describe(TABLE, &row, limit_bytes, &mut report);
        report.row(TABLE, &row, &[(FAILED_WRITES, figures(side, 3).iter().sum())]);
        for (at, column) in ["s", "MiB in", "MiB out"].into_iter().enumerate() {
            report.rounds(TABLE, &row, column, &figures(side, at));
        }
        if side < 2 {
            report.ratio(TABLE, &row, RATIO, [&figures(side, 0), &kernel_s]);
        }
    }
    Ok(report)
}

/// Returns the pages that were swapped in and out since the machine started.
fn swapped_pages() -> Result<[u64; 2]> {
    let path = Path::new("/proc/vmstat");
    let vmstat = fs::read_to_string(path).map_err(|error| io_error(path, error))?;
    let count = |name: &str| {
        named_count(&vmstat, name).ok_or_else(|| unsupported(format!("the kernel has no count '{name}'")))
    };
    Ok([count("pswpin")?, count("pswpout")?])
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_counts_pages() {
        assert!(super::swapped_pages().is_ok());
    }
}
