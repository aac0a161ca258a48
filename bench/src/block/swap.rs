//! Swap: the time that the kernel takes to swap out a program's memory, and the program to fault it in.
//!
//! The program is `uzram-bench swap-user`, in its own cgroup ([`super::SwapUser`]). When it has ended, all of
//! its swap is free; pages that are still stored some time later were never discarded by the kernel.

use std::path::Path;
use std::process::Command;
use std::thread;

use serde::Serialize;
use uzram::{Error, ErrorKind, Result};

use super::cgroup::Cgroup;
use super::report::Compared;
use super::swap_area::{self, KernelSwap, SwapDaemon};
use super::swap_user::SwapTimes;
use super::{ALGORITHM, BlockOptions, PATIENCE, Programs};
use crate::harness::process::run_to_end;
use crate::harness::rounds::in_turn;

/// The results; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Swap {
    /// The program's memory.
    pub size_bytes: u64,
    /// The size of the swap areas.
    pub area_bytes: u64,
    /// The time to swap it out.
    pub swap_out_ms: Compared,
    /// The time to touch all of it again.
    pub fault_in_ms: Compared,
    /// The time to touch all of it again in no order, when it had been swapped out a second time.
    pub random_in_ms: Compared,
    /// The three times with a daemon that does not survive.
    pub no_survive: [Compared; 3],
    /// Bytes of it that were on the swap area only.
    pub swapped_bytes: Compared,
    /// Bytes of it that were on the swap area and in memory.
    pub cached_bytes: Compared,
    /// Bytes that the device still stored, though no longer swapped out, some time after the program had
    /// ended.
    pub left_bytes: Compared,
}

/// The variants: a daemon with its default, and one that does not survive; then the kernel.
const DAEMONS: [&[&str]; 2] = [&["--algorithm", ALGORITHM], &["--algorithm", ALGORITHM, "--no-survive"]];

struct Round {
    times: SwapTimes,
    left_bytes: u64,
}

/// Returns why nothing can be measured, if so.
pub(crate) fn obstacle() -> Option<String> {
    swap_area::obstacle().or_else(Cgroup::obstacle)
}

/// Runs the measurement.
pub(super) fn measure(options: &BlockOptions) -> Result<Swap> {
    let area_bytes = options.amounts.swap_area_bytes;
    let rounds: [Vec<Round>; 3] = in_turn(options.repeat, &options.stop, |_, which| {
        if let Some(daemon) = DAEMONS.get(which) {
            let area = SwapDaemon::on(&options.programs.uzram, area_bytes, daemon)?;
            let round = round(options, || area.left_bytes())?;
            area.off().map(|()| round)
        } else {
            let area = KernelSwap::on(area_bytes)?;
            let round = round(options, || area.left_bytes())?;
            area.off().map(|()| round)
        }
    })?;
    let [surviving, no_survive, kernel] = &rounds;
    let compared_of = |uzram: &[Round], figure: fn(&Round) -> f64| {
        let figures = |rounds: &[Round]| rounds.iter().map(figure).collect::<Vec<_>>();
        Compared::new(&figures(uzram), &figures(kernel))
    };
    let compared = |figure| compared_of(surviving, figure);
    const TIMES: [fn(&Round) -> f64; 3] =
        [|round| round.times.swap_out_ms, |round| round.times.fault_in_ms, |round| round.times.random_in_ms];
    let [swap_out_ms, fault_in_ms, random_in_ms] = TIMES.map(compared);
    Ok(Swap {
        size_bytes: options.amounts.swapped_bytes,
        area_bytes,
        swap_out_ms,
        fault_in_ms,
        random_in_ms,
        no_survive: TIMES.map(|figure| compared_of(no_survive, figure)),
        swapped_bytes: compared(|round| round.times.swapped_bytes as f64),
        cached_bytes: compared(|round| round.times.cached_bytes as f64),
        left_bytes: compared(|round| round.left_bytes as f64),
    })
}

/// Measures swap areas of daemons with these options, in turn; returns the times of each.
pub(crate) fn in_turn_with(options: &BlockOptions, daemons: [&[&str]; 2]) -> Result<[Vec<SwapTimes>; 2]> {
    in_turn(options.repeat, &options.stop, |_, which| {
        let area = SwapDaemon::on(&options.programs.uzram, options.amounts.swap_area_bytes, daemons[which])?;
        let cgroup = Cgroup::new()?;
        let times = run_user(options, cgroup.dir())?;
        drop(cgroup);
        area.off().map(|()| times)
    })
}

/// Runs the program once, while one of the areas is on.
fn round(options: &BlockOptions, left_bytes: impl Fn() -> Result<u64>) -> Result<Round> {
    let cgroup = Cgroup::new()?;
    let times = run_user(options, cgroup.dir())?;
    drop(cgroup);
    thread::sleep(options.amounts.rest);
    Ok(Round { times, left_bytes: left_bytes()? })
}

/// Returns the command that is the program whose memory is swapped out.
pub(crate) fn user_command(programs: &Programs, cgroup: &Path, pages: &Path, size_bytes: u64) -> Command {
    let mut command = Command::new(&programs.bench);
    command.args(["swap-user", "--cgroup"]).arg(cgroup).arg("--pages").arg(pages);
    command.arg("--size").arg(format!("{size_bytes}B"));
    command
}

fn run_user(options: &BlockOptions, cgroup: &Path) -> Result<SwapTimes> {
    let mut command = user_command(&options.programs, cgroup, &options.corpus, options.amounts.swapped_bytes);
    let printed = run_to_end(&mut command, PATIENCE)?;
    let times: SwapTimes = serde_json::from_str(&printed)
        .map_err(|error| Error::new(ErrorKind::Io, format!("uzram-bench swap-user: {error}")))?;
    if times.swapped_bytes == 0 {
        let what = "nothing was swapped out: is vm.swappiness 0?";
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    Ok(times)
}
