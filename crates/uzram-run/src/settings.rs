//! What `uzram run` has asked for: environment variables, so that programs which the program starts have the
//! same.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;

use uzram_pager::{LEAST_LIMIT_BYTES, Pager, Settings, TrapKind};

use crate::figures;

/// A program that never uses more has no pager: neither a thread, nor anything to do when it forks. At most
/// this share of the limit.
const PLAIN_BYTES: u64 = 16 << 20;
const PLAIN_SHARE: u64 = 4;

pub struct Asked {
    pub memory: Settings,
    pub limit_bytes: u64,
    /// Whether there is a spill file.
    pub spills: bool,
    pub stats: bool,
    pub json: bool,
    /// The process that `uzram run` has become.
    pub first_process: Option<u32>,
}

/// The environment that a program starts with.
pub struct Environment(*const *const c_char);

impl Environment {
    /// # Safety
    /// `start` is the null-terminated array of strings that the loader passes on.
    pub unsafe fn new(start: *const *const c_char) -> Environment {
        Environment(start)
    }

    fn get(&self, name: &str) -> Option<&OsStr> {
        let mut at = self.0;
        // SAFETY: the array has more entries up to the null.
        while !at.is_null() && !unsafe { *at }.is_null() {
            // SAFETY: the entry is a string; the array goes on behind it.
            let entry = unsafe { CStr::from_ptr(*at).to_bytes() };
            if let Some(value) = entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
            {
                return Some(OsStr::from_bytes(value));
            }
            // SAFETY: as above.
            at = unsafe { at.add(1) };
        }
        None
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.to_str()?.parse().ok()
    }

    /// Returns what is asked for; `None` if nothing is, or what is there is not from `uzram run`.
    pub fn asked(&self) -> Option<Asked> {
        let limit_bytes = self.number("UZRAM_RUN_LIMIT").filter(|bytes| *bytes >= LEAST_LIMIT_BYTES)?;
        let mut pager = Pager::builder().limit(limit_bytes).trap(TrapKind::Uffd);
        if let Some(goal) = self.get("UZRAM_RUN_PRESSURE").and_then(OsStr::to_str) {
            pager = pager.pressure(goal.parse().ok()?);
        }
        if let Some(algorithm) = self.get("UZRAM_RUN_ALGORITHM").and_then(OsStr::to_str) {
            pager = pager.algorithm(algorithm.parse().ok()?);
        }
        let spill = self.get("UZRAM_RUN_SPILL").zip(self.number("UZRAM_RUN_SPILL_BYTES"));
        if let Some((dir, bytes)) = spill {
            pager = pager.spill(dir, bytes);
        }
        Some(Asked {
            memory: Settings {
                pager,
                plain_bytes: PLAIN_BYTES.min(limit_bytes / PLAIN_SHARE),
                hard: self.get("UZRAM_RUN_HARD").is_some(),
                on_excess: || {},
                on_figures: figures::publish,
            },
            limit_bytes,
            spills: spill.is_some(),
            stats: self.get("UZRAM_RUN_STATS").is_some(),
            json: self.get("UZRAM_RUN_JSON").is_some(),
            first_process: self.number("UZRAM_RUN_PID").and_then(|pid| pid.try_into().ok()),
        })
    }
}
