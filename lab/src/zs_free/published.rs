//! The authors' figures.
//!
//! Wenchao Hao and Xueyuan Chen, "mm/zsmalloc: reduce lock contention in zs_free()", cover letter of the
//! second version, 2026: processes that each map 256 MiB, write them, have them swapped out to zram (lzo-rle)
//! and unmap them at the same time. The figures are the times to unmap.

use std::collections::BTreeMap;

use super::JOBS;
use crate::experiment::{Published, PublishedSide};

/// Milliseconds, by the number of processes in [`JOBS`].
struct Machine {
    name: &'static str,
    base_ms: [f64; JOBS.len()],
    patched_ms: [f64; JOBS.len()],
}

/// The machine whose figures are in the table.
const I7: Machine =
    Machine { name: "Intel i7-12700, 20 cores", base_ms: [11.7, 24.1, 63.0], patched_ms: [9.8, 17.2, 45.3] };

const RASPBERRY_PI: Machine = Machine {
    name: "Raspberry Pi 4B, 4 cores",
    base_ms: [59.0, 94.6, 202.9],
    patched_ms: [56.0, 66.7, 110.6],
};

impl Machine {
    const fn gain(&self, at: usize) -> f64 {
        self.base_ms[at] / self.patched_ms[at]
    }
}

/// Returns the published figures.
pub(crate) fn figures(jobs: usize) -> Option<Published> {
    let at = JOBS.iter().position(|published| *published == jobs)?;
    let side = |design, of: fn(&Machine) -> &[f64; JOBS.len()]| {
        let ms = |machine| of(machine)[at];
        let values = BTreeMap::from([
            ("i7_elapsed_s", ms(&I7) / 1000.0),
            ("raspberry_pi_elapsed_s", ms(&RASPBERRY_PI) / 1000.0),
        ]);
        PublishedSide { design, figure: format!("{:.1} ms", ms(&I7)), values }
    };
    let (before, after) =
        (side("Base", |machine| &machine.base_ms), side("Patched", |machine| &machine.patched_ms));
    Some(Published { before, after, ratio: I7.gain(at) })
}

/// Returns the text about the source of the figures.
pub(crate) fn legend() -> String {
    let of = |machine: &Machine| {
        let ms = |at| {
            let (base, patched): (f64, f64) = (machine.base_ms[at], machine.patched_ms[at]);
            format!("{base:.1} -> {patched:.1} ms ({:.2})", machine.gain(at))
        };
        format!("{}: {}, {}, {}", machine.name, ms(0), ms(1), ms(2))
    };
    format!(
        "published: 1, 2 and 4 processes unmap 256 MiB each, in the kernel, lzo-rle; {}; {}; in the table the i7's",
        of(&I7),
        of(&RASPBERRY_PI)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_gains_are_those_of_the_letter() {
        let rounded = |at| [I7, RASPBERRY_PI].map(|machine| (100.0 * machine.gain(at)).round() / 100.0);
        assert_eq!([0, 1, 2].map(rounded), [[1.19, 1.05], [1.40, 1.42], [1.39, 1.83]]);
        let four = figures(4).unwrap();
        assert_eq!((four.before.figure.as_str(), four.after.figure.as_str()), ("63.0 ms", "45.3 ms"));
        assert!((four.after.values["raspberry_pi_elapsed_s"] - 0.1106).abs() < 1e-9);
        assert!(figures(3).is_none());
        assert!(legend().contains("59.0 -> 56.0 ms (1.05), 94.6 -> 66.7 ms (1.42)"), "{}", legend());
    }
}
