//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod common;
mod faults;
mod nodes;
mod redis;
mod s3;
