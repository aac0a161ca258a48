//! An algorithm with its level and dictionary, parsed and validated once.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::dictionary::Dictionary;
use super::lz4::Compressor;
use super::{deflate, lz4, memory, w64, zstd};
use crate::base::error::{Error, Result};
use crate::base::named::named;
use crate::base::sync::Arc;

/// An algorithm without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// LZ4's block format, by the fast compressor.
    Lz4,
    /// LZ4's block format, by the high-compression compressor.
    Lz4hc,
    /// zstd frames.
    Zstd,
    /// Raw deflate.
    Deflate,
    /// w64 for pages of words, LZ4's block format for others: for the memory of programs.
    Memory,
}

impl Kind {
    /// All algorithms, the default first.
    pub const ALL: [Kind; 5] = [Kind::Lz4, Kind::Lz4hc, Kind::Zstd, Kind::Deflate, Kind::Memory];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Lz4 => "lz4",
            Kind::Lz4hc => "lz4hc",
            Kind::Zstd => "zstd",
            Kind::Deflate => "deflate",
            Kind::Memory => "memory",
        }
    }

    /// Returns the algorithm for the memory of programs on this machine: `memory` where its codec for words
    /// has the CPU's vectors, else lz4, which is faster then.
    pub fn for_memory() -> Kind {
        if w64::Kernel::fastest().is_portable() { Kind::Lz4 } else { Kind::Memory }
    }

    const fn default_level(self) -> i32 {
        match self {
            Kind::Lz4 => lz4::DEFAULT_ACCELERATION,
            Kind::Lz4hc => lz4::DEFAULT_LEVEL,
            Kind::Zstd => zstd::DEFAULT_LEVEL,
            Kind::Deflate => deflate::DEFAULT_LEVEL,
            Kind::Memory => memory::LEVEL,
        }
    }

    /// Returns the range of levels; 0 is not one, even if it is in the range.
    fn levels(self) -> RangeInclusive<i32> {
        match self {
            Kind::Lz4 => 1..=lz4::MAX_ACCELERATION,
            Kind::Lz4hc => lz4::MIN_LEVEL..=lz4::MAX_LEVEL,
            Kind::Zstd => zstd::levels(),
            Kind::Deflate => deflate::MIN_LEVEL..=deflate::MAX_LEVEL,
            Kind::Memory => memory::LEVEL..=memory::LEVEL,
        }
    }

    fn not_a_level(self, text: &str) -> Error {
        let (min, max) = self.levels().into_inner();
        let levels = match self {
            Kind::Lz4 => format!("an acceleration of lz4 is {min} to {max}, the higher the faster"),
            Kind::Lz4hc => format!("lz4hc's levels are {min} to {max}"),
            Kind::Zstd => format!("zstd's levels are 1 to {max}, and {min} to -1 for more speed"),
            Kind::Deflate => format!("deflate's levels are {min} to {max}"),
            Kind::Memory => format!("memory has no levels but {min}"),
        };
        Error::invalid(format!("'{text}' is no level: {levels}"))
    }

    /// Parses a level. Fails with `Invalid` for a level that this algorithm does not have, including those
    /// that the library would silently clamp.
    pub fn parse_level(self, text: &str) -> Result<i32> {
        let level = text.parse().ok().filter(|level| self.has_level(*level));
        level.ok_or_else(|| self.not_a_level(text))
    }

    fn has_level(self, level: i32) -> bool {
        level != 0 && self.levels().contains(&level)
    }
}

named!(Kind, "no compression algorithm '{}'; there are: {}", "w64+lz4" = Kind::Memory);

/// A compression algorithm with its parameters, for any number of coders, which share its dictionary.
///
/// Parses from and prints as `lz4[:ACCELERATION]`, `lz4hc[:LEVEL]`, `zstd[:LEVEL]`, `deflate[:LEVEL]` or
/// `memory`, all but deflate optionally followed by `,dict=PATH`; a default level is omitted. `w64+lz4` is
/// another name of `memory`. Parsing reads the dictionary's file.
#[derive(Clone)]
pub struct Algorithm {
    kind: Kind,
    level: i32,
    digest: Option<Digest>,
}

/// A dictionary digested for an algorithm and its level.
#[derive(Clone)]
enum Digest {
    /// Also `memory`'s: w64 uses no dictionary.
    Lz4(Arc<lz4::Digest>),
    Zstd(Arc<zstd::Digest>),
}

impl Algorithm {
    /// Creates the algorithm `kind` at `level` (`None`: its default). Fails with `Invalid` for a level that
    /// it lacks or a dictionary that it cannot use; `NoMemory` when there is none for the dictionary's
    /// tables.
    pub fn new(kind: Kind, level: Option<i32>, dictionary: Option<Dictionary>) -> Result<Algorithm> {
        let level = level.unwrap_or(kind.default_level());
        if !kind.has_level(level) {
            return Err(kind.not_a_level(&level.to_string()));
        }
        let digest = |source| match kind {
            Kind::Lz4 => Ok(Digest::Lz4(Arc::new(lz4::Digest::new(Compressor::Fast(level), source)?))),
            Kind::Lz4hc => Ok(Digest::Lz4(Arc::new(lz4::Digest::new(Compressor::High(level), source)?))),
            Kind::Memory => Ok(Digest::Lz4(Arc::new(lz4::Digest::new(memory::COMPRESSOR, source)?))),
            Kind::Zstd => Ok(Digest::Zstd(Arc::new(zstd::Digest::new(level, source)?))),
            Kind::Deflate => Err(no_dictionary()),
        };
        Ok(Algorithm { kind, level, digest: dictionary.map(Arc::new).map(digest).transpose()? })
    }

    /// Returns the algorithm without its parameters.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the level; for lz4 the acceleration.
    pub const fn level(&self) -> i32 {
        self.level
    }

    /// Returns the dictionary.
    pub fn dictionary(&self) -> Option<&Dictionary> {
        self.source().map(|source| &**source)
    }

    pub(super) fn source(&self) -> Option<&Arc<Dictionary>> {
        self.digest.as_ref().map(|digest| match digest {
            Digest::Lz4(digest) => &digest.source,
            Digest::Zstd(digest) => &digest.source,
        })
    }

    pub(super) fn lz4_digest(&self) -> Option<Arc<lz4::Digest>> {
        if let Some(Digest::Lz4(digest)) = &self.digest { Some(Arc::clone(digest)) } else { None }
    }

    pub(super) fn zstd_digest(&self) -> Option<Arc<zstd::Digest>> {
        if let Some(Digest::Zstd(digest)) = &self.digest { Some(Arc::clone(digest)) } else { None }
    }

    /// Returns the bytes of memory that all coders share: the dictionary and its tables.
    pub fn shared_bytes(&self) -> usize {
        self.digest.as_ref().map_or(0, |digest| match digest {
            Digest::Lz4(digest) => digest.bytes(),
            Digest::Zstd(digest) => digest.bytes(),
        })
    }
}

impl Default for Algorithm {
    fn default() -> Self {
        Kind::Lz4.into()
    }
}

impl From<Kind> for Algorithm {
    fn from(kind: Kind) -> Self {
        Algorithm { kind, level: kind.default_level(), digest: None }
    }
}

impl PartialEq for Algorithm {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && self.level == other.level && self.dictionary() == other.dictionary()
    }
}

impl Eq for Algorithm {}

impl Algorithm {
    /// Checks a text without reading the dictionary. Fails with `Invalid`, as parsing it does.
    pub fn check(text: &str) -> Result<()> {
        let (kind, _, path) = Self::parts(text)?;
        match path {
            Some(_) if kind == Kind::Deflate => Err(no_dictionary()),
            Some(path) => Dictionary::check_path(path),
            None => Ok(()),
        }
    }

    fn parts(text: &str) -> Result<(Kind, Option<i32>, Option<&str>)> {
        let (text, path) = match text.trim().split_once(',') {
            None => (text.trim(), None),
            Some((text, option)) => match option.strip_prefix("dict=") {
                Some(path) => (text, Some(path)),
                None => return Err(Error::invalid(format!("'{option}' is no option: write dict=PATH"))),
            },
        };
        let (kind, level) = match text.split_once(':') {
            Some((name, level)) => {
                let kind: Kind = name.parse()?;
                (kind, Some(kind.parse_level(level)?))
            }
            None => (text.parse()?, None),
        };
        Ok((kind, level, path))
    }
}

fn no_dictionary() -> Error {
    Error::invalid("deflate takes no dictionary; lz4, lz4hc, zstd and memory do")
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, level, path) = Self::parts(text)?;
        Algorithm::new(kind, level, path.map(Dictionary::read).transpose()?)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if self.level != self.kind.default_level() {
            write!(f, ":{}", self.level)?;
        }
        self.dictionary().map_or(Ok(()), |dictionary| write!(f, ",dict={}", dictionary.path()))
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Algorithm({self})")
    }
}
