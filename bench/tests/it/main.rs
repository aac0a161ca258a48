//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod benchmarks;
mod commands;
mod common;
