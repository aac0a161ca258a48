//! Shared by the tests of the programs `uzram-bench` and `uzram-lab`: runs one until it exits.

#![allow(clippy::unwrap_used)]

#[path = "../../../../crates/uzram-cli/tests/it/common/ended.rs"]
mod ended;

pub use ended::*;

impl Ended {
    /// Returns its one-line error.
    pub fn complaint(&self, program: &str, code: i32) -> &str {
        self.complaint_of(program, code, |_| false)
    }
}
