//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod common;
mod ends;
mod signals;
mod system_calls;
mod unprivileged;
