//! Swap: the time that the kernel takes to swap out a program's memory, and the program to fault it in.
//!
//! The program is [`super::swap_user`], in its own cgroup.

use std::path::Path;

use uzram::Result;

use super::cgroup::Cgroup;
use super::swap_area::{self, Side, SwapArea};
use super::swap_user::{SwapTimes, SwapUser};
use super::{ALGORITHM, check_disk, check_kernel};
use crate::engine::ROUNDS;
use crate::harness::report::{FigureOf, each};
use crate::harness::rounds::in_turn;
use crate::harness::steps::User;
use crate::harness::{Options, Report, unsupported};

const FIGURES: [FigureOf<SwapTimes>; 3] = [
    ("swap-out, ms", |times| times.swap_out_ms),
    ("fault-in page by page, ms", |times| times.fault_in_ms),
    ("fault-in in no order, ms", |times| times.random_in_ms),
];

/// `Unsupported` says why nothing can be measured.
pub(crate) fn check() -> Result<()> {
    swap_area::check().and_then(|()| Cgroup::check())
}

/// Measures a daemon with its default, one that does not survive, and the kernel.
pub(super) fn measure(options: &Options, pages: &Path) -> Result<Report> {
    const DAEMONS: [&[&str]; 2] = [&["--algorithm", ALGORITHM], &["--algorithm", ALGORITHM, "--no-survive"]];
    check()?;
    check_kernel()?;
    let mut report = Report::default();
    let sides = [Side::Uzram(DAEMONS[0]), Side::Uzram(DAEMONS[1]), Side::Kernel(ALGORITHM)];
    let turns = in_turn_with(options, pages, sides)?;
    for (daemon, uzram) in ["default", "--no-survive"].into_iter().zip(&turns) {
        for (name, figure) in FIGURES {
            let [uzram, kernel] = [uzram, &turns[2]].map(|turns| each(turns, figure));
            let row = format!("{daemon}, {name}");
            report.compared("swap", &row, ["uzram", "kernel"], [&uzram, &kernel]);
        }
    }
    Ok(report)
}

/// Compares two daemons, which have these options: how fast each swaps out, and page by page in.
pub(crate) fn compare(
    options: &Options,
    pages: &Path,
    table: &str,
    names: [&'static str; 2],
    daemons: [&[&str]; 2],
) -> Result<Report> {
    check_disk(options.uzram()?)?;
    check()?;
    let turns = in_turn_with(options, pages, daemons.map(Side::Uzram))?;
    let mut report = Report::default();
    for (row, figure) in &FIGURES[..2] {
        let [one, other] = turns.each_ref().map(|turns| each(turns, *figure));
        report.compared(table, row, names, [&one, &other]);
        report.ratio(table, row, "speed", [&other, &one]);
    }
    Ok(report)
}

/// Measures swap areas in turn, for a program whose memory a file of pages fills.
fn in_turn_with<const N: usize>(
    options: &Options,
    pages: &Path,
    sides: [Side<'_>; N],
) -> Result<[Vec<SwapTimes>; N]> {
    let [area_mib, swapped_mib] = options.amount([1024, 256], [64, 24]);
    in_turn(options.rounds(ROUNDS), &options.stop, |_, which| {
        let area = SwapArea::on(options.uzram()?, sides[which], area_mib << 20)?;
        let cgroup = Cgroup::new()?;
        let (pages, size_bytes) = (pages.to_owned(), swapped_mib << 20);
        let user = SwapUser { cgroup: cgroup.dir().to_owned(), pages, size_bytes };
        // Ends with this statement, so that the cgroup can be removed.
        let times: SwapTimes = User::start(&options.bench, "Swap", &user)?.hear(&options.stop)?;
        if times.swapped_bytes == 0 {
            return Err(unsupported("nothing was swapped out: is vm.swappiness 0?"));
        }
        drop(cgroup);
        area.off().map(|_| times)
    })
}
