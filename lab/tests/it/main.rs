//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod commands;
#[path = "../../../bench/tests/it/common/mod.rs"]
#[allow(dead_code)]
mod common;
mod locks;
mod report;
