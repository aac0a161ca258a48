//! What the processes of the pager's benchmarks are given.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uzram::designs::PoolDesign;
use uzram::{Error, Result};
use uzram_pager::{Pager, Trap};

/// A process that touches memory of a pager.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Touched {
    /// How the pager traps touches.
    trap: String,
    /// A file of pages.
    pub(super) corpus: PathBuf,
    /// Pages of the memory, which those of the corpus fill again and again.
    pub(super) pages: usize,
}

impl Touched {
    pub(super) fn new(trap: Trap, corpus: &Path, pages: usize) -> Touched {
        Touched { trap: trap.name().to_owned(), corpus: corpus.to_owned(), pages }
    }

    pub(super) fn trap(&self) -> Result<Trap> {
        trap_named(&self.trap)
    }
}

/// The settings of a pager that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PagerSettings {
    pub(super) trap: String,
    /// The design of the pool's locks, if not the default.
    pub(super) pool_design: Option<String>,
    pub(super) limit_bytes: u64,
    /// The folder and the size of the spill file, if there is one.
    pub(super) spill: Option<(PathBuf, u64)>,
}

impl PagerSettings {
    pub(super) fn new(trap: Trap, limit_bytes: u64) -> PagerSettings {
        PagerSettings { trap: trap.name().to_owned(), pool_design: None, limit_bytes, spill: None }
    }

    pub(super) fn build(&self) -> Result<Pager> {
        let mut builder = Pager::builder().limit(self.limit_bytes).trap(trap_named(&self.trap)?);
        if let Some(design) = &self.pool_design {
            builder = builder.pool_design(design.parse::<PoolDesign>()?);
        }
        if let Some((dir, bytes)) = &self.spill {
            builder = builder.spill(dir, *bytes);
        }
        builder.build()
    }
}

fn trap_named(name: &str) -> Result<Trap> {
    let found = Trap::ALL.into_iter().find(|trap| trap.name() == name);
    found.ok_or_else(|| Error::invalid(format!("there is no trap '{name}'")))
}
