//! The slow mode: counts instructions, branches and mispredicted branches with valgrind's callgrind.
//!
//! Seconds are noisy, counts are not: on the same pages two runs differ in the fifth digit. This program is
//! run again under callgrind, once for each design, with a small corpus from a file; it prepares the design
//! as usual and does a fixed amount of work with one job. Counting is on only inside the function that the
//! table names, so preparations do not count. Branches are predicted by callgrind's model
//! (`--branch-sim=yes`), not that of a particular CPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use uzram::{Error, ErrorKind, Result};

use super::series::{Series, Unit};
use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::{self, Kind};
use uzram_bench::harness::rounds::Plan;

/// Pages of the corpus: enough to contain its mix.
const CORPUS_PAGES: usize = 512;
/// Returns the amount of work to count.
const fn work_of(unit: Unit) -> u64 {
    match unit {
        // A multiple of seven, because the benchmark's jobs check the clock every seventh page.
        Unit::Page => 1022,
        // Many times the number in flight.
        Unit::Object => 120_000,
    }
}

/// How to run this program again: it gets the arguments, then the table, the case, the design and the
/// corpus's file, and must call [`work`] with them.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program.
    pub path: PathBuf,
    /// Its first arguments.
    pub args: Vec<String>,
}

/// Returns whether valgrind is installed.
pub fn is_there() -> bool {
    let version =
        Command::new("valgrind").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

/// Does the work that runs under callgrind.
///
/// # Errors
/// Those of [`Series::open`] and of its experiment.
pub fn work(table: &Series, case: &str, design: &str, corpus: &Path) -> Result<()> {
    let mut experiment = (table.open)(&Source::File(corpus.to_owned()), &[design.to_owned()])?;
    experiment.begin(case)?;
    let stop = AtomicBool::new(false);
    let work = work_of(table.unit);
    experiment.measure(&Plan { design: 0, jobs: 1, work, seed: 1, stop: &stop }).map(drop)
}

impl Program {
    /// Counts instructions and branches of each design for a unit of a case's work.
    pub(super) fn count(
        &self,
        table: &Series,
        case: &str,
        designs: &[String],
    ) -> Result<Vec<Vec<(&'static str, f64)>>> {
        let failed =
            |what: &str, error: std::io::Error| Error::new(ErrorKind::Io, format!("{what}: {error}"));
        let dir = tempfile::tempdir().map_err(|error| failed("cannot make a temporary folder", error))?;
        let corpus = dir.path().join("corpus.bin");
        corpus::build(Kind::Mixed, CORPUS_PAGES)?.save(&corpus)?;
        let out = dir.path().join("callgrind.out");
        let mut counts = Vec::new();
        for design in designs {
            let mut command = Command::new("valgrind");
            command.args(["--tool=callgrind", "--branch-sim=yes", "--collect-atstart=no", "--quiet"]);
            command.arg(format!("--toggle-collect={}", table.counted_function));
            command.arg(format!("--callgrind-out-file={}", out.display()));
            command.arg(&self.path).args(&self.args).args([table.name, case, design]).arg(&corpus);
            let output = command
                .stdin(Stdio::null())
                .output()
                .map_err(|error| failed("cannot start valgrind", error))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                let last = said.lines().last().unwrap_or("nothing").trim();
                let what = format!("valgrind failed ({}) and said: {last}", output.status);
                return Err(Error::new(ErrorKind::Io, what).with_setting("--callgrind"));
            }
            let text = fs::read_to_string(&out).map_err(|error| failed("no counts from callgrind", error))?;
            counts.push(parse(&text, table.unit)?);
        }
        Ok(counts)
    }
}

/// Parses the counts for each unit of work from callgrind's file: its `events:` line names the columns of its
/// `totals:` line (or `summary:`, in an older one).
fn parse(text: &str, unit: Unit) -> Result<Vec<(&'static str, f64)>> {
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let events = line("events:").unwrap_or_default().split_whitespace();
    let totals = line("totals:").or_else(|| line("summary:")).unwrap_or_default().split_whitespace();
    let columns: Vec<(&str, u64)> =
        events.zip(totals).filter_map(|(event, total)| Some((event, total.parse().ok()?))).collect();
    let sum = |wanted: &[&str]| -> Option<f64> {
        let count = |name: &&str| columns.iter().find(|(event, _)| event == name).map(|(_, count)| *count);
        let sum: u64 = wanted.iter().map(count).sum::<Option<u64>>()?;
        Some(sum as f64 / work_of(unit) as f64)
    };
    let counts = || {
        let instructions = sum(&["Ir"]).filter(|count| *count > 0.0)?;
        let values = [instructions, sum(&["Bc", "Bi"])?, sum(&["Bcm", "Bim"])?];
        Some(unit.counts().into_iter().zip(values).collect())
    };
    counts().ok_or_else(|| {
        let what = "callgrind counted nothing: was the program built without its symbols?";
        Error::new(ErrorKind::Unsupported, what).with_setting("--callgrind")
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn counts_are_read_from_callgrinds_file() {
        let [ten, two, one] = [10, 2, 1].map(|each| each * work_of(Unit::Page));
        let text = format!(
            "# callgrind format\nevents: Ir Bc Bcm Bi Bim\nfn=(1) x\n1 2 3\n\ntotals: {ten} {two} {one} {one} 0\n"
        );
        let counts = parse(&text, Unit::Page).unwrap();
        let wanted =
            [("instructions_per_page", 10.0), ("branches_per_page", 3.0), ("mispredictions_per_page", 1.0)];
        assert_eq!(counts, wanted);
        for nothing in
            ["", "events: Ir\ntotals: 0\n", "events: Ir Bc Bcm Bi Bim\ntotals: 0 0 0 0 0", "totals: 1 2"]
        {
            assert!(
                parse(nothing, Unit::Object).unwrap_err().to_string().contains("--callgrind"),
                "{nothing}"
            );
        }
    }
}
