//! Swap: the time that the kernel takes to swap out a program's memory, and the program to fault it in.
//!
//! The program is [`super::swap_user`], in its own cgroup. When it has ended, all of its swap is free; pages
//! that are still stored some time later were never discarded by the kernel.

use std::path::Path;
use std::thread;
use std::time::Duration;

use uzram::Result;

use super::cgroup::Cgroup;
use super::obstacles::ALGORITHM;
use super::swap_area::{self, Side, SwapArea};
use super::swap_user::{SwapTimes, SwapUser};
use crate::engine::ROUNDS;
use crate::harness::report::{FigureOf, each, mib};
use crate::harness::rounds::in_turn;
use crate::harness::steps::User;
use crate::harness::{Options, Report, unsupported};

const REST: Duration = Duration::from_secs(2);

/// What a turn with one of the areas has shown.
pub(crate) struct Turn {
    pub(crate) times: SwapTimes,
    /// Bytes that the device still stored, though no longer swapped out, some time after the program had
    /// ended.
    left_bytes: u64,
}

pub(crate) const FIGURES: [FigureOf<Turn>; 6] = [
    ("swap-out, ms", |turn| turn.times.swap_out_ms),
    ("fault-in page by page, ms", |turn| turn.times.fault_in_ms),
    ("fault-in in no order, ms", |turn| turn.times.random_in_ms),
    ("on the swap area alone when all had moved out, MiB", |turn| mib(turn.times.swapped_bytes)),
    ("there and in memory, MiB", |turn| mib(turn.times.cached_bytes)),
    ("free, but still stored afterwards, KiB", |turn| turn.left_bytes as f64 / 1024.0),
];

/// Returns why nothing can be measured, if so.
pub(crate) fn obstacle() -> Option<String> {
    swap_area::obstacle().or_else(Cgroup::obstacle)
}

/// Measures a daemon with its default, one that does not survive, and the kernel.
pub(super) fn measure(options: &Options, pages: &Path, report: &mut Report) -> Result<()> {
    const DAEMONS: [&[&str]; 2] = [&["--algorithm", ALGORITHM], &["--algorithm", ALGORITHM, "--no-survive"]];
    let sides = [Side::Uzram(DAEMONS[0]), Side::Uzram(DAEMONS[1]), Side::Kernel(ALGORITHM)];
    let turns = in_turn_with(options, pages, sides, options.amount(REST, REST / 10))?;
    for (daemon, uzram) in ["default", "--no-survive"].into_iter().zip(&turns) {
        for (name, figure) in FIGURES {
            let [uzram, kernel] = [uzram, &turns[2]].map(|turns| each(turns, figure));
            let row = format!("{daemon}, {name}");
            report.compared("swap", &row, ["uzram", "kernel"], [&uzram, &kernel]);
        }
    }
    Ok(())
}

/// Measures swap areas in turn, for a program whose memory a file of pages fills.
pub(crate) fn in_turn_with<const N: usize>(
    options: &Options,
    pages: &Path,
    sides: [Side<'_>; N],
    rest: Duration,
) -> Result<[Vec<Turn>; N]> {
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
        thread::sleep(rest);
        let left_bytes = area.left_bytes()?;
        area.off().map(|_| Turn { times, left_bytes })
    })
}
