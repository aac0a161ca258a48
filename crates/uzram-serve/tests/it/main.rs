//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

#[path = "../../../uzram/tests/it/allocations/mod.rs"]
mod allocations;
#[path = "../../../uzram/tests/it/alone.rs"]
mod alone;
mod attack_nbd;
mod attack_tls;
#[path = "../../../uzram/tests/it/calls.rs"]
mod calls;
mod common;
mod fuse_survival;
mod nbd_clients;
mod nbd_costs;
mod nbd_faults;
mod nbd_handshake;
mod nbd_hops;
mod nbd_memory;
mod nbd_requests;
mod nbd_server;
mod nbd_tls;
mod nbd_waiting;
mod own_devices;
