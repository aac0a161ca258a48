//! What `uzram run` has asked for: environment variables, so that programs which the program starts have the
//! same.

use std::env;
use std::str::FromStr;

use crate::pager::{LEAST_LIMIT_BYTES, Pager, PagerBuilder};

pub(super) struct Asked {
    pub pager: PagerBuilder,
    pub limit_bytes: u64,
    /// The program ends rather than exceed the limit.
    pub hard: bool,
    /// Print all figures at the end.
    pub stats: bool,
    pub json: bool,
    /// Print nothing at the end.
    pub quiet: bool,
    /// The process that `uzram run` has become.
    pub first_process: Option<i32>,
}

fn parsed<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

impl Asked {
    /// Returns what is asked for; `None` if what is there is not from `uzram run`.
    pub fn of_environment() -> Option<Asked> {
        let limit_bytes = parsed("UZRAM_RUN_LIMIT").filter(|bytes| *bytes >= LEAST_LIMIT_BYTES)?;
        let mut pager = Pager::builder().limit(limit_bytes);
        if let Ok(goal) = env::var("UZRAM_RUN_PRESSURE") {
            pager = pager.pressure(goal.parse().ok()?);
        }
        if let Ok(algorithm) = env::var("UZRAM_RUN_ALGORITHM") {
            pager = pager.algorithm(algorithm.parse().ok()?);
        }
        let is_set = |name| env::var_os(name).is_some();
        let spill = env::var_os("UZRAM_RUN_SPILL").zip(parsed("UZRAM_RUN_SPILL_BYTES"));
        if let Some((dir, bytes)) = spill {
            pager = pager.spill(dir, bytes);
        }
        Some(Asked {
            pager,
            limit_bytes,
            hard: is_set("UZRAM_RUN_HARD"),
            stats: is_set("UZRAM_RUN_STATS"),
            json: is_set("UZRAM_RUN_JSON"),
            quiet: is_set("UZRAM_RUN_QUIET"),
            first_process: parsed("UZRAM_RUN_PID"),
        })
    }

    /// Returns whether a process prints a line at its end.
    pub fn tells(&self, process: i32) -> bool {
        self.stats || (self.first_process == Some(process) && !self.quiet)
    }
}
