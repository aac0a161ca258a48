//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod block;
mod commands;
mod common;
mod pager;
mod run;
mod take_over;
