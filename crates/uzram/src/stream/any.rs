//! Streams of a design that is chosen at run time.

use std::fmt;
use std::str::FromStr;

use super::idle_list::{IdleList, MAX_STREAMS};
use super::{Lent, PerCpu, Streams};
use crate::base::error::{Error, Result};

/// A design of streams. Parses from and prints as `percpu`, or the number of streams on the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamDesign {
    /// One stream for each CPU: [`PerCpu`](super::PerCpu).
    #[default]
    PerCpu,
    /// A locked list of this many idle streams, 1 to 1024: [`IdleList`](super::IdleList).
    IdleList(u16),
}

impl FromStr for StreamDesign {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text == "percpu" {
            return Ok(StreamDesign::PerCpu);
        }
        let count = text.parse().ok().filter(|count| (1..=MAX_STREAMS).contains(count));
        count.map(StreamDesign::IdleList).ok_or_else(|| {
            let what = format!("'{text}' is not valid: write percpu, or a number from 1 to {MAX_STREAMS}");
            Error::invalid(what).with_setting("streams")
        })
    }
}

impl fmt::Display for StreamDesign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamDesign::PerCpu => f.write_str("percpu"),
            StreamDesign::IdleList(count) => count.fmt(f),
        }
    }
}

/// Streams of a design selected at run time.
pub enum AnyStreams<S> {
    /// See [`PerCpu`].
    PerCpu(PerCpu<S>),
    /// See [`IdleList`].
    IdleList(IdleList<S>),
}

impl<S> AnyStreams<S> {
    /// Creates the streams of `design`. Fails with the first error of `make`.
    pub fn new<E>(
        design: StreamDesign,
        make: impl Fn() -> Result<S, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        match design {
            StreamDesign::PerCpu => PerCpu::new(make).map(AnyStreams::PerCpu),
            StreamDesign::IdleList(count) => IdleList::new(count, make).map(AnyStreams::IdleList),
        }
    }

    /// Creates all spare streams now. Returns whether all could be created.
    pub fn make_spares(&self) -> bool {
        match self {
            AnyStreams::PerCpu(streams) => streams.make_spares(),
            AnyStreams::IdleList(_) => true,
        }
    }
}

impl<S> Streams<S> for AnyStreams<S> {
    #[inline]
    fn lend(&self) -> Lent<'_, S> {
        match self {
            AnyStreams::PerCpu(streams) => streams.lend(),
            AnyStreams::IdleList(streams) => streams.lend(),
        }
    }

    fn sleeps(&self) -> u64 {
        match self {
            AnyStreams::PerCpu(streams) => streams.sleeps(),
            AnyStreams::IdleList(streams) => streams.sleeps(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn designs_read_as_they_print() {
        for text in ["percpu", "1", "4", "1024"] {
            assert_eq!(text.parse::<StreamDesign>().expect(text).to_string(), text);
        }
        for text in ["", "0", "1025", "65537", "-1", "4.0", "per-cpu", "99999999999999999999"] {
            let error = text.parse::<StreamDesign>().expect_err(text);
            assert!(error.setting() == Some("streams") && error.to_string().contains("1024"), "{error}");
        }
    }
}
