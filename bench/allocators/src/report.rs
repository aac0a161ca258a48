//! The results: the targets, and the figures behind them, as text and as JSON.
//!
//! The JSON is one object: `targets` as `uzram bench --targets` has them; `times`, a row for each case,
//! size and allocator with `ns_per_object`, a number a round, and `ratio`, the median of the rounds'
//! ratios to mimalloc of the same round, its interval and the rank test's p; `memory`, with
//! `resident_per_live` for each size and allocator; `blobs`, with `resident_per_stored` when all are stored, and when half
//! are freed; `notes`.

use std::fmt;

use serde::Serialize;
use uzram_bench::harness::report::Table;
use uzram_bench::harness::stats::{PairedRatio, median};
use uzram_bench::targets::{Target, Targets};

use crate::blobs::{Blobs, STATES};
use crate::heap::{HARDENED, PLAIN, SIZES_BYTES, YARDSTICK};
use crate::measured::{BATCH_OBJECTS, Case};
use crate::memory::Memory;

/// One allocator in one case at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Time {
    /// The case.
    #[serde(serialize_with = "case_name")]
    pub case: Case,
    /// The objects' size.
    pub size_bytes: usize,
    /// The allocator.
    pub allocator: &'static str,
    /// Nanoseconds to allocate and free an object, one number a round.
    pub ns_per_object: Vec<f64>,
    /// This allocator's time divided by the yardstick's.
    #[serde(flatten)]
    pub compared: PairedRatio,
}

fn case_name<S: serde::Serializer>(case: &Case, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(case.name())
}

impl Time {
    /// Makes a row; returns `None` if a time is not above zero.
    pub fn new(
        case: Case,
        size_bytes: usize,
        allocator: &'static str,
        ns_per_object: &[f64],
        yardstick: &[f64],
    ) -> Option<Time> {
        let compared = PairedRatio::new(ns_per_object, yardstick)?;
        Some(Time { case, size_bytes, allocator, ns_per_object: ns_per_object.to_vec(), compared })
    }
}

/// All results. `Display` prints them.
#[derive(Clone, Debug, Serialize)]
pub struct AllocatorsReport {
    /// The targets, in the order they are printed.
    pub targets: Vec<Target>,
    /// The times behind them.
    pub times: Vec<Time>,
    /// The memory behind them.
    pub memory: Vec<Memory>,
    /// The memory of compressed pages.
    pub blobs: Vec<Blobs>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl AllocatorsReport {
    /// Compares the measurements with the targets.
    pub fn new(
        times: Vec<Time>,
        memory: Vec<Memory>,
        blobs: Vec<Blobs>,
        notes: Vec<String>,
    ) -> AllocatorsReport {
        let mut targets = Vec::new();
        for (case, allocator, wanted) in [
            (Case::SameThread, PLAIN, 1.0),
            (Case::SameThread, HARDENED, 1.25),
            (Case::Batches, PLAIN, 1.0),
            (Case::Handoff, PLAIN, 1.2),
        ] {
            for size_bytes in SIZES_BYTES {
                targets.push(time_target(&times, case, size_bytes, allocator, wanted));
            }
        }
        targets.extend(SIZES_BYTES.map(|size_bytes| memory_target(&memory, size_bytes)));
        targets.extend((0..STATES.len()).map(|state| blobs_target(&blobs, state)));
        AllocatorsReport { targets, times, memory, blobs, notes }
    }
}

/// A throughput should be at least the wanted figure, a time at most.
fn time_target(times: &[Time], case: Case, size_bytes: usize, allocator: &str, wanted: f64) -> Target {
    let is_row =
        |time: &&Time| time.case == case && time.size_bytes == size_bytes && time.allocator == allocator;
    let ratio = times.iter().find(is_row).map(|time| time.compared.ratio);
    let hardened = if allocator == HARDENED { ", hardened" } else { "" };
    let name = |what: String| format!("{what}, {size_bytes} bytes{hardened} / {YARDSTICK}");
    match case {
        Case::SameThread => Target::at_most(name("alloc + free in a thread".into()), wanted, ratio),
        Case::Batches => {
            Target::at_most(name(format!("{BATCH_OBJECTS} allocs, frees shuffled")), wanted, ratio)
        }
        Case::Handoff => {
            Target::at_least(name("producer/consumer rate".into()), wanted, ratio.map(f64::recip))
        }
    }
}

fn memory_target(memory: &[Memory], size_bytes: usize) -> Target {
    let of_size = || memory.iter().filter(|memory| memory.size_bytes == size_bytes);
    let ours = of_size().find(|memory| memory.allocator == PLAIN);
    let others = of_size().filter(|memory| !memory.allocator.starts_with(PLAIN));
    let least = others.map(|memory| memory.resident_per_live).min_by(f64::total_cmp);
    let ratio = ours.zip(least).map(|(ours, least)| ours.resident_per_live / least);
    Target::at_most(format!("memory, 90 % freed, {size_bytes} bytes / the best other"), 1.0, ratio)
}

fn blobs_target(blobs: &[Blobs], state: usize) -> Target {
    let of = |is_ours: bool| {
        let of_these = blobs.iter().filter(move |row| (row.allocator == PLAIN) == is_ours);
        of_these.map(move |row| row.resident_per_stored[state]).min_by(f64::total_cmp)
    };
    let ratio = of(true).zip(of(false)).map(|(ours, least)| ours / least);
    // A pool's headers and classes may cost a little until something is freed.
    let wanted = [1.05, 1.0][state];
    Target::at_most(format!("memory, compressed pages, {} / the best other", STATES[state]), wanted, ratio)
}

impl fmt::Display for AllocatorsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", Targets(&self.targets))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        for rows in self.times.chunk_by(|a, b| a.case == b.case && a.size_bytes == b.size_bytes) {
            let Some(first) = rows.first() else { continue };
            let title = format!("<{}, {} bytes", first.case.name(), first.size_bytes);
            let mut table =
                Table::new([title, "ns/object".to_owned(), format!("<time / {YARDSTICK}"), "p".to_owned()]);
            for row in rows {
                let mut cells =
                    vec![format!("  {}", row.allocator), format!("{:.2}", median(&row.ns_per_object))];
                if row.allocator != YARDSTICK {
                    cells.push(row.compared.to_string());
                    cells.push(format!("{:.3}", row.compared.p));
                }
                table.row(cells);
            }
            write!(f, "\n{table}")?;
        }
        let sizes = SIZES_BYTES.iter().map(|size_bytes| format!("{size_bytes} bytes"));
        let mut table = Table::new(["<bytes in memory / in use".to_owned()].into_iter().chain(sizes));
        for name in self.memory.iter().filter(|row| row.size_bytes == SIZES_BYTES[0]).map(|row| row.allocator)
        {
            let rows = self.memory.iter().filter(|row| row.allocator == name);
            let ratios = rows.map(|row| format!("{:.3}", row.resident_per_live));
            table.row([format!("  {name}")].into_iter().chain(ratios));
        }
        write!(f, "\n{table}")?;
        let headings = ["<compressed pages: bytes in memory / stored"].into_iter().chain(STATES);
        let mut table = Table::new(headings);
        for Blobs { allocator, resident_per_stored } in &self.blobs {
            let figures = resident_per_stored.map(|ratio| format!("{ratio:.3}"));
            table.row([format!("  {allocator}")].into_iter().chain(figures));
        }
        write!(f, "\n{table}")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use uzram_bench::harness::to_json;

    fn memory(allocator: &'static str, size_bytes: usize, resident_per_live: f64) -> Memory {
        Memory { allocator, size_bytes, resident_per_live }
    }

    #[test]
    fn targets_are_judged_by_the_right_rows() {
        let mut times = Vec::new();
        for case in Case::ALL {
            for (allocator, ns) in [(PLAIN, 5.0), (HARDENED, 12.0), (YARDSTICK, 10.0)] {
                times.push(Time::new(case, 64, allocator, &[ns, ns], &[10.0, 10.0]).unwrap());
            }
        }
        let blobs = [("uzram", [1.1, 1.2]), ("system", [1.2, 1.9]), ("mimalloc", [1.0, 2.4])]
            .map(|(allocator, resident_per_stored)| Blobs { allocator, resident_per_stored });
        let rows = [("uzram", 9.0), ("uzram eager", 1.0), ("system", 10.0), ("jemalloc", 8.0)];
        let memory = rows.map(|(allocator, kept)| memory(allocator, 256, kept)).to_vec();
        let report = AllocatorsReport::new(times, memory, blobs.to_vec(), vec!["a note".into()]);
        let judged = |name: &str| {
            let target = report.targets.iter().find(|target| target.name.starts_with(name)).unwrap();
            (target.measured, target.is_met())
        };
        assert_eq!(judged("alloc + free in a thread, 64 bytes / "), (Some(0.5), Some(true)));
        assert_eq!(judged("alloc + free in a thread, 64 bytes, hardened / "), (Some(1.2), Some(true)));
        assert_eq!(judged("64 allocs, frees shuffled, 64"), (Some(0.5), Some(true)));
        assert_eq!(judged("producer/consumer rate, 64"), (Some(2.0), Some(true)));
        assert_eq!(judged("producer/consumer rate, 256"), (None, None));
        assert_eq!(judged("memory, 90 % freed, 256"), (Some(9.0 / 8.0), Some(false)));
        assert_eq!(judged("memory, 90 % freed, 64"), (None, None));
        assert_eq!(judged("memory, compressed pages, all stored"), (Some(1.1), Some(false)));
        assert_eq!(judged("memory, compressed pages, half freed"), (Some(1.2 / 1.9), Some(true)));
        let text = report.to_string();
        assert!(
            text.contains("MISSED") && text.contains("not measured") && text.contains("a note"),
            "{text}"
        );
        assert!(text.contains("0.500 [0.500, 0.500]"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
        assert_eq!(json["times"][0]["case"], "same thread");
    }
}
