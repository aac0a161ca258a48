//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod commands;
#[path = "../../../bench/tests/it/common/mod.rs"]
#[allow(dead_code)]
mod common;
mod locks;
mod report;

use std::path::{Path, PathBuf};
use std::process::Command;

fn lab(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzram-lab"));
    command.args(args);
    command
}

/// Writes a small corpus, whose pages are all different; returns its path.
fn corpus(dir: &Path) -> PathBuf {
    let corpus = dir.join("pages");
    let pages: Vec<u8> = (0..256 << 12).map(|at| (at / 7) as u8).collect();
    std::fs::write(&corpus, pages).unwrap();
    corpus
}
