//! What every benchmark is asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::codec::Algorithm;
use uzram::{Error, ErrorKind, Result};

use super::corpus::{Corpus, DEFAULT_CORPUS_PAGES, Kind, Source};
use super::go_on;

/// The seed of whatever is drawn at random.
pub const SEED: u64 = 1;
/// The default folder of large files: `/tmp` may be in memory.
pub const DEFAULT_DIR: &str = "/var/tmp";
/// Pages of a corpus of which little is measured.
pub const FEW_PAGES: usize = 512;
pub(crate) const MAX_REPEAT: usize = 1000;
const MAX_DURATION: Duration = Duration::from_hours(1);

/// How long a round lasts where two things differ by a few percent. Many short rounds tell them apart better
/// than a few long ones, between which a busy machine changes its speed more. The cost of the LRU came to
/// ratios from 0.95 to 1.13 by 3 rounds of 0.5 s, from 0.93 to 1.06 by 50 of 50 ms, and from 0.97 to 1.01 by
/// 250 of 20 ms.
const SLICE: Duration = Duration::from_millis(20);

/// How to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pages to store.
    pub corpus: Source,
    /// The length of a measurement in one round.
    pub duration: Duration,
    /// How many rounds; `None` for the benchmark's default.
    pub repeat: Option<usize>,
    /// The algorithm, in uzram and, unless they say otherwise, in what it is compared with.
    pub algorithm: Algorithm,
    /// The parts of the benchmark to measure; all of them if there is none.
    pub only: Vec<String>,
    /// The folder for temporary files of some hundred MiB.
    pub dir: PathBuf,
    /// Measure little: for a trial, and for tests.
    pub small: bool,
    /// Measure what takes GiB of memory too, if the machine has it.
    pub full: bool,
    /// The program `uzram`, if there is one.
    pub uzram: Option<PathBuf>,
    /// The program `uzram-bench`, which is also the processes whose memory is measured.
    pub bench: PathBuf,
    /// Setting it, for example from a signal handler, ends the run with an error after removing what it added
    /// to the system.
    pub stop: Arc<AtomicBool>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            corpus: Source::Built(Kind::Mixed, DEFAULT_CORPUS_PAGES),
            duration: Duration::from_secs(1),
            repeat: None,
            algorithm: Algorithm::default(),
            only: Vec::new(),
            dir: DEFAULT_DIR.into(),
            small: false,
            full: false,
            uzram: None,
            bench: PathBuf::from("uzram-bench"),
            stop: Arc::default(),
        }
    }
}

impl Options {
    /// Returns the first amount, or the second if little is to be measured.
    pub fn amount<T>(&self, normal: T, small: T) -> T {
        if self.small { small } else { normal }
    }

    /// Returns how many rounds, of a benchmark with this default.
    pub fn rounds(&self, default: usize) -> usize {
        self.repeat.unwrap_or(self.amount(default, 1))
    }

    /// Returns whether this part of a benchmark is measured.
    pub fn has(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    /// Returns the program `uzram`.
    pub fn uzram(&self) -> Result<&Path> {
        self.uzram.as_deref().ok_or_else(|| unsupported("no uzram program was found"))
    }

    /// Loads the corpus.
    pub fn load_corpus(&self) -> Result<Corpus> {
        self.corpus.load_until(&self.stop)
    }

    /// Fails once the benchmark is to stop.
    pub fn go_on(&self) -> Result<()> {
        go_on(&self.stop)
    }

    /// The same time, by a benchmark with this default of rounds, in rounds of at most `SLICE`.
    #[must_use]
    pub fn in_slices(&self, default: usize) -> Options {
        let rounds = self.rounds(default);
        let slices = rounds as u128 * self.duration.as_nanos() / SLICE.as_nanos();
        let repeat = usize::try_from(slices).unwrap_or(MAX_REPEAT).max(rounds).min(MAX_REPEAT);
        Options { duration: self.duration.min(SLICE), repeat: Some(repeat), ..self.clone() }
    }

    /// Fails if a benchmark with these parts cannot be measured so.
    pub fn check(&self, parts: &[&str]) -> Result<()> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        if let Some(part) = self.only.iter().find(|only| !parts.contains(&only.as_str())) {
            return bad(format!("unknown part '{part}': write {}", parts.join(", ")), "--only");
        }
        if self.repeat.is_some_and(|repeat| !(1..=MAX_REPEAT).contains(&repeat)) {
            return bad(format!("there must be 1 to {MAX_REPEAT} rounds"), "--repeat");
        }
        if self.duration.is_zero() || self.duration > MAX_DURATION {
            return bad("a measurement must last more than nothing and at most an hour".into(), "--seconds");
        }
        Ok(())
    }
}

#[cfg(test)]
impl Options {
    pub(crate) fn tiny(corpus_pages: usize) -> Self {
        let corpus = Source::Built(Kind::Mixed, corpus_pages);
        Options { corpus, duration: Duration::from_millis(20), small: true, ..Options::default() }
    }
}

/// Returns the error of what cannot be measured here.
pub fn unsupported(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Unsupported, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_take_as_long_as_the_rounds_did() {
        for (duration_ms, repeat, wanted) in [
            (1000, 5, (20, 250)),
            (500, 3, (20, 75)),
            (20, 3, (20, 3)),
            (2, 3, (2, 3)),
            (60_000, 5, (20, MAX_REPEAT)),
        ] {
            let duration = Duration::from_millis(duration_ms);
            let sliced = Options { duration, ..Options::default() }.in_slices(repeat);
            assert_eq!((sliced.duration.as_millis(), sliced.rounds(9)), wanted, "{duration_ms} ms");
        }
    }
}
