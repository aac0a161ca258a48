//! The stream design of a store, as a setting.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use crate::base::error::{Error, Result};

/// A design of streams. Parses from and prints as `percpu`, or the number of streams on the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamDesign {
    /// One stream for each CPU: [`PerCpu`](super::PerCpu).
    #[default]
    PerCpu,
    /// A locked list of this many idle streams: [`IdleList`](super::IdleList).
    IdleList(StreamCount),
}

/// A number of streams, 1..=[`StreamCount::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCount(NonZeroU16);

impl StreamCount {
    /// The maximum number of streams. All are created in advance, and one of zstd takes a sixth of a MiB at
    /// the default level. A larger number is likely a mistake: more streams than threads that compress at
    /// once are of no use.
    pub const MAX: usize = 1024;

    /// Returns the number.
    pub fn get(self) -> u16 {
        self.0.get()
    }
}

impl TryFrom<usize> for StreamCount {
    type Error = Error;

    fn try_from(count: usize) -> Result<Self> {
        let in_range = u16::try_from(count).ok().filter(|_| count <= StreamCount::MAX);
        in_range.and_then(NonZeroU16::new).map(StreamCount).ok_or_else(|| {
            let what = format!("a list of {count} streams: it must have 1 to {}", StreamCount::MAX);
            Error::invalid(what).with_setting("streams")
        })
    }
}

impl FromStr for StreamDesign {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text == "percpu" {
            return Ok(StreamDesign::PerCpu);
        }
        let count: usize = text.parse().map_err(|_| {
            let what =
                format!("'{text}' is not valid: write percpu, or a number from 1 to {}", StreamCount::MAX);
            Error::invalid(what).with_setting("streams")
        })?;
        StreamCount::try_from(count).map(StreamDesign::IdleList)
    }
}

impl fmt::Display for StreamDesign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamDesign::PerCpu => f.write_str("percpu"),
            StreamDesign::IdleList(count) => write!(f, "{}", count.get()),
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
