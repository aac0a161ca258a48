//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

mod attack_blocks;
mod attack_clients;
mod attack_files;
mod attribute_files;
mod clients;
mod commands;
mod common;
mod conditions;
mod confine;
mod container;
mod corpus;
mod daemon;
mod disk_end;
mod dist;
mod docs;
mod fd_store;
mod files;
mod json;
mod memory_cgroup;
mod mistakes;
mod network;
mod places;
mod pool;
mod programs;
#[cfg(feature = "remote")]
mod remote;
mod run;
mod run_faults;
mod run_files;
mod run_kinds;
mod survive;
mod swap;
mod train;
mod units;
mod work;
mod writeback;

#[path = "../../../uzram-serve/tests/it/common/mod.rs"]
#[allow(dead_code)]
mod nbd;
#[cfg(feature = "remote")]
#[path = "../../../uzram-remote/tests/it/common/mod.rs"]
#[allow(dead_code)]
mod servers;
